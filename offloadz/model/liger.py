"""Liger's kernels inside blocks: `kernels = "liger"`, of the package `liger-kernel` (`pip install offloadz[liger]`).

Norms, the product in the gated feed-forward and the rotation of queries and keys run by them.  The package's own way
changes the modules of transformers for every model of the process, and the loss; here a block has them for the time of
one call, and the loss is the head's as ever.  Which kernel is whose, and with which settings, is what `monkey_patch.py`
of the package says (0.8.5), except that a gradient is never written over the one it is made from.

The trade-off: a family is in the table below or refused by name, since a norm that adds one to its weights looks like
one that does not.  No GPU has run this yet.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from offloadz.model.body import Body
from offloadz.model.outline import config_of
from offloadz.plan.errors import ConfigError

ROTATION = "apply_rotary_pos_emb"
"""What the rotation is called in transformers' files."""


class Norms(NamedTuple):
    """What a family's norms add to their weights, and what they compute in float32, as Liger names it."""

    offset: float
    casting: str


LLAMA, GEMMA = Norms(0.0, "llama"), Norms(1.0, "gemma")
FAMILIES = {
    **dict.fromkeys(("llama", "mistral", "olmo2", "qwen2", "qwen3"), LLAMA),
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text"), GEMMA),
}
"""By `model_type`."""

GATES = {"silu": "LigerSiLUMulFunction", "swish": "LigerSiLUMulFunction", "gelu_pytorch_tanh": "LigerGELUMulFunction"}
"""Liger's product by the activation of the gate."""

TOLD = 'kernels = "liger"'


def require_liger(model: nn.Module, device: torch.device) -> None:
    """ConfigError where the family is unknown, the package is missing, or its kernels do not run on the device."""
    family, gate = _family(model)
    if family not in FAMILIES:
        raise ConfigError(f'{TOLD}: {family} is none of {", ".join(sorted(FAMILIES))}; write "eager"')
    if gate not in GATES:
        raise ConfigError(f'{TOLD}: the activation {gate} is none of {", ".join(GATES)}; write "eager"')
    try:
        from liger_kernel import ops
    except ImportError as error:
        install = 'pip install "offloadz[liger]"'
        raise ConfigError(f'{TOLD} needs the package liger-kernel ({error}); {install}, or write "eager"') from error
    try:
        ones = torch.ones(2, 64, device=device)
        ops.LigerRMSNormFunction.apply(ones, ones[0], 1e-6, *FAMILIES[family], False, None)
    except Exception as error:  # triton's, of many kinds
        said = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(
            f'{TOLD} does not run on the device {device} ({said}); needed: a GPU that triton knows, or write "eager"'
        ) from error


def liger_forwards(model: nn.Module) -> Callable[[Body], Callable[..., Any]]:
    """What makes the forward of a block of this model."""
    family, gate = _family(model)
    return partial(_forward, norms=FAMILIES[family], gate=GATES[gate])


def _forward(body: Body, norms: Norms, gate: str) -> Callable[..., Any]:
    """The block's forward, with Liger's in the places of its parts while it runs."""
    found = [(part, _instead(part, norms, gate)) for part in body.module.modules()]
    lent = [(part, instead) for part, instead in found if instead is not None]

    def forward(*args: Any, **kwargs: Any) -> Any:
        with _answering(lent):
            return body.forward(*args, **kwargs)

    return forward


@contextmanager
def _answering(lent: Sequence[tuple[nn.Module, Callable[..., Any]]]) -> Iterator[None]:
    """Modules answer by these forwards while the block lasts."""
    for part, forward in lent:
        part.__dict__["forward"] = forward
    try:
        yield
    finally:
        for part, _ in lent:
            del part.__dict__["forward"]


def _instead(part: Any, norms: Norms, gate: str) -> Callable[..., Any] | None:
    """Liger's forward for a part of a block; None where it has none, or somebody else put one there."""
    kind = type(part)
    if "forward" in part.__dict__:
        return None
    if kind.__name__.endswith("RMSNorm"):
        return _norm(part, norms)
    if kind.__name__.endswith("MLP"):
        return _gated(part, gate)
    return _rotated(part) if kind.__name__.endswith("Attention") else None


def _norm(part: Any, norms: Norms) -> Callable[..., Any]:
    from liger_kernel.ops import LigerRMSNormFunction as Norm

    eps = part.variance_epsilon if hasattr(part, "variance_epsilon") else part.eps
    return lambda x: Norm.apply(x, part.weight, eps, *norms, False, None)


def _gated(part: Any, gate: str) -> Callable[..., Any]:
    from liger_kernel import ops

    product = getattr(ops, gate)
    return lambda x: part.down_proj(product.apply(part.gate_proj(x), part.up_proj(x)))


def _rotated(part: nn.Module) -> Callable[..., Any]:
    """The attention's own forward, in which the name of the rotation means Liger's."""
    from liger_kernel.ops import LigerRopeFunction as Rotation

    own = inspect.unwrap(type(part).forward)
    names = {**vars(sys.modules[type(part).__module__]), ROTATION: partial(_turned, Rotation.apply)}
    copy = FunctionType(own.__code__, names, own.__name__, own.__defaults__, own.__closure__)
    copy.__kwdefaults__ = own.__kwdefaults__
    return MethodType(copy, part)


def _turned(rotation: Callable[..., Any], query: Tensor, key: Tensor, *told: Any) -> Any:
    """Queries and keys, over which the kernel writes unseen by torch.  A change of nothing says so: who keeps what made
    them (`products.py`) copies it first."""
    for x in (query, key):
        x.detach()[:0].zero_()
    return rotation(query, key, *told)[:2]  # newer versions give the angles back too


def _family(model: nn.Module) -> tuple[str, str]:
    """The model's type and the activation of its gate, as its configuration tells them."""
    told = config_of(model) or {}
    gate = told.get("hidden_activation") or told.get("hidden_act")
    return str(told.get("model_type", type(model).__name__)), str(gate)
