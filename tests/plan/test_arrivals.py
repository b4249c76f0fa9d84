"""Updates that come with their gradients are submitted with the computation that ended the gradient.

A walk may be given up wherever the model's code runs, as by an evaluation in a hook, and only due updates are finished
then.  So between a drained gradient and the unit's last update no other computation may stand: the update would be lost
and counted as done.
"""

from __future__ import annotations

from itertools import product

import pytest
from programs import small_spec

from offloadz.plan.footprint import Batch
from offloadz.plan.ops import Program
from offloadz.plan.placement import Placement
from offloadz.plan.predict import step_program
from offloadz.plan.steps import CLOSING

TIERS = ("device", "host", "disk")


def late(program: Program) -> list[str]:
    """Ops of updates on arrival behind another computation than the one that ended their gradient."""
    at, ended, found = 0, {}, []
    for op in program.ops:
        at += op.lane == "device"
        if op.verb in CLOSING:
            ended[op.unit] = at
        elif op.phase == "arrival" and at > ended.get(op.unit, at):
            found.append(op.text())
    return found


@pytest.mark.parametrize("commit", ("shadow", "in_place"))
@pytest.mark.parametrize("unified", (True, False))
def test_nothing_is_computed_between_a_gradient_and_its_update(unified: bool, commit: str) -> None:
    for index, (weights, others, slots) in enumerate(product(TIERS, TIERS, (1, 2))):
        placement = Placement(
            weights, others, others, others, slots, unified=unified, commit=commit, copies=2, kept=index % 3,
            accumulate=index % 2 > 0,
        )  # fmt: skip
        batch = Batch(6, 16, 1 + index % 3, sweeps=1 + index % 2)
        program = step_program(small_spec(tied=index % 4 > 1), placement, batch)
        assert any(op.phase == "arrival" for op in program.ops)
        assert not late(program), (placement, late(program)[:3])
