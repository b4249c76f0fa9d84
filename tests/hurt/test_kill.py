"""Runs that are killed at any moment and started again by the same command.  Case G14, kind K14; G04 in part.

Every run goes on from the last flip or the newest valid checkpoint, at most a step that was told of is done again, the
result is that of a run that nobody killed, each step stands in the metrics once, and nothing is left over.  With `-m
full` fifty times; `benchmarks/kills.py` does it to a configuration of one's own.
"""

from __future__ import annotations

import random
import re
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from tiny import ON_DISK, make_texts, tables, write_config
from zygote import Zygote

from offloadz.memory.record import read_saved
from offloadz.model.linked import SavedState
from offloadz.train.metrics import read_metrics

STEPS, INTERVAL = 16, 2
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


@pytest.mark.parametrize("kills", [5, pytest.param(50, marks=[pytest.mark.full, pytest.mark.timeout(1800)])])
def test_killed_at_random_and_started_again(
    folder: Path, config: Path, whole: Path, zygote: Zygote, kills: int
) -> None:
    """Where a run comes to its end before it is killed, the kills that are left go to a new one."""
    output, source, left = folder / f"run{kills}", random.Random(14), kills
    reached = flips = num_finished = 0
    while left or output.exists() or not num_finished:
        child = zygote.start(["train", str(config), f"train.output={output}"], folder / "attempt.log")
        if left:
            # Counted from a place in the run, so that slow machines kill in as many places as fast ones.
            aim = last_step(output) + source.randint(0, 5)
            child.until(lambda aim=aim: last_step(output) >= aim or (output / "finished.json").exists())
            time.sleep(source.random() * 0.15)
            child.kill(signal.SIGKILL)
        status, log = child.wait(), child.log.read_text()
        assert status in (0, -9) and (left or status == 0), log
        left -= status == -9
        resumed = resumed_step(log)
        finished = (output / "finished.json").exists()
        if "resume:" in log or finished:  # it came so far
            assert resumed >= reached - 1, f"with {left} kills left it went back from {reached} to {resumed}\n{log}"
            flips += "going on from the state on disk" in log
        reached = last_step(output)
        if finished:
            require_same_run(output, whole)
            assert status == -9 or not list((folder / "swap").iterdir())  # the kill may come while it is cleaned
            shutil.rmtree(output)
            shutil.rmtree(folder / "swap")
            reached, num_finished = 0, num_finished + 1
    assert flips


def require_same_run(one: Path, other: Path) -> None:
    """All that two runs left is equal."""
    assert numbers(one) == numbers(other)
    assert same_state(one, other)
    assert {p.name for p in (one / "checkpoints").iterdir()} == {p.name for p in (other / "checkpoints").iterdir()}


def same_state(one: Path, other: Path) -> bool:
    """Whether the exports and the last checkpoints of two runs hold the same bits."""
    last = f"checkpoints/step-{STEPS:06d}"
    with SavedState(one / last) as a, SavedState(other / last) as b:
        for mine, theirs in ((a.weights, b.weights), (a.moments, b.moments)):
            assert mine.entries.keys() == theirs.entries.keys()
            assert all(torch.equal(mine.read(name), theirs.read(name)) for name in mine.entries)
    final = "final/model.safetensors"
    return (one / final).read_bytes() == (other / final).read_bytes()


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
    """A bit flips in a file that a linked checkpoint holds, and the state in the swap path is gone."""
    output = folder / "damaged"
    command = ["train", str(config), f"train.output={output}", "train.keep=2"]
    child = zygote.start(command, folder / "damaged0.log")
    child.until(lambda: last_step(output) >= 6)
    child.kill(signal.SIGKILL)
    child.wait()
    for swap in (folder / "swap").iterdir():
        shutil.rmtree(swap)
    newest = max((output / "checkpoints").glob("step-??????"))
    record = read_saved(newest)
    at = next(i for i, e in enumerate(record.extents) if e.file.startswith("state/optimizer"))
    file = newest / f"optimizer.{record.record.choice[at]}.bin"
    with file.open("r+b") as held:
        held.seek(record.extents[at].offset + 100)
        byte = held.read(1)
        held.seek(-1, 1)
        held.write(bytes([byte[0] ^ 4]))
    child = zygote.start(command, folder / "damaged1.log")
    assert child.wait() == 0
    log = child.log.read_text()
    assert f"{newest} is left out: {record.extents[at].label}: {file} is damaged at byte" in log, log
    assert resumed_step(log) == int(newest.name[5:]) - INTERVAL
    assert same_state(output, whole)


def test_what_cannot_be_taken_over_is_read(folder: Path, config: Path, whole: Path, zygote: Zygote) -> None:
    """The state of a killed run goes on in memory: it becomes a checkpoint first, without losing a step."""
    output = folder / "elsewhere"
    command = ["train", str(config), f"train.output={output}", "train.save_every=100"]
    child = zygote.start(command, folder / "elsewhere0.log")
    child.until(lambda: last_step(output) >= 5)
    child.kill(signal.SIGKILL)
    child.wait()
    reached = last_step(output)
    child = zygote.start([*command, "offload.optimizer=host"], folder / "elsewhere1.log")
    assert child.wait() == 0, child.log.read_text()
    log = child.log.read_text()
    assert "became" in log and resumed_step(log) >= reached, log
    tables = list(output.glob("checkpoints/*/tables.bin"))
    assert tables and all(path.stat().st_mode & 0o077 == 0 for path in tables)
    final = "final/model.safetensors"
    assert (output / final).read_bytes() == (whole / final).read_bytes() and numbers(output) == numbers(whole)
    assert (output / f"checkpoints/step-{STEPS:06d}/optimizer.safetensors").exists()  # two tiers: not links any more
