"""Updates as gradients come (`commit` = "shadow" and "in_place") over several ranks: the bits of updates that wait.

What one process takes or leaves as a whole, all ranks take or leave alike: a step that is clipped, a parameter that
only some of them have met.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from group import Nursery
from tiny_models import batches, tiny, train

import offloadz

DISK = dict.fromkeys(("parameters", "gradients", "optimizer_state", "activations"), "disk")
WEIGHTS, STATE = {"parameters": "disk"}, {"optimizer_state": "disk", "gradients": "disk"}


@cache
def middle_norm() -> float:
    """A limit that some steps come to and others do not."""
    with offloadz.offload(tiny("llama"), offloadz.AdamW(lr=1e-3), max_grad_norm=0) as run:
        return sorted(train(run, batches(4)).norms)[2] * 0.999


def told(outs: list[dict[str, Any]]) -> tuple[Any, ...]:
    return outs[0]["losses"], outs[0]["norms"], [out["weights"] for out in outs]


def assert_alike(found: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    """Rank by rank, bit by bit; what a rank does not have of a tensor is NaN."""
    assert told(found)[:2] == told(wanted)[:2]
    for one, other in zip(told(found)[2], told(wanted)[2], strict=True):
        assert one.keys() == other.keys()
        assert not [name for name in one if not torch.equal(one[name].nan_to_num(7.0), other[name].nan_to_num(7.0))]


CASES = [
    (2, 0, "shadow", DISK), (2, 1, "shadow", {}), (2, 1, "shadow", WEIGHTS), (3, 2, "shadow", DISK),
    (2, 2, "shadow", STATE), (2, 3, "shadow", DISK), (2, 3, "shadow", {}), (2, 1, "in_place", {}),
    (2, 2, "in_place", DISK), (3, 3, "in_place", DISK),
]  # fmt: skip
"""Ranks, stage, way of committing, and where things are."""


@pytest.mark.parametrize(("ranks", "stage", "commit", "where"), CASES, ids=str)
def test_ranks_have_the_bits_of_hold(
    nursery: Nursery, tmp_path: Path, swap: Path, ranks: int, stage: int, commit: str, where: dict[str, str]
) -> None:
    """Some of the steps are clipped, where that can be; parts of a unit are frozen."""
    how = {"zero_stage": stage, "steps": 4, "freeze": ["*.input_layernorm.*"], "swap": str(swap)}
    how |= {"max_grad_norm": middle_norm() if commit == "shadow" else 0}
    held = nursery.run(ranks, "train", tmp_path / "held", commit="hold", **how)
    if commit == "shadow":
        assert len({norm > how["max_grad_norm"] for norm in held[0]["norms"]}) == 2
    assert_alike(nursery.run(ranks, "train", tmp_path / commit, commit=commit, poison=True, **how, **where), held)


@pytest.mark.parametrize("stage", (0, 1, 3))
def test_what_only_one_rank_has_met_is_updated_on_all(nursery: Nursery, tmp_path: Path, stage: int) -> None:
    """An expert without rows on rank 1, whose shards of it that rank updates all the same."""
    how = {"zero_stage": stage, "max_grad_norm": 0}
    held = nursery.run(2, "rank_trials.experts", tmp_path / "held", commit="hold", **how)
    assert held[1]["steps"]["blocks.1.expert.weight"] == 3
    for commit in ("shadow", "in_place"):
        found = nursery.run(2, "rank_trials.experts", tmp_path / commit, commit=commit, **how)
        assert_alike(found, held)
        assert [out["steps"] for out in found] == [out["steps"] for out in held]
