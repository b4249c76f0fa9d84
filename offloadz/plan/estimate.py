"""The numbers of a step of a model with many equal blocks, from walks over fewer of them.

A step grows by the same with each block that is like its neighbours: bytes exactly, times as far as the walk is in its
steady state by the middle.  So a plan for any depth costs two walks over programs of a few hundred ops.  Left to
others: the program and the timeline of the whole model (`predict`, which `offloadz show` prints).  The trade-off: times
are off by some thousandths; `tests/plan/test_estimate.py` holds them to a hundredth.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from offloadz.plan.footprint import Batch
from offloadz.plan.machine import Machine
from offloadz.plan.placement import Placement
from offloadz.plan.predict import Prediction, predict
from offloadz.plan.spec import ModelSpec, Unit

WALKED = (6, 10)
"""Blocks that are walked in place of more; a multiple of two apart, as slots take turns."""


def estimate(spec: ModelSpec, placement: Placement, batch: Batch, machine: Machine) -> Prediction:
    """`predict` as far as numbers go; program and timeline are those of a model with `WALKED[1]` of its blocks."""
    first, count = equal_blocks(spec)
    if count <= WALKED[1]:
        return predict(spec, placement, batch, machine)
    seats = len(spec.unfolding_seats)
    if 0 < placement.kept < seats:  # a block that keeps its graph is not like one that does not
        none, each = (estimate(spec, replace(placement, kept=kept), batch, machine) for kept in (0, seats))
        return _between(none, each, placement.kept, seats)
    few, more = (predict(without(spec, first + n, count - n), placement, batch, machine) for n in WALKED)
    return _between(few, more, count - WALKED[0], WALKED[1] - WALKED[0])


def _between(few: Prediction, more: Prediction, left: int, apart: int) -> Prediction:
    """What stands `left` steps behind `few`, where `more` is `apart` steps behind it."""

    def grown(low: float, high: float) -> float:
        return low + left * (high - low) / apart

    def each(low: Mapping[str, float], high: Mapping[str, float]) -> dict[str, float]:
        return {name: grown(low.get(name, 0.0), high[name]) for name in high}

    return replace(
        more,
        step_s=grown(few.step_s, more.step_s),
        busy_s=each(few.busy_s, more.busy_s),
        shared_s=each(few.shared_s, more.shared_s),
        taken_s=each(few.taken_s, more.taken_s),
        saved_s=each(few.saved_s, more.saved_s),
        disk_read_bytes=few.disk_read_bytes + left * (more.disk_read_bytes - few.disk_read_bytes) // apart,
        disk_written_bytes=few.disk_written_bytes + left * (more.disk_written_bytes - few.disk_written_bytes) // apart,
    )


def equal_blocks(spec: ModelSpec) -> tuple[int, int]:
    """First seat and number of the longest run of blocks that are alike, each with a unit of its own."""
    best = start = 0
    length = 0
    kinds = [_kind(spec, seat) for seat in range(len(spec.seats))]
    for seat, kind in enumerate(kinds):
        if kind is None or seat == 0 or kind != kinds[seat - 1]:
            start = seat
        if kind is not None and seat + 1 - start > length:
            best, length = start, seat + 1 - start
    return best, length


def _kind(spec: ModelSpec, seat: int) -> tuple[tuple[int, str, bool], ...] | None:
    """What two blocks must have in common; None for what is no block, or shares its weights."""
    place = spec.seats[seat]
    if place.kind != "block" or len(place.units) != 1 or place.units[0] in spec.shared_units:
        return None
    return tuple((s.num_elements, s.dtype, s.trainable) for s in spec.units[place.units[0]].sections)


def without(spec: ModelSpec, first: int, count: int) -> ModelSpec:
    """The model without `count` seats from `first` on, each with a unit of its own."""
    gone = {unit for seat in spec.seats[first : first + count] for unit in seat.units}
    units: list[Unit] = []
    moved = {}
    for index, unit in enumerate(spec.units):
        if index not in gone:
            moved[index] = len(units)
            units.append(unit)
    seats = (*spec.seats[:first], *spec.seats[first + count :])
    return replace(
        spec,
        units=tuple(units),
        seats=tuple(replace(seat, units=tuple(moved[unit] for unit in seat.units)) for seat in seats),
    )
