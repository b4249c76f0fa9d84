"""Ctrl-C and SIGTERM at every stage of a run: it saves, ends with 130 or 143, and the same command goes on."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from tiny import ON_DISK, tables, write_config
from zygote import Child, Zygote

from offloadz.model.manifest import read_manifest, verify
from offloadz.train.checkpoint import newest_valid
from offloadz.train.metrics import read_metrics

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


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
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
