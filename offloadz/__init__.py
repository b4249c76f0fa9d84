"""offloadz: fine-tune all weights of a model that does not fit, with exact AdamW.

`load` a model, `offload` it, `run.step(batch)`.  Importing this package is quick and starts nothing: the parts that
need torch are loaded when they are first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from offloadz.plan.errors import ConfigError, DamagedState, DiskFailed, DoesNotFit, UpdateFailed

if TYPE_CHECKING:
    from offloadz.model.offload import offload
    from offloadz.model.optimizer import SGD, Adam, AdamW, Lion
    from offloadz.model.run import Run, token_logprobs
    from offloadz.model.weights import load

__version__ = "0.1.0"
__all__ = [
    "SGD", "Adam", "AdamW", "ConfigError", "DamagedState", "DiskFailed", "DoesNotFit", "Lion", "Run", "UpdateFailed",
    "load", "offload", "token_logprobs",
]  # fmt: skip

_ROOMS = {
    "SGD": "offloadz.model.optimizer",
    "Adam": "offloadz.model.optimizer",
    "AdamW": "offloadz.model.optimizer",
    "Lion": "offloadz.model.optimizer",
    "Run": "offloadz.model.run",
    "load": "offloadz.model.weights",
    "offload": "offloadz.model.offload",
    "token_logprobs": "offloadz.model.run",
}


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])


def __getattr__(name: str) -> Any:
    if name not in _ROOMS:
        raise AttributeError(f"module 'offloadz' has no attribute {name!r}; it has {', '.join(__all__)}")
    from importlib import import_module

    return getattr(import_module(_ROOMS[name]), name)
