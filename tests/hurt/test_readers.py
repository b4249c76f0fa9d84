"""Who reads what a run says may go away, with Ctrl-C or before it: the run saves all the same."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny import ON_DISK, tables, write_config
from zygote import ROOT

from offloadz import cli
from offloadz.memory.swapdir import is_locked
from offloadz.model.manifest import read_manifest
from offloadz.train.checkpoint import newest_valid
from offloadz.train.metrics import read_metrics
from offloadz.train.said import Heard

TRAIN = [sys.executable, "-m", "offloadz", "train"]
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    changes = {"train__steps": 200, "train__save_every": 0}
    return write_config(tmp_path / "run.toml", tables(tmp_path, **changes, **ON_DISK))


def until(true: Callable[[], object], what: str) -> None:
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end, what
        time.sleep(0.005)


def num_steps(config: Path) -> int:
    path = config.parent / "run" / "metrics.jsonl"
    return len(read_metrics(path)) if path.exists() else 0


def require_saved(config: Path) -> None:
    path, rejected = newest_valid(config.parent / "run" / "checkpoints")
    assert path is not None and not rejected and 3 <= int(read_manifest(path)["step"]) < 200
    assert not list((config.parent / "swap").iterdir())


@pytest.mark.parametrize("errors", [None, subprocess.STDOUT], ids=["stdout", "both"])
def test_ctrl_c_that_ends_tee_too_saves(config: Path, errors: int | None) -> None:
    """Lines are due at every step, so some are said while nobody reads any more."""
    run = subprocess.Popen([*TRAIN, str(config)], stdout=subprocess.PIPE, stderr=errors, env=os.environ | ENVIRONMENT)
    assert run.stdout is not None
    try:
        until(lambda: num_steps(config) >= 3 or run.poll() is not None, "three steps")
        run.stdout.close()
        seen = num_steps(config)
        until(lambda: num_steps(config) >= seen + 3 or run.poll() is not None, "steps that nobody hears of")
        run.send_signal(signal.SIGINT)
        assert run.wait(60) == 130
    finally:
        run.kill()
        run.wait()
    require_saved(config)


def test_a_terminal_that_is_closed_under_a_shell_with_a_pipe(config: Path) -> None:
    """The shell is told, and dies of it; then the kernel tells all that it had in front, `tee` among them."""
    script = f'"$@" 2>&1 | tee {config.parent / "log"}; true'
    child, terminal = pty.fork()
    if child == 0:
        os.execve("/bin/sh", ["sh", "-c", script, "sh", *TRAIN, str(config)], os.environ | ENVIRONMENT)
    until(lambda: num_steps(config) >= 3, "three steps")
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGHUP
    until(lambda: not is_locked(config.parent / "run", os.O_DIRECTORY), "the end of the run")
    require_saved(config)


def test_what_a_closed_terminal_is_told_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the end of a terminal and SIGHUP."""
    gone: list[int] = []
    monkeypatch.setattr("offloadz.train.said.let_go", gone.append)  # this process keeps its own
    ours, theirs = pty.openpty()
    with open(theirs, "w") as terminal:
        heard = Heard(terminal)
        assert heard.isatty() and heard.write("a\n") == 2
        os.close(ours)
        assert heard.write("b\n") == 2
        heard.flush()
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), theirs)
    assert not gone


def test_a_pipe_that_is_full_loses_lines_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    gone: list[int] = []
    monkeypatch.setattr("offloadz.train.said.let_go", gone.append)
    reads, writes = os.pipe()
    fcntl.fcntl(writes, fcntl.F_SETFL, os.O_NONBLOCK)
    with open(reads) as reader, open(writes, "w") as pipe:
        heard = Heard(pipe)
        for _ in range(64):
            heard.write("x" * 4096)
            heard.flush()
        assert len(os.read(reader.fileno(), 1 << 20)) >= 4096
    assert not gone


def test_a_broken_pipe_is_enough_of_a_list_and_an_error_of_a_run(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def broken(*_: object, **__: object) -> int:
        raise BrokenPipeError("of a peer")

    monkeypatch.setattr("offloadz.config.load_config", broken)
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", str(tmp_path / "run.toml")])
    assert ended.value.code == 1 and "of a peer" in capfd.readouterr().err
