"""How fast the optimizer's update is, per recipe, beside what others do and what memory allows.

    python benchmarks/adam.py [--json] [--elements N] [--rounds N] [--threads N]

Every arm runs once a round, one after the other in one process, so a busy machine slows all alike; figures are medians
over the rounds, ratios medians of the ratios within a round.  All arms work in the same memory, on huge pages, and lay
their arrays out anew before each run: pages of one machine can differ twofold in speed, and arms in memory of their own
would be compared by their luck.  Arms:

- `fp32`, `bf16`, `int8`, `int8-sr`: ours, with bfloat16 gradients in and bfloat16 weights out;
- `update`: a pure in-place update of as many bytes as `fp32` reads and writes, on as many threads: what memory allows;
- `update_of_zeros`: the same over zeros instead of numbers, which some memory takes faster (docs/optimizer.md);
- `torch_fused`: torch.optim.AdamW(fused=True) over float32 weights, with the casts of the mixed path (gradient to
  float32, new weight to bfloat16); `deepspeed`: its CPU Adam with the same casts, where it is installed.

Cycles are the processor's reference cycles (of the time-stamp counter) on one thread, over an array that stays in the
cache: what is left when memory costs nothing.  They are the difference between two lengths, so that what a call costs
is not in them.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from offloadz.bench.rounds import SPIN_S
from offloadz.bench.update import HYPER, parts_of, state_bytes, update_step
from offloadz.memory.host import HostPool
from offloadz.plan.recipes import Recipe
from offloadz.plan.spec import PAGE_BYTES, aligned
from offloadz.runtime import native
from offloadz.runtime.threads import update_threads

RECIPES = ("fp32", "bf16", "int8", "int8-sr")
SHOWN = (4 << 20, 64 << 20, 200_000_000)
CACHED = (1 << 13, 1 << 15)
MOST_BYTES = 20
"""What the largest arm keeps for each parameter: a bf16 gradient, its float32 copy, a master, two moments, a weight."""
Step = Callable[[int], object]
Arm = Callable[["Arena"], Step]
"""Lays arrays out in the arena and gives the step over them."""


class Arena:
    """Memory for the arrays of one arm at a time, each from a page on; `again` gives all of it back."""

    GAP_BYTES = 11 * PAGE_BYTES
    """Between arrays: else those of 2^26 elements would begin at the same place of the caches (docs/log.md)."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._area = HostPool(MOST_BYTES * count + (1 << 20)).take("arena", MOST_BYTES * count + (1 << 20))
        self._taken = 0
        self._normal = torch.randn(min(count, 1 << 16))

    def again(self) -> None:
        self._taken = 0

    def zeros(self, dtype: torch.dtype, count: int = 0) -> Tensor:
        """A flat tensor, one element for each parameter if no other count is asked for."""
        count = count or self.count
        begin = aligned(self._taken) + self.GAP_BYTES
        self._taken = begin + count * dtype.itemsize
        return self._area[begin : self._taken].view(dtype).zero_()

    def normal(self, dtype: torch.dtype, size: float, count: int = 0) -> Tensor:
        """Numbers of a normal distribution: 65,536 of them, over and over."""
        out, numbers = self.zeros(dtype, count), (self._normal * size).to(dtype)
        for part in out.split(numbers.numel()):
            part.copy_(numbers[: part.numel()])
        return out


def ours(recipe: str, threads: int) -> Arm:
    """One step of a recipe, part by part and with each part's state laid out as a run does it."""

    def lay_out(arena: Arena) -> Step:
        parts = parts_of(Recipe(recipe), arena.count)
        grad, weight = arena.normal(torch.bfloat16, 1e-3), arena.normal(torch.bfloat16, 0.05)
        return update_step(parts, grad, weight, arena.zeros(torch.uint8, state_bytes(parts)), threads)

    return lay_out


