"""`offloadz bench`: measure this box within two minutes, say each figure as it comes, and write a machine file.

The order is from what needs an idle machine most (products, memory) to what takes longest (drives).  The trade-off:
each figure is taken with everything else at rest but for `memory_shared`, a drive's `both` and the two ways of a
device's bus, so a plan has to say what lanes cost each other from these.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from offloadz.bench import compute, drives
from offloadz.bench.blocks import blocks
from offloadz.bench.bus import Bus
from offloadz.bench.machine_file import Figures, check_out, conditions, is_busy, keep, text_of, write
from offloadz.bench.rounds import Measured, Sizes, fitted, measured, seconds
from offloadz.bench.update import Update
from offloadz.plan.errors import ConfigError
from offloadz.plan.machine import host_limit
from offloadz.plan.recipes import STATES
from offloadz.plan.words import human
from offloadz.runtime.chosen import device_named
from offloadz.runtime.devices import BUS, Device
from offloadz.runtime.threads import update_threads

DEFAULT_OUT = Path("machine.toml")
LOOK_S = 0.5
Named = tuple[str, str, str, compute.Rate]
"""Table, key, unit, and what measures a round of it."""


def bench_command(swap: Sequence[str], out: Path | None, sizes: Sizes | None = None, device: Any = "auto") -> int:
    """Measure, print and write; 0.  `device`: as `offload.device` says, or a `Device`.

    Raises ConfigError for a swap path or a file that cannot be used.
    """
    sizes, out = sizes or Sizes(), out or DEFAULT_OUT
    check_out(out)
    text, figures, busy = bench(swap, sizes, device)
    write(out, text)
    _say_after(figures, busy, out, keep(text))
    return 0


def bench(swap: Sequence[str], sizes: Sizes, told_device: Any = "auto") -> tuple[str, Figures, bool]:
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
    device = device_named(told_device)
    if device.facts is not None:
        figures.facts["gpu"] = {"model": device.facts.gpu, "memory": device.facts.free_bytes}
    for table, key, unit, rate in chain(_processors(sizes, threads), _device(device, sizes)):
        _take(figures, table, key, unit, measured(rate, sizes.rounds, sizes.figure_s), begin)
    ways, extents = [], []
    for path in paths:
        most_s = sizes.drives_s / len(paths)
        with drives.swap_path(path, fitted(sizes, drives.pace(path, sizes), most_s)) as place:
            for kind, found in place.figures(most_s):
                _take(figures, str(path), kind, "B/s", found, begin)
            ways.append(f"{path}: {place.tier.io_name}")
            extents.append(f"{path}: {_told(place.sizes)}")
    told = conditions(threads, busy, load) | {"io": ways, "extents": extents}
    told["fewer_rounds"] = list(figures.fewer(sizes.rounds))
    told["took_s"] = round(time.perf_counter() - begin, 1)
    return text_of(figures, told, sizes.rounds), figures, is_busy(told)


def _processors(sizes: Sizes, threads: int) -> Iterator[Named]:
    """What is measured without drives and GPUs; each is laid out when its turn comes and gone after it."""
    yield "rates", "float32", "flop/s", blocks(sizes.tokens, sizes.hidden, sizes.inner)
    yield "rates", "float32_few", "flop/s", blocks(sizes.few_tokens, sizes.hidden, sizes.inner)
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


def _told(sizes: Sizes) -> str:
    """The extents of a swap path in words."""
    long, short = human(sizes.extent_bytes), human(sizes.part_bytes)
    return f"{sizes.num_extents} of {long}, {sizes.num_parts} of {short}"


def _updates(update: Update) -> compute.Rate:
    return lambda: update.count / seconds(update)


def _device(device: Device, sizes: Sizes) -> Iterator[Named]:
    """The same of a device with memory of its own."""
    if device.unified:
        return
    yield "gpu", "float32", "flop/s", blocks(*sizes.on_device, torch.float32, device)
    yield "gpu", "eager", "flop/s", blocks(*sizes.on_device, torch.bfloat16, device)
    yield "gpu", "bandwidth", "B/s", compute.in_place(sizes.copy_bytes, device)
    with Bus(device, sizes.copy_bytes) as bus:
        for name in BUS:
            yield "gpu", name, "B/s", bus.rate(name)
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()  # a plan that is made next counts what is free


def _enough_memory(sizes: Sizes) -> None:
    needed = max(16 * sizes.elements + 2 * sizes.copy_bytes, 2 * sizes.extent_bytes)
    limit = host_limit()
    if limit.available_bytes < needed:
        raise ConfigError(
            f"host memory ({limit.source}) has {human(limit.available_bytes)} to use, measuring needs "
            f"{human(needed, up=True)}; end other programs or raise the limit"
        )


def _take(figures: Figures, table: str, key: str, unit: str, found: Measured, begin: float) -> None:
    """Keep a figure and say it."""
    figures.add(table, key, found)
    value, prefix = (found.value / 1e9, "G") if found.value < 1e12 else (found.value / 1e12, "T")
    name = f"{table}.{key}" if not table.startswith("/") else f"{table} {key}"
    apart = f"{found.num_rounds} rounds {found.spread:.0%} apart"
    print(f"{time.perf_counter() - begin:4.0f} s  {value:8.3g} {prefix + unit:<13}  {name} ({apart})", flush=True)


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
