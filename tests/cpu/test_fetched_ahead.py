"""What was fetched for the first updates of a step is never used once what is at rest was changed or asked for.

Kind K10 (placement changes no bit): a run on disk, where parts wait in slots between steps, beside one in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import assert_same_bits, batches, tiny, train

import offloadz

KINDS = ("parameters", "gradients", "optimizer_state", "activations")
STEPS = batches(6)
Between = Callable[[offloadz.Run, Path], None]


def other_moments(run: offloadz.Run, path: Path) -> None:
    """The state of the optimizer doubled, by the way of torch."""
    told = run.optimizer.state_dict()
    for state in told["state"].values():
        state["exp_avg"] *= 2
    run.optimizer.load_state_dict(told)


def evaluated(run: offloadz.Run, path: Path) -> None:
    with torch.no_grad():
        run.model(input_ids=STEPS[0]["input_ids"])


def back_and_forth(run: offloadz.Run, path: Path) -> None:
    """A checkpoint, a step that is forgotten, and the checkpoint again."""
    where = run.save(path / f"saved{run.session.step}")
    run.step(STEPS[5])
    run.load(where)


@pytest.mark.parametrize("slots", [2, 3])
@pytest.mark.parametrize("between", [other_moments, evaluated, back_and_forth])
def test_the_bits_of_a_run_in_memory(between: Between, slots: int, swap: Path, tmp_path: Path) -> None:
    outcomes = []
    for where in ("host", "disk"):
        how = dict[str, Any](dict.fromkeys(KINDS, where), slots=slots, micro_batch_size=2)
        with offloadz.offload(tiny("qwen3"), offloadz.AdamW(lr=1e-3), swap=swap, **how) as run:
            for batch in STEPS[:2]:
                run.step(batch)
            assert (where == "disk") == any(op.phase == "ahead" for op in run.session.walk.program.ops)
            between(run, tmp_path / where)
            outcomes.append(train(run, STEPS[2:5]))
    assert_same_bits(outcomes[1], outcomes[0], between.__name__)
