"""Files of tensors by name, read and written in pieces: the safetensors format without a whole tensor in memory.

The room for bytes on their way between a file and a flat tensor of a few MiB.  What the tensors mean is left to
`weights.py`, `export.py` and `train/checkpoint.py`, directories to `aside.py`.  The safetensors
library reads slices but maps the file (mapped pages count as resident: 0.5 GB for a table of 262k x 640 x 3) and has
no streaming writer, so header and checks are ours.  The trade-off: plain pread and pwrite through the page cache,
dropped behind the reader; direct I/O would spare one copy at the price of aligned buffers for odd offsets.
"""

from __future__ import annotations

import errno
import json
import os
import weakref
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch

from offloadz.model.aside import disk_failed, join_crc
from offloadz.plan.errors import DamagedState, DiskFailed

PIECE_ELEMENTS = 1 << 22
"""Elements moved at a time where a caller has no parts of its own: 16 MiB of fp32."""

MAX_HEADER_BYTES = 100_000_000
"""What the reference implementation accepts."""

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Entry:
    """One tensor of a file: bytes `begin:end` counted from the start of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def num_elements(self) -> int:
        return prod(self.shape)


class StreamReader:
    """A safetensors file whose tensors are read in flat ranges; a context manager.

    Raises DamagedState, naming file and tensor, where the header does not describe exactly the bytes that are there.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        self._close = weakref.finalize(self, os.close, self._fd)
        try:
            self.size_bytes = os.fstat(self._fd).st_size
            self.header_bytes, header = _read_header(self._fd, self.path, self.size_bytes)
            self.metadata: dict[str, str] = header.pop("__metadata__", {})
            self.entries = _parse_entries(header, self.path, self.header_bytes, self.size_bytes)
        except BaseException:
            self.close()
            raise

    def read(self, name: str, start_element: int = 0, count: int | None = None) -> torch.Tensor:
        """Elements `start_element : start_element + count` of a tensor as a flat CPU tensor of the file's dtype."""
        entry = self.entries.get(name)
        if entry is None:
            raise ValueError(f"{self.path} has no tensor {name}")
        count = entry.num_elements - start_element if count is None else count
        if start_element < 0 or count < 0 or start_element + count > entry.num_elements:
            found = f"{name} in {self.path} has {entry.num_elements} elements"
            raise ValueError(f"{found}; asked for {count} from {start_element}")
        item = entry.dtype.itemsize
        raw = torch.empty(count * item, dtype=torch.uint8)
        _read_into(self._fd, raw, entry.begin + start_element * item, self.path, name)
        return raw.view(entry.dtype)

    def pieces(self, name: str, num_elements: int = PIECE_ELEMENTS) -> Iterator[tuple[int, torch.Tensor]]:
        """A tensor as (start element, flat tensor) from front to back."""
        total = self.entries[name].num_elements
        for start in range(0, total, num_elements):
            yield start, self.read(name, start, min(num_elements, total - start))

    def checksum(self, name: str) -> int:
        """CRC-32 of a tensor's bytes as they are on disk now."""
        crc = 0
        for _, piece in self.pieces(name):
            crc = zlib.crc32(_bytes_of(piece), crc)
        return crc

    def header_checksum(self) -> int:
        """CRC-32 of everything before the first tensor."""
        raw = torch.empty(self.header_bytes, dtype=torch.uint8)
        _read_into(self._fd, raw, 0, self.path, "the header")
        return zlib.crc32(_bytes_of(raw))

    def close(self) -> None:
        """Close the file; also done when the reader is no longer used."""
        self._close()

    def __enter__(self) -> StreamReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass
class _Written:
    """Which elements of a tensor have been written, with the checksum of each run: element start -> (stop, crc)."""

    runs: dict[int, tuple[int, int]] = field(default_factory=dict)


