"""Typed views of flat byte buffers: sections, parts and the logical tensors that lie across them.

The one file of this room that knows parameter names, and only to say which elements of a part belong to which tensor.
Views never copy; who owns the bytes is `host.py` and `disk.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from offloadz.plan.spec import ITEM_BYTES, Member, Part, Unit

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class Span:
    """Elements `start:stop` of a member, which lie at `at` in a part."""

    member: Member
    start: int
    stop: int
    at: int

    @property
    def first_element(self) -> int:
        """Index of the first element in the logical tensor (a tile's member starts at a later row)."""
        width = self.member.num_elements // max(1, self.member.shape[0]) if self.member.shape else 1
        return self.member.first_row * width + self.start

    @property
    def part_slice(self) -> slice:
        return slice(self.at, self.at + self.stop - self.start)


def spans(unit: Unit, part: Part) -> Iterator[Span]:
    """Which elements of which logical tensors a part holds, in order."""
    for member in unit.sections[part.section].members:
        start, stop = max(part.start, member.start), min(part.stop, member.start + member.num_elements)
        if start < stop:
            yield Span(member, start - member.start, stop - member.start, start - part.start)


def typed(buffer: Tensor, offset: int, num_elements: int, dtype: torch.dtype) -> Tensor:
    """Flat view of `num_elements` of `dtype` at byte `offset` of a uint8 buffer."""
    return buffer[offset : offset + num_elements * dtype.itemsize].view(dtype)


def stored_sections(unit: Unit, buffer: Tensor) -> list[Tensor]:
    """One flat view per section of a unit's weights as they are stored."""
    return [
        typed(buffer, at, s.num_elements, DTYPES[s.dtype])
        for s, at in zip(unit.sections, unit.weight_offsets, strict=True)
    ]


def compute_sections(unit: Unit, buffer: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """One flat view per section of a compute slot: `dtype`, or fp32 where the section is kept in it."""
    wide = [DTYPES["float32"] if ITEM_BYTES[s.dtype] > dtype.itemsize else dtype for s in unit.sections]
    offsets = unit.compute_offsets(dtype.itemsize)
    return [typed(buffer, at, s.num_elements, d) for s, at, d in zip(unit.sections, offsets, wide, strict=True)]


def slope_sections(unit: Unit, buffer: Tensor) -> list[Tensor]:
    """One flat fp32 view per section of a gradient slot; empty for frozen sections."""
    counts = [s.num_elements if s.trainable else 0 for s in unit.sections]
    return [typed(buffer, at, n, torch.float32) for n, at in zip(counts, unit.slope_offsets, strict=True)]


@dataclass(frozen=True)
class StateViews:
    """A part's optimizer state: the master's low bits (None where the weight is fp32) and both moments."""

    low: Tensor | None
    exp_avg: Tensor
    exp_avg_sq: Tensor


def state_views(part: Part, buffer: Tensor) -> StateViews:
    """Views of a part's state in the buffer that holds it."""
    low = typed(buffer, 0, part.num_elements, torch.int16) if part.low_bytes else None
    first = typed(buffer, part.low_bytes, part.num_elements, torch.float32)
    second = typed(buffer, part.low_bytes + part.moment_bytes, part.num_elements, torch.float32)
    return StateViews(low, first, second)
