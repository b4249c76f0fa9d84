"""The disk tier: named extents in a run's private directories, every piece of 1 MiB checked on every read.

A tier owns one directory in each swap path (`swapfiles.py`) with two areas: `state/` (training state) and `scratch/`
(gradients, activations).  Files are named by role, extents by parameter or unit, so names never change from run to run.
An extent is its shares, one on each path (`stripes.py`), which are moved at the same time; on one path it is its only
share.  Left to others: which thread calls (reads and writes block, and several threads may call at once), and how bytes
are moved (`tier.Transfer`, handed in and owned from then on).  The trade-off: checksums live in memory (8 bytes a MiB)
and are taken of what was handed over, so a flipped bit is found when it is read and costs about one pass over the
buffer; `checksum=False` saves that pass and keeps only the flag "never written".  With `copies` above 1 state extents
exist that often and are crash-safe (`shadow.py`).
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
from collections import ChainMap, Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path

import torch

from offloadz.memory.copies import copy_file
from offloadz.memory.direct import Probe
from offloadz.memory.record import Saved
from offloadz.memory.rows import RowReader
from offloadz.memory.shadow import Shadow, make_durable
from offloadz.memory.stripes import WEIGHT_SUM, Together, file_on, path_of, shares
from offloadz.memory.swapdir import Leftover, leftovers, remove
from offloadz.memory.swapfiles import AREAS, SwapFiles
from offloadz.memory.tier import (
    NEVER_WRITTEN,
    NOT_CHECKED,
    NOT_WHOLE,
    PAGE_BYTES,
    PIECE_BYTES,
    Extent,
    Transfer,
)
from offloadz.plan.errors import DamagedState, DiskFailed, DoesNotFit
from offloadz.plan.paths import held_bytes
from offloadz.plan.spec import aligned

__all__ = ["AREAS", "DiskTier", "Extent", "Leftover", "leftovers", "remove"]

log = logging.getLogger("offloadz")

INDEX_FILE = "extents.json"
_ROLE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


class DiskTier:
    """Extents in `<directory>/offloadz-<hash of owner>`, moved by `io`, and on as many `others` (directory, io).

    `owner` is `swapdir.owner_name(output)`.  `notes` are the lines a user should see at the start (direct I/O refused,
    RAM-backed path, dead runs' leftovers); they are also logged.  `bytes_read` and `bytes_written` count what went
    over the bus, padding included.  Once made, the tier owns each `io` and closes it.  Raises `ConfigError` where a
    directory is in use, `DiskFailed` where it cannot be written.

    `copies`: of everything in `state/`; above 1 there is a `shadow`, and `adopt` may be state to go on from, with as
    many directories, and `checkpoints` the directory of those that may hold links to it.  `first`: number of the first
    path among those of all ranks.  `weights`: how much of an extent each path gets; equal, or those of `adopt`, unless
    they are set before the first `reserve`.
    """

    def __init__(
        self,
        directory: str | Path,
        io: Transfer,
        *others: tuple[str | Path, Transfer],
        checksum: bool = True,
        owner: str,
        copies: int = 1,
        adopt: Saved | None = None,
        checkpoints: Path | None = None,
        first: int = 0,
    ) -> None:
        self.checksum, self._first = checksum, first
        self.bytes_read = 0
        self.bytes_written = 0
        self._shares: dict[Extent, tuple[Extent, ...]] = {}
        self._turns: Counter[str] = Counter()  # extents reserved per role
        self._ends: dict[str, int] = {}  # bytes reserved per file
        self._pending: list[Extent] = []  # shares reserved and not yet allocated
        self._names: set[tuple[str, str]] = set()
        self._tables: dict[Extent, torch.Tensor] = {}  # a checksum or a flag per piece of a share
        self._count = threading.Lock()
        self._rows = RowReader()
        self.paths = _opened([(directory, io), *others], owner, adopt)
        self.path = self.paths[0].path
        equal = tuple(WEIGHT_SUM // len(self.paths) for _ in self.paths)
        self.weights: tuple[int, ...] = adopt.weights if adopt else equal
        self._together = Together(len(self.paths))
        fds = ChainMap(*(files.fds for files in self.paths))
        places = [files.path for files in self.paths]
        self.shadow = Shadow(places, copies, fds, adopt, checkpoints, first) if copies > 1 else None
        # Also at exit, and when an exception drops the tier; in a forked child it does nothing.
        self._end = weakref.finalize(self, _abandon, self.paths, self.shadow)
        self.notes = [note for files in self.paths for note in _found_notes(files)]
        for line in self.notes:
            log.warning("%s", line)

    @property
    def probe(self) -> Probe:
        """What the first path can do."""
        return self.paths[0].probe

    @property
    def io_name(self) -> str:
        """How bytes are moved and why not otherwise, for the line at the start."""
        return "; ".join(dict.fromkeys(files.io.name for files in self.paths))

    def held_bytes(self) -> int:
        """What the directories of all paths take on their drives."""
        return held_bytes(*(files.path for files in self.paths))

    def fix(self, buffer: torch.Tensor) -> None:
        """Say that `buffer` will be read into and written from again and again, and stays until `close`."""
        for files in self.paths:
            files.io.fix(buffer)

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
        found = []
        for path, share_bytes in _of_paths(nbytes, self.weights, self._turns[file]):
            own = file_on(self._first + path, file)
            found.append(Extent(own, self._ends.get(own, 0), share_bytes, name))
            self._ends[own] = found[-1].offset + aligned(share_bytes)
        self._turns[file] += 1
        self._pending += found
        extent = Extent(found[0].file, found[0].offset, nbytes, name)
        self._shares[extent] = tuple(found)
        return extent

    def allocate(self) -> None:
        """Take the room of everything reserved so far, so that a full drive shows now and not in a step.

        Raises `DoesNotFit` with path, needed and free bytes (nothing of this call stays taken), or `DiskFailed`.
        """
        if self.shadow is not None and self.shadow.adopt is not None and not self.shadow.copies.extents:
            state = {file: end for file, end in self._ends.items() if file.startswith("state/")}
            self._take(self.shadow.take_over([e for e in self._pending if e.file in state], state))
        before = [dict(files.sizes) for files in self.paths]
        try:
            self._take(self._ends if self.shadow is None else self.shadow.files(self._ends))
            if self.shadow is not None:
                make_durable(files.path for files in self.paths)
        except (OSError, DoesNotFit) as error:
            for files, sizes in zip(self.paths, before, strict=True):
                files.cut(sizes)
            if isinstance(error, DoesNotFit | DiskFailed):
                raise
            number = error.errno or errno.EIO
            raise DiskFailed(number, f"{os.strerror(number)}: the names in {self.path} were not flushed") from error
        for share in self._pending:
            if self.shadow is not None and share.file.startswith("state/"):
                if share not in self.shadow.copies:
                    self.shadow.copies.add(share)
            else:
                self._tables[share] = torch.full((share.num_pieces,), NEVER_WRITTEN, dtype=torch.int64)
        self._pending.clear()

    def _take(self, ends: Mapping[str, int]) -> None:
        for number, files in enumerate(self.paths, self._first):
            files.take({file: end for file, end in ends.items() if path_of(file) == number})

    def read(self, extent: Extent, buffer: torch.Tensor, nbytes: int | None = None, offset: int = 0) -> None:
        """Read `nbytes` (the rest if None) at `offset` of `extent` into the start of the uint8 `buffer`.

        `offset` is a multiple of 1 MiB, `nbytes` too unless it ends the extent.  `buffer` is 4096-aligned and at least
        `aligned(nbytes)` long; the padding reads as zeros, and so do pieces never written.  Raises `DamagedState`
        (a checksum differs) or `DiskFailed`.
        """
        self._run(self._read, extent, buffer, self._checked(extent, buffer, nbytes, offset), offset)

    def _read(self, share: Extent, buffer: torch.Tensor, nbytes: int, offset: int) -> None:
        file, table = self._spot(share, nbytes, offset)
        done = 0
        for flag, group in groupby(table.tolist(), key=lambda entry: NOT_CHECKED if entry >= 0 else entry):
            run = min(sum(PIECE_BYTES for _ in group), aligned(nbytes) - done)
            if flag == NOT_WHOLE:
                raise self._not_whole(share, file, offset + done)
            if flag == NEVER_WRITTEN:
                # Not `zero_`: torch would start a team of threads for this lane (see `runtime/lanes.py`).
                ctypes.memset(buffer.data_ptr() + done, 0, run)
            else:
                self._move("read", share, file, buffer[done : done + run], offset + done, table[done // PIECE_BYTES :])
                with self._count:
                    self.bytes_read += run
            done += run

    def write(self, extent: Extent, buffer: torch.Tensor, nbytes: int | None = None, offset: int = 0) -> None:
        """Write `nbytes` of the uint8 `buffer` at `offset` of `extent`; bounds as in `read`.

        The padding behind `nbytes` in `buffer` is set to zero first.  Until the call has returned the pieces count as
        not whole: where it fails (`DiskFailed`), reading them is `DamagedState` until they are written again.  An
        extent that exists in copies is written whole.
        """
        copied = self.shadow is not None and extent.file.startswith("state/")
        if copied and nbytes not in (None, extent.nbytes):
            raise ValueError(f"disk tier: {extent.label!r} exists in copies and is written whole, not {nbytes} bytes")
        self._run(self._write, extent, buffer, self._checked(extent, buffer, nbytes, offset), offset)

    def propose(self, extent: Extent) -> None:
        """What is written to an extent in copies is read only after `shadow.copies.decide(True)`, until then what was
        valid before.  What was written at rest and never flipped is made valid first.  Raises DiskFailed."""
        if self.shadow is None:
            raise ValueError(f"disk tier: {extent.label!r} is not in copies, so nothing can be proposed beside it")
        for share in self._shares[extent]:
            self.shadow.propose(share)

    def _write(self, share: Extent, buffer: torch.Tensor, nbytes: int, offset: int) -> None:
        file, table = self._spot(share, nbytes, offset, writing=True)
        length = aligned(nbytes)
        # Not `zero_`: to autograd that is a change of weights that are stored while a block computes from them.
        ctypes.memset(buffer.data_ptr() + nbytes, 0, length - nbytes)
        table.fill_(NOT_WHOLE)
        fresh = torch.full_like(table, NOT_CHECKED)
        self._move("write", share, file, buffer[:length], offset, fresh)
        table.copy_(fresh)
        with self._count:
            self.bytes_written += length

    def _run(self, move: Callable[..., None], extent: Extent, buffer: torch.Tensor, nbytes: int, offset: int) -> None:
        """One transfer: the parts of its shares at once, the buffer's in order."""
        moves, start = [], 0
        for share in self._shares[extent]:
            low, high = max(offset, start), min(offset + nbytes, start + share.nbytes)
            if low < high:
                moves.append(partial(move, share, buffer[low - offset :], high - low, low - start))
            start += share.nbytes
        self._together.run(moves)

    def read_rows(self, extent: Extent, row_bytes: int, first_byte: int, rows: torch.Tensor, out: torch.Tensor) -> None:
        """Fill `out` (len(rows), row_bytes) uint8 with the `rows` (int64, sorted, unique) of a table in `extent`.

        The table starts `first_byte` bytes into the extent.  Only pieces that hold a wanted row are read, each whole
        and checked; a row may lie across pieces.  One call at a time stages in 4 MiB of memory.
        """
        self._rows.read_rows(self.read, extent, row_bytes, first_byte, rows, out)

    def _spot(self, share: Extent, nbytes: int, offset: int, writing: bool = False) -> tuple[str, torch.Tensor]:
        """The file a transfer goes to or comes from, and its part of the checksum table."""
        file, table = share.file, self._tables.get(share)
        if self.shadow is not None and table is None:
            copies = self.shadow.copies
            copy = copies.to_write(share) if writing else copies.newest(share)
            file, table = copy_file(share.file, copy), copies.table(share, copy)
        assert table is not None  # `_checked` has looked
        first = offset // PIECE_BYTES
        return file, table[first : first + -(-nbytes // PIECE_BYTES)]

    def _checked(self, extent: Extent, buffer: torch.Tensor, nbytes: int | None, offset: int) -> int:
        """The length of a transfer, once it is known to be possible."""
        nbytes = extent.nbytes - offset if nbytes is None else nbytes
        where = f"disk tier: {extent.label!r} ({extent.nbytes} bytes)"
        first = self._shares.get(extent, (extent,))[0]
        known = first in self._tables or (self.shadow is not None and first in self.shadow.copies)
        if not self._end.alive or not known:
            raise ValueError(f"{where} has no room: the tier is closed, or allocate() was not called after reserve()")
        if offset < 0 or nbytes < 0 or offset + nbytes > extent.nbytes:
            raise ValueError(f"{where}: {nbytes} bytes at {offset} do not lie in it")
        if offset % PIECE_BYTES or (nbytes % PIECE_BYTES and offset + nbytes != extent.nbytes):
            raise ValueError(f"{where}: {nbytes} bytes at {offset} are no whole pieces of {PIECE_BYTES} bytes")
        length = aligned(nbytes)
        if buffer.dtype != torch.uint8 or buffer.device.type != "cpu" or not buffer.is_contiguous():
            raise ValueError(f"{where}: the buffer must be contiguous uint8 on the CPU, it is {buffer.dtype}")
        if buffer.numel() < length:
            raise ValueError(f"{where}: the buffer has {buffer.numel()} bytes, needs {length} (whole pages)")
        if length and buffer.data_ptr() % PAGE_BYTES:
            raise ValueError(f"{where}: the buffer's address is no multiple of {PAGE_BYTES}; take it from a HostPool")
        return nbytes

    def _move(
        self, operation: str, share: Extent, file: str, buffer: torch.Tensor, offset: int, table: torch.Tensor
    ) -> None:
        try:
            self.paths[path_of(file) - self._first].move(
                operation, share.label, file, buffer, share.offset + offset, table if self.checksum else None
            )
        except DamagedState:
            if self.shadow is not None and file.startswith("state/"):
                self.shadow.distrust()
            raise

    def _not_whole(self, share: Extent, file: str, offset: int) -> DamagedState:
        place = self.paths[path_of(file) - self._first].path / file
        return DamagedState(
            f"{share.label}: file {place} at byte {share.offset + offset} was left half-written by"
            " a write that failed (or is still under way); go back to the last checkpoint"
        )

    def close(self, keep_state: bool = False) -> None:
        """End the transfers' threads, close the files and remove the directory; calling it twice is allowed.

        `keep_state=True` keeps `state/` on disk, flushed, with `extents.json` (place, length, label and checksums of
        every extent); `scratch/` goes in any case.  State in copies that is `shadow.worth_keeping` stays by itself.
        """
        if not self._end.alive:
            return
        for files in self.paths:
            files.io.close()
        self._together.close()
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
            for files in self.paths if keep_state else ():
                files.end(keep_state=True)
            self._end()

    def _write_index(self) -> None:
        kept = []
        for share, table in self._tables.items():
            if share.file.startswith("state/"):
                place = {"file": share.file, "offset": share.offset, "nbytes": share.nbytes, "label": share.label}
                kept.append(place | {"crc32c": table.tolist()})
        for files in self.paths:
            for file, fd in files.fds.items():
                if file.startswith("state/"):
                    os.fsync(fd)
        fd = os.open(self.path / "state" / INDEX_FILE, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "w") as index:
            json.dump(kept, index)
            index.flush()
            os.fsync(index.fileno())


def _opened(paths: Sequence[tuple[str | Path, Transfer]], owner: str, adopt: Saved | None) -> list[SwapFiles]:
    """The files of every path, the first one's directory the home of the record; all or none."""
    found: list[SwapFiles] = []
    keeps = adopt.directories if adopt else [None] * len(paths)
    try:
        for (directory, io), keep in zip(paths, keeps, strict=True):
            found.append(SwapFiles(directory, io, owner, keep))
    except BaseException:
        for files in found:
            files.end(keep_state=adopt is not None)
        raise
    return found


def _found_notes(files: SwapFiles) -> Iterator[str]:
    yield from files.probe.lines(files.path)
    if files.taken_over_bytes:
        yield f"{files.path}: removed {files.taken_over_bytes} bytes that a dead run of the same output left"
    others = leftovers(files.path.parent)
    if others:
        total = sum(leftover.size_bytes for leftover in others)
        shown = "; ".join(str(leftover) for leftover in others[:5])
        yield (
            f"swap path {files.path.parent}: dead runs left {total} bytes in {len(others)} directories"
            f" ({shown}); `offloadz check --clean` removes them"
        )


def _of_paths(nbytes: int, weights: Sequence[int], turn: int) -> list[tuple[int, int]]:
    """(number of the path, bytes) of the shares that are not empty; the first path has an extent of no bytes."""
    found = [(path, share) for path, share in enumerate(shares(nbytes, weights, turn)) if share]
    return found or [(0, 0)]


def _abandon(paths: Sequence[SwapFiles], shadow: Shadow | None) -> None:
    """What must happen even if nobody calls `close`: descriptors closed, directories gone (unless kept before, or their
    state is newer than every checkpoint).  The record goes first: without its shares it would be a promise."""
    for files in paths:
        files.end(keep_state=shadow is not None and shadow.worth_keeping)
