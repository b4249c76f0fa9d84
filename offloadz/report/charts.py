"""The charts of a report: each takes what a run left and answers with a `Chart`, if there is anything to show.

How lines are drawn is `drawing.py`'s.  Measured is always one colour and predicted another, dashed.  The trade-off:
axes of times and bytes begin at zero, so a small change looks small; loss and norm take the range they have.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from offloadz.plan.timeline import Span, Timeline
from offloadz.plan.verdict import Verdict
from offloadz.plan.words import UNITS, human
from offloadz.report.drawing import COLOURS, HEIGHT, Chart, Key, draw, level, line, numbers
from offloadz.report.read import RunFiles, thinned

if TYPE_CHECKING:
    from matplotlib.axes import Axes

KINDS = {
    "computation": "computation", "weights": "weights", "gradients": "gradients", "state and update": "state",
    "saved inputs": "inputs",
}  # fmt: skip
"""What a span is about, and its colour."""

_OF_LETTER = {"w": "weights", "g": "gradients", "x": "saved inputs"}
_COMPUTED = ("forward", "backward", "scatter", "norm")

WIDE = 30.0
"""Greatest over least value from which on an axis is logarithmic."""

CELLS = 400
"""A timeline is told in so many cells: spans of a kind closer together than that are one."""

MOST_MARKS = 100
"""Skipped steps that are marked, evenly chosen: a chart has no room to tell more apart; a table counts them."""

MEASURED, PREDICTED = Key("measured", "measured"), Key("the plan", "predicted", "dash")


def kind_of(span: Span) -> str:
    """What an op of a timeline is about: a key of `KINDS`."""
    verb = span.text.split()[0]
    return "computation" if verb in _COMPUTED else _OF_LETTER.get(verb.partition(".")[2][:1], "state and update")


def learning_charts(run: RunFiles) -> list[Chart]:
    """Loss with evaluations, learning rate, norm."""
    most = (run.config or {}).get("optimizer", {}).get("max_grad_norm")
    return [
        _loss(run),
        _curve(run, "lr", "Learning rate", "lr"),
        _curve(run, "norm", "Gradient norm, before clipping", "grad_norm", limit=most or None),
    ]


def _loss(run: RunFiles) -> Chart:
    told = [(found["step"], found["eval_loss"]) for found in run.evaluations]

    def more(axes: Axes) -> None:
        if told:
            at, losses = zip(*told, strict=True)
            axes.plot(at, numbers(losses), "D", color=COLOURS["predicted"], markersize=4.5, gid="evaluation")

    keys = (Key("training", "measured"), *((Key("evaluation", "predicted", "mark"),) if told else ()))
    return _curve(run, "loss", "Loss", "loss", more, keys=keys, others=[value for _, value in told])


def _curve(
    run: RunFiles,
    name: str,
    title: str,
    key: str,
    more: Callable[[Axes], None] = lambda axes: None,
    *,
    keys: tuple[Key, ...] = (),
    limit: float | None = None,
    from_zero: bool = False,
    others: Sequence[float | None] = (),
) -> Chart:
    """One number of every step over the steps, with the starts and the skipped steps marked."""
    at, values = [found["step"] for found in run.steps], numbers([found.get(key) for found in run.steps])
    known = [value for value in (*values, *numbers(others)) if not math.isnan(value)]
    every = 1

    def paint(axes: Axes) -> None:
        nonlocal every
        every = line(axes, at, values, "measured", "measured")
        more(axes)
        if limit is not None:
            level(axes, limit, "bad", "limit", ":")
        _over_steps(axes, run)
        _scale(axes, [*known, *([limit] if limit is not None else [])], from_zero)

    svg = draw(name, title, paint)
    keys += (Key(f"optimizer.max_grad_norm = {limit:g}", "bad", "dots"),) if limit is not None else ()
    note = "" if known else "No step has a finite value."
    return Chart(name, title, svg, keys + _marks(run), " ".join(filter(None, (note, _thinned(every)))))


def _thinned(every: int) -> str:
    return f"Each point is the mean of {every} steps, the band their range." if every > 1 else ""


def _over_steps(axes: Axes, run: RunFiles) -> None:
    """The axis of steps, with where the run went on and where no update was made."""
    from matplotlib.ticker import MaxNLocator

    first, last = run.steps[0]["step"], run.steps[-1]["step"]
    room = max(1.0, 0.02 * (last - first))
    axes.set_xlim(first - room, last + room)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.set_xlabel("step")
    axes.grid(axis="y")
    for number, step in enumerate(_resumed(run)):
        axes.axvline(step - 0.5, color=COLOURS["faint"], linestyle=":", linewidth=1.1, gid=f"start-{number}")
    skipped = thinned([found["step"] for found in run.steps if found.get("skipped")], MOST_MARKS)
    if skipped:
        zeros = [0.03] * len(skipped)
        axes.plot(skipped, zeros, "x", color=COLOURS["bad"], transform=axes.get_xaxis_transform(), gid="skipped",
                  markersize=5)  # fmt: skip


def _resumed(run: RunFiles) -> list[int]:
    return sorted({step for step in run.firsts[1:] if step > 1})


def _marks(run: RunFiles) -> tuple[Key, ...]:
    """Legend entries of what `_over_steps` marked."""
    skipped = any(found.get("skipped") for found in run.steps)
    went_on = (Key("resumed", "faint", "dots"),) if _resumed(run) else ()
    return went_on + ((Key("update skipped", "bad", "mark"),) if skipped else ())


def _scale(axes: Axes, known: Sequence[float], from_zero: bool) -> None:
    """A linear axis in plain numbers; a logarithmic one where values are all positive and far apart."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    low, high = min(known, default=0.0), max(known, default=1.0)
    if from_zero or low == high:  # a constant has no range of its own
        axes.set_ylim(min(0.0, 1.2 * low), max(1.08 * high, 0.0) or 1.0)
    elif low > 0 and high > WIDE * low:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(numticks=6))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        return
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))


