"""The machine file of a bench: what was measured as TOML, with the conditions it was measured under.

What its tables mean is `plan/catalogue.py`; [conditions] and [spread] are for people and for comparing two benches.
The trade-off: figures are written with four digits, which is more than any of them is good for.
"""

from __future__ import annotations

import os
import platform
import resource
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from offloadz.bench.rounds import Measured
from offloadz.config.values import to_toml
from offloadz.plan.boxes import bench_file
from offloadz.plan.errors import ConfigError
from offloadz.runtime import native

FIRST_LINE = "# Written by `offloadz bench`"
BUSY_SHARE = 0.25
"""Of the processors, used by others before the first round: beyond it the machine counts as busy."""
WIDE_SPREAD = 0.2


@dataclass
class Figures:
    """What was measured so far, by table and key as a machine file has them; drives by their path."""

    tables: dict[str, dict[str, Measured]] = field(default_factory=dict)
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Keys that are no rates: `host.memory`, `gpu.model`."""

    def add(self, table: str, key: str, found: Measured) -> None:
        self.tables.setdefault(table, {})[key] = found

    def wide(self) -> Iterator[str]:
        """The figures whose rounds lie far apart."""
        for table, figures in self.tables.items():
            yield from (f"{table}.{key} {f.spread:.0%}" for key, f in figures.items() if f.spread > WIDE_SPREAD)

    def fewer(self, num_rounds: int) -> Iterator[str]:
        """The figures for which there was less time than `num_rounds` take, with how many there are."""
        for table, figures in self.tables.items():
            found = {key: figure.num_rounds for key, figure in figures.items() if figure.num_rounds < num_rounds}
            yield from (f"{table}.{key} {count}" for key, count in found.items())


def conditions(threads: int, busy_share: float, load: float) -> dict[str, Any]:
    """Under what a bench was made; `busy_share` of the processors and `load` (average) before its first round."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return {
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "busy_before": round(busy_share, 2),
        "load_before": round(load, 2),
        "load_after": round(os.getloadavg()[0], 2),
        "processor": _processor(),
        "isa": native.isa(),
        "update_threads": threads,
        "torch_threads": torch.get_num_threads(),
        "lockable": "unlimited" if limit == resource.RLIM_INFINITY else f"{limit} bytes (RLIMIT_MEMLOCK)",
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "offloadz": _version(),
    }


def text_of(figures: Figures, told: Mapping[str, Any], num_rounds: int) -> str:
    """The file."""
    busy = f" on a busy machine ({told['busy_before']:.0%} of it in use by others)" if is_busy(told) else ""
    source = f"measured {told['date']}{busy}"
    lines = [
        f"{FIRST_LINE} on {told['date']}; plans read it by --machine FILE and offload.machine.",
        f"# Medians of {num_rounds} rounds or as [conditions] says; [spread]: from smallest to largest, as a share.",
        f"name = {to_toml(platform.node() or 'this machine')}",
        f"source = {to_toml(source)}",
    ]
    for table in ("host", "rates", "gpu"):
        if table in figures.tables or table in figures.facts:
            lines += ["", f"[{table}]", *_entries(figures, table)]
    for path in (table for table in figures.tables if table.startswith("/")):
        lines += ["", "[[drive]]", f"path = {to_toml(path)}", *_entries(figures, path)]
    lines += ["", "[conditions]", *(f"{key} = {to_toml(value)}" for key, value in told.items())]
    lines += ["", "[spread]"]
    for table, found in figures.tables.items():
        lines += [f"{to_toml(f'{table}.{key}')} = {figure.spread:.3f}" for key, figure in found.items()]
    return "\n".join(lines) + "\n"


def is_busy(told: Mapping[str, Any]) -> bool:
    """Whether others used the machine before the first round."""
    return bool(told["busy_before"] > BUSY_SHARE)


def _entries(figures: Figures, table: str) -> Iterator[str]:
    yield from (f"{key} = {to_toml(value)}" for key, value in figures.facts.get(table, {}).items())
    yield from (f"{key} = {figure.value:.4g}" for key, figure in figures.tables.get(table, {}).items())


def check_out(out: Path) -> None:
    """Refuse, as ConfigError, a place where the file cannot be written or that holds somebody's own."""
    if out.is_dir() or not out.parent.is_dir():
        raise ConfigError(f"--out {out}: needs the name of a file in a directory that is there")
    if out.exists() and not out.read_text(errors="replace").startswith(FIRST_LINE):
        raise ConfigError(f"--out {out}: this file was not written by `offloadz bench`; name another, or remove it")
    if not os.access(out.parent, os.W_OK) or (out.exists() and not os.access(out, os.W_OK)):
        raise ConfigError(f"--out {out}: Permission denied; name a file you may write")


def write(out: Path, text: str) -> None:
    """The file in one piece, or ConfigError and the old one as it was."""
    beside = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8")
        os.replace(beside, out)
    except OSError as error:
        raise ConfigError(f"--out {out}: {error.strerror}; the figures are those printed above") from error
    finally:
        beside.unlink(missing_ok=True)


def keep(text: str) -> Path | None:
    """The file once more where `offload.machine = "auto"` looks for it; None where it cannot be written."""
    kept = bench_file()
    try:
        kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write(kept, text)
    except (ConfigError, OSError):
        return None
    return kept


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _version() -> str:
    try:
        return version("offloadz")
    except PackageNotFoundError:  # a source tree that was not installed
        return "unknown"
