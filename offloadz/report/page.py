"""`offloadz report`: a run directory becomes one HTML file that needs nothing else, not even a network.

Here figures become words; what is read is `read.py`'s, what is drawn `charts.py`'s, how it looks `page.html.jinja`'s.
Whatever comes from a run is escaped by the template.  The trade-off: long tables are thinned (and say so), so that the
page of a run of 100,000 steps stays below a megabyte; all lines are in `metrics.jsonl`.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from offloadz.config import Config
from offloadz.config.values import to_toml
from offloadz.model.aside import write_text
from offloadz.plan.errors import ConfigError
from offloadz.plan.footprint import PHASES, TIERS
from offloadz.plan.timeline import read_traces
from offloadz.plan.verdict import LEAST_STEPS, SMALL, TOLERANCE, Compared, Verdict, verdict
from offloadz.plan.words import counted, difference, human, lasting
from offloadz.report.charts import all_charts, timeline_chart
from offloadz.report.drawing import Chart, require_matplotlib
from offloadz.report.read import Line, RunFiles, read_run, thinned
from offloadz.report.simulated import simulated
from offloadz.train.metrics import SAMPLES
from offloadz.train.progress import duration

MOST_ROWS, MOST_EVENTS, MOST_SAMPLES = 300, 100, 12
"""Rows of the table of steps, of each kind of event, and answers to one prompt."""

Page = dict[str, Any]


def report_command(directory: Path, out: Path | None) -> int:
    """Write the page of a run to `out` (default: report.html in the run directory), private as the run's own files.

    Raises ConfigError for what is no run or no place for a file, DiskFailed where the page cannot be written.
    """
    require_matplotlib()
    run = read_run(directory)
    target = out or directory / "report.html"
    if target.is_dir() or not target.parent.is_dir():
        raise ConfigError(f"-o {target}: needs the name of a file in a directory that is there")
    write_text(target, render(run))
    for note in run.notes:
        print(f"note: {note}")
    print(f"{target}: {len(run.steps)} steps, {human(os.path.getsize(target))}; open it in any browser")
    return 0


def render(run: RunFiles) -> str:
    """The page as text."""
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"bytes": told_bytes, "markup": Markup}
    return environment.get_template("page.html.jinja").render(page(run))


def page(run: RunFiles) -> Page:
    """Everything the template shows."""
    found, notes = _verdict(run), list(run.notes)
    charts = all_charts(run, found)
    charts["beside"] += list(timeline_charts(run, notes))
    return {
        "name": run.directory.resolve().name,
        "place": str(run.directory.resolve()),
        "state": state(run),
        "notes": notes,
        "tiles": list(tiles(run, found)),
        "charts": charts,
        "verdict": list(verdict_lines(run, found)),
        "compared": [compared_row(one, found) for one in (found.step, found.tokens, *found.lanes, *found.figures)]
        if found
        else [],
        "memory": memory_table(run),
        "plan": run.plan or {},
        "events": events(run),
        "evaluations": thinned(run.evaluations, MOST_ROWS),
        "answers": answers(run.samples),
        "data": run.data,
        "config": config_tables(run.config),
        "steps": thinned(run.steps, MOST_ROWS),
        "num_steps": len(run.steps),
        "number": number,
        "made": time.strftime("%Y-%m-%d %H:%M"),
    }


def timeline_charts(run: RunFiles, notes: list[str]) -> Iterator[Chart]:
    """The step that was planned, and the last one that was traced; what cannot be had goes to `notes`."""
    if run.plan is not None and run.config is not None and "placement" in run.plan:
        timeline, note = simulated(run.config, run.plan)
        if timeline is None:
            notes.append(note)
        else:
            yield timeline_chart(timeline, "timeline", "Timeline of a step, predicted", note)
    steps = (run.config or {}).get("train", {}).get("trace_steps", [])
    try:
        measured = read_traces(run.directory, (step for step in steps if step <= run.steps[-1]["step"]))
    except (OSError, ValueError) as error:
        notes.append(f"The measured timelines cannot be read: {error}.")
        return
    if measured and measured[-1].spans:
        note = f"The last of {len(measured)} traced steps." if len(measured) > 1 else "The one traced step."
        yield timeline_chart(measured[-1], "measured", f"Timeline of {measured[-1].name}", note)


# ---- words -------------------------------------------------------------------------------------------------------


def number(value: Any, digits: int = 4) -> str:
    """A number for people; a dash where there is none."""
    if not isinstance(value, int | float) or not math.isfinite(value):
        return "-"
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    if abs(value) >= 10**digits:
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def told_bytes(value: Any) -> str:
    """Bytes for people; a dash where there is no number."""
    return human(int(value)) if isinstance(value, int | float) else "-"


def told_in(value: float, unit: str) -> str:
    """A value with its unit."""
    return told_bytes(value) if unit == "bytes" else f"{number(value)} {unit}"


def state(run: RunFiles) -> dict[str, str]:
    """In a word and a sentence whether the run is done, going on, or was stopped."""
    last, whole = run.steps[-1]["step"], run.num_steps
    of = f" of {whole:,}" if whole else ""
    written = time.strftime("%Y-%m-%d %H:%M", time.localtime(os.path.getmtime(run.directory / "metrics.jsonl")))
    if run.finished:
        return {"word": "finished", "kind": "good", "told": f"{last:,} steps, the last written {written}"}
    if run.held:
        return {"word": "running", "kind": "busy", "told": f"step {last:,}{of}, written {written}"}
    word = "not finished" if run.held is None else "stopped"
    return {"word": word, "kind": "bad", "told": f"step {last:,}{of}, written {written}; the same command goes on"}


def tiles(run: RunFiles, found: Verdict | None) -> Iterator[tuple[str, str, str]]:
    """The figures one looks for first: name, value, and a word about it."""
    steps = run.steps
    losses = [line["loss"] for line in steps if line.get("loss") is not None]
    if losses:
        yield "loss", number(losses[-1]), f"from {number(losses[0])} at the first step"
    known = [line for line in run.evaluations if line["eval_loss"] is not None]
    if known:
        best = min(known, key=lambda line: line["eval_loss"])
        yield (
            "evaluation loss",
            number(known[-1]["eval_loss"]),
            f"best {number(best['eval_loss'])}, step {best['step']}",
        )
    tokens, targets = (sum(line.get(key) or 0 for line in steps) for key in ("tokens", "target_tokens"))
    yield "tokens", f"{tokens:,}", f"{targets:,} of them trained"
    whole_s = math.fsum(line["step_s"] for line in steps)
    yield "time in steps", duration(whole_s), f"{number(tokens / whole_s if whole_s else None)} tokens/s"
    if found is not None:
        ratio = found.step.ratio
        yield (
            "time of a step",
            lasting(found.step.measured),
            f"the plan said {lasting(found.step.predicted)}" + (f", {difference(ratio, 's')}" if ratio else ""),
        )
    peak = max((line.get("bytes", {}).get("host_peak", 0) for line in steps), default=0)
    if peak:
        plan = max((run.plan or {}).get("bytes", {}).get("host", {}).values(), default=0)
        yield "host memory, peak", human(peak), f"the plan said {human(plan)}" if plan else "no plan to compare with"


# ---- the plan ----------------------------------------------------------------------------------------------------


def _verdict(run: RunFiles) -> Verdict | None:
    if run.plan is None:
        return None
    try:
        return verdict(run.plan, run.lines, run.firsts)
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        run.notes.append(f"plan.json and metrics.jsonl cannot be compared: {type(error).__name__} {error}.")
        return None


def _no_verdict(run: RunFiles) -> str:
    """Why nothing is compared: how many steps there are, and which of them count."""
    copies = (run.plan or {}).get("copies")
    fresh = copies if isinstance(copies, int) else 1
    besides = "the first of each start and skipped ones"
    if fresh > 1:
        besides += f", and 1 to {fresh}, each of which writes a copy of the state on disk for the first time"
    found = counted(sum("step_s" in line for line in run.lines), "step")
    return f"No verdict: it takes a plan and {LEAST_STEPS} steps besides {besides}; found {found}."


def verdict_lines(run: RunFiles, found: Verdict | None) -> Iterator[tuple[str, str]]:
    """Was the plan right, a (kind, sentence) each."""
    if found is None:
        yield "unknown", _no_verdict(run)
        return
    step, percent = found.step, round(100 * TOLERANCE)
    yield (
        "bad" if step.off else "good",
        (
            f"A step took {lasting(step.measured)} (median of {found.num_steps}), "
            f"the plan said {lasting(step.predicted)}: "
            f"{_apart(step)}, {'off by more than' if step.off else 'within'} {percent} %."
        ),
    )
    if found.tokens.off:
        lighter = found.tokens.measured < found.tokens.predicted
        yield (
            "unknown",
            (
                f"A step had {number(found.tokens.measured)} tokens, the plan counts {number(found.tokens.predicted)} "
                f"(rows of data.max_length): that alone makes it {'faster' if lighter else 'slower'}, and no lane "
                "mis-rated."
            ),
        )
    wrong = found.misrated
    if wrong is not None:
        yield (
            "bad",
            (
                f"The lane that was mis-rated most is {wrong.name}: busy {lasting(wrong.measured)} of a step where "
                f"{lasting(wrong.predicted)} were predicted."
            ),
        )
    elif not found.lanes:
        own = f"Of {counted(found.num_steps, 'steady step')} {found.num_own} came as this plan says"
        yield "unknown", f"{own} (commit {(run.plan or {}).get('commit')}): too few to call a lane mis-rated."
    else:
        sure = "and surely mis-rated" if found.tokens.off else "and by enough to show"
        yield (
            "good",
            f"No lane is off by more than {percent} % {sure} (what is below {SMALL:.0%} of a step is left out).",
        )
    others = [one.name for one in found.figures if one.off]
    others += [f"lane {one.name}" for one in found.lanes if one.off and one is not wrong]
    if others:
        yield "unknown", f"Also off by more than {percent} %: {', '.join(others)}."
    if run.plan and run.plan.get("rates_source"):
        yield "unknown", f"Rates of the plan: {run.plan['rates_source']}."


def compared_row(one: Compared, found: Verdict) -> dict[str, Any]:
    """A row of the table of figures."""
    lane = one in found.lanes
    kind = ("bad" if (found.matters(one) if lane else one.off) else "small") if one.off else "good"
    return {
        "name": f"lane {one.name}" if lane else one.name,
        "predicted": told_in(one.predicted, one.unit),
        "measured": told_in(one.measured, one.unit),
        "difference": _apart(one),
        "kind": kind,
        "word": {"bad": "off", "small": "off, but small", "good": "as predicted"}[kind],
    }


def _apart(one: Compared) -> str:
    return difference(one.ratio, one.unit) if one.ratio is not None else "not foreseen"


def memory_table(run: RunFiles) -> list[dict[str, Any]]:
    """Per tier the bytes of each phase, the limit, and what was measured at most."""
    rows = []
    measured = {"host": "host_peak", "device": "device_peak", "disk": "disk_held"}
    for tier in TIERS:
        phases = (run.plan or {}).get("bytes", {}).get(tier, {})
        found = [line["bytes"][measured[tier]] for line in run.steps if measured.get(tier) in line.get("bytes", {})]
        if any(phases.values()) or any(found):
            limit = (run.plan or {}).get("limits", {}).get(tier)
            cells = [phases.get(phase) for phase in PHASES]
            rows.append({"tier": tier, "phases": cells, "limit": limit, "measured": max(found, default=None)})
    return rows


# ---- what happened -----------------------------------------------------------------------------------------------


def events(run: RunFiles) -> Page:
    """Starts, skipped updates and clipping."""
    skipped = [line for line in run.steps if line.get("skipped")]
    clipped = [line["step"] for line in run.steps if line.get("clipped")]
    starts = [
        {"step": start.step, "when": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(start.at_s))}
        for start in run.starts or []
    ]
    return {
        "starts": starts[:MOST_EVENTS],
        "num_starts": len(starts),
        "skipped": skipped[:MOST_EVENTS],
        "num_skipped": len(skipped),
        "num_clipped": len(clipped),
        "clipped": ", ".join(list(ranges(clipped))[:MOST_EVENTS]),
        "share_clipped": len(clipped) / len(run.steps),
    }


def ranges(steps: Sequence[int]) -> Iterator[str]:
    """Ascending numbers as runs, such as `1-3`, `7`."""
    start = None
    for here, behind in zip(steps, [*steps[1:], None], strict=False):
        start = here if start is None else start
        if behind != here + 1:
            yield f"{start}" if start == here else f"{start}-{here}"
            start = None


def answers(lines: Sequence[Line]) -> list[Page]:
    """Per prompt the answers in order of steps; where there are many, some in between are left out."""
    found: dict[str, list[Page]] = {}
    for line in lines:
        for sample in line[SAMPLES]:
            found.setdefault(str(sample["prompt"]), []).append({"step": line["step"], **sample})
    return [
        {"prompt": prompt, "answers": thinned(told, MOST_SAMPLES), "num_answers": len(told)}
        for prompt, told in found.items()
    ]


def config_tables(config: Mapping[str, Any] | None) -> list[Page]:
    """Each section's keys and values, and which differ from the default."""
    sections = []
    default = Config()
    for section, values in (config or {}).items():
        part = getattr(default, section, None)
        known = {field.name: getattr(part, field.name) for field in fields(part)} if part is not None else {}
        rows = [{"key": key, "value": to_toml(value), "changed": _differs(value, known.get(key))} for key, value in
                (values.items() if isinstance(values, Mapping) else ())]  # fmt: skip
        sections.append({"name": section, "rows": rows, "changed": [row for row in rows if row["changed"]]})
    return sections


def _differs(value: Any, default: Any) -> bool:
    return bool(value != (list(default) if isinstance(default, tuple) else default))
