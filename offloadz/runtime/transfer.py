"""The transfer object that the disk tier is given: the native thread pool in the words of `memory/tier.py`.

Left to others: the pool itself (`native.py`, csrc) and what a failure means to a run (`memory/disk.py`).  The
trade-off: one pool per tier, so that closing a tier ends its threads; two tiers would have twice the threads.
"""

from __future__ import annotations

import os

from torch import Tensor

from offloadz.memory.tier import TransferDamaged, TransferFailed
from offloadz.runtime import native


class ThreadTransfer:
    """Implements `memory.tier.Transfer` with `num_threads` threads that call pread and pwrite."""

    name = "threads"

    def __init__(self, num_threads: int = 4) -> None:
        self._pool = native.io_start(num_threads)
        self._pid = os.getpid()

    def read(self, fd: int, buffer: Tensor, nbytes: int, offset: int, crcs: Tensor | None) -> None:
        """Read `nbytes` at `offset` of `fd` into `buffer`, comparing with `crcs`."""
        try:
            native.read_at(self._pool, fd, buffer, nbytes, offset, crcs, origin=offset)
        except native.NativeIOError as error:
            raise _translated(error) from error

    def write(self, fd: int, buffer: Tensor, nbytes: int, offset: int, crcs: Tensor | None) -> None:
        """Write `nbytes` of `buffer` at `offset` of `fd`, filling `crcs`."""
        try:
            native.write_at(self._pool, fd, buffer, nbytes, offset, crcs, origin=offset)
        except native.NativeIOError as error:
            raise _translated(error) from error

    def close(self) -> None:
        """End the threads once the calls in progress have returned; a second call does nothing."""
        if os.getpid() == self._pid:  # a forked child has no such threads, and would wait for them for ever
            native.io_stop(self._pool)


def _translated(error: native.NativeIOError) -> TransferFailed | TransferDamaged:
    if error.damaged:
        return TransferDamaged(error.offset, error.wanted_crc, error.found_crc)
    number = error.errno or 0
    return TransferFailed(number, error.operation, error.offset, error.wanted_bytes, error.found_bytes)
