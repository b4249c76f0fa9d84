"""A misspelt keyword is answered with the names there are, not only refused.

For calls that people write by hand with many keywords.  The trade-off: one more frame in a traceback.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from difflib import get_close_matches
from typing import ParamSpec, TypeVar

Asked = ParamSpec("Asked")
Result = TypeVar("Result")
Kind = TypeVar("Kind", bound=type)


def near_names(function: Callable[Asked, Result]) -> Callable[Asked, Result]:
    """`function`, whose TypeError for an unknown keyword names the nearest one, or all."""
    names = [name for name in inspect.signature(function).parameters if name != "self"]

    @functools.wraps(function)
    def call(*args: Asked.args, **options: Asked.kwargs) -> Result:
        for name in options:
            if name not in names:
                near = get_close_matches(name, names, 1)
                told = f"nearest is {near[0]}" if near else f"it takes {', '.join(names)}"
                raise TypeError(f"{function.__qualname__.partition('.')[0]} has no {name}; {told}")
        return function(*args, **options)

    return call


def near_fields(kind: Kind) -> Kind:
    """A dataclass that answers so when it is made."""
    kind.__init__ = near_names(kind.__init__)  # type: ignore[misc]
    return kind
