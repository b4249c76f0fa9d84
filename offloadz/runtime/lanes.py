"""Real lanes: a thread per lane that does its ops in order, and the inline lane of the computation itself.

An event says that an op is done, or why it never will be.  A worker waits for the events an op depends on, runs the
op's action and sets its own event; after an error it answers every later op with that error, so nobody waits for ever.
Lanes keep the time they were busy and, if asked, when each op ran; actions know nothing of clocks.

[Note: one team for the update] Only the `cpu` lane uses the team of threads that csrc/pool.h keeps for the update; the
disk lanes wait for the transfers' threads, the other workers run plain C on their own thread, and all of it leaves the
interpreter lock free.  Torch's own loops are for the thread of the computation: torch starts an OpenMP team for every
thread that calls one, and four such teams on two cores were nine threads, each spinning.

The trade-off: a thread per lane and a lock per event for every op; so an op should move megabytes.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from offloadz.memory.heap import Growth
from offloadz.plan.ops import Op

Action = Callable[[Op], None]


class Event:
    """Set once: done, or failed with `error`.  One of a stream is issued first and done later (`streams.py`)."""

    __slots__ = ("_done", "error")

    def __init__(self) -> None:
        self._done = threading.Event()
        self.error: BaseException | None = None

    def set(self, error: BaseException | None = None) -> None:
        self.error = error
        self._done.set()

    def wait(self) -> BaseException | None:
        """Block until set; returns the error, if any."""
        self._done.wait()
        return self.error

    def precede(self, stream: Any) -> BaseException | None:
        """Let what comes into `stream` from now on follow this event: a stream knows no thread, so the caller waits."""
        return self.wait()


class Clock:
    """What a lane has been doing: seconds busy, seconds waiting, and spans (op, start, end) while `trace` is a list."""

    def __init__(self) -> None:
        self.busy_s = 0.0
        self.wait_s = 0.0
        self.trace: list[tuple[Op, float, float]] | None = None

    def catch_up(self) -> None:
        """Take in what has ended since; a thread notes its times at once."""

    def add(self, op: Op | None, asked_s: float, start_s: float, end_s: float) -> None:
        """An op that was asked for, begun and done; none where the lane has only waited."""
        self.busy_s += end_s - start_s
        self.wait_s += start_s - asked_s
        trace = self.trace
        if trace is not None and op is not None:  # the one who asked may stop between these lines
            trace.append((op, start_s, end_s))


class WorkerLane:
    """An in-order lane on a thread of its own."""

    def __init__(self, name: str, run: Action, before: Action | None = None, clock: Clock | None = None) -> None:
        self.name, self.clock = name, clock or Clock()
        self._run, self._before = run, before or no_work
        self._jobs: queue.SimpleQueue[tuple[Op, Sequence[Event], Event] | None] = queue.SimpleQueue()
        self.error: tuple[Op, BaseException] | None = None
        self._last: Event | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._work, name=f"offloadz-{name}", daemon=True)
        self._thread.start()

    def submit(self, op: Op, waits: Sequence[Event]) -> Event:
        event = self._event()
        if self._closed:
            event.set(RuntimeError(f"lane {self.name} is closed: the run has ended"))
            return event
        self._last = event
        self._jobs.put((op, waits, event))
        return event

    def drain(self) -> None:
        """Wait until all that was submitted is done or has failed."""
        if self._last is not None:
            self._last.wait()

    def close(self, timeout_s: float) -> bool:
        """End the thread after what is submitted; True if it ended in time."""
        self._closed = True
        self._jobs.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _event(self) -> Event:
        return Event()

    def _follow(self, event: Event) -> BaseException | None:
        """Let the next op of this lane come after an event; returns its error."""
        return event.wait()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            op, waits, event = job
            asked = time.perf_counter()
            error = next((e for e in [self._follow(w) for w in waits] if e is not None), None)
            error = error or (self.error[1] if self.error else None)
            if error is None:
                try:
                    self._do(op, event, asked)
                except BaseException as caught:  # a lane must answer, whatever happened
                    error, self.error = caught, (op, caught)
            if error is not None:
                event.set(error)
            del job, waits, event, error

    def _do(self, op: Op, event: Event, asked: float) -> None:
        """The work of an op, and its event."""
        start = time.perf_counter()
        self._before(op)
        self._run(op)
        self.clock.add(op, asked, start, time.perf_counter())
        event.set()


class InlineLane:
    """The lane of the computation: it runs on the thread that submits, with the work that was laid ready."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.work: Action = no_work
        self.growth = Growth()
        self.on_host = False
        """Whether the work is the host's, and so begins when what it follows is done: here all work is."""

    def submit(self, op: Op, waits: Sequence[Event]) -> Event:
        """Wait for what `op` needs and run its work here; raises the error of an op it waited for."""
        asked = time.perf_counter()
        for event in waits:
            if (error := event.wait()) is not None:
                raise error
        start = time.perf_counter()
        self.work(op)
        self.clock.add(op, asked, start, time.perf_counter())
        self.growth.check()
        event = Event()
        event.set()
        return event

    def rest(self, workers: Iterable[WorkerLane]) -> None:
        """Wait until all that was submitted, here and to `workers`, is done or has failed."""
        asked = time.perf_counter()
        for lane in workers:
            lane.drain()
        start = time.perf_counter()
        self.clock.add(None, asked, start, start)

    def close(self) -> None:
        """No thread to end: it is the caller's."""
        self.growth.close()


def no_work(op: Op) -> None:
    """No work."""


def jitter(most_s: float, seed: int, pause: Callable[[float], None] = time.sleep) -> Callable[[], None]:
    """A random delay before a transfer: `debug.poison` uses it to find edges that are missing."""
    source = random.Random(seed)
    return lambda: pause(source.random() * most_s)
