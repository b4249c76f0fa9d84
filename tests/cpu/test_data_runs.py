"""Whole runs on packed rows: the configuration's default trains, evaluates, resumes, is shown.  Kinds K15, K16."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from tiny import ON_DISK, make_model, tables, write_config

from offloadz.audit import data_command
from offloadz.config import config_from_tables
from offloadz.train.loop import train
from offloadz.train.metrics import METRICS, read_metrics

TIMES = ("step_s", "busy_s", "wait_s", "bottleneck", "bytes", "tokens_per_s", "predicted_step_s")


def packed(folder: Path, **changes: Any) -> dict[str, dict[str, Any]]:
    """The tables of a run with a quarter of the samples held out; packing is what the configuration does by itself."""
    settings = {
        "train__steps": 0, "train__epochs": 3.0, "train__batch_size": 4, "train__micro_batch_size": 2,
        "train__save_every": 3, "train__keep": 9, "train__eval_every": 4, "data__eval_share": 0.25,
    }  # fmt: skip
    told = tables(folder, **{**settings, **changes})
    del told["data"]["packing"]
    return told


def lines_of(output: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in line.items() if k not in TIMES} for line in read_metrics(output / METRICS)]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_packed_run_resumes_with_the_rows_it_would_have_had(tmp_path: Path, family: str) -> None:
    make_model(tmp_path / "model", family)
    told = packed(tmp_path, **ON_DISK)
    assert train(config_from_tables(told, training=True)) == 0
    straight = tmp_path / "run"
    lines = lines_of(straight)
    steps = [line for line in lines if "loss" in line]
    evaluated = [line for line in lines if "eval_loss" in line]
    assert evaluated and len({line["eval_tokens"] for line in evaluated}) == 1
    per_epoch = len(steps) // 3
    samples = [sample for line in steps[:per_epoch] for sample in line["samples"]]
    assert sorted(samples) == list(range(30))  # each of the 30 that are left, once
    assert all(line["tokens"] == line["target_tokens"] + len(line["samples"]) for line in steps)
    assert steps[-1]["loss"] < steps[0]["loss"]

    again = tmp_path / "again"
    shutil.copytree(straight, again)
    shutil.rmtree(again / "final")
    for path in (again / "checkpoints").glob("step-*"):
        if int(path.name[5:]) > 3:
            shutil.rmtree(path)
    told["train"]["output"] = str(again)
    assert train(config_from_tables(told, training=True)) == 0
    assert lines_of(again) == lines
    one, other = (path / "final" / "model.safetensors" for path in (straight, again))
    assert one.read_bytes() == other.read_bytes()


def test_the_audit_shows_rows_and_what_packing_saves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = packed(tmp_path)
    assert data_command(write_config(tmp_path / "run.toml", told), [], 3) == 0
    out = capsys.readouterr().out
    assert "30 samples from 40 records" in out and "10 samples held out" in out and "held out (data.eval_share" in out
    saved = re.search(r"packed into (\d+) rows of up to 32 tokens, ([\d.]+) % .* ([\d.]+) % padding", out)
    assert saved and float(saved[2]) < float(saved[3])
    assert re.search(r"\d - 16 +#+ \d+\n", out)
    assert out.count("\nrow 1, sample ") == 3 and out.count("«") == 3
    told["data"]["packing"] = False
    assert data_command(write_config(tmp_path / "run.toml", told), [], 2) == 0
    out = capsys.readouterr().out
    assert "packed into" not in out and out.count("\nsample ") == 2
