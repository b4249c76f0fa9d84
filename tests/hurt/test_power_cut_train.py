"""Power cuts of a whole `offloadz train`, and the same command afterwards: it ends as if nothing had been.  Kind K14.

A run of the command is recorded from end to end (`power.py`: checkpoints, flips, metrics, the export), on one path by
threads, with updates that wait and with updates beside what is valid, and on two by io_uring.  What a cut may leave is
laid where the run was, and the real command goes on from it: no older than what was promised, each step once in the
metrics, the same weights.  A few cuts by default, 240 of each with `-m full`.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from power import Recorder
from test_kill import numbers, resumed_step
from tiny import ON_DISK, tables, write_config
from zygote import Zygote

from offloadz.config import load_config
from offloadz.memory.shadow import Shadow
from offloadz.plan.errors import ConfigError
from offloadz.runtime.transfer import NativeTransfer, choose_transfer
from offloadz.train import loop

STEPS, FEW, ALL = 5, 3, 240
LIMIT = 1.2
"""In the midst of the norms that are met, 1.03 to 1.37."""


class Recorded:
    """The record of a run of the command, and what it came to."""

    def __init__(self, folder: Path, io: str, swap: tuple[str, ...], commit: str) -> None:
        self.root, self.folder = folder / "drive", folder
        changes: dict[str, Any] = {
            "train__output": str(self.root / "out"), "train__steps": STEPS, "train__save_every": 2, "offload__io": io,
            "offload__swap": [str(self.root / name) for name in swap], "offload__commit": commit,
            "optimizer__max_grad_norm": LIMIT, **ON_DISK,
        }  # fmt: skip
        self.config = write_config(folder / "run.toml", tables(folder, **changes))
        self.root.mkdir()
        self.recorder = Recorder(self.root, skip=("scratch", "tensorboard"))
        with pytest.MonkeyPatch.context() as patch:
            self._patch(patch)
            with self.recorder:
                assert loop.train(load_config(self.config)) == 0
        self.numbers = numbers(self.root / "out")
        self.final = (self.root / "out/final/model.safetensors").read_bytes()
        self.recorder.root = self.root.rename(folder / "kept")

    def _patch(self, patch: pytest.MonkeyPatch) -> None:
        flip, write, recorder = Shadow.flip, NativeTransfer.write, self.recorder

        def flipped(shadow: Shadow, note: dict[str, Any]) -> None:
            flip(shadow, note)
            recorder.mark("flip", int(note["step"]))

        def written(transfer: NativeTransfer, *args: Any) -> None:
            write(transfer, *args)
            recorder.look()

        patch.setattr(Shadow, "flip", flipped)
        patch.setattr(NativeTransfer, "write", written)

    def go_on(self, zygote: Zygote, draw: random.Random, part: int = 0, parts: int = 1) -> int:
        """Cut within one of `parts` equal parts, go on, compare; the step that was gone on from."""
        moment = 2 + int((part + draw.random()) / parts * (self.recorder.now - 2))
        promised = max((step for at, _, step in self.recorder.marks if at <= moment), default=0)
        self.recorder.cut(moment, draw, self.root)
        child = zygote.start(["train", str(self.config)], self.folder / "log")
        status, log = child.wait(), child.log.read_text()
        finished = "this run is finished" in log
        assert status == 0 and (finished or resumed_step(log) >= promised), (moment, promised, log)
        assert (self.root / "out/final/model.safetensors").read_bytes() == self.final, (moment, log)
        assert numbers(self.root / "out") == self.numbers, (moment, log)
        shutil.rmtree(self.root)
        return STEPS if finished else resumed_step(log)


KINDS = {
    "threads": ("threads", ("swap",), "hold"),
    "io_uring": ("io_uring", ("a", "b"), "hold"),
    "shadow": ("threads", ("swap",), "shadow"),
}


@pytest.fixture(scope="module", params=KINDS.values(), ids=KINDS)
def recorded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    folder, (io, swap, commit) = tmp_path_factory.mktemp("cut"), request.param
    try:
        choose_transfer(folder, True, io).close()
    except ConfigError as error:
        pytest.skip(str(error))
    return Recorded(folder, io, swap, commit)


def test_the_command_goes_on_after_a_cut(recorded: Recorded, zygote: Zygote) -> None:
    draw = random.Random(5)
    assert len({recorded.go_on(zygote, draw, part, FEW) for part in range(FEW)}) > 1


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_the_command_goes_on_after_many_cuts(recorded: Recorded, zygote: Zygote) -> None:
    draw = random.Random(6)
    assert {recorded.go_on(zygote, draw) for _ in range(ALL)} >= set(range(1, STEPS))
