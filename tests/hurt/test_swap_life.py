"""Case G04, kind K04: the life of the swap directory, with real processes that end well, badly, or by kill -9."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from shims import command, environment, main, run_file

from offloadz.memory import swapdir
from offloadz.memory.disk import DiskTier
from offloadz.memory.host import HostPool
from offloadz.memory.swapdir import SwapDir, leftovers, owner_name
from offloadz.plan.errors import ConfigError
from offloadz.runtime.transfer import ThreadTransfer

STATE_BYTES = 3 << 20


def _tier(directory: Path, owner: str) -> DiskTier:
    tier = DiskTier(directory, ThreadTransfer(2), owner=owner)
    extents = [tier.reserve("state", f"weights/{name}", STATE_BYTES // 3) for name in ("a", "b", "c")]
    scratch = tier.reserve("scratch", "gradients/a", 4096)
    tier.allocate()
    pool = HostPool(STATE_BYTES)
    buffer = pool.take("buffer", STATE_BYTES)
    for extent in [*extents, scratch]:
        buffer.fill_(1)
        tier.write(extent, buffer)
    del buffer
    pool.close()
    return tier


def run_well(directory: Path) -> dict[str, object]:
    """A run that ends as it should; what lay on the drive while it ran."""
    tier = _tier(directory, "run")
    files = sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))
    modes = {oct(stat.S_IMODE(path.stat().st_mode)) for path in tier.path.rglob("*") if path.is_file()}
    tier.close()
    return {"files": files, "modes": sorted(modes), "notes": tier.notes}


def run_into_error(directory: Path) -> None:
    """A run that dies of an exception nobody catches, its tier never closed."""
    tier = _tier(directory, "run")
    raise RuntimeError(f"the model was wrong, {tier.path}")


def run_and_exit(directory: Path) -> None:
    """A run that leaves by sys.exit without closing."""
    tier = _tier(directory, "run")
    sys.exit(0 if tier.path.exists() else 5)


def run_and_fork(directory: Path) -> bool:
    """A forked child that ends in the ordinary way must not take the parent's directory with it."""
    tier = _tier(directory, "run")
    child = os.fork()
    if child == 0:
        tier.close()
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0
    kept = (tier.path / "state/weights.bin").stat().st_size == STATE_BYTES
    tier.close()
    return kept


def run_until_killed(directory: Path) -> None:
    """A run with state on disk that waits for its end."""
    tier = _tier(directory, sys.argv[3] if len(sys.argv) > 3 else "run")
    print(json.dumps(str(tier.path)), flush=True)
    time.sleep(120)


