"""Transfers between files and tensors by the native library: threads or io_uring, one blocking call for both.

It leaves to others which of the two a swap path gets (`transfer.py`) and what a failed drive means (`memory/disk.py`).
The checks are those of `native.py` ([Note: checks before the pointer]).  The trade-off: a call blocks its thread until
the last byte has moved, so overlap between transfers needs a thread per lane; the price is about 10 us per call.
"""

import ctypes
import errno
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor

from offloadz.memory.tier import PIECE_BYTES
from offloadz.runtime.checks import check_tensor, check_threads
from offloadz.runtime.library import load_library

# How transfers are cut (docs/disk.md has the figures); nothing to tune.
REQUEST_BYTES = 4 * PIECE_BYTES  # 1 MiB costs two to three times the processor time a byte, 8 MiB saves no more
NUM_THREADS = 4  # of the back end by threads, each with one request under way: 3.2 GB/s where fio came to 3.0
RING_DEPTH = 32  # of the back end by io_uring, requests under way per caller; 16 and 64 gain nothing (docs/log.md)

MAX_REQUEST_BYTES = 16 * PIECE_BYTES  # csrc/io.h has the same
MAX_DEPTH = 64  # csrc/io_uring.cpp has the same
_STAGES = {1: "a ring was refused", 2: "a call on its ring was refused", 3: "a request was refused"}


class NativeIOError(OSError):
    """A transfer failed.  `operation` is "read", "write" or "checksum"; for "checksum" the drive answered, but piece
    `piece` of the extent is not what was written (its length `wanted_bytes` / `found_bytes` or its CRC32C differ)."""

    def __init__(self, error: int, operation: Literal["read", "write", "checksum"], fault: "_IoFault") -> None:
        self.operation = operation
        self.offset, self.piece = int(fault.offset), int(fault.piece)
        self.wanted_bytes, self.found_bytes = int(fault.wanted_bytes), int(fault.found_bytes)
        self.wanted_crc, self.found_crc = int(fault.wanted_crc), int(fault.found_crc)
        where = f"at offset {self.offset}: wanted {self.wanted_bytes} bytes, found {self.found_bytes}"
        if operation == "checksum":
            text = f"piece {self.piece} {where}, CRC32C wanted {self.wanted_crc:#010x}, found {self.found_crc:#010x}"
        else:
            text = f"{operation} {where}: {os.strerror(error)}"
        super().__init__(error, text)

    @property
    def damaged(self) -> bool:
        """Whether the bytes were moved but are wrong (else the drive did not move them)."""
        return self.operation == "checksum"


class _IoFault(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_int32),
        ("error", ctypes.c_int32),
        *((name, ctypes.c_int64) for name in ("offset", "wanted_bytes", "found_bytes", "piece")),
        *((name, ctypes.c_int64) for name in ("wanted_crc", "found_crc")),
    )


class TransferPool:
    """A back end under way; made by `io_start` or `ring_start`.  Any number of Python threads may use it at once."""

    def __init__(self, pointer: int) -> None:
        self._pointer: int | None = pointer
        self._num_calls = 0
        self._changed = threading.Condition()
        self._fixed: list[Tensor] = []

    @contextmanager
    def _in_use(self) -> Iterator[int]:
        """The back end's address, kept alive until the block ends."""
        with self._changed:
            if self._pointer is None:
                raise ValueError("the transfer pool was stopped; io_start makes a new one")
            pointer = self._pointer
            self._num_calls += 1
        try:
            yield pointer
        finally:
            with self._changed:
                self._num_calls -= 1
                self._changed.notify_all()

    def fix(self, buffer: Tensor) -> bool:
        """Say that transfers will use this memory again and again; False where nothing is gained by it.

        With io_uring its pages are then found once and not by every request, as far as the limit of locked memory
        allows.  The tensor is kept alive until `stop`: a fixed buffer that moved would be written to where it was.
        """
        at = check_tensor("buffer", buffer, (torch.uint8,))
        with self._in_use() as pointer:
            taken = load_library().oz_io_fix(pointer, at, buffer.nbytes) == 0
        if taken:
            self._fixed.append(buffer)
        return taken

    def fallen(self) -> str:
        """Why this back end goes on as threads; "" while it stands."""
        with self._in_use() as pointer:
            found = load_library().oz_io_fallen(pointer)
        if not found:
            return ""
        number = found & 0xFFFF
        return f"{_STAGES[found >> 16]} ({errno.errorcode.get(number, '?')} {number}: {os.strerror(number)})"

    def stop(self) -> None:
        """Lets calls in progress end, then ends threads and rings; a second call does nothing."""
        with self._changed:
            pointer, self._pointer = self._pointer, None
            self._changed.wait_for(lambda: self._num_calls == 0)
        if pointer is not None:
            load_library().oz_io_stop(pointer)
            self._fixed.clear()


