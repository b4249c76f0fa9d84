"""Does a run overlap its lanes?  Sixteen blocks that sleep, and weights that take a known time to read.

    python benchmarks/overlap.py [--json] [--path DIR] [--blocks 16] [--compute-ms 50] [--read-ms 40]

Each block sleeps 50 ms in its forward (and again when it is recomputed in the backward); its weights lie on disk and
come through the real disk tier at a rate at which a block takes 40 ms.  A sleeping block leaves the processor free, so
the figures say what the plan and the lanes do, not what the machine can.

`step_vs_slowest_lane`: time of a forward pass with two slots over the busy time of its slowest lane (1: all hidden).
`training_vs_slowest_lane`: the same of a whole step; its forward half reads twice (for the update, and to compute) and
waits for the drive, its backward half waits for the computation, so 1.08 is the least for 16 blocks of 40 and 50 ms.
`one_slot_vs_sum`: a forward pass with one slot over the sum of reads and computations (1: no overlap, as it must be).
`reported_vs_wall`: seconds of the steps as reported over a clock outside.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import offloadz
from offloadz.memory.tier import Transfer

WIDTH = 256


class Throttled:
    """A transfer whose reads come at `rate` bytes/s in all, by a token bucket without a reserve."""

    name = "throttled"

    def __init__(self, inner: Transfer, rate: float) -> None:
        self._inner, self._rate = inner, rate
        self._lock, self._free_s = threading.Lock(), 0.0

    def read(self, fd: int, buffer: Tensor, nbytes: int, offset: int, crcs: Tensor | None) -> None:
        """Read, and return no sooner than the rate allows."""
        with self._lock:
            self._free_s = max(self._free_s, time.perf_counter()) + nbytes / self._rate
            until = self._free_s
        self._inner.read(fd, buffer, nbytes, offset, crcs)
        time.sleep(max(0.0, until - time.perf_counter()))

    def write(self, fd: int, buffer: Tensor, nbytes: int, offset: int, crcs: Tensor | None) -> None:
        """Write as fast as the drive goes."""
        self._inner.write(fd, buffer, nbytes, offset, crcs)

    def fix(self, buffer: Tensor) -> bool:
        """As the drive does."""
        return self._inner.fix(buffer)

    def close(self) -> None:
        """End the threads."""
        self._inner.close()


class Sleeper(nn.Module):
    """A block whose forward takes `seconds` and no processor."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        return x + self.linear(x)


class Sleepers(nn.Module):
    """Blocks one after the other."""

    def __init__(self, blocks: int, seconds: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Sleeper(seconds) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def opened(path: Path, slots: int, blocks: int, compute_s: float, read_s: float) -> offloadz.Run:
    """A run over sleeping blocks whose drive reads a block in `read_s`."""
    places = {"gradients": "host", "optimizer_state": "host", "activations": "host"}
    run = offloadz.offload(Sleepers(blocks, compute_s), swap=path, parameters="disk", slots=slots, **places)
    drive, unit = run.session.room.drive, run.session.spec.units[0]
    drive.paths[0].io = Throttled(drive.paths[0].io, unit.weight_bytes / read_s)
    return run


def clocked(run: offloadz.Run, work: Callable[[], Any], times: int) -> tuple[float, dict[str, float]]:
    """Median seconds of `work` and the median busy seconds of each lane during it, the first two times left out."""
    walls, busy = [], []
    lanes = run.session.lanes
    for _ in range(times + 2):
        before, began = {n: lane.clock.busy_s for n, lane in lanes.items()}, time.perf_counter()
        work()
        walls.append(time.perf_counter() - began)
        busy.append({n: lane.clock.busy_s - before[n] for n, lane in lanes.items()})
    return median(walls[2:]), {name: median(b[name] for b in busy[2:]) for name in lanes}


def forward_pass(path: Path, slots: int, times: int, how: tuple[int, float, float]) -> dict[str, Any]:
    """Passes without gradients, each from a standing start."""
    x = torch.ones(2, WIDTH)
    with opened(path, slots, *how) as run, torch.no_grad():
        wall_s, busy_s = clocked(run, lambda: run.model(x), times)
    return {"slots": slots, "wall_s": wall_s, "busy_s": busy_s}


def whole_steps(path: Path, slots: int, times: int, how: tuple[int, float, float]) -> dict[str, Any]:
    """Steps in a row: the next one's first reads and this one's updates run beside the computation."""
    reported: list[float] = []
    with opened(path, slots, *how) as run:

        def step() -> None:
            run.step({"x": torch.ones(2, WIDTH)}, loss_fn=lambda m, b: m(b["x"]).square().mean())
            reported.append(run.report.step_s)

        wall_s, busy_s = clocked(run, step, times)
        bottleneck = run.report.bottleneck
    out = {"slots": slots, "wall_s": wall_s, "reported_s": median(reported[2:]), "busy_s": busy_s}
    return {**out, "bottleneck": bottleneck}


def measure(path: Path, times: int, how: tuple[int, float, float]) -> dict[str, Any]:
    """All figures as one object."""
    forward = {slots: forward_pass(path, slots, times, how) for slots in (1, 2)}
    steps = {slots: whole_steps(path, slots, times, how) for slots in (1, 2)}
    slowest = [f["wall_s"] / max(f["busy_s"].values()) for f in (forward[2], steps[2])]
    one = forward[1]
    return {
        "ratios": {
            "step_vs_slowest_lane": slowest[0],
            "training_vs_slowest_lane": slowest[1],
            "one_slot_vs_sum": one["wall_s"] / (one["busy_s"]["device"] + one["busy_s"]["disk_read"]),
            "reported_vs_wall": steps[2]["reported_s"] / steps[2]["wall_s"],
        },
        "blocks": how[0],
        "compute_s": how[1],
        "read_s": how[2],
        "forward": list(forward.values()),
        "training": list(steps.values()),
    }


def told(found: dict[str, Any]) -> str:
    """The figures for people."""
    lines = [f"{name:<22}{value:8.3f}" for name, value in found["ratios"].items()]
    for mode in ("forward", "training"):
        for entry in found[mode]:
            busy = ", ".join(f"{lane} {s:.3f}" for lane, s in entry["busy_s"].items() if s > 0.001)
            lines.append(f"{mode}, {entry['slots']} slots: {entry['wall_s']:.3f} s (busy: {busy})")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--path", type=Path, help="swap directory; by default a temporary one")
    parser.add_argument("--blocks", type=int, default=16)
    parser.add_argument("--compute-ms", type=float, default=50.0)
    parser.add_argument("--read-ms", type=float, default=40.0)
    parser.add_argument("--times", type=int, default=3, help="passes that are measured, after two that are not")
    args = parser.parse_args()
    how = (args.blocks, args.compute_ms / 1e3, args.read_ms / 1e3)
    with tempfile.TemporaryDirectory() as scratch:
        found = measure(args.path or Path(scratch), args.times, how)
    print(json.dumps(found) if args.json else told(found))


if __name__ == "__main__":
    main()
