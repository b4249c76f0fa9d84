"""Overlap is there from the start: two slots hide the faster lane behind the slower, one slot hides nothing.

Times are those of simulated lanes, which are exact; on real lanes only the order of begin and end is looked at.  The
measured figures are `benchmarks/overlap.py`'s.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from programs import one_pass, trained_units
from torch import Tensor, nn

import offloadz
from offloadz.plan.ops import LANES, Op, Program
from offloadz.plan.passes import compiled
from offloadz.plan.placement import Placement
from offloadz.plan.shapes import ParamInfo, make_spec
from offloadz.plan.spec import ModelSpec
from offloadz.plan.steps import Finish, Forward, Owed, Turn, build
from offloadz.plan.walk import Frontier, VirtualLane, simulate

COMPUTE_S, READ_S, BLOCKS = 0.050, 0.040, 16
PLACE = Placement("disk", "host", "host", "device")


def sleepers() -> ModelSpec:
    params = [ParamInfo(f"blocks.{i}.weight", (256, 256)) for i in range(BLOCKS)]
    return make_spec(params, [f"blocks.{i}" for i in range(BLOCKS)], [], dtype="float32")


def seconds(op: Op) -> float:
    if op.lane == "device":
        return COMPUTE_S if op.verb != "norm" else 0.0
    return READ_S if op.lane == "disk_read" else 0.0


def simulated(program: Program, steps: int = 1) -> tuple[float, float]:
    """Seconds of the last of several steps, each begun when the one before was decided, and of its slowest lane."""
    lanes, frontier = {name: VirtualLane(seconds) for name in LANES}, Frontier()
    ends = [0.0]
    for _ in range(steps):
        simulate(program, lanes, frontier)
        ends.append(lanes["device"].free_s)
        for lane in lanes.values():
            lane.free_s = max(lane.free_s, ends[-1])
    slowest = max(sum(seconds(op) for op in program.ops if op.lane == lane) for lane in LANES)
    return ends[-1] - ends[-2], slowest


def forward_program(slots: int) -> Program:
    placement = replace(PLACE, slots=slots)
    turns = tuple(Turn(i, i, 1, False) for i in range(BLOCKS))
    return compiled(build(sleepers(), placement, (Forward(turns),)), placement)


@pytest.mark.parametrize("slots", [2, 3])
def test_a_forward_with_two_slots_takes_the_slowest_lane_and_one_read(slots: int) -> None:
    found, slowest = simulated(forward_program(slots))
    assert slowest == pytest.approx(BLOCKS * COMPUTE_S)
    assert found == pytest.approx(slowest + READ_S)


def test_a_forward_with_one_slot_takes_the_sum() -> None:
    assert simulated(forward_program(1))[0] == pytest.approx(BLOCKS * (COMPUTE_S + READ_S))


@pytest.mark.parametrize("slots", [2, 3])
def test_a_step_takes_its_slowest_lane_and_one_read(slots: int) -> None:
    """Weights are read for the forward (and updated in that slot), and for the backward: two reads, not three."""
    found, slowest = simulated(step_program(slots), steps=3)
    assert slowest == pytest.approx(2 * BLOCKS * COMPUTE_S)
    assert found == pytest.approx(slowest + READ_S)


def test_a_step_with_one_slot_takes_the_sum() -> None:
    assert simulated(step_program(1))[0] == pytest.approx(2 * BLOCKS * (COMPUTE_S + READ_S))


def step_program(slots: int) -> Program:
    spec, placement = sleepers(), replace(PLACE, slots=slots)
    return compiled(build(spec, placement, (*one_pass(spec, 1), Finish()), Owed(trained_units(spec))), placement)


class Sleeper(nn.Module):
    """A block that takes a while and no processor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.03)
        return x + self.linear(x)


@pytest.mark.parametrize("slots", [1, 2])
def test_real_reads_run_beside_real_computations(slots: int, swap: Path) -> None:
    """With two slots most blocks are read while the block before computes; with one slot none ever is."""
    model = nn.Sequential(*(Sleeper() for _ in range(8)))
    with offloadz.offload(model, swap=swap, parameters="disk", slots=slots) as run:
        lanes = run.session.lanes
        read = run.session.room.drive.read

        def slowly(*how: object) -> None:
            time.sleep(0.02)
            read(*how)  # type: ignore[arg-type]

        run.session.room.drive.read = slowly  # type: ignore[method-assign]
        for lane in (lanes["device"], lanes["disk_read"]):
            lane.clock.trace = []
        with torch.no_grad():
            run.model(torch.ones(2, 64))
        computed = {op.unit: (start, end) for op, start, end in lanes["device"].clock.trace or []}
        fetched = {op.unit: (start, end) for op, start, end in lanes["disk_read"].clock.trace or []}
        run.session.room.drive.read = read  # type: ignore[method-assign]
    assert len(computed) == len(fetched) == 8
    for unit, (start, _) in computed.items():
        assert fetched[unit][1] <= start
    beside = [unit for unit in range(1, 8) if fetched[unit][0] < computed[unit - 1][1]]
    assert len(beside) >= 4 if slots == 2 else not beside


def test_waiting_for_what_no_computation_follows_is_told(swap: Path) -> None:
    """The last gradient goes to the drive when all is computed: the step ends with it, and says that it waited."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    where = {"parameters": "host", "gradients": "disk", "optimizer_state": "host"}
    with offloadz.offload(model, swap=swap, **where) as run:
        write = run.session.room.drive.write

        def slowly(*how: object) -> None:
            time.sleep(0.2)
            write(*how)  # type: ignore[arg-type]

        run.session.room.drive.write = slowly  # type: ignore[method-assign]
        for _ in range(2):
            run.step({"x": torch.ones(2, 64)}, loss_fn=lambda m, b: m(b["x"]).square().mean())
        run.session.room.drive.write = write  # type: ignore[method-assign]
        assert run.report.wait_s >= 0.2
        assert run.report.busy_s["device"] + run.report.wait_s <= run.report.step_s
