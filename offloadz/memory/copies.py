"""Which copy of each state extent is the valid one, which is being written, and which a checkpoint holds.

Files of `state/` exist in copies with the same offsets (`weights.0.bin`, `weights.1.bin`, ...), whose numbers need not
be the first ones: what is taken over keeps its own.  Per extent one copy is *live* (of the last flip) and at most one
is *next* (written since).  A write goes to `next`, which is chosen at the first write after a flip among the copies
that are neither live nor pinned by a checkpoint; a read gives the newest.  What is *proposed* is written to `next` as
well, and nobody reads it until it is decided, if ever.
Left to others: files and bytes (`disk.py`), the record on the drive (`record.py`).  The trade-off: every extent takes
2 + kept times its room, for which a step is whole or not there at all, and a checkpoint costs no byte.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import count, islice
from pathlib import Path

import torch

from offloadz.memory.tier import NEVER_WRITTEN, NOT_WHOLE, Extent

NONE = -1
"""No copy: never written."""


def copy_file(file: str, copy: int) -> str:
    """The name of one copy of a file: `state/weights.bin`, 1 -> `state/weights.1.bin`."""
    stem, _, end = file.rpartition(".")
    return f"{stem}.{copy}.{end}"


def file_and_copy(name: str) -> tuple[str, int]:
    """What `copy_file` was given; NONE where a name is none of a copy."""
    stem, _, end = name.rpartition(".")
    file, _, copy = stem.rpartition(".")
    return (f"{file}.{end}", int(copy)) if file and copy.isdecimal() else (name, NONE)


def files_of(extents: Iterable[Extent], choice: Iterable[int]) -> list[str]:
    """The files in which the chosen copies lie."""
    return sorted({copy_file(e.file, copy) for e, copy in zip(extents, choice, strict=True) if copy != NONE})


class Copies:
    """The copies of all state extents of a tier, in the order in which they were reserved."""

    def __init__(self, num: int) -> None:
        self.numbers: list[int] = list(range(num))
        """Of the copies that there are, in order."""
        self.extents: list[Extent] = []
        self._held: dict[Extent, tuple[int, int]] = {}  # (live, next); replaced as one, so a reader sees both or none
        self._tables: dict[tuple[Extent, int], torch.Tensor] = {}
        self._order: dict[Extent, int] = {}
        self._proposed: set[Extent] = set()
        self.pins: dict[Path, tuple[int, ...]] = {}
        """Directory of a checkpoint to the copy of each extent that it holds."""

    def __contains__(self, extent: Extent) -> bool:
        return extent in self._held

    def add(self, extent: Extent) -> None:
        """An extent that was never written."""
        self._order[extent] = len(self.extents)
        self.extents.append(extent)
        self._held[extent] = (NONE, NONE)
        self._tables[extent, NONE] = torch.full((extent.num_pieces,), NEVER_WRITTEN, dtype=torch.int64)

    def newest(self, extent: Extent) -> int:
        """The copy that a read gives; NONE reads as zeros."""
        live, following = self._held[extent]
        return live if following == NONE or extent in self._proposed else following

    def at_rest(self, extent: Extent) -> bool:
        """Whether an extent was written since the last flip, and not as a proposal."""
        return self._held[extent][1] != NONE and extent not in self._proposed

    def propose(self, extent: Extent) -> None:
        """What is written to an extent from now on is read only once it is decided; nothing else may be unflipped."""
        assert not self.at_rest(extent)
        self._proposed.add(extent)

    def decide(self, taken: bool) -> None:
        """What was proposed is the newest from now on, or was never written; nobody writes meanwhile."""
        for extent in () if taken else self._proposed:
            live, following = self._held[extent]
            self._held[extent] = (live, NONE)
            self._tables.pop((extent, following), None) if following != NONE else None
        self._proposed.clear()

    def to_write(self, extent: Extent) -> int:
        """The copy that a write goes to; the same one until the next flip."""
        live, following = self._held[extent]
        if following == NONE:
            following = self._free(extent, live)
            self._held[extent] = (live, following)
            self._tables[extent, following] = torch.full((extent.num_pieces,), NOT_WHOLE, dtype=torch.int64)
        return following

    def _free(self, extent: Extent, live: int) -> int:
        index = self._order[extent]
        taken = {live, *(held[index] for held in self.pins.values())}
        free = next((copy for copy in self.numbers if copy not in taken), NONE)
        if free == NONE:
            raise RuntimeError(f"{extent.label}: all {len(self.numbers)} copies are live or held by checkpoints")
        return free

    def table(self, extent: Extent, copy: int) -> torch.Tensor:
        """Checksums of one copy of an extent."""
        return self._tables[extent, copy]

    def choice(self) -> tuple[int, ...]:
        """The newest copy of every extent: what a flip makes the valid state."""
        return tuple(self.newest(extent) for extent in self.extents)

    def tables(self) -> list[torch.Tensor]:
        """The checksums of `choice`, in the same order."""
        return [self.table(extent, self.newest(extent)) for extent in self.extents]

    @property
    def unflipped(self) -> set[str]:
        """Files that were written since the last flip."""
        held = ((e, following) for e, (_, following) in self._held.items() if e not in self._proposed)
        pairs = ((e, following) for e, following in held if following != NONE)
        return {copy_file(extent.file, following) for extent, following in pairs}

    def flip(self) -> None:
        """What is newest is live from now on; what is proposed stays so."""
        for extent, (live, following) in self._held.items():
            if following == NONE or extent in self._proposed:
                continue
            self._held[extent] = (following, NONE)
            self._tables.pop((extent, live), None) if live != NONE else None

    def adopt(self, choice: Sequence[int], tables: Sequence[torch.Tensor], pins: dict[Path, tuple[int, ...]]) -> None:
        """Take over what a record says is live and what checkpoints hold, and as many copies besides as are missing."""
        self.pins = pins
        used = {copy for held in (choice, *pins.values()) for copy in held if copy != NONE}
        num = max(len(self.numbers), self._most_pinned() + 2)
        free = (number for number in count() if number not in used)
        self.numbers = sorted([*used, *islice(free, max(0, num - len(used)))])
        for extent, copy, table in zip(self.extents, choice, tables, strict=True):
            if copy != NONE:
                self._held[extent] = (copy, NONE)
                self._tables[extent, copy] = table.clone()

    def can_pin(self, going: int = 0) -> bool:
        """Whether one more checkpoint leaves every extent a copy to write to, once `going` of those here have gone."""
        return len(self.pins) - going + 1 <= len(self.numbers) - 2

    def _most_pinned(self) -> int:
        """The largest number of different copies of one extent that checkpoints hold."""
        columns = zip(*self.pins.values(), strict=True) if self.pins else ()
        return max((len({copy for copy in column if copy != NONE}) for column in columns), default=0)

    def unpinned(self, file: str, copy: int) -> list[tuple[int, int]]:
        """(offset, length) of the runs of extents in one copy of a file that no checkpoint holds."""
        pinned = [{held[i] for held in self.pins.values()} for i in range(len(self.extents))]
        runs: list[tuple[int, int]] = []
        for extent, held in zip(self.extents, pinned, strict=True):
            if extent.file == file and copy not in held and extent.nbytes:
                if runs and sum(runs[-1]) == extent.offset:
                    runs[-1] = (runs[-1][0], runs[-1][1] + extent.room_bytes)
                else:
                    runs.append((extent.offset, extent.room_bytes))
        return runs
