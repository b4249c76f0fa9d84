"""Typed views of flat byte buffers: sections, parts and the logical tensors that lie across them.

The one file of this room that knows parameter names, and only to say which elements of a part belong to which tensor.
Views never copy; who owns the bytes is `host.py` and `disk.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from offloadz.plan.recipes import num_blocks
from offloadz.plan.spec import ITEM_BYTES, Member, Part, Unit

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}

MOMENTS = {4: torch.float32, 2: torch.bfloat16, 1: torch.uint8}
"""Bytes of a stored moment to the dtype of its view; single bytes are codes."""


@dataclass(frozen=True)
class Span:
    """Elements `start:stop` of a member, which lie at `at` in a part."""

    member: Member
    start: int
    stop: int
    at: int
    first_block: int = 0
    """Where its scales begin among the part's."""

    @property
    def first_element(self) -> int:
        """Index of the first element in the logical tensor (a tile's member starts at a later row)."""
        width = self.member.num_elements // max(1, self.member.shape[0]) if self.member.shape else 1
        return self.member.first_row * width + self.start

    @property
    def part_slice(self) -> slice:
        return slice(self.at, self.at + self.stop - self.start)

    @property
    def block_slice(self) -> slice:
        """The scales of the span: its blocks are counted from its own start."""
        return slice(self.first_block, self.first_block + num_blocks(self.stop - self.start))


def spans(unit: Unit, part: Part) -> Iterator[Span]:
    """Which elements of which logical tensors a part holds, in order."""
    block = 0
    for member in unit.sections[part.section].members:
        start, stop = max(part.start, member.start), min(part.stop, member.start + member.num_elements)
        if start < stop:
            yield Span(member, start - member.start, stop - member.start, start - part.start, block)
            block += num_blocks(stop - start)


def typed(buffer: Tensor, offset: int, num_elements: int, dtype: torch.dtype) -> Tensor:
    """Flat view of `num_elements` of `dtype` at byte `offset` of a uint8 buffer."""
    return buffer[offset : offset + num_elements * dtype.itemsize].view(dtype)


def stored_sections(unit: Unit, buffer: Tensor) -> list[Tensor]:
    """One flat view per section of a unit's weights as they are stored."""
    return [
        typed(buffer, at, s.num_elements, DTYPES[s.dtype])
        for s, at in zip(unit.sections, unit.weight_offsets, strict=True)
    ]


def shards_at_rest(unit: Unit, buffer: Tensor) -> list[Tensor]:
    """This rank's shard of each section, padding included, in a buffer of the unit's weights at rest."""
    first = [0 if unit.share.stage == 3 else unit.shard_of(i, unit.share.own).start for i in range(len(unit.sections))]
    return [
        typed(buffer, at + start * ITEM_BYTES[s.dtype], n, DTYPES[s.dtype])
        for s, at, start, n in zip(unit.sections, unit.rest_offsets, first, unit.shard_elements, strict=True)
    ]


def padded_sections(unit: Unit, buffer: Tensor) -> list[Tensor]:
    """All shards of each section, padding included, in a buffer of the unit's whole weights."""
    return [
        typed(buffer, at, n, DTYPES[s.dtype])
        for s, at, n in zip(unit.sections, unit.weight_offsets, unit.padded_elements, strict=True)
    ]


def trained_of(unit: Unit, sections: list[Tensor]) -> list[Tensor]:
    """Those of a unit's sections that are trained."""
    return [held for s, held in zip(unit.sections, sections, strict=True) if s.trainable]


def padded_slopes(unit: Unit, buffer: Tensor) -> list[Tensor]:
    """All shards of each trained section of an fp32 gradient slot, padding included."""
    sized = zip(unit.sections, unit.slope_offsets, unit.padded_elements, strict=True)
    return [typed(buffer, at, n, torch.float32) for s, at, n in sized if s.trainable]


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
    """Optimizer state as it is stored: the master's low bits (None: there are none), moments, and each one's scales
    (None: the format has none)."""

    low: Tensor | None
    moments: tuple[Tensor, ...]
    scales: tuple[Tensor | None, ...]

    def of(self, span: Span) -> StateViews:
        """The state of one span."""
        at, blocks = span.part_slice, span.block_slice
        low = None if self.low is None else self.low[at]
        scales = tuple(None if s is None else s[blocks] for s in self.scales)
        return StateViews(low, tuple(m[at] for m in self.moments), scales)


def state_views(part: Part, buffer: Tensor) -> StateViews:
    """Views of a part's state in the buffer that holds it."""
    recipe, at = part.recipe, part.low_bytes
    low = typed(buffer, 0, part.num_elements, torch.int16) if part.low_bytes else None
    stored = [at + i * part.moment_bytes for i in range(recipe.num_moments)]
    moments = tuple(typed(buffer, offset, part.num_elements, MOMENTS[recipe.code_bytes]) for offset in stored)
    at += recipe.num_moments * part.moment_bytes
    scaled = [at + i * part.scale_bytes for i in range(recipe.num_moments)]
    scales = tuple(typed(buffer, o, part.num_blocks, torch.float32) if recipe.scaled else None for o in scaled)
    return StateViews(low, moments, scales)
