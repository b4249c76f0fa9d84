"""Does a run overlap its lanes?  Sixteen blocks that sleep, updates that sleep, and a drive of a known rate.

    python benchmarks/overlap.py [--json] [--path DIR] [--blocks 16] [--compute-ms 50] [--disk-ms 40] [--update-ms 30]

A block sleeps 50 ms in its forward, and again when it is recomputed in the backward; its update sleeps 30 ms.  Weights
and saved inputs lie on disk and come and go through the real disk tier, at rates (a token bucket for reads, one for
writes) at which the weights of a block take 40 ms.  Clipping is on and never fires.  What sleeps leaves the processor
free, so the figures say what the plan and the lanes do, not what the machine can.  All clocks are outside the product.

`step_vs_slowest_lane`: seconds of a step with two slots over the busy seconds of its slowest lane (1: all hidden).
`step_vs_lane_and_fill`: the same over that lane and one block of fill (a read, an update, a computation).
`one_slot_vs_sum`: a step with one slot over the sum of reads, updates and computations (1: no overlap, as it must be).
`reported_vs_wall`: seconds of a step as reported over a clock outside.
`accounted_vs_reported`: what the computation's lane was busy and waited, over the reported step.
`slow_disk_vs_lane_and_fill`: with a drive half as fast, whose reads must then be the named bottleneck.
`hold_on_disk_vs_slowest_lane`, `shadow_on_disk_vs_slowest_lane`: with the optimizer's state on disk too.
`hold_on_disk_vs_simulated`, `shadow_on_disk_vs_simulated`: over the run's own program, simulated at these rates.
`hold_on_disk_accounted`, `shadow_on_disk_accounted`: of those, as `accounted_vs_reported`.
`forward_vs_slowest_lane`, `forward_one_slot_vs_sum`: of passes without gradients, from a standing start.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import offloadz
from offloadz.memory.tier import Transfer
from offloadz.plan.ops import LANES, Op, Program
from offloadz.plan.walk import VirtualLane, simulate
from offloadz.runtime.actions import ACTIONS

WIDTH = 256


@dataclass(frozen=True)
class Pace:
    """How many blocks, and how long what takes of one."""

    blocks: int
    compute_s: float
    disk_s: float
    update_s: float

    @property
    def fill_s(self) -> float:
        """One block before anything can run beside it."""
        return self.compute_s + self.disk_s + self.update_s


class Bucket:
    """Bytes at a rate, by a token bucket without a reserve."""

    def __init__(self, rate: float) -> None:
        self._rate, self._lock, self._free_s = rate, threading.Lock(), 0.0

    @contextmanager
    def takes(self, nbytes: int) -> Iterator[None]:
        """What is done within takes no less than the rate allows."""
        with self._lock:
            self._free_s = until = max(self._free_s, time.perf_counter()) + nbytes / self._rate
        yield
        time.sleep(max(0.0, until - time.perf_counter()))


class Throttled:
    """A transfer that reads at `rate` bytes/s, and writes at as many."""

    name = "throttled"

    def __init__(self, inner: Transfer, rate: float) -> None:
        self._inner, self._reads, self._writes = inner, Bucket(rate), Bucket(rate)

    def read(self, fd: int, buffer: Tensor, nbytes: int, offset: int, crcs: Tensor | None) -> None:
        """Read, and return no sooner than the rate allows."""
        with self._reads.takes(nbytes):
            self._inner.read(fd, buffer, nbytes, offset, crcs)

    def write(self, fd: int, buffer: Tensor, nbytes: int, offset: int, crcs: Tensor | None) -> None:
        """Write, and return no sooner than the rate allows."""
        with self._writes.takes(nbytes):
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

    def __init__(self, pace: Pace) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Sleeper(pace.compute_s) for _ in range(pace.blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def opened(path: Path, slots: int, pace: Pace, **how: Any) -> offloadz.Run:
    """A run over sleeping blocks whose drive moves the weights of a block in `pace.disk_s`."""
    places = {"gradients": "host", "optimizer_state": "host", "activations": "disk", "commit": "hold", **how}
    places["recompute"] = "all"  # else a block that keeps its graph does not sleep in the backward
    run = offloadz.offload(Sleepers(pace), swap=path, parameters="disk", slots=slots, max_grad_norm=1e9, **places)
    run.flush()
    drive = run.session.room.drive
    drive.paths[0].io = Throttled(drive.paths[0].io, run.session.spec.units[0].weight_bytes / pace.disk_s)
    return run


@contextmanager
def updates_sleep(seconds: float) -> Iterator[None]:
    """Every update of a part (here: of a block) takes `seconds` more."""
    verbs = ("update", "update.g")
    before = {verb: ACTIONS[verb] for verb in verbs}

    def slow(verb: str) -> Callable[..., None]:
        def act(*told: Any) -> None:
            time.sleep(seconds)
            before[verb](*told)

        return act

    ACTIONS.update({verb: slow(verb) for verb in verbs})
    try:
        yield
    finally:
        ACTIONS.update(before)


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


def forward_pass(path: Path, slots: int, times: int, pace: Pace) -> dict[str, Any]:
    """Passes without gradients, each from a standing start."""
    x = torch.ones(2, WIDTH)
    with opened(path, slots, pace) as run, torch.no_grad():
        wall_s, busy_s = clocked(run, lambda: run.model(x), times)
    return {"slots": slots, "wall_s": wall_s, "busy_s": busy_s}


def whole_steps(path: Path, slots: int, times: int, pace: Pace, **how: Any) -> dict[str, Any]:
    """Steps in a row: with hold the updates of one run under the forward of the next."""
    reported: list[float] = []
    accounted: list[float] = []
    with updates_sleep(pace.update_s), opened(path, slots, pace, **how) as run:

        def step() -> None:
            run.step({"x": torch.ones(2, WIDTH)}, loss_fn=lambda m, b: m(b["x"]).square().mean())
            report = run.report
            reported.append(report.step_s)
            accounted.append((report.busy_s.get("device", 0.0) + report.wait_s) / max(report.step_s, 1e-9))

        wall_s, busy_s = clocked(run, step, times)
        assert not run.report.clipped
        bottleneck, walk = run.report.bottleneck, run.session.walk
        assert walk is not None
        simulated_s = simulated(walk.program, pace, run.session.spec.units[0].weight_bytes)
    out = {"slots": slots, **how, "wall_s": wall_s, "reported_s": median(reported[2:]), "busy_s": busy_s}
    out["accounted"] = median(accounted[2:])
    return {**out, "bottleneck": bottleneck, "simulated_s": simulated_s}


def simulated(program: Program, pace: Pace, weight_bytes: int) -> float:
    """Seconds of a step's program over lanes that answer with times, from idle lanes to idle lanes."""

    def seconds(op: Op) -> float:
        if op.lane == "device":
            return pace.compute_s if op.verb in ("forward", "backward") else 0.0
        if op.lane == "cpu":
            return pace.update_s if op.verb.startswith("update") else 0.0
        return op.nbytes / weight_bytes * pace.disk_s if op.lane.startswith("disk") else 0.0

    lanes = {name: VirtualLane(seconds) for name in LANES}
    simulate(program, lanes)
    return max(lane.free_s for lane in lanes.values())


