"""What ran when, on which lane: simulated and measured alike, as a table, as text, and as a trace.

A `Timeline` is a list of spans and nothing else, so a prediction and a measurement are printed side by side
by the same code.  The trace is the JSON that Perfetto and chrome://tracing open.  The trade-off: spans are kept in
memory (about 150 bytes each), so a timeline is made of single steps, never of a whole run.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from offloadz.plan.ops import LANES, Op


@dataclass(frozen=True)
class Span:
    """An op on its lane from `start_s` to `end_s`, seconds from the start of the timeline."""

    lane: str
    text: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Load:
    """What a lane did: seconds busy and idle, and the busy share of the whole."""

    lane: str
    num_ops: int
    busy_s: float
    idle_s: float
    share: float


@dataclass(frozen=True)
class Timeline:
    """Spans of a step in any order; `name` tells where they come from (`predicted`, `measured`)."""

    spans: tuple[Span, ...]
    name: str = "predicted"

    @property
    def start_s(self) -> float:
        return min((s.start_s for s in self.spans), default=0.0)

    @property
    def length_s(self) -> float:
        """Seconds from the first start to the last end."""
        return max((s.end_s for s in self.spans), default=0.0) - self.start_s

    def busy_s(self) -> dict[str, float]:
        """Seconds in which each lane has something running; overlapping spans of a lane count once."""
        return {lane: _covered((s.start_s, s.end_s) for s in self.spans if s.lane == lane) for lane in LANES}

    def loads(self) -> list[Load]:
        """One entry per lane that did something, in the order of `LANES`."""
        whole = self.length_s
        found = []
        for lane, busy in self.busy_s().items():
            count = sum(s.lane == lane for s in self.spans)
            if count:
                found.append(Load(lane, count, busy, max(0.0, whole - busy), busy / whole if whole else 0.0))
        return found

    def table(self) -> str:
        """Lanes with their ops, busy and idle seconds and busy share, as text."""
        lines = [
            f"{self.name}: {self.length_s:.3f} s",
            f"{'lane':<11}{'ops':>7}{'busy s':>10}{'idle s':>10}{'busy':>7}",
        ]
        for load in self.loads():
            share = f"{load.share:.0%}"
            lines.append(f"{load.lane:<11}{load.num_ops:>7}{load.busy_s:>10.3f}{load.idle_s:>10.3f}{share:>7}")
        return "\n".join(lines)

    def gantt(self, width: int = 100) -> str:
        """A line of `width` cells per lane: `#` busy for most of the cell, `-` for a part, `.` idle."""
        cell = self.length_s / width if self.spans else 0.0
        lines = []
        for load in self.loads():
            filled = _fill([s for s in self.spans if s.lane == load.lane], self.start_s, cell, width)
            marks = "".join("#" if f > 0.5 else "-" if f > 0.0 else "." for f in filled)
            lines.append(f"{load.lane:<11}{marks}")
        return "\n".join(lines)

    def trace(self) -> dict[str, object]:
        """The object that Perfetto and chrome://tracing open; times in microseconds."""
        return {"traceEvents": trace_events([self]), "displayTimeUnit": "ms"}


def trace_events(timelines: Sequence[Timeline]) -> list[dict[str, object]]:
    """Trace events of several timelines, each a process, each lane a thread, so that they lie one below the other."""
    events: list[dict[str, object]] = []
    for pid, timeline in enumerate(timelines):
        events.append({"ph": "M", "pid": pid, "name": "process_name", "args": {"name": timeline.name}})
        for tid, lane in enumerate(LANES):
            events.append({"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": lane}})
        for span in timeline.spans:
            start, length = (span.start_s - timeline.start_s) * 1e6, (span.end_s - span.start_s) * 1e6
            where = {"pid": pid, "tid": LANES.index(span.lane), "ts": start, "dur": length}
            events.append({"ph": "X", "name": span.text, "cat": span.lane, **where})
    return events


def write_trace(path: str | Path, timelines: Sequence[Timeline]) -> None:
    """A trace file of one or several timelines."""
    document = {"traceEvents": trace_events(timelines), "displayTimeUnit": "ms"}
    Path(path).write_text(json.dumps(document), encoding="utf-8")


def read_trace(path: str | Path) -> list[Timeline]:
    """The timelines of a file that `write_trace` wrote; raises ValueError for what is none, OSError for no file."""
    try:
        events = json.loads(Path(path).read_text(encoding="utf-8"))["traceEvents"]
        names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
        spans: dict[int, list[Span]] = {pid: [] for pid in names}
        for event in events:
            if event["ph"] == "X":
                start_s = event["ts"] / 1e6
                spans[event["pid"]].append(Span(event["cat"], event["name"], start_s, start_s + event["dur"] / 1e6))
    except (LookupError, TypeError) as error:
        raise ValueError(f"{path} is no trace of offloadz: {type(error).__name__} {error}") from error
    return [Timeline(tuple(spans[pid]), name) for pid, name in names.items()]


def trace_path(directory: Path, step: int) -> Path:
    """Where in a run directory the measured timeline of a step is."""
    return directory / "traces" / f"step-{step:06d}.json"


def read_traces(directory: Path, steps: Iterable[int]) -> list[Timeline]:
    """The measured timelines of these steps that a run left in its directory; one that began anew may hold others."""
    paths = (trace_path(directory, step) for step in sorted(set(steps)))
    return [found for path in paths if path.exists() for found in read_trace(path)]


class Spanned(Protocol):
    """A simulated lane."""

    @property
    def spans(self) -> list[tuple[Op, float, float]]: ...


def from_virtual(lanes: Mapping[str, Spanned], since_s: float = 0.0, name: str = "predicted") -> Timeline:
    """The timeline of simulated lanes, without what ended before `since_s`."""
    spans = []
    for lane in lanes.values():
        for op, start, end in lane.spans:
            if end > since_s or start >= since_s:
                spans.append(Span(op.lane, label(op), max(start, since_s), end))
    return Timeline(tuple(spans), name)


def label(op: Op) -> str:
    """A short name of an op for people: verb, unit (or the seat where there is none), part, micro-batch."""
    seat = op.seat if op.unit < 0 else -1
    numbers = (("u", op.unit), ("p", op.part), ("s", seat), ("m", op.micro))
    return " ".join([op.verb, *(f"{mark}{number}" for mark, number in numbers if number >= 0)])


def _covered(intervals: Iterable[tuple[float, float]]) -> float:
    total, until = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def _fill(spans: Sequence[Span], start_s: float, cell_s: float, width: int) -> list[float]:
    """Busy share of each cell."""
    filled = [0.0] * width
    for span in spans:
        if cell_s <= 0.0:
            continue
        first, last = (span.start_s - start_s) / cell_s, (span.end_s - start_s) / cell_s
        for cell in range(int(first), min(width, int(last) + 1)):
            filled[cell] += max(0.0, min(last, cell + 1) - max(first, cell))
    return filled
