"""The step a run was planned with, walked anew over lanes that answer with times, as `offloadz show` does.

`plan.json` keeps sums and no timeline, so the configuration is asked again with everything pinned that was decided.
The trade-off: the model's headers must still be where they were, and a box whose rates have changed gives other times;
both are said, and a run directory stays free of a file that would take megabytes for a large model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from offloadz.config import config_from_tables
from offloadz.plan.errors import ConfigError
from offloadz.plan.question import question
from offloadz.plan.timeline import Timeline

SAME = 0.01
"""How far apart, as a share, the times of the plan and of the walk may lie and still be called the same."""

DECIDED = ("slots", "sweeps", "commit", "zero_stage")


def simulated(tables: Mapping[str, Any], plan: Mapping[str, Any]) -> tuple[Timeline | None, str]:
    """The timeline of a steady step of `plan` (the object of plan.json), and what a reader must know about it."""
    try:
        config = config_from_tables(tables)
        offload = replace(config.offload, **plan["placement"], **{key: plan[key] for key in DECIDED})
        train = replace(config.train, micro_batch_size=plan["micro_batch_size"])
        asked = question(replace(config, offload=offload, train=train), sets=(f"ranks={plan['ranks']}",))
        answer = asked.answer()
        placement = replace(answer.placement, kept=plan["kept_graphs"], cheap=plan.get("kept_products", 0))
        found = asked.step_of(replace(answer, placement=placement))
    except (ConfigError, OSError, ArithmeticError, LookupError, TypeError, ValueError) as error:
        first = (str(error) or type(error).__name__).splitlines()[0]
        return None, f"The step of the plan cannot be simulated here: {first}"
    told_s = float(plan["step_s"])
    if abs(found.step_s - told_s) <= SAME * told_s:
        return found.timeline, (
            f"Simulated, by the same walk as in offloadz show. From step to step {found.step_s:.3g} s; what begins "
            "while the step before still computes stands at the left."
        )
    return found.timeline, (
        f"Simulated anew: {found.step_s:.3g} s, while the plan of the run said {told_s:.3g} s; rates, model or machine "
        "are others now."
    )
