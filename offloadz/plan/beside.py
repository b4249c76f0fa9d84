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
    """What a lane did: `work_s`, seconds of all its ops with nothing beside them; (op, start, end) in seconds."""

    work_s: float
    spans: list[tuple[Op, float, float]]


def settled(
    queues: Queues,
    ops: Sequence[Op],
    cost: Callable[[Op], float],
    speeds: Callable[[Active], Iterable[float]],
) -> dict[str, SharedLane]:
    """What the lanes do until all `ops`, which were submitted in this order, have been done.

    `cost` gives the seconds of an op with nothing beside it, `speeds` what is left of the speed of each op where these
    run at once.
    """
    work_s = [cost(op) for op in ops]
    starts_s, ends_s = _times(queues, ops, work_s, speeds)
    lanes = {}
    for name, queue in queues.by_name.items():
        spans = [(ops[number], starts_s[number], ends_s[number]) for number in queue.numbers]
        lanes[name] = SharedLane(sum([work_s[number] for number in queue.numbers]), spans)
    return lanes


def _times(
    queues: Queues, ops: Sequence[Op], work_s: Sequence[float], speeds: Callable[[Active], Iterable[float]]
) -> tuple[list[float], list[float]]:
    """Let time pass: when each op starts, and when it ends."""
    now, left_s, num_waits, kinds = 0.0, [*work_s], [*queues.num_waits], [op[:2] for op in ops]
    starts_s, ends_s, known = [0.0] * len(ops), [0.0] * len(ops), dict[Active, tuple[float, ...]]()
    first, running = [queue.numbers[0] for queue in queues.by_name.values()], list[int]()
    while True:
        for number in [number for number in first if not num_waits[number]]:
            first.remove(number)
            running.append(number)
            starts_s[number] = now
        if not running:
            return starts_s, ends_s
        active = tuple([kinds[number] for number in running])
        pace = known.get(active)
        if pace is None:
            pace = known[active] = tuple(speeds(active))
        passed_s = min([left_s[number] / speed for number, speed in zip(running, pace, strict=True)])
        now += passed_s
        for number, speed in zip([*running], pace, strict=True):
            left_s[number] -= passed_s * speed
            if left_s[number] <= 1e-12:
                running.remove(number)
                ends_s[number] = now
                for follower in queues.followers[number]:
                    num_waits[follower] -= 1
                if (behind := queues.behind[number]) is not None:
                    first.append(behind)
