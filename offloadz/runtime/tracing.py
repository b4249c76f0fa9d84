"""What the lanes of a run did while a caller watched, as a timeline like the simulated one.

Lanes note when each op ran only while somebody asks.  The trade-off: what was under way when the watch ended is left
out (it is in nobody's timeline), so the sums of a timeline are a little below those of the lanes' clocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from offloadz.plan.timeline import Span, label
from offloadz.runtime.lanes import InlineLane, WorkerLane


@contextmanager
def traced(lanes: Mapping[str, InlineLane | WorkerLane]) -> Iterator[list[Span]]:
    """The spans of all lanes, in the list that is handed out, once the block has ended; seconds of `perf_counter`."""
    spans: list[Span] = []
    for lane in lanes.values():
        lane.clock.catch_up()
        lane.clock.trace = []
    try:
        yield spans
    finally:
        for lane in lanes.values():
            lane.clock.catch_up()
            found, lane.clock.trace = lane.clock.trace, None
            spans += [Span(op.lane, label(op), start_s, end_s) for op, start_s, end_s in found or ()]
