"""The passes change when things happen and where they lie, never what is computed.

A compiled program means what the sequential one means, in every order that its edges and lanes allow; slots, the hoist
and the edges are each held to their own rule besides.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import Meaning, identity, meaning, small_spec, step_program, trained_units

from offloadz.plan.errors import DoesNotFit
from offloadz.plan.ops import LANES, Op, Program
from offloadz.plan.passes import check, compiled, hazards, hoisted, link, place, pool_of
from offloadz.plan.placement import TIERS, Placement
from offloadz.plan.spec import ModelSpec
from offloadz.plan.steps import CLOSING, Backward, Finish, Forward, Turn, build

DISK = Placement("disk", "disk", "disk", "disk")

placements = st.builds(
    Placement,
    *[st.sampled_from(TIERS)] * 4,
    slots=st.integers(1, 3),
    unified=st.booleans(),
    compute=st.just("float32"),
    storage=st.sampled_from(("float32", "bfloat16")),
    commit=st.sampled_from(("hold", "shadow")),
)
specs = st.builds(
    small_spec,
    layers=st.integers(1, 4),
    tied=st.booleans(),
    freeze=st.sampled_from(((), ("emb.*",), ("layers.0.*",), ("layers.*.b",), ("emb.*", "layers.0.*"))),
)


def prepared(spec: ModelSpec, placement: Placement, micros: int, sweeps: int) -> tuple[Program, Placement]:
    placement = replace(placement, accumulate=sweeps > 1)
    return step_program(replace(spec, dtype=placement.storage), placement, micros, sweeps), placement


def any_order(program: Program, source: random.Random) -> Meaning:
    """The program in one of the orders that in-order lanes and edges allow."""
    done: set[int] = set()
    queues = {lane: [i for i, op in enumerate(program.ops) if op.lane == lane] for lane in LANES}
    found = Meaning()
    while any(queues.values()):
        ready = [lane for lane, queue in queues.items() if queue and done.issuperset(program.ops[queue[0]].after)]
        assert ready, f"no lane can go on:\n{program.text()}"
        index = queues[source.choice(ready)].pop(0)
        done.add(index)
        found.run(program.ops[index])
    return found


@settings(max_examples=80, deadline=None)
@given(specs, placements, st.integers(1, 3), st.integers(1, 3), st.integers(0, 1 << 30))
def test_compiled_programs_mean_the_same_in_every_order(
    spec: ModelSpec, placement: Placement, micros: int, sweeps: int, seed: int
) -> None:
    program, placement = prepared(spec, placement, micros, sweeps)
    wanted = meaning(program)
    fast = compiled(program, placement)
    assert meaning(fast).same_as(wanted)
    source = random.Random(seed)
    for _ in range(3):
        assert any_order(fast, source).same_as(wanted)


def test_a_missing_edge_would_be_seen() -> None:
    """Without its edges the same program goes wrong in some order: the check above checks something."""
    program, placement = prepared(small_spec(), DISK, 2, 1)
    bare = Program(tuple(op._replace(after=()) for op in compiled(program, placement).ops))
    source = random.Random(0)
    assert not all(any_order(bare, source).same_as(meaning(program)) for _ in range(20))


@settings(max_examples=40, deadline=None)
@given(specs, placements, st.integers(1, 3), st.integers(1, 2))
def test_the_text_form_and_back(spec: ModelSpec, placement: Placement, micros: int, sweeps: int) -> None:
    for program in (prepared(spec, placement, micros, sweeps)[0], compiled(*prepared(spec, placement, micros, sweeps))):
        assert Program.parse(program.text()).ops == program.ops


def test_the_text_form_marks_the_failing_line() -> None:
    program = compiled(*prepared(small_spec(), DISK, 1, 1))
    lines = program.text(failed=7).splitlines()
    assert [i for i, line in enumerate(lines) if line.endswith("<-- failed here")] == [7]
    with pytest.raises(ValueError, match="not an op"):
        Op.parse("disk_read load.w forward")


# ---- slots -------------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(specs, placements, st.integers(1, 3), st.integers(1, 2))
def test_no_pool_has_more_slots_than_the_placement(
    spec: ModelSpec, placement: Placement, micros: int, sweeps: int
) -> None:
    program, placement = prepared(spec, placement, micros, sweeps)
    placed = place(program, placement)
    used = {p for op in placed.ops for p in (*op.reads, *op.writes) if "#" in p}
    assert {p.partition("#")[0] for p in used} == set(placed.slots)
    assert all(int(p.partition("#")[2]) < placement.slots for p in used)
    assert all(count <= placement.slots for count in placed.slots.values())
    for op in placed.ops:
        assert not [p for p in (*op.reads, *op.writes) if "#" not in p and pool_of(p, placement)], op.text()


def fetch(unit: int) -> Op:
    return Op("disk_read", "load.w", "forward", (f"w{unit}.0@disk",), (f"w{unit}@host",), unit=unit)


def test_a_pool_that_is_too_small_is_named() -> None:
    """Two units at once out of one slot."""
    both = Op("device", "forward", "forward", ("w0@host", "w1@host"), ("x0.0@live",))
    program = Program((fetch(0), fetch(1), both))
    with pytest.raises(DoesNotFit, match=r"host\.w.*1 slots.*op 1 \(load\.w\).*offload\.slots"):
        compiled(program, replace(DISK, slots=1))
    assert compiled(program, DISK).slots == {"host.w": 2}


def test_the_slot_that_has_been_free_longest_is_given() -> None:
    """Round robin: three units through two slots."""
    ops: list[Op] = []
    for unit in range(3):
        ops += [fetch(unit), Op("device", "forward", "forward", (f"w{unit}@host",), ())]
    placed = place(Program(tuple(ops)), DISK)
    assert [op.writes[0] for op in placed.ops if op.lane == "disk_read"] == ["host.w#0", "host.w#1", "host.w#0"]


# ---- hoist -------------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(specs, placements, st.integers(1, 3), st.integers(1, 2))
def test_the_hoist_keeps_every_lane_in_order(spec: ModelSpec, placement: Placement, micros: int, sweeps: int) -> None:
    program, placement = prepared(spec, placement, micros, sweeps)
    placed = place(program, placement)
    order = hoisted(placed, hazards(placed))
    assert sorted(order) == list(range(len(placed.ops)))
    for lane in LANES:
        of_lane = [index for index in order if placed.ops[index].lane == lane]
        assert of_lane == sorted(of_lane)


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_prefetch_depth_is_the_number_of_slots(slots: int) -> None:
    """A fetch stands right after the last computation that used its slot: `slots - 1` blocks ahead."""
    spec = small_spec(layers=6)
    placement = replace(DISK, slots=slots)
    program = compiled(build(spec, placement, (Forward(tuple(Turn(i, i, 1, False) for i in range(1, 7))),)), placement)
    blocks = [i for s in spec.seats if s.kind == "block" for i in s.units]
    for position, unit in enumerate(blocks):
        at = next(i for i, op in enumerate(program.ops) if op.verb == "load.w" and op.unit == unit)
        before = [op.unit for op in program.ops[:at] if op.lane == "device"]
        assert before == blocks[: max(0, position - slots + 1)]


def test_updates_come_in_the_order_of_need() -> None:
    """Each unit is updated before its forward, and the last unit's update does not hold up the first forward."""
    spec = small_spec(layers=6, tied=False)
    program = compiled(*prepared(spec, DISK, 1, 1))
    index = {}
    for i, op in enumerate(program.ops):
        index.setdefault((op.verb, op.unit), i)
    for unit in trained_units(spec):
        users = [i for i, op in enumerate(program.ops) if op.lane == "device" and op.unit == unit]
        assert not users or index["update", unit] < users[0]
    first = next(i for i, op in enumerate(program.ops) if op.lane == "device" and op.verb == "forward")
    head = spec.seats[-1].units[0]
    assert index["update", head] > first


