"""The files of a run in one swap path: its private directory, open descriptors, their room, and bytes moved by `io`.

Files are called by role (`state/weights.bin`) and stay open for the whole run.  Every failure names its path, so a run
on several drives says which one it was.  Left to others: what lies where in the files, checksums, copies and shares
(`disk.py`), the life of the directory (`swapdir.py`), how bytes are moved (`tier.Transfer`).  The trade-off: room is
taken for whole files, so one that is to grow is filled up where it has holes.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from pathlib import Path

import torch

from offloadz.memory.direct import CACHE_STEP_BYTES, drop_cache, probe_direct
from offloadz.memory.swapdir import SwapDir
from offloadz.memory.tier import PIECE_BYTES, Transfer, TransferDamaged, TransferFailed
from offloadz.plan.errors import DamagedState, DiskFailed, DoesNotFit
from offloadz.plan.machine import disk_free

AREAS = ("state", "scratch")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class SwapFiles:
    """The open files in `<directory>/offloadz-<hash of owner>`; `keep` as in `SwapDir`.

    Raises `ConfigError` where the directory is in use, `DiskFailed` where it cannot be written.
    """

    def __init__(self, directory: str | Path, io: Transfer, owner: str, keep: Path | None = None) -> None:
        self.io = io
        self.fds: dict[str, int] = {}
        self.sizes: dict[str, int] = {}
        """Bytes allocated per file."""
        self._swap = SwapDir(directory, owner, keep)
        self.path, self.taken_over_bytes = self._swap.path, self._swap.taken_over_bytes
        try:
            for area in AREAS:
                (self.path / area).mkdir(mode=0o700, exist_ok=True)
            self.probe = probe_direct(self.path)
        except OSError as error:
            self.end()
            number = error.errno or errno.EIO
            free = f", {disk_free(directory)} bytes are free" if number in (errno.ENOSPC, errno.EDQUOT) else ""
            text = f"swap path {directory}: {os.strerror(number)} at the first write ({error.filename}){free}"
            raise DiskFailed(number, text) from error

    def take(self, ends: Mapping[str, int]) -> None:
        """Room for files of these lengths.  Raises `DoesNotFit` with path, needed and free bytes, or `DiskFailed`."""
        missing_bytes = sum(max(0, end - self._held(file)) for file, end in ends.items())
        free_bytes = disk_free(self.path)
        if missing_bytes > free_bytes:
            raise self._no_room(missing_bytes, free_bytes)
        try:
            for file, end in ends.items():
                self._grow(file, end)
        except OSError as error:
            if error.errno in _FULL:
                raise self._no_room(missing_bytes, free_bytes) from error
            number = error.errno or errno.EIO
            text = f"{os.strerror(number)}: reserving {missing_bytes} bytes in {self.path} failed"
            raise DiskFailed(number, text) from error

    def _held(self, file: str) -> int:
        """Bytes that a file has room for: one that was there before may have holes."""
        path = self.path / file
        if file in self.sizes or not path.exists():
            return self.sizes.get(file, 0)
        return path.stat().st_blocks * 512

    def cut(self, sizes: Mapping[str, int]) -> None:
        """Give back what was taken beyond these sizes."""
        for file, fd in self.fds.items():
            os.ftruncate(fd, sizes.get(file, 0))
        self.sizes = dict(sizes)

    def _no_room(self, missing_bytes: int, free_bytes: int) -> DoesNotFit:
        return DoesNotFit(
            f"swap path {self.path}: {missing_bytes} bytes are needed, {free_bytes} are free;"
            " free some or name a larger drive in offload.swap"
        )

    def _grow(self, file: str, end: int) -> None:
        path, start = self.path / file, self.sizes.get(file, 0)
        if file not in self.fds:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            self.fds[file] = os.open(path, flags | (os.O_DIRECT if self.probe.direct else 0), 0o600)
            if not self.probe.direct:  # no read-ahead: nobody would drop those pages
                os.posix_fadvise(self.fds[file], 0, 0, os.POSIX_FADV_RANDOM)
        if end > start:
            # By a descriptor of its own: where a file system has no fallocate, libc writes single bytes instead.
            plain = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                os.posix_fallocate(plain, start, end - start)
            finally:
                os.close(plain)
        self.sizes[file] = end

    def move(
        self, operation: str, label: str, file: str, buffer: torch.Tensor, offset: int, table: torch.Tensor | None
    ) -> None:
        """One run of pieces at `offset` of a file: in one transfer if direct, else in steps that keep the page cache
        small.  `operation`: read or write; `table`: a checksum per piece, None where they are off.  Raises
        `DamagedState` or `DiskFailed`, with path and `label`."""
        step = max(1, buffer.numel()) if self.probe.direct else CACHE_STEP_BYTES
        fd = self.fds[file]
        move = self.io.read if operation == "read" else self.io.write
        for start in range(0, buffer.numel(), step):
            part = buffer[start : start + step]
            at = offset + start
            pieces = range(0, part.numel(), PIECE_BYTES)
            crcs = table[start // PIECE_BYTES :][: len(pieces)] if table is not None else None
            try:
                move(fd, part, part.numel(), at, crcs)
                if not self.probe.direct:
                    drop_cache(fd, at, part.numel(), operation == "write")
            except TransferDamaged as error:
                raise DamagedState(
                    f"{label}: file {self.path / file} is damaged at byte {error.offset}: the piece read"
                    f" has CRC32C {error.found:#010x}, {error.expected:#010x} was written; the state cannot be trusted,"
                    " go back to the last checkpoint and check the drive"
                ) from error
            except OSError as error:
                raise self._failed(operation, label, file, at, part.numel(), error) from error

    def _failed(self, operation: str, label: str, file: str, at: int, wanted: int, error: OSError) -> DiskFailed:
        found = 0
        if isinstance(error, TransferFailed):
            operation, at, wanted, found = error.operation, error.offset, error.wanted_bytes, error.found_bytes
        number = error.errno or errno.EIO
        reason = os.strerror(number) if error.errno else "the transfer stays short"
        free = f", {disk_free(self.path)} bytes are free" if number in (errno.ENOSPC, errno.EDQUOT) else ""
        return DiskFailed(
            number,
            f"{operation} of {label} failed: {reason}; file {self.path / file}, offset {at}, wanted"
            f" {wanted} bytes, found {found}{free}",
        )

    def end(self, keep_state: bool = False) -> None:
        """Close the files and remove the directory, all of it or all but `state/`; a second call does nothing."""
        for fd in self.fds.values():
            os.close(fd)
        self.fds.clear()
        self._swap.remove(keep_state)
