"""The disk tier: named extents in a run's private directory, every piece of 1 MiB checked on every read.

A tier owns one directory of one swap path (`swapdir.py`) with two areas: `state/` (training state) and `scratch/`
(gradients, activations).  Files are named by role, extents by parameter or unit, so names never change from run to run.
Left to others: which thread calls (reads and writes block, and several threads may call at once), and how bytes are
moved (`tier.Transfer`, handed in and owned from then on).  The trade-off: checksums live in memory (8 bytes a MiB) and
are taken of what was handed over, so a flipped bit is found when it is read and costs about one pass over the buffer;
`checksum=False` saves that pass and keeps only the flag "never written".  With `copies` above 1 state extents exist
that often and are crash-safe (`shadow.py`).
"""

from __future__ import annotations

import ctypes
import errno
import json
import logging
import os
import re
import threading
import weakref
from itertools import groupby
from pathlib import Path

import torch

from offloadz.memory.copies import copy_file
from offloadz.memory.direct import CACHE_STEP_BYTES, drop_cache, probe_direct
from offloadz.memory.record import Saved
from offloadz.memory.rows import RowReader
from offloadz.memory.shadow import Shadow, make_durable
from offloadz.memory.swapdir import Leftover, SwapDir, leftovers, remove
from offloadz.memory.tier import (
    NEVER_WRITTEN,
    NOT_CHECKED,
    NOT_WHOLE,
    PAGE_BYTES,
    PIECE_BYTES,
    Extent,
    Transfer,
    TransferDamaged,
    TransferFailed,
    rounded,
)
from offloadz.plan.errors import DamagedState, DiskFailed, DoesNotFit
from offloadz.plan.machine import disk_free

__all__ = ["AREAS", "DiskTier", "Extent", "Leftover", "leftovers", "remove"]

log = logging.getLogger("offloadz")

AREAS = ("state", "scratch")
INDEX_FILE = "extents.json"
_ROLE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