# ---- beside the plan ---------------------------------------------------------------------------------------------


def step_time_chart(run: RunFiles, predicted_s: float | None) -> Chart:
    """Seconds of every step, and what the plan said."""

    def more(axes: Axes) -> None:
        if predicted_s is not None:
            level(axes, predicted_s, "predicted", "predicted")
        axes.set_ylabel("seconds")

    keys = (MEASURED, *((PREDICTED,) if predicted_s is not None else ()))
    return _curve(run, "step-time", "Time of a step", "step_s", more, keys=keys, from_zero=True, others=[predicted_s])


def lanes_chart(verdict: Verdict) -> Chart:
    """Busy seconds of every lane in a step: the median measured beside the plan's."""
    lanes = verdict.lanes
    most = max(max(lane.predicted, lane.measured) for lane in lanes)

    def paint(axes: Axes) -> None:
        for place, (values, colour) in enumerate(
            (([lane.predicted for lane in lanes], "predicted"), ([lane.measured for lane in lanes], "measured"))
        ):
            rows = [row + 0.39 * place - 0.2 for row in range(len(lanes))]
            axes.barh(rows, values, 0.36, color=COLOURS[colour])
            for row, value in zip(rows, values, strict=True):
                axes.text(value + 0.015 * most, row, f"{value:.3g} s", va="center", fontsize=8.5)
        axes.set_xlim(0, 1.2 * most)
        axes.grid(axis="x")
        _lane_axis(axes, [lane.name for lane in lanes])

    title = "Busy time of each lane, per step"
    svg = draw("lanes", title, paint, 60 + 32 * len(lanes))
    keys = (Key("the plan", "predicted", "box"), Key("measured", "measured", "box"))
    return Chart("lanes", title, svg, keys, f"Medians of {verdict.num_own} steady steps.")


def _lane_axis(axes: Axes, lanes: Sequence[str]) -> None:
    axes.set_yticks(range(len(lanes)), [lane.replace("_", " ") for lane in lanes])
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(lanes) - 0.4, -0.6)
    axes.spines["left"].set_visible(False)
    axes.set_xlabel("seconds")


def timeline_chart(timeline: Timeline, name: str, title: str, note: str) -> Chart:
    """A step, lane by lane: what each is busy with and when."""
    lanes = [load.lane for load in timeline.loads()]
    cell_s = timeline.length_s / CELLS

    def paint(axes: Axes) -> None:
        for row, lane in enumerate(lanes):
            axes.barh(row, timeline.length_s, 0.7, color=COLOURS["grid"], alpha=0.35, gid=f"{lane}-row")
            for kind, colour in KINDS.items():
                spans = [s for s in timeline.spans if s.lane == lane and kind_of(s) == kind]
                bars = merged([(s.start_s - timeline.start_s, s.end_s - timeline.start_s) for s in spans], cell_s)
                if bars:
                    axes.broken_barh([(a, max(b - a, cell_s / 2)) for a, b in bars], (row - 0.35, 0.7),
                                     color=COLOURS[colour], linewidth=0, gid=f"{lane}-{colour}")  # fmt: skip
        axes.set_xlim(0, timeline.length_s)
        _lane_axis(axes, lanes)

    used = {kind_of(span) for span in timeline.spans}
    keys = tuple(Key(kind, colour, "box") for kind, colour in KINDS.items() if kind in used)
    return Chart(name, title, draw(name, title, paint, 50 + 24 * len(lanes)), keys, note)


