"""A run that holds its plan to what it measures, and one that measures the box before it plans."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest
from tiny import tables

import offloadz.train.loop as loop
from offloadz.bench import first
from offloadz.bench.rounds import Sizes
from offloadz.config import Config, config_from_tables, load_config
from offloadz.plan.boxes import bench_file
from offloadz.plan.machine import UNVERIFIED
from offloadz.plan.ops import LANES
from offloadz.plan.question import question
from offloadz.report.page import render
from offloadz.report.read import read_run
from offloadz.train.closing import CHECKED_STEPS, PlanCheck
from offloadz.train.metrics import METRICS, read_metrics

PHASES = {"data": 50 << 20, "load": 60 << 20, "step": 100 << 20, "save": 70 << 20, "export": 500 << 20}
PLAN: dict[str, Any] = {
    "step_s": 10.0, "tokens_per_s": 100.0, "disk_written_per_step": 0, "rates_source": UNVERIFIED, "copies": 3,
    "busy_s": {"device": 7.0}, "taken_s": {"device": 8.0, "cpu": 1.0, "disk_read": 4.0},
    "bytes": {"device": dict.fromkeys(PHASES, 0), "host": PHASES, "disk": PHASES},
}  # fmt: skip
SMALL = Sizes(rounds=1, tokens=16, few_tokens=4, hidden=64, inner=128, product_s=0.02, elements=1 << 18,
              copy_bytes=2 << 20, extent_bytes=2 << 20, num_extents=2, num_parts=2)  # fmt: skip


def line(step: int, step_s: float = 10.0, peak: int = 100 << 20, **busy: float) -> dict[str, Any]:
    told = {**dict.fromkeys(LANES, 0.0), "device": 8.0, "cpu": 1.0, "disk_read": 4.0, **busy}
    moved = {"device_peak": 0, "host_peak": peak, "disk_written": 0}
    return {"step": step, "step_s": step_s, "tokens": 1000, "tokens_per_s": 1000 / step_s, "busy_s": told,
            "bytes": moved, "skipped": False}  # fmt: skip


def said(tmp_path: Path, lines: list[dict[str, Any]], plan: dict[str, Any] = PLAN) -> list[str]:
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    check = PlanCheck(SimpleNamespace(to_json=lambda: plan), tmp_path / "plan.json", 100)  # type: ignore[arg-type]
    answers = [check.add(one) for one in lines]
    assert not any(answers[: CHECKED_STEPS - 1] + answers[CHECKED_STEPS:]), "once, after the steps it looks at"
    return answers[CHECKED_STEPS - 1]


def test_a_plan_that_is_off_is_told_with_its_lane_and_what_is_left(tmp_path: Path) -> None:
    slow = [line(step, 40.0) for step in (1, 2, 3)]  # fresh extents: they do not count
    found = said(tmp_path, slow + [line(step, 20.0, 120 << 20, disk_read=16.0) for step in range(4, 30)])
    assert found == [
        "plan: off so far: a step takes 20 s (10 s planned, 2.0 times as long), memory is 120.0MiB (100.0MiB planned, "
        "+20%); 26:40 left at this pace",
        "plan: mis-rated is disk_read: busy 16 s (4 s planned, 4.0 times as long) of a step",
        "plan: its rates were typical ones; `offloadz bench --swap DIR` measures this machine for the next run",
    ]
    told = json.loads((tmp_path / "plan.json").read_text())
    assert told["step_s"] == 10.0, "what was predicted stays beside it"
    assert told["measured"]["misrated"] == "disk_read" and told["measured"]["left_s"] == 80 * 20.0
    assert told["measured"]["off"] == ["step time", "tokens per second", "host memory", "disk_read"]


def test_a_plan_that_is_right_is_told_in_a_line(tmp_path: Path) -> None:
    found = said(tmp_path, [line(step, 11.0) for step in range(1, 25)])
    assert found == [
        "plan: right so far: a step takes 11 s (10 s planned), memory is 100.0MiB (100.0MiB planned); 14:40 left at "
        "this pace"
    ]
    assert json.loads((tmp_path / "plan.json").read_text())["measured"]["off"] == []


def test_a_plan_without_enough_steady_steps_says_nothing(tmp_path: Path) -> None:
    assert said(tmp_path, [line(step) | {"skipped": step > 4} for step in range(1, 25)]) == []


def test_a_run_closes_the_loop_by_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """21 real steps: the line, plan.json and the page of the run hold what was measured beside what was planned."""
    told = tables(tmp_path, train__steps=CHECKED_STEPS + 1, train__save_every=0, optimizer__warmup=0)
    assert loop.train(config_from_tables(told, training=True)) == 0
    lines = read_metrics(tmp_path / "run" / METRICS)
    usual = [one["step_s"] for one in lines[1:CHECKED_STEPS]]
    plan = json.loads((tmp_path / "run/plan.json").read_text())
    found = plan["measured"]
    assert (found["at_step"], found["num_steps"], found["step_s"]) == (CHECKED_STEPS, len(usual), median(usual))
    assert found["left_s"] == found["step_s"] and plan["step_s"] > 0
    assert found["figures"]["host memory"] == max(one["bytes"]["host_peak"] for one in lines[:CHECKED_STEPS])
    words = r"plan: (right|off) so far: a step takes (\S+) s \((\S+) s planned"
    (said,) = re.findall(words, capsys.readouterr().out)
    off = bool({"step time", "host memory"} & set(found["off"]))
    assert said == ("off" if off else "right", f"{found['step_s']:.3g}", f"{plan['step_s']:.3g}")
    page = render(read_run(tmp_path / "run"))
    assert f"A step took {median([*usual, lines[-1]['step_s']]):.3g} s (median of {CHECKED_STEPS})" in page


@pytest.fixture
def config(tmp_path: Path) -> Config:
    (tmp_path / "model").mkdir()
    sizes = '"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4'
    (tmp_path / "model/config.json").write_text(f'{{"model_type": "llama", "vocab_size": 512, {sizes}}}')
    (tmp_path / "swap").mkdir()
    path = tmp_path / "run.toml"
    path.write_text(
        f'[model]\npath = "{tmp_path}/model"\ninit = "random"\n[data]\nmax_length = 64\n[train]\n'
        f'output = "{tmp_path}/out"\n[offload]\nswap = ["{tmp_path}/swap", "{tmp_path}/none"]\noptimizer = "disk"\n'
    )
    return load_config(path)


def test_a_long_run_on_a_box_nobody_measured_measures_it_once(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first, "QUICK", SMALL)
    lines: list[str] = []
    first.measure_first(config, 1000, lines.append)
    assert not lines and not bench_file().exists(), "a short run is not worth it"
    first.measure_first(config, 1 << 40, lines.append)
    assert bench_file().exists() and lines[1] == f"machine: kept as {bench_file()}"
    assert "measured 20" in question(config).answer().rates_source
    before = bench_file().read_text()
    first.measure_first(config, 1 << 40, lines.append)
    assert len(lines) == 2 and bench_file().read_text() == before
    assert not [*(tmp_path / "swap").iterdir()]


def test_a_run_of_several_ranks_is_planned_as_one(config: Config) -> None:
    lines: list[str] = []
    told = replace(config, offload=replace(config.offload, zero_stage=2), train=replace(config.train, batch_size=2))
    first.measure_first(told, 1000, lines.append, 2)
    assert not lines and not bench_file().exists()


def test_what_cannot_be_measured_is_said_and_the_run_goes_on(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first, "QUICK", Sizes(elements=1 << 50))
    lines: list[str] = []
    first.measure_first(config, 1 << 40, lines.append)
    assert lines[1].startswith("machine: not measured, rates stay typical: host memory") and not bench_file().exists()


def test_a_kept_bench_that_is_damaged_is_named(config: Config) -> None:
    bench_file().parent.mkdir(parents=True)
    bench_file().write_text("[rates\n")
    with pytest.raises(ValueError, match=r"bench-.*toml"):
        question(config)
