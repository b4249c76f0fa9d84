"""What is laid out alike, so that sums and maxima over a model ask one of its equal blocks and not each.

A 70B model has 80 equal blocks of 204 parts, and a plan asks for the bytes of a thousand placements.  Left to others:
what is summed.  The trade-off: two units count as alike only if every tensor has the same name behind the unit's own
and the same shape, so blocks that merely have equally many elements are asked each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

from offloadz.plan.spec import ModelSpec, Part, Unit

Found = TypeVar("Found")
Told = ParamSpec("Told")


@dataclass(frozen=True)
class Kind:
    """`count` units like `unit`, the first of them, which stands at `index`."""

    unit: Unit
    index: int
    count: int


def once(
    ask: Callable[Concatenate[ModelSpec, Told], Found],
) -> Callable[Concatenate[ModelSpec, Told], Found]:
    """The same question with its answers remembered, one for each thing told beside the model: a spec never changes."""

    @wraps(ask)
    def answer(spec: ModelSpec, /, *told: Told.args, **named: Told.kwargs) -> Found:
        key = (ask, *told, *named.items())
        if key not in spec.memo:
            spec.memo[key] = ask(spec, *told, **named)
        found: Found = spec.memo[key]
        return found

    return answer


@once
def first_alike(spec: ModelSpec) -> tuple[int, ...]:
    """Per unit the index of the first one that is like it: in layout, and in whether several seats share it."""
    firsts: dict[object, int] = {}
    return tuple(firsts.setdefault((_layout(u), i in spec.shared_units), i) for i, u in enumerate(spec.units))


@once
def unit_kinds(spec: ModelSpec) -> tuple[Kind, ...]:
    """All units by kind, in the order in which each kind is first met."""
    return tuple(Kind(spec.units[i], i, count) for i, count in Counter(first_alike(spec)).items())


def each_unit(spec: ModelSpec, ask: Callable[[Unit], Found]) -> tuple[Found, ...]:
    """Per unit what `ask` says of it, asked of one of each kind."""
    found = {kind.index: ask(kind.unit) for kind in unit_kinds(spec)}
    return tuple(found[first] for first in first_alike(spec))


@once
def part_kinds(spec: ModelSpec) -> tuple[tuple[Part, bool], ...]:
    """One part of each size and dtype, and whether it is trained: enough to ask for the largest of anything."""
    kinds = {
        (p.dtype, p.num_elements, p.num_blocks, k.unit.sections[p.section].trainable): p
        for k in unit_kinds(spec)
        for p in k.unit.parts
    }
    return tuple((part, trained) for (*_, trained), part in kinds.items())


@once
def first_seats(spec: ModelSpec) -> tuple[int, ...]:
    """Per seat the index of the first one that is like it: in kind, and in its units."""
    firsts, found = first_alike(spec), dict[object, int]()
    kinds = ((seat.kind, tuple(firsts[unit] for unit in seat.units)) for seat in spec.seats)
    return tuple(found.setdefault(kind, i) for i, kind in enumerate(kinds))


def seats_alike(spec: ModelSpec, seats: Iterable[int]) -> Iterable[tuple[int, int]]:
    """(the first seat of the model that is like some of `seats`, how many they are)."""
    firsts = first_seats(spec)
    return Counter([firsts[seat] for seat in seats]).items()


def _layout(unit: Unit) -> object:
    """What two units must have in common for all sizes to be equal."""
    names = [[(m.name.removeprefix(unit.name), m.shape) for m in s.members] for s in unit.sections]
    told = (tuple(each) for each in names)
    return unit.kind, tuple((s.dtype, s.trainable, each) for s, each in zip(unit.sections, told, strict=True))
