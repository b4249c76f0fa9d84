"""Runs on two swap paths: the same bits as on one, links, kills, other orders, and a drive that is not there."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from shims import mounted
from test_kill import last_step, numbers, resumed_step
from test_linked import digest, same, tensors
from tiny import ON_DISK, tables, write_config
from torch import nn
from zygote import Child, Zygote

import offloadz
from offloadz.memory.record import read_saved
from offloadz.model import drives
from offloadz.model.export import export
from offloadz.model.manifest import read_manifest
from offloadz.model.run import Run
from offloadz.plan.errors import ConfigError, DiskFailed, DoesNotFit
from offloadz.runtime.transfer import Speed

PLACES = {"parameters": "disk", "gradients": "host", "optimizer_state": "disk", "activations": "host"}
WIDTH = 1300


class Wide(nn.Module):
    """State of 17 MB a block: shares on both paths; biases too small for that."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


@pytest.fixture(autouse=True)
def _speeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second path is twice as fast as the first."""
    speeds = {"a": Speed(1e9, 1e9, 1e9), "b": Speed(2e9, 2e9, 2e9)}
    monkeypatch.setattr(drives, "probe_speed", lambda path, *_: speeds.get(path.parent.name, speeds["a"]))


@contextmanager
def running(swap: Any, **how: Any) -> Iterator[Run]:
    torch.manual_seed(0)
    how = {"io": "threads", "dtype": torch.bfloat16, "micro_batch_size": 2, **PLACES, **how}
    with offloadz.offload(Wide(), offloadz.AdamW(lr=1e-3), swap=swap, **how) as run:
        yield run


def steps(run: Run, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last + 1):
        torch.manual_seed(step)
        x = torch.randn(2, WIDTH)
        losses.append(float(run.step({"x": x}, loss_fn=lambda m, b: m(b["x"]).square().mean())))
    run.flush()
    return losses


def test_two_paths_change_no_bit(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    with running(tmp_path / "one", copies=3) as run:
        losses = steps(run, 1, 2)
        linked, then = run.save(tmp_path / "linked"), [*steps(run, 3, 4), digest(run)]
        portable = run.save(tmp_path / "portable", portable=True)
    with running([a, b], copies=3) as run:
        held = [sum(path.stat().st_blocks for path in place.rglob("*.bin")) for place in (a, b)]
        assert run.session.room.drive.weights == (333, 667) and 0.25 < held[0] / sum(held) < 0.42
        assert steps(run, 1, 2) == losses
        striped = run.save(tmp_path / "striped")
        assert [*steps(run, 3, 4), digest(run)] == then
        assert same(tensors(run.save(tmp_path / "written", portable=True)), tensors(portable))
    assert not list(a.iterdir()) and not list(b.iterdir())
    assert list(striped.glob("optimizer@1.?.bin")) and same(tensors(striped), tensors(linked))
    for swap, saved, copies in (
        (tmp_path / "c", striped, 3),
        ([a, b], linked, 2),
        ([b, a, tmp_path / "c"], striped, 1),
    ):
        with running(swap, copies=copies) as run:
            run.load(saved)
            assert [*steps(run, 3, 4), digest(run)] == then
    for source, target in ((linked, "x"), (striped, "y")):
        export(source, tmp_path / target)
    assert (tmp_path / "x/model.safetensors").read_bytes() == (tmp_path / "y/model.safetensors").read_bytes()


def test_links_stop_at_the_border_of_a_file_system(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with mounted(tmp_path / "b", "size=400m") as other, running([tmp_path / "a", other / "b"], copies=3) as run:
        steps(run, 1, 1)
        assert "linked" not in read_manifest(run.save(tmp_path / "saved"))
        assert f"hard links from {run.session.room.drive.paths[1].path} to {tmp_path}: Invalid cross" in caplog.text


@pytest.mark.parametrize("full", [0, 1])
def test_a_full_drive_is_named_at_the_start(tmp_path: Path, full: int) -> None:
    with mounted(tmp_path / "small", "size=1m") as small:
        swap = [tmp_path / "a", tmp_path / "b"]
        swap[full] = small / "swap"
        with pytest.raises((DoesNotFit, DiskFailed), match=str(small)), running(swap, copies=2):
            pass
        assert not list((small / "swap").glob("*")) and not list(tmp_path.glob("[ab]/*"))


def test_a_small_drive_gets_what_it_has_room_for(tmp_path: Path) -> None:
    with mounted(tmp_path / "small", "size=32m") as small, running([tmp_path / "a", small / "b"], copies=2) as run:
        held = run.session.room.drive.weights[1] * run.plan.peak["disk"] // 1000
        assert 16 << 20 < held <= 24 << 20
        steps(run, 1, 1)


def test_one_directory_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "a")
    with pytest.raises(ConfigError, match=r"offload.swap: .*link is the same directory as .*a; name each once"):
        offloadz.offload(Wide(), swap=[tmp_path / "a", tmp_path / "link"], **PLACES)


# ---- offloadz train -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("paths")


def started(zygote: Zygote, folder: Path, output: str, *swap: str, overrides: tuple[str, ...] = ()) -> Child:
    config = folder / "run.toml"
    if not config.exists():
        write_config(config, tables(folder, train__steps=10, train__save_every=4, **ON_DISK))
    paths = ", ".join(f'"{folder / name}"' for name in swap)
    where = [f"train.output={folder / output}", f"offload.swap=[{paths}]"]
    return zygote.start(["train", str(config), *where, *overrides], folder / f"{output}.log")


@pytest.fixture(scope="module")
def whole(zygote: Zygote, folder: Path) -> Path:
    """The output of a run on one path."""
    child = started(zygote, folder, "whole", "one")
    assert child.wait() == 0, child.log.read_text()
    return folder / "whole"


def killed(zygote: Zygote, folder: Path, output: str, *swap: str) -> int:
    """The step that a run had told of when it was killed."""
    child = started(zygote, folder, output, *swap)
    child.until(lambda: last_step(folder / output) >= 6)
    child.kill(signal.SIGKILL)
    child.wait()
    return last_step(folder / output)


def ended(zygote: Zygote, folder: Path, output: str, *swap: str, status: int = 0, overrides: Any = ()) -> str:
    child = started(zygote, folder, output, *swap, overrides=overrides)
    assert child.wait() == status, child.log.read_text()
    return child.log.read_text()


@pytest.mark.parametrize("again", [("a", "b"), ("b", "a"), ("b",), ("a",), ("a", "b", "c")], ids="-".join)
def test_killed_and_gone_on(zygote: Zygote, folder: Path, whole: Path, again: tuple[str, ...]) -> None:
    """In place where the paths are the same in whatever order, over a checkpoint of links where they are others."""
    output = f"killed-{'-'.join(again)}"
    reached = killed(zygote, folder, output, "a", "b")
    states = list(folder.glob("[ab]/offloadz-*/state"))
    saved = [read_saved(state) for state in states if (state / "flip.bin").exists()]
    log = ended(zygote, folder, output, *again)
    assert resumed_step(log) >= reached - 1, log
    assert ("became" in log) == (len(again) != 2), log
    assert ("lie on one file system" in log) == (len(again) > 1), log
    if len(again) == 2:
        wanted = [f"{weight / 1000:.0%} of every extent" for weight in saved[0].weights]
        assert all(f"{place.parent}, {share}" in log for place, share in zip(saved[0].directories, wanted, strict=True))
    assert numbers(folder / output) == numbers(whole)
    final = "final/model.safetensors"
    assert (folder / output / final).read_bytes() == (whole / final).read_bytes()
    left = [path for name in ("a", "b", "c") for path in (folder / name).glob("*/state/*.bin")]
    assert not left or len(again) == 1, left
    for name in ("a", "b"):
        shutil.rmtree(folder / name)


def test_a_drive_that_is_not_there_is_asked_for(zygote: Zygote, folder: Path, whole: Path) -> None:
    reached = killed(zygote, folder, "missing", "x", "y")
    os.rename(folder / "y", folder / "unmounted")
    log = ended(zygote, folder, "missing", "x", "y", status=2)
    assert f"has a share in {folder / 'y'}/offloadz-" in log and "mount that drive" in log, log
    shutil.rmtree(folder / "y", ignore_errors=True)
    os.rename(folder / "unmounted", folder / "y")
    assert resumed_step(ended(zygote, folder, "missing", "x", "y")) >= reached - 1
    assert numbers(folder / "missing") == numbers(whole)


def test_the_plan_tells_the_room_of_each(zygote: Zygote, folder: Path, whole: Path) -> None:
    config = str(folder / "run.toml")
    paths = f'offload.swap=["{folder / "p"}", "{folder / "q"}"]'
    child = zygote.start(["plan", config, paths], folder / "plan.log")
    assert child.wait() == 0, child.log.read_text()
    log = child.log.read_text()
    assert f"{folder / 'p'} has room for" in log and f"{folder / 'q'} has room for" in log and "by its speed" in log
    assert f"{folder / 'q'} and {folder / 'p'} lie on one file system" in log
    child = zygote.start(["plan", config, f'offload.swap=["{folder}", "{folder}"]'], folder / "twice.log")
    assert child.wait() == 2 and "name each once" in child.log.read_text()
