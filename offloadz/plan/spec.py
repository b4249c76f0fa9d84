"""The model as data: units of storage, seats of computation, and where each byte of a unit lies.

A *unit* is what moves as one: a repeated block, a single module outside the blocks, or one vocabulary tile of a table.
Inside a unit parameters lie one behind the other in flat *sections*, one per (storage dtype, trainable); a section is
cut into *parts*, the pieces that an update reads and writes, so that no buffer needs to hold a whole unit's optimizer
state.  Over several ranks a section is first cut into equal *shards*, one for each, and these into parts.  A *seat* is
a place in the user's model where computation happens (a stand-in sits there); it uses one unit, or for a table all its
tiles.  Names of parameters occur here and in the files that read and write checkpoints alone.

The trade-off: parts of 4 Mi elements cost one more operation per 40 MiB of state, and bound the buffers of a 13B block
(317 M parameters, 3.2 GB of fp32 state) to 40 MiB a slot.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, product
from math import lcm, prod
from typing import Any

from offloadz.plan.recipes import EXACT, Recipe, check_recipe, num_blocks
from offloadz.plan.share import ALONE, Share

PAGE_BYTES = 4096
"""Alignment of every extent, slot and section: what direct I/O asks for, a multiple of every drive's sector."""

PIECE_BYTES = 1 << 20
"""What one checksum on a drive covers, counted from the start of its extent (csrc/io.h has the same)."""

PART_ELEMENTS = 1 << 22
"""Elements an update moves at a time; a multiple of PAGE_BYTES elements so that parts stay aligned in every dtype."""

LINE_BYTES = 64
STAGGER_BYTES = 9 * LINE_BYTES

ITEM_BYTES = {"bfloat16": 2, "float32": 4}


