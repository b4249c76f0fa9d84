"""Lanes of a compute device that has memory of its own: streams, the threads that fill them, and what orders the two.

A *stream* does in order what is put into it, later than the thread that puts it there; a *mark* is a point in it.
Nothing here names a kind of device: `devices.py` makes streams of torch's, `rehearsal.py` of threads.

[Note: issued, then done] An event of a stream is issued when its mark stands in the stream, and done when the stream
has come past it.  A stream that waits for a stream's event needs it issued, and waits by itself.  A host lane that
waits for one needs it done, and waits in its own thread.  A stream that waits for a host lane cannot: the thread that
fills it waits, in the order of the lane, and puts the work in afterwards.  (A mark that was not yet put into its stream
would be waited for by nobody: to a device it counts as passed.)

[Note: which thread owns what] The thread that calls the model owns the walk: it alone submits, and it fills the stream
of the computation by running the model's code.  While it waits inside `backward()`, autograd's thread of the device
stands in for it (`Session.descend`).  Each stream lane has one thread, the only one that fills that stream; it sets the
device and the stream when it starts, both being a thread's own.  Worker lanes know no device at all.  So the host
waits for the device in three places only: where host code reads (a lookup in a table at home, the norm, the loss),
where a host lane needs what a stream brings, and where all lanes are brought to rest.

The trade-off: a thread per stream, which costs a switch of threads per op (some 50 us), where one thread could fill all
streams if no stream ever waited for the host; here the update is on the host, and weights come from there.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol

from offloadz.plan.ops import Op
from offloadz.runtime.lanes import Action, Clock, Event, InlineLane, WorkerLane, no_work


class Mark(Protocol):
    """A point in a stream; as much of `torch.Event` as lanes need."""

    def synchronize(self) -> None:
        """Block until the stream has come past it; raises what its work ran into."""

    def query(self) -> bool:
        """Whether the stream has come past it."""

    def elapsed_time(self, later: Any) -> float:
        """Milliseconds from this mark to a later one, both passed."""


class Stream(Protocol):
    """Work in order, done later than it is put in."""

    def attach(self) -> None:
        """Make the calling thread the one that fills this stream."""

    def run(self, work: Callable[[], None]) -> None:
        """Put work in."""

    def wait(self, mark: Any) -> None:
        """Let what is put in from now on follow a mark of any stream."""

    def mark(self) -> Any:
        """The point that the stream comes to when all that was put in is done."""

    def close(self) -> None:
        """End what the stream is made of."""


class StreamEvent(Event):
    """See [Note: issued, then done]."""

    __slots__ = ("mark",)

    def issue(self, mark: Mark) -> None:
        self.mark = mark
        self.set()

    def wait(self) -> BaseException | None:
        """Block until done; returns the error, if any."""
        return super().wait() or _passed(self.mark)

    def precede(self, stream: Stream) -> BaseException | None:
        """Let what comes into `stream` from now on follow this event; blocks until it is issued."""
        error = super().wait()
        if error is None:
            stream.wait(self.mark)
        return error


def _passed(mark: Mark) -> BaseException | None:
    try:
        mark.synchronize()
    except BaseException as error:  # what the device ran into
        return error
    return None


class StreamClock(Clock):
    """Times of a stream's work, read from marks once it has come past them: asking for them earlier would wait."""

    def __init__(self) -> None:
        super().__init__()
        self._ahead: deque[tuple[Op | None, Mark, Mark, Mark]] = deque()
        self._zero: tuple[Mark, float] | None = None

    def later(self, op: Op | None, asked: Mark, begun: Mark, ended: Mark) -> None:
        """An op (see `add`) lies between two marks; it could have begun where it was asked for."""
        if self._zero is None:
            self._zero = (asked, time.perf_counter())
        self._ahead.append((op, asked, begun, ended))

    def catch_up(self) -> None:
        """Each op's times are told from the one before, so that a device's milliseconds stay short and exact."""
        while self._ahead and self._ahead[0][3].query():
            op, *marks = self._ahead.popleft()
            assert self._zero is not None  # set before anything is ahead
            zero, zero_s = self._zero
            asked_s, begun_s, ended_s = (zero_s + zero.elapsed_time(mark) / 1e3 for mark in marks)
            self._zero = (marks[2], ended_s)
            self.add(op, asked_s, begun_s, ended_s)


class StreamLane(WorkerLane):
    """A stream and the thread that fills it."""

    clock: StreamClock

    def __init__(self, name: str, stream: Stream, run: Action, before: Action | None = None) -> None:
        self.stream = stream
        super().__init__(name, run, before, StreamClock())

    def drain(self) -> None:
        """Wait until all that was submitted is done or has failed."""
        error = self._last.wait() if self._last is not None else None
        if error is not None and self.error is None:
            self.error = (Op("", "transfer", "forward"), error)

    def close(self, timeout_s: float) -> bool:
        """End the thread and the stream after what is submitted; True if that was in time."""
        ended = super().close(timeout_s)
        self.stream.close()
        return ended

    def _event(self) -> Event:
        return StreamEvent()

    def _follow(self, event: Event) -> BaseException | None:
        return event.precede(self.stream)

    def _work(self) -> None:
        self.stream.attach()
        super()._work()

    def _do(self, op: Op, event: Event, asked: float) -> None:
        begun = self.stream.mark()
        self.stream.run(partial(self._before, op))
        self.stream.run(partial(self._run, op))
        mark = self.stream.mark()
        self.clock.later(op, begun, begun, mark)
        event.issue(mark)  # type: ignore[attr-defined]


class ComputeLane(InlineLane):
    """The lane of the computation on a device: the calling thread fills the stream and goes on.

    `before` and `after` are called around each op's work, in the stream (`debug.poison`).
    """

    clock: StreamClock

    def __init__(self, stream: Stream, before: Action = no_work, after: Action = no_work) -> None:
        super().__init__()
        self.clock = StreamClock()
        self.stream, self._before, self._after = stream, before, after

    def submit(self, op: Op, waits: Sequence[Event]) -> Event:
        """Put an op's work into the stream behind what it needs; raises the error of an op it waited for."""
        asked = self.stream.mark()
        for event in waits:
            error = event.wait() if self.on_host else event.precede(self.stream)
            if error is not None:
                raise error
        begun = self.stream.mark()
        for work in (self._before, self.work, self._after):
            self.stream.run(partial(work, op))
        mark = self.stream.mark()
        self.clock.later(op, asked, begun, mark)
        event = StreamEvent()
        event.issue(mark)
        return event

    def rest(self, workers: Iterable[WorkerLane]) -> None:
        """Wait until all that was submitted, here and to `workers`, is done; raises what this stream ran into."""
        asked = self.stream.mark()
        for lane in workers:
            lane.drain()
        mark = self.stream.mark()
        self.clock.later(None, asked, mark, mark)
        mark.synchronize()

    def close(self) -> None:
        """End the stream."""
        self.stream.close()
