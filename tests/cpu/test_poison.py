"""`poison` fills every slot with NaN before it is filled and delays every transfer at random: results stay (kind K12).

An edge missing from a program, a slot given away too early or a buffer read before its transfer shows as a NaN or as
another bit.  Many seeds, everything on disk, one to three slots.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from odd_models import odd_run
from tiny_models import FAMILIES, Outcome, assert_same_bits, batches, tiny, train

import offloadz

STEPS = batches(3)
KINDS = ("parameters", "gradients", "optimizer_state", "activations")


def ran(family: str, swap: Path, where: str = "disk", **how: object) -> Outcome:
    how = {"slots": 2, "micro_batch_size": 2, **dict.fromkeys(KINDS, where), **how}
    with offloadz.offload(tiny(family), offloadz.AdamW(lr=1e-3), swap=swap, **how) as run:
        out = train(run, STEPS)
        with torch.no_grad():
            out.losses.append(float(run.model(**STEPS[0]).loss))
    return out


@cache
def calm(family: str, dtype: torch.dtype) -> Outcome:
    return ran(family, Path("unused"), "host", dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_delays_and_poisoned_slots_change_nothing(family: str, slots: int, dtype: torch.dtype, swap: Path) -> None:
    for seed in range(2):
        how = {"sweeps": 1 + seed, "recompute": ("all", "none")[(seed + slots) % 2]}
        found = ran(family, swap, slots=slots, dtype=dtype, poison=True, seed=seed, **how)
        assert_same_bits(found, calm(family, dtype), f"slots {slots}, seed {seed}")


def test_poison_with_wrong_guesses(swap: Path) -> None:
    """A layer of odd steps only: plans are given up in mid-flight, with slots half filled."""
    assert_same_bits(odd_run(swap, poison=True), odd_run(swap))


def test_poison_reaches_the_slots(swap: Path) -> None:
    """With poison on, a slot that a transfer forgets to fill gives NaN: the check checks something."""
    how = dict.fromkeys(KINDS, "disk")
    with offloadz.offload(tiny("llama"), swap=swap, slots=2, poison=True, **how) as run:
        room = run.session.room
        read = room.drive.read
        room.drive.read = lambda extent, *rest: None if "layers.0" in extent.label else read(extent, *rest)  # type: ignore[method-assign]
        with torch.no_grad():
            loss = run.model(**STEPS[0]).loss
        room.drive.read = read  # type: ignore[method-assign]
        assert not torch.isfinite(loss)
