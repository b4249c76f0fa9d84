"""`offloadz bench`: measure this box in a minute or two, say each figure as it comes, and write a machine file.

The order is from what needs an idle machine most (products, memory) to what takes longest (drives).  The trade-off:
each figure is taken with everything else at rest but for `memory_shared` and a drive's `both`, so a plan has to say
what lanes cost each other from these two.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from offloadz.bench import compute, drives
from offloadz.bench.blocks import blocks
from offloadz.bench.machine_file import Figures, check_out, conditions, is_busy, keep, text_of, write
from offloadz.bench.rounds import Measured, Sizes, measured, seconds
from offloadz.bench.update import Update
from offloadz.plan.errors import ConfigError
from offloadz.plan.machine import host_limit
from offloadz.plan.recipes import STATES
from offloadz.runtime.threads import update_threads

DEFAULT_OUT = Path("machine.toml")
LOOK_S = 0.5
Named = tuple[str, str, str, compute.Rate]
"""Table, key, unit, and what measures a round of it."""


def bench_command(swap: Sequence[str], out: Path | None, sizes: Sizes | None = None) -> int:
    """Measure, print and write; 0.  Raises ConfigError for a swap path or a file that cannot be used."""
    sizes, out = sizes or Sizes(), out or DEFAULT_OUT
    check_out(out)
    text, figures, busy = bench(swap, sizes)
    write(out, text)
    _say_after(figures, busy, out, keep(text))
    return 0


def bench(swap: Sequence[str], sizes: Sizes) -> tuple[str, Figures, bool]:
    """Measure and print; the machine file, its figures, and whether the box was busy."""
    import psutil

    paths = [Path(path).absolute() for path in dict.fromkeys(swap)]
    for path in paths:
        drives.check_path(path, sizes)
    _enough_memory(sizes)
    busy, load, begin = psutil.cpu_percent(LOOK_S) / 100, os.getloadavg()[0], time.perf_counter()
    threads = update_threads(0)[0]
    _say_before(busy, load, paths)
    figures = Figures()
    figures.facts["host"] = {"memory": host_limit().total_bytes, "cores": threads}
    for table, key, unit, rate in _processors(sizes, threads):
        _take(figures, table, key, unit, measured(rate, sizes.rounds), begin)
    if torch.cuda.is_available():
        facts = torch.cuda.get_device_properties(0)
        figures.facts["gpu"] = {"model": facts.name, "memory": torch.cuda.mem_get_info()[0]}
        for table, key, unit, rate in _gpu(sizes):
            _take(figures, table, key, unit, measured(rate, sizes.rounds), begin)
    ways = []
    for path in paths:
        with drives.swap_path(path, sizes) as place:
            for kind in drives.KINDS:
                _take(figures, str(path), kind, "B/s", measured(place.rate(kind), sizes.rounds), begin)
            ways.append(f"{path}: {place.tier.io_name}")
    told = conditions(threads, busy, load) | {"io": ways, "bytes_per_swap_path": sizes.disk_bytes}
    told["took_s"] = round(time.perf_counter() - begin, 1)
    return text_of(figures, told, sizes.rounds), figures, is_busy(told)


def _processors(sizes: Sizes, threads: int) -> Iterator[Named]:
    """What is measured without drives and GPUs; each is laid out when its turn comes and gone after it."""
    yield "rates", "float32", "flop/s", blocks(sizes.tokens, sizes)
    yield "rates", "float32_few", "flop/s", blocks(sizes.few_tokens, sizes)
    yield "rates", "eager", "flop/s", compute.products(torch.bfloat16, sizes)
    yield "rates", "memory", "B/s", compute.in_place(sizes.copy_bytes)
    yield "rates", "h2d", "B/s", compute.fetching(sizes.copy_bytes)
    yield "rates", "d2h", "B/s", compute.draining(sizes.copy_bytes)
    for state in STATES:
        update = Update(state, sizes.elements, threads)
        key = "cpu" if state == "fp32" else f"cpu_{state.replace('-', '_')}"
        yield "rates", key, "parameters/s", _updates(update)
        if state == "fp32":
            yield "rates", "memory_shared", "B/s", compute.together(update, sizes.copy_bytes)


def _updates(update: Update) -> compute.Rate:
    return lambda: update.count / seconds(update)


def _gpu(sizes: Sizes) -> Iterator[Named]:
    yield "gpu", "float32", "flop/s", compute.products(torch.float32, sizes, "cuda")
    yield "gpu", "eager", "flop/s", compute.products(torch.bfloat16, sizes, "cuda")
    yield "gpu", "bandwidth", "B/s", compute.in_place(sizes.copy_bytes, "cuda")
    yield "gpu", "h2d", "B/s", compute.over_the_bus(sizes.copy_bytes, to_gpu=True)
    yield "gpu", "d2h", "B/s", compute.over_the_bus(sizes.copy_bytes, to_gpu=False)


def _enough_memory(sizes: Sizes) -> None:
    needed = max(16 * sizes.elements + 2 * sizes.copy_bytes, 2 * sizes.extent_bytes)
    limit = host_limit()
    if limit.available_bytes < needed:
        raise ConfigError(
            f"host memory ({limit.source}) has {limit.available_bytes / 1e9:.3g} GB to use, measuring needs "
            f"{needed / 1e9:.3g} GB; end other programs or raise the limit"
        )


def _take(figures: Figures, table: str, key: str, unit: str, found: Measured, begin: float) -> None:
    """Keep a figure and say it."""
    figures.add(table, key, found)
    value, prefix = (found.value / 1e9, "G") if found.value < 1e12 else (found.value / 1e12, "T")
    name = f"{table}.{key}" if not table.startswith("/") else f"{table} {key}"
    apart = f"{found.spread:.0%} apart"
    print(f"{time.perf_counter() - begin:4.0f} s  {name:<28} {value:8.3g} {prefix}{unit}, {apart}", flush=True)


def _say_before(busy: float, load: float, paths: Sequence[Path]) -> None:
    print(f"measuring {', '.join(['processors and memory', *map(str, paths)])}; up to two minutes", flush=True)
    if not paths:
        print("no drive is measured: name each swap directory with --swap")
    if is_busy({"busy_before": busy}):
        print(
            f"this machine is busy: others use {busy:.0%} of its processors (load average {load:.1f}); "
            "figures will be too low, measure again when it is idle"
        )


def _say_after(figures: Figures, busy: bool, out: Path, kept: Path | None) -> None:
    wide = list(figures.wide())
    if wide:
        why = "the machine was busy" if busy else "something else ran, or the machine is shared"
        print(f"rounds lie far apart for {', '.join(wide)}: {why}; measure again before you rely on them")
    print(f'written to {out}; `offloadz plan CONFIG --machine {out}`, or offload.machine = "{out}", reads it')
    if kept is not None:
        print(f'also kept as {kept}, which offload.machine = "auto" reads')