@contextmanager
def _running(directory: Path, owner: str) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    child = subprocess.Popen(
        [*command(__file__, "run_until_killed", directory), owner],
        env=environment(directory, shim=False),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout is not None
        yield child, Path(json.loads(child.stdout.readline()))
    finally:
        child.kill()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()


def _disk_bytes(directory: Path) -> int:
    return sum(path.lstat().st_blocks * 512 for path in directory.rglob("*") if path.is_file())


def test_three_runs_leave_nothing_and_use_the_same_names(tmp_path: Path) -> None:
    runs = []
    for _ in range(3):
        runs.append(run_well(tmp_path))
        assert os.listdir(tmp_path) == []
    assert runs[0] == runs[1] == runs[2]
    private = Path(str(runs[0]["files"][0]))  # type: ignore[index]
    assert runs[0]["files"] == [
        str(private / name) if name else str(private)
        for name in ("", "owner.json", "scratch", "scratch/gradients.bin", "state", "state/weights.bin")
    ]
    assert runs[0]["modes"] == ["0o600"] and runs[0]["notes"] == []


@pytest.mark.parametrize(("name", "status"), [("run_into_error", 1), ("run_and_exit", 0)])
def test_nothing_is_left_by_a_run_that_does_not_close(tmp_path: Path, name: str, status: int) -> None:
    answer = subprocess.run(command(__file__, name, tmp_path), env=environment(tmp_path, shim=False), check=False)
    assert answer.returncode == status
    assert os.listdir(tmp_path) == []


def test_a_forked_child_does_not_remove_its_parents_state(tmp_path: Path) -> None:
    assert run_file(__file__, "run_and_fork", tmp_path, shim=False) is True
    assert os.listdir(tmp_path) == []


def test_live_run_is_refused_then_killed_reported_and_removed_only_when_told(tmp_path: Path) -> None:
    (tmp_path / "offloadz-notes.txt").write_text("mine")
    (tmp_path / "offloadz-mine").symlink_to(tmp_path.parent)
    with _running(tmp_path, "run") as (child, path):
        with pytest.raises(ConfigError, match=f"in use by process {child.pid} "):
            SwapDir(tmp_path, "run")
        assert leftovers(tmp_path) == []
        other = _tier(tmp_path, "other")  # a second run beside it disturbs nobody
        assert other.notes == []
        other.close()
        assert (path / "state/weights.bin").stat().st_size == STATE_BYTES
        child.send_signal(signal.SIGKILL)
        child.wait()
    (dead,) = leftovers(tmp_path)
    assert (dead.path, dead.owner, dead.pid) == (path, "run", child.pid)
    assert STATE_BYTES <= dead.size_bytes == _disk_bytes(path) and dead.age_s >= 0
    tier = _tier(tmp_path, "other")
    (note,) = tier.notes
    assert str(dead.size_bytes) in note and str(path) in note and "--clean" in note
    tier.close()
    assert (path / "state/weights.bin").stat().st_size == STATE_BYTES  # reported, and not touched
    assert swapdir.remove(dead)
    assert not swapdir.remove(dead)
    assert sorted(os.listdir(tmp_path)) == ["offloadz-mine", "offloadz-notes.txt"]


def test_the_next_run_of_a_killed_owner_takes_its_directory_over(tmp_path: Path) -> None:
    with _running(tmp_path, "run") as (child, path):
        child.send_signal(signal.SIGKILL)
        child.wait()
    used = _disk_bytes(tmp_path)
    tier = _tier(tmp_path, "run")
    assert tier.path == path and _disk_bytes(tmp_path) <= used + 4096
    assert len(tier.notes) == 1 and "dead run of the same output" in tier.notes[0]
    tier.close()
    assert os.listdir(tmp_path) == []


def test_a_leftover_that_came_to_life_is_not_removed(tmp_path: Path) -> None:
    SwapDir(tmp_path, "run").remove(keep=True)
    (dead,) = leftovers(tmp_path)
    alive = SwapDir(tmp_path, "run")
    assert not swapdir.remove(dead)
    assert alive.path.exists()
    alive.remove()


def test_an_owner_file_cut_by_a_kill_is_still_a_leftover(tmp_path: Path) -> None:
    run = SwapDir(tmp_path, "run")
    run.remove(keep=True)
    (run.path / "owner.json").write_text('{"owner": "ru')
    (tmp_path / "offloadz-000000000000").mkdir()  # killed before it had an owner
    assert {leftover.owner for leftover in leftovers(tmp_path)} == {"unknown"}
    assert all(swapdir.remove(leftover) for leftover in leftovers(tmp_path))
    assert os.listdir(tmp_path) == []


def test_kept_state_is_constant_over_runs(tmp_path: Path) -> None:
    sizes = []
    for _ in range(3):
        _tier(tmp_path, "run").close(keep_state=True)
        sizes.append(_disk_bytes(tmp_path))
    assert STATE_BYTES < sizes[0] < STATE_BYTES + (1 << 16) and len(set(sizes)) == 1
    assert not list(tmp_path.rglob("gradients.bin"))


def test_descriptors_threads_and_memory_are_back_after_close(tmp_path: Path) -> None:
    _tier(tmp_path, "warm").close()
    before = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
    for number in range(5):
        _tier(tmp_path, f"run {number}").close()
    assert (len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))) == before


def test_a_place_that_is_no_directory_is_refused_with_its_field(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"offload\.swap"):
        SwapDir(tmp_path / "file", "run")
    run = SwapDir(tmp_path, "run")
    run.remove()
    run.path.symlink_to(tmp_path.parent)  # somebody points our name elsewhere
    with pytest.raises(ConfigError, match="no directory of this user"):
        SwapDir(tmp_path, "run")


def test_owner_is_the_output_directory_wherever_the_run_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert owner_name("runs/a") == owner_name(tmp_path / "runs/a") != owner_name("runs/b")
    assert owner_name(None) != owner_name(None)


if __name__ == "__main__":
    main(globals())
