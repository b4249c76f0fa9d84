"""Updates that are ready to be taken: what lies where has been checked before, and lies there still.

An update is called by addresses.  To form views and check them took two thirds of the 85 us of Python between parts
whose update takes 1.3 ms, with the cores waiting (`benchmarks/adam.py`: `fp32` is 4 % faster without, `int8-sr` 5 %),
and from step to step a part lies in the same places.  Left to others: where that is (`Room`, which keeps what is
`ready`), and with which numbers (its `due`).

The trade-off: some 600 bytes for each parameter's run in each part are kept, for the last `PLACES` places of a part;
memory that was given to something else of another layout is told by its place's name and address together.  Of parts
that are updated together the first one's places tell: all lie in the same buffers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from offloadz.memory.flat import DTYPES, Span, StateViews, spans, state_views, typed
from offloadz.plan.ops import Op
from offloadz.runtime.native import Update, Updates
from offloadz.runtime.room import Room

PLACES = 2
"""With shadow a part's state lies in two places in turn."""


class Ready(NamedTuple):
    """What an op updates: for each run of a parameter in its parts the parameter's name and, all in one, the update."""

    names: tuple[str, ...]
    updates: Updates


class Places(NamedTuple):
    """Where a part's gradient, state and weights lie: by name, and the addresses of the buffers named."""

    names: tuple[str, ...]
    addresses: tuple[int, ...]


def updates_of(room: Room, op: Op) -> Ready:
    """The updates of an op's parts, where its operands lie now."""
    names = op.reads[:3]
    places = Places(names, tuple(room.buffer(name).data_ptr() for name in names))
    known = room.ready.setdefault((op.unit, op.part), [])
    for before, found in known:
        if before == places:
            return found
    known.insert(0, (places, _made(room, op)))
    del known[PLACES:]
    return known[0][1]


def _made(room: Room, op: Op) -> Ready:
    """The updates of an op, checked."""
    parts = (op.part,) if op.part >= 0 else room.spec.units[op.unit].trained_parts
    each = []
    for at, part in enumerate(parts):  # of each part three places; behind all maybe the norm
        each += _spans(room, op.unit, part, op.reads[3 * at : 3 * at + 3])
    return Ready(tuple(name for name, _ in each), Updates([update for _, update in each]))


def _spans(room: Room, index: int, k: int, places: Sequence[str]) -> Iterator[tuple[str, Update]]:
    """Parameter name and update of each run of a part whose gradient, state and weights lie at `places`."""
    unit = room.spec.units[index]
    part = unit.parts[k]
    grad, held, stored = places
    slope, weight = (
        typed(room.part_at(index, k, place), 0, part.num_elements, DTYPES[part.dtype]) for place in (grad, stored)
    )
    state = state_views(part, room.buffer(held))
    for span in spans(unit, part):
        yield span.member.name, _span(part.recipe.rule, weight, slope, state, span)


def _span(rule: str, weight: Tensor, slope: Tensor, state: StateViews, span: Span) -> Update:
    at, kept = span.part_slice, state.of(span)
    first = span.first_element
    return Update(rule, weight[at], kept.low, kept.moments, kept.scales, slope[at], first_element=first)
