"""A figure from several rounds: its median, and how far the rounds lie apart.

The trade-off: three to five rounds, so that all of a bench ends within two minutes; their spread says whether the
machine was left alone meanwhile, which a single best value would hide.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from offloadz.plan.predict import FEW_TOKENS, MANY_TOKENS, PART_BYTES

SPIN_S = 0.02
"""Threads of torch's team look for work that long after a call; ours would share the cores with them."""


@dataclass(frozen=True)
class Sizes:
    """How much a bench moves; the defaults take 15 s on two cores and one drive of 3 GB/s."""

    rounds: int = 6
    tokens: int = MANY_TOKENS
    few_tokens: int = FEW_TOKENS
    hidden: int = 1024
    inner: int = 2816
    """Tokens that a block of this width computes, and rows of its products."""
    product_s: float = 0.5
    """Most seconds of a round of products: where they are slower, fewer rows are taken."""
    elements: int = 32 << 20
    """Parameters of an update."""
    copy_bytes: int = 256 << 20
    extent_bytes: int = 128 << 20
    num_extents: int = 8
    """Extents written and read in each swap path."""
    num_parts: int = 32
    """Extents as long as a part of a model."""

    @property
    def part_bytes(self) -> int:
        return min(PART_BYTES, self.extent_bytes)

    @property
    def disk_bytes(self) -> int:
        """Room that a swap path needs."""
        return self.extent_bytes * self.num_extents + self.part_bytes * self.num_parts


QUICK = Sizes(rounds=2, hidden=768, inner=2048, elements=8 << 20, copy_bytes=64 << 20, extent_bytes=64 << 20)
"""A few seconds, before a run on a box that was never measured."""


@dataclass(frozen=True)
class Measured:
    """A rate, and the distance between its largest and smallest round as a share of it."""

    value: float
    spread: float


def measured(rate: Callable[[], float], num_rounds: int) -> Measured:
    """The median of `num_rounds` rates; a round before them warms up and does not count."""
    rate()
    found = []
    for _ in range(num_rounds):
        time.sleep(SPIN_S)
        found.append(rate())
    middle = median(found)
    return Measured(middle, (max(found) - min(found)) / middle)


def seconds(work: Callable[[], object]) -> float:
    """How long `work` takes, never 0."""
    begin = time.perf_counter()
    work()
    return max(time.perf_counter() - begin, 1e-9)
