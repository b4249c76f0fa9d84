"""A run's weights and optimizer state at rest: part by part, in logical order, for whoever fills, saves or exports.

All lanes must be idle (`Session.settle`).  Parts that live on disk pass through one host slot, so a model of any size
is visited in the memory of one part.  The trade-off: nothing overlaps here; a save has the speed of one drive queue.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from offloadz.memory.flat import DTYPES, StateViews, spans, state_views, typed
from offloadz.plan.spec import Part, Unit, aligned
from offloadz.runtime import native
from offloadz.runtime.room import Room


@dataclass
class PartView:
    """A part of a unit at rest: flat views of its weights and optimizer state.

    `moments`: fp32 by name in every recipe, in the layout's order; none where the part is frozen.  Where the run stores
    them in fewer bytes these are copies, which go home rounded to nearest.  `low`: None where there are no low bits.
    """

    unit_index: int
    unit: Unit
    part_index: int
    part: Part
    weight: Tensor
    low: Tensor | None
    moments: dict[str, Tensor]

    @property
    def trained(self) -> bool:
        return self.unit.sections[self.part.section].trainable


def parts(room: Room, write: bool = False) -> Iterator[PartView]:
    """Every part of the model that is this rank's, in order; with `write`, what the caller changed goes home as it
    moves on (and to the other ranks by a `spread`)."""
    for index, unit in enumerate(room.spec.units):
        for k in unit.own_parts:
            yield from _visit(room, index, k, unit.parts[k], write)


def put(room: Room, index: int, k: int, master: Tensor) -> None:
    """Set a fresh part's weights from fp32 values; what the stored dtype cannot hold goes to the low master bits, or is
    rounded away to nearest where there are none.

    Moments become zero.  On disk a state of zeros stays the flag "never written", so it is sent only for its low bits.
    """
    unit = room.spec.units[index]
    part = unit.parts[k]
    weight = _slot(room, "w", index, k, part.weight_bytes)
    flat = typed(weight, 0, part.num_elements, DTYPES[part.dtype])
    state = _slot(room, "s", index, k, part.state_bytes) if unit.sections[part.section].trainable else room.nothing
    low = state_views(part, state.zero_()).low if state.numel() else None
    set_weight(flat, low, master)
    if low is not None and bool(low.any()):
        _send_home(room, "s", index, k, state)
    _send_home(room, "w", index, k, weight)


def set_weight(weight: Tensor, low: Tensor | None, master: Tensor) -> None:
    """Store fp32 values as they are, split in two halves, or rounded to nearest: whatever the layout has room for."""
    if low is not None:
        native.split_master_(weight, low, master)
    else:
        weight.copy_(master)


def _visit(room: Room, index: int, k: int, part: Part, write: bool) -> Iterator[PartView]:
    unit = room.spec.units[index]
    weight = _bring(room, "w", index, k, part.weight_bytes)
    flat = typed(weight, 0, part.num_elements, DTYPES[part.dtype])
    if not unit.sections[part.section].trainable:
        yield PartView(index, unit, k, part, flat, None, {})
        stored = None
    else:
        state = _bring(room, "s", index, k, part.state_bytes)
        stored = state_views(part, state)
        moments = decoded(unit, part, stored)
        yield PartView(index, unit, k, part, flat, stored.low, dict(zip(part.recipe.moments, moments, strict=True)))
    if write:
        _send_home(room, "w", index, k, weight)
        if stored is not None:
            _encode(unit, part, stored, moments)
            _send_home(room, "s", index, k, state)


def decoded(unit: Unit, part: Part, stored: StateViews) -> list[Tensor]:
    """The moments in fp32: themselves where they are stored so, else copies."""
    if part.recipe.code_bytes == 4:
        return list(stored.moments)
    if part.recipe.code_bytes == 2:
        return [moment.float() for moment in stored.moments]
    wide = [torch.empty(part.num_elements, dtype=torch.float32) for _ in stored.moments]
    for values, codes, scales, second in _codes(unit, part, stored, wide):
        native.decode_moment_(values, codes, scales, second)
    return wide


def _encode(unit: Unit, part: Part, stored: StateViews, moments: list[Tensor]) -> None:
    """Fp32 moments back into the format they are stored in; what was not changed gets the bits it had."""
    if part.recipe.code_bytes == 2:
        for moment, values in zip(stored.moments, moments, strict=True):
            native.narrow_(moment, values)
    elif part.recipe.code_bytes == 1:
        for values, codes, scales, second in _codes(unit, part, stored, moments):
            native.encode_moment_(codes, scales, values, second)


def _codes(
    unit: Unit, part: Part, stored: StateViews, wide: list[Tensor]
) -> Iterator[tuple[Tensor, Tensor, Tensor, bool]]:
    """(fp32 values, codes, scales, whether it is a mean of squares) of each span and moment."""
    for span in spans(unit, part):
        held = stored.of(span)
        for name, values, codes, scales in zip(part.recipe.moments, wide, held.moments, held.scales, strict=True):
            if scales is not None:
                yield values[span.part_slice], codes, scales, name == "exp_avg_sq"


def _slot(room: Room, kind: str, unit: int, part: int, nbytes: int) -> Tensor:
    """A buffer for a part on its way: its home, or a host slot where it lives on disk or on a device of its own."""
    away = nbytes and room.is_away(room.home_tier(kind))
    if f"{kind}{unit}.{part}@disk" not in room.extents and not away:
        return room.part_bytes(kind, unit, part, room.home(kind, unit))
    names = ("host.p#0", "host.w#0") if kind == "w" else ("host.s#0",)
    return next(room.slots[n] for n in names if n in room.slots)[: aligned(nbytes)]


def _bring(room: Room, kind: str, unit: int, part: int, nbytes: int) -> Tensor:
    slot, place = _slot(room, kind, unit, part, nbytes), f"{kind}{unit}.{part}@disk"
    if place in room.extents:
        room.drive.read(room.extents[place], slot)
    elif room.is_away(room.home_tier(kind)):
        slot.copy_(room.part_bytes(kind, unit, part, room.home(kind, unit)))
    return slot


def _send_home(room: Room, kind: str, unit: int, part: int, held: Tensor) -> None:
    place = f"{kind}{unit}.{part}@disk"
    if place in room.extents:
        room.drive.write(room.extents[place], held)
    elif room.is_away(room.home_tier(kind)):
        room.part_bytes(kind, unit, part, room.home(kind, unit)).copy_(held)
