"""State in copies at the level of a run: the same bits, linked checkpoints, and drives that fail.  Kinds K04, K14.

Cases G04 and G14 in part: nothing is left behind, and whatever happens a flip or a checkpoint is valid.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from shims import mounted
from test_run_io import Odd

import offloadz
from offloadz.model.aside import clean_leftovers
from offloadz.model.linked import SavedState, open_tensors
from offloadz.model.manifest import read_manifest, verify
from offloadz.model.run import Run
from offloadz.plan.errors import DamagedState, DiskFailed, DoesNotFit, UpdateFailed

ON_DISK = dict.fromkeys(("parameters", "gradients", "optimizer_state", "activations"), "disk")
MIXED = {"parameters": "disk", "gradients": "host", "optimizer_state": "disk", "activations": "host"}
IN_MEMORY = dict.fromkeys(ON_DISK, "host")


@contextmanager
def running(swap: Path, places: dict[str, str] = MIXED, state: str = "fp32", **how: Any) -> Iterator[Run]:
    torch.manual_seed(0)
    how = {"io": "threads", "dtype": torch.bfloat16, "micro_batch_size": 2, **how}
    with offloadz.offload(Odd(), offloadz.AdamW(lr=1e-2, state=state), swap=swap, **places, **how) as run:
        yield run


def steps(run: Run, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last + 1):
        torch.manual_seed(step)
        losses.append(float(run.step({"x": torch.randn(4, 37)}, loss_fn=lambda m, b: m(b["x"]).square().mean())))
    run.flush()
    return losses


def digest(run: Run) -> str:
    found = hashlib.sha256()
    for view in run.session.parts():
        for tensor in (view.weight, view.low, *view.moments.values()):
            found.update(b"" if tensor is None else tensor.view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def tensors(path: Path) -> dict[str, torch.Tensor]:
    told = read_manifest(path)
    verify(path, told)
    with open_tensors(path, told) as both:
        return {name: reader.read(name) for reader in both for name in reader.entries}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("state", ["fp32", "int8"])
def test_copies_change_no_bit(tmp_path: Path, state: str) -> None:
    found = set()
    for number, (places, copies) in enumerate([(IN_MEMORY, 1), (ON_DISK, 1), (ON_DISK, 2), (MIXED, 3)]):
        with running(tmp_path / str(number), places, state, copies=copies) as run:
            found.add((*steps(run, 1, 4), digest(run)))
    assert len(found) == 1


def test_a_linked_checkpoint_is_read_by_every_placement_and_recipe(tmp_path: Path) -> None:
    with running(tmp_path / "a", copies=3) as run:
        steps(run, 1, 3)
        path = run.save(tmp_path / "saved")
        wanted, then = digest(run), [*steps(run, 4, 6), digest(run)]
        portable = run.save(tmp_path / "portable", portable=True)
        run.load(path)
        assert digest(run) == wanted and run.session.step == 3
    assert list(path.glob("weights.?.bin")) and not list(path.glob("weights.safetensors"))
    assert not list((tmp_path / "a").iterdir())  # the run has ended, and its directory is gone
    for number, (places, copies) in enumerate([(IN_MEMORY, 1), (ON_DISK, 1), (ON_DISK, 3)]):
        with running(tmp_path / f"b{number}", places, copies=copies) as run:
            run.load(path)
            assert digest(run) == wanted
            assert [*steps(run, 4, 6), digest(run)] == then
            assert same(tensors(run.save(tmp_path / f"again{number}")), tensors(portable))
    with running(tmp_path / "c", state="int8", copies=2) as run:
        run.load(path)
        masters = tensors(run.save(tmp_path / "int8"))
    held = tensors(path)
    assert all(torch.equal(held[n], masters[n]) for n in held if "exp_avg" not in n)


@pytest.mark.parametrize("state", ["fp32", "bf16", "int8", "int8-sr"])
def test_linked_and_portable_say_the_same(tmp_path: Path, state: str) -> None:
    with running(tmp_path / "swap", state=state, copies=4) as run:
        steps(run, 1, 2)
        linked, portable = run.save(tmp_path / "a"), run.save(tmp_path / "b", portable=True)
        assert "linked" in read_manifest(linked) and "linked" not in read_manifest(portable)
        a, b = tensors(linked), tensors(portable)
        assert same(a, b)
        offloadz_files = [run.export(tmp_path / "final"), tmp_path / "from"]
    from offloadz.model.export import export

    export(linked, offloadz_files[1])
    assert (offloadz_files[0] / "model.safetensors").read_bytes() == (
        offloadz_files[1] / "model.safetensors"
    ).read_bytes()


def test_where_no_copy_is_left_it_is_written_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with running(tmp_path / "swap", copies=3) as run:
        steps(run, 1, 1)
        first, second = run.save(tmp_path / "1"), run.save(tmp_path / "2")
        assert ["linked" in read_manifest(path) for path in (first, second)] == [True, False]
        assert same(tensors(first), tensors(second))
        shutil.rmtree(first)
        steps(run, 2, 2)
        assert "linked" in read_manifest(run.save(tmp_path / "3"))
        wanted = tensors(tmp_path / "3")
        shutil.rmtree(tmp_path / "3")
        with mounted(tmp_path / "other", "size=128m") as other:  # no links from one file system to another
            assert "linked" not in read_manifest(run.save(other / "4"))
            assert "cross-device" in caplog.text and same(tensors(other / "4"), wanted)


def flipped(run: Run) -> tuple[int, dict[str, torch.Tensor]]:
    """Step and tensors of the state that a kill would leave."""
    directory = run.session.room.drive.path / "state"
    with SavedState(directory) as state:
        state.verify()
        found = {n: r.read(n) for r in (state.weights, state.moments) for n in r.entries}
        return state.saved.record.note["step"], found


def failing(name: str, number: int, after: int, times: int = 1 << 30) -> Callable[..., Any]:
    """The real call, but with this error so many `times` from the `after`-th on."""
    real, calls = getattr(os, name), []

    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if after < len(calls) <= after + times:
            raise OSError(number, os.strerror(number))
        return real(*args, **kwargs)

    return call


@pytest.mark.parametrize(
    ("name", "number"),
    [("fdatasync", errno.EIO), ("fsync", errno.EIO), ("write", errno.ENOSPC), ("rename", errno.EIO)],
)
@pytest.mark.parametrize("after", [0, 1, 3])
def test_a_flip_that_fails_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, number: int, after: int
) -> None:
    with running(tmp_path / "swap", copies=3) as run:
        steps(run, 1, 2)
        saved = run.save(tmp_path / "saved")
        before, kept = flipped(run), tensors(saved)
        with monkeypatch.context() as patch:
            patch.setattr(os, name, failing(name, number, after))
            with pytest.raises((UpdateFailed, DiskFailed)) as caught:
                steps(run, 3, 9)
        assert os.strerror(number) in str(caught.value) and "flip" in str(caught.value), str(caught.value)
        step, state = flipped(run)
        assert step >= before[0] and (step > before[0] or same(state, before[1]))
        assert same(tensors(saved), kept)


@pytest.mark.parametrize("times", [1, 99])
@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_checkpoint_that_is_not_replaced_stays_valid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int, times: int
) -> None:
    """Whichever rename fails, the steps behind it write to copies that it does not hold."""
    with running(tmp_path / "swap", copies=3) as run:
        steps(run, 1, 1)
        kept = tensors(saved := run.save(tmp_path / "saved"))
        steps(run, 2, 2)
        with monkeypatch.context() as patch, pytest.raises(OSError, match=os.strerror(errno.EIO)):
            patch.setattr(os, "rename", failing("rename", errno.EIO, after, times))
            run.save(saved)
        steps(run, 3, 6)
        if times > 1:  # what was moved aside could not be put back at once
            clean_leftovers(tmp_path, "saved")
        assert same(tensors(saved), kept)
        assert "linked" in read_manifest(run.save(saved)) and same(tensors(saved), flipped(run)[1])


@pytest.mark.parametrize("share", [0.3, 0.7, 0.99])
def test_a_drive_too_small_is_refused_at_the_start(tmp_path: Path, share: float) -> None:
    with running(tmp_path / "swap", copies=3) as run:
        state = run.session.room.drive.path / "state"
        needed = sum(path.stat().st_blocks * 512 for path in state.glob("*.bin"))
    size = int(needed * share)
    with (
        mounted(tmp_path / "small", f"size={size - size % 4096}") as small,
        pytest.raises((DoesNotFit, DiskFailed), match=r"offload.swap has|are free"),
        running(small / "swap", copies=3),
    ):
        pass


@pytest.mark.parametrize("after", [1, 4, 7])
def test_a_drive_that_fills_up_under_the_run(tmp_path: Path, after: int) -> None:
    """Everything large was reserved; what a flip writes besides is not there any more."""
    with mounted(tmp_path / "drive", "size=8m") as drive, running(drive / "swap", copies=3) as run:
        steps(run, 1, after)
        with open(drive / "others", "wb", buffering=0) as others:
            for size in (1 << 16, 4096, 1):
                try:
                    while others.write(b"x" * size):
                        pass
                except OSError as error:
                    assert error.errno == errno.ENOSPC
        with pytest.raises((UpdateFailed, DiskFailed), match="No space left"):
            steps(run, after + 1, after + 3)
        assert flipped(run)[0] == after
        (drive / "others").unlink()


def test_a_flipped_bit_is_named_and_not_gone_on_from(tmp_path: Path) -> None:
    with running(tmp_path / "swap", copies=2) as run:
        steps(run, 1, 2)
        shadow = run.session.room.drive.shadow
        assert shadow is not None
        shadow.keeps = shadow.worth_keeping = True
        extent = next(e for e in shadow.copies.extents if e.label.startswith("optimizer/"))
        stem = Path(extent.file).stem
        path = shadow.path / "state" / f"{stem}.{shadow.copies.newest(extent)}.bin"
        with path.open("r+b") as file:
            file.seek(extent.offset + 7)
            file.write(b"\x5a")
        with pytest.raises((DamagedState, UpdateFailed), match=r"optimizer/.*damaged at byte"):
            steps(run, 3, 4)
    assert not list((tmp_path / "swap").iterdir())


def test_descriptors_and_threads_are_back(tmp_path: Path) -> None:
    def once(number: int) -> None:
        with running(tmp_path / "swap", copies=3) as run:
            steps(run, 1, 2)
            run.save(tmp_path / f"saved{number}")

    once(0)
    before = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
    for number in range(1, 4):
        once(number)
    assert (len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))) == before
