"""Ctrl-C, SIGTERM and a closed terminal at every stage of a run: it saves, ends with 128 + the signal's number, and the
same command goes on."""

from __future__ import annotations

import os
import pty
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from tiny import ON_DISK, tables, write_config
from zygote import ROOT, Child, Zygote

from offloadz.model.manifest import read_manifest, verify
from offloadz.train.checkpoint import newest_valid
from offloadz.train.metrics import read_metrics
from offloadz.train.signals import Signals

STEPS = 14


@pytest.fixture
def config(tmp_path: Path) -> Path:
    changes = {"train__steps": STEPS, "train__save_every": 0}
    return write_config(tmp_path / "run.toml", tables(tmp_path, **changes, **ON_DISK))


def started(zygote: Zygote, config: Path, name: str = "log") -> Child:
    return zygote.start(["train", str(config)], config.parent / name)


def steps_of(config: Path) -> list[int]:
    path = config.parent / "run" / "metrics.jsonl"
    return [line["step"] for line in read_metrics(path)] if path.exists() else []


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_one_saves_and_the_same_command_goes_on(zygote: Zygote, config: Path, signum: int) -> None:
    child = started(zygote, config)
    child.until(lambda: len(steps_of(config)) >= 3)
    child.kill(signum)
    assert child.wait() == 128 + signum
    log = child.log.read_text()
    assert "saving after this step" in log and "Traceback" not in log
    path, rejected = newest_valid(config.parent / "run" / "checkpoints")
    assert path is not None and not rejected
    step = int(read_manifest(path)["step"])
    assert steps_of(config) == list(range(1, step + 1)) and 3 <= step < STEPS
    assert not list((config.parent / "swap").iterdir())
    again = started(zygote, config, "again")
    assert again.wait() == 0, again.log.read_text()
    assert f"step {step} of {STEPS}" in again.log.read_text()
    assert steps_of(config) == list(range(1, STEPS + 1))


def test_before_the_first_step_it_ends_at_once_and_cleans_up(zygote: Zygote, config: Path) -> None:
    child = started(zygote, config)
    child.until(lambda: "plan: update threads" in child.log.read_text() if child.log.exists() else False)
    child.kill(signal.SIGTERM)
    assert child.wait() == 143, child.log.read_text()
    assert not steps_of(config) and not list((config.parent / "swap").glob("*"))


def test_a_second_one_ends_at_once_and_the_last_checkpoint_stays(zygote: Zygote, config: Path) -> None:
    child = zygote.start(["train", str(config), "train.save_every=5"], config.parent / "log")
    checkpoints = config.parent / "run" / "checkpoints"
    child.until(lambda: len(steps_of(config)) >= 6)  # the save of step 5 is over, that of step 10 far
    child.kill(signal.SIGTERM)
    child.until(lambda: "saving after this step" in child.log.read_text())
    child.until(lambda: any(checkpoints.glob("*.tmp-*")))
    child.kill(signal.SIGTERM)
    assert child.wait() == -signal.SIGTERM, child.log.read_text()
    path, _ = newest_valid(checkpoints)
    assert path is not None
    verify(path, read_manifest(path))
    again = started(zygote, config, "again")
    assert again.wait() == 0, again.log.read_text()
    assert steps_of(config) == list(range(1, STEPS + 1))
    assert not list((config.parent / "swap").iterdir())


def test_a_terminal_that_is_closed_under_the_run(config: Path) -> None:
    """A real one: whatever it is told after that is an error."""
    command = [sys.executable, "-m", "offloadz", "train", str(config), "train.steps=200"]
    child, terminal = pty.fork()
    if child == 0:  # the terminal's session leader, so that closing it is told to us
        os.environ["OMP_NUM_THREADS"], os.environ["PYTHONPATH"] = "1", str(ROOT)
        os.execv(command[0], command)
    end, said = time.monotonic() + 60, b""
    os.set_blocking(terminal, False)
    while len(steps_of(config)) < 3:
        assert time.monotonic() < end, said.decode()
        with suppress(BlockingIOError):
            said += os.read(terminal, 4096)
        time.sleep(0.002)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 128 + signal.SIGHUP
    path, rejected = newest_valid(config.parent / "run" / "checkpoints")
    assert path is not None and not rejected and 3 <= int(read_manifest(path)["step"]) < 200
    assert not list((config.parent / "swap").iterdir())


@contextmanager
def at_first(disposition: signal.Handlers) -> Iterator[None]:
    """What SIGHUP does in this process before anybody watches it."""
    before = signal.signal(signal.SIGHUP, disposition)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


def test_under_nohup_a_closed_terminal_is_nothing() -> None:
    with at_first(signal.SIG_IGN), Signals() as signals:
        signal.raise_signal(signal.SIGHUP)
        assert signals.status == 0


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGHUP])
def test_a_closed_terminal_is_never_the_second_one(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shell and the kernel both tell of it; somebody pressed Ctrl-C and then closed it."""
    monkeypatch.setattr("offloadz.train.signals._let_go_of_terminal", lambda: None)  # this process keeps its own
    said: list[str] = []
    with at_first(signal.SIG_DFL), Signals(said.append) as signals, signals.held():
        for signum in (first, signal.SIGHUP, signal.SIGHUP):
            signal.raise_signal(signum)
        assert signals.status == 128 + first and len(said) == 1
