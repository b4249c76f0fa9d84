"""State as a run keeps it on disk, read as logical tensors: the other form of a checkpoint, beside safetensors.

A directory with `layout.json` (which tensor lies where, by which recipe), a record (which copy of each extent, its
checksums) and the files themselves: a linked checkpoint, or `state/` of a swap path.  `SavedState` gives them out under
the names, types and ranges of a portable checkpoint's two files, so whoever reads one reads the other, into any
placement and recipe.  Left to others: who writes and links (`flips.py`).  The trade-off: one part is decoded at a time,
so tensors read out of their order read a part of up to 4 million parameters each time.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from offloadz.memory.copies import copy_file
from offloadz.memory.flat import DTYPES, Span, spans, state_views, typed
from offloadz.memory.record import read_saved
from offloadz.memory.tier import NEVER_WRITTEN, NOT_WHOLE, PIECE_BYTES, Extent
from offloadz.model.files import PIECE_ELEMENTS, Entry, StreamReader, _read_into
from offloadz.model.manifest import MOMENTS, WEIGHTS
from offloadz.plan.errors import DamagedState
from offloadz.plan.recipes import Recipe, num_blocks
from offloadz.plan.spec import Member, ModelSpec, Part, Section, Unit, aligned
from offloadz.runtime import native
from offloadz.runtime.rest import decoded

ROLES = {"w": "weights", "s": "optimizer"}
CHECK_BYTES = 8 * PIECE_BYTES
"""Read at a time while everything is compared with its checksums."""


class Tensors(Protocol):
    """Logical tensors of a saved state, read in flat ranges."""

    entries: dict[str, Entry]

    def read(self, name: str, start_element: int = 0, count: int | None = None) -> Tensor:
        """Elements `start_element : start_element + count`, flat."""
        ...

    def pieces(self, name: str, num_elements: int = PIECE_ELEMENTS) -> Iterator[tuple[int, Tensor]]:
        """A tensor from front to back as (start element, flat tensor)."""
        ...


@contextmanager
def open_tensors(path: Path, told: Mapping[str, Any]) -> Iterator[tuple[Tensors, Tensors]]:
    """(weights, moments) of a checkpoint of either form, by its manifest."""
    with ExitStack() as stack:
        if "linked" in told:
            state = stack.enter_context(SavedState(path))
            yield state.weights, state.moments
        else:
            yield tuple(stack.enter_context(StreamReader(path / name)) for name in (WEIGHTS, MOMENTS))  # type: ignore[misc]


def layout_of(spec: ModelSpec) -> dict[str, Any]:
    """Where each tensor lies, as plain values that `units_of` takes back."""
    units = []
    for unit in spec.units:
        sections = [
            [s.dtype, s.trainable, [[m.name, list(m.shape), m.start, m.first_row] for m in s.members]]
            for s in unit.sections
        ]
        units.append([unit.name, unit.kind, sections, [[p.section, p.start, p.stop] for p in unit.parts]])
    recipe = spec.recipe
    share = [spec.share.ranks, spec.share.stage]
    return {"recipe": [recipe.state, recipe.rule, recipe.momentum], "units": units, "share": share}


def units_of(layout: Mapping[str, Any]) -> list[tuple[Unit, list[Part]]]:
    """Units and their parts as they were when the layout was written, whatever this version would cut today."""
    recipe, found = Recipe(*layout["recipe"]), []
    for name, kind, sections, cuts in layout["units"]:
        made = tuple(
            Section(dtype, trainable, tuple(Member(n, tuple(shape), start, row) for n, shape, start, row in members))
            for dtype, trainable, members in sections
        )
        parts = []
        for section, start, stop in cuts:
            blocks = sum(num_blocks(b - a) for a, b in made[section].runs(start, stop))
            parts.append(Part(section, start, stop, made[section].dtype, recipe, blocks))
        found.append((Unit(name, kind, made, recipe), parts))
    return found


@dataclass(frozen=True)
class _Place:
    """A run of a tensor: which part it lies in, and where there."""

    unit: int
    part: int
    span: Span

    @property
    def first(self) -> int:
        return self.span.first_element

    @property
    def stop(self) -> int:
        return self.first + self.span.stop - self.span.start


class SavedState:
    """Saved state in a directory; a context manager.  Raises DamagedState, naming file and parameter."""

    def __init__(self, directory: Path) -> None:
        self.saved = read_saved(directory)
        self._units = units_of(self.saved.layout)
        self._recipe = Recipe(*self.saved.layout["recipe"])
        self._held: dict[str, list[tuple[Extent, int, Tensor]]] = {}  # the shares of each
        record = self.saved.record
        for extent, copy, table in zip(self.saved.extents, record.choice, record.tables, strict=True):
            held = self._held.setdefault(extent.label, [])
            if not held or self.saved.rank_of(held[0][0]) == self.saved.rank_of(extent):  # others may hold the same
                held.append((extent, copy, table))
        self._fds: dict[str, int] = {}
        self._last: tuple[tuple[int, int], Tensor, dict[str, Tensor]] | None = None
        self._places: dict[str, list[_Place]] = {}
        entries: dict[str, tuple[torch.dtype, tuple[int, ...], bool]] = {}
        for u, (unit, parts) in enumerate(self._units):
            for k, part in enumerate(parts):
                for span in spans(unit, part):
                    self._places.setdefault(span.member.name, []).append(_Place(u, k, span))
            for section in unit.sections:
                for member in section.members:
                    dtype = torch.float32 if section.trainable else DTYPES[section.dtype]
                    rows = entries[member.name][1][0] if member.name in entries else 0
                    shape = (rows + member.shape[0], *member.shape[1:]) if rows else member.shape
                    entries[member.name] = (dtype, shape, section.trainable)
        for places in self._places.values():
            places.sort(key=lambda place: place.first)
        self.weights = _Part(self, {name: _entry(dtype, shape) for name, (dtype, shape, _) in entries.items()})
        self.moments = _Part(
            self,
            {
                f"{name}.{kind}": _entry(torch.float32, shape)
                for name, (_, shape, trained) in entries.items()
                for kind in (self._recipe.moments if trained else ())
            },
        )

    def values(self, name: str, kind: str, start: int, stop: int) -> Iterator[Tensor]:
        """Elements `start:stop` of a tensor (`kind` "") or of one of its moments, run by run."""
        for place in self._places[name]:
            low, high = max(start, place.first), min(stop, place.stop)
            if low >= high:
                continue
            master, moments = self._part(place.unit, place.part)
            at = place.span.at - place.first
            yield (moments[kind] if kind else master)[at + low : at + high]

    def _part(self, u: int, k: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Master (or frozen weight) and moments of a part, decoded."""
        if self._last is None or self._last[0] != (u, k):
            self._last = None  # two at a time would be twice the memory
            unit, parts = self._units[u]
            part = parts[k]
            raw = self._bytes("w", unit, k, part.weight_bytes)
            weight = typed(raw, 0, part.num_elements, DTYPES[part.dtype])
            moments: dict[str, Tensor] = {}
            value = weight
            if unit.sections[part.section].trainable:
                stored = state_views(part, self._bytes("s", unit, k, part.state_bytes))
                value = torch.empty(part.num_elements, dtype=torch.float32)
                if stored.low is None:
                    value.copy_(weight)
                else:
                    native.join_master_(value, weight, stored.low)
                moments = dict(zip(part.recipe.moments, decoded(unit, part, stored), strict=True))
            self._last = ((u, k), value, moments)
        return self._last[1:]

    def _bytes(self, kind: str, unit: Unit, k: int, nbytes: int) -> Tensor:
        raw, start = torch.zeros(aligned(nbytes), dtype=torch.uint8), 0
        # Nothing is kept of some (sgd without momentum).
        for extent, copy, table in self._held.get(f"{ROLES[kind]}/{unit.name}#{k}", ()):
            self._fill(raw[start : start + extent.room_bytes], extent, copy, table, 0)
            start += extent.room_bytes
        return raw

    def _fill(self, raw: Tensor, extent: Extent, copy: int, table: Tensor, offset: int) -> None:
        """Bytes of an extent, each piece compared with its checksum; pieces never written stay as they are: zeros."""
        length = raw.numel()
        if copy < 0 or not length:
            return
        path = self.saved.where(copy_file(extent.file, copy))
        flags = table[offset // PIECE_BYTES : -(-(offset + length) // PIECE_BYTES)].tolist()
        if any(flag != NEVER_WRITTEN for flag in flags):
            _read_into(self._file(path), raw, extent.offset + offset, path, extent.label)
        for i, flag in enumerate(flags):
            piece = raw[i * PIECE_BYTES : (i + 1) * PIECE_BYTES]
            if flag == NEVER_WRITTEN:
                piece.zero_()
            elif flag == NOT_WHOLE or (flag >= 0 and _entry_of(piece) != flag):
                at = extent.offset + offset + i * PIECE_BYTES
                raise DamagedState(f"{extent.label}: {path} is damaged at byte {at}: its CRC32C is not the one written")

    def _file(self, path: Path) -> int:
        if path.name not in self._fds:
            try:
                self._fds[path.name] = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            except OSError as error:
                raise DamagedState(f"{path} is missing or not readable: {error.strerror}") from error
        return self._fds[path.name]

    def verify(self) -> None:
        """Read everything and compare it; DamagedState names the first parameter that differs."""
        raw = torch.empty(CHECK_BYTES, dtype=torch.uint8)
        for extent, copy, table in chain.from_iterable(self._held.values()):
            for offset in range(0, extent.room_bytes, CHECK_BYTES):
                self._fill(raw[: extent.room_bytes - offset], extent, copy, table, offset)

    def close(self) -> None:
        """Close the files."""
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()
        self._last = None

    def __enter__(self) -> SavedState:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Part:
    """One of the two files that a portable checkpoint would have."""

    def __init__(self, state: SavedState, entries: dict[str, Entry]) -> None:
        self._state, self.entries = state, entries

    def read(self, name: str, start_element: int = 0, count: int | None = None) -> Tensor:
        entry = self.entries.get(name)
        if entry is None:
            raise ValueError(f"{self._state.saved.directory} has no tensor {name}")
        stop = entry.num_elements if count is None else start_element + count
        if not 0 <= start_element <= stop <= entry.num_elements:
            found = f"{name} in {self._state.saved.directory} has {entry.num_elements} elements"
            raise ValueError(f"{found}; asked for {start_element}:{stop}")
        of, _, kind = name.rpartition(".") if self is self._state.moments else (name, "", "")
        out = torch.empty(stop - start_element, dtype=entry.dtype)
        done = 0
        for run in self._state.values(of, kind, start_element, stop):
            out[done : done + run.numel()] = run
            done += run.numel()
        if done != out.numel():
            raise DamagedState(f"{name}: the layout in {self._state.saved.directory} does not hold all of it")
        return out

    def pieces(self, name: str, num_elements: int = PIECE_ELEMENTS) -> Iterator[tuple[int, Tensor]]:
        total = self.entries[name].num_elements
        for start in range(0, total, num_elements):
            yield start, self.read(name, start, min(num_elements, total - start))


def _entry_of(piece: Tensor) -> int:
    """What a transfer writes down for a piece (csrc/io_work.h): its length above its CRC32C."""
    return piece.numel() << 32 | native.crc32c(piece)


def _entry(dtype: torch.dtype, shape: tuple[int, ...]) -> Entry:
    count = torch.Size(shape).numel()
    return Entry(dtype, shape, 0, count * dtype.itemsize)
