"""Samples with 1 to 40 targets (case G09): a mean of means over them would be far off."""

from __future__ import annotations

import torch
from tiny_models import VOCABULARY
from torch import Tensor

NUM_TARGETS = (1, 40, 3, 17, 28, 2, 9, 35)


def samples(num_targets: tuple[int, ...] = NUM_TARGETS, length: int = 44) -> dict[str, Tensor]:
    """One row a sample: a prompt of three tokens without targets, then so many targets, then padding."""
    source = torch.Generator().manual_seed(3)
    ids = torch.randint(0, VOCABULARY, (len(num_targets), length), generator=source)
    at = torch.arange(length)
    ends = torch.tensor(num_targets)[:, None] + 3
    return {
        "input_ids": ids,
        "attention_mask": (at < ends).long(),
        "labels": torch.where((at >= 3) & (at < ends), ids, -100),
    }
