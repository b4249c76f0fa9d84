"""Which axis of each input and output of a block is the batch: found by one more row, never guessed from a size.

The model is run once more with its last row doubled and with stand-ins that only look: each notes the shapes it is
given and answers with zeros of the shapes that the block itself would give (asked of the block under fake tensors,
which compute nothing).  An axis that grew by exactly one is the batch axis.  The cost is one forward of the model's
outer code, once per structure of inputs.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map, tree_unflatten

from offloadz.model.body import Body
from offloadz.plan.errors import ConfigError

Shapes = tuple[tuple[int, ...] | None, ...]


class Seen(BaseException):
    """Ends the looking forward once the last block has been reached; never leaves the call that looks."""


@dataclass(frozen=True)
class Axes:
    """Batch axis per input leaf and per output leaf; None where a leaf is the same for all rows or is no tensor."""

    inputs: tuple[int | None, ...]
    outputs: tuple[int | None, ...]


@dataclass
class Probe:
    """One looking forward: what each block seat was given, up to the last one."""

    last_seat: int
    inputs: dict[int, Shapes] = field(default_factory=dict)
    outputs: dict[int, Shapes] = field(default_factory=dict)
    answers: dict[Any, tuple[Shapes, TreeSpec, list[Any]]] = field(default_factory=dict)

    def visit(self, seat: int, body: Body, leaves: list[Any], spec: TreeSpec) -> Any:
        """Note a block's inputs and answer as it would."""
        self.inputs[seat] = shapes_of(leaves)
        key = (type(body.module), self.inputs[seat])
        if key not in self.answers:
            self.answers[key] = faked(body, leaves, spec)
        shapes, out_spec, likeness = self.answers[key]
        self.outputs[seat] = shapes
        if seat == self.last_seat:
            raise Seen
        return tree_unflatten([_zeros(like) for like in likeness], out_spec)


class Likeness(NamedTuple):
    """What is kept of an output that was asked about."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def shapes_of(leaves: list[Any]) -> Shapes:
    """The shape of every tensor among flattened inputs or outputs; None for anything else."""
    return tuple(tuple(leaf.shape) if isinstance(leaf, Tensor) else None for leaf in leaves)


def faked(body: Body, leaves: list[Any], spec: TreeSpec) -> tuple[Shapes, TreeSpec, list[Any]]:
    """Shapes, structure and likenesses of a block's outputs, from a forward that computes nothing.

    Where torch has no shape rule for the dtype at hand (grouped products of experts know bfloat16 only), bfloat16 is
    asked about instead; the sizes are the same.
    """
    try:
        out, out_spec = _asked(body, leaves, spec, torch.float32)
    except (RuntimeError, NotImplementedError):
        try:
            out, out_spec = _asked(body, leaves, spec, torch.bfloat16)
        except (RuntimeError, NotImplementedError) as error:
            raise ConfigError(
                f"{type(body.module).__name__}: what a micro-batch makes of it cannot be told without computing it"
                f" ({str(error).splitlines()[0]}); set train.micro_batch_size = train.batch_size"
            ) from error
    likeness = [Likeness(tuple(o.shape), o.dtype, o.device) if isinstance(o, Tensor) else o for o in out]
    return shapes_of(out), out_spec, likeness


def _asked(body: Body, leaves: list[Any], spec: TreeSpec, dtype: torch.dtype) -> tuple[list[Any], TreeSpec]:
    """A block's outputs under fake tensors with weights and fp32 inputs of `dtype`."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    log = logging.getLogger(FakeTensorMode.__module__)  # it prints a stack for every operator without a rule

    def fake(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        made = mode.from_tensor(x)
        return made.to(dtype) if x.dtype == torch.float32 else made

    device = next((x.device for x in leaves if isinstance(x, Tensor) and x.is_floating_point()), None)
    with mode, torch.no_grad():
        weights = {
            place.name: torch.empty(place.module._parameters[place.attribute].shape, dtype=dtype, device=device)  # type: ignore[union-attr]
            for place in body.places
        }
        args, kwargs = tree_unflatten([fake(x) for x in leaves], spec)
        before, log.disabled = log.disabled, True
        try:
            with body.lent(weights):
                out, out_spec = tree_flatten(body.forward(*args, **kwargs))
        finally:
            log.disabled = before
        return [x.to(torch.float32) if isinstance(x, Tensor) and x.dtype == dtype else x for x in out], out_spec


def _zeros(like: Any) -> Any:
    return torch.zeros(like.shape, dtype=like.dtype, device=like.device) if isinstance(like, Likeness) else like


def one_more_row(tree: Any, rows: int) -> Any:
    """Every tensor whose first axis has `rows` entries, with its last entry doubled."""

    def grow(x: Any) -> Any:
        grows = isinstance(x, Tensor) and x.dim() and x.shape[0] == rows
        return torch.cat([x, x[-1:]]) if grows else x

    return tree_map(grow, tree)


def compared(name: str, kind: str, small: Shapes, large: Shapes) -> tuple[int | None, ...]:
    """The axis that grew by one, per leaf; raises ConfigError for a leaf in which rows are mixed with something
    else."""
    if len(small) != len(large):
        raise ConfigError(
            f"{name}: {kind}s differ in number between batches of different size; micro-batches are not possible,"
            " set train.micro_batch_size = train.batch_size"
        )
    return tuple(_axis(name, f"{kind} {i}", a, b) for i, (a, b) in enumerate(zip(small, large, strict=True)))


def _axis(name: str, what: str, a: tuple[int, ...] | None, b: tuple[int, ...] | None) -> int | None:
    if a == b or a is None or b is None:
        return None
    grown = [i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y]
    if len(a) == len(b) and len(grown) == 1 and b[grown[0]] == a[grown[0]] + 1:
        return grown[0]
    raise ConfigError(
        f"{name}: {what} has shape {a} for a batch and {b} with one more row, so no single axis is the batch;"
        " set train.micro_batch_size = train.batch_size to run the block on the whole batch"
    )


def cut_rows(batch: dict[str, Any], rows: int, first: int, last: int) -> dict[str, Any]:
    """Rows `first` to `last` of a batch that has `rows`; what has another first size stays whole."""
    if (first, last) == (0, rows):
        return batch

    def cut(x: Any) -> Any:
        return x[first:last] if isinstance(x, Tensor) and x.dim() and x.shape[0] == rows else x

    return {key: cut(value) for key, value in batch.items()}
