"""What transformers records inside blocks (router logits), as further outputs of a stand-in.

Hooks inside a block put what they record into a list that the model's forward holds.  A stand-in runs its block twice,
first without a graph: what is recorded then would reach the loss without one, equal in value and silent in gradient.
So a block runs with a list of its own; what is in it afterwards leaves the stand-in beside the block's outputs, with
gradients, and only that goes to the model's list.  The trade-off: it leans on one private name of transformers.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

OUTSIDE = "hidden_states"
"""Recorded around blocks, from what stand-ins give back: nothing to be done."""


def recorded_now() -> tuple[str, ...]:
    """Names of what the forward under way records inside blocks; empty for most."""
    held = _collector()
    lists = held.get() if held is not None else None
    return tuple(key for key, value in (lists or {}).items() if isinstance(value, list) and key != OUTSIDE)


@contextmanager
def aside(keys: Sequence[str]) -> Iterator[dict[str, list[Any]]]:
    """While it lasts, what is recorded under `keys` goes to the lists given here."""
    held, lists = _collector(), {key: [] for key in keys}
    token = held.set(lists)
    try:
        yield lists
    finally:
        held.reset(token)


def hand_on(lists: Mapping[str, Sequence[Any]]) -> None:
    """Add what a stand-in gave back to the lists of the forward under way."""
    held = _collector().get()
    for key, values in lists.items():
        held[key].extend(values)


def _collector() -> Any:
    capturing = sys.modules.get("transformers.utils.output_capturing")
    return getattr(capturing, "_active_collector", None)
