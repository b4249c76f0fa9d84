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
        self.work_s = 0.0
        """Seconds of all its ops with nothing beside them."""
        self.spans: list[tuple[Op, float, float]] = []

    def submit(self, op: Op, waits: Sequence[int]) -> int:
        index = self._box.add(op, waits)
        self.queue.append(index)
        self.work_s += self._box.left_s[index]
        return index


class SharedLanes:
    """Lanes by name.  `cost` gives the seconds of an op with nothing beside it, `speeds` what is left of the speed of
    each op where these run at once."""

    def __init__(
        self, names: Collection[str], cost: Callable[[Op], float], speeds: Callable[[Active], Iterable[float]]
    ) -> None:
        self.by_name = {name: SharedLane(self) for name in names}
        self.ops: list[Op] = []
        self.left_s: list[float] = []
        """Seconds of work of each op, as far as it is not done, with nothing beside it."""
        self._cost, self._speeds = cost, speeds
        self._open: list[int] = []
        """Events that each op still waits for."""
        self._followers: list[list[int]] = []

    def add(self, op: Op, waits: Sequence[int]) -> int:
        index = len(self.ops)
        self.ops.append(op)
        self.left_s.append(self._cost(op))
        self._open.append(len(waits))
        self._followers.append([])
        for event in waits:
            self._followers[event].append(index)
        return index

    def settle(self) -> None:
        """Let time pass until all that was submitted has been done."""
        now, left_s = 0.0, self.left_s
        known: dict[Active, tuple[float, ...]] = {}
        running: dict[SharedLane, int] = {}
        """Per busy lane the op it is at."""
        began_s = dict[int, float]()
        while True:
            for lane in self.by_name.values():
                if lane not in running and lane.queue and not self._open[lane.queue[0]]:
                    running[lane] = index = lane.queue.popleft()
                    began_s[index] = now
            if not running:
                return
            active = tuple([self.ops[index][:2] for index in running.values()])
            speeds = known.get(active)
            if speeds is None:
                speeds = known[active] = tuple(self._speeds(active))
            passed_s = min([left_s[index] / speed for index, speed in zip(running.values(), speeds, strict=True)])
            now += passed_s
            for (lane, index), speed in zip(tuple(running.items()), speeds, strict=True):
                left_s[index] -= passed_s * speed
                if left_s[index] <= 1e-12:
                    self._finish(lane, index, began_s.pop(index), now)
                    del running[lane]

    def _finish(self, lane: SharedLane, index: int, begin: float, end: float) -> None:
        lane.spans.append((self.ops[index], begin, end))
        for follower in self._followers[index]:
            self._open[follower] -= 1
