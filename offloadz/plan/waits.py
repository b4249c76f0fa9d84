"""What keeps a step from being shorter, in words, also where no lane is busy for nearly all of it.

Then lanes wait for each other: what runs while the busiest one does nothing is what it waits for.  Left to others: the
name alone (`Prediction.bottleneck`), which is what scripts read.  The trade-off: of several things that run meanwhile
only the longest is named.
"""

from __future__ import annotations

from collections.abc import Sequence

from offloadz.plan.predict import Prediction
from offloadz.plan.timeline import Span, Timeline

FULL = 0.9
"""Share of a step from which on a lane keeps it from being shorter, by itself."""


def bottleneck_told(found: Prediction, commit: str) -> str:
    """The bottleneck; where it is busy for less than `FULL` of the step with its share and what it waits for."""
    name, timeline = found.bottleneck, found.timeline
    busy_s = {**found.taken_s, **found.shared_s}[name]
    if not found.step_s or busy_s >= FULL * found.step_s:
        return name
    told = f"{name} ({busy_s / found.step_s:.0%} busy"
    if name not in found.taken_s:
        return f"{told}; lanes wait for each other)"
    updating = {op.verb for op in found.program.ops if op.phase in ("ahead", "update")}
    updating -= {op.verb for op in found.program.ops if op.phase not in ("ahead", "update")}
    meanwhile: dict[str, float] = {}
    idle = idle_spans(timeline, name)
    for span in timeline.spans:
        what = "updates" if span.text.split()[0] in updating else span.lane
        meanwhile[what] = meanwhile.get(what, 0.0) + _outside(span, idle)
    most = max(meanwhile, key=lambda what: meanwhile[what], default="")
    if most == "updates":
        most = "updates, which wait for the norm" if commit == "hold" else "updates"
    return f"{told}; it waits for {most})"


def idle_spans(timeline: Timeline, lane: str) -> list[tuple[float, float]]:
    """When a lane does nothing, from the start of the timeline to its end."""
    last, found = timeline.start_s, []
    for span in sorted((s for s in timeline.spans if s.lane == lane), key=lambda s: s.start_s):
        found += [(last, span.start_s)] if span.start_s > last else []
        last = max(last, span.end_s)
    return [*found, (last, timeline.start_s + timeline.length_s)]


def _outside(span: Span, idle: Sequence[tuple[float, float]]) -> float:
    """Seconds of a span in which another lane is idle."""
    return sum(max(0.0, min(span.end_s, end) - max(span.start_s, begin)) for begin, end in idle)
