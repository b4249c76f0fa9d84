"""Updates are made ready once for each place that a part lies in, and forgotten with the memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_models import batches, tiny, train

import offloadz
from offloadz.runtime import ready
from offloadz.runtime.native import Update

STEPS = batches(6)


class Counted(Update):
    """An update that tells how often one was made ready."""

    made = 0

    def __init__(self, *tensors: Any, **how: Any) -> None:
        Counted.made += 1
        super().__init__(*tensors, **how)


@pytest.mark.parametrize("where", ["host", "disk"])
@pytest.mark.parametrize("commit", ["hold", "shadow"])
def test_an_update_is_made_ready_once_for_each_place(
    where: str, commit: str, swap: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ready, "Update", Counted)
    Counted.made = 0
    told: dict[str, Any] = {"swap": swap, "commit": commit, "max_grad_norm": 1e6, "slots": 2}
    told |= dict.fromkeys(("parameters", "gradients", "optimizer_state"), where)
    with offloadz.offload(tiny("llama"), offloadz.AdamW(lr=1e-3), **told) as run:
        train(run, STEPS[:3])
        run.flush()
        first, known = Counted.made, run.session.room.ready
        train(run, STEPS[3:])
        run.flush()
        assert 0 < first == Counted.made
        assert all(len(places) <= ready.PLACES for places in known.values())
    assert not known
