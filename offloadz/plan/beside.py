"""Simulated lanes that slow each other down: ops that run side by side share cores, memory and drives.

A walk submits to these lanes as to any other; the answer is a handle, and times follow once all is submitted
(`settle`), because only then is it known what runs beside an op.  Who slows whom is the caller's (`shared.py`): it is
asked for the speed of each op of every set that runs at once.  The trade-off: a set changes with each op that begins or
ends, so a simulated op costs a few microseconds and a program of a large model tenths of a second.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence

from offloadz.plan.ops import Op

Active = tuple[tuple[str, str], ...]
"""Lane and verb of every op that is under way."""


class SharedLane:
    """An in-order lane; `spans` are (op, start, end) in seconds once `settle` has run."""

    def __init__(self, box: SharedLanes) -> None:
        self._box = box
        self.queue: deque[int] = deque()
        self.spans: list[tuple[Op, float, float]] = []

    def submit(self, op: Op, waits: Sequence[int]) -> int:
        self.queue.append(len(self._box.ops))
        return self._box.add(op, waits)


class SharedLanes:
    """Lanes by name.  `cost` gives the seconds of an op with nothing beside it, `speeds` what is left of the speed of
    each op where these run at once."""

    def __init__(
        self, names: Collection[str], cost: Callable[[Op], float], speeds: Callable[[Active], Iterable[float]]
    ) -> None:
        self.by_name = {name: SharedLane(self) for name in names}
        self.ops: list[Op] = []
        self._cost, self._speeds = cost, speeds
        self._open: list[int] = []
        """Events that each op still waits for."""
        self._followers: list[list[int]] = []

    def add(self, op: Op, waits: Sequence[int]) -> int:
        index = len(self.ops)
        self.ops.append(op)
        self._open.append(len(waits))
        self._followers.append([])
        for event in waits:
            self._followers[event].append(index)
        return index

    def settle(self) -> None:
        """Let time pass until all that was submitted has been done."""
        now = 0.0
        known: dict[Active, tuple[float, ...]] = {}
        running: dict[SharedLane, list[float]] = {}
        """Per busy lane: index of its op, begin, seconds of work left."""
        while True:
            for lane in self.by_name.values():
                if lane not in running and lane.queue and not self._open[lane.queue[0]]:
                    index = lane.queue.popleft()
                    running[lane] = [index, now, self._cost(self.ops[index])]
            if not running:
                return
            active = tuple((self.ops[int(job[0])].lane, self.ops[int(job[0])].verb) for job in running.values())
            speeds = known.get(active)
            if speeds is None:
                speeds = known[active] = tuple(self._speeds(active))
            passed_s = min(job[2] / speed for job, speed in zip(running.values(), speeds, strict=True))
            now += passed_s
            for (lane, job), speed in zip(list(running.items()), speeds, strict=True):
                job[2] -= passed_s * speed
                if job[2] <= 1e-12:
                    self._finish(lane, int(job[0]), job[1], now)
                    del running[lane]

    def _finish(self, lane: SharedLane, index: int, begin: float, end: float) -> None:
        lane.spans.append((self.ops[index], begin, end))
        for follower in self._followers[index]:
            self._open[follower] -= 1
