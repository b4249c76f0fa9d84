"""The results of a block's products, kept from its forward to its backward, which makes only the rest again.

Nearly all time of a block goes into a few operations: products of matrices and attention.  Norms, activations and
reshapes between them take as many bytes again and hardly any time.  So the forward runs with a graph that is let go at
once, and of its operations, in order, the results of the dear ones stay; the backward runs the same forward with a
graph, in which these are answered instead of done.  Told by what torch dispatches, so no family of models is known
here.  The forward has a graph because torch decides by it how a product is done.

What is not kept is done again, with the same bits: what draws random numbers (the numbers drawn behind it would be
others), scores of attention written out (each costs a row of its input and there are as many as tokens), and what does
not fit into the slot.  What the block goes on to change in place is copied before.  What comes behind the last tensor
that autograd saves, or of which Python is told a value, is read by nobody (`unread.py`): it is not kept, and answered
with memory that holds anything.

The trade-off: about half the bytes of a graph (`plan/products.py`), for the time of what lies between the products, and
a call into Python for each operation.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from math import prod
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from offloadz.model.peeks import Peeks, tells

DEAR = (
    "mm", "addmm", "bmm", "baddbmm", "_addmm_activation", "_grouped_mm", "_scaled_mm", "_scaled_grouped_mm", "linear",
    "convolution", "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)  # fmt: skip
"""Operations whose results are kept, by their names in torch."""

BATCHED = ("bmm", "baddbmm")
"""Of these, what is larger than all that goes in is not kept: scores of attention."""

START_BYTES = 256
"""What results in a slot are aligned to, as kernels choose by it."""


class Laid(NamedTuple):
    """Where in a slot a result lies."""

    start_bytes: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


class Blank(NamedTuple):
    """What a result looked like that nobody reads."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class Read(Exception):
    """A tensor was saved, or a value told to Python, behind a product that was left out."""


class Answer(NamedTuple):
    """What a dear operation gave, by which it is told when it comes again."""

    op: OpOverload
    shapes: tuple[torch.Size, ...]
    leaves: list[Any] | None
    """Results, those that are tensors as they are or where they were laid; None: to be done again."""
    blanks: list[Any] | None
    """The same if nobody reads them; None: to be done again even then."""
    form: TreeSpec
    start_bytes: int
    """Bytes of all that was kept before."""


