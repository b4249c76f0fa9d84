"""Where a step's time goes: the computation's busy and waiting seconds add up to the step, and a trace has the same.

No time is asserted: parts of a step are held to the whole of it.
"""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from tiny import ON_DISK, make_model, tables
from torch import nn

import offloadz
import offloadz.train.loop as loop
from offloadz.config import config_from_tables
from offloadz.plan.timeline import Timeline, read_traces
from offloadz.runtime.rehearsal import Rehearsal
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


@pytest.mark.parametrize(
    ("commit", "device"), [("hold", "cpu"), ("shadow", "cpu"), ("in_place", "cpu"), ("shadow", "rehearsal")]
)
def test_waiting_for_the_last_updates_is_in_the_step(commit: str, device: str, swap: Path) -> None:
    """Updates that are written once the norm is known end the step; on a slow drive they are most of it."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    where: dict[str, Any] = {"parameters": "disk", "gradients": "host", "optimizer_state": "disk", "commit": commit}
    where |= {"device": Rehearsal()} if device == "rehearsal" else {}
    shares = []
    with offloadz.offload(model, swap=swap, max_grad_norm=1e9 * (commit != "in_place"), **where) as run:
        write = run.session.room.drive.write

        def slowly(*how: object) -> None:
            time.sleep(0.05)
            write(*how)  # type: ignore[arg-type]

        run.session.room.drive.write = slowly  # type: ignore[method-assign]
        for _ in range(5):
            run.step({"x": torch.ones(2, 64)}, loss_fn=lambda m, b: m(b["x"]).square().mean())
            shares.append((run.report.busy_s["device"] + run.report.wait_s) / run.report.step_s)
        run.session.room.drive.write = write  # type: ignore[method-assign]
    assert max(shares) <= 1.0 and median(shares[2:]) >= 0.95, shares