class DiskTier:
    """Extents in `<directory>/offloadz-<hash of owner>`, moved by `io`.

    `owner` is `swapdir.owner_name(output)`.  `notes` are the lines a user should see at the start (direct I/O refused,
    RAM-backed path, dead runs' leftovers); they are also logged.  `bytes_read` and `bytes_written` count what went
    over the bus, padding included.  Once made, the tier owns `io` and closes it.  Raises `ConfigError` where the
    directory is in use, `DiskFailed` where it cannot be written.

    `copies`: of everything in `state/`; above 1 there is a `shadow`, and `adopt` may be state to go on from, with
    `checkpoints` the directory of those that may hold links to it.
    """

    def __init__(
        self,
        directory: str | Path,
        io: Transfer,
        *,
        checksum: bool = True,
        owner: str,
        copies: int = 1,
        adopt: Saved | None = None,
        checkpoints: Path | None = None,
    ) -> None:
        self._io = io
        self.checksum = checksum
        self.bytes_read = 0
        self.bytes_written = 0
        self._ends: dict[str, int] = {}  # bytes reserved per file
        self._pending: list[Extent] = []  # reserved and not yet allocated
        self._names: set[tuple[str, str]] = set()
        self._sizes: dict[str, int] = {}  # bytes allocated per file
        self._fds: dict[str, int] = {}
        self._tables: dict[Extent, torch.Tensor] = {}  # a checksum or a flag per piece
        self._count = threading.Lock()
        self._rows = RowReader()
        self._swap = SwapDir(directory, owner, adopt.directory if adopt else None)
        self.path = self._swap.path
        self.shadow = Shadow(self.path, copies, self._fds, adopt, checkpoints) if copies > 1 else None
        # Also at exit, and when an exception drops the tier; in a forked child it does nothing.
        self._end = weakref.finalize(self, _abandon, self._fds, self._swap, self.shadow)
        try:
            for area in AREAS:
                (self.path / area).mkdir(mode=0o700, exist_ok=True)
            self.probe = probe_direct(self.path)
        except OSError as error:
            self._end()
            number = error.errno or errno.EIO
            free = f", {disk_free(directory)} bytes are free" if number in (errno.ENOSPC, errno.EDQUOT) else ""
            text = f"swap path {directory}: {os.strerror(number)} at the first write ({error.filename}){free}"
            raise DiskFailed(number, text) from error
        self.notes = self.probe.lines(self.path) + self._found_notes(Path(directory))
        for line in self.notes:
            log.warning("%s", line)

    def _found_notes(self, directory: Path) -> list[str]:
        notes = []
        if self._swap.taken_over_bytes:
            taken = self._swap.taken_over_bytes
            notes.append(f"{self.path}: removed {taken} bytes that a dead run of the same output left")
        others = leftovers(directory)
        if others:
            total = sum(leftover.size_bytes for leftover in others)
            shown = "; ".join(str(leftover) for leftover in others[:5])
            notes.append(
                f"swap path {directory}: dead runs left {total} bytes in {len(others)} directories"
                f" ({shown}); `offloadz check --clean` removes them"
            )
        return notes

    @property
    def io_name(self) -> str:
        """How bytes are moved and why not otherwise, for the line at the start."""
        return self._io.name

    def fix(self, buffer: torch.Tensor) -> None:
        """Say that `buffer` will be read into and written from again and again, and stays until `close`."""
        self._io.fix(buffer)

    def reserve(self, area: str, name: str, nbytes: int) -> Extent:
        """Plan `nbytes` for `name` ("role/parameter or unit") in `area`; `allocate` then takes the room.

        All extents of a role lie in one file, in the order of the calls.
        """
        role = name.partition("/")[0]
        file = f"{area}/{role}.bin"
        if area not in AREAS or not _ROLE.fullmatch(role):
            raise ValueError(f"disk tier: {file!r} is no file of a tier; areas are {AREAS}, roles are plain words")
        if nbytes < 0:
            raise ValueError(f"disk tier: {name!r} asks for {nbytes} bytes, needs 0 or more")
        if (file, name) in self._names:
            raise ValueError(f"disk tier: {name!r} was reserved in {area}/ before")
        self._names.add((file, name))
        extent = Extent(file, self._ends.get(file, 0), nbytes, name)
        self._ends[file] = extent.offset + rounded(nbytes)
        self._pending.append(extent)
        return extent

    def allocate(self) -> None:
        """Take the room of everything reserved so far, so that a full drive shows now and not in a step.

        Raises `DoesNotFit` with path, needed and free bytes (nothing of this call stays taken), or `DiskFailed`.
        """
        if self.shadow is not None and self.shadow.adopt is not None and not self.shadow.copies.extents:
            self._open_adopted(self.shadow)
        ends = self._ends if self.shadow is None else self.shadow.files(self._ends)
        before = dict(self._sizes)
        missing_bytes = sum(end - before.get(file, 0) for file, end in ends.items())
        free_bytes = disk_free(self.path)
        if missing_bytes > free_bytes:
            raise self._no_room(missing_bytes, free_bytes)
        try:
            for file, end in ends.items():
                self._grow(file, before.get(file, 0), end)
            if self.shadow is not None:
                make_durable(self.path)
        except OSError as error:
            for file, fd in self._fds.items():
                os.ftruncate(fd, before.get(file, 0))
            self._sizes = before
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise self._no_room(missing_bytes, free_bytes) from error
            number = error.errno or errno.EIO
            text = f"{os.strerror(number)}: reserving {missing_bytes} bytes in {self.path} failed"
            raise DiskFailed(number, text) from error
        for extent in self._pending:
            if self.shadow is not None and extent.file.startswith("state/"):
                if extent not in self.shadow.copies:
                    self.shadow.copies.add(extent)
            else:
                self._tables[extent] = torch.full((extent.num_pieces,), NEVER_WRITTEN, dtype=torch.int64)
        self._pending.clear()

    def _open_adopted(self, shadow: Shadow) -> None:
        """The files of state to go on from, with room wherever there are holes."""
        ends = {file: end for file, end in self._ends.items() if file.startswith("state/")}
        there = shadow.take_over([e for e in self._pending if e.file.startswith("state/")], ends)
        for file, length in there.items():
            try:
                self._grow(file, 0, length)
            except OSError as error:
                number = error.errno or errno.EIO
                if number in (errno.ENOSPC, errno.EDQUOT):
                    raise self._no_room(length, disk_free(self.path)) from error
                raise DiskFailed(number, f"{os.strerror(number)}: reserving {self.path / file} failed") from error

    def _no_room(self, missing_bytes: int, free_bytes: int) -> DoesNotFit:
        return DoesNotFit(
            f"swap path {self.path}: {missing_bytes} bytes are needed, {free_bytes} are free;"
            " free some or name a larger drive in offload.swap"
        )

    def _grow(self, file: str, start: int, end: int) -> None:
        path = self.path / file
        if file not in self._fds:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            self._fds[file] = os.open(path, flags | (os.O_DIRECT if self.probe.direct else 0), 0o600)
            if not self.probe.direct:  # no read-ahead: nobody would drop those pages
                os.posix_fadvise(self._fds[file], 0, 0, os.POSIX_FADV_RANDOM)
        if end > start:
            # By a descriptor of its own: where a file system has no fallocate, libc writes single bytes instead.
            plain = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                os.posix_fallocate(plain, start, end - start)
            finally:
                os.close(plain)
        self._sizes[file] = end

    def read(self, extent: Extent, buffer: torch.Tensor, nbytes: int | None = None, offset: int = 0) -> None:
        """Read `nbytes` (the rest if None) at `offset` of `extent` into the start of the uint8 `buffer`.

        `offset` is a multiple of 1 MiB, `nbytes` too unless it ends the extent.  `buffer` is 4096-aligned and at least
        `rounded(nbytes)` long; the padding reads as zeros, and so do pieces never written.  Raises `DamagedState`
        (a checksum differs) or `DiskFailed`.
        """
        nbytes = self._checked(extent, buffer, nbytes, offset)
        file, table = self._spot(extent, nbytes, offset)
        done = 0
        for flag, group in groupby(table.tolist(), key=lambda entry: NOT_CHECKED if entry >= 0 else entry):
            run = min(sum(PIECE_BYTES for _ in group), rounded(nbytes) - done)
            if flag == NOT_WHOLE:
                raise self._not_whole(extent, file, offset + done)
            if flag == NEVER_WRITTEN:
                # Not `zero_`: torch would start a team of threads for this lane (see `runtime/lanes.py`).
                ctypes.memset(buffer.data_ptr() + done, 0, run)
            else:
                self._move("read", extent, file, buffer[done : done + run], offset + done, table[done // PIECE_BYTES :])
                with self._count:
                    self.bytes_read += run
            done += run

    def write(self, extent: Extent, buffer: torch.Tensor, nbytes: int | None = None, offset: int = 0) -> None:
        """Write `nbytes` of the uint8 `buffer` at `offset` of `extent`; bounds as in `read`.

        The padding behind `nbytes` in `buffer` is set to zero first.  Until the call has returned the pieces count as
        not whole: where it fails (`DiskFailed`), reading them is `DamagedState` until they are written again.  An
        extent that exists in copies is written whole.
        """
        if self.shadow is not None and extent in self.shadow.copies and nbytes not in (None, extent.nbytes):
            raise ValueError(f"disk tier: {extent.label!r} exists in copies and is written whole, not {nbytes} bytes")
        nbytes = self._checked(extent, buffer, nbytes, offset)
        file, table = self._spot(extent, nbytes, offset, writing=True)
        length = rounded(nbytes)
        buffer[nbytes:length].zero_()
        table.fill_(NOT_WHOLE)
        fresh = torch.full_like(table, NOT_CHECKED)
        self._move("write", extent, file, buffer[:length], offset, fresh)
        table.copy_(fresh)
        with self._count:
            self.bytes_written += length

    def read_rows(self, extent: Extent, row_bytes: int, first_byte: int, rows: torch.Tensor, out: torch.Tensor) -> None:
        """Fill `out` (len(rows), row_bytes) uint8 with the `rows` (int64, sorted, unique) of a table in `extent`.

        The table starts `first_byte` bytes into the extent.  Only pieces that hold a wanted row are read, each whole
        and checked; a row may lie across pieces.  One call at a time stages in 4 MiB of memory.
        """
        self._rows.read_rows(self.read, extent, row_bytes, first_byte, rows, out)

    def _spot(self, extent: Extent, nbytes: int, offset: int, writing: bool = False) -> tuple[str, torch.Tensor]:
        """The file a transfer goes to or comes from, and its part of the checksum table."""
        file, table = extent.file, self._tables.get(extent)
        if self.shadow is not None and table is None:
            copies = self.shadow.copies
            copy = copies.to_write(extent) if writing else copies.newest(extent)
            file, table = copy_file(extent.file, copy), copies.table(extent, copy)
        assert table is not None  # `_checked` has looked
        first = offset // PIECE_BYTES
        return file, table[first : first + -(-nbytes // PIECE_BYTES)]

    def _checked(self, extent: Extent, buffer: torch.Tensor, nbytes: int | None, offset: int) -> int:
        """The length of a transfer, once it is known to be possible."""
        nbytes = extent.nbytes - offset if nbytes is None else nbytes
        where = f"disk tier: {extent.label!r} ({extent.nbytes} bytes)"
        known = extent in self._tables or (self.shadow is not None and extent in self.shadow.copies)
        if not self._fds or not known:
            raise ValueError(f"{where} has no room: the tier is closed, or allocate() was not called after reserve()")
        if offset < 0 or nbytes < 0 or offset + nbytes > extent.nbytes:
            raise ValueError(f"{where}: {nbytes} bytes at {offset} do not lie in it")
        if offset % PIECE_BYTES or (nbytes % PIECE_BYTES and offset + nbytes != extent.nbytes):
            raise ValueError(f"{where}: {nbytes} bytes at {offset} are no whole pieces of {PIECE_BYTES} bytes")
        length = rounded(nbytes)
        if buffer.dtype != torch.uint8 or buffer.device.type != "cpu" or not buffer.is_contiguous():
            raise ValueError(f"{where}: the buffer must be contiguous uint8 on the CPU, it is {buffer.dtype}")
        if buffer.numel() < length:
            raise ValueError(f"{where}: the buffer has {buffer.numel()} bytes, needs {length} (whole pages)")
        if length and buffer.data_ptr() % PAGE_BYTES:
            raise ValueError(f"{where}: the buffer's address is no multiple of {PAGE_BYTES}; take it from a HostPool")
        return nbytes

    def _move(
        self, operation: str, extent: Extent, file: str, buffer: torch.Tensor, offset: int, table: torch.Tensor
    ) -> None:
        """One run of pieces: in one transfer if direct, else in steps that keep the page cache small."""
        step = max(1, buffer.numel()) if self.probe.direct else CACHE_STEP_BYTES
        fd = self._fds[file]
        move = self._io.read if operation == "read" else self._io.write
        for start in range(0, buffer.numel(), step):
            part = buffer[start : start + step]
            at = extent.offset + offset + start
            pieces = range(0, part.numel(), PIECE_BYTES)
            crcs = table[start // PIECE_BYTES :][: len(pieces)] if self.checksum else None
            try:
                move(fd, part, part.numel(), at, crcs)
                if not self.probe.direct:
                    drop_cache(fd, at, part.numel(), operation == "write")
            except TransferDamaged as error:
                if self.shadow is not None and file.startswith("state/"):
                    self.shadow.distrust()
                raise DamagedState(
                    f"{extent.label}: file {self.path / file} is damaged at byte {error.offset}: the piece read"
                    f" has CRC32C {error.found:#010x}, {error.expected:#010x} was written; the state cannot be trusted,"
                    " go back to the last checkpoint and check the drive"
                ) from error
            except OSError as error:
                raise self._failed(operation, extent, file, at, part.numel(), error) from error

    def _failed(self, operation: str, extent: Extent, file: str, at: int, wanted: int, error: OSError) -> DiskFailed:
        found = 0
        if isinstance(error, TransferFailed):
            operation, at, wanted, found = error.operation, error.offset, error.wanted_bytes, error.found_bytes
        number = error.errno or errno.EIO
        reason = os.strerror(number) if error.errno else "the transfer stays short"
        free = f", {disk_free(self.path)} bytes are free" if number in (errno.ENOSPC, errno.EDQUOT) else ""
        return DiskFailed(
            number,
            f"{operation} of {extent.label} failed: {reason}; file {self.path / file}, offset {at}, wanted"
            f" {wanted} bytes, found {found}{free}",
        )

    def _not_whole(self, extent: Extent, file: str, offset: int) -> DamagedState:
        return DamagedState(
            f"{extent.label}: file {self.path / file} at byte {extent.offset + offset} was left half-written by"
            " a write that failed (or is still under way); go back to the last checkpoint"
        )

    def close(self, keep_state: bool = False) -> None:
        """End the transfers' threads, close the files and remove the directory; calling it twice is allowed.

        `keep_state=True` keeps `state/` on disk, flushed, with `extents.json` (place, length, label and checksums of
        every extent); `scratch/` goes in any case.  State in copies that is `shadow.worth_keeping` stays by itself.
        """
        if not self._end.alive:
            return
        self._io.close()
        self._rows.close()
        try:
            if keep_state:
                self._write_index()
            elif self.shadow is not None and not self.shadow.worth_keeping:
                self.shadow.give_room_back()
        except OSError as error:
            number = error.errno or errno.EIO
            text = f"{os.strerror(number)}: the index of the state in {self.path} could not be written; its files stay"
            raise DiskFailed(number, text) from error
        finally:
            if keep_state:
                self._swap.remove(keep=True)
            self._end()

    def _write_index(self) -> None:
        kept = []
        for extent, table in self._tables.items():
            if extent.file.startswith("state/"):
                place = {"file": extent.file, "offset": extent.offset, "nbytes": extent.nbytes, "label": extent.label}
                kept.append(place | {"crc32c": table.tolist()})
        for file, fd in self._fds.items():
            if file.startswith("state/"):
                os.fsync(fd)
        fd = os.open(self.path / "state" / INDEX_FILE, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "w") as index:
            json.dump(kept, index)
            index.flush()
            os.fsync(index.fileno())


def _abandon(fds: dict[str, int], swap: SwapDir, shadow: Shadow | None) -> None:
    """What must happen even if nobody calls `close`: descriptors closed, directory gone (unless kept before, or its
    state is newer than every checkpoint)."""
    for fd in fds.values():
        os.close(fd)
    fds.clear()
    swap.remove(shadow is not None and shadow.worth_keeping)
