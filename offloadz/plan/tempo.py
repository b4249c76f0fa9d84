"""A steady step as it is simulated: its program, what a walk over it submits, and which of its ops are alike.

A step of a large model has a thousand ops and some forty kinds of them: two of one kind move as much of the same, in
equally many extents, for units and seats that are alike, so whatever the rates, the rows and the format of the state
they cost the same.  Costs, bytes and shares are asked of one of each.  Left to others: what an op costs (`predict.py`).
The trade-off: what a cost may depend on is told here once more (`_kind`); `tests/plan/test_tempo.py` asks every op.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from offloadz.plan.alike import first_alike, first_seats, once
from offloadz.plan.beside import Queues
from offloadz.plan.ops import Op, Program
from offloadz.plan.spec import ModelSpec

Found = TypeVar("Found")


@dataclass(frozen=True, repr=False)
class Steady:
    """A program with its queues; `firsts`: an op of each kind, `kinds`: the kind of each op."""

    program: Program
    queues: Queues
    firsts: Sequence[int]
    kinds: Sequence[int]

    def each(self, ask: Callable[[Op], Found]) -> Iterator[Found]:
        """What `ask` says of every op, in their order, asked of one of each kind."""
        ops = self.program.ops
        return map([ask(ops[first]) for first in self.firsts].__getitem__, self.kinds)


def steady(spec: ModelSpec, program: Program, queues: Queues) -> Steady:
    """A program of a model with the kinds of its ops."""
    units, seats, parts = (*first_alike(spec), -1), (*first_seats(spec), -1), (*_part_kinds(spec), ())
    numbers: dict[Hashable, int] = {}
    firsts, kinds = list[int](), list[int]()
    for index, op in enumerate(program.ops):
        part = parts[op.unit][op.part] if op.part >= 0 else -1
        left = op.verb == "backward" and frozenset([place.removeprefix("compute.")[:1] for place in op.reads])
        whose = (units[op.unit], seats[op.seat], part, op.micro < 0)
        kind = (op.lane, op.verb, op.nbytes, len(op.reads), len(op.writes), left, *whose)
        number = numbers.setdefault(kind, len(firsts))
        if number == len(firsts):
            firsts.append(index)
        kinds.append(number)
    return Steady(program, queues, firsts, kinds)


@once
def _part_kinds(spec: ModelSpec) -> tuple[tuple[int, ...], ...]:
    """Per unit, and per part of it, a number that only parts of the same size and dtype have."""
    found: dict[Hashable, int] = {}
    firsts = [spec.units[first] for first in first_alike(spec)]
    return tuple(
        tuple(found.setdefault((p.dtype, p.num_elements, p.num_blocks), len(found)) for p in unit.parts)
        for unit in firsts
    )
