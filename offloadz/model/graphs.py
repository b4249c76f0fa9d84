"""A block's forward that waits for its backward: its graph, without the weights it ran with.

Autograd saves what a backward will read.  Weights lie in a slot that other blocks take over before the backward comes,
so a saved weight is kept as its *place* in the flat sections and read again from wherever the backward's fetch brought
them; everything else is kept as it is.  A weight is told by the storage it lies in, never by its address, which a freed
activation may have had before.  Hooks on saved tensors bypass autograd's own check for changes in place, so it is made
here.  Left to others: which forwards are kept (`Keeping`, told by the plan) and when graphs are given up (the session).

The trade-off: a graph takes some twenty times the memory of the block's input (`plan/kept.py`), and in exchange nothing
runs twice: three quarters of the time of a step that recomputes.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from offloadz.runtime.session import Session


class Place(NamedTuple):
    """Where in a flat section a saved weight lies."""

    section: int
    offset_bytes: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


class Still(NamedTuple):
    """A saved activation, and the number of changes it had seen."""

    tensor: Tensor
    version: int


class Saved:
    """What one graph has saved: tensors that are no weights as they are, weights by their place in `sections`.

    The graph's nodes hold on to this object, so it must not hold on to them.  `nbytes` counts the input `hidden` and
    what autograd saves, without `outside`: tensors that live anyway.
    """

    def __init__(self, name: str, sections: list[Tensor], hidden: Tensor, outside: Sequence[Any] = ()) -> None:
        self.name, self.sections = name, sections
        self.nbytes = hidden.nbytes
        self._counted = {_storage(x) for x in (hidden, *outside) if isinstance(x, Tensor)}

    def hooks(self) -> AbstractContextManager[None]:
        """While this lasts, autograd saves here."""
        return saved_tensors_hooks(self.pack, self.unpack)

    def pack(self, tensor: Tensor) -> Place | Still:
        """What is kept instead of a tensor that autograd wants to save."""
        key = _storage(tensor)
        for index, section in enumerate(self.sections):
            if key == _storage(section):
                offset = _offset_bytes(tensor) - _offset_bytes(section)
                if 0 <= offset < section.nbytes:
                    return Place(index, offset, tensor.shape, tensor.stride(), tensor.dtype)
        if key not in self._counted:
            self._counted.add(key)
            self.nbytes += tensor.untyped_storage().nbytes()
        return Still(tensor.detach(), tensor._version)  # itself would be a cycle: node, tensor, node

    def unpack(self, kept: Place | Still) -> Tensor:
        """The tensor again: a weight from where it is now."""
        if isinstance(kept, Still):
            if kept.tensor._version != kept.version:
                raise RuntimeError(
                    f"{self.name}: a tensor of shape {tuple(kept.tensor.shape)} that its backward reads was changed in"
                    " place after it was saved; change a copy"
                )
            return kept.tensor
        section = self.sections[kept.section]
        start = (_offset_bytes(section) + kept.offset_bytes) // kept.dtype.itemsize
        blank = torch.empty(0, dtype=kept.dtype, device=section.device)
        return blank.set_(section.untyped_storage(), start, kept.shape, kept.stride)


@dataclass
class Graph:
    """One micro-batch's forward through a block, until its backward."""

    hidden: Tensor
    """The input as a leaf."""
    leaves: dict[str, Tensor]
    """Parameters by name; the trained ones as leaves."""
    saved: Saved
    ends: list[GradientEdge | None] = field(default_factory=list)
    """Where the backward enters, per output; None where nothing goes back."""

    @property
    def nbytes(self) -> int:
        """Bytes that live for this graph alone, and its input."""
        return self.saved.nbytes

    def close(self, outs: list[Any]) -> list[Any]:
        """Note the ends of the graph; returns the outputs without it."""
        self.ends = [get_gradient_edge(o) if isinstance(o, Tensor) and o.requires_grad else None for o in outs]
        return [o.detach() if isinstance(o, Tensor) else o for o in outs]

    def backward(self, sections: list[Tensor], grads: Sequence[Tensor | None]) -> None:
        """Add up gradients; `sections`: the weights where they are now, `grads`: one per output."""
        self.saved.sections = sections
        pairs = [(e, g) for e, g in zip(self.ends, grads, strict=True) if e is not None and g is not None]
        torch.autograd.backward([e for e, _ in pairs], [g for _, g in pairs])


class Keeping:
    """Which turns keep their graph: those behind which, up to the end of the model, there is room for all.

    So the last seats keep theirs, whose graphs live shortest, and blocks before them recompute when nothing is kept any
    more.  `room_bytes`: what graphs may take together.  `each`: per seat the bytes of its graph for one position of its
    input, as planned; what a forward really kept takes its place.
    """

    def __init__(self, room_bytes: int, each: Sequence[float]) -> None:
        self.room_bytes, self._each = room_bytes, list(each)

    def keeps(self, seat: int, hidden: Tensor, held_bytes: int) -> bool:
        """Whether there is room for the graphs of this seat and all behind it, beside those that are held."""
        return held_bytes + _positions(hidden) * sum(self._each[seat:]) <= self.room_bytes

    def learn(self, seat: int, hidden: Tensor, nbytes: int) -> None:
        """What the graph of this seat took for this input."""
        found, before = nbytes / max(1, _positions(hidden)), self._each[seat]
        self._each = [found if each == before else each for each in self._each]  # seats of one shape are alike


def refuse_again(name: str, session: Session, begun: int) -> None:
    """A forward serves one backward in its own step (`begun`; -1: it had its backward), and none of gradients."""
    if torch.is_grad_enabled():
        raise RuntimeError(f"{name}: create_graph=True (gradients of gradients) is not built; leave it out")
    if begun < 0:
        raise RuntimeError(
            f"{name}: a second backward through one forward (retain_graph=True) is not built; add the losses up before"
            " the backward, or run the model again"
        )
    if begun != session.begun:
        raise RuntimeError(f"{name}: what this forward left for its backward went with its step; run the model again")


def _positions(hidden: Tensor) -> int:
    return hidden.numel() // max(1, hidden.shape[-1]) if hidden.dim() else 1


def _storage(tensor: Tensor) -> int:
    """Identity of the storage object, not of the memory it has."""
    return tensor.untyped_storage()._cdata


def _offset_bytes(tensor: Tensor) -> int:
    return tensor.storage_offset() * tensor.itemsize
