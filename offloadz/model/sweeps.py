"""A step's rows cut into sweeps: passes of whole micro-batches, as many on every rank.

Left to others: how many sweeps are wanted (the plan), what a micro-batch is (`stage.py`).  The trade-off: a rank with
fewer rows than the others computes its first row once more, without targets, for each pass it has no rows for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from offloadz.model.axes import cut_rows
from offloadz.runtime.ranks import Solo


def swept(batch: dict[str, Any], ranges: Sequence[tuple[int, int]], sweeps: int, ranks: Solo) -> list[dict[str, Any]]:
    """`batch` by rows in at most `sweeps` pieces of whole micro-batches; `ranges`: (first row, rows) of each."""
    rows = batch["labels"].shape[0]
    per_sweep = -(-len(ranges) // min(sweeps, len(ranges)))
    groups = [ranges[i : i + per_sweep] for i in range(0, len(ranges), per_sweep)]
    cut = [cut_rows(batch, rows, g[0][0], g[-1][0] + g[-1][1]) for g in groups]
    missing = ranks.most(len(cut)) - len(cut)
    return cut + [without_targets(cut_rows(batch, rows, 0, 1))] * missing


def without_targets(batch: dict[str, Any]) -> dict[str, Any]:
    """What a rank computes to stay in step with others that have more rows."""
    return {**batch, "labels": torch.full_like(batch["labels"], -100)}


def with_positions(batch: dict[str, Any]) -> dict[str, Any]:
    """Positions per row for a model that looks them up in a table: then no row's gradient depends on another's."""
    if "attention_mask" in batch and "position_ids" not in batch and "input_ids" in batch:
        rows, length = batch["input_ids"].shape
        batch["position_ids"] = torch.arange(length).expand(rows, length)
    return batch
