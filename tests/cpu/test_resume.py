"""A run that is stopped and resumed is the run that was not: bit for bit.  Case G15, kind K15.

Compared are the checkpoints of the last step (fp32 masters, both moments, each parameter's counter, group settings,
schedule, place in the data) and every number of the metrics.  Placement changes at the resume, so memory to disk and
back are covered too.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import ON_DISK, make_model, make_texts, tables

import offloadz
import offloadz.plan.candidates as candidates
import offloadz.train.loop as loop
from offloadz.config import config_from_tables
from offloadz.model.linked import open_tensors
from offloadz.model.manifest import read_manifest
from offloadz.plan.cut import saved_cut
from offloadz.plan.errors import ConfigError
from offloadz.plan.question import question
from offloadz.train.metrics import METRICS, read_metrics
from offloadz.train.progress import Display

TIMES = ("step_s", "busy_s", "wait_s", "bottleneck", "bytes", "tokens_per_s", "predicted_step_s")
IN_MEMORY = {f"offload__{kind}": "host" for kind in ("parameters", "gradients", "optimizer", "activations")}
FIRST_BLOCK = {"llama": "*layers.0*", "qwen3": "*layers.0*", "gpt2": "*h.0*"}


def run(folder: Path, **changes: Any) -> int:
    return loop.train(config_from_tables(tables(folder, **changes), training=True))


@pytest.fixture
def stop_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Let a real SIGTERM come while a step of this number is under way; 0: none."""

    def at(step: int) -> None:
        class Stopping(Display):
            def step(self, line: dict[str, Any]) -> None:
                super().step(line)
                if line["step"] == step:
                    os.kill(os.getpid(), signal.SIGTERM)

        monkeypatch.setattr(loop, "Display", Stopping)

    return at


def numbers(output: Path) -> list[dict[str, object]]:
    return [{k: v for k, v in line.items() if k not in TIMES} for line in read_metrics(output / METRICS)]


def assert_same(one: Path, other: Path, step: int) -> None:
    paths = [path / f"checkpoints/step-{step:06d}" for path in (one, other)]
    a, b = map(read_manifest, paths)
    with open_tensors(paths[0], a) as mine, open_tensors(paths[1], b) as theirs:
        for held, wanted in zip(mine, theirs, strict=True):
            assert held.entries.keys() == wanted.entries.keys()
            for name in held.entries:
                assert torch.equal(held.read(name), wanted.read(name)), name
    assert a["steps"] == b["steps"] and set(a["steps"].values()) == {step}
    assert a["groups"] == b["groups"]
    for key in ("loader", "scheduler", "step", "num_skipped"):
        assert a["extra"][key] == b["extra"][key], key
    assert numbers(one) == numbers(other)
    assert (one / "final/model.safetensors").read_bytes() == (other / "final/model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("family", "dtype", "first", "then", "stops"),
    [
        ("llama", "bfloat16", IN_MEMORY, ON_DISK, (1, 7, 11)),
        ("qwen3", "float32", ON_DISK, IN_MEMORY, (4,)),
        ("gpt2", "float32", ON_DISK, ON_DISK, (5,)),  # with dropout, in the blocks and outside
    ],
)
def test_stopped_and_resumed(
    tmp_path: Path, stop_at: Callable[[int], None], family: str, dtype: str, first: dict[str, str],
    then: dict[str, str], stops: tuple[int, ...],
) -> None:  # fmt: skip
    make_model(tmp_path / "model", family)
    make_texts(tmp_path / "eval.jsonl", 7, seed=9)
    groups = [{"match": [FIRST_BLOCK[family]], "lr": 3e-4, "weight_decay": 0.1}]
    same = {"model__dtype": dtype, "optimizer__groups": groups, "optimizer__weight_decay": 0.01,
            "data__eval": [str(tmp_path / "eval.jsonl")], "train__eval_every": 5}  # fmt: skip
    assert run(tmp_path, **same, **first, train__output=str(tmp_path / "whole")) == 0
    output = {"train__output": str(tmp_path / "parts")}
    for number, step in enumerate(stops):
        stop_at(step)
        assert run(tmp_path, **same, **(then if number % 2 else first), **output) == 143
    stop_at(0)
    assert run(tmp_path, **same, **then, **output) == 0
    assert_same(tmp_path / "whole", tmp_path / "parts", 12)


