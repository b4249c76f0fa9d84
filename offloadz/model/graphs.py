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

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from offloadz.model.products import Products
from offloadz.plan.errors import ConfigError
from offloadz.plan.left import GRAPH, PRODUCTS
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
    """What turns leave for their backward: their graph where there is room for those of all seats behind them too, else
    the results of their products where there is room for theirs, else their input alone.

    So the last seats keep their graph, which live shortest, and blocks before them recompute when nothing is kept any
    more.  `room_bytes`: what graphs may take together.  `each`: per seat the bytes of its graph for one position of its
    input, as planned; what a forward really kept takes its place.  `products`: the same of results, of seats that may
    keep them; `products_room_bytes`: what these may take, of the same room as graphs if it is `shared`.
    """

    def __init__(
        self,
        room_bytes: int,
        each: Sequence[float],
        products_room_bytes: int = -1,
        products: Mapping[int, float] | None = None,
        shared: bool = True,
    ) -> None:
        self.room_bytes, self.products_room_bytes, self.shared = room_bytes, products_room_bytes, shared
        self._each, self._products = list(each), [(products or {}).get(seat, 0.0) for seat in range(len(each))]
        self._able = frozenset(products or ())

    def leaves(self, seat: int, hidden: Tensor, held: Iterable[Any]) -> str:
        """What the turn of this seat leaves beside its input, where others have left what is `held`."""
        taken = {GRAPH: 0, PRODUCTS: 0}
        for one in held:
            taken[PRODUCTS if isinstance(one, Products) and not self.shared else GRAPH] += one.nbytes
        positions, results_bytes = _positions(hidden), taken[GRAPH if self.shared else PRODUCTS]
        if taken[GRAPH] + positions * sum(self._each[seat:]) <= self.room_bytes:
            return GRAPH
        fit = results_bytes + positions * sum(self._products[seat:]) <= self.products_room_bytes
        return PRODUCTS if fit and seat in self._able else ""

    def learn(self, seat: int, hidden: Tensor, left: str, nbytes: int) -> None:
        """What the graph of this seat, or its results of products, took for this input."""
        planned = self._each if left == GRAPH else self._products
        found, before = nbytes / max(1, _positions(hidden)), planned[seat]
        planned[:] = [found if each == before else each for each in planned]  # seats of one shape are alike


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


def refuse_in_backward(name: str) -> None:
    """A forward in the middle of a backward is a call of its own, with dropout of its own."""
    if torch._C._current_graph_task_id() >= 0:
        raise ConfigError(
            f"{name}: called again in the middle of a backward, as torch.utils.checkpoint around blocks does; a run"
            " recomputes blocks itself: take it away there (inside of a block it may stay)"
        )


def _positions(hidden: Tensor) -> int:
    return hidden.numel() // max(1, hidden.shape[-1]) if hidden.dim() else 1


def _storage(tensor: Tensor) -> int:
    """Identity of the storage object, not of the memory it has."""
    return tensor.untyped_storage()._cdata


def _offset_bytes(tensor: Tensor) -> int:
    return tensor.storage_offset() * tensor.itemsize
