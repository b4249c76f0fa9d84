"""Runs that are killed at any moment and started again by the same command.  Case G14, kind K14; G04 in part.

Every run continues from the newest valid checkpoint, at most one interval is lost, the result is that of a run that
nobody killed, each step stands in the metrics once, and nothing is left over.  `benchmarks/kills.py` does the same
fifty times.
"""

from __future__ import annotations

import random
import re
import signal
import time
from pathlib import Path

import pytest
from tiny import ON_DISK, make_texts, tables, write_config
from zygote import Zygote

from offloadz.train.metrics import read_metrics

STEPS, INTERVAL, KILLS = 16, 2, 5
TIMES = ("step_s", "busy_s", "wait_s", "bottleneck", "bytes", "tokens_per_s", "predicted_step_s")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kill")


@pytest.fixture(scope="module")
def config(folder: Path) -> Path:
    make_texts(folder / "eval.jsonl", 6, seed=3)
    changes = {"train__steps": STEPS, "train__save_every": INTERVAL, "data__eval": [str(folder / "eval.jsonl")]}
    return write_config(folder / "run.toml", tables(folder, train__eval_every=5, **changes, **ON_DISK))


@pytest.fixture(scope="module")
def whole(folder: Path, config: Path, zygote: Zygote) -> Path:
    """The output of a run that nobody killed."""
    output = folder / "whole"
    child = zygote.start(["train", str(config), f"train.output={output}"], folder / "whole.log")
    assert child.wait() == 0, child.log.read_text()
    return output


def last_step(output: Path) -> int:
    path = output / "metrics.jsonl"
    return max((line["step"] for line in read_metrics(path)), default=0) if path.exists() else 0


def numbers(output: Path) -> list[dict[str, object]]:
    """All lines without what a clock or a counter of bytes says."""
    lines = read_metrics(output / "metrics.jsonl")
    return [{key: value for key, value in line.items() if key not in TIMES} for line in lines]


def resumed_step(log: str) -> int:
    found = re.search(r"resume: \S+, step (\d+) of", log)
    return int(found[1]) if found else 0


def test_killed_at_random_and_started_again(folder: Path, config: Path, whole: Path, zygote: Zygote) -> None:
    output, source, reached = folder / "run", random.Random(14), 0
    command = ["train", str(config), f"train.output={output}"]
    for attempt in range(KILLS + 1):
        child = zygote.start(command, folder / f"{attempt}.log")
        if attempt < KILLS:
            # Counted from a place in the run, so that slow machines kill in as many places as fast ones.
            aim = last_step(output) + source.randint(0, 5)
            child.until(lambda aim=aim: last_step(output) >= aim or (output / "finished.json").exists())
            time.sleep(source.random() * 0.15)
            child.kill(signal.SIGKILL)
        status, log = child.wait(), child.log.read_text()
        assert status == (0 if attempt == KILLS else -9), log
        resumed = resumed_step(log)
        if "resume:" in log or attempt == KILLS:  # it came so far
            assert resumed >= reached - INTERVAL, f"attempt {attempt} went back from {reached} to {resumed}\n{log}"
        reached = last_step(output)
    assert numbers(output) == numbers(whole)
    last = f"checkpoints/step-{STEPS:06d}"
    for name in ("final/model.safetensors", f"{last}/weights.safetensors", f"{last}/optimizer.safetensors"):
        assert (output / name).read_bytes() == (whole / name).read_bytes(), name
    assert {p.name for p in (output / "checkpoints").iterdir()} == {p.name for p in (whole / "checkpoints").iterdir()}
    assert not list((folder / "swap").iterdir())


def test_killed_while_a_checkpoint_is_being_written(folder: Path, config: Path, whole: Path, zygote: Zygote) -> None:
    output = folder / "writing"
    command = ["train", str(config), f"train.output={output}"]
    for attempt in range(2):
        child = zygote.start(command, folder / f"writing{attempt}.log")
        child.until(lambda: any(output.glob("checkpoints/*.tmp-*")) and last_step(output) >= 4)
        child.kill(signal.SIGKILL)
        assert child.wait() == -9
    child = zygote.start(command, folder / "writing.log")
    assert child.wait() == 0
    assert resumed_step(child.log.read_text()) > 0
    assert (output / "final/model.safetensors").read_bytes() == (whole / "final/model.safetensors").read_bytes()
    assert not list(output.glob("checkpoints/*.tmp-*")) and not list(output.glob("*.tmp-*"))


def test_a_damaged_newest_checkpoint_is_named_and_passed_over(
    folder: Path, config: Path, whole: Path, zygote: Zygote
) -> None:
    output = folder / "damaged"
    command = ["train", str(config), f"train.output={output}"]
    child = zygote.start(command, folder / "damaged0.log")
    child.until(lambda: last_step(output) >= 6)
    child.kill(signal.SIGKILL)
    child.wait()
    newest = max((output / "checkpoints").glob("step-??????"))
    weights = newest / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    child = zygote.start(command, folder / "damaged1.log")
    assert child.wait() == 0
    log = child.log.read_text()
    assert f"{newest} is left out: {weights} has" in log
    assert resumed_step(log) == int(newest.name[5:]) - INTERVAL
    assert (output / "final/model.safetensors").read_bytes() == (whole / "final/model.safetensors").read_bytes()