def torch_fused(arena: Arena) -> Step:
    """torch's fused AdamW on float32 masters, with the casts in and out."""
    master = torch.nn.Parameter(arena.normal(torch.float32, 0.05))
    betas = (HYPER["beta1"], HYPER["beta2"])
    optimizer = torch.optim.AdamW([master], HYPER["lr"], betas, HYPER["eps"], HYPER["weight_decay"], fused=True)
    return with_casts(arena, master, optimizer, torch.zeros(()))


def deepspeed(arena: Arena) -> Step:
    """DeepSpeed's CPU Adam in the same place.  Its first use builds it: minutes."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    master = torch.nn.Parameter(arena.normal(torch.float32, 0.05))
    betas = (HYPER["beta1"], HYPER["beta2"])
    same = {"lr": HYPER["lr"], "betas": betas, "eps": HYPER["eps"], "weight_decay": HYPER["weight_decay"]}
    with contextlib.redirect_stdout(sys.stderr):  # what it says is no JSON
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        optimizer = DeepSpeedCPUAdam([master], adamw_mode=True, **same)
    return with_casts(arena, master, optimizer, 0)


def with_casts(arena: Arena, master: torch.nn.Parameter, optimizer: torch.optim.Optimizer, start: object) -> Step:
    """A step of another optimizer, its moments in the arena, between a cast of the gradient and one of the weight."""
    grad, wide, working = arena.normal(torch.bfloat16, 1e-3), arena.zeros(torch.float32), arena.zeros(torch.bfloat16)
    moments = {name: arena.zeros(torch.float32) for name in ("exp_avg", "exp_avg_sq")}
    optimizer.state[master] = {"step": start, **moments}

    def run(_: int) -> None:
        wide.copy_(grad)
        master.grad = wide
        optimizer.step()
        with torch.no_grad():
            working.copy_(master)

    return run


def in_place(arena: Arena) -> Step:
    """x = x * a in place over as many bytes as fp32 moves, counting a read and a write of each."""
    array = arena.normal(torch.float32, 0.05, num_in_place(arena))
    return lambda _: array.mul_(0.999)


def of_zeros(arena: Arena) -> Step:
    """The same over zeros."""
    array = arena.zeros(torch.float32, num_in_place(arena))
    return lambda _: array.mul_(0.999)


def num_in_place(arena: Arena) -> int:
    """Numbers of an in-place update that moves as many bytes as fp32."""
    return arena.count * int(bytes_of("fp32")) // 8


def bytes_of(recipe: str) -> float:
    """Bytes a step reads and writes per parameter."""
    return Recipe(recipe).moved_bytes("bfloat16")


def arms_of(threads: int) -> dict[str, Arm]:
    """All that can run here."""
    arms: dict[str, Arm] = {name: ours(name, threads) for name in RECIPES}
    arms |= {"update": in_place, "update_of_zeros": of_zeros, "torch_fused": torch_fused}
    return arms | ({"deepspeed": deepspeed} if importlib.util.find_spec("deepspeed") else {})


def measure(count: int, rounds: int, threads: int) -> dict[str, list[float]]:
    """Seconds of each arm in each round."""
    torch.set_num_threads(threads)
    arena, arms = Arena(count), arms_of(threads)
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(1, rounds + 1):
        for name, arm in arms.items():
            arena.again()
            step = arm(arena)
            step(2 * number - 1)  # the first of an optimizer does more
            time.sleep(SPIN_S)
            start = time.perf_counter()
            step(2 * number)
            seconds[name].append(time.perf_counter() - start)
    return seconds


def least_s(recipe: str, count: int) -> float:
    """The least of many runs over `count` parameters on one thread."""
    arena = Arena(count)
    step, least = ours(recipe, 1)(arena), float("inf")
    for number in range(1, 400):
        start = time.perf_counter()
        step(number)
        least = min(least, time.perf_counter() - start)
    return least


def cycles() -> dict[str, float]:
    """Reference cycles per parameter, in the cache."""
    hertz, (few, many) = clock_hertz(), CACHED
    return {r: round((least_s(r, many) - least_s(r, few)) * hertz / (many - few), 2) for r in RECIPES}


def clock_hertz() -> float:
    """The nominal clock: from the processor's name where it is said, else the clock the system reports now."""
    with open("/proc/cpuinfo", encoding="utf-8") as info:
        lines = [line.split(":", 1) for line in info if ":" in line]
    facts = {key.strip(): value.strip() for key, value in lines}
    name = facts.get("model name", "")
    if "@" in name:
        return float(name.split("@")[1].strip().removesuffix("GHz")) * 1e9
    return float(facts.get("cpu MHz", "1000")) * 1e6


