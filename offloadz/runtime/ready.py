"""Updates that are ready to be taken: what lies where has been checked before, and lies there still.

An update of a part is called by its addresses.  To form views and check them took two thirds of the 85 us of Python
between parts whose update takes 1.3 ms, with the cores waiting (`benchmarks/adam.py`: `fp32` is 4 % faster without,
`int8-sr` 5 %), and from step to step a part lies in the same places.  Left to others: where that is (`Room`, which
keeps what is `ready`), and with which numbers (its `due`).

The trade-off: some 400 bytes for each parameter's run in each part are kept, for the last `PLACES` places of a part;
memory that was given to something else of another layout is told by its place's name and address together.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from offloadz.memory.flat import DTYPES, Span, StateViews, spans, state_views, typed
from offloadz.plan.ops import Op
from offloadz.runtime.native import Update
from offloadz.runtime.room import Room

PLACES = 2
"""With shadow a part's state lies in two places in turn."""

Spans = list[tuple[str, Update]]
"""Parameter name and the update of its run in a part."""


class Places(NamedTuple):
    """Where a part's gradient, state and weights lie: by name, and the addresses of the buffers named."""

    names: tuple[str, ...]
    addresses: tuple[int, ...]


def updates_of(room: Room, op: Op) -> Spans:
    """The updates of an op's part, where its operands lie now."""
    names = op.reads[:3]  # behind them maybe the norm: by now it is in the settings
    places = Places(names, tuple(room.buffer(name).data_ptr() for name in names))
    known = room.ready.setdefault((op.unit, op.part), [])
    for before, found in known:
        if before == places:
            return found
    known.insert(0, (places, _spans(room, op)))
    del known[PLACES:]
    return known[0][1]


def _spans(room: Room, op: Op) -> Spans:
    """The updates of a part, checked."""
    unit = room.spec.units[op.unit]
    part = unit.parts[op.part]
    grad, held, stored = op.reads[:3]
    slope, weight = (
        typed(room.part_at(op.unit, op.part, place), 0, part.num_elements, DTYPES[part.dtype])
        for place in (grad, stored)
    )
    state = state_views(part, room.buffer(held))
    return [(span.member.name, _span(part.recipe.rule, weight, slope, state, span)) for span in spans(unit, part)]


def _span(rule: str, weight: Tensor, slope: Tensor, state: StateViews, span: Span) -> Update:
    at, kept = span.part_slice, state.of(span)
    first = span.first_element
    return Update(rule, weight[at], kept.low, kept.moments, kept.scales, slope[at], first_element=first)
