"""How near does the disk tier come to what the drive can do?  Beside fio, on the same file system, in turns.

    python benchmarks/disk.py --path DIR [--json] [--size 2] [--extent 128] [--rounds 7] [--quick]

Each round runs every arm once for reads, for writes over old bytes and for both at once: the product's tier by each
back end (checksums on, and off for what they cost), and fio with patterns of requests from 1 to 8 MiB, depths 4 to 32,
three of its ways to ask, on huge pages and on small ones; and DeepSpeed's async I/O, where it is installed, by three of
its settings.  **All move the same file**, that of the tier, in an order drawn anew each time.  All numbers of the
product go through `DiskTier`: extents of `--extent` MiB one after the other, by one caller for reads or writes, by one
for each when both are at once.

`read_vs_fio`, `write_vs_fio`, `mixed_vs_fio`: the back end that `auto` takes here, with checksums, over a pattern of
fio, round by round, the median; of the pattern that makes this least.  `read_vs_deepspeed`, `write_vs_deepspeed`: over
DeepSpeed's settings, likewise; null where it does not run.  `checksum_cost`: the share of the read rate that checksums
take.  `round_trip_vs_slowest`: blocks of AdamW state read, updated and written back through three slots, as a step does
it, over the longer of its disk time and its update time alone.

DIR needs room for about twice `--size` (GiB).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from queue import Queue
from statistics import median
from typing import Any

import torch

from offloadz.bench.drives import SwapPath
from offloadz.bench.rounds import Sizes, seconds
from offloadz.memory.disk import DiskTier, Extent
from offloadz.memory.host import HostPool
from offloadz.runtime import native
from offloadz.runtime.threads import update_threads
from offloadz.runtime.transfer import NativeTransfer, RingTransfer, ThreadTransfer, transfer_for

MIB, GIB = 1 << 20, 1 << 30
OPERATIONS = ("read", "write", "mixed")
PATTERNS = (  # way to ask, MiB a request, depth (or processes), on huge pages
    ("libaio", 4, 16, True),
    ("libaio", 8, 32, True),
    ("libaio", 1, 32, True),
    ("libaio", 4, 4, True),
    ("io_uring", 4, 16, True),
    ("io_uring", 1, 32, True),
    ("psync", 4, 4, True),
    ("libaio", 4, 16, False),
)
QUICK_PATTERNS = (PATTERNS[0], PATTERNS[4])
Rates = dict[tuple[str, str], list[float]]
Arms = list[tuple[str, Callable[[], float]]]


class Place:
    """The extents and the two buffers on huge pages over which all back ends of the tier take turns.

    Not a tier for each: the same engine writes one file 17 % faster than the next (docs/disk.md), so whoever is
    compared moves the same file.
    """

    def __init__(self, path: Path, movers: dict[str, tuple[NativeTransfer, bool]], auto: str, sizes: Sizes) -> None:
        self.movers, self.auto = movers, auto
        self.tier = DiskTier(path, movers[auto][0], owner=f"benchmark {os.getpid()}")
        self.pool = HostPool(2 * sizes.extent_bytes)
        self.buffers = [self.pool.take(f"{i}", sizes.extent_bytes) for i in range(2)]
        for buffer in self.buffers:
            buffer.random_()
            for transfer, _ in movers.values():
                transfer.fix(buffer)
        self.passes = SwapPath(self.tier, sizes, self.buffers)
        self.file = self.tier.path / "scratch" / "bench.bin"
        self.fresh_rate = sizes.disk_bytes / seconds(self.fill) / 1e9

    def take(self, name: str) -> None:
        """Let the tier move by the back end `name`, with its checksums."""
        self.tier.paths[0].io, self.tier.checksum = self.movers[name]

    def fill(self) -> None:
        """Write all extents, with checksums: whatever a peer left there would be damage to the next read."""
        self.take(self.auto)
        self.passes.fill()

    def rate(self, name: str, operation: str) -> float:
        """GB/s of one pass over all extents; for both at once, half the extents are read and half are written."""
        self.take(name)
        return self.passes.rate("both" if operation == "mixed" else operation)() / 1e9

    def arms(self, operation: str) -> Arms:
        """A name and a run for each of the back ends."""
        return [(name, lambda n=name: self.rate(n, operation)) for name in self.movers]  # type: ignore[misc]

    def close(self) -> None:
        """Give files and memory back."""
        self.tier.close()
        for transfer, _ in self.movers.values():
            transfer.close()
        del self.passes
        self.buffers.clear()
        self.pool.close()


def fio_name(pattern: tuple[str, int, int, bool]) -> str:
    """A pattern in words."""
    way, size, depth, huge = pattern
    return f"fio {way} {size}M {'x' if way == 'psync' else 'qd'}{depth}{' huge' if huge else ''}"


def fio_rate(file: Path, pattern: tuple[str, int, int, bool], operation: str, size_bytes: int) -> float:
    """GB/s of one run of fio over `file`, which holds `size_bytes`."""
    way, request, depth, huge = pattern
    jobs = depth if way == "psync" else 1
    command = ["fio", "--name=x", f"--filename={file}", f"--rw={'rw' if operation == 'mixed' else operation}"]
    command += [f"--bs={request}M", f"--size={size_bytes // jobs}", f"--offset_increment={size_bytes // jobs}"]
    command += ["--direct=1", f"--ioengine={way}", f"--iodepth={1 if way == 'psync' else depth}", f"--numjobs={jobs}"]
    command += ["--group_reporting", "--output-format=json", "--fallocate=none"]
    command += ["--scramble_buffers=0"]  # else it changes what it writes while its clock runs
    environment = os.environ | ({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"} if huge else {})
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{fio_name(pattern)} failed: {done.stderr or done.stdout}")
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    moved = [job[way] for way in ("read", "write")]
    ms = max(way["runtime"] for way in moved) - 0.5  # it counts whole ones, rounded up
    return float(sum(way["io_bytes"] for way in moved) / ms / 1e6)


def fio_arms(file: Path, patterns: Sequence[tuple[str, int, int, bool]], operation: str, size_bytes: int) -> Arms:
    """A name and a run for each of the patterns."""
    return [(fio_name(p), lambda p=p: fio_rate(file, p, operation, size_bytes)) for p in patterns]  # type: ignore[misc]


DEEPSPEED = """
import json, os, sys, time
answers = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)  # what its building and loading print is no answer
os.environ.setdefault("DS_ACCELERATOR", "cpu")
import torch
from deepspeed.accelerator import get_accelerator
aio = get_accelerator().create_op_builder("AsyncIOBuilder").load()
file, size, settings = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
ways = [aio.aio_handle(request << 20, depth, False, True, threads) for request, depth, threads in settings]
data = ways[0].new_cpu_locked_tensor(size, torch.empty(0, dtype=torch.uint8)).fill_(3)
ways[0].sync_pwrite(data, file, 0)
print("ready", file=answers)
for line in sys.stdin:
    operation, i = line.split()
    move = ways[int(i)].sync_pwrite if operation == "write" else ways[int(i)].sync_pread
    begin = time.perf_counter()
    move(data, file, 0)
    print(time.perf_counter() - begin, file=answers)
