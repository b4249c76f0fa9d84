"""What the first updates of a step read is fetched under the last backward of the step before."""

from __future__ import annotations

from dataclasses import replace

import pytest
from programs import small_spec, trained_units

from offloadz.plan.ahead import fetched_ahead, found, stays, trained_tables
from offloadz.plan.footprint import Batch
from offloadz.plan.ops import Program
from offloadz.plan.pace import program_of
from offloadz.plan.passes import compiled, place
from offloadz.plan.placement import Placement
from offloadz.plan.predict import step_program, training_phases
from offloadz.plan.shapes import ParamInfo, TableInfo, make_spec
from offloadz.plan.share import Share
from offloadz.plan.steps import Owed, Updates, build, leaves

BATCH = Batch(2, 64, 1)
DISK = Placement("disk", "disk", "disk", "disk")
SPEC = small_spec(layers=3)


def steady(placement: Placement, fetched: bool = True) -> Program:
    """The sequential program of a step, of which everything is due."""
    left = left_by(placement) if fetched else ()
    return build(SPEC, placement, training_phases(SPEC, 1, 1), Owed(trained_units(SPEC), unended=True, left=left))


def left_by(placement: Placement) -> tuple[tuple[str, str], ...]:
    """What a step leaves in slots for the next one."""
    return found(leaves(SPEC, placement, training_phases(SPEC, 1, 1)))


def first_reads(program: Program) -> list[str]:
    """What the drive is read for before the first computation."""
    first = next(index for index, op in enumerate(program.ops) if op.lane == "device")
    return [op.verb for op in program.ops[:first] if op.lane == "disk_read"]


@pytest.mark.parametrize("slots", [2, 3])
def test_one_part_less_than_there_are_slots(slots: int) -> None:
    placement = replace(DISK, slots=slots)
    fetched = fetched_ahead(SPEC, placement)
    kinds = [one.kind for one in fetched]
    assert kinds.count("s") == slots - 1 and kinds.count("p") == 1  # of blocks only state comes so
    assert len({one.slot for one in fetched}) == len(fetched)
    program = steady(placement)
    ahead = [op for op in program.ops if op.phase == "ahead"]
    assert [op.writes for op in ahead] == [(one.at("ahead"),) for one in fetched]
    homes = {op.reads for op in steady(placement, fetched=False).ops if op.verb in ("load.s", "load.p")}
    assert {op.reads for op in ahead} <= homes
    assert sum(op.nbytes for op in ahead) == sum(one.nbytes for one in fetched) > 0
    bare = steady(placement, fetched=False)
    gradients = sum(len(SPEC.units[u].trained_parts) for u in stays(SPEC, placement, trained_tables(SPEC)))
    missing = len(first_reads(bare)) - len(first_reads(program))
    assert gradients < missing <= len(fetched) + gradients == len(bare) - len(program)


def test_reads_go_under_the_last_backward() -> None:
    """In the compiled program they come before the last block's backward is submitted, not behind the norm."""
    program = step_program(SPEC, replace(DISK, slots=2), BATCH)
    last = max(index for index, op in enumerate(program.ops) if op.lane == "device" and op.verb == "backward")
    assert any(op.phase == "ahead" and index < last for index, op in enumerate(program.ops))


def test_a_slot_is_nobody_elses_until_its_value_was_used() -> None:
    """Also where the updates come in another order than that of the seats."""
    placement = replace(DISK, slots=3)
    backwards = Owed(trained_units(SPEC)[::-1], left=left_by(placement))
    for program in (steady(placement), build(SPEC, placement, (Updates(),), backwards)):
        placed = place(program, placement)
        assert len(placed.held) == 3 + 1
        for slot in placed.held.values():
            touching = [op for op in placed.ops if slot in (*op.reads, *op.writes)]
            assert touching[0].verb.startswith("update") and slot in touching[0].reads, touching[0].text()


def test_the_next_program_begins_where_the_last_one_ended() -> None:
    program = compiled(steady(DISK), DISK)
    assert {v.replace("ahead", "host"): slot for v, slot in program.left.items()} == dict(program.held)
    ends = {place: op for op in program.ops for place in op.writes}
    assert {ends[slot].phase for slot in program.left.values()} == {"ahead", "finish"}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("unified", [False, True])
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_the_gradient_of_a_table_stays_in_its_slot(slots: int, unified: bool, tied: bool) -> None:
    """Nothing of it goes to the drive once it is whole, and no other gradient comes into its slot till its update."""
    spec, placement = small_spec(layers=3, tied=tied), replace(DISK, slots=slots, unified=unified)
    table, phases = spec.seats[0].units[0], training_phases(spec, 1, 1)
    told = Owed(trained_units(spec), unended=True, left=found(leaves(spec, placement, phases)))
    program = compiled(build(spec, placement, phases, told), placement)
    moved = [op.verb for op in program.ops if op.unit == table and op.verb in ("store.g", "load.h")]
    others = {op.unit for op in program.ops if op.verb == "store.g"}
    assert not moved and others == set(trained_units(spec)) - {table}
    slot = program.left[f"g{table}@host"]
    touching = [(op.verb, op.unit) for op in program.ops if slot in (*op.reads, *op.writes)]
    assert touching[0] == ("update.g", table)
    assert touching[-2:] == [("square.g" if unified else "drain.g", table), ("norm", -1)]


def test_as_many_gradients_stay_as_there_are_slots() -> None:
    """The first to be updated, which are whole last."""
    params = [ParamInfo("emb.weight", (1 << 16, 64)), ParamInfo("layers.0.w", (64, 64))]
    tables = [TableInfo("emb", "emb.weight")]
    spec = make_spec(params, ["layers.0"], tables, [], dtype="float32", order=["emb", "layers.0"])
    placement, table = replace(DISK, slots=2), spec.seats[0].units
    assert len(table) > 2 and list(stays(spec, placement, (0,))) == list(table[:2])
    program = step_program(spec, placement, BATCH)
    assert [op.unit for op in program.ops if op.verb == "scatter"] == list(reversed(table))
    stored = {op.unit for op in program.ops if op.verb == "store.g"}
    assert stored == set(trained_units(spec)) - set(table[:2])


def test_only_with_hold_and_for_one_rank() -> None:
    for commit in ("shadow", "in_place"):
        program = steady(replace(DISK, commit=commit, copies=2), fetched=False)
        assert not program.left and not [op for op in program.ops if op.phase == "ahead"]
    apart = replace(DISK, share=Share(ranks=2, stage=1))
    assert fetched_ahead(SPEC, apart) == () and stays(SPEC, apart, trained_tables(SPEC)) == {}
    assert stays(SPEC, replace(DISK, gradients="host"), trained_tables(SPEC)) == {}


def test_nothing_where_nothing_is_read_from_a_drive() -> None:
    assert fetched_ahead(SPEC, Placement()) == fetched_ahead(SPEC, replace(DISK, slots=1)) == ()
    assert {one.kind for one in fetched_ahead(SPEC, replace(Placement(), optimizer="disk"))} == {"s"}


def test_a_program_of_other_phases_leaves_nothing() -> None:
    forward = training_phases(SPEC, 1, 1)[:1]
    assert not program_of(SPEC, DISK, forward, Owed(trained_units(SPEC), left=left_by(DISK))).left
