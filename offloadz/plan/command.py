"""`offloadz plan` and `offloadz show`: what a run would need and do, for people and for scripts.

Both answer without reading a tensor, and without importing torch where no driver shows a GPU.  What is printed is what
`search.decide` said and nothing is computed here.  The trade-off: rates are typical ones where no machine file names
others, and times are marked so; bytes are exact for storage and a formula for computation.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from glob import glob
from pathlib import Path
from typing import TYPE_CHECKING

from offloadz.plan.answer import Plan
from offloadz.plan.cut import Cut, saved_cut
from offloadz.plan.footprint import PHASES, TIERS
from offloadz.plan.found import Find
from offloadz.plan.headers import find_directory
from offloadz.plan.machine import rates_told
from offloadz.plan.more import More, more_of
from offloadz.plan.question import Question, question
from offloadz.plan.timeline import read_traces, write_trace
from offloadz.plan.vocabulary import tokenizer_missing
from offloadz.plan.waits import bottleneck_told
from offloadz.plan.words import counted, human, lasting

if TYPE_CHECKING:
    from offloadz.config import Config

SHOWN_LINES = 200
SHOWN_COLUMNS = 200
"""A program of a large model has thousands of lines, some with hundreds of places; all of it comes with a trace."""
COLUMNS = (
    "above: number, lane, work, phase, seat/unit/part/call/micro-batch (-1: none), bytes or elements, "
    "places read -> written, ops it comes after"
)


def plan_command(
    config_path: str | Path,
    overrides: Sequence[str] = (),
    machine_name: str | None = None,
    sets: Sequence[str] = (),
    as_json: bool = False,
    find: Find = lambda told: None,
) -> int:
    """Print the plan of a configuration; 0 where it fits, 3 where it does not.  Raises ConfigError (exit status 2).

    `find`: see `question.question`.
    """
    config = _config(config_path, overrides)
    with _no_collector():
        return _print_answer(config, machine_name, sets, as_json, find)


def _print_answer(config: Config, machine_name: str | None, sets: Sequence[str], as_json: bool, find: Find) -> int:
    """What `plan_command` prints, and its exit status; all that it was told by is gone behind it."""
    asked = question(config, machine_name, sets, find, weightless=True, cut=_cut(config, machine_name))
    plan = asked.answer()
    more = more_of(asked, plan, len(config.offload.swap))
    if as_json:
        print(json.dumps(plan.to_json() | {"more": more.to_json()}, indent=2))
    else:
        _print_plan(asked, plan, list(_missing(config, machine_name)), more)
    if not plan.fits:
        print(plan.refusal(), file=sys.stderr)
    return 0 if plan.fits else 3


def show_command(
    config_path: str | Path,
    overrides: Sequence[str] = (),
    trace: str | Path | None = None,
    find: Find = lambda told: None,
    machine_name: str | None = None,
    sets: Sequence[str] = (),
) -> int:
    """Print the program of a steady step and its simulated timeline; with `trace`, the whole program and a file."""
    config = _config(config_path, overrides)
    asked = question(config, machine_name, sets, find, cut=_cut(config, machine_name))
    plan = asked.answer()
    found = asked.step_of(plan)
    lines = found.program.text().splitlines()
    whole = trace is not None
    for line in lines if whole else lines[:SHOWN_LINES]:
        print(line if whole or len(line) <= SHOWN_COLUMNS else line[: SHOWN_COLUMNS - 3] + "...")
    if not whole and len(lines) > SHOWN_LINES:
        print(f"... {len(lines) - SHOWN_LINES} more lines of {len(lines)}; all of them with --trace FILE")
    print(f"\n{COLUMNS}")
    print(found.timeline.table())
    print(found.timeline.gantt())
    print(_honesty(plan))
    if trace is not None:
        measured = read_traces(Path(config.train.output), config.train.trace_steps)
        write_trace(trace, [found.timeline, *measured])
        beside = f", with {len(measured)} measured" if measured else ""
        print(f"trace written to {trace}{beside}; open it at ui.perfetto.dev or chrome://tracing")
    if not plan.fits:
        print(f"this program {plan.refusal()}", file=sys.stderr)
    return 0


@contextmanager
def _no_collector() -> Iterator[None]:
    """Without the search for cycles, which walks over all that was made again and again: a plan makes a hundred
    thousand ops.  What is left of them is no longer needed, so it is kept out of that search, which would walk over all
    of it at once and again as the process ends; the next plan gives it back to it.  Where it was off before, it stays
    off."""
    was_on = gc.isenabled()
    gc.disable()
    gc.unfreeze()
    try:
        yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()


def _config(config_path: str | Path, overrides: Sequence[str]) -> Config:
    from offloadz.config import load_config

    return load_config(config_path, list(overrides))


def _cut(config: Config, machine_name: str | None) -> Cut | None:
    """That of the run here which the configuration would go on with."""
    return None if machine_name else saved_cut(config.train.output, config.train.resume)


def _missing(config: Config, machine_name: str | None) -> Iterator[str]:
    """What a plan does without and a run does not: tokenizer, files of records, here a drive that is mounted."""
    from offloadz.config.sections import ENDINGS

    if told := tokenizer_missing(find_directory(config.model.path)):
        yield f"model.path: {told}; a run needs one"
    for key, patterns in (("train", config.data.train), ("eval", config.data.eval)):
        for pattern in patterns:
            if pattern.endswith(ENDINGS) and not glob(os.path.expanduser(pattern)):
                yield f"data.{key}: {pattern} is no file here; a run needs it"
    for place in map(Path, () if machine_name else config.offload.swap):
        if place.is_absolute() and not place.exists():
            there = next(above for above in place.parents if above.exists())
            yield f"offload.swap: {place} is not there; a run makes it, on the drive of {there}"


def _print_plan(asked: Question, plan: Plan, notes: Sequence[str], more: More) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    spec, share = asked.spec, plan.placement.share
    trained = sum(u.num_trainable for u in spec.units)
    console.print(
        f"{spec.num_elements / 1e6:,.1f} M parameters ({trained / 1e6:,.1f} M trained), "
        f"in {counted(len(spec.units), 'unit')} that move alone, "
        f"weights {spec.dtype}, compute {plan.placement.compute} on {plan.device}, "
        f"{counted(plan.batch.rows, 'row')} of {counted(plan.batch.length, 'token')} a step{share.each}",
        soft_wrap=True,
    )
    title = f"bytes{share.each}, predicted" + "; checkpoints are one for all" * (share.ranks > 1)
    table = Table("tier", *PHASES, "peak", "may use", box=box.SIMPLE, title=title, title_justify="left")
    for tier in TIERS:
        if plan.peak[tier] or tier == "host":
            limit = plan.limits.get(tier)
            cells = [human(plan.bytes[tier][phase]) for phase in PHASES]
            table.add_row(tier, *cells, human(plan.peak[tier]), "-" if limit is None else human(limit))
    console.print(table)
    for note in (*asked.notes, *notes):
        console.print(f"note: {note}", soft_wrap=True, markup=False)
    console.print(f"host memory is limited by: {plan.limit_source}", soft_wrap=True, markup=False)
    _print_terms(console, plan)
    console.print("decided:")
    for reason in plan.reasons:
        console.print(f"  {reason}", soft_wrap=True)
    console.print(f"  commit {plan.commit}, recipe {plan.recipe}, {counted(plan.threads, 'update thread')}{share.each}")
    if plan.fits:
        _print_times(console, asked, plan, more)


def _print_terms(console: object, plan: Plan) -> None:
    """What the host peak is made of, the largest first."""
    phase = max(PHASES, key=lambda p: plan.bytes["host"][p])
    terms = sorted(plan.footprint.terms[phase]["host"].items(), key=lambda item: -item[1])
    text = ", ".join(f"{name} {human(nbytes)}" for name, nbytes in terms if nbytes)
    console.print(f"host peak{plan.placement.share.each} ({phase}): {text}", soft_wrap=True)  # type: ignore[attr-defined]


def _print_times(console: object, asked: Question, plan: Plan, more: More) -> None:
    busy = ", ".join(f"{lane} {s / plan.step_s:.0%}" for lane, s in (plan.busy_s or {}).items() if s)
    told = bottleneck_told(asked.few_blocks_of(plan), plan.commit)
    speed = f"{plan.tokens_per_s:,.0f} tokens/s{plan.placement.share.all}"
    lines = [
        f"step {lasting(plan.step_s)}, {speed}, bottleneck {told}; busy: {busy}",
        *plan.wear.lines(),
        *([plan.hiding.line] if plan.hiding is not None else []),
        *more.lines(),
        _honesty(plan),
    ]
    for line in lines:
        console.print(line, soft_wrap=True, markup=False)  # type: ignore[attr-defined]


def _honesty(plan: Plan) -> str:
    return f"times are predicted, {rates_told(plan.rates_source)}"