"""


class DeepSpeed:
    """DeepSpeed's async I/O with a pinned buffer, in a process of its own that moves a file when it is told to."""

    SETTINGS = ((1, 32, 1), (8, 32, 1), (4, 16, 2))  # MiB a request, depth, threads

    def __init__(self, file: Path, size_bytes: int) -> None:
        command = [sys.executable, "-c", DEEPSPEED, str(file), str(size_bytes), json.dumps(self.SETTINGS)]
        self.size_bytes = size_bytes
        with tempfile.TemporaryFile("w+") as noise:  # not a pipe: it would fill
            pipe = subprocess.PIPE
            self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=noise, text=True, bufsize=1)
            assert self.process.stdin and self.process.stdout
            self.told, self.heard = self.process.stdin, self.process.stdout
            if self.heard.readline() != "ready\n":
                noise.seek(0)
                raise RuntimeError(noise.read().strip().rpartition("\n")[2])

    def rate(self, setting: int, operation: str) -> float:
        """GB/s of one pass over the file."""
        self.told.write(f"{operation} {setting}\n")
        return self.size_bytes / float(self.heard.readline()) / 1e9

    def arms(self, operation: str) -> Arms:
        """A name and a run for each of the settings; it has none for both at once."""
        return [
            (f"deepspeed {request}M qd{depth} x{threads}", lambda i=i: self.rate(i, operation))  # type: ignore[misc]
            for i, (request, depth, threads) in enumerate(self.SETTINGS)
            if operation != "mixed"
        ]


@contextlib.contextmanager
def deepspeed(file: Path, size_bytes: int) -> Iterator[DeepSpeed | None]:
    """DeepSpeed under way (which builds its library at the first use: minutes); None where it does not run."""
    found = None
    if importlib.util.find_spec("deepspeed") is not None:
        try:
            found = DeepSpeed(file, size_bytes)
        except RuntimeError as error:
            print(f"DeepSpeed's async I/O does not run here: {error}", file=sys.stderr)
    try:
        yield found
    finally:
        if found:
            found.told.close()
            found.process.wait()


