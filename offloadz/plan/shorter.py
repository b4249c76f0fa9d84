"""Models that are walked in place of a large one: fewer of its equal blocks, its parts and its tiles taken together.

A step grows by the same with each block that is like its neighbours.  Left to others: walking them, and what follows
from it (`estimate.py`).  The trade-off: longer parts and tiles follow each other less closely, which is some
thousandths of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from offloadz.plan.alike import first_alike, once, unit_kinds
from offloadz.plan.spec import ModelSpec, Section, Unit

FEW_PARTS, WALKED_SMALL, WALKED_LARGE = 16, (6, 10), (2, 4)
"""Blocks that are walked in place of more, of less than so many parts and of as many: a multiple of two apart, as slots
take turns, and enough that the lanes have come to their pace."""

WALKED_PARTS = 24
"""Most parts of a unit that are walked (a block of 70B has 204)."""

WALKED_TILES = 4
"""Tiles of a table that are walked in place of more."""


@once
def shorter(spec: ModelSpec) -> tuple[ModelSpec, ...]:
    """Models of few and of more blocks, or one where there are no more than are walked; the same under every recipe."""
    plain = spec.with_recipe(spec.recipe.plain)
    if plain is not spec:
        return tuple(part.with_recipe(spec.recipe) for part in shorter(plain))
    (first, count), numbers = equal_blocks(spec), walked(spec)
    few = with_longer_parts(with_fewer_tiles(spec))
    return tuple(without(few, first + n, count - n) for n in numbers) if count > numbers[1] else (few,)


def walked(spec: ModelSpec) -> tuple[int, int]:
    """Numbers of equal blocks that tell of all."""
    first, count = equal_blocks(spec)
    parts = len(spec.units[spec.seats[first].units[0]].parts) if count else 0
    return WALKED_LARGE if parts >= FEW_PARTS else WALKED_SMALL


@once
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


def _kind(spec: ModelSpec, seat: int) -> int | None:
    """What two blocks must have in common; None for what is no block, or shares its weights."""
    place = spec.seats[seat]
    alone = place.kind == "block" and len(place.units) == 1 and place.units[0] not in spec.shared_units
    return first_alike(spec)[place.units[0]] if alone else None


def without(spec: ModelSpec, first: int, count: int) -> ModelSpec:
    """The model without `count` seats from `first` on, each with a unit of its own."""
    gone = {unit for seat in spec.seats[first : first + count] for unit in seat.units}
    left = replace(spec, seats=(*spec.seats[:first], *spec.seats[first + count :]))
    return _numbered(left, {index: unit for index, unit in enumerate(spec.units) if index not in gone})


def with_longer_parts(spec: ModelSpec) -> ModelSpec:
    """The model with parts taken together, so that the largest unit has no more than `WALKED_PARTS`."""
    lengths = {kind.index: len(kind.unit.parts) for kind in unit_kinds(spec)}
    coarse = -(-max(lengths.values(), default=1) // WALKED_PARTS)
    each = zip(spec.units, first_alike(spec), strict=True)
    return replace(spec, units=tuple(replace(u, coarse=min(coarse, lengths[first])) for u, first in each))


def with_fewer_tiles(spec: ModelSpec) -> ModelSpec:
    """The model with the tiles of every table taken together where they are more than `WALKED_TILES`."""
    units = dict(enumerate(spec.units))
    for tiles in {seat.units for seat in spec.seats if len(seat.units) > WALKED_TILES}:
        step = -(-len(tiles) // WALKED_TILES)
        for start in range(0, len(tiles), step):
            some = tiles[start : start + step]
            units[some[0]] = _together([units.pop(index) for index in some])
    return _numbered(spec, dict(sorted(units.items())))


def _together(tiles: Sequence[Unit]) -> Unit:
    """One tile with the rows of several."""
    sections = []
    for alike in zip(*(tile.sections for tile in tiles), strict=True):
        members, start = [], 0
        for member in (m for section in alike for m in section.members):
            members.append(replace(member, start=start))
            start += member.num_elements
        sections.append(Section(alike[0].dtype, alike[0].trainable, tuple(members)))
    return replace(tiles[0], sections=tuple(sections))


def _numbered(spec: ModelSpec, units: dict[int, Unit]) -> ModelSpec:
    """The model with the units that are left, by their former numbers; seats have those of theirs that are left."""
    numbers = {index: number for number, index in enumerate(units)}
    seats = tuple(replace(s, units=tuple(numbers[u] for u in s.units if u in numbers)) for s in spec.seats)
    return replace(spec, units=tuple(units.values()), seats=seats)
