"""Gradients that are made where they are kept: when they are, that both places are laid out alike, and what a step then
does not move.  That the bits are those of a slot is held by every test that compares with a rehearsed device."""

from __future__ import annotations

from dataclasses import replace

import pytest
from programs import small_spec, step_program, trained_units

from offloadz.plan.ops import Program
from offloadz.plan.placement import Placement, slot_bytes
from offloadz.plan.shapes import ParamInfo, make_spec
from offloadz.plan.share import Share
from offloadz.plan.spec import PART_ELEMENTS, ModelSpec

MEMORY = Placement("host", "host", "host", "device")
DISK = Placement("disk", "disk", "disk", "disk")


def verbs(program: Program, kind: str) -> list[tuple[str, int]]:
    return [(op.verb, op.unit) for op in program.ops if op.verb.endswith(kind)]


def large_spec() -> ModelSpec:
    """Blocks of several parts, of which some are frozen, and a table of several."""
    params = [ParamInfo("emb.weight", (70_001, 96))]
    for i in range(2):
        params += [ParamInfo(f"layers.{i}.a", (1001, 2048)), ParamInfo(f"layers.{i}.still", (3, 7))]
        params += [ParamInfo(f"layers.{i}.b", (4099, 1031)), ParamInfo(f"layers.{i}.c", (13,))]
    return make_spec(params, ["layers.0", "layers.1"], [], [], dtype="float32", freeze=("*.still",))


@pytest.mark.parametrize("spec", [small_spec(), small_spec(freeze=("layers.*.b",)), large_spec()])
def test_a_gradient_lies_at_home_as_where_it_is_made(spec: ModelSpec) -> None:
    for unit in spec.units:
        for sums in (False, True):
            assert unit.grad_bytes(sums) == unit.slope_bytes
            for k in unit.trained_parts:
                part = unit.parts[k]
                assert unit.grad_offset(k, sums) == unit.slope_offsets[part.section] + 4 * part.start
    assert spec.num_elements < PART_ELEMENTS or max(len(unit.trained_parts) for unit in spec.units) > 1


def test_in_memory_a_gradient_is_measured_and_moves_nowhere() -> None:
    spec = small_spec(tied=False)
    program = step_program(spec, MEMORY)
    moved = verbs(program, ".g")
    assert sorted(unit for verb, unit in moved if verb == "square.g") == sorted(trained_units(spec))
    head, table = spec.seats[-1].units[0], spec.seats[0].units[0]
    assert sorted(each for each in moved if each[0] != "square.g") == [("zero.g", table), ("zero.g", head)]
    assert "compute.g" not in slot_bytes(spec, MEMORY) and "host.g" not in slot_bytes(spec, MEMORY)


def test_to_the_drive_it_goes_from_where_it_is_made() -> None:
    spec = small_spec(tied=True)
    table, block = spec.seats[0].units[0], spec.seats[1].units[0]
    moved = verbs(step_program(spec, DISK, flush=False), "")
    mine = [verb for verb, unit in moved if unit == block and verb in ("backward", "square.g", "store.g", "load.h")]
    assert mine[-4:] == ["backward", "backward", "square.g", "store.g"]
    shared = [verb for verb, unit in moved if unit == table and (".g" in verb or verb == "scatter")]
    assert shared == ["zero.g", "store.g.sum", "load.g", "scatter", "square.g"]  # it stays in its slot
    assert slot_bytes(spec, DISK).keys() & {"compute.g", "host.g"} == {"host.g"}


def test_only_the_first_of_several_terms_reads_nothing() -> None:
    for placement in (MEMORY, DISK, replace(DISK, unified=False)):
        program = step_program(small_spec(), replace(placement, accumulate=True), micros=3, sweeps=2)
        block = [op for op in program.ops if op.verb == "backward" and op.unit == 1]
        assert [set(op.writes) <= set(op.reads) for op in block] == [False, True, True, True, True, True]


OTHERS = {
    "device of its own": {"unified": False},
    "rounded": {"storage": "bfloat16"},
    "over ranks": {"share": Share(0, 2, 1)},
    "kept nowhere": {"commit": "in_place"},
}


@pytest.mark.parametrize("change", OTHERS.values(), ids=OTHERS)
def test_else_it_is_made_in_a_slot(change: dict[str, object]) -> None:
    placement = replace(MEMORY, **change)  # type: ignore[arg-type]
    spec = replace(small_spec().shared_by(placement.share), dtype=placement.storage)
    program = step_program(spec, placement)
    assert {op.unit for op in program.ops if op.verb == "drain.g"} == set(trained_units(spec))
    assert not verbs(program, "square.g") and "compute.g" in slot_bytes(spec, placement)