def io_start(num_threads: int = NUM_THREADS, request_bytes: int = REQUEST_BYTES) -> TransferPool:
    """Starts a pool of threads for transfers (more threads keep more requests under way at once)."""
    check_threads(num_threads, "num_threads")
    pointer = load_library().oz_io_start(num_threads, _check_request(request_bytes))
    if not pointer:
        raise OSError(ctypes.get_errno(), "the system refused to start a single thread for transfers")
    return TransferPool(pointer)


def ring_start(depth: int = RING_DEPTH, request_bytes: int = REQUEST_BYTES) -> TransferPool:
    """Opens an io_uring for transfers, `depth` requests under way per caller.  Raises `OSError` where it is refused.

    What is refused later (a further ring, a call, a request) is done by threads from then on: see `fallen`.
    """
    if not 1 <= depth <= MAX_DEPTH:
        raise ValueError(f"depth is {depth}; 1 to {MAX_DEPTH} is needed")
    pointer = load_library().oz_ring_start(depth, NUM_THREADS, _check_request(request_bytes))
    if not pointer:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return TransferPool(pointer)


def _check_request(request_bytes: int) -> int:
    if not 0 < request_bytes <= MAX_REQUEST_BYTES or request_bytes % PIECE_BYTES:
        raise ValueError(f"request_bytes is {request_bytes}; whole MiB up to {MAX_REQUEST_BYTES >> 20} are needed")
    return request_bytes


def io_stop(pool: TransferPool) -> None:
    """Ends the pool's threads once the calls in progress have returned."""
    pool.stop()


def read_at(
    pool: TransferPool,
    fd: int,
    buffer: Tensor,
    nbytes: int,
    offset: int,
    crcs: Tensor | None = None,
    origin: int = 0,
) -> None:
    """Reads `nbytes` at file offset `offset` into the start of `buffer` (uint8); returns when all of it is there.

    `crcs` is the extent's table: int64, one entry per 1 MiB piece counted from `origin`, the file offset at which the
    extent starts.  An entry is `length << 32 | CRC32C` as `write_at` stored it, or `NEVER_WRITTEN` (-1): that piece is
    zeros and is not read.  With a table, `offset - origin` is a multiple of 1 MiB and every piece must have the length
    it was written with, so a transfer ends with a whole piece or with the extent.  Raises `NativeIOError`; the buffer's
    content is then undefined, and no request is left running.
    """
    _transfer(pool, fd, buffer, nbytes, offset, crcs, origin, False)


def write_at(
    pool: TransferPool,
    fd: int,
    buffer: Tensor,
    nbytes: int,
    offset: int,
    crcs: Tensor | None = None,
    origin: int = 0,
) -> None:
    """Writes the first `nbytes` of `buffer`, and each piece's entry to `crcs` once it is written; see `read_at`.

    After a failure the file holds parts of the new bytes, and `crcs` speaks of the new bytes only for some pieces.
    """
    _transfer(pool, fd, buffer, nbytes, offset, crcs, origin, True)


def _transfer(
    pool: TransferPool, fd: int, buffer: Tensor, nbytes: int, offset: int, crcs: Tensor | None, origin: int, write: bool
) -> None:
    at = check_tensor("buffer", buffer, (torch.uint8,))
    if not 0 <= nbytes <= buffer.nbytes:
        raise ValueError(f"nbytes is {nbytes}; the buffer has {buffer.nbytes}")
    if not 0 <= origin <= offset <= 2**62:
        raise ValueError(f"offset is {offset}; it must be at least the extent's origin, {origin}, and that at least 0")
    table = _check_table(crcs, nbytes, offset - origin) if crcs is not None else None
    fault = _IoFault()
    with pool._in_use() as pointer:
        kind = load_library().oz_io_run(pointer, fd, write, at, nbytes, offset, origin, table, ctypes.byref(fault))
    if kind == 2:
        raise NativeIOError(0, "checksum", fault)
    if kind:
        raise NativeIOError(fault.error, "write" if write else "read", fault)


def _check_table(crcs: Tensor, nbytes: int, start: int) -> int:
    table = check_tensor("crcs", crcs, (torch.int64,))
    if start % PIECE_BYTES:
        raise ValueError(f"the transfer starts {start} bytes into its extent; with crcs, a multiple of 1 MiB is needed")
    needed = -(-(start + nbytes) // PIECE_BYTES)
    if crcs.numel() < needed:
        raise ValueError(f"crcs has {crcs.numel()} entries; {needed} are needed")
    return table