class Products:
    """The results of one micro-batch's forward, in order.

    `slot`: bytes that they are laid into, and later read from; None where they stay as they are.
    """

    def __init__(self, name: str, generators: Iterable[torch.Generator], slot: Tensor | None = None) -> None:
        self.name, self.slot, self.generators = name, slot, tuple(generators)
        self.nbytes = 0
        """Bytes that the results take, or would if all had found room."""
        self._answers: list[Answer] = []
        self._num_read = 0
        """Answers there were when the last tensor was saved."""
        self.unseen = False
        """Whether tensors were saved by somebody else."""
        self._left_out = False
        self._held: dict[int, tuple[list[Any], int]] = {}
        """Storage of a result that stays as it is, to where it is noted."""

    @contextmanager
    def recording(self, seen_by: Any = None) -> Iterator[None]:
        """While this lasts, results of dear operations stay; `seen_by`: what is handed the tensors that are saved."""
        with _Recording(self, seen_by), Peeks(self.saving):
            yield

    @contextmanager
    def answering(self, slot: Tensor | None) -> Iterator[None]:
        """While this lasts, they are answered with what stayed; `slot`: where that was brought to."""
        self.slot = slot
        with _Answering(self), Peeks(self.saving):
            yield

    def saving(self) -> None:
        """Autograd saves a tensor, or Python is told a value; raises Read where a product was left out before it."""
        if self._left_out:
            raise Read
        self._num_read = len(self._answers)

    def note(self, op: OpOverload, args: Any, out: Any, keep: bool) -> None:
        """Keep what an operation gave."""
        (found, form), start = tree_flatten(out), self.nbytes
        leaves: list[Any] | None = [self._kept(leaf) for leaf in found] if keep else None
        if leaves is not None and leaves.count(None) > found.count(None):
            leaves = None
        blanks = [_blank(leaf) for leaf in found] if keep else None
        self._answers.append(Answer(op, _shapes(args), leaves, blanks, form, start))
        if self.slot is None and leaves is not None:
            self._held |= {_storage(leaf): (leaves, i) for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}

    def spare(self, written: Iterable[Any]) -> None:
        """These tensors are about to be changed: results among them are copied first."""
        for tensor in written:
            leaves, index = self._held.pop(_storage(tensor), (None, 0))
            if leaves is not None:
                leaves[index] = leaves[index].clone()

    def end(self) -> None:
        """The forward is over: nothing of it is changed any more, and the slot is another's."""
        self._held.clear()
        self.slot = None

    def leave_out(self) -> None:
        """Let go of what came behind the last tensor that was saved: nobody reads it."""
        unread = [] if self.unseen else self._answers[self._num_read :]
        if unread:
            self._answers[self._num_read :] = [one._replace(leaves=one.blanks) for one in unread]
            self.nbytes = unread[0].start_bytes

    def answers(self) -> Iterator[Answer]:
        """What was kept, each let go as it is given."""
        self._answers.reverse()
        while self._answers:
            yield self._answers.pop()

    def brought(self, leaf: Any) -> Any:
        """A result, from the slot if it was laid there, and with anything in it if nobody reads it."""
        if isinstance(leaf, Blank):
            self._left_out = True
            return torch.empty_strided(leaf.shape, leaf.stride, dtype=leaf.dtype, device=leaf.device)
        return _lying(self.slot, leaf) if isinstance(leaf, Laid) else leaf

    def _kept(self, leaf: Any) -> Any:
        """What stays of a result; None: there is no room for it."""
        if not isinstance(leaf, Tensor):
            return leaf
        start = -(-self.nbytes // START_BYTES) * START_BYTES
        self.nbytes = start + leaf.nbytes
        if self.slot is None or leaf.device != self.slot.device:
            return torch.empty(0, dtype=leaf.dtype, device=leaf.device).set_(
                leaf.untyped_storage(), leaf.storage_offset(), leaf.shape, leaf.stride()
            )  # the same bytes, without a graph
        if self.nbytes > self.slot.numel() or leaf.stride() != torch.empty_like(leaf, device="meta").stride():
            return None
        laid = Laid(start, leaf.shape, leaf.stride(), leaf.dtype)
        _lying(self.slot, laid).copy_(leaf)
        return laid


class _Recording(TorchDispatchMode):
    """Notes the results of dear operations, and copies those that are about to be changed."""

    def __init__(self, products: Products, seen_by: Any) -> None:
        super().__init__()
        self.products, self._seen_by = products, seen_by

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, products = kwargs or {}, self.products
        products.unseen |= self._seen_by is not None and saver() != self._seen_by
        if tells(func):
            products.saving()
        if places := _written(func):
            products.spare(tree_leaves([args[i] if i < len(args) else kwargs.get(name) for i, name in places]))
        if not is_among(func, DEAR):
            return func(*args, **kwargs)
        seeded = torch.Tag.nondeterministic_seeded in func.tags
        before = [generator.get_state() for generator in products.generators if seeded]
        out = func(*args, **kwargs)
        drawn = any(not torch.equal(g.get_state(), s) for g, s in zip(products.generators, before, strict=False))
        products.note(func, (args, kwargs), out, not drawn and not _scores(func, args, out))
        return out

    def __exit__(self, *how: Any) -> None:
        super().__exit__(*how)
        self.products.end()


class _Answering(TorchDispatchMode):
    """Answers dear operations with what was noted; they must come again as they came."""

    def __init__(self, products: Products) -> None:
        super().__init__()
        self.products, self._answers = products, products.answers()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if tells(func):
            self.products.saving()
        if not is_among(func, DEAR):
            return func(*args, **kwargs)
        answer = next(self._answers, None)
        if answer is None or (answer.op, answer.shapes) != (func, _shapes((args, kwargs))):
            raise _differs(self.products.name, f"{func} of {_shapes((args, kwargs))}", answer)
        if answer.leaves is None:
            return func(*args, **kwargs)
        return tree_unflatten([self.products.brought(leaf) for leaf in answer.leaves], answer.form)

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        super().__exit__(kind, error, trace)
        left = next(self._answers, None)
        if kind is None and left is not None:
            raise _differs(self.products.name, "nothing more", left)


def _differs(name: str, came: str, answer: Answer | None) -> RuntimeError:
    was = f"{answer.op} of {answer.shapes}" if answer is not None else "nothing more"
    return RuntimeError(
        f"{name}: its forward came to {came} in the backward, where it had come to {was}; a block that does "
        'other things the second time cannot be recomputed: set offload.recompute = "none"'
    )


def saver() -> Any:
    """What autograd now hands tensors to that it wants to save; the hooks that were put there last."""
    found = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return found[0] if found else None


@cache
def is_among(func: OpOverload, names: tuple[str, ...]) -> bool:
    """Whether it is one of torch's own operations called so; what writes into what it is given has no result of its
    own, and is none."""
    space, _, name = func.overloadpacket._qualified_op_name.partition("::")
    return space == "aten" and name in names and not func._schema.is_mutable


@cache
def _written(func: OpOverload) -> tuple[tuple[int, str], ...]:
    """Places and names of the arguments that an operation changes."""
    told = enumerate(func._schema.arguments)
    return tuple((i, a.name) for i, a in told if a.alias_info is not None and a.alias_info.is_write)


def _scores(func: OpOverload, args: Any, out: Any) -> bool:
    """Whether a product of batches is larger than all that went in."""
    name = func.overloadpacket.__name__
    return name in BATCHED and out.numel() > sum(prod(shape) for shape in _shapes(args))


def _shapes(args: Any) -> tuple[torch.Size, ...]:
    return tuple(x.shape for x in tree_leaves(args) if isinstance(x, Tensor))


def _storage(tensor: Any) -> int:
    return tensor.untyped_storage()._cdata if isinstance(tensor, Tensor) else 0


def _blank(leaf: Any) -> Any:
    return Blank(leaf.shape, leaf.stride(), leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else leaf


def _lying(slot: Tensor, laid: Laid) -> Tensor:
    """A result in a slot: a tensor of its own and no view, since autograd is to make it the output of an operation."""
    start = (slot.storage_offset() + laid.start_bytes) // laid.dtype.itemsize
    blank = torch.empty(0, dtype=laid.dtype, device=slot.device)
    return blank.set_(slot.untyped_storage(), start, laid.shape, laid.stride)
