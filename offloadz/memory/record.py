"""The small file that says what the state on disk is: which copy of each extent, its checksums, and a note.

`state/flip.bin` of a run and `tables.bin` of a linked checkpoint are such records.  One file, because one rename then
decides between two states.  What the note means is the caller's business.  The trade-off: a flip writes 8 bytes per MiB
of state (1.2 MB for a 13B) and waits for three flushes, in return for which a power cut at any moment leaves the whole
state of one step.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch

from offloadz.memory.copies import files_of
from offloadz.memory.stripes import path_of
from offloadz.memory.tier import Extent
from offloadz.plan.errors import DamagedState

FLIP_FILE = "flip.bin"
TABLES_FILE = "tables.bin"
LAYOUT_FILE = "layout.json"
_MAGIC = b"offloadz state record 3\n"  # 1: the arrays of a part without a stagger; 2: codes in two's complement
_ASIDE = ".aside"


@dataclass(frozen=True)
class Record:
    """`choice[i]` is the copy of extent i (-1: never written), `tables[i]` its checksums."""

    note: dict[str, Any]
    choice: tuple[int, ...]
    tables: tuple[torch.Tensor, ...]
    pins: dict[str, tuple[int, ...]]
    """Checkpoints that held copies when this was written."""


def record_bytes(
    note: Mapping[str, Any],
    choice: Sequence[int],
    tables: Sequence[torch.Tensor],
    pins: Mapping[Path, Sequence[int]] | None = None,
) -> bytes:
    """The file's bytes: magic, length of the JSON, JSON, copies (int16), pieces (int32), checksums (int64), CRC-32."""
    pinned = {str(path): list(held) for path, held in (pins or {}).items()}
    text = json.dumps({"note": note, "num_extents": len(choice), "pins": pinned}).encode()
    head = _MAGIC + struct.pack("<Q", len(text)) + text
    # numpy, not torch, whose loops would start a team of threads for the lane that flips
    copies = numpy.array(list(choice), dtype=numpy.int16)
    counts = numpy.array([table.numel() for table in tables], dtype=numpy.int32)
    body = head + b"".join([copies.tobytes(), counts.tobytes(), *(table.numpy().tobytes() for table in tables)])
    return body + struct.pack("<I", zlib.crc32(body))


def read_record(path: Path) -> Record:
    """A record; DamagedState says what is wrong with it, FileNotFoundError that there is none."""
    return parse_record(path.read_bytes(), path)


def parse_record(data: bytes, path: Path) -> Record:
    """What `record_bytes` was given; `path`: where it is from."""
    if len(data) < len(_MAGIC) + 12 or not data.startswith(_MAGIC):
        raise DamagedState(f"{path} is no record of state, or is cut off")
    if zlib.crc32(data[:-4]) != struct.unpack("<I", data[-4:])[0]:
        raise DamagedState(f"{path} is not the one that was written (CRC-32)")
    try:
        at = len(_MAGIC) + 8
        length = struct.unpack("<Q", data[at - 8 : at])[0]
        told = json.loads(data[at : at + length])
        at += length
        num = int(told["num_extents"])
        choice = numpy.frombuffer(data, numpy.int16, num, at)
        counts = numpy.frombuffer(data, numpy.int32, num, at + 2 * num)
        joined = numpy.frombuffer(data[at + 6 * num : -4], numpy.int64)
        if int(counts.sum()) != joined.size:
            raise ValueError("counts and checksums differ")
        ends = numpy.cumsum(counts)
        tables = tuple(torch.from_numpy(joined[end - n : end].copy()) for n, end in zip(counts, ends, strict=True))
        pins = {where: tuple(held) for where, held in told["pins"].items()}
        return Record(told["note"], tuple(choice.tolist()), tables, pins)
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, struct.error) as error:
        raise DamagedState(f"{path} is not readable: {error!r}") from error


def joined_record(
    note: Mapping[str, Any], told: Sequence[bytes], pins: Mapping[Path, Sequence[int]], path: Path
) -> bytes:
    """The record of all ranks from those that each told of its own copies, in the order of ranks."""
    records = [parse_record(data, path) for data in told]
    choice = [copy for record in records for copy in record.choice]
    return record_bytes(note, choice, [table for record in records for table in record.tables], pins)


