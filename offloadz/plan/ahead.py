"""What a step fetches behind its last turn for the first updates of the next one, and the slots where it waits.

With hold every update waits for the norm, and the first ones hold up the first forward: before a row is looked up, its
table is read with its state, updated and written.  While the first block goes backward the drive has nothing to do, so
as many parts as there are slots are read then.  Each value has a slot of its own, the same in every step, so that one
program ends with it there and the next begins with it.
Left to others: the ops (`updates.py`), and whether a program begins so (`Owed.fetched`).  The trade-off: where no step
follows, these reads were in vain; over ranks there are none, since ranks with fewer parts would begin exchanges sooner
than others.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from offloadz.plan.alike import once
from offloadz.plan.placement import Placement
from offloadz.plan.spec import ModelSpec


@once
def fetched_ahead(spec: ModelSpec, placement: Placement) -> dict[str, str]:
    """Value (`s0.1`) to slot (`host.s#1`), in the order in which they are read."""
    if placement.share.ranks > 1:
        return {}
    found: dict[str, str] = {}
    for slot, (unit, part, kinds) in enumerate(islice(_first(spec, placement), placement.slots)):
        found |= {f"{kind}{unit}.{part}": f"host.{kind}#{slot}" for kind in kinds}
    return found


def _first(spec: ModelSpec, placement: Placement) -> Iterator[tuple[int, int, str]]:
    """Units and parts in the order of their updates, with the kinds of values that each brings from the drive alone."""
    units = {unit: seat.kind == "table" for seat in reversed(spec.seats) for unit in seat.units}
    order = dict.fromkeys(unit for seat in spec.seats for unit in seat.units)
    for unit in order:
        for part in spec.units[unit].trained_parts:
            state = placement.optimizer == "disk" and spec.units[unit].parts[part].state_bytes > 0
            alone = placement.parameters == "disk" and units[unit]  # a block's weights come whole
            yield unit, part, "s" * state + "p" * alone