def test_a_run_goes_on_with_the_cut_it_began_with(
    tmp_path: Path, stop_at: Callable[[int], None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Though a plan of today would cut the batch in another way, and does so where nothing is gone on with."""
    left: dict[str, Any] = {"train__micro_batch_size": 0}
    assert run(tmp_path, **left, **IN_MEMORY, train__output=str(tmp_path / "whole")) == 0
    stop_at(7)
    assert run(tmp_path, **left, **IN_MEMORY) == 143
    monkeypatch.setattr(candidates, "MICRO_TOKENS", 64)  # two rows, where a bench between may have led to any number
    stop_at(0)
    capsys.readouterr()
    config = config_from_tables(tables(tmp_path, **left, **ON_DISK))
    assert saved_cut(config.train.output, "never") is None
    held = question(config, cut=saved_cut(config.train.output, "auto")).answer()
    assert run(tmp_path, **left, **ON_DISK) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "resume: parameters on disk (before: host), gradients on disk (before: host)" in told
    assert_same(tmp_path / "whole", tmp_path / "run", 12)
    cut = {
        name: json.loads((tmp_path / name / "plan.json").read_text())["micro_batch_size"] for name in ("whole", "run")
    }
    assert (
        cut == {"whole": 6, "run": 6} and held.micro_batch_size == 6 and question(config).answer().micro_batch_size == 2
    )


def test_a_run_that_was_moved_goes_on_from_where_it_is_now(
    tmp_path: Path, stop_at: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Named as the output, or one of its checkpoints for another one: with the cut it had, in `offloadz plan` too."""
    left: dict[str, Any] = {"train__micro_batch_size": 0, **ON_DISK}
    assert run(tmp_path, **left, train__output=str(tmp_path / "whole")) == 0
    stop_at(7)
    assert run(tmp_path, **left) == 143
    (tmp_path / "run").rename(tmp_path / "moved")
    monkeypatch.setattr(candidates, "MICRO_TOKENS", 64)  # two rows, by a plan of today
    stop_at(0)
    checkpoint = str(tmp_path / "moved/checkpoints/step-000007")
    for output, resume in (("other", checkpoint), ("moved", "auto")):
        how = {**left, "train__output": str(tmp_path / output), "train__resume": resume}
        config = config_from_tables(tables(tmp_path, **how))
        cut = saved_cut(config.train.output, resume)
        assert cut is not None and cut.source == checkpoint
        assert question(config, cut=cut).answer().micro_batch_size == 6 != question(config).answer().micro_batch_size
        assert run(tmp_path, **how) == 0
    assert_same(tmp_path / "whole", tmp_path / "moved", 12)
    finals = [(tmp_path / name / "final/model.safetensors").read_bytes() for name in ("whole", "other")]
    assert finals[0] == finals[1]


def test_tensorboard_has_each_step_once(tmp_path: Path, stop_at: Callable[[int], None]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    stop_at(8)
    assert run(tmp_path) == 143
    (tmp_path / "run/checkpoints/step-000008/manifest.json").unlink()  # back to step 5
    stop_at(0)
    assert run(tmp_path) == 0
    board = EventAccumulator(str(tmp_path / "run/tensorboard"))
    board.Reload()
    seen = [(event.step, event.value) for event in board.Scalars("loss")]
    lines = read_metrics(tmp_path / "run" / METRICS)
    assert [step for step, _ in seen] == [line["step"] for line in lines] == list(range(1, 13))
    assert [value for _, value in seen] == pytest.approx([line["loss"] for line in lines], rel=1e-6)


def test_metrics_are_cut_back(tmp_path: Path, stop_at: Callable[[int], None]) -> None:
    """Lines behind the checkpoint go, also one that a kill cut off in the middle."""
    stop_at(7)
    assert run(tmp_path) == 143
    path = tmp_path / "run" / METRICS
    with path.open("a") as file:
        file.write('{"step": 8, "loss": 1.0}\n{"step": 9, "lo')
    stop_at(0)
    assert run(tmp_path) == 0
    assert [line["step"] for line in read_metrics(path)] == list(range(1, 13))


def test_a_stopped_evaluation_is_made_up_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal in an evaluation leaves no line; the resumed run evaluates before its next step, once."""
    make_texts(tmp_path / "eval.jsonl", 30, seed=9)
    changes = {"data__eval": [str(tmp_path / "eval.jsonl")], "train__eval_every": 5}
    assert run(tmp_path, **changes, train__output=str(tmp_path / "whole")) == 0
    score, calls = offloadz.token_logprobs, []

    def interrupted(*given: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return score(*given)

    monkeypatch.setattr(offloadz, "token_logprobs", interrupted, raising=False)
    assert run(tmp_path, **changes) == 143
    assert not any("eval_loss" in line for line in read_metrics(tmp_path / "run" / METRICS))
    assert run(tmp_path, **changes) == 0
    assert_same(tmp_path / "whole", tmp_path / "run", 12)


def test_other_configurations_are_refused_unless_allowed(
    tmp_path: Path, stop_at: Callable[[int], None], capsys: pytest.CaptureFixture[str]
) -> None:
    stop_at(4)
    assert run(tmp_path) == 143
    stop_at(0)
    with pytest.raises(ConfigError) as caught:
        run(tmp_path, optimizer__lr=1e-3, optimizer__weight_decay=0.5, train__keep=1)
    assert "optimizer.lr: the checkpoint has 0.003, the configuration 0.001" in str(caught.value)
    assert "optimizer.weight_decay" in str(caught.value) and "train.keep" not in str(caught.value)
    make_texts(tmp_path / "other.jsonl", seed=1)
    with pytest.raises(ConfigError, match=r"samples of data\.train changed"):
        run(tmp_path, data__train=[str(tmp_path / "other.jsonl")], train__resume_with=["data.train"])
    before = read_metrics(tmp_path / "run" / METRICS)
    allowed = {"optimizer__lr": 1e-3, "optimizer__weight_decay": 0.5}
    names = ["optimizer.lr", "optimizer.weight_decay"]
    capsys.readouterr()
    assert run(tmp_path, **allowed, train__resume_with=names) == 0
    told = capsys.readouterr().out
    assert "optimizer.lr: the checkpoint has 0.003, the configuration 0.001 (allowed" in told
    lines = read_metrics(tmp_path / "run" / METRICS)
    assert lines[:4] == before
    groups = read_manifest(tmp_path / "run/checkpoints/step-000012")["groups"]
    assert {g["initial_lr"] for g in groups} == {1e-3} and {g["weight_decay"] for g in groups} == {0.0, 0.5}
    schedule = loop.schedule_of(config_from_tables(tables(tmp_path)).optimizer, 12)
    assert [line["lr"] for line in lines[4:]] == [1e-3 * schedule(k) for k in range(4, 12)]


def test_a_finished_run_whose_checkpoints_were_removed_for_room_is_not_done_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, train__steps=3) == 0
    for path in (tmp_path / "run/checkpoints").iterdir():
        shutil.rmtree(path)
    before = (tmp_path / "run/final/model.safetensors").stat().st_mtime_ns
    capsys.readouterr()
    assert run(tmp_path, train__steps=3) == 0
    said = capsys.readouterr().out
    assert "this run is finished: 3 steps" in said and "its checkpoints are gone" in said
    assert (tmp_path / "run/final/model.safetensors").stat().st_mtime_ns == before


def test_a_finished_run_says_so_and_goes_on_for_more_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, train__steps=5) == 0
    files = {p: p.stat().st_mtime_ns for p in (tmp_path / "run").rglob("*") if p.is_file()}
    capsys.readouterr()
    assert run(tmp_path, train__steps=5) == 0
    assert "this run is finished: 5 steps" in capsys.readouterr().out
    assert files == {p: p.stat().st_mtime_ns for p in (tmp_path / "run").rglob("*") if p.is_file()}
    first = (tmp_path / "run/final/model.safetensors").read_bytes()
    assert run(tmp_path, train__steps=8, train__resume_with=["train.steps"]) == 0
    lines = read_metrics(tmp_path / "run" / METRICS)
    assert [line["step"] for line in lines] == list(range(1, 9))
    schedule = loop.schedule_of(config_from_tables(tables(tmp_path)).optimizer, 8)
    assert [line["lr"] for line in lines[5:]] == [3e-3 * schedule(k) for k in range(5, 8)]
    assert (tmp_path / "run/final/model.safetensors").read_bytes() != first


def test_an_export_that_was_cut_off_is_made_again(tmp_path: Path) -> None:
    assert run(tmp_path) == 0
    weights = (tmp_path / "run/final/model.safetensors").read_bytes()
    (tmp_path / "run/finished.json").unlink()
    (tmp_path / "run/final/model.safetensors").write_bytes(weights)
    assert run(tmp_path) == 0
    assert (tmp_path / "run/final/model.safetensors").read_bytes() == weights
    assert len(read_metrics(tmp_path / "run" / METRICS)) == 12 and (tmp_path / "run/finished.json").exists()


def test_from_a_directory_or_from_the_beginning(tmp_path: Path) -> None:
    assert run(tmp_path) == 0
    middle = tmp_path / "run/checkpoints/step-000010"
    other = {"train__output": str(tmp_path / "other")}
    assert run(tmp_path, **other, train__resume=str(middle)) == 0
    assert (tmp_path / "other/final/model.safetensors").read_bytes() == (
        tmp_path / "run/final/model.safetensors"
    ).read_bytes()
    assert [line["step"] for line in read_metrics(tmp_path / "other" / METRICS)] == [11, 12]
    assert run(tmp_path, train__resume="never") == 0
    assert [line["step"] for line in read_metrics(tmp_path / "run" / METRICS)] == list(range(1, 13))
    with pytest.raises(ConfigError, match="is no directory"):
        run(tmp_path, train__resume=str(tmp_path / "nowhere"))


def test_without_any_valid_checkpoint_nothing_is_begun_anew(tmp_path: Path) -> None:
    assert run(tmp_path) == 0
    for path in (tmp_path / "run/checkpoints").glob("step-*/weights.safetensors"):
        path.write_bytes(path.read_bytes()[:-8] + b"\0" * 8)
    with pytest.raises(ConfigError, match=r"no checkpoint in .* is valid"):
        run(tmp_path)
    assert len(read_metrics(tmp_path / "run" / METRICS)) == 12
