"""What a step fetches behind its last turn for the first updates of the next one, and the slots where it waits.

With hold every update waits for the norm, and the first ones hold up the first forward: before a row is looked up, its
table is read with its state, updated and written.  While the first block goes backward the drive has nothing to do, so
parts are read then, in all slots but one: through that one all others can pass, in whatever order a model calls its
blocks.  Each value has a slot of its own, the same in every step, so that one program ends with it there and the next
begins with it.
Left to others: the ops (`updates.py`), and whether a program begins so (`Owed.fetched`).  The trade-off: where no step
follows, these reads were in vain; over ranks there are none, since ranks with fewer parts would begin exchanges sooner
than others.
"""

from __future__ import annotations

from collections.abc import Iterator
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
