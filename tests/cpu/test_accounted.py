"""Where a step's time goes: the computation's busy and waiting seconds add up to the step, and a trace has the same.

No time is asserted: parts of a step are held to the whole of it.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

import pytest
from tiny import ON_DISK, make_model, tables

import offloadz.train.loop as loop
from offloadz.config import config_from_tables
from offloadz.plan.timeline import Timeline, read_traces
from offloadz.train.metrics import METRICS, read_metrics

STEPS = 6
TRACED = range(3, STEPS + 1)
"""Without the first, which makes its programs, and the second, the first with updates.  What is missing of a step is
the model's own code before its blocks (masks, rotary tables) and the calls from block to block."""


@pytest.fixture(scope="module", params=["disk", "host"])
def finished(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose blocks take long beside the calls between them."""
    folder = tmp_path_factory.mktemp("accounted")
    make_model(folder / "model", hidden_size=256, intermediate_size=768, num_hidden_layers=3)
    (folder / "train.jsonl").write_text(('{"text": "' + " ".join(["w1 w2 w3"] * 21) + '"}\n') * 64)
    told: dict[str, Any] = {
        "train__steps": STEPS, "train__save_every": 0, "train__batch_size": 64, "train__micro_batch_size": 32,
        "train__trace_steps": list(TRACED), "data__max_length": 64, "optimizer__warmup": 1, "offload__slots": 2,
        "offload__recompute": "all",
    }  # fmt: skip
    told |= ON_DISK if request.param == "disk" else dict.fromkeys(ON_DISK, "host")
    assert loop.train(config_from_tables(tables(folder, **told), training=True)) == 0
    return folder / "run"


def steps_of(output: Path) -> list[dict[str, Any]]:
    return [line for line in read_metrics(output / METRICS) if "loss" in line and line["step"] in TRACED]


def traced(output: Path) -> list[Timeline]:
    return read_traces(output, TRACED)


def test_busy_and_waiting_add_up_to_the_step(finished: Path) -> None:
    shares = [(line["busy_s"]["device"] + line["wait_s"]) / line["step_s"] for line in steps_of(finished)]
    assert len(shares) == len(TRACED) and max(shares) <= 1.0
    assert median(shares) >= 0.95, shares


def test_a_trace_has_the_same_busy_time_and_room_for_the_waiting(finished: Path) -> None:
    for found, line in zip(traced(finished), steps_of(finished), strict=True):
        busy_s = found.busy_s()["device"]
        assert busy_s == pytest.approx(line["busy_s"]["device"], rel=1e-3)
        assert busy_s + line["wait_s"] <= line["step_s"]
        assert found.length_s >= 0.9 * (busy_s + line["wait_s"])
