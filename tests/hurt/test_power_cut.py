"""A power cut at any moment of a run with state on disk, 240 times: always the whole state of one step.  Kind K14.

A tiny real run is recorded (`power.py`): its stores, flips, linked checkpoints and their removal.  Of each thing that a
cut may leave, the flipped state must be that of a whole step, no older than the last flip that had ended, and a
checkpoint that is taken for valid must be.
"""

from __future__ import annotations

import hashlib
import random
import shutil
from pathlib import Path

import pytest
import torch
from power import Recorder
from test_run_io import Odd

import offloadz
from offloadz.memory.record import read_saved
from offloadz.memory.shadow import Shadow
from offloadz.model.linked import SavedState
from offloadz.runtime.transfer import NativeTransfer
from offloadz.train.checkpoint import newest_valid, save_checkpoint

STEPS, CUTS = 7, 240
LIMIT = 0.043
"""In the midst of the norms that are met, 0.038 to 0.062."""


def digest(directory: Path) -> str:
    """All masters and moments of saved state, each byte compared with its checksum on the way."""
    found = hashlib.sha256()
    with SavedState(directory) as state:
        for reader in (state.weights, state.moments):
            for name in reader.entries:
                found.update(reader.read(name).numpy().tobytes())
    return found.hexdigest()


class Recorded:
    """The record of a run, and what its state was behind each step."""

    def __init__(self, folder: Path, **how: object) -> None:
        self.root, self.expected, self.how = folder / "drive", {}, how
        self.root.mkdir()
        self.recorder = Recorder(self.root, skip=("scratch",))
        with pytest.MonkeyPatch.context() as patch:
            self._patch(patch)
            with self.recorder:
                self._run()

    def _patch(self, patch: pytest.MonkeyPatch) -> None:
        flip, write, recorder = Shadow.flip, NativeTransfer.write, self.recorder

        def flipped(shadow: Shadow, note: dict[str, object]) -> None:
            flip(shadow, note)
            self.expected[note["step"]] = digest(shadow.path / "state")
            recorder.mark("flip", int(note["step"]))  # type: ignore[call-overload]

        def written(transfer: NativeTransfer, *args: object) -> None:
            write(transfer, *args)  # type: ignore[arg-type]
            recorder.look()

        patch.setattr(Shadow, "flip", flipped)
        patch.setattr(NativeTransfer, "write", written)

    def _run(self) -> None:
        torch.manual_seed(0)
        places = dict.fromkeys(("parameters", "optimizer_state"), "disk") | {"gradients": "host", "activations": "host"}
        with offloadz.offload(
            Odd(), offloadz.AdamW(lr=1e-2), swap=self.root / "swap", output=self.root / "out", io="threads", copies=3,
            dtype=torch.bfloat16, micro_batch_size=2, **places, **self.how,
        ) as run:  # fmt: skip
            for step in range(1, STEPS + 1):
                run.step({"x": torch.randn(4, 37)}, loss_fn=lambda m, b: m(b["x"]).square().mean())
                if step % 2 == 0:
                    run.flush()
                    save_checkpoint(self.root / "out" / "checkpoints", run, {"step": step}, keep=1)
                    self.recorder.mark("checkpoint", step)
            run.flush()
            self.recorder.mark("end", STEPS)

    def promised(self, what: str, moment: int) -> int:
        return max((step for at, kind, step in self.recorder.marks if kind == what and at <= moment), default=0)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    return Recorded(tmp_path_factory.mktemp("power"))


def test_a_whole_step_is_left_by_every_cut(recorded: Recorded, tmp_path: Path) -> None:
    cut_often(recorded, tmp_path, CUTS)


def test_updates_beside_what_is_valid_leave_it_whole(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    """`commit = "shadow"`, some steps clipped: what is written before a step is decided is never taken for it."""
    cut_often(Recorded(tmp_path_factory.mktemp("shadow"), commit="shadow", max_grad_norm=LIMIT), tmp_path, CUTS // 3)


def cut_often(recorded: Recorded, tmp_path: Path, cuts: int) -> None:
    draw, end = random.Random(11), next(at for at, what, _ in recorded.recorder.marks if what == "end")
    flips, checkpoints = set(), set()
    for number in range(cuts):
        moment = draw.randint(2, end)
        root = recorded.recorder.cut(moment, draw, tmp_path / str(number))
        flips.add(flip_left(recorded, root, moment))
        checkpoints.add(checkpoint_left(recorded, root, moment))
        shutil.rmtree(root)
    assert len(flips) > 4 and checkpoints == {0, 2, 4, 6}


def flip_left(recorded: Recorded, root: Path, moment: int) -> int:
    """The step of the state on disk after a cut, 0 for none; it is whole, and as new as was promised."""
    promised = recorded.promised("flip", moment)
    states = list(root.glob("swap/offloadz-*/state/flip.bin"))
    if not states:
        assert promised == 0, f"no flip at {moment}, step {promised} had ended"
        return 0
    step = int(read_saved(states[0].parent).record.note["step"])
    assert step >= promised and digest(states[0].parent) == recorded.expected[step], (moment, step, promised)
    return step


def checkpoint_left(recorded: Recorded, root: Path, moment: int) -> int:
    """The step of the newest checkpoint that is taken for valid after a cut, and is."""
    promised = recorded.promised("checkpoint", moment)
    path, _ = newest_valid(root / "out" / "checkpoints")
    if path is None:
        assert promised == 0, f"no checkpoint at {moment}, step {promised} had been saved"
        return 0
    step = int(path.name[5:])
    assert step >= promised and digest(path) == recorded.expected[step], (moment, step, promised)
    return step