# ---- edges -------------------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(specs, placements, st.integers(1, 2))
def test_edges_are_the_hazards_and_point_backward(spec: ModelSpec, placement: Placement, micros: int) -> None:
    linked = compiled(*prepared(spec, placement, micros, 1))
    seen: set[str] = set()
    for index, (op, waits) in enumerate(zip(linked.ops, hazards(linked), strict=True)):
        assert set(op.after) == waits and all(w < index for w in op.after)
        fresh = {p for p in (*op.reads, *op.writes) if p not in seen}
        assert set(op.enters) == fresh
        seen |= fresh


def test_a_reader_waits_for_the_writer_and_a_writer_for_the_readers() -> None:
    ops = (
        Op("disk_read", "load.w", "forward", ("w0.0@disk",), ("host.w#0",)),
        Op("device", "forward", "forward", ("host.w#0",), ()),
        Op("h2d", "fetch.w", "forward", ("host.w#0",), ("compute.w#0",)),
        Op("disk_read", "load.w", "forward", ("w1.0@disk",), ("host.w#0",)),
    )
    waits = hazards(Program(ops))
    assert [op.after for op in link(Program(ops), waits, range(4)).ops] == [(), (0,), (0,), (0, 1, 2)]
    moved = link(Program(ops), waits, [0, 2, 1, 3]).ops
    assert [(op.lane, op.after) for op in moved][1:] == [("h2d", (0,)), ("device", (0,)), ("disk_read", (0, 1, 2))]