class StreamWriter:
    """A new safetensors file of known names, dtypes and shapes, filled in any order, each element exactly once.

    The file is private (0600) and its room is reserved at once, so a full disk shows before the first write.  `joins`:
    it is another process that makes and finishes it; what is written here it is told by `runs`.
    Raises DiskFailed for the drive, ValueError for an element written twice, never, or out of bounds.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        entries: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
        metadata: Mapping[str, str] | None = None,
        joins: bool = False,
    ) -> None:
        self.path = Path(path)
        header = _make_header(entries, metadata or {}, self.path)
        self.entries = _lay_out(entries, len(header))
        self.header_bytes = len(header)
        self.header_crc = zlib.crc32(header)
        self.size_bytes = len(header) + sum(e.end - e.begin for e in self.entries.values())
        self._done = {name: _Written() for name in self.entries}
        self._fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC | (0 if joins else os.O_CREAT | os.O_EXCL), 0o600)
        if joins:
            return
        try:
            os.posix_fallocate(self._fd, 0, self.size_bytes)
            _write_all(self._fd, header, 0)
        except OSError as error:
            self.close()
            raise disk_failed(error, "reserve", self.path, self.size_bytes) from error

    def write(self, name: str, start_element: int, flat: torch.Tensor) -> None:
        """Write a flat CPU tensor of the entry's dtype at `start_element` of tensor `name`."""
        entry = self.entries.get(name)
        if entry is None:
            raise ValueError(f"{self.path} was not planned to hold {name}")
        stop = start_element + flat.numel()
        if flat.dtype != entry.dtype or start_element < 0 or stop > entry.num_elements:
            raise ValueError(
                f"{name} in {self.path} is {entry.num_elements} elements of {entry.dtype}; "
                f"got {flat.dtype} for {start_element}:{stop}"
            )
        runs = self._done[name].runs
        if start_element in runs:
            raise ValueError(f"{name} in {self.path}: element {start_element} was written twice")
        if not flat.numel():
            return
        data = _bytes_of(flat)
        try:
            _write_all(self._fd, data, entry.begin + start_element * entry.dtype.itemsize)
        except OSError as error:
            raise disk_failed(error, f"write {name}", self.path, len(data)) from error
        runs[start_element] = (stop, zlib.crc32(data))

    def finish(self, verify: bool = False) -> FileRecord:
        """Flush and close; the record of what was written.  With `verify` it is read back from the drive and compared.

        Raises ValueError where elements are missing or were written twice, DamagedState where the drive gave back
        other bytes than it was given.
        """
        told = {name: (NAMES[e.dtype], e.shape, self._join(name)) for name, e in self.entries.items()}
        record = FileRecord(self.size_bytes, self.header_crc, told)
        self.sync()
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
        self.close()
        if verify:
            verify_file(self.path, record)
        return record

    def sync(self) -> None:
        """Bring what was written here to the drive."""
        try:
            os.fsync(self._fd)
        except OSError as error:
            raise disk_failed(error, "flush", self.path, self.size_bytes) from error

    def runs(self) -> dict[str, list[tuple[int, int, int]]]:
        """What was written here: per tensor (start element, stop, CRC-32) of each piece."""
        return {name: [(a, *b) for a, b in done.runs.items()] for name, done in self._done.items() if done.runs}

    def add_runs(self, told: Mapping[str, Sequence[Sequence[int]]]) -> None:
        """What another process that joined has written."""
        for name, pieces in told.items():
            for start, stop, crc in pieces:
                if start in self._done[name].runs:
                    raise ValueError(f"{name} in {self.path}: element {start} was written twice")
                self._done[name].runs[start] = (stop, crc)

    def close(self) -> None:
        """Drop the descriptor; a file that was not finished stays as it is, for its directory to be thrown away."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _join(self, name: str) -> int:
        """Checksum of a tensor from its runs, after checking that they cover it exactly once."""
        entry, crc, reached = self.entries[name], 0, 0
        for start, (stop, part) in sorted(self._done[name].runs.items()):
            if start != reached:
                what = "were never written" if start > reached else "were written twice"
                low, high = sorted((start, reached))
                raise ValueError(f"{name} in {self.path}: elements {low}:{high} {what}")
            crc = join_crc(crc, part, (stop - start) * entry.dtype.itemsize)
            reached = stop
        if reached != entry.num_elements:
            raise ValueError(f"{name} in {self.path}: elements {reached}:{entry.num_elements} were never written")
        return crc


@dataclass(frozen=True)
class FileRecord:
    """What a file of tensors was when it was finished: enough to tell later whether it still is."""

    size_bytes: int
    header_crc: int
    tensors: dict[str, tuple[str, tuple[int, ...], int]]
    """Name -> dtype as safetensors calls it, shape, CRC-32 of the bytes."""


def verify_file(path: Path, record: FileRecord) -> None:
    """Read a whole file and compare it with its record; DamagedState names the file and the first bad tensor."""
    with StreamReader(path) as reader:
        if reader.size_bytes != record.size_bytes:
            raise DamagedState(f"{path} has {reader.size_bytes} bytes, {record.size_bytes} were written")
        if reader.header_checksum() != record.header_crc:
            raise DamagedState(f"{path}: the header is not the one that was written (CRC-32)")
        if set(reader.entries) != set(record.tensors):
            odd = sorted(set(reader.entries) ^ set(record.tensors))
            raise DamagedState(f"{path}: tensors differ from the list: {', '.join(odd[:5])}")
        for name, (_, _, crc) in record.tensors.items():
            found = reader.checksum(name)
            if found != crc:
                raise DamagedState(f"{name} in {path}: CRC-32 is {found:08x}, {crc:08x} was written")


def _read_header(fd: int, path: Path, size_bytes: int) -> tuple[int, dict[str, Any]]:
    """(bytes before the first tensor, the header as an object)."""
    length = int.from_bytes(os.pread(fd, 8, 0), "little") if size_bytes >= 8 else -1
    if length < 0 or 8 + length > size_bytes or length > MAX_HEADER_BYTES:
        raise DamagedState(f"{path} is no safetensors file or is cut off: {size_bytes} bytes, header of {length} bytes")
    raw = torch.empty(length, dtype=torch.uint8)
    _read_into(fd, raw, 8, path, "the header")
    try:
        header = json.loads(bytes(_bytes_of(raw)).decode("utf-8"), object_pairs_hook=_no_doubles)
    except ValueError as error:
        raise DamagedState(f"{path}: the header is not readable: {error}") from error
    if not isinstance(header, dict) or not isinstance(header.get("__metadata__", {}), dict):
        raise DamagedState(f"{path}: the header is not an object of tensors")
    return 8 + length, header


def _no_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name is listed twice")
    return found


def _parse_entries(header: dict[str, Any], path: Path, data_start: int, size_bytes: int) -> dict[str, Entry]:
    """All tensors, after checking that they fill the file without gap or overlap."""
    entries = {name: _parse_entry(name, told, path, data_start) for name, told in header.items()}
    reached, before = data_start, "the header"
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != reached:
            how = "overlaps" if entry.begin < reached else "leaves a gap after"
            found = f"{name} in {path} begins at byte {entry.begin}"
            raise DamagedState(f"{found} and {how} {before}, which ends at {reached}")
        reached, before = entry.end, name
    if reached != size_bytes:
        how = "is cut off" if reached > size_bytes else "has bytes that belong to no tensor"
        raise DamagedState(f"{path} {how}: {size_bytes} bytes found, {reached} needed (last tensor: {before})")
    return entries


def _parse_entry(name: str, told: Any, path: Path, data_start: int) -> Entry:
    try:
        dtype, shape, (begin, end) = told["dtype"], told["shape"], told["data_offsets"]
        numbers = [*shape, begin, end]
        if not all(type(n) is int and n >= 0 for n in numbers):
            raise ValueError("sizes must be whole numbers from 0")
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedState(f"{name} in {path}: the header entry is not readable: {error}") from error
    if dtype not in DTYPES:
        raise DamagedState(f"{name} in {path} has dtype {dtype}; this reader knows {', '.join(DTYPES)}")
    entry = Entry(DTYPES[dtype], tuple(shape), data_start + begin, data_start + end)
    needed = entry.num_elements * entry.dtype.itemsize
    if end - begin != needed:
        found = f"{name} in {path}: {end - begin} bytes for {dtype} of shape {tuple(shape)}"
        raise DamagedState(f"{found}, which needs {needed}")
    return entry


def _lay_out(entries: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], data_start: int) -> dict[str, Entry]:
    """Places in the file: widest dtype first, so that every tensor is aligned to its items."""
    placed, reached = {}, data_start
    for name, (dtype, shape) in sorted(entries.items(), key=lambda item: -item[1][0].itemsize):
        end = reached + prod(shape) * dtype.itemsize
        placed[name] = Entry(dtype, tuple(shape), reached, end)
        reached = end
    return placed


def _make_header(
    entries: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str], path: Path
) -> bytes:
    strange = [f"{name} ({dtype})" for name, (dtype, _) in entries.items() if dtype not in NAMES]
    if strange:
        raise ValueError(f"{path} cannot hold {', '.join(strange)}; safetensors dtypes known here: {', '.join(DTYPES)}")
    told: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    for name, entry in _lay_out(entries, 0).items():
        told[name] = {"dtype": NAMES[entry.dtype], "shape": list(entry.shape), "data_offsets": [entry.begin, entry.end]}
    text = json.dumps(told, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _bytes_of(flat: torch.Tensor) -> memoryview:
    return memoryview(flat.detach().contiguous().view(torch.uint8).numpy())  # type: ignore[arg-type]


def _read_into(fd: int, raw: torch.Tensor, offset: int, path: Path, name: str) -> None:
    """Fill a uint8 tensor from the file, resuming short reads, and drop the cached pages behind."""
    view, done = _bytes_of(raw), 0
    while done < len(view):
        try:
            got = os.preadv(fd, [view[done:]], offset + done)
        except OSError as error:
            raise DiskFailed(error.errno, f"read {name} in {path} at byte {offset + done}: {error.strerror}") from error
        if got == 0:
            missing = len(view) - done
            raise DamagedState(f"{name} in {path}: the file ends at byte {offset + done}, {missing} bytes are missing")
        done += got
    os.posix_fadvise(fd, offset, len(view), os.POSIX_FADV_DONTNEED)


def _write_all(fd: int, data: bytes | memoryview, offset: int) -> None:
    view, done = memoryview(data), 0
    while done < len(view):
        written = os.pwrite(fd, view[done:], offset + done)
        if written == 0:
            raise OSError(errno.EIO, "no byte was taken")
        done += written
