"""Case G18, kind K18 (no trace), over time: what a run keeps does not grow with what it has done.

Evaluations number their calls on, so none repeats a program; batches get longer, so saved inputs need larger slots.
"""

from __future__ import annotations

import weakref
from pathlib import Path

import pytest
import torch
from tiny_models import batches, tiny

import offloadz
from offloadz.plan.errors import DoesNotFit
from offloadz.runtime import session


def disk_run(swap: Path) -> offloadz.Run:
    kinds = dict.fromkeys(("parameters", "gradients", "optimizer_state", "activations"), "disk")
    return offloadz.offload(
        tiny("llama"), offloadz.AdamW(lr=1e-3), swap=swap, micro_batch_size=2, max_length=4, **kinds
    )


def test_programs_of_past_evaluations_are_let_go(tmp_path: Path) -> None:
    batch = batches(1)[0]
    with disk_run(tmp_path) as run:
        run.step(batch)
        with torch.no_grad():
            for _ in range(2 * session.MAX_PROGRAMS):
                offloadz.token_logprobs(run, batch)
        assert len(run.session._programs) <= session.MAX_PROGRAMS


def test_slots_that_were_too_small_are_given_back(tmp_path: Path) -> None:
    with disk_run(tmp_path) as run:
        room, grown = run.session.room, []
        for mebibytes in (0, 2, 3, 5):
            run.session.fit_saved(mebibytes << 20)  # what a batch with longer rows asks for
            run.step(batches(1, length=8 + mebibytes)[0])
            if room.grown is not None:
                grown.append(weakref.ref(room.grown._area))
        alive = {id(area()) for area in grown if area() is not None}
        assert len({id(a) for a in grown}) > 1, "the batches never outgrew a pool that had grown"
        assert len(alive) == 1
        assert sum(name.startswith("host.x#") for name in room.slots) == room.placement.slots


def test_slots_that_are_refused_are_asked_for_again(swap: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller who goes on with shorter rows has slots for these, and the bits of a run that nobody refused."""

    def refuses(*how: object) -> None:
        raise DoesNotFit("no room")

    losses = []
    for refused in (0, 2):
        with disk_run(swap) as run:
            for _ in range(refused):
                with monkeypatch.context() as patch, pytest.raises(DoesNotFit, match="no room"):
                    patch.setattr(type(run.session.room), "_lay", refuses)
                    run.session.fit_saved(2 << 20)
            losses.append([float(run.step(batch)) for batch in batches(2)])
    assert losses[0] == losses[1]


@pytest.mark.parametrize("group", [{"match": ["*"], "lrr": 1.0}, {"lr": 1.0}])
def test_a_group_with_a_strange_key_is_refused(group: dict[str, object]) -> None:
    with pytest.raises(offloadz.ConfigError, match=r"lrr|no match"):
        offloadz.AdamW(groups=[group])