def put_record(path: Path, data: bytes) -> None:
    """Write beside, flush, rename, flush the directory; a failure leaves the record that was there."""
    aside = path.with_name(path.name + _ASIDE)
    try:
        write_flushed(aside, data)
        os.rename(aside, path)
        flush_directory(path.parent)
    except OSError:
        aside.unlink(missing_ok=True)
        raise


def drop_record(path: Path) -> None:
    """Remove a record, durably; there may be none."""
    path.unlink(missing_ok=True)
    flush_directory(path.parent)


def write_flushed(path: Path, data: bytes) -> None:
    """A private file whose bytes are on the drive."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        view, done = memoryview(data), 0
        while done < len(view):
            done += os.write(fd, view[done:])
        os.fsync(fd)
    finally:
        os.close(fd)


def make_directories(path: Path) -> None:
    """A directory and those above it that are not there yet, each one's name flushed."""
    missing = [place for place in (path, *path.parents) if not place.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for place in missing:
        flush_directory(place.parent)


def flush_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@dataclass(frozen=True)
class Saved:
    """State that lies in a directory, of a run or of a checkpoint: its record, and where its extents are."""

    directory: Path
    record: Record
    extents: tuple[Extent, ...]
    layout: dict[str, Any]
    directories: tuple[Path, ...]
    """Of each swap path, by its number; of a checkpoint all the same one, its own."""
    weights: tuple[int, ...]
    """How much of an extent each swap path has."""
    ranks: tuple[int, ...] = (0,)
    """Whose each swap path is: several ranks have their own, numbered on."""

    def rank_of(self, extent: Extent) -> int:
        """Which rank's an extent is."""
        return self.ranks[path_of(extent.file)]

    def where(self, file: str) -> Path:
        """The place of one of its files (of which only the name counts)."""
        return self.directories[path_of(file)] / file.rpartition("/")[2]

    @property
    def files(self) -> list[str]:
        """Its files, by their names in `state/`."""
        return files_of(self.extents, self.record.choice)

    @property
    def absent(self) -> list[Path]:
        """Directories that are not there: a drive that is not mounted."""
        return [path for path in self.directories if not path.is_dir()]


def read_saved(directory: Path) -> Saved:
    """The state in `directory` (`state/` of a swap directory, or a linked checkpoint); nothing of its data is read.

    Raises DamagedState where record or layout are not whole, FileNotFoundError where there is none.
    """
    own = directory / FLIP_FILE
    record = read_record(own if own.exists() else directory / TABLES_FILE)
    path = directory / LAYOUT_FILE
    told = read_layout(path)
    try:
        extents = tuple(Extent(*place) for place in told["extents"])
        paths = told.get("paths", [[str(directory), 1]])
        others = [Path(place) if own.exists() else directory for place, *_ in paths[1:]]
        weights = tuple(int(weight) for _, weight, *_ in paths)
        ranks = tuple(int(rank[0]) if rank else 0 for _, _, *rank in paths)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedState(f"{path} is not readable: {error!r}") from error
    if len(extents) != len(record.choice) or any(
        extent.num_pieces != len(table) for extent, table in zip(extents, record.tables, strict=True)
    ):
        raise DamagedState(f"{directory}: the record and {path.name} are of different layouts")
    return Saved(directory, record, extents, told, (directory, *others), weights, ranks)


def read_layout(path: Path) -> dict[str, Any]:
    """What `layout_text` was given; DamagedState where it is not that, FileNotFoundError where there is none."""
    try:
        told: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        stated = told.pop("checksum")
        whole = stated == layout_checksum(told)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedState(f"{path} is not readable: {error!r}") from error
    if not whole:
        raise DamagedState(f"{path} is not the one that was written (CRC-32)")
    return told


def home_of(directory: Path) -> Path:
    """Where the record is of the state that has files in `directory`: there, or on another swap path of that run."""
    if (directory / FLIP_FILE).exists():
        return directory
    try:
        return Path(read_layout(directory / LAYOUT_FILE)["paths"][0][0])
    except (OSError, DamagedState, LookupError, TypeError):
        return directory


def layout_text(layout: Mapping[str, Any]) -> str:
    """What `layout.json` holds, with its own checksum."""
    return json.dumps({**layout, "checksum": layout_checksum(layout)})


def layout_checksum(layout: Mapping[str, Any]) -> int:
    """CRC-32 of a layout, whatever the order of its keys."""
    return zlib.crc32(json.dumps(layout, sort_keys=True, separators=(",", ":")).encode())