def test_an_edge_that_points_forward_is_refused() -> None:
    ops = (fetch(0)._replace(after=(1,)), fetch(1))
    with pytest.raises(RuntimeError, match="op 0 waits for op 1"):
        check(Program(ops))


# ---- what stands in a step -----------------------------------------------------------------------------------------


def test_frozen_units_have_no_gradient_no_state_and_no_write_back() -> None:
    spec = small_spec(freeze=("layers.1.*",))
    frozen = next(i for i, unit in enumerate(spec.units) if not unit.trainable)
    verbs = {op.verb for op in step_program(spec, DISK).ops if op.unit == frozen}
    assert verbs == {"load.w", "forward", "backward", "store.x", "save.x", "load.x"}


def test_nothing_runs_backward_below_the_lowest_trained_seat() -> None:
    spec = small_spec(tied=False, freeze=("emb.*", "layers.0.*", "layers.1.*"))
    program = step_program(spec, DISK)
    assert min(op.seat for op in program.ops if op.verb == "backward") == 3
    assert {op.seat for op in program.ops if op.verb == "save.x"} == {3, 4}


def test_what_stays_where_it_is_has_no_transfer() -> None:
    """Everything but the inputs in host memory, no GPU, fp32: nothing but gradients moves."""
    program = step_program(
        small_spec(), replace(DISK, **dict.fromkeys(("parameters", "optimizer"), "host"), gradients="host")
    )
    assert {op.verb for op in program.ops if op.unit >= 0 and op.verb[-1] in "wps"} == set()
    assert not [op for op in program.ops if op.lane.startswith("disk") and not op.verb.endswith(".x")]


def test_gradients_are_rounded_once_whatever_the_number_of_passes() -> None:
    for sweeps in (1, 2, 3):
        spec = small_spec()
        program = step_program(spec, replace(DISK, accumulate=sweeps > 1), sweeps=sweeps, flush=False)
        rounded = [op.unit for op in program.ops if op.verb in CLOSING]
        assert sorted(rounded) == sorted(trained_units(spec))
        norm = next(i for i, op in enumerate(program.ops) if op.verb == "norm")
        assert all(i < norm for i, op in enumerate(program.ops) if op.verb in (*CLOSING, "scatter"))


def test_the_tied_tables_gradient_waits_for_the_lookup() -> None:
    """Trap 22: the head's share is kept as an open sum until the rows of the lookup are added, the last gradient op.

    Then it stays in its slot (`ahead.py`)."""
    spec = small_spec(tied=True)
    table, apart = spec.seats[0].units[0], replace(DISK, unified=False)
    done = [
        op.verb
        for op in step_program(spec, apart, flush=False).ops
        if op.unit == table and op.verb[-2:] in (".g", "er")
    ]
    assert done == ["zero.g", "save.g", "load.g", "fetch.g", "scatter", "drain.g"]


def test_a_second_backward_in_a_step_planned_for_one_is_refused() -> None:
    spec = small_spec(tied=False)
    turn = Turn(1, 0)
    with pytest.raises(RuntimeError, match=r"layers\.0.*planned for one"):
        build(spec, DISK, (Forward((turn,)), Backward((turn,), last=False)))
    with pytest.raises(RuntimeError, match=r"layers\.0.*already rounded"):
        build(spec, DISK, (Forward((turn,)), Backward((turn,)), Backward((turn,)), Finish()))


def test_ops_of_a_program_are_told_apart() -> None:
    """Within a lane no two ops of a phase are alike, so that comparing lanes compares ops."""
    program = step_program(small_spec(), DISK)
    device = [identity(op) for op in program.ops if op.lane == "device"]
    assert len(set(device)) == len(device)
