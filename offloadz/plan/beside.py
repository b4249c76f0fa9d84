"""Simulated lanes that slow each other down: ops that run side by side share cores, memory and drives.

A walk submits to these lanes as to any other; they take down who is behind whom, and times follow once all is submitted
(`settled`), because only then is it known what runs beside an op.  So a program is walked once, whatever its ops take.
Who slows whom is the caller's (`shared.py`): it is asked for the speed of each op of every set that runs at once.  The
trade-off: a set changes with each op that begins or ends, so a simulated op costs a few microseconds and a program of a
large model hundredths of a second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import truediv

from offloadz.plan.ops import Op

Active = tuple[tuple[str, str], ...]
"""Lane and verb of every op that is under way."""


class Queue:
    """An in-order lane that takes down the numbers of its ops."""

    def __init__(self, box: Queues) -> None:
        self._box = box
        self.numbers: list[int] = []

    def submit(self, op: Op, waits: Sequence[int]) -> int:
        number = self._box.add(waits)
        if self.numbers:
            self._box.behind[self.numbers[-1]] = number
        self.numbers.append(number)
        return number


class Queues:
    """Lanes by name, and who waits for whom; an event is the number of an op, from 0 on as they are submitted."""

    def __init__(self, names: Iterable[str]) -> None:
        self.by_name = {name: Queue(self) for name in names}
        self.num_waits: list[int] = []
        """Events that each op waits for."""
        self.followers: list[list[int]] = []
        self.behind: list[int | None] = []
        """What is next on the lane of each op."""

    def add(self, waits: Sequence[int]) -> int:
        number = len(self.num_waits)
        self.num_waits.append(len(waits))
        self.followers.append([])
        self.behind.append(None)
        for event in waits:
            self.followers[event].append(number)
        return number


@dataclass
class SharedLane:
    """What a lane did: its ops, when each started and ended, and `work_s`, the seconds of all with nothing beside."""

    work_s: float
    ops: list[Op]
    starts_s: list[float]
    ends_s: list[float]

    @property
    def spans(self) -> list[tuple[Op, float, float]]:
        """(op, start, end) in seconds."""
        return list(zip(self.ops, self.starts_s, self.ends_s, strict=True))

    @property
    def taken_s(self) -> float:
        """Seconds that it was busy."""
        return sum([end - start for start, end in zip(self.starts_s, self.ends_s, strict=True)])


def settled(
    queues: Queues,
    ops: Sequence[Op],
    work_s: Sequence[float],
    speeds: Callable[[Active], Iterable[float]],
) -> dict[str, SharedLane]:
    """What the lanes do until all `ops`, which were submitted in this order, have been done.

    `work_s`: the seconds of each with nothing beside it.  `speeds` gives what is left of the speed of each op where
    these run at once.
    """
    starts_s, ends_s = _times(queues, ops, work_s, speeds)
    lanes = {}
    for name, queue in queues.by_name.items():
        alone_s, started_s, ended_s = (
            [told[number] for number in queue.numbers] for told in (work_s, starts_s, ends_s)
        )
        lanes[name] = SharedLane(sum(alone_s), [ops[number] for number in queue.numbers], started_s, ended_s)
    return lanes


def _times(
    queues: Queues, ops: Sequence[Op], work_s: Sequence[float], speeds: Callable[[Active], Iterable[float]]
) -> tuple[list[float], list[float]]:
    """Let time pass: when each op starts, and when it ends."""
    numbers = {name: number for number, name in enumerate(dict.fromkeys([op[:2] for op in ops]))}
    names, kinds = [*numbers], [numbers[op[:2]] for op in ops]
    now, num_waits, followers, behind = 0.0, [*queues.num_waits], queues.followers, queues.behind
    starts_s, ends_s, known = [0.0] * len(ops), [0.0] * len(ops), dict[tuple[int, ...], tuple[float, ...]]()
    first, running, left_s = [queue.numbers[0] for queue in queues.by_name.values()], list[int](), list[float]()
    while True:
        held = []
        for number in first:
            if num_waits[number]:
                held.append(number)
            else:
                running.append(number)
                left_s.append(work_s[number])
                starts_s[number] = now
        if not running:
            return starts_s, ends_s
        active = tuple([kinds[number] for number in running])
        pace = known.get(active)
        if pace is None:
            pace = known[active] = tuple(speeds(tuple([names[kind] for kind in active])))
        passed_s = min(map(truediv, left_s, pace))
        now += passed_s
        each, first, running, left_s = zip(running, left_s, pace, strict=True), held, [], []
        for number, still_s, speed in each:
            still_s -= passed_s * speed
            if still_s > 1e-12:
                running.append(number)
                left_s.append(still_s)
                continue
            ends_s[number] = now
            for follower in followers[number]:
                num_waits[follower] -= 1
            if (next_ := behind[number]) is not None:
                held.append(next_)
