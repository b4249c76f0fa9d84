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
from collections.abc import Callable, Sequence

from offloadz.plan.ops import Op

Action = Callable[[Op], None]


class Event:
    """Set once: done, or failed with `error`."""

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


class Clock:
    """What a lane has been doing: seconds busy, seconds waiting, and spans (op, start, end) while `trace` is a list."""

    def __init__(self) -> None:
        self.busy_s = 0.0
        self.wait_s = 0.0
        self.trace: list[tuple[Op, float, float]] | None = None

    def add(self, op: Op, asked_s: float, start_s: float, end_s: float) -> None:
        self.busy_s += end_s - start_s
        self.wait_s += start_s - asked_s
        trace = self.trace
        if trace is not None:  # the one who asked may stop between these lines
            trace.append((op, start_s, end_s))


class WorkerLane:
    """An in-order lane on a thread of its own."""

    def __init__(self, name: str, run: Action, before: Action | None = None) -> None:
        self.name, self.clock = name, Clock()
        self._run, self._before = run, before
        self._jobs: queue.SimpleQueue[tuple[Op, Sequence[Event], Event] | None] = queue.SimpleQueue()
        self.error: tuple[Op, BaseException] | None = None
        self._last: Event | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._work, name=f"offloadz-{name}", daemon=True)
        self._thread.start()

    def submit(self, op: Op, waits: Sequence[Event]) -> Event:
        event = Event()
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

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            op, waits, event = job
            asked = time.perf_counter()
            error = next((e for e in [w.wait() for w in waits] if e is not None), None)
            error = error or (self.error[1] if self.error else None)
            if error is None:
                error = self._attempt(op, asked)
            event.set(error)
            del job, waits, event

    def _attempt(self, op: Op, asked: float) -> BaseException | None:
        start = time.perf_counter()
        try:
            if self._before is not None:
                self._before(op)
            self._run(op)
        except BaseException as error:  # a lane must answer, whatever happened
            self.error = (op, error)
            return error
        self.clock.add(op, asked, start, time.perf_counter())
        return None


class InlineLane:
    """The lane of the computation: it runs on the thread that submits, with the work that was laid ready."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.work: Action = lambda op: None

    def submit(self, op: Op, waits: Sequence[Event]) -> Event:
        """Wait for what `op` needs and run its work here; raises the error of an op it waited for."""
        asked = time.perf_counter()
        for event in waits:
            if (error := event.wait()) is not None:
                raise error
        start = time.perf_counter()
        self.work(op)
        self.clock.add(op, asked, start, time.perf_counter())
        event = Event()
        event.set()
        return event


def jitter(most_s: float, seed: int) -> Callable[[], None]:
    """A random delay before a transfer: `debug.poison` uses it to find edges that are missing."""
    source = random.Random(seed)
    return lambda: time.sleep(source.random() * most_s)
