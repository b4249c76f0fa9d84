"""A run's weights and optimizer state at rest: part by part, in logical order, for whoever fills, saves or exports.

All lanes must be idle (`Session.settle`).  Parts that live on disk pass through one host slot, so a model of any size
is visited in the memory of one part.  The trade-off: nothing overlaps here; a save has the speed of one drive queue.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from offloadz.memory.flat import DTYPES, state_views, typed
from offloadz.plan.spec import Part, Unit, aligned
from offloadz.runtime import native
from offloadz.runtime.room import Room


@dataclass
class PartView:
    """A part of a unit at rest: flat views of its weights and optimizer state (None where frozen, or no low bits)."""

    unit_index: int
    unit: Unit
    part_index: int
    part: Part
    weight: Tensor
    low: Tensor | None
    exp_avg: Tensor | None
    exp_avg_sq: Tensor | None


def parts(room: Room, write: bool = False) -> Iterator[PartView]:
    """Every part of the model, in order; with `write`, what the caller changed goes home as it moves on."""
    for index, unit in enumerate(room.spec.units):
        for k, part in enumerate(unit.parts):
            yield from _visit(room, index, k, part, write)


def put(room: Room, index: int, k: int, master: Tensor) -> None:
    """Set a fresh part's weights from fp32 values; what the stored dtype cannot hold goes to the low master bits.

    Moments become zero.  On disk a state of zeros stays the flag "never written", so it is sent only for its low bits.
    """
    unit = room.spec.units[index]
    part = unit.parts[k]
    weight = _slot(room, "w", index, k, part.weight_bytes)
    flat = typed(weight, 0, part.num_elements, DTYPES[part.dtype])
    if part.dtype == "float32":
        flat.copy_(master)
    elif not unit.sections[part.section].trainable:
        native.narrow_(flat, master)
    else:
        state = _slot(room, "s", index, k, part.state_bytes)
        state.zero_()
        low = state_views(part, state).low
        native.split_master_(flat, low, master)
        if low is not None and bool(low.any()):
            _send_home(room, "s", index, k, state)
    _send_home(room, "w", index, k, weight)


def _visit(room: Room, index: int, k: int, part: Part, write: bool) -> Iterator[PartView]:
    unit = room.spec.units[index]
    weight = _bring(room, "w", index, k, part.weight_bytes)
    state = _bring(room, "s", index, k, part.state_bytes) if unit.sections[part.section].trainable else None
    views = state_views(part, state) if state is not None else None
    flat = typed(weight, 0, part.num_elements, DTYPES[part.dtype])
    low, first, second = (views.low, views.exp_avg, views.exp_avg_sq) if views else (None, None, None)
    yield PartView(index, unit, k, part, flat, low, first, second)
    if write:
        _send_home(room, "w", index, k, weight)
        if state is not None:
            _send_home(room, "s", index, k, state)


def _slot(room: Room, kind: str, unit: int, part: int, nbytes: int) -> Tensor:
    """A buffer for a part on its way: its home, or a host slot where it lives on disk."""
    if f"{kind}{unit}.{part}@disk" not in room.extents:
        return room.part_bytes(kind, unit, part, room.homes[kind, unit])
    names = ("host.p#0", "host.w#0") if kind == "w" else ("host.s#0",)
    return next(room.slots[n] for n in names if n in room.slots)[: aligned(nbytes)]


def _bring(room: Room, kind: str, unit: int, part: int, nbytes: int) -> Tensor:
    slot, place = _slot(room, kind, unit, part, nbytes), f"{kind}{unit}.{part}@disk"
    if place in room.extents:
        room.drive.read(room.extents[place], slot)
    return slot


def _send_home(room: Room, kind: str, unit: int, part: int, held: Tensor) -> None:
    place = f"{kind}{unit}.{part}@disk"
    if place in room.extents:
        room.drive.write(room.extents[place], held)