def measure(path: Path, times: int, pace: Pace) -> dict[str, Any]:
    """All figures as one object."""
    slower = replace(pace, disk_s=2 * pace.disk_s)
    forward = {slots: forward_pass(path, slots, times, pace) for slots in (1, 2)}
    steps = {slots: whole_steps(path, slots, times, pace) for slots in (1, 2, 3)}
    slow = whole_steps(path, 2, times, slower)
    state = {"optimizer_state": "disk", "copies": 2}
    disk = {commit: whole_steps(path, 2, times, pace, commit=commit, **state) for commit in ("hold", "shadow")}
    ratios = {
        "step_vs_slowest_lane": over(steps[2]),
        "step_vs_lane_and_fill": over(steps[2], pace.fill_s),
        "three_slots_vs_lane_and_fill": over(steps[3], pace.fill_s),
        "one_slot_vs_sum": steps[1]["wall_s"] / sum(steps[1]["busy_s"][n] for n in ("device", "disk_read", "cpu")),
        "reported_vs_wall": steps[2]["reported_s"] / steps[2]["wall_s"],
        "accounted_vs_reported": steps[2]["accounted"],
        "slow_disk_vs_lane_and_fill": over(slow, slower.fill_s),
        **{f"{commit}_on_disk_vs_slowest_lane": over(found) for commit, found in disk.items()},
        **{f"{commit}_on_disk_vs_simulated": f["wall_s"] / f["simulated_s"] for commit, f in disk.items()},
        **{f"{commit}_on_disk_accounted": f["accounted"] for commit, f in disk.items()},
        "forward_vs_slowest_lane": over(forward[2]),
        "forward_one_slot_vs_sum": forward[1]["wall_s"]
        / (forward[1]["busy_s"]["device"] + forward[1]["busy_s"]["disk_read"]),
    }
    return {
        "ratios": ratios,
        "slow_disk_bottleneck": slow["bottleneck"],
        "pace": vars(pace),
        "forward": list(forward.values()),
        "training": [*steps.values(), {"slow_disk": True, **slow}, *disk.values()],
    }


def over(found: dict[str, Any], fill_s: float = 0.0) -> float:
    """Seconds over those of the slowest lane and a fill."""
    return float(found["wall_s"] / (max(found["busy_s"].values()) + fill_s))


def told(found: dict[str, Any]) -> str:
    """The figures for people."""
    lines = [f"{name:<32}{value:8.3f}" for name, value in found["ratios"].items()]
    lines.append(f"bottleneck with a slow disk: {found['slow_disk_bottleneck']}")
    for mode in ("forward", "training"):
        for entry in found[mode]:
            busy = ", ".join(f"{lane} {s:.3f}" for lane, s in entry["busy_s"].items() if s > 0.001)
            how = ", ".join(f"{k} {v}" for k, v in entry.items() if not isinstance(v, float | dict))
            simulated = f", simulated {entry['simulated_s']:.3f} s" if "simulated_s" in entry else ""
            lines.append(f"{mode} ({how}): {entry['wall_s']:.3f} s{simulated} (busy: {busy})")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--path", type=Path, help="swap directory; by default a temporary one")
    parser.add_argument("--blocks", type=int, default=16)
    parser.add_argument("--compute-ms", type=float, default=50.0)
    parser.add_argument("--disk-ms", type=float, default=40.0)
    parser.add_argument("--update-ms", type=float, default=30.0)
    parser.add_argument("--times", type=int, default=3, help="passes that are measured, after two that are not")
    args = parser.parse_args()
    torch.set_num_threads(1)  # products here are tiny, and a team waits for its slowest thread
    pace = Pace(args.blocks, args.compute_ms / 1e3, args.disk_ms / 1e3, args.update_ms / 1e3)
    with tempfile.TemporaryDirectory() as scratch:
        found = measure(args.path or Path(scratch), args.times, pace)
    print(json.dumps(found) if args.json else told(found))


if __name__ == "__main__":
    main()
