"""The plan held to its own run: what is off, which lane was mis-rated, and what that means for the steps that are left.

Looks once, after `CHECKED_STEPS` steps of a start; what counts as off is `plan/verdict.py`'s.  The answer is said, and
stands in `plan.json` beside what was predicted.  The trade-off: a run that slows down later is not told again; the time
left beside each step follows, and `offloadz report` compares all steps.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from offloadz.model.aside import write_text
from offloadz.plan.answer import Plan
from offloadz.plan.machine import UNVERIFIED
from offloadz.plan.verdict import Compared, Verdict, verdict
from offloadz.plan.words import difference, human, lasting
from offloadz.train.progress import duration

CHECKED_STEPS = 20


class PlanCheck:
    """The lines of a start's first steps.

    `path`: the run's plan.json, None where another rank writes it.  `num_steps`: those of the whole run.
    """

    def __init__(self, plan: Plan, path: Path | None, num_steps: int) -> None:
        self._plan, self._path, self._num_steps = plan.to_json(), path, num_steps
        self._lines: list[Mapping[str, Any]] = []

    def add(self, line: Mapping[str, Any]) -> list[str]:
        """A decided step; what there is to say, once."""
        if len(self._lines) >= CHECKED_STEPS:
            return []
        self._lines.append(line)
        if len(self._lines) < CHECKED_STEPS:
            return []
        found = verdict(self._plan, self._lines)
        if found is None:
            return []
        left_s = (self._num_steps - line["step"]) * found.step.measured
        document = self._plan | {"measured": told(found, line["step"], left_s)}
        if self._path is not None:
            write_text(self._path, json.dumps(document, indent=1) + "\n")
        return list(lines(found, left_s, self._plan))


def told(found: Verdict, step: int, left_s: float) -> dict[str, Any]:
    """What plan.json says under `measured`, beside its predictions."""
    every = (found.step, found.tokens, *found.figures, *found.lanes)
    return {
        "at_step": step,
        "num_steps": found.num_steps,
        "step_s": found.step.measured,
        "left_s": left_s,
        "busy_s": {lane.name: lane.measured for lane in found.lanes},
        "figures": {one.name: one.measured for one in found.figures},
        "off": [one.name for one in every if one.off],
        "misrated": found.misrated.name if found.misrated else None,
    }


def lines(found: Verdict, left_s: float, plan: Mapping[str, Any]) -> Iterator[str]:
    """The same in words."""
    memory = [one for one in found.figures if one.name == "host memory"]
    parts = [f"a step takes {beside(found.step)}", *(f"memory is {beside(one)}" for one in memory)]
    off = found.step.off or any(one.off for one in memory)
    yield f"plan: {'off' if off else 'right'} so far: {', '.join(parts)}; {duration(left_s)} left at this pace"
    if found.tokens.off:
        yield f"plan: a step has {found.tokens.measured:,.0f} tokens, it counted {found.tokens.predicted:,.0f}"
    if found.misrated is not None:
        yield f"plan: mis-rated is {found.misrated.name}: busy {beside(found.misrated)} of a step"
    if found.step.off and str(plan["rates_source"]).startswith(UNVERIFIED):
        yield "plan: its rates were typical ones; `offloadz bench --swap DIR` measures this machine for the next run"


def beside(one: Compared) -> str:
    """Measured and predicted, with how far off it is where that is much."""
    much = f", {difference(one.ratio, one.unit)}" if one.off and one.ratio is not None else ""
    return f"{amount(one.measured, one.unit)} ({amount(one.predicted, one.unit)} planned{much})"


def amount(value: float, unit: str) -> str:
    """Bytes, or seconds."""
    return human(int(value)) if unit == "bytes" else lasting(value)