@contextlib.contextmanager
def place(path: Path, size_bytes: int, extent_bytes: int) -> Iterator[Place]:
    """Where all is measured, with every back end that works here."""
    chosen = transfer_for(path)
    auto = chosen.name.split()[0]
    movers: dict[str, tuple[NativeTransfer, bool]] = {"unchecked": (chosen, False)}
    with contextlib.suppress(OSError):
        movers["io_uring"] = RingTransfer(), True
    movers["threads"] = ThreadTransfer(), True
    sizes = Sizes(extent_bytes=extent_bytes, num_extents=max(2, size_bytes // extent_bytes), num_parts=0)
    made = Place(path, movers, auto, sizes)
    try:
        yield made
    finally:
        made.close()


class RoundTrip:
    """Blocks of AdamW state on disk (bf16 weights with their low halves and fp32 moments), three of them in memory."""

    NUM_SLOTS = 3

    def __init__(self, path: Path, num_blocks: int, block_bytes: int) -> None:
        self.count = block_bytes // 12 // 2048 * 2048  # elements: 2 + 2 + 4 + 4 bytes each
        self.tier = DiskTier(path, transfer_for(path), owner=f"benchmark {os.getpid()} round trip")
        self.extents = [self.tier.reserve("state", f"blocks/{i}", 12 * self.count) for i in range(num_blocks)]
        self.tier.allocate()
        self.pool = HostPool(self.NUM_SLOTS * (block_bytes + 2 * MIB))
        self.slots = [self.pool.take(f"slot{i}", 12 * self.count) for i in range(self.NUM_SLOTS)]
        self.grad = torch.randn(self.count).bfloat16()
        self.threads = update_threads(0)[0]
        for slot in self.slots:
            slot.zero_()
        for extent in self.extents:
            self.tier.write(extent, self.slots[0])

    def update(self, slot: torch.Tensor) -> None:
        """One step of AdamW on the block in a slot."""
        n = self.count
        weight, low = slot[: 2 * n].view(torch.bfloat16), slot[2 * n : 4 * n].view(torch.int16)
        moments = slot[4 * n : 8 * n].view(torch.float32), slot[8 * n :].view(torch.float32)
        native.update_(
            "adam", weight, low, moments, (None, None), self.grad, step=3, lr=1e-5, beta1=0.9, beta2=0.95, eps=1e-8,
            threads=self.threads,
        )  # fmt: skip

    def step(self) -> float:
        """Seconds to read, update and write back every block: three lanes, in order, a slot at a time."""
        free: Queue[torch.Tensor] = Queue()
        there: Queue[tuple[Extent, torch.Tensor]] = Queue()
        due: Queue[tuple[Extent, torch.Tensor]] = Queue()
        for slot in self.slots:
            free.put(slot)

        def read() -> None:
            for extent in self.extents:
                slot = free.get()
                self.tier.read(extent, slot)
                there.put((extent, slot))

        def write() -> None:
            for _ in self.extents:
                extent, slot = due.get()
                self.tier.write(extent, slot)
                free.put(slot)

        lanes = [threading.Thread(target=read), threading.Thread(target=write)]
        begin = time.perf_counter()
        for lane in lanes:
            lane.start()
        for _ in self.extents:
            extent, slot = there.get()
            self.update(slot)
            due.put((extent, slot))
        for lane in lanes:
            lane.join()
        return time.perf_counter() - begin

    def alone(self) -> tuple[float, float]:
        """Seconds of all transfers (reads and writes at once) without updates, and of all updates without transfers."""
        whole, self.update = self.update, lambda slot: None  # type: ignore[method-assign]
        disk_s = self.step()
        self.update = whole  # type: ignore[method-assign]
        begin = time.perf_counter()
        for i in range(len(self.extents)):
            self.update(self.slots[i % self.NUM_SLOTS])
        return disk_s, time.perf_counter() - begin

    def measure(self, rounds: int) -> dict[str, float]:
        """Medians of all, and their ratio."""
        taken = [(self.step(), *self.alone()) for _ in range(rounds)]
        self.tier.close()
        step_s, disk_s, update_s = (median(column) for column in zip(*taken, strict=True))
        ratio = median(step / max(disk, update) for step, disk, update in taken)
        return {"step_s": step_s, "disk_s": disk_s, "update_s": update_s, "vs_slowest": ratio}


def measure(path: Path, size_bytes: int, extent_bytes: int, rounds: int, quick: bool) -> dict[str, Any]:
    """All figures as one object."""
    patterns = (QUICK_PATTERNS if quick else PATTERNS) if shutil.which("fio") else ()
    with place(path, size_bytes, extent_bytes) as made:
        size_bytes = made.file.stat().st_size
        with deepspeed(made.file, size_bytes) as peer:
            rates = _rates(made, patterns, peer, size_bytes, rounds)
        fresh = {made.auto: made.fresh_rate}
        fallen = {name: transfer.name for name, (transfer, _) in made.movers.items()}
    trip = RoundTrip(path, max(3, size_bytes // extent_bytes), extent_bytes).measure(rounds)
    return _result(rates, made.auto, fresh, fallen, trip)


def _rates(
    made: Place, patterns: Sequence[tuple[str, int, int, bool]], peer: DeepSpeed | None, size_bytes: int, rounds: int
) -> Rates:
    """GB/s of every arm, a figure a round; who comes after whom is drawn anew each time."""
    rates: Rates = defaultdict(list)
    order = random.Random(0)
    for _ in range(rounds):
        for operation in OPERATIONS:
            arms = made.arms(operation) + fio_arms(made.file, patterns, operation, size_bytes)
            arms += peer.arms(operation) if peer else []
            order.shuffle(arms)
            made.fill()
            for name, run in arms:
                if operation == "mixed":  # half of it is written, by fio without sums; nobody starts from anything else
                    made.fill()
                rates[name, operation].append(run())
    return rates


def _share(ours: list[float], theirs: list[float]) -> float:
    """Round by round, the median: the drive changes more from minute to minute than from arm to arm."""
    return median(our / their for our, their in zip(ours, theirs, strict=True))


def _result(
    rates: Rates, auto: str, fresh: dict[str, float], fallen: dict[str, str], trip: dict[str, float]
) -> dict[str, Any]:
    medians = {f"{name}, {operation}": median(found) for (name, operation), found in rates.items()}
    ratios: dict[str, float | None] = {}
    for peer, operations in (("fio", OPERATIONS), ("deepspeed", ("read", "write"))):
        for operation in operations:
            others = [found for (name, o), found in rates.items() if o == operation and name.startswith(peer)]
            shares = (_share(rates[auto, operation], other) for other in others)
            ratios[f"{operation}_vs_{peer}"] = min(shares, default=None)
    ratios["checksum_cost"] = 1 - _share(rates[auto, "read"], rates["unchecked", "read"])
    ratios["round_trip_vs_slowest"] = trip["vs_slowest"]
    spread = {f"{name}, {operation}": [min(found), max(found)] for (name, operation), found in rates.items()}
    return {
        "ratios": ratios, "auto": auto, "back_ends": fallen, "gb_per_s": medians, "least_and_most": spread,
        "fresh_write_gb_per_s": fresh, "round_trip": trip,
    }  # fmt: skip


def told(found: dict[str, Any]) -> str:
    """The figures for people."""
    lines = [f"{name:<24}{'-' if value is None else f'{value:8.3f}'}" for name, value in found["ratios"].items()]
    lines += [f"auto takes {found['auto']}; GB/s, medians:"]
    for name in dict.fromkeys(key.rpartition(", ")[0] for key in found["gb_per_s"]):
        moved = [found["gb_per_s"].get(f"{name}, {operation}") for operation in OPERATIONS]
        row = "".join(f"{'-':>9}" if rate is None else f"{rate:9.2f}" for rate in moved)
        fresh = found["fresh_write_gb_per_s"].get(name)
        lines.append(f"  {name:<24}{row}" + (f"   first write {fresh:.2f}" if fresh else ""))
    trip = found["round_trip"]
    lines.append("round trip of state: " + ", ".join(f"{name} {value:.3f}" for name, value in trip.items()))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", type=Path, required=True, help="a directory of the drive")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--size", type=float, default=2.0, help="GiB per pass")
    parser.add_argument("--extent", type=int, default=128, help="MiB per extent: a block's state")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="two fio patterns only")
    args = parser.parse_args()
    args.path.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="offloadz-benchmark-", dir=args.path) as folder:
        found = measure(Path(folder), int(args.size * GIB), args.extent * MIB, args.rounds, args.quick)
    print(json.dumps(found) if args.json else told(found))


if __name__ == "__main__":
    main()
