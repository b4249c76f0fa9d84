"""Tensors as an update sees them: flat, beginning anywhere in a buffer."""

from __future__ import annotations

import torch


def at(start: int, source: torch.Tensor) -> torch.Tensor:
    """A copy that begins `start` elements into its storage."""
    room = torch.empty(start + source.numel(), dtype=source.dtype)
    room[start:] = source
    return room[start:]
