"""Blocks compiled by torch.compile: `kernels = "compile"`.

One function is compiled for all blocks.  A block is one of its inputs, and so are the weights, which are lent to it for
a call: what the compiler guards are classes, shapes and settings, so blocks that are alike share one piece of code.

[Note: compiled code knows no history]  torch would compile the second length of rows for any length, by how long the
first two happened to be, and choose among kernels by timing them.  A run that is resumed meets other lengths first, and
would go on with other bits.  So code is made for each shape alone, nothing is timed, and nothing is read from torch's
cache of graphs, which is pickled.  Random numbers are drawn as eager blocks draw them.

The trade-off: each shape that blocks meet costs a compilation (about ten seconds for a block of a Llama on one core);
`offloadz train` therefore fills rows up to one of a few lengths (`row_lengths`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from offloadz.model.body import Body
from offloadz.plan.errors import ConfigError

log = logging.getLogger("offloadz")

INDUCTOR: dict[str, Any] = {
    "deterministic": True,
    "fallback_random": True,
    "fx_graph_cache": False,
    "compile_threads": 1,  # each other process that compiles takes some 300 MB that no plan knows of
}
DYNAMO: dict[str, Any] = {
    "recompile_limit": 1 << 30,  # beyond it blocks would run eager, in silence
    "accumulated_recompile_limit": 1 << 30,
    "skip_nnmodule_hook_guards": False,  # a hook that a user adds between two steps counts
    "automatic_dynamic_local_pgo": False,
}

MANY_SHAPES = 16
"""Of one kind of block, before a user is told that each costs a compilation."""


def compiled_forward(body: Body) -> Callable[..., Any]:
    """The block's forward, compiled when it meets a shape for the first time."""
    name, own = type(body.module).__name__, body.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        _note_shape(name, args)
        try:
            return _compiled(own, args, kwargs)
        except (torch._dynamo.exc.TorchDynamoException, GuardOnDataDependentSymNode) as error:
            raise ConfigError(
                f'{name} cannot be compiled whole: {_first_line(error)}; write kernels = "eager"'
            ) from error

    return forward


def require_compiler(device: torch.device) -> None:
    """ConfigError unless a few lines are compiled for this device and run there: the one test that is worth it."""
    x = torch.ones(64, device=device, requires_grad=True)
    try:
        _compiled(_probe, (x,), {}).backward()
    except Exception as error:  # whatever a compiler's search, its run or its library may raise
        needs = "a C++ compiler (g++) with the headers of Python" if device.type == "cpu" else "triton"
        raise ConfigError(
            f'kernels = "compile" needs {needs} for the device {device}, which did not do here: '
            f'{_first_line(error)}; install it, or write "eager"'
        ) from error


def _probe(x: Tensor) -> Tensor:
    return (x.sin() * 2.0).sum()


def _compiled(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with ExitStack() as stack:
        stack.enter_context(torch._dynamo.config.patch(DYNAMO))
        stack.enter_context(torch._functorch.config.patch(enable_autograd_cache=False))
        return _compiler()(forward, args, kwargs)


@cache
def _compiler() -> Callable[..., Any]:
    """One for the whole process: a second run finds what the first had compiled."""
    return torch.compile(_called, fullgraph=True, dynamic=False, options=INDUCTOR)  # type: ignore[no-any-return]


def _called(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return forward(*args, **kwargs)


_SHAPES: dict[str, set[torch.Size]] = {}


def _note_shape(name: str, args: tuple[Any, ...]) -> None:
    """Say once that blocks of this class meet many shapes."""
    seen = _SHAPES.setdefault(name, set())
    before = len(seen)
    seen.update(x.shape for x in args[:1] if isinstance(x, Tensor))
    if before < len(seen) == MANY_SHAPES:
        log.warning(
            '%s: compiled for %d shapes of its input, and each further one takes a compilation; fill rows up to a few '
            'lengths, or write kernels = "eager"',
            name, len(seen),
        )  # fmt: skip


def _first_line(error: BaseException) -> str:
    """The first line of an error that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
