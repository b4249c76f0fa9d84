"""How many ops update a unit: one where all it needs lies in memory, else one a part, as its state comes and goes."""

from __future__ import annotations

from itertools import product

import pytest
from programs import small_spec, step_program, trained_units

from offloadz.plan import spec as plan_spec
from offloadz.plan.ops import Op
from offloadz.plan.placement import Placement

KINDS = ("parameters", "gradients", "optimizer", "activations")


def updates(placement: Placement, monkeypatch: pytest.MonkeyPatch) -> tuple[plan_spec.ModelSpec, list[Op]]:
    monkeypatch.setattr(plan_spec, "PART_ELEMENTS", 4096)
    spec = small_spec()
    assert any(len(unit.trained_parts) > 1 for unit in spec.units)
    return spec, [op for op in step_program(spec, placement, flush=False).ops if op.verb.startswith("update")]


@pytest.mark.parametrize("commit", ["hold", "shadow", "in_place"])
def test_a_unit_in_memory_is_updated_by_one_op(commit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where = Placement(**dict.fromkeys(KINDS, "host"), commit=commit)
    spec, ops = updates(where, monkeypatch)
    due = trained_units(spec)
    for unit in due:
        own = [op for op in ops if op.unit == unit]
        parts = spec.units[unit].trained_parts
        assert own
        for op in own:
            assert op.part == (parts[0] if len(parts) == 1 else -1)
            assert op.nbytes == sum(spec.units[unit].parts[k].num_elements for k in parts)
            assert len(op.writes) == 2 * len(parts)
            kinds = [place[0] for place in op.reads[: 3 * len(parts)]]
            assert kinds == ["g", "s", "w"] * len(parts)


def test_what_comes_part_by_part_is_updated_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for tiers in product(("host", "disk"), repeat=3):
        where = Placement(**dict(zip(KINDS, (*tiers, "host"), strict=True)))
        spec, ops = updates(where, monkeypatch)
        blocks = {unit for seat in spec.seats if seat.kind == "block" for unit in seat.units}
        for unit in blocks:  # their weights on disk come whole, to be computed with next
            parts = spec.units[unit].trained_parts
            found = [op.part for op in ops if op.unit == unit]
            assert found == ([-1] if tiers[1:] == ("host", "host") else list(parts)), (tiers, unit)
