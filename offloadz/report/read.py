"""What a run directory holds for a report, and what it lacks: nothing is guessed, and nothing is written.

The files are those of the run (`train/loop.py` and `train/metrics.py` make them); any but `metrics.jsonl` may be
missing, and then a note says so.  A run that is still going on is read as it stands.  The trade-off: when a run was
started again is known from its TensorBoard files alone, because each line of the metrics belongs to a step; without
those files that is not told.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from offloadz.memory.swapdir import is_locked
from offloadz.plan.errors import ConfigError
from offloadz.train.metrics import METRICS, SAMPLES, read_metrics

Line = dict[str, Any]
Item = TypeVar("Item")


@dataclass(frozen=True)
class Start:
    """A start of the process: the first step it would do (1: from the beginning), and when, in seconds since 1970."""

    step: int
    at_s: float


@dataclass(frozen=True)
class RunFiles:
    """A run as its directory tells it."""

    directory: Path
    lines: list[Line]
    """All whole lines of `metrics.jsonl`."""
    config: dict[str, dict[str, Any]] | None
    plan: dict[str, Any] | None
    data: dict[str, Any] | None
    starts: list[Start] | None
    """In order of time; None where it cannot be known."""
    finished: bool
    held: bool | None
    """Whether a process is training in the directory now; None where the system does not tell."""
    notes: list[str]
    """What is missing or damaged, a sentence each."""

    @cached_property
    def steps(self) -> list[Line]:
        return [line for line in self.lines if "step_s" in line]

    @cached_property
    def evaluations(self) -> list[Line]:
        return [line for line in self.lines if "eval_loss" in line]

    @cached_property
    def samples(self) -> list[Line]:
        return [line for line in self.lines if SAMPLES in line]

    @property
    def firsts(self) -> list[int]:
        """The first step of each start."""
        return [start.step for start in self.starts or []]

    @property
    def num_steps(self) -> int | None:
        """Steps the run is to have."""
        told = (self.data or {}).get("num_steps") or (self.config or {}).get("train", {}).get("steps")
        return int(told) if told else (self.steps[-1]["step"] if self.finished and self.steps else None)


def read_run(directory: Path) -> RunFiles:
    """Everything a report is made from; ConfigError where the directory is no run or has no line yet."""
    path = directory / METRICS
    if not path.is_file():
        raise ConfigError(f"{directory} is no run directory: {_lack(directory)}; needed: the train.output of a run")
    try:
        lines, raw = read_metrics(path), path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; needed: a file you may read") from error
    if not any("step_s" in line for line in lines):
        kind = "is empty" if not raw.strip() else "holds no whole line of a step"
        raise ConfigError(
            f"{path} {kind}: the run has not finished its first step; needed: a run with one step or more"
        )
    notes: list[str] = [*_left_out(raw, len(lines))]
    tables, plan, data = (_object(directory / name, notes) for name in ("config.toml", "plan.json", "data.json"))
    plan = _plan(plan, notes)
    last = max(line["step"] for line in lines)
    finished = (_quiet_object(directory / "finished.json") or {}).get("step") == last
    held = is_held(directory)
    return RunFiles(directory, lines, tables, plan, data, _starts(directory, notes), finished, held, notes)


def is_held(directory: Path) -> bool | None:
    """Whether a run holds its lock on the directory (`train/begin.py` takes it); None where none can be asked for."""
    try:
        return is_locked(directory, os.O_DIRECTORY)
    except OSError:  # some network file systems lock no directories
        return None


def _lack(directory: Path) -> str:
    if not directory.exists():
        return "it does not exist"
    return f"it holds no {METRICS}" if directory.is_dir() else "it is a file"


def _left_out(raw: bytes, num_read: int) -> Iterator[str]:
    """Lines that could not be read: the last one of a run that was killed or is writing, or damage."""
    missing = len(raw.splitlines()) - num_read
    if missing == 1 and not raw.endswith(b"\n"):
        yield f"The last line of {METRICS} is half written and left out."
    elif missing:
        yield f"{METRICS} is damaged at line {num_read + 1}: that line and all behind it ({missing}) are left out."


PLAN_KINDS = {"bytes": dict, "busy_s": dict, "peak": dict, "terms": dict, "limits": dict, "placement": dict}
"""What a plan holds under keys that are read deeper."""


def _plan(plan: dict[str, Any] | None, notes: list[str]) -> dict[str, Any] | None:
    """The plan, or None and a note where it is none by its form."""
    wrong = [key for key, kind in PLAN_KINDS.items() if not isinstance((plan or {}).get(key, kind()), kind)]
    if wrong:
        notes.append(f"plan.json is no plan of a run: {', '.join(wrong)} cannot be read.")
    return None if wrong else plan


def _object(path: Path, notes: list[str]) -> dict[str, Any] | None:
    """A JSON or TOML file; where it cannot be had, None and a note."""
    try:
        text = path.read_text(encoding="utf-8")
        found = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except FileNotFoundError:
        notes.append(f"{path.name} is not in the run directory.")
    except (OSError, ValueError) as error:
        notes.append(f"{path.name} cannot be read: {error}.")
    else:
        if isinstance(found, dict):
            return found
        notes.append(f"{path.name} holds no object.")
    return None


def _quiet_object(path: Path) -> dict[str, Any] | None:
    return _object(path, [])


def _starts(directory: Path, notes: list[str]) -> list[Start] | None:
    """Each start wrote a TensorBoard file, whose first events say from which step on it holds."""
    found = [start for path in sorted((directory / "tensorboard").glob("events.*")) for start in _start_of(path)]
    if not found:
        notes.append("tensorboard/ holds no start of the run, so resumes are not shown.")
        return None
    return sorted(found, key=lambda start: start.at_s)


def _start_of(path: Path) -> Iterator[Start]:
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog

    try:
        for _, raw in zip(range(4), RawEventFileLoader(str(path)).Load(), strict=False):
            event = Event.FromString(raw)
            if event.WhichOneof("what") == "session_log" and event.session_log.status == SessionLog.START:
                yield Start(int(event.step), float(event.wall_time))
                return
    except Exception:  # a file cut off or written over ends in any kind of error, and tells nothing
        return


def thinned(items: Sequence[Item], most: int) -> list[Item]:
    """At most `most` of the items and one more, evenly chosen, the first and the last among them."""
    every = max(1, -(-len(items) // most))
    return [*items[:-1:every], *items[-1:]]
