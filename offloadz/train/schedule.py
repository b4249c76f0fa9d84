"""The learning rate over a run: a warm-up, then cosine, linear or constant, through torch's own `LambdaLR`.

A schedule counts updates that were applied; skipped ones do not move it.  When it is stepped is the loop's business.
The trade-off: the rate of an update depends on its number alone, so a resume needs one integer, and a schedule that
looks at the loss cannot be had here (a loop of one's own can have torch's).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from offloadz.config import OptimizerConfig


@dataclass(frozen=True)
class Schedule:
    """Update number (from 0) -> share of the learning rate.

    The first `num_warmup` updates climb in equal steps to 1, which the last of them has; the rest goes down to
    `min_share`, which would be reached one update behind the last of `num_updates`, so that none is spent on nothing.
    """

    kind: str
    num_updates: int
    num_warmup: int
    min_share: float

    def __call__(self, update: int) -> float:
        if update < self.num_warmup:
            return (update + 1) / self.num_warmup
        if self.kind == "constant":
            return 1.0
        way = min(1.0, (update - self.num_warmup) / max(1, self.num_updates - self.num_warmup))
        left = 1.0 - way if self.kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * way))
        return self.min_share + (1.0 - self.min_share) * left


def schedule_of(config: OptimizerConfig, num_updates: int) -> Schedule:
    """The schedule of a configuration; a `warmup` below 1 is a share of all updates, rounded up."""
    share = config.warmup < 1
    num_warmup = math.ceil(config.warmup * num_updates) if share else int(config.warmup)
    return Schedule(config.schedule, num_updates, num_warmup, config.min_lr)


def scheduler_of(optimizer: torch.optim.Optimizer, schedule: Schedule) -> torch.optim.lr_scheduler.LambdaLR:
    """Torch's scheduler over all groups; each group's own rate is multiplied by the schedule."""
    # A plain function: of any other callable torch would put the attributes into its state, and back at a resume.
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: schedule(update))
