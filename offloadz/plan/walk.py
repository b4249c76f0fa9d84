"""One walk over a program, for real lanes and for simulated ones.

A lane answers `submit(op, waits)` with an event.  A real lane's event is a handle, a virtual lane's a time; the walk
cannot tell.  It stops before each op of the `device` lane, because that computation belongs to the user's model, which
arrives there in its own time; a simulation simply goes on.

[Note: a walk cannot deadlock] An op waits only for events of ops submitted before it, and lanes are in order, so
the earliest op that is not done can always go on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from offloadz.plan.ops import Op, Program

Event = Any


class Lane(Protocol):
    """An in-order queue of work."""

    def submit(self, op: Op, waits: Sequence[Event]) -> Event: ...


class Frontier:
    """Who last wrote and who has read each place, over all programs of a run: what the next program must wait for."""

    def __init__(self) -> None:
        self._writer: dict[str, Event] = {}
        self._readers: dict[str, list[Event]] = {}

    def waits(self, op: Op) -> list[Event]:
        """Events of earlier programs that `op` has to follow."""
        found = [self._writer[p] for p in op.enters if p in self._writer]
        for place in op.enters:
            if place in op.writes:
                found += self._readers.get(place, [])
        return found

    def record(self, op: Op, event: Event) -> None:
        for place in op.reads:
            self._readers.setdefault(place, []).append(event)
        for place in op.writes:
            self._writer[place], self._readers[place] = event, []

    def clear(self) -> None:
        """Forget everything: all lanes are idle."""
        self._writer.clear()
        self._readers.clear()


class Apart(Frontier):
    """Of one program by itself: nothing is before it, and nothing comes after."""

    def waits(self, op: Op) -> list[Event]:
        return []

    def record(self, op: Op, event: Event) -> None:
        pass


class Walk:
    """A position in a program, and the events of what has been submitted."""

    def __init__(
        self,
        program: Program,
        lanes: Mapping[str, Lane],
        frontier: Frontier,
        observe: Callable[[Op], None] = lambda op: None,
    ) -> None:
        self.program, self.lanes, self.frontier, self.observe = program, lanes, frontier, observe
        self.events: list[Sequence[Event]] = [()] * len(program.ops)
        """Per op what its followers wait for: its own event, or where it was left out what it would have followed."""
        self.index = 0

    @property
    def waiting_for(self) -> Op | None:
        """The `device` op the walk stands before, or None at the end."""
        return self.program.ops[self.index] if self.index < len(self.program.ops) else None

    @property
    def num_computed(self) -> int:
        """`device` ops so far; the same on all ranks, which update different numbers of parts."""
        return sum(op.lane == "device" for op in self.program.ops[: self.index])

    def advance(self) -> Op | None:
        """Submit everything up to the next `device` op; returns that op."""
        ops = self.program.ops
        while self.index < len(ops) and ops[self.index].lane != "device":
            self._submit(self.index)
            self.index += 1
        return self.waiting_for

    def compute(self) -> None:
        """Submit the `device` op the walk stands before, then everything up to the next one."""
        self._submit(self.index)
        self.index += 1
        self.advance()

    def finish(self, phase: str) -> None:
        """Submit only the rest of one phase and end: what an interrupted step may not leave half done.

        A slot that an op left out would have taken over goes on to the next one's, which then follows who had it last.
        """
        for index in range(self.index, len(self.program.ops)):
            if self.program.ops[index].phase == phase:
                self._submit(index)
            else:
                self.events[index] = self._waits(index)
        self.index = len(self.program.ops)

    def _submit(self, index: int) -> None:
        op = self.program.ops[index]
        event = self.lanes[op.lane].submit(op, self._waits(index))
        self.events[index] = (event,)
        self.frontier.record(op, event)
        self.observe(op)

    def _waits(self, index: int) -> list[Event]:
        """The events that an op follows, each once."""
        op = self.program.ops[index]
        waits = [event for i in op.after for event in self.events[i]]
        if op.enters:
            waits += self.frontier.waits(op)
        return list(dict.fromkeys(waits))


class VirtualLane:
    """A lane that answers with the time at which an op would be done.

    `cost` gives seconds for an op; ops of a lane follow each other.  Records (op, start, end) in seconds.
    """

    def __init__(self, cost: Callable[[Op], float]) -> None:
        self.cost = cost
        self.free_s = 0.0
        self.spans: list[tuple[Op, float, float]] = []

    def submit(self, op: Op, waits: Sequence[float]) -> float:
        start = max([self.free_s, *waits])
        self.free_s = start + self.cost(op)
        self.spans.append((op, start, self.free_s))
        return self.free_s


def simulate(program: Program, lanes: Mapping[str, Lane], frontier: Frontier | None = None) -> None:
    """Walk the whole program without pausing, as a simulation does; `frontier`: of several that follow each other."""
    walk = Walk(program, lanes, frontier or Apart())
    while walk.advance() is not None:
        walk.compute()
