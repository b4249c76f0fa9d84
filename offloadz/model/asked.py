"""What a caller of `offload` may get wrong, each found before anything is made.

Left to others: wishes that a plan contradicts (`offload.py`), what a model may not have (`outline.py`).  The trade-off:
checks that a type checker makes too, for callers who have none.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from offloadz.model.optimizer import KINDS as OPTIMIZERS
from offloadz.model.optimizer import Settings
from offloadz.model.outline import most_common_dtype
from offloadz.model.run import RUNS
from offloadz.plan.errors import ConfigError
from offloadz.plan.placement import COMMITS, TIERS
from offloadz.plan.spec import ITEM_BYTES
from offloadz.plan.words import parse_bytes


def check_arguments(model: nn.Module, tiers: dict[str, str], optimizer: Any) -> None:
    """What a caller may easily get wrong in kind."""
    if id(model) in RUNS:
        raise ConfigError(f"this {type(model).__name__} is already offloaded; first run.close(materialize=True)")
    _check_uncut(model)
    _check_not_recomputing(model)
    for kind, tier in tiers.items():
        if tier not in ("auto", *TIERS):
            raise ConfigError(f"{kind} = {tier!r}; needed: auto, {', '.join(TIERS)}")
    if optimizer is not None and not isinstance(optimizer, Settings):
        kinds = ", ".join(f"offloadz.{kind.__name__}" for kind in OPTIMIZERS.values())
        raise ConfigError(f"optimizer is a {type(optimizer).__name__}; needed: one of {kinds}, such as AdamW(lr=...)")


def _check_uncut(model: nn.Module) -> None:
    """ConfigError for a model of which each rank has a piece already; what is whole says nothing of a mesh."""
    mesh = getattr(model, "_device_mesh", None)
    cut = [name for name, param in model.named_parameters() if hasattr(param, "device_mesh")]
    if cut or mesh is not None:
        found = f"{cut[0]} is a DTensor" if cut else f"{type(model).__name__} is spread over {mesh}"
        raise ConfigError(
            f"{found}: a model that is already cut over ranks (tp_plan, device_mesh, FSDP) is not built; give offload "
            "the whole one, loaded without these (offloadz.load, best), and start with torchrun: the ranks share it by "
            "zero_stage"
        )


def _check_not_recomputing(model: nn.Module) -> None:
    """ConfigError for a model whose blocks are told to recompute by themselves, when their weights have gone."""
    told = [name for name, module in model.named_modules() if getattr(module, "gradient_checkpointing", False)]
    if told:
        raise ConfigError(
            f"{told[0] or type(model).__name__}: gradient checkpointing is on, and a run recomputes blocks itself: "
            "call model.gradient_checkpointing_disable(), or take it out of config.json; recompute = 'all' does it for "
            "every block, 'auto' where graphs have no room"
        )


def most_bytes(**limits: int | str | None) -> dict[str, Any]:
    """Limits in bytes: numbers, and the forms that a configuration takes; None leaves one to the machine."""
    found: dict[str, Any] = {key: None if told == "auto" else told for key, told in limits.items()}
    for key, told in found.items():
        if told is not None and (isinstance(told, bool) or not isinstance(told, int)):
            try:
                found[key] = parse_bytes(told)
            except ValueError as error:
                raise ConfigError(f'{key} = {told!r}: {error}, or a whole number of bytes, or "auto"') from None
    return found


def stored_dtype(model: nn.Module, dtype: torch.dtype | str | None) -> str:
    """Dtype of the working weights at rest."""
    stored = str(dtype).removeprefix("torch.") if dtype is not None else most_common_dtype(model)
    if stored not in ITEM_BYTES:
        raise ConfigError(f"dtype {stored} is not built; needed: one of {', '.join(ITEM_BYTES)}")
    return stored


def check_kinds(lists: dict[str, Any], copies: Any) -> None:
    """A bare text would be taken letter by letter, and no copies as one."""
    if not isinstance(copies, int) or copies < 1:
        raise ConfigError(f"copies = {copies!r}; needed: a whole number of 1 or more")
    for key, names in lists.items():
        if isinstance(names, str):
            raise ConfigError(f"{key} = {names!r}; needed: a list, such as [{names!r}]")


def check_commit(commit: str, max_grad_norm: float) -> None:
    """A way of committing that there is, and that can clip where it is to."""
    if commit not in COMMITS:
        raise ConfigError(f"commit = {commit!r}; needed: {', '.join(COMMITS)}")
    if commit == "in_place" and max_grad_norm:
        raise ConfigError(f"commit = 'in_place' cannot clip; found max_grad_norm = {max_grad_norm}, needed: 0")
