"""What a step leaves in slots for the first updates of the next one.

With hold every update waits for the norm, and the first ones hold up the first forward: before a row is looked up, its
table is read with its state, updated and written.  Two things spare it some of that.  While the first block goes
backward the drive has nothing to do, so state and weights of the first parts are read then, in all slots but one:
through that one all others can pass, in whatever order a model calls its blocks.  And the gradients that are whole
last, those of tables, stay in the slots they were made in, instead of being written and read again.  Each value has a
slot of its own, the same in every step, so that one program ends with it there and the next begins with it.
Left to others: the ops (`updates.py`), and what a program begins with (`Owed.left`).  The trade-off: where no step
follows, these reads were in vain; over ranks there are none, since ranks with fewer parts would begin exchanges sooner
than others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from offloadz.plan.alike import once
from offloadz.plan.placement import Placement
from offloadz.plan.spec import ModelSpec


class Fetched(NamedTuple):
    """A part's state (`kind` "s") or weights ("p"), and the slot it waits in."""

    kind: str
    unit: int
    part: int
    slot: str
    nbytes: int

    def at(self, tier: str) -> str:
        """Its place: `ahead` as a program leaves it, on the `host` as the next one finds it."""
        return f"{self.kind}{self.unit}.{self.part}@{tier}"


@once
def fetched_ahead(spec: ModelSpec, placement: Placement) -> tuple[Fetched, ...]:
    """What fits into all slots but one, in the order of the updates."""
    alone, parts = placement.share.ranks == 1, enumerate(islice(_parts(spec), placement.slots - 1))
    return tuple(found for slot, part in parts for found in _brought(spec, placement, *part, slot) if alone)


def stays(spec: ModelSpec, placement: Placement, tables: Sequence[int]) -> dict[int, str]:
    """The units of these tables whose gradient stays in a slot from where it is made to its update, and that slot.

    Tables go backward last, the first one at the very end; by then all slots of gradients are free.
    """
    if placement.gradients != "disk" or placement.share.ranks > 1:
        return {}
    trained = (u for seat in tables for u in spec.seats[seat].units if spec.units[u].trainable)
    return {unit: f"host.g#{slot}" for slot, unit in enumerate(islice(trained, placement.slots))}


@once
def staying_bytes(spec: ModelSpec, placement: Placement) -> int:
    """Of these gradients, where all tables are looked up."""
    units = (spec.units[unit] for unit in stays(spec, placement, trained_tables(spec)))
    return sum(unit.parts[k].weight_bytes for unit in units for k in unit.trained_parts)


@once
def trained_tables(spec: ModelSpec) -> tuple[int, ...]:
    """Seats of tables that are trained."""
    tables = (seat for seat, place in enumerate(spec.seats) if place.kind == "table")
    return tuple(seat for seat in tables if any(spec.units[u].trainable for u in spec.seats[seat].units))


def scattered(spec: ModelSpec, tables: Sequence[int]) -> list[tuple[int, int]]:
    """Units and seats of tables in the order in which rows are added to their gradients: what is looked up first comes
    last, as everything backward."""
    return [(u, seat) for seat in reversed(tables) for u in reversed(spec.seats[seat].units) if spec.units[u].trainable]


def found(left: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """What one program leaves, as the next one finds it."""
    return tuple((value.replace("@ahead", "@host"), slot) for value, slot in left.items())


def _parts(spec: ModelSpec) -> Iterator[tuple[int, int]]:
    """Unit and number of each part that is trained, in the order of the updates."""
    for unit in dict.fromkeys(unit for seat in spec.seats for unit in seat.units):
        yield from ((unit, part) for part in spec.units[unit].trained_parts)


def _brought(spec: ModelSpec, placement: Placement, unit: int, part: int, slot: int) -> Iterator[Fetched]:
    """What the update of a part brings from the drive, apart from gradients and from a block's weights, which come
    whole."""
    owner, seat = spec.units[unit].parts[part], next(seat for seat in spec.seats if unit in seat.units)
    if placement.optimizer == "disk" and owner.state_bytes:
        yield Fetched("s", unit, part, f"host.s#{slot}", owner.state_bytes)
    if placement.parameters == "disk" and seat.kind == "table":
        yield Fetched("p", unit, part, f"host.p#{slot}", owner.weight_bytes)
