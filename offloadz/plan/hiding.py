"""From how many tokens a step on the computation hides all else: updates, transfers and waits.

More rows are more work for the device, while weights, gradients and state move once a step.  A step of any number of
rows is simulated as `estimate` does it (`shorter.py`); a program with one micro-batch stands for all sizes, its ops
taking as long as those of all micro-batches of a sweep.  The trade-off: placement and micro-batch stay those of the
plan, where a plan for that many rows may find better ones; of kept graphs and results there are as many as the same
memory holds, and where some blocks keep theirs each backward counts as shorter by that share.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from offloadz.plan.footprint import Batch
from offloadz.plan.left import most_products
from offloadz.plan.machine import Machine
from offloadz.plan.ops import Op
from offloadz.plan.placement import Placement
from offloadz.plan.predict import Costs, simulated, walked_step
from offloadz.plan.shorter import equal_blocks, shorter, walked
from offloadz.plan.spec import ModelSpec

HIDDEN = 1.05
"""All is hidden where a step takes at most this many times the seconds of its computation."""

MOST_TOKENS = 1 << 24
"""Tokens a step beyond which nobody looks."""

CLOSE = 0.03
"""Share by which the answer may be above the least; below thirty rows it is exact."""


@dataclass(frozen=True, repr=False)
class Hiding:
    """A plan's step: `step_s` and the seconds of its computation."""

    spec: ModelSpec
    placement: Placement
    batch: Batch
    machine: Machine
    step_s: float
    device_s: float

    @cached_property
    def tokens(self) -> int | None:
        """The least tokens a step, over all ranks and in whole rows of `batch.length`, that hide all else; None where
        `MOST_TOKENS` do not.  Sought when it is asked for."""
        found = self._rows[0]
        return found * self._unit * self.placement.share.ranks if found else None

    @property
    def line(self) -> str:
        """The same for people."""
        tokens, each = self.tokens, self.placement.share.each
        if tokens is not None:
            return f"transfers and updates are hidden behind the computation from {tokens:,} tokens a step{each} on"
        if self._rows[1]:
            return f"up to {MOST_TOKENS:,} tokens a step{each} do not hide transfers and updates behind the computation"
        return "no number of tokens a step hides transfers: what each token moves takes longer than what it computes"

    @property
    def _unit(self) -> int:
        """Tokens of a row in each sweep."""
        return self.batch.sweeps * self.batch.length

    @cached_property
    def _rows(self) -> tuple[int, bool]:
        """The least rows of a sweep that hide all else, 0 where none do, and whether more rows come closer to it."""
        if self.device_s <= 0:
            return 0, False
        step = _Step(self.spec, self.placement, self.batch, self.machine)
        rows, lack_s = self.batch.rows_per_sweep, self.step_s - HIDDEN * self.device_s
        if lack_s <= 0:
            return _between(step, 0, rows, 0.0, lack_s), True
        most = max(MOST_TOKENS // self._unit, rows + 1)
        enough = min(rows + int(lack_s / ((HIDDEN - 1) * self.device_s / rows)) + 1, most)  # if each more is hidden
        other_s = step.lack_s(enough)
        closer = other_s < lack_s
        if 0 < other_s < lack_s and enough < most:  # hidden in part
            enough, other_s = most, step.lack_s(most)
        return _between(step, rows, enough, lack_s, other_s) if other_s <= 0 else 0, closer


def _between(step: _Step, low: int, high: int, low_s: float, high_s: float) -> int:
    """The least rows that hide all, of which `low` are too few and `high` enough; with what they lack."""
    while high - low > max(1.0, CLOSE * low):
        guess = low + int((high - low) * low_s / (low_s - high_s)) if low else high // 2
        middle = min(max(guess, low + 1), high - 1)
        lack_s = step.lack_s(middle)
        if lack_s > 0:
            low, low_s, high_s = middle, lack_s, high_s / 2  # so that neither end stays where it is
        else:
            high, low_s, high_s = middle, low_s / 2, lack_s
    return high


class _Step:
    """Steps of any number of rows under one placement."""

    def __init__(self, spec: ModelSpec, placement: Placement, batch: Batch, machine: Machine) -> None:
        self.spec, self.placement, self.batch, self.machine = spec, placement, batch, machine
        few, more = walked(spec)
        far = (equal_blocks(spec)[1] - few) / (more - few)
        self.shares = (1 - far, far) if len(shorter(spec)) > 1 else (1.0,)

    def lack_s(self, rows: int) -> float:
        """Seconds that a step of so many rows a sweep is longer than its computation may be."""
        batch = replace(self.batch, rows=rows * self.batch.sweeps)
        seats, able = len(self.spec.unfolding_seats), most_products(self.spec)
        fewer = self.batch.rows / batch.rows
        kept, cheap = min(seats, self.placement.kept * fewer), min(able, self.placement.cheap * fewer)
        place = replace(self.placement, kept=seats if kept == seats else 0, cheap=able if cheap == able else 0)
        some = 0.0 if place.kept or place.cheap else min(1.0, kept / max(1, seats) + cheap / max(1, able))
        lack_s = 0.0
        for share, part in zip(self.shares, shorter(self.spec), strict=True):
            step = walked_step(part, place, replace(batch, micro_rows=rows))  # one micro-batch, whatever its size
            lanes, _, found_s = simulated(step, _Merged(part, place, batch, self.machine, some))
            lack_s += share * (found_s - HIDDEN * lanes["device"].work_s)
        return lack_s


class _Merged(Costs):
    """Costs of ops that stand for those of all micro-batches of a sweep."""

    def __init__(self, spec: ModelSpec, placement: Placement, batch: Batch, machine: Machine, spared: float) -> None:
        super().__init__(spec, placement, batch, machine, spared)
        self.each = Costs(spec, placement, batch, machine, spared)
        self.many = batch.rows_per_sweep / min(batch.micro_rows, batch.rows_per_sweep)

    def __call__(self, op: Op) -> float:
        return self.each(op) * self.times(op)

    def nbytes(self, op: Op) -> int:
        return round(self.each.nbytes(op) * self.times(op))

    def times(self, op: Op) -> float:
        """Ops that one of the merged program stands for; a table is looked up for all micro-batches at once."""
        return self.many if op.micro >= 0 and self.spec.seats[op.seat].kind != "table" else 1.0
