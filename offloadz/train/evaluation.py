"""The mean loss over samples that are not trained on: over all ranks, without a trace in the run.

When to evaluate and where the figure goes is the loop's.  The trade-off: a rank that has no row left in the last batch
computes one without targets, to stay in step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

import offloadz
from offloadz.train.batches import Loader
from offloadz.train.data import Dataset

if TYPE_CHECKING:
    from offloadz.model.run import Run


def evaluated(run: Run, samples: Dataset, rows: int, stopped: Callable[[], bool]) -> tuple[float, int] | None:
    """(mean loss over the target tokens, how many these are), `rows` at a time on each rank; None after `stopped`."""
    loader = Loader(samples, rows * run.ranks.size, shuffle=False, deal=(run.ranks.rank, run.ranks.size))
    losses: list[float] = []
    num_targets = 0
    run.model.eval()
    try:
        for _ in range(loader.num_batches_per_epoch):
            if stopped():
                return None
            batch = loader.next_batch()
            with torch.no_grad():
                losses.append(float(offloadz.token_logprobs(run, batch).double().sum()))
            num_targets += int((batch["labels"][:, 1:] != -100).sum())
    finally:
        run.model.train()
        run.flush()
    total, targets = run.ranks.totals(math.fsum(losses), num_targets)
    return -total / targets, int(targets)
