"""Was the plan right: what it said beside what a run measured, and which lane it was wrong about.

Takes the object of `plan.json` and lines of `metrics.jsonl`, so a run can ask it about itself and a report about any
run.  A measured time is the median of the steady steps.  So is the predicted one: a run may go over to another way of
committing, whose time a line has, and whose lanes nothing tells.  The trade-off: the first step of each start, those
that write to fresh extents, and skipped steps are left out; a run of a few steps therefore gets no verdict.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from offloadz.plan.ops import LANES

TOLERANCE = 0.15
"""How far off, as a share of what was predicted, is said to be off."""

LEAST_STEPS = 3
"""Steady steps that a verdict needs."""

SMALL = 0.05
"""A lane that is wrong by less than this share of the step changes nothing that a user would notice."""

PHASES_MEASURED = ("data", "load", "step", "save")
"""What has happened by the time the last line is written: the export comes after it."""

Line = Mapping[str, Any]


@dataclass(frozen=True)
class Compared:
    """A figure of the plan beside the measured one, both in `unit` (`s`, `bytes`, `tokens` or `tokens/s`)."""

    name: str
    predicted: float
    measured: float
    unit: str

    @property
    def ratio(self) -> float | None:
        """Measured over predicted; None where nothing was predicted."""
        return self.measured / self.predicted if self.predicted > 0 else None

    @property
    def off(self) -> bool:
        """Whether it is off by more than `TOLERANCE`."""
        return abs(self.measured - self.predicted) > TOLERANCE * self.predicted


@dataclass(frozen=True)
class Verdict:
    """All that can be compared.

    `lanes`: busy seconds of a step that commits as the plan says, without those that did and were to do nothing; none
    where fewer than `LEAST_STEPS` do.
    """

    step: Compared
    tokens: Compared
    """Of a step: a plan counts full rows."""
    figures: tuple[Compared, ...]
    """Tokens per second, bytes written, peaks of memory."""
    lanes: tuple[Compared, ...]
    num_steps: int
    """Steady steps behind it."""
    num_own: int
    """Those of them behind `lanes`."""

    def matters(self, lane: Compared) -> bool:
        """Whether a lane is off, and by enough to show in the step."""
        return lane.off and abs(lane.measured - lane.predicted) > SMALL * self.step.predicted

    @property
    def misrated(self) -> Compared | None:
        """Of the lanes that matter the one that is wrong by the most seconds, whatever its step was made of.

        Where a step had fewer tokens than the plan counts, a lane that was busy for less may still be rated rightly,
        and one that was busy for longer cannot be; with more tokens it is the other way round.
        """
        lighter = self.tokens.measured < self.tokens.predicted
        found = [lane for lane in self.lanes if self.matters(lane)]
        if self.tokens.off:
            found = [lane for lane in found if (lane.measured > lane.predicted) == lighter]
        return max(found, key=lambda lane: abs(lane.measured - lane.predicted), default=None)


def steady(lines: Sequence[Line], firsts: Collection[int] = ()) -> list[Line]:
    """The lines of steps that are like most: not skipped, and not the first of a start (`firsts`, and the first)."""
    steps = [line for line in lines if "step_s" in line]
    without = {*firsts, *(line["step"] for line in steps[:1])}
    return [line for line in steps if not line.get("skipped") and line["step"] not in without]


def verdict(plan: Mapping[str, Any], lines: Sequence[Line], firsts: Collection[int] = ()) -> Verdict | None:
    """The plan beside the measured steps; None where fewer than `LEAST_STEPS` of them are steady.

    `plan` is `plan.json`, `lines` are those of `metrics.jsonl`, `firsts` the first step after each start.
    """
    # Until each copy of the state was written once, its extents are fresh ones, which drives write more slowly.
    usual = steady(lines, {*firsts, *range(1, 1 + int(plan.get("copies", 1)))})
    if len(usual) < LEAST_STEPS:
        return None
    planned_s = float(plan["step_s"])
    predicted = [float(line.get("predicted_step_s", planned_s)) for line in usual]
    own = [line for line, told_s in zip(usual, predicted, strict=True) if told_s == planned_s]
    step = Compared("step time", median(predicted), median(line["step_s"] for line in usual), "s")
    full = float(plan["tokens_per_s"]) * planned_s
    tokens = Compared("tokens in a step", full, median(line["tokens"] for line in usual), "tokens")
    lanes = tuple(_lanes(plan, own)) if len(own) >= LEAST_STEPS else ()
    return Verdict(step, tokens, tuple(_figures(plan, lines, usual, step)), lanes, len(usual), len(own))


def _lanes(plan: Mapping[str, Any], own: Sequence[Line]) -> Iterator[Compared]:
    taken = plan.get("taken_s") or plan["busy_s"]
    for lane in LANES:
        told, busy = float(taken.get(lane, 0.0)), median(line["busy_s"].get(lane, 0.0) for line in own)
        if told or busy:
            yield Compared(lane, told, busy, "s")


def _figures(
    plan: Mapping[str, Any], lines: Sequence[Line], usual: Sequence[Line], step: Compared
) -> Iterator[Compared]:
    """What is no time: speed as the user sees it, bytes written, the peak of each tier that was measured."""
    speed = median(line["tokens_per_s"] for line in usual)
    sooner = float(plan["step_s"]) / step.predicted if step.predicted else 1.0
    yield Compared("tokens per second", float(plan["tokens_per_s"]) * sooner, speed, "tokens/s")
    written = median(line["bytes"]["disk_written"] for line in usual)
    planned = plan["disk_written_per_step"] / plan.get("ranks", 1)  # all wear the drive, a line tells of one
    if planned or written:
        yield Compared("written to disk per step", planned, written, "bytes")
    for tier, key in (("host", "host_peak"), ("device", "device_peak"), ("disk", "disk_held")):
        found = [line["bytes"][key] for line in lines if key in line.get("bytes", {})]
        predicted = max(plan["bytes"][tier][phase] for phase in PHASES_MEASURED)
        if found and (predicted or max(found)):
            yield Compared(
                f"{tier} memory" if tier != "disk" else "held on disk", float(predicted), max(found), "bytes"
            )
