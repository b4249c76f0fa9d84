"""How fast the optimizer's update is, per recipe, beside what others do and what memory allows.

    python benchmarks/adam.py [--json] [--elements N] [--rounds N] [--threads N]

Every arm runs once a round, one after the other in one process, so a busy machine slows all alike; figures are medians
over the rounds, ratios medians of the ratios within a round.  Arms:

- `fp32`, `bf16`, `int8`, `int8-sr`: ours, with bfloat16 gradients in and bfloat16 weights out;
- `update`: a pure in-place update of as many bytes as `fp32` reads and writes, on as many threads: what memory allows;
- `torch_fused`: torch.optim.AdamW(fused=True) over float32 weights, with the casts of the mixed path (gradient to
  float32, new weight to bfloat16); `deepspeed`: its CPU Adam with the same casts, where it is installed.

Cycles are the processor's reference cycles (of the time-stamp counter) on one thread, over an array that stays in the
cache: what is left when memory costs nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable

import torch

from offloadz.plan.recipes import Recipe
from offloadz.runtime import native
from offloadz.runtime.threads import update_threads

RECIPES = ("fp32", "bf16", "int8", "int8-sr")
HYPER = {"lr": 1e-5, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
MOMENTS = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.uint8, "int8-sr": torch.uint8}
SHOWN = (4 << 20, 64 << 20, 200_000_000)
CACHED = 1 << 15
Arm = Callable[[int], None]


def ours(recipe: str, grad: torch.Tensor, threads: int) -> Arm:
    """One step of a recipe over as many parameters as the gradient has."""
    count = grad.numel()
    weight, low = torch.empty(count, dtype=torch.bfloat16), torch.empty(count, dtype=torch.int16)
    native.split_master_(weight, low, torch.randn(count) * 0.05)
    half = None if recipe == "int8-sr" else low
    moments = tuple(torch.zeros(count, dtype=MOMENTS[recipe]) for _ in range(2))
    coded = MOMENTS[recipe] == torch.uint8
    scales = tuple(torch.zeros(-(-count // native.BLOCK)) if coded else None for _ in range(2))

    def step(number: int) -> None:
        native.update_("adam", weight, half, moments, scales, grad, step=number, threads=threads, **HYPER)

    return step


def torch_fused(grad: torch.Tensor) -> Arm:
    """torch's fused AdamW on float32 masters, with the casts in and out."""
    master = torch.nn.Parameter(torch.randn(grad.numel()) * 0.05)
    betas = (HYPER["beta1"], HYPER["beta2"])
    optimizer = torch.optim.AdamW([master], HYPER["lr"], betas, HYPER["eps"], HYPER["weight_decay"], fused=True)
    return with_casts(master, grad, optimizer.step)


def deepspeed(grad: torch.Tensor) -> Arm | None:
    """DeepSpeed's CPU Adam in the same place; None where it is not installed."""
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam
    except ImportError:
        return None
    master = torch.nn.Parameter(torch.randn(grad.numel()) * 0.05)
    betas = (HYPER["beta1"], HYPER["beta2"])
    optimizer = DeepSpeedCPUAdam([master], lr=HYPER["lr"], betas=betas, eps=HYPER["eps"], adamw_mode=True)
    return with_casts(master, grad, optimizer.step)


def with_casts(master: torch.nn.Parameter, grad: torch.Tensor, step: Callable[[], object]) -> Arm:
    """A step of another optimizer between a cast of the gradient and one of the new weight."""
    wide, working = torch.empty(grad.numel()), torch.empty(grad.numel(), dtype=torch.bfloat16)

    def run(_: int) -> None:
        wide.copy_(grad)
        master.grad = wide
        step()
        with torch.no_grad():
            working.copy_(master)

    return run


def in_place(count: int) -> Arm:
    """x = x * a in place over as many bytes as fp32 moves, counting a read and a write of each."""
    array = torch.ones(count * int(bytes_of("fp32")) // 8)

    def run(_: int) -> None:
        array.mul_(0.999)

    return run


def bytes_of(recipe: str) -> float:
    """Bytes a step reads and writes per parameter."""
    return Recipe(recipe).moved_bytes("bfloat16")


def measure(count: int, rounds: int, threads: int) -> dict[str, list[float]]:
    """Seconds of each arm in each round, after one that warms up."""
    torch.set_num_threads(threads)
    grad = (torch.randn(count) * 1e-3).bfloat16()
    arms: dict[str, Arm | None] = {name: ours(name, grad, threads) for name in RECIPES}
    arms |= {"update": in_place(count), "torch_fused": torch_fused(grad), "deepspeed": deepspeed(grad)}
    seconds: dict[str, list[float]] = {name: [] for name, arm in arms.items() if arm}
    for number in range(1, rounds + 2):
        for name, arm in arms.items():
            if arm:
                start = time.perf_counter()
                arm(number)
                if number > 1:
                    seconds[name].append(time.perf_counter() - start)
    return seconds


def cycles() -> dict[str, float]:
    """Reference cycles per parameter on one thread, over an array in the cache: the least of many runs."""
    hertz = clock_hertz()
    grad, found = (torch.randn(CACHED) * 1e-3).bfloat16(), {}
    for recipe in RECIPES:
        step, least = ours(recipe, grad, 1), float("inf")
        for number in range(1, 400):
            start = time.perf_counter()
            step(number)
            least = min(least, time.perf_counter() - start)
        found[recipe] = round(least * hertz / CACHED, 2)
    return found


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
        print(f"  {name:12} {row['ms']:9.2f} ms {row['mparams_per_s']:9.1f} M/s {row['gb_per_s']:7.2f} GB/s")
    print("  " + ", ".join(f"{name} {value}" for name, value in ratios.items()))


if __name__ == "__main__":
    main()
