"""A figure from several rounds: its median, and how far the rounds lie apart; and how much all of them move.

A bench ends within two minutes: what is slow gets fewer rounds (by the clock, `measured`), and a slow drive fewer and
shorter extents (by a first look at it, `fitted`).  The trade-off: two rounds at least, so that their spread says
whether the machine was left alone meanwhile, which a single best value would hide.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median

from offloadz.plan.predict import DEVICE_TOKENS, FEW_TOKENS, MANY_TOKENS, PART_BYTES
from offloadz.plan.spec import PIECE_BYTES

SPIN_S = 0.02
"""Threads of torch's team look for work that long after a call; ours would share the cores with them."""


LEAST_ROUNDS = 2
LEAST_EXTENTS = 2
"""One is read while the other is written."""


@dataclass(frozen=True)
class Sizes:
    """How much a bench moves; the defaults take 25 s on two cores and one drive of 3 GB/s."""

    rounds: int = 6
    tokens: int = MANY_TOKENS
    few_tokens: int = FEW_TOKENS
    hidden: int = 1024
    inner: int = 2816
    """Tokens that a block of this width computes, and rows of its products."""
    on_device: tuple[int, int, int] = (DEVICE_TOKENS, 4096, 11008)
    """Tokens, width and inner width of a block on a device of its own, which smaller ones do not fill."""
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
    figure_s: float = 15.0
    """Seconds after which a figure of processors or memory gets no more rounds."""
    drives_s: float = 60.0
    """Seconds that all swap paths together may take, about: each gets the same share."""

    @property
    def part_bytes(self) -> int:
        return min(PART_BYTES, self.extent_bytes)

    @property
    def disk_bytes(self) -> int:
        """Room that a swap path needs."""
        return self.extent_bytes * self.num_extents + self.part_bytes * self.num_parts

    @property
    def least_bytes(self) -> int:
        """What a swap path has to move for the fewest rounds: three kinds of passes over its extents, two over its
        parts, a pass before each that warms up, and the first writes."""
        long, short = self.extent_bytes * self.num_extents, self.part_bytes * self.num_parts
        return (LEAST_ROUNDS + 1) * (3 * long + 2 * short) + long + short


QUICK = Sizes(
    rounds=2, hidden=768, inner=2048, elements=8 << 20, copy_bytes=64 << 20, extent_bytes=64 << 20, drives_s=10.0
)  # fmt: skip
"""A few seconds, before a run on a box that was never measured."""


@dataclass(frozen=True)
class Measured:
    """A rate, and the distance between its largest and smallest round as a share of it."""

    value: float
    spread: float
    num_rounds: int


def fitted(sizes: Sizes, pace: float, most_s: float) -> Sizes:
    """The sizes with as many extents, and as long ones, as the fewest rounds can move in `most_s` at `pace` bytes/s.

    Two extents as long as a part, and two parts, are moved however long that takes.
    """
    share = pace * most_s / sizes.least_bytes
    if share >= 1:
        return sizes
    count = max(LEAST_EXTENTS, int(sizes.num_extents * share))
    length = int(sizes.num_extents * sizes.extent_bytes * share / count) // PIECE_BYTES * PIECE_BYTES
    return replace(
        sizes,
        num_extents=count,
        extent_bytes=max(sizes.part_bytes, min(sizes.extent_bytes, length)),
        num_parts=max(LEAST_EXTENTS, int(sizes.num_parts * share)),
    )


def measured(rate: Callable[[], float], num_rounds: int, most_s: float = math.inf) -> Measured:
    """The median of `num_rounds` rates, of fewer where another round would end after `most_s`; a round before them
    warms up and does not count."""
    begin = time.perf_counter()
    rate()
    found: list[float] = []
    while len(found) < num_rounds:
        took_s = time.perf_counter() - begin
        if len(found) >= LEAST_ROUNDS and took_s + took_s / (1 + len(found)) > most_s:
            break
        time.sleep(SPIN_S)
        found.append(rate())
    middle = median(found)
    return Measured(middle, (max(found) - min(found)) / middle, len(found))


def seconds(work: Callable[[], object]) -> float:
    """How long `work` takes, never 0."""
    begin = time.perf_counter()
    work()
    return max(time.perf_counter() - begin, 1e-9)