def merged(intervals: Sequence[tuple[float, float]], gap: float) -> list[tuple[float, float]]:
    """Intervals in order, those that touch or lie closer together than `gap` as one."""
    found: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if found and start - found[-1][1] <= gap:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


# ---- memory ------------------------------------------------------------------------------------------------------

MEMORY = {
    "host": ("Host memory", (("host_resident", "now", "good", "line"), ("host_peak", "the peak", "measured", "line"))),
    "device": ("Device memory", (("device_peak", "the peak", "measured", "line"),)),
    "disk": ("Held on disk, in the swap path", (("disk_held", "now", "measured", "line"),)),
}  # fmt: skip
"""Per tier: the chart's title, and keys of `bytes` with their words and colours."""


def speed_chart(run: RunFiles) -> Chart:
    """Tokens per second: of samples, without what fills rows up."""
    return _curve(run, "speed", "Tokens per second", "tokens_per_s", from_zero=True)


def memory_charts(run: RunFiles) -> list[Chart]:
    """Bytes of each tier over the steps, and what the plan said of a step; tiers that nobody used are left out."""
    return [chart for tier in MEMORY if (chart := _memory(run, tier)) is not None]


def _memory(run: RunFiles, tier: str) -> Chart | None:
    title, series = MEMORY[tier]
    at, told = [found["step"] for found in run.steps], [found.get("bytes") or {} for found in run.steps]
    curves = {key: numbers([found.get(key) for found in told]) for key, *_ in series if any(key in f for f in told)}
    phases = (run.plan or {}).get("bytes", {}).get(tier, {})
    levels = {"a step": phases.get("step", 0), "the highest phase": max(phases.values(), default=0)}
    levels = {words: height for words, height in levels.items() if height}
    if levels.get("a step") == levels.get("the highest phase"):
        levels.pop("the highest phase", None)
    highest = max((v for values in (*curves.values(), levels.values()) for v in values if not math.isnan(v)), default=0)
    if not curves or not highest:
        return None
    every = 1

    def paint(axes: Axes) -> None:
        nonlocal every
        for key, _, colour, _ in series:
            if key in curves:
                every = line(axes, at, curves[key], colour, key)
        for (words, height), style in zip(levels.items(), ("--", ":"), strict=False):
            level(axes, height, "predicted", f"plan-{words.split()[-1]}", style)
        _over_steps(axes, run)
        _bytes_axis(axes, highest)

    keys = tuple(Key(words, colour, kind) for key, words, colour, kind in series if key in curves)
    styles = zip(levels.items(), ("dash", "dots"), strict=False)
    keys += tuple(Key(f"the plan, {words}: {human(height)}", "predicted", kind) for (words, height), kind in styles)
    limit = (run.plan or {}).get("limits", {}).get(tier)
    note = f"May use {human(limit)}." if limit else ""
    svg = draw(f"memory-{tier}", title, paint, HEIGHT)
    return Chart(f"memory-{tier}", title, svg, keys + _marks(run), " ".join(filter(None, (note, _thinned(every)))))


def _bytes_axis(axes: Axes, highest: float) -> None:
    """From zero, in one unit."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator, MultipleLocator

    name, unit = next((u for u in UNITS if highest >= u[1]), ("B", 1))
    ticks = MaxNLocator(5).tick_values(0, 1.1 * highest / unit)
    axes.set_ylim(0, 1.1 * highest)
    axes.yaxis.set_major_locator(MultipleLocator(unit * (ticks[1] - ticks[0])))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / unit:g}{name}" if value else "0"))


def all_charts(run: RunFiles, found: Verdict | None) -> dict[str, Any]:
    """Charts of the sections of a page that need nothing but the run."""
    predicted = found.step.predicted if found is not None else (run.plan or {}).get("step_s")
    beside = [step_time_chart(run, predicted), *([lanes_chart(found)] if found is not None and found.lanes else [])]
    return {"learning": learning_charts(run), "beside": beside, "memory": [speed_chart(run), *memory_charts(run)]}
