"""Products of a forward that runs again for its graph, whose results nobody reads: they are not made again.

A backward reads what autograd has saved.  The last product of most blocks is added to what goes past the block, and a
sum saves nothing: of a Llama's forward that is 22 %, a twentieth of a step that recomputes.  So products behind the
last tensor that was saved are answered with memory that holds anything.  Told by what autograd saves and torch
dispatches, so no family of models is known here.

The first time a block runs again all is done, and it is counted how many products had begun when the last tensor was
saved; from then on the others are left out, while the products come as they came.  If a tensor is saved behind one
that was left out, the block does other things than before: it runs once more, whole, and nothing is left out of it any
more.  A value that Python is told (`peeks.py`) counts as saved.  Functions with a backward of their own, and hooks of a
block on what is saved, may keep tensors where nobody here sees it, so blocks with such are let be; so are those with
buffers, or with forward hooks inside, which see all results (`Body.watched`).

The trade-off: a call into Python for each operation of a forward that runs again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from offloadz.model.graphs import Graph, Place, Saved, Still
from offloadz.model.peeks import Peeks, tells
from offloadz.model.products import Products, Read, is_among, saver

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "linear")
"""What may be left out, by its name in torch."""

ALL = -1
"""Products that are read, where none may be left out."""

Again = Callable[["Watched"], Graph]
"""Runs a forward over the weights of what it is given, with a graph that saves there."""


class Watched(Saved):
    """What a graph saves, told to the one who counts products."""

    products: _Products | Products

    def pack(self, tensor: Tensor) -> Place | Still:
        self.products.saving()
        return super().pack(tensor)


class Unread:
    """How many products of a block are read by its backward, and what they are."""

    def __init__(self) -> None:
        self.num_read = 0
        self.ops: tuple[OpOverload, ...] | None = None

    def again(self, run: Again, saved: Callable[[], Watched], watched: bool = False) -> Graph:
        """The graph of a forward that runs again; `saved` gives a new place to save to.  Whole, where it is `watched`
        from outside."""
        if watched:
            return self._run(run, saved(), (), ALL)
        if self.ops is None:
            return self._counted(run, saved())
        try:
            return self._run(run, saved(), self.ops, self.num_read)
        except Read:
            self.num_read = ALL
            return self._run(run, saved(), self.ops, ALL)

    def _counted(self, run: Again, saved: Watched) -> Graph:
        """The same with all products, which are counted."""
        products = _Products((), ALL, saved.pack)
        graph = _watched(run, saved, products)
        self.ops = tuple(products.ops)
        self.num_read = ALL if products.unseen or has_own(graph.ends) else products.num_before
        return graph

    def _run(self, run: Again, saved: Watched, ops: tuple[OpOverload, ...], num_read: int) -> Graph:
        if num_read in (ALL, len(ops)):
            return run(saved)
        return _watched(run, saved, _Products(ops, num_read))


def _watched(run: Again, saved: Watched, products: _Products) -> Graph:
    saved.products = products
    with saved.hooks(), products, Peeks(products.saving):
        return run(saved)


class _Products(TorchDispatchMode):
    """Counts products, and leaves out those from `num_read` on while they come as `expected`.

    `seen_by`: by whom tensors are to be saved, where it is to be seen that they are.
    """

    def __init__(self, expected: tuple[OpOverload, ...], num_read: int, seen_by: Any = None) -> None:
        super().__init__()
        self.ops: list[OpOverload] = []
        self.num_before = 0
        """Products that had begun when the last tensor was saved."""
        self.unseen = False
        """Whether tensors were saved by somebody else."""
        self._expected, self._num_read, self._saver, self._left_out = expected, num_read, seen_by, False

    def saving(self) -> None:
        """A tensor is saved, or Python is told a value."""
        if self._left_out:
            raise Read
        self.num_before = len(self.ops)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, index = kwargs or {}, len(self.ops)
        self.unseen |= self._saver is not None and saver() != self._saver
        if tells(func):
            self.saving()
        if not is_among(func, PRODUCTS):
            return func(*args, **kwargs)
        self.ops.append(func)
        unread = self._num_read != ALL and index >= self._num_read
        if not unread or self.ops != list(self._expected[: index + 1]):
            return func(*args, **kwargs)
        self._left_out = True
        return _shaped(func, args, kwargs)


def _shaped(func: OpOverload, args: Any, kwargs: Any) -> Tensor:
    """A tensor as the product would give, with anything in it."""
    first = next(x for x in args if isinstance(x, Tensor))
    args, kwargs = tree_map_only(Tensor, _outline, (args, kwargs))
    like = func(*args, **kwargs)
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=first.device)


def _outline(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def has_own(ends: Iterable[GradientEdge | None]) -> bool:
    """Whether a graph has a function with a backward of its own, written in Python."""
    nodes: list[Node | None] = [end.node for end in ends if end is not None]
    seen: set[Node] = set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        if isinstance(node, BackwardCFunction):
            return True
        seen.add(node)
        nodes += [after for after, _ in node.next_functions]
    return False
