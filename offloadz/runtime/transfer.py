"""The transfer objects that the disk tier is given, and the choice between them for one swap path.

Left to others: the back ends themselves (`native_io.py`, csrc) and what a failure means to a run (`memory/disk.py`).
The choice is made by trying: a file in that very directory is written, read back and compared.  io_uring is taken where
that works and direct I/O does too: it needs no thread between a caller and the drive and 4 to 6 ms of processor time
per GB (threads 10; docs/disk.md).  The trade-off: one back end per tier, so that closing a tier ends its threads.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from offloadz.memory.direct import drop_cache, probe_direct, probe_path
from offloadz.memory.host import HostPool, needed_bytes
from offloadz.memory.tier import PAGE_BYTES, PIECE_BYTES, TransferDamaged, TransferFailed
from offloadz.plan.errors import ConfigError, DiskFailed
from offloadz.runtime import native

log = logging.getLogger("offloadz")

IO_NAMES = ("auto", "io_uring", "threads")
_PROBE_BYTES = 2 * PIECE_BYTES + PAGE_BYTES  # several requests, the last one short


class NativeTransfer:
    """Implements `memory.tier.Transfer` with a native back end, which it owns from now on.

    `name` says which one it is and, in brackets, why others were dropped.
    """

    def __init__(self, pool: native.TransferPool, name: str) -> None:
        self._pool = pool
        self._pid = os.getpid()
        self._fell = ""
        self.name = name

    def read(self, fd: int, buffer: Tensor, nbytes: int, offset: int, crcs: Tensor | None) -> None:
        """Read `nbytes` at `offset` of `fd` into `buffer`, comparing with `crcs`."""
        try:
            native.read_at(self._pool, fd, buffer, nbytes, offset, crcs, origin=offset)
        except native.NativeIOError as error:
            raise _translated(error) from error
        finally:
            self._look_after()

    def write(self, fd: int, buffer: Tensor, nbytes: int, offset: int, crcs: Tensor | None) -> None:
        """Write `nbytes` of `buffer` at `offset` of `fd`, filling `crcs`."""
        try:
            native.write_at(self._pool, fd, buffer, nbytes, offset, crcs, origin=offset)
        except native.NativeIOError as error:
            raise _translated(error) from error
        finally:
            self._look_after()

    def fix(self, buffer: Tensor) -> bool:
        """Say that transfers will use this memory again and again, and that it stays until `close`."""
        return self._pool.fix(buffer)

    def _look_after(self) -> None:
        """Tell once that a back end had to go on in another way; every transfer is whole all the same."""
        if self._fell or not (fell := self._pool.fallen()):
            return
        self._fell = fell
        self.name = f"threads (io_uring until {fell})"
        log.warning("disk I/O goes on by threads: %s; nothing is lost", fell)

    def close(self) -> None:
        """End the back end once the calls in progress have returned; a second call does nothing."""
        if os.getpid() == self._pid:  # a forked child has no such threads, and would wait for them for ever
            native.io_stop(self._pool)


class ThreadTransfer(NativeTransfer):
    """Transfers by `num_threads` threads that call pread and pwrite."""

    def __init__(self, num_threads: int = native.NUM_THREADS, name: str = "threads") -> None:
        super().__init__(native.io_start(num_threads), name)


class RingTransfer(NativeTransfer):
    """Transfers by io_uring; raises `OSError` where the system refuses a ring."""

    def __init__(self, depth: int = native.RING_DEPTH) -> None:
        super().__init__(native.ring_start(depth), "io_uring")


def _translated(error: native.NativeIOError) -> TransferFailed | TransferDamaged:
    if error.damaged:
        return TransferDamaged(error.offset, error.wanted_crc, error.found_crc)
    number = error.errno or 0
    return TransferFailed(number, error.operation, error.offset, error.wanted_bytes, error.found_bytes)


def transfer_for(swap: Path, io: str = "auto") -> NativeTransfer:
    """The back end for a swap path, which need not exist yet: then its nearest parent that does is tried.

    Raises as `choose_transfer` does; where nothing can be written the tier is left to say so, with its own words.
    """
    try:
        place = nearest(swap)
        return choose_transfer(place, probe_direct(place).direct, io)
    except DiskFailed:
        raise
    except OSError:
        return ThreadTransfer()


def nearest(path: Path) -> Path:
    """`path`, or the first of its parents that exists."""
    place = path.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    return place


def check_io(io: str) -> None:
    """Refuse what `offload.io` cannot be."""
    if io not in IO_NAMES:
        raise ConfigError(f"offload.io is {io!r}; it must be one of {', '.join(IO_NAMES)}")


def choose_transfer(directory: Path, direct: bool, io: str = "auto") -> NativeTransfer:
    """The back end for files in `directory` (`direct`: opened with O_DIRECT), tried there, as `offload.io` wishes.

    Raises `ConfigError` where the one asked for does not work, `DiskFailed` where none does, `OSError` where the
    directory cannot be written.
    """
    check_io(io)
    why = "" if direct or io != "auto" else "without direct I/O it only adds threads of the kernel"
    if io != "threads" and not why:
        try:
            ring = RingTransfer()
        except OSError as error:
            why = f"a ring was refused ({_number(error)})"
        else:
            why = _tried(ring, directory, direct)
            if not why:
                return ring
    if io == "io_uring":
        raise ConfigError(f'offload.io = "io_uring" does not work in {directory}: {why}; write "auto" or "threads"')
    threads = ThreadTransfer(name=f"threads (io_uring dropped: {why})" if why else "threads")
    found = _tried(threads, directory, direct)
    if found:
        raise DiskFailed(errno.EIO, f"swap path {directory}: not even plain reads and writes work there: {found}")
    return threads


def _number(error: OSError) -> str:
    return f"{errno.errorcode.get(error.errno or 0, '?')} {error.errno}: {error.strerror}"


def _tried(transfer: NativeTransfer, directory: Path, direct: bool) -> str:
    """Why a back end does not work in a directory, and it is closed then; "" if it does."""
    why = "closed by an error"
    try:
        why = _round_trip(transfer, directory, direct)
    except TransferFailed as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        why = f"a {error.operation} of {error.wanted_bytes} bytes moved {error.found_bytes} ({_number(error)})"
    except TransferDamaged as error:
        why = f"it read back other bytes than written ({error})"
    finally:
        if why:
            transfer.close()
    return why


def _round_trip(transfer: NativeTransfer, directory: Path, direct: bool) -> str:
    memory = HostPool(needed_bytes([_PROBE_BYTES] * 2))
    data, back = memory.take("written", _PROBE_BYTES), memory.take("read", _PROBE_BYTES)
    data.copy_(torch.frombuffer(bytearray(os.urandom(_PROBE_BYTES)), dtype=torch.uint8))
    table = torch.full((-(-_PROBE_BYTES // PIECE_BYTES),), native.NEVER_WRITTEN)
    fd = _open(directory, direct)
    try:
        transfer.write(fd, data, _PROBE_BYTES, 0, table)
        transfer.read(fd, back, _PROBE_BYTES, 0, table)
    finally:
        os.close(fd)
    return transfer._fell or ("" if torch.equal(data, back) else "it read back other bytes than written")


def _open(directory: Path, direct: bool) -> int:
    """A file that is gone when it is closed, or when this process is killed."""
    path = probe_path(directory)
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    fd = os.open(path, flags | (os.O_DIRECT if direct else 0), 0o600)
    path.unlink()
    return fd


class Speed(NamedTuple):
    """Bytes per second of one path: reads, writes over old bytes, and first writes into reserved room."""

    read_bps: float
    write_bps: float
    fresh_bps: float


def probe_speed(directory: Path, transfer: NativeTransfer, direct: bool, nbytes: int = 128 << 20) -> Speed:
    """How fast `directory` reads and writes, by a file of `nbytes` there, removed afterwards.

    About 0.2 s on a drive of 3 GB/s.  One try on a machine that does other things is good to some 20 %: enough for the
    shares of several paths, too little to compare back ends (`benchmarks/disk.py` does that).
    """
    memory = HostPool(nbytes)
    data = memory.take("data", nbytes)
    for start in range(0, nbytes, PIECE_BYTES):  # bytes that no drive can leave out
        data[start : start + PAGE_BYTES].random_()
    fd = _open(directory, direct)
    try:
        os.posix_fallocate(fd, 0, nbytes)
        fresh_s, write_s = (_timed(transfer.write, fd, data, direct, written=True) for _ in range(2))
        read_s = _timed(transfer.read, fd, data, direct, written=False)
    finally:
        os.close(fd)
    return Speed(nbytes / read_s, nbytes / write_s, nbytes / fresh_s)


def _timed(move: object, fd: int, data: Tensor, direct: bool, written: bool) -> float:
    begin = time.perf_counter()
    move(fd, data, data.nbytes, 0, None)  # type: ignore[operator]
    if not direct:
        drop_cache(fd, 0, data.nbytes, written)
    return max(time.perf_counter() - begin, 1e-9)
