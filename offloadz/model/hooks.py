"""Forward hooks that a user has put on modules, or on all modules at once: who they are, and calls without them.

They see what is computed, as often as it is: inside a block again where it runs again.  What offloadz calls for its own
ends (batch axes are looked for with one more row, a head is tried) is none of theirs.  Hooks of transformers are let
be: what they record leaves with the outputs (`recorded.py`).  The trade-off: a hook that changes the number of a
block's inputs is not there when these are looked at, and such a block is refused where a batch is split.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules import module as everywhere

OWN = ("_forward_hooks", "_forward_pre_hooks")
"""Where a module has its hooks."""

GLOBAL = ("_global_forward_hooks", "_global_forward_pre_hooks")
"""Where torch has those for all modules."""


def hooked(modules: Iterable[nn.Module]) -> bool:
    """Whether a forward hook of a user sees calls of these modules."""
    return any(_of_users(held) for _, _, held in _held(modules, GLOBAL))


@contextmanager
def unhooked(modules: Iterable[nn.Module], also: tuple[str, ...] = GLOBAL) -> Iterator[None]:
    """While this lasts, calls of these modules reach no forward hook of a user, nor do `also`."""
    moved = [(at, key, held) for at, key, held in _held(modules, also) if _of_users(held)]
    for at, key, held in moved:
        at[key] = OrderedDict((number, hook) for number, hook in held.items() if not _is_users(hook))
    try:
        yield
    finally:
        for at, key, held in moved:
            at[key] = held


def _held(
    modules: Iterable[nn.Module], also: tuple[str, ...]
) -> Iterator[tuple[dict[str, Any], str, Mapping[int, Any]]]:
    """(where a collection of hooks is kept, under which name, and the collection)."""
    yield from ((everywhere.__dict__, key, everywhere.__dict__[key]) for key in also)
    for module in modules:
        yield from ((module.__dict__, key, module.__dict__[key]) for key in OWN)


def _of_users(held: Mapping[int, Any]) -> bool:
    return any(_is_users(hook) for hook in held.values())


def _is_users(hook: Any) -> bool:
    return not (getattr(hook, "__module__", None) or "").startswith(("transformers.", "offloadz."))