def aligned(nbytes: int, to: int = PAGE_BYTES) -> int:
    """`nbytes` rounded up to a multiple of `to`."""
    return -(-nbytes // to) * to


def staggered(nbytes: int) -> int:
    """`nbytes` of one array in whole lines, and a few more lines where they would fill whole pages.

    An update walks all arrays of a part at once.  Where they begin at the same place of their pages, as arrays of 2^22
    elements would, they meet in the same banks and sets: a third slower with float32 moments, up to 1.8 times with
    bfloat16 (docs/log.md).
    """
    lines = aligned(nbytes, LINE_BYTES)
    return lines if lines % PAGE_BYTES else lines + STAGGER_BYTES * bool(lines)


@dataclass(frozen=True)
class Member:
    """A logical tensor, or a range of its rows, inside a section."""

    name: str
    shape: tuple[int, ...]
    start: int
    """First element within the section."""
    first_row: int = 0
    """First row of the logical tensor that this member holds (tiles of a table)."""

    @property
    def num_elements(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class Section:
    """A flat run of parameters of one storage dtype that are all trainable or all frozen."""

    dtype: str
    trainable: bool
    members: tuple[Member, ...]

    @cached_property
    def num_elements(self) -> int:
        return sum(m.num_elements for m in self.members)

    def runs(self, start: int, stop: int) -> list[tuple[int, int]]:
        """(first, last + 1) of each member's elements within `start:stop`, members without any left out."""
        cuts = [(max(start, m.start), min(stop, m.start + m.num_elements)) for m in self.members]
        return [(first, last) for first, last in cuts if first < last]


@dataclass(frozen=True)
class Part:
    """Elements `start:stop` of one section of a unit: what one update op reads and writes."""

    section: int
    start: int
    stop: int
    dtype: str
    recipe: Recipe = EXACT
    num_blocks: int = 0
    """Blocks that share a scale: the members' runs inside the part, each cut from its own start."""
    shard: int = 0
    """The shard it lies in: the rank whose it is."""

    @property
    def num_elements(self) -> int:
        return self.stop - self.start

    @property
    def weight_bytes(self) -> int:
        return self.num_elements * ITEM_BYTES[self.dtype]

    @property
    def low_bytes(self) -> int:
        """Bytes of the 16 low master bits, whole lines; 0 where the weight itself is the master."""
        return staggered(self.num_elements * self.recipe.low_item_bytes(self.dtype))

    @property
    def moment_bytes(self) -> int:
        """Bytes of one moment as it is stored."""
        return staggered(self.num_elements * self.recipe.code_bytes)

    @property
    def scale_bytes(self) -> int:
        """Bytes of one moment's scales."""
        return aligned(self.num_blocks * 4, LINE_BYTES) if self.recipe.scaled else 0

    @cached_property
    def state_bytes(self) -> int:
        """Low master bits, then every moment, then the scales of each."""
        return self.low_bytes + self.recipe.num_moments * (self.moment_bytes + self.scale_bytes)


@dataclass(frozen=True)
class Unit:
    """What moves as one, with the byte layout of its weights, gradients and optimizer state."""

    name: str
    kind: str
    """block | module | tile"""
    sections: tuple[Section, ...]
    recipe: Recipe = EXACT
    share: Share = ALONE
    coarse: int = 1
    """Parts that are cut as one, in a walk that only asks for times (`shorter.py`)."""

    @cached_property
    def num_elements(self) -> int:
        return sum(s.num_elements for s in self.sections)

    @cached_property
    def num_trainable(self) -> int:
        return sum(s.num_elements for s in self.sections if s.trainable)

    @property
    def trainable(self) -> bool:
        return self.num_trainable > 0

    @cached_property
    def shard_elements(self) -> tuple[int, ...]:
        """Elements of a shard of each section: equal, on pages, of tables in whole rows; the last may reach beyond."""
        if self.share.shards == 1:
            return tuple(s.num_elements for s in self.sections)
        step = PAGE_BYTES // 2 if self.kind != "tile" else _page_of_rows(self.sections[0].members[0].shape[-1])
        return tuple(aligned(-(-s.num_elements // self.share.shards), step) for s in self.sections)

    @cached_property
    def padded_elements(self) -> tuple[int, ...]:
        """Elements of each section where it is whole: all its shards."""
        return tuple(n * self.share.shards for n in self.shard_elements)

    def shard_of(self, section: int, shard: int) -> slice:
        """Where a shard lies in its section."""
        return slice(shard * self.shard_elements[section], (shard + 1) * self.shard_elements[section])

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """Every shard cut into runs of about PART_ELEMENTS, frozen ones too (they are loaded, never updated).

        Tiles are cut between rows, so that a row to be looked up lies in one part.
        """
        cuts = []
        step = PART_ELEMENTS if self.kind != "tile" else _whole_rows(self.sections[0].members[0].shape[-1])
        step *= self.coarse
        for (index, section), shard in product(enumerate(self.sections), range(self.share.shards)):
            within = self.shard_of(index, shard)
            end = min(within.stop, section.num_elements)
            for start in range(within.start, end, step):
                stop = min(start + step, end)
                blocks = sum(num_blocks(stop - start) for start, stop in section.runs(start, stop))
                cuts.append(Part(index, start, stop, section.dtype, self.recipe, blocks, shard))
        return tuple(cuts)

    @cached_property
    def own_parts(self) -> tuple[int, ...]:
        """Parts of this rank's shards: what it loads, updates and saves."""
        return tuple(k for k, part in enumerate(self.parts) if part.shard == self.share.own)

    @cached_property
    def kept_parts(self) -> tuple[int, ...]:
        """Parts whose weights are at rest here."""
        return self.own_parts if self.share.stage == 3 else tuple(range(len(self.parts)))

    @cached_property
    def trainable_parts(self) -> tuple[int, ...]:
        """Parts that some rank updates."""
        return tuple(k for k, part in enumerate(self.parts) if self.sections[part.section].trainable)

    @cached_property
    def trained_parts(self) -> tuple[int, ...]:
        """Parts with optimizer state here."""
        return tuple(k for k in self.own_parts if self.sections[self.parts[k].section].trainable)

    @cached_property
    def summed_parts(self) -> tuple[int, ...]:
        """Parts of which a sum of gradients is kept while further terms may come."""
        return self.trainable_parts if self.share.sums_whole else self.trained_parts

    @cached_property
    def weight_offsets(self) -> tuple[int, ...]:
        """Byte offset of each section in a buffer of the unit's whole weights."""
        return _running(self._weight_sizes(self.padded_elements))[:-1]

    @cached_property
    def whole_bytes(self) -> int:
        """Bytes of the unit's whole weights as they are stored."""
        return _running(self._weight_sizes(self.padded_elements))[-1]

    @cached_property
    def rest_offsets(self) -> tuple[int, ...]:
        """Byte offset of what is at rest here of each section: of its shard, or of all."""
        return _running(self._weight_sizes(self._rest_elements))[:-1]

    @cached_property
    def weight_bytes(self) -> int:
        """Bytes of the unit's weights at rest."""
        return _running(self._weight_sizes(self._rest_elements))[-1]

    @property
    def _rest_elements(self) -> tuple[int, ...]:
        return self.shard_elements if self.share.stage == 3 else self.padded_elements

    def _weight_sizes(self, counts: tuple[int, ...]) -> list[int]:
        return [aligned(n * ITEM_BYTES[s.dtype]) for n, s in zip(counts, self.sections, strict=True)]

    def part_weight_offset(self, part: Part) -> int:
        """Byte offset of a part in the unit's weights at rest."""
        first = self.shard_of(part.section, self.share.own).start if self.share.stage == 3 else 0
        return self.rest_offsets[part.section] + (part.start - first) * ITEM_BYTES[part.dtype]

    def compute_offsets(self, item_bytes: int) -> tuple[int, ...]:
        """Byte offset of each section in a compute slot whose elements have `item_bytes` (fp32 sections stay fp32)."""
        return _running(self._compute_sizes(item_bytes))[:-1]

    def compute_bytes(self, item_bytes: int) -> int:
        return _running(self._compute_sizes(item_bytes))[-1]

    def _compute_sizes(self, item_bytes: int) -> list[int]:
        sized = zip(self.padded_elements, self.sections, strict=True)
        return [aligned(n * max(item_bytes, ITEM_BYTES[s.dtype])) for n, s in sized]

    @cached_property
    def slope_offsets(self) -> tuple[int, ...]:
        """Byte offset of each section in an fp32 gradient slot; frozen sections take no room."""
        return _running(self._slope_sizes())[:-1]

    @cached_property
    def slope_bytes(self) -> int:
        return _running(self._slope_sizes())[-1]

    def _slope_sizes(self) -> list[int]:
        return [aligned(n * 4) * s.trainable for n, s in zip(self.padded_elements, self.sections, strict=True)]

    def grad_offset(self, part: int, accumulate: bool) -> int:
        """Byte offset of a part in the unit's stored gradient; frozen parts take no room."""
        return self._grad_offsets[accumulate][part]

    def grad_bytes(self, accumulate: bool) -> int:
        """Bytes of the stored gradient: the weight's dtype, or fp32 where several backward passes add to it."""
        return self._grad_offsets[accumulate][-1]

    @cached_property
    def _grad_offsets(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Running sums of the parts' gradients, rounded and as fp32; kept, because lanes ask once per part and step."""
        rounded = (aligned(p.weight_bytes) * (k in self.trained_parts) for k, p in enumerate(self.parts))
        summed = (aligned(p.num_elements * 4) * (k in self.summed_parts) for k, p in enumerate(self.parts))
        return _running(rounded), _running(summed)

    @cached_property
    def state_offsets(self) -> tuple[int, ...]:
        return _running(self._state_sizes())[:-1]

    @cached_property
    def state_bytes(self) -> int:
        return _running(self._state_sizes())[-1]

    def _state_sizes(self) -> list[int]:
        return [aligned(p.state_bytes) * (k in self.trained_parts) for k, p in enumerate(self.parts)]


@dataclass(frozen=True)
class Seat:
    """A place in the user's model where a stand-in computes."""

    name: str
    kind: str
    """table (looked up by ids) | block | module | head (a product with every tile)"""
    units: tuple[int, ...]


@dataclass(frozen=True)
class ModelSpec:
    """All units and seats of a model, in the order in which a forward pass is expected to meet the seats."""

    units: tuple[Unit, ...]
    seats: tuple[Seat, ...]
    dtype: str
    """Storage dtype of the working weights: bfloat16 | float32."""
    hidden_size: int = 0
    intermediate_size: int = 0
    vocab_size: int = 0
    num_heads: int = 0
    head_size: int = 0
    """Elements of a query's head, where the configuration tells it."""
    recipe: Recipe = EXACT
    """How the optimizer's state is stored, in every unit."""
    share: Share = ALONE
    """What of every unit is this rank's."""

    @cached_property
    def num_elements(self) -> int:
        return sum(u.num_elements for u in self.units)

    def with_recipe(self, recipe: Recipe) -> ModelSpec:
        """The same model under another recipe, always one object; ConfigError where it has none for the dtype."""
        check_recipe(recipe, self.dtype)
        if recipe not in self.kin:
            self.kin[recipe] = replace(self, units=tuple(replace(u, recipe=recipe) for u in self.units), recipe=recipe)
            vars(self.kin[recipe])["kin"] = self.kin
        return self.kin[recipe]

    @cached_property
    def kin(self) -> dict[Recipe, ModelSpec]:
        """The model under every recipe that was asked for: all of them share one."""
        return {self.recipe: self}

    def shared_by(self, share: Share) -> ModelSpec:
        """The same model as one of several ranks holds it."""
        return replace(self, units=tuple(replace(u, share=share) for u in self.units), share=share)

    @cached_property
    def memo(self) -> dict[Any, Any]:
        """What others have found out about this model, by what they asked (`alike.once`): a spec never changes."""
        return {}

    @cached_property
    def first_trained_seat(self) -> int:
        """Index of the lowest seat with something to train; nothing runs backward below it."""
        return next((i for i, s in enumerate(self.seats) for u in s.units if self.units[u].trainable), len(self.seats))

    @cached_property
    def unfolding_seats(self) -> tuple[int, ...]:
        """Seats that run backward through a graph, which they can keep from their forward on."""
        low = self.first_trained_seat
        return tuple(i for i, s in enumerate(self.seats) if i >= low and s.kind != "table")

    def keeping_seats(self, count: int) -> frozenset[int]:
        """The last `count` seats that can keep their graph: those whose graphs live shortest."""
        return frozenset(self.unfolding_seats[max(0, len(self.unfolding_seats) - count) :])

    def other_seats(self, count: int) -> tuple[int, ...]:
        """Those before them."""
        return self.unfolding_seats[: max(0, len(self.unfolding_seats) - count)]

    @cached_property
    def table_units(self) -> frozenset[int]:
        """Units of tables: their gradient is complete only when the looked-up rows are added, at the step's end."""
        return frozenset(u for s in self.seats if s.kind == "table" for u in s.units)

    @cached_property
    def shared_units(self) -> frozenset[int]:
        """Units that several seats use (tied weights): their gradient has several sources."""
        used = [u for s in self.seats for u in set(s.units)]
        return frozenset(u for u in used if used.count(u) > 1)


def _page_of_rows(width: int) -> int:
    """Elements that are whole rows and whole pages in every dtype."""
    return lcm(width, PAGE_BYTES // 2)


def _whole_rows(width: int) -> int:
    """Elements of a part that is whole rows and starts on a page in every dtype."""
    unit = _page_of_rows(width)
    return max(1, PART_ELEMENTS // unit) * unit


def _running(sizes: Iterable[int]) -> tuple[int, ...]:
    """Running sums from 0; one longer than the input."""
    return tuple(accumulate(sizes, initial=0))
