"""The wear a plan tells is the wear a run causes, and a machine file is in force in a run.  Kind K19.

Measured on steady steps: the first has no update of a step before it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny import ON_DISK, make_model, tables

import offloadz.train.loop as loop
from offloadz.config import config_from_tables
from offloadz.train.metrics import METRICS, read_metrics

STATE = {"offload__parameters": "disk", "offload__optimizer": "disk"}
CASES: dict[str, dict[str, Any]] = {
    "all of it, three copies": {**ON_DISK},
    "state alone, int8, in memory weights": {"offload__optimizer": "disk", "optimizer__state": "int8"},
    "in place, int8-sr": {
        **ON_DISK, "offload__commit": "in_place", "optimizer__max_grad_norm": 0.0, "optimizer__state": "int8-sr",
    },
    "gradient sums of two sweeps": {
        **STATE, "offload__gradients": "disk", "offload__sweeps": 2, "train__micro_batch_size": 1,
    },
    "a frozen block, lion in bf16": {
        **STATE, "model__freeze": ["*layers.0*"], "optimizer__name": "lion", "optimizer__state": "bf16",
    },
}  # fmt: skip


def run(folder: Path, **changes: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A run of four steps of full rows: its plan, and its lines."""
    make_model(folder / "model", hidden_size=64, intermediate_size=192, num_hidden_layers=3)
    (folder / "train.jsonl").write_text(('{"text": "' + " ".join(["w1 w2 w3"] * 20) + '"}\n') * 36)
    told = {"train__steps": 4, "train__save_every": 0, "data__on_long": "cut_right", "optimizer__warmup": 1}
    config = tables(folder, **{**told, **changes})
    assert loop.train(config_from_tables(config, training=True)) == 0
    lines = [line for line in read_metrics(folder / "run" / METRICS) if "loss" in line]
    return json.loads((folder / "run/plan.json").read_text()), lines


@pytest.mark.parametrize("case", CASES)
def test_a_steady_step_writes_what_the_plan_said(tmp_path: Path, swap: Path, case: str) -> None:
    plan, lines = run(tmp_path, **CASES[case])
    told = plan["disk_written_per_step"]
    assert told > 0 and plan["copies"] == (3 if CASES[case].get("offload__parameters") and "place" not in case else 1)
    for line in lines[1:]:
        assert line["bytes"]["disk_written"] == pytest.approx(told, rel=0.02), line["step"]


def test_a_machine_file_is_in_force_in_a_run(tmp_path: Path, swap: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine = tmp_path / "desk.toml"
    machine.write_text("""
source = "a test"
[host]
memory = "64TiB"
cores = 1
[rates]
device = 1e6
[[drive]]
endurance = "5MB"
""")
    plan, lines = run(tmp_path, offload__machine=str(machine), offload__threads=0, train__steps=2, **STATE)
    out = capsys.readouterr().out
    assert plan["machine"] == "desk" and plan["threads"] == 1 and plan["limits"]["host"] < 1 << 43
    assert lines[0]["predicted_step_s"] == plan["step_s"] > 60, "a device of a million flop/s"
    assert plan["drive_life_steps"] == 5_000_000 // plan["disk_written_per_step"] > 0
    for words in (
        f"drive life: {plan['drive_life_steps']} steps", "5e-06TB (a test)",
        "from the rates of machine file desk.toml",
        "update threads: 1 (the cores of desk", 'optimizer.state = "int8" would write',
    ):  # fmt: skip
        assert words in out, words
