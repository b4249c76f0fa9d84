"""The walk over real lanes ends in the state of the sequential run, whatever the lanes' timing.

So it does when a plan is given up in the middle.  The lanes here are the threads of a run; their ops work on values
instead of buffers.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import Meaning, meaning, one_pass, small_spec, step_program, tables, trained_units

from offloadz.plan.ops import LANES, Op, Program
from offloadz.plan.passes import compiled
from offloadz.plan.placement import Placement
from offloadz.plan.steps import Finish, Owed, build
from offloadz.plan.walk import Frontier, VirtualLane, Walk, simulate
from offloadz.runtime.lanes import InlineLane, WorkerLane

DISK = Placement("disk", "disk", "disk", "disk")
SPEC = small_spec(layers=3)


@contextmanager
def lanes_of(found: Meaning, seed: int = -1, fails: str = "") -> Iterator[dict[str, WorkerLane | InlineLane]]:
    """Worker threads and an inline lane that run ops on `found`, with random delays if `seed` is not negative."""
    source, lock = random.Random(seed), threading.Lock()

    def run(op: Op) -> None:
        if op.verb == fails:
            raise OSError(28, "no space")
        with lock:
            delay = source.random() * 1e-3 if seed >= 0 and source.random() < 0.3 else 0.0
        time.sleep(delay)
        with lock:
            found.run(op)

    lanes: dict[str, WorkerLane | InlineLane] = {}
    for name in LANES:
        lanes[name] = InlineLane() if name == "device" else WorkerLane(name, run)
    lanes["device"].work = run  # type: ignore[union-attr]
    try:
        yield lanes
    finally:
        assert all(lane.close(5.0) for lane in lanes.values() if isinstance(lane, WorkerLane))


def drain(lanes: dict[str, WorkerLane | InlineLane]) -> None:
    for lane in lanes.values():
        if isinstance(lane, WorkerLane):
            lane.drain()


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1 << 30), slots=st.integers(1, 3), micros=st.integers(1, 2), sweeps=st.integers(1, 2))
def test_any_timing_ends_in_the_state_of_the_sequential_run(seed: int, slots: int, micros: int, sweeps: int) -> None:
    placement = replace(DISK, slots=slots, accumulate=sweeps > 1)
    program = step_program(SPEC, placement, micros, sweeps)
    found = Meaning()
    with lanes_of(found, seed) as lanes:
        simulate(compiled(program, placement), lanes)
        drain(lanes)
    assert found.same_as(meaning(program))


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 1 << 30), slots=st.integers(1, 3))
def test_programs_follow_each_other_without_a_pause(seed: int, slots: int) -> None:
    """Four steps, the frontier alone between them: a step's last stores run beside the next one's first fetches, and
    what one has fetched the next one has not to."""
    placement = replace(DISK, slots=slots)
    ways = ((False, False), (False, True), (True, True), (True, False))
    parts = [step_program(SPEC, placement, 2, flush=flush, fetched=fetched) for flush, fetched in ways]
    found, frontier = Meaning(), Frontier()
    with lanes_of(found, seed) as lanes:
        for part in parts:
            simulate(compiled(part, placement), lanes, frontier)
        drain(lanes)
    assert found.same_as(meaning(Program(tuple(op for part in parts for op in part.ops))))


def test_without_the_frontier_programs_would_run_into_each_other() -> None:
    placement = replace(DISK, slots=2)
    part = step_program(SPEC, placement, 2)
    wanted = meaning(Program(part.ops * 3))
    same = []
    for seed in range(10):
        found = Meaning()
        with lanes_of(found, seed) as lanes:
            for _ in range(3):
                simulate(compiled(part, placement), lanes, Frontier())
            drain(lanes)
        same.append(found.same_as(wanted))
    assert not all(same)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    share=st.floats(0, 1),
    where=st.sampled_from(("disk", "host")),
    slots=st.integers(1, 2),
    frozen=st.integers(0, 2),
)
def test_a_walk_given_up_anywhere_still_finishes_its_updates(
    seed: int, share: float, where: str, slots: int, frozen: int
) -> None:
    """What is half done is dropped, and every due update happens once, with the gradient of its own step.

    Frozen blocks stand between: they would have taken the slots that updates before and behind them use.
    """
    placement = Placement(where, where, where, where, slots=slots)
    spec = small_spec(layers=4, freeze=tuple(f"layers.{1 + i}.*" for i in range(frozen)))
    phases = (*one_pass(spec, 2), Finish(tables(spec)))
    program = compiled(build(spec, placement, phases, Owed(trained_units(spec))), placement)
    turns = [op for op in program.ops if op.lane == "device"]
    stop = round(share * len([op for op in turns if op.phase == "forward"]))
    found = Meaning()
    with lanes_of(found, seed) as lanes:
        walk = Walk(program, lanes, Frontier())
        walk.advance()
        for _ in range(stop):
            walk.compute()
        walk.finish("update")
        drain(lanes)
    wanted = meaning(build(spec, placement, phases[:1], Owed(trained_units(spec))))
    for kind in "ws":
        homes = {p: v for p, v in wanted.at_rest().items() if p[0] == kind and p.endswith(f"@{where}")}
        assert homes and {p: found.at_rest().get(p) for p in homes} == homes
    assert sorted(found.lanes["cpu"]) == sorted(wanted.lanes["cpu"])


def test_the_walk_stands_before_each_computation() -> None:
    program = compiled(step_program(SPEC, DISK, 1), DISK)
    found = Meaning()
    with lanes_of(found) as lanes:
        walk = Walk(program, lanes, Frontier())
        seen = []
        while (op := walk.advance()) is not None:
            assert op is walk.waiting_for
            seen.append(op)
            walk.compute()
        drain(lanes)
    assert seen == [op for op in program.ops if op.lane == "device"]
    assert walk.waiting_for is None and walk.index == len(program)


@pytest.mark.parametrize("verb", ["load.w", "store.x", "square.g", "update"])
def test_a_failed_op_fails_what_depends_on_it_and_nothing_waits(verb: str) -> None:
    program = compiled(step_program(SPEC, DISK, 2), DISK)
    found = Meaning()
    with lanes_of(found, fails=verb) as lanes:
        walk = Walk(program, lanes, Frontier())
        with pytest.raises(OSError, match="no space"):
            while walk.advance() is not None:
                walk.compute()
            drain(lanes)
            raise next(lane.error[1] for lane in lanes.values() if isinstance(lane, WorkerLane) and lane.error)
        drain(lanes)
        failed = [lane for lane in lanes.values() if isinstance(lane, WorkerLane) and lane.error]
        assert [lane.error[0].verb for lane in failed if lane.error] and failed[0].error is not None
        assert {lane.error[0].verb for lane in failed if lane.error} == {verb}


def test_virtual_lanes_answer_with_times() -> None:
    """Three times a fetch of 2 s and a computation of 3 s: one slot takes the sum, two the slower lane and a fetch."""
    ops: list[Op] = []
    for unit in range(3):
        ops.append(Op("disk_read", "load.w", "forward", (f"w{unit}.0@disk",), (f"w{unit}@host",), unit=unit))
        ops.append(Op("device", "forward", "forward", (f"w{unit}@host",), unit=unit))
    ends = {}
    for slots in (1, 2):
        lanes = {name: VirtualLane(lambda op: 3.0 if op.lane == "device" else 2.0) for name in LANES}
        simulate(compiled(Program(tuple(ops)), replace(DISK, slots=slots)), lanes)
        ends[slots] = lanes["device"].free_s
        assert [start for _, start, _ in lanes["device"].spans] == ([2.0, 7.0, 12.0] if slots == 1 else [2.0, 5.0, 8.0])
    assert ends == {1: 15.0, 2: 11.0}


def test_the_plan_that_is_simulated_is_the_plan_that_runs() -> None:
    """Virtual and real lanes are given the same ops in the same order."""
    program = compiled(step_program(SPEC, DISK, 2), DISK)
    told: list[list[Op]] = [[], []]
    virtual = {name: VirtualLane(lambda op: 1e-3) for name in LANES}
    with lanes_of(Meaning()) as real:
        for lanes, seen in ((virtual, told[0]), (real, told[1])):
            walk = Walk(program, lanes, Frontier(), seen.append)  # type: ignore[arg-type]
            while walk.advance() is not None:
                walk.compute()
        drain(real)
    assert told[0] == told[1] == list(program.ops)
