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
from typing import TypeVar

from offloadz.plan.spec import ModelSpec, Part, Unit

Found = TypeVar("Found")


@dataclass(frozen=True)
class Kind:
    """`count` units like `unit`, the first of them, which stands at `index`."""

    unit: Unit
    index: int
    count: int


def once(ask: Callable[[ModelSpec], Found]) -> Callable[[ModelSpec], Found]:
    """The same question with its answer remembered: a spec never changes."""

    @wraps(ask)
    def answer(spec: ModelSpec) -> Found:
        if ask not in spec.memo:
            spec.memo[ask] = ask(spec)
        found: Found = spec.memo[ask]
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


@once
def part_kinds(spec: ModelSpec) -> tuple[tuple[Part, bool], ...]:
    """One part of each size and dtype, and whether it is trained: enough to ask for the largest of anything."""
    kinds = {
        (p.dtype, p.num_elements, p.num_blocks, k.unit.sections[p.section].trainable): p
        for k in unit_kinds(spec)
        for p in k.unit.parts
    }
    return tuple((part, trained) for (*_, trained), part in kinds.items())


def seats_alike(spec: ModelSpec, seats: Iterable[int]) -> Iterable[tuple[int, int]]:
    """(one seat, how many of `seats` are like it)."""
    firsts, kinds, found = first_alike(spec), Counter[object](), dict[object, int]()
    for seat in seats:
        place = spec.seats[seat]
        kind = (place.kind, tuple(firsts[unit] for unit in place.units))
        kinds[kind] += 1
        found.setdefault(kind, seat)
    return [(found[kind], count) for kind, count in kinds.items()]


def _layout(unit: Unit) -> object:
    """What two units must have in common for all sizes to be equal."""
    names = [[(m.name.removeprefix(unit.name), m.shape) for m in s.members] for s in unit.sections]
    told = (tuple(each) for each in names)
    return unit.kind, tuple((s.dtype, s.trainable, each) for s, each in zip(unit.sections, told, strict=True))
