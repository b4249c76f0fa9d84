"""What a swap path reads, writes and does of both at once, through the tier and the back end of a run.

A first look with a few short extents says how many, and how long ones, there is time for.  The trade-off: the extents
of one bench fit into the cache of most drives, and a drive that has to put them down for good can write much slower;
benchmarks/disk.py with a large `--size` looks further.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from offloadz.bench.rounds import Measured, Sizes, measured, seconds
from offloadz.memory.disk import DiskTier, Extent
from offloadz.memory.host import HostPool
from offloadz.plan.errors import ConfigError, DiskFailed
from offloadz.plan.machine import disk_free
from offloadz.plan.words import human
from offloadz.runtime.transfer import transfer_for

KINDS = ("read", "write", "both", "read_parts", "write_parts")
LOOK_EXTENTS = 4
"""Extents, as long as parts, of the first look."""


def check_path(path: Path, sizes: Sizes) -> None:
    """Refuse, as ConfigError, a swap path that cannot be measured; nothing is written."""
    if not path.is_dir():
        raise ConfigError(f"--swap {path}: there is no such directory; make it, or name another")
    if not os.access(path, os.W_OK | os.X_OK):
        raise ConfigError(f"--swap {path}: Permission denied; name a directory you may write")
    _enough(path, sizes)


def _enough(path: Path, sizes: Sizes) -> None:
    free = disk_free(path)
    if free < sizes.disk_bytes:
        raise ConfigError(
            f"--swap {path}: {human(free)} are free, measuring writes {human(sizes.disk_bytes, up=True)}; "
            "free some or name another"
        )


class SwapPath:
    """The extents of a bench in one swap path, and the rates of passes over them."""

    def __init__(self, tier: DiskTier, sizes: Sizes, buffers: Sequence[torch.Tensor]) -> None:
        self.tier, self.sizes, self._buffers = tier, sizes, buffers
        self._ended = False
        names = [f"bench/{number}" for number in range(sizes.num_extents)]
        self._extents = [tier.reserve("scratch", name, sizes.extent_bytes) for name in names]
        names = [f"part/{number}" for number in range(sizes.num_parts)]
        self._parts = [tier.reserve("scratch", name, sizes.part_bytes) for name in names]
        tier.allocate()

    def fill(self) -> None:
        """The first writes into fresh extents, slower than any later."""
        self._pass(self.tier.write, self._extents, 0)
        self._pass(self.tier.write, self._parts, 0)

    def figures(self, most_s: float) -> Iterator[tuple[str, Measured]]:
        """Each kind with its figure, all in about `most_s`; what a kind leaves of its share the next ones have."""
        until_s = time.monotonic() + most_s
        self.fill()
        for number, kind in enumerate(KINDS):
            left_s = (until_s - time.monotonic()) / (len(KINDS) - number)
            yield kind, measured(self.rate(kind), self.sizes.rounds, left_s)

    def rate(self, kind: str) -> Callable[[], float]:
        """Bytes/s of a pass; of both at once half the extents are read and the others written."""
        if kind == "both":
            return lambda: _length(self._extents) / seconds(self._both)
        extents = self._parts if kind.endswith("_parts") else self._extents
        move = self.tier.read if kind.startswith("read") else self.tier.write
        return lambda: _length(extents) / seconds(lambda: self._pass(move, extents, 0))

    def _both(self) -> None:
        half = len(self._extents) // 2
        with ThreadPoolExecutor(1) as other:  # its end waits for the writer, also after an interrupt
            try:
                writing = other.submit(self._pass, self.tier.write, self._extents[half:], 1)
                self._pass(self.tier.read, self._extents[:half], 0)
                writing.result()
            except BaseException:
                self._ended = True  # the writer stops at its next extent
                raise

    def _pass(self, move: Callable[[Extent, torch.Tensor], None], extents: Sequence[Extent], buffer: int) -> None:
        for extent in extents:
            if not self._ended:
                move(extent, self._buffers[buffer][: extent.nbytes])


def _length(extents: Sequence[Extent]) -> int:
    return sum(extent.nbytes for extent in extents)


def pace(path: Path, sizes: Sizes) -> float:
    """Bytes/s of first writes and reads of a few short extents."""
    look = replace(sizes, num_extents=0, extent_bytes=sizes.part_bytes, num_parts=min(LOOK_EXTENTS, sizes.num_parts))
    with swap_path(path, look) as place:
        begin = time.perf_counter()
        place.fill()
        place.rate("read_parts")()
        return 2 * look.disk_bytes / (time.perf_counter() - begin)


@contextmanager
def swap_path(path: Path, sizes: Sizes) -> Iterator[SwapPath]:
    """A swap path ready to be written; at the end, however it comes, nothing of it is left there."""
    transfer = transfer_for(path)
    try:
        tier = DiskTier(path, transfer, owner=f"offloadz bench {os.getpid()}")
    except BaseException:
        transfer.close()
        raise
    pool = HostPool(2 * sizes.extent_bytes)
    try:
        buffers = [pool.take(f"{number}", sizes.extent_bytes) for number in range(2)]
        for buffer in buffers:
            buffer.random_()  # bytes that no drive can leave out
            tier.fix(buffer)
        yield SwapPath(tier, sizes, buffers)
    except DiskFailed as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            _enough(path, sizes)  # somebody else took the room: say it plainly
        raise
    finally:
        tier.close()
