"""AdamW as a user sees it: settings to begin with, and a `torch.optim.Optimizer` whose steps a run takes.

`AdamW` is what one passes to `offload`; `RunOptimizer` is what `run.optimizer` is: groups as torch has them, so that
torch's schedulers and a user's own loop can change rates, over parameters that hold no weights.  The arithmetic is
`runtime/native.py`'s.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from offloadz.plan.errors import ConfigError

log = logging.getLogger("offloadz")


@dataclass(frozen=True)
class AdamW:
    """Settings of AdamW (Loshchilov and Hutter 2019); `decoupled=False` is Adam with L2 decay in the gradient.

    Defaults are torch's.  `no_decay`: name patterns whose weight decay is 0.  `groups`: mappings with `match` (name
    patterns) and any of `lr`, `weight_decay`, `betas`, `eps`; the first that matches wins.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2
    no_decay: Sequence[str] = ()
    groups: Sequence[Mapping[str, Any]] = field(default_factory=tuple)
    decoupled: bool = True

    def __post_init__(self) -> None:
        bounds = {"lr": self.lr >= 0, "eps": self.eps >= 0, "weight_decay": self.weight_decay >= 0}
        bounds["betas"] = len(self.betas) == 2 and all(0 <= b < 1 for b in self.betas)
        for name, held in bounds.items():
            if not held:
                raise ConfigError(
                    f"AdamW: {name} = {getattr(self, name)}; needed: 0 or more (betas: two numbers from 0 to below 1)"
                )
        for group in self.groups:
            strange = sorted(set(group) - {"match", *GROUP_KEYS})
            if strange or "match" not in group:
                raise ConfigError(
                    f"AdamW: a group has {', '.join(strange) or 'no match'}; "
                    f"needed: match and any of {', '.join(GROUP_KEYS)}"
                )


GROUP_KEYS = ("lr", "betas", "eps", "weight_decay")


def param_groups(settings: AdamW, named: Sequence[tuple[str, nn.Parameter]]) -> list[dict[str, Any]]:
    """Torch's parameter groups: one per (matching group, decays or not) that has parameters, each with its names."""
    buckets: dict[tuple[int, bool], dict[str, Any]] = {}
    for name, param in named:
        index = next((i for i, g in enumerate(settings.groups) if _matches(name, g["match"])), -1)
        own = (
            {} if index < 0 else {k: v for k, v in settings.groups[index].items() if k in GROUP_KEYS and v is not None}
        )
        bare = _matches(name, settings.no_decay) and "weight_decay" not in own
        group = {k: getattr(settings, k) for k in GROUP_KEYS} | own | ({"weight_decay": 0.0} if bare else {})
        bucket = buckets.setdefault((index, bare), {**group, "params": [], "names": []})
        bucket["params"].append(param)
        bucket["names"].append(name)
    if not buckets:
        raise ConfigError("nothing to train: every parameter is frozen; loosen model.freeze")
    for index, group in enumerate(settings.groups):
        if all(index != used for used, _ in buckets):  # allowed: a group may be empty; but it may be a typing error
            near = get_close_matches(str((group["match"] or [""])[0]), [name for name, _ in named], 1, 0.0) or ["-"]
            log.warning("optimizer.groups: %s is the first match of no parameter; nearest: %s", group["match"], near[0])
    return [buckets[key] for key in sorted(buckets)]  # the settings' own first: theirs is the rate that is shown


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


class RunOptimizer(torch.optim.Optimizer):
    """Torch's interface over a run: groups, schedulers; `run.update` is what calls `step`."""

    def __init__(self, settings: AdamW, named: Sequence[tuple[str, nn.Parameter]], take: Callable[[], None]) -> None:
        self._take = take
        self.decoupled = settings.decoupled
        self.in_update = False
        super().__init__(param_groups(settings, named), {k: getattr(settings, k) for k in GROUP_KEYS})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Called by `run.update` (torch's schedulers count it)."""
        if not self.in_update:
            raise RuntimeError(
                "run.optimizer.step() is called by run.update(); call run.step(batch), or run.backward(loss) and"
                " run.update()"
            )
        self._take()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing to do: gradients of a step are gone once it is decided."""

    def settings(
        self, steps: Mapping[str, int], grad_scale: float, threads: int
    ) -> dict[str, tuple[dict[str, Any], ...]]:
        """What each parameter's next update is called with, by name: copied now, so that a schedule may move on."""
        out: dict[str, tuple[dict[str, Any], ...]] = {}
        for group in self.param_groups:
            _check_group(group)
            shared = {
                "lr": float(group["lr"]), "beta1": float(group["betas"][0]), "beta2": float(group["betas"][1]),
                "eps": float(group["eps"]), "weight_decay": float(group["weight_decay"]),
                "grad_scale": grad_scale, "decoupled": self.decoupled, "threads": threads,
            }  # fmt: skip
            for name in group["names"]:
                out[name] = ({**shared, "step": steps.get(name, 0) + 1},)
        return out


def _check_group(group: Mapping[str, Any]) -> None:
    """What a schedule or a caller wrote into a group, looked at before a step is decided by it."""
    numbers = {"lr": group["lr"], "eps": group["eps"], "weight_decay": group["weight_decay"]}
    for name, number in numbers.items():
        if not (math.isfinite(float(number)) and float(number) >= 0):
            raise ConfigError(f"run.optimizer: {name} = {number} in a parameter group; needed: a number of 0 or more")