def ratio(seconds: dict[str, list[float]], slow: str, fast: str, factor: float = 1.0) -> float | None:
    """How many times faster `fast` is than `slow`: the median over rounds."""
    if slow not in seconds:
        return None
    return round(factor * statistics.median(a / b for a, b in zip(seconds[slow], seconds[fast], strict=True)), 3)


def ratios_of(seconds: dict[str, list[float]]) -> dict[str, float | None]:
    return {
        "fp32_vs_torch_fused": ratio(seconds, "torch_fused", "fp32"),
        "fp32_vs_deepspeed": ratio(seconds, "deepspeed", "fp32"),
        "fp32_vs_update": ratio(seconds, "update", "fp32"),
        "fp32_vs_update_of_zeros": ratio(seconds, "update_of_zeros", "fp32"),
        **{f"{name}_vs_fp32": ratio(seconds, "fp32", name) for name in RECIPES[1:]},
    }


def told(count: int, seconds: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Medians per arm: milliseconds, millions of parameters and gigabytes a second (of the bytes that are needed)."""
    table = {}
    for name, values in seconds.items():
        middle, each = statistics.median(values), bytes_of(name if name in RECIPES else "fp32")
        rates = {"ms": middle * 1e3, "mparams_per_s": count / middle / 1e6, "gb_per_s": count * each / middle / 1e9}
        table[name] = {key: round(value, 2) for key, value in rates.items()}
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    parser.add_argument("--elements", type=int, default=0, help="only this many parameters (default: 4 M, 64 M, 200 M)")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=0, help="0: the cores this process may use")
    given = parser.parse_args()
    threads, why = update_threads(given.threads)
    sizes = (given.elements,) if given.elements else SHOWN
    result: dict[str, object] = {"isa": native.isa(), "threads": threads, "why": why, "rounds": given.rounds}
    result |= {
        "load": os.getloadavg()[0],
        "cycles_per_param": cycles(),
        "bytes_per_param": {r: bytes_of(r) for r in RECIPES},
    }
    medians = {}
    for count in sizes:
        seconds = measure(count, given.rounds, threads)
        medians[str(count)] = told(count, seconds)
        if count == sizes[min(1, len(sizes) - 1)]:  # 64 M, unless a size was asked for
            result["ratios"] = ratios_of(seconds)
        if not given.json:
            show(count, medians[str(count)], ratios_of(seconds))
    result["medians"] = medians
    if given.json:
        print(json.dumps(result))
    else:
        print(
            f"{native.isa()}, {threads} threads ({why}); cycles a parameter in the cache: {result['cycles_per_param']}"
        )


def show(count: int, table: dict[str, dict[str, float]], ratios: dict[str, float | None]) -> None:
    """One size as a table."""
    print(f"{count / 1e6:.0f} M parameters")
    for name, row in table.items():
        print(f"  {name:15} {row['ms']:9.2f} ms {row['mparams_per_s']:9.1f} M/s {row['gb_per_s']:7.2f} GB/s")
    print("  " + ", ".join(f"{name} {value}" for name, value in ratios.items()))


if __name__ == "__main__":
    main()
