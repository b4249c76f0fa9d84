"""State on disk that is whole at any moment: flips, hard links for checkpoints, and going on from what is there.

[Note: a flip]  Everything written since the last one is flushed, then a record of which copies are valid is written
beside the old one, flushed and renamed over it, and the directory is flushed.  There is one record however many swap
paths there are: what lies on the others is flushed before it is.  Only then may the copies that were valid
before be written again.  A kill or a power cut in between leaves the old record or the new one, each with its state.
Over several ranks see [Note: a flip over ranks] in `peers.py`.

[Note: pinned copies]  A checkpoint is hard links to the files, and which copy of each extent it holds is written down
beside them.  Such a copy is not written while the checkpoint exists; that it has gone is believed only when the number
of links says so too, so one that was moved or linked once more stays as it was.

Left to others: the bytes (`disk.py`), which copy is which (`copies.py`), what a note says (`model/flips.py`).  The
trade-off: a flip costs three flushes, some 5 to 20 ms on a drive, once a step; and the room of every copy is taken at
the start, two and one more for each checkpoint kept.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from offloadz.memory.copies import NONE, Copies, copy_file, file_and_copy, files_of
from offloadz.memory.links import cannot_link, identity, is_file, is_named, links_match
from offloadz.memory.peers import Alone, Peers
from offloadz.memory.record import (
    FLIP_FILE,
    TABLES_FILE,
    Saved,
    drop_record,
    flush_directory,
    joined_record,
    put_record,
    read_record,
    read_saved,
    record_bytes,
)
from offloadz.memory.stripes import path_of
from offloadz.memory.swapdir import STATE
from offloadz.memory.tier import Extent
from offloadz.plan.errors import CannotGoOn, DamagedState, DiskFailed

log = logging.getLogger("offloadz")

_PUNCH_HOLE, _KEEP_SIZE = 2, 1


class Shadow:
    """The copies of the state in the directories `places` of a tier, one in each swap path, the record in the first.

    `fds` are the tier's open files by name.  `adopt`: state to go on from, the run's own or that of a linked
    checkpoint.  `checkpoints`: where checkpoints of this run lie, whose links count.  `first`: number of the first
    place among those of all ranks.
    """

    def __init__(
        self,
        places: Sequence[Path],
        num: int,
        fds: Mapping[str, int],
        adopt: Saved | None = None,
        checkpoints: Path | None = None,
        first: int = 0,
    ) -> None:
        self.places, self.path, self.copies, self._fds = places, places[0], Copies(num), fds
        self.adopt, self._checkpoints, self._first = adopt, checkpoints, first
        self.peers: Peers = Alone()
        self.record = self.path / STATE / FLIP_FILE
        """The record, of this rank or of all: the first one's."""
        self.flipped: dict[str, Any] | None = None
        """The note of the last flip."""
        self.keeps = False
        """Whether a run of the same owner would go on from here: then state newer than any checkpoint outlives it."""
        self.worth_keeping = self.in_place
        self.lost = ""
        """A file of the state that somebody removed under the run."""
        self.told = ""
        """Why the last checkpoint could not be links, as far as it was said."""

    @property
    def in_place(self) -> bool:
        """Whether what is adopted is the state of this very directory."""
        return self.adopt is not None and self.adopt.directory == self.path / STATE

    def where(self, file: str) -> Path:
        """The place of a file of the state."""
        return self.places[path_of(file) - self._first] / file

    def files(self, ends: Mapping[str, int]) -> dict[str, int]:
        """Lengths of all files, each of the state's as often as there are copies."""
        found: dict[str, int] = {}
        for file, end in ends.items():
            names = [copy_file(file, c) for c in self.copies.numbers] if file.startswith(f"{STATE}/") else [file]
            found |= dict.fromkeys(names, end)
        return found

    # ---- flips -------------------------------------------------------------------------------------------------

    def flip(self, note: dict[str, Any]) -> None:
        """Make what is newest the valid state, with `note` (JSON) beside it; see [Note: a flip].

        Where somebody has removed files of the state under the run, a record would promise what is gone: the run goes
        on with the files it holds open, and says so once.  Raises DiskFailed; the state of the last flip is then still
        valid, if it is there.
        """
        told = self.peers.beside(self._flushed)
        self.peers.beside(lambda: self._recorded(note, told))
        self.copies.flip()
        self.flipped, self.worth_keeping = note, self.keeps

    def _flushed(self) -> bytes:
        """A record of this rank's newest copies, which are on the drive; nothing where a file of them was removed."""
        file = ""
        try:
            for file in sorted(self.copies.unflipped):
                os.fdatasync(self._fds[file])
        except OSError as error:
            raise self._not_flushed(error, self.where(file)) from error
        if self.peers.rank:  # from when the first rank may know of it there may be a record of it
            self.worth_keeping = self.keeps
        return b"" if self._is_lost() else record_bytes({}, self.copies.choice(), self.copies.tables())

    def _recorded(self, note: Mapping[str, Any], told: Sequence[bytes]) -> bytes:
        """The record written by the first rank."""
        if not all(told):
            self.distrust()
        elif not self.peers.rank:
            try:
                put_record(self.record, joined_record(note, told, self.copies.pins, self.record))
            except OSError as error:
                raise self._not_flushed(error, self.record) from error
        return b""

    def _not_flushed(self, error: OSError, path: Path) -> DiskFailed:
        return _failed(error, "flush", path, not self._is_lost() and self.record.exists())

    def propose(self, extent: Extent) -> None:
        """What is written to an extent from now on is read only once it is decided.

        What was written at rest since the last flip (the first weights, a checkpoint that was loaded) is kept then,
        without a record: one that is there told of what was before, and goes.
        """
        if self.copies.at_rest(extent):
            try:
                drop_record(self.record)
            except OSError as error:
                raise _failed(error, "remove", self.record, True) from error
            self.copies.flip()
            self.flipped, self.worth_keeping = None, False
        self.copies.propose(extent)

    def _is_lost(self) -> bool:
        """Whether a file of the state is not under its name any more; said once."""
        if not self.lost:
            self.lost = str(next((path for path, fd in self._held_open() if not is_named(path, fd)), ""))
            if self.lost:
                self.distrust()
                log.warning(
                    "%s was removed or replaced under the run: it goes on with the files it holds open, but a kill now "
                    "costs what was done since the last checkpoint, and checkpoints are written out",
                    self.lost,
                )
        return bool(self.lost)

    def _held_open(self) -> list[tuple[Path, int]]:
        return [(self.where(name), self._fds[name]) for name in self._names() if name in self._fds]

    def secured(self) -> None:
        """A checkpoint holds all that the last flip does: the state need not outlive the run."""
        self.worth_keeping = False

    def distrust(self) -> None:
        """Its bytes are not those that were written: nobody shall go on from here."""
        self.keeps = self.worth_keeping = False

    # ---- checkpoints -------------------------------------------------------------------------------------------

    def can_link(self, target: Path, going: tuple[Path, ...] = ()) -> str:
        """Empty if a checkpoint at `target` may be links, else why not; `going` are removed once it is there."""
        self.release_gone()
        if self._is_lost():
            return f"{self.lost} was removed or replaced under the run"
        held = sum(path.absolute() in self.copies.pins for path in {*going, target})
        if not self.copies.can_pin(held):
            moved = [str(path) for path in self.copies.pins if not (path / TABLES_FILE).exists()]
            told = f" ({' and '.join(moved)} was moved, and holds one until it is deleted)" if moved else ""
            return f"{len(self.copies.pins)} checkpoints hold copies and {len(self.copies.numbers)} exist{told}"
        return next(filter(None, (cannot_link(place, target) for place in self.places)), "")

    def link_into(self, directory: Path) -> list[str]:
        """Hard links to the files that hold the newest copies, and the checksums of all ranks; returns the names."""
        files = files_of(self.copies.extents, self.copies.choice())

        def linked() -> bytes:
            for file in files:
                os.link(self.where(file), directory / file.rpartition("/")[2])
            return record_bytes({}, self.copies.choice(), self.copies.tables())

        try:
            told = self.peers.beside(linked)
            if not self.peers.rank:
                put_record(directory / TABLES_FILE, joined_record({}, told, {}, directory))
        except OSError as error:
            raise _failed(error, "link the state", directory, not self._is_lost()) from error
        return [file.rpartition("/")[2] for file in files]

    def pin(self, directory: Path) -> None:
        """From now on the newest copies belong to the checkpoint `directory` and are not written."""
        self.copies.pins[directory.absolute()] = self.copies.choice()

    @contextlib.contextmanager
    def replacing(self, directory: Path) -> Iterator[None]:
        """While a checkpoint takes a place: where that comes to nothing, one that was there holds its copies still."""
        place = directory.absolute()
        before, was = self.copies.pins.get(place), identity(place)
        try:
            yield
        except BaseException:
            if identity(place) in (was, None):
                self.copies.pins.pop(place, None)
                if before is not None:
                    self.copies.pins[place] = before
            raise

    def release_gone(self) -> None:
        """Forget checkpoints that were deleted; see [Note: pinned copies]."""
        gone = [path for path in self.copies.pins if not (path / TABLES_FILE).exists()]
        here = [path for path in self.copies.pins if path not in gone]
        if gone and all(links_match(path, here) for path in self._state_files()):
            for path in gone:
                del self.copies.pins[path]

    def _names(self) -> list[str]:
        """Of all files of the state, in all copies."""
        files = sorted({extent.file for extent in self.copies.extents})
        return [copy_file(file, c) for file in files for c in self.copies.numbers]

    def _state_files(self) -> list[Path]:
        return [self.where(name) for name in self._names() if self.where(name).exists()]

    # ---- going on ----------------------------------------------------------------------------------------------

    def take_over(self, extents: list[Extent], ends: Mapping[str, int]) -> dict[str, int]:
        """Adopt what was given: open what is there as the files of this run; returns their lengths.

        Raises CannotGoOn, and nothing is changed, where it is laid out otherwise or somebody else holds links.
        """
        saved = self.adopt
        if saved is None:
            return {}
        if tuple(extents) != saved.extents:
            raise CannotGoOn(f"the state in {saved.directory} is laid out otherwise than this run lays it out")
        if not self.in_place:
            self._link_here(saved)
        elif missing := [name for name in saved.files if not self.where(name).is_file()]:
            raise CannotGoOn(f"{self.where(missing[0])} is missing")
        pins = self._known_pins(saved)
        there = [name for name in self._there() if file_and_copy(name)[0] in ends]
        if strangers := [name for name in there if not links_match(self.where(name), pins)]:
            self._undo_links()
            raise CannotGoOn(f"{self.where(strangers[0])} has hard links that belong to no known checkpoint")
        for extent in extents:
            self.copies.add(extent)
        self.copies.adopt(saved.record.choice, saved.record.tables, pins)
        surplus = [name for name in there if file_and_copy(name)[1] not in self.copies.numbers]
        for name in surplus:  # of a run with more copies: neither valid nor a checkpoint's
            self.where(name).unlink()
        return {name: os.path.getsize(self.where(name)) for name in there if name not in surplus}

    def _there(self) -> list[str]:
        """Files of the state that lie here, the records not among them."""
        found = (f"{STATE}/{path.name}" for place in self.places for path in (place / STATE).glob("*.bin"))
        return sorted(name for name in found if file_and_copy(name)[1] != NONE)

    def _link_here(self, saved: Saved) -> None:
        """What is adopted, and as far as there are copies for them what other checkpoints of this run hold: as copies
        here it takes no room beside them.  Those that cannot be linked in stay as they lie."""
        try:
            self._link(saved)
        except OSError as error:
            self._undo_links()
            reason = os.strerror(error.errno or errno.EIO)
            raise CannotGoOn(f"hard links from {saved.directory} to {self.path / STATE}: {reason}") from error
        num, numbers = len(self.copies.numbers), {file_and_copy(name)[1] for name in saved.files}
        left, beside = num - 3, self._beside(saved)
        known = {saved.directory.absolute(), *(one.directory for one in beside)}
        for one in beside:
            joined = numbers | {file_and_copy(name)[1] for name in one.files}
            with contextlib.suppress(OSError):
                if left > 0 and len(joined) <= num and self._is_ours_alone(one, known):
                    self._link(one)
                    left, numbers = left - 1, joined

    def _link(self, saved: Saved) -> None:
        """Names here for its files, all or none; OSError where one is not there or another file has its name."""
        made = []
        try:
            for name in saved.files:
                told = saved.where(name).stat()
                if not (self.where(name).exists() and is_file(self.where(name), told.st_ino, told.st_dev)):
                    os.link(saved.where(name), self.where(name))
                    made.append(name)
        except OSError:
            for name in made:
                self.where(name).unlink()
            raise

    def _is_ours_alone(self, one: Saved, known: set[Path]) -> bool:
        """Whether nobody but `known` checkpoints links to what it holds; OSError where a file is not there."""
        places = {*known, *(place / STATE for place in self.places)} - {one.directory}
        return all(links_match(one.where(name), places) for name in one.files)

    def _beside(self, saved: Saved) -> list[Saved]:
        """Other checkpoints of this run that are laid out alike, the newest first."""
        found: list[Saved] = []
        for path in sorted(self._own() - {saved.directory.absolute()}, reverse=True):
            if not any(aside in path.name for aside in (".tmp-", ".old-")):  # being removed
                with contextlib.suppress(OSError, DamagedState):
                    found.append(read_saved(path))
        return [one for one in found if one.extents == saved.extents]

    def _own(self) -> set[Path]:
        """The directories of this run's checkpoints."""
        there = self._checkpoints
        return {path.absolute() for path in there.iterdir() if path.is_dir()} if there and there.is_dir() else set()

    def _undo_links(self) -> None:
        for name in () if self.in_place else self._there():
            self.where(name).unlink()

    def _known_pins(self, saved: Saved) -> dict[Path, tuple[int, ...]]:
        """Checkpoints that hold files of this state: those the record tells of, and those beside each other."""
        places = {Path(path) for path in saved.record.pins}
        if not self.in_place:
            places.add(saved.directory.absolute())
            places.update(path.absolute() for path in saved.directory.parent.iterdir() if path.is_dir())
        places.update(self._own())
        found = {}
        for place in sorted(places):
            try:
                record = read_record(place / TABLES_FILE)
            except (OSError, DamagedState):
                continue
            shared = self._shared_files(place)
            if shared and len(record.choice) == len(saved.extents):
                # Where its file is another one under the same name, it holds nothing of ours.
                pairs = zip(saved.extents, record.choice, strict=True)
                found[place] = tuple(c if copy_file(e.file, c) in shared else NONE for e, c in pairs)
        return found

    def _shared_files(self, directory: Path) -> set[str]:
        """Files of this state that have a name in `directory` too."""
        found = set()
        for name in self._there():
            told = self.where(name).stat()
            with contextlib.suppress(OSError):
                if is_file(directory / name.rpartition("/")[2], told.st_ino, told.st_dev):
                    found.add(name)
        return found

    # ---- the end -----------------------------------------------------------------------------------------------

    def give_room_back(self) -> None:
        """Before the names here go: take from files that checkpoints hold what no checkpoint needs.

        Nothing is done where links are not all known, or the file system cannot.
        """
        self.release_gone()
        libc = ctypes.CDLL(None, use_errno=True)
        for path in self._state_files():
            if path.stat().st_nlink < 2 or not links_match(path, self.copies.pins):
                continue
            stem, copy, end = path.name.rsplit(".", 2)
            with contextlib.suppress(OSError):
                fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
                for offset, length in self.copies.unpinned(f"{STATE}/{stem}.{end}", int(copy)):
                    libc.fallocate(fd, _PUNCH_HOLE | _KEEP_SIZE, ctypes.c_long(offset), ctypes.c_long(length))
                os.close(fd)


def make_durable(paths: Iterable[Path]) -> None:
    """Flush the names of a run's directories: those of their files and their own."""
    for path in paths:
        for directory in (path / STATE, path, path.parent):
            flush_directory(directory)


def _failed(error: OSError, operation: str, path: Path, valid: bool) -> DiskFailed:
    number = error.errno or errno.EIO
    left = "the state of the last flip is still valid" if valid else "go back to the last checkpoint"
    return DiskFailed(number, f"{operation} of {path} failed: {os.strerror(number)}; {left}")
