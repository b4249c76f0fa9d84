"""Optimizers as a user sees them: settings to begin with, and a `torch.optim.Optimizer` whose steps a run takes.

`AdamW`, `Adam`, `Lion` and `SGD` are what one passes to `offload`; `RunOptimizer` is what `run.optimizer` is: groups as
torch has them, so that torch's schedulers and a user's own loop can change rates, over parameters that hold no weights.
The arithmetic is `runtime/native.py`'s, the storage `plan/recipes.py`'s, state in torch's form `torch_state.py`'s.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from hashlib import blake2b
from typing import Any, ClassVar

import torch
from torch import nn

from offloadz.model.near import near_fields
from offloadz.plan.errors import ConfigError
from offloadz.plan.recipes import STATES, Recipe, recipe_of
from offloadz.runtime.native import Numbers

log = logging.getLogger("offloadz")


class Settings:
    """What all optimizers have: fields are checked once, and name a recipe."""

    name: ClassVar[str]
    keys: ClassVar[tuple[str, ...]]
    """What a parameter group holds."""
    apart: ClassVar[tuple[str, ...]] = ()
    """Those of them that a group of settings may not change."""

    lr: float
    weight_decay: float
    no_decay: Sequence[str]
    groups: Sequence[Mapping[str, Any]]
    state: str

    def __post_init__(self) -> None:
        kind = type(self).__name__
        if self.state not in STATES:
            raise ConfigError(f"{kind}: state = {self.state!r}; needed: one of {', '.join(STATES)}")
        _check_numbers(kind, {key: getattr(self, key) for key in self.keys})
        _check_patterns(f"{kind}: no_decay", self.no_decay)
        free = [key for key in self.keys if key not in self.apart]
        for group in self.groups:
            strange = sorted(set(group) - {"match", *free})
            if strange or "match" not in group:
                raise ConfigError(
                    f"{kind}: a group has {', '.join(strange) or 'no match'}; "
                    f"needed: match and any of {', '.join(free)}"
                )
            _check_patterns(f"{kind}: match of a group", group["match"])
            told = {key: group[key] for key in free if group.get(key) is not None}
            _check_numbers(f"{kind}: the group of {list(group['match'])}", told)

    @property
    def matches(self) -> list[str]:
        """The name patterns of all groups."""
        return [pattern for group in self.groups for pattern in group["match"]]

    @property
    def decouples(self) -> bool:
        """Whether the decay acts on the weight, not through the gradient."""
        return True

    @property
    def recipe(self) -> Recipe:
        return recipe_of(self.name, self.state, getattr(self, "momentum", 0.0))


def _check_numbers(whose: str, told: Mapping[str, Any]) -> None:
    for key, value in told.items():
        if not _sound(key, value):
            raise ConfigError(f"{whose}: {key} = {value!r}; needed: 0 or more (betas: two numbers from 0 to below 1)")


def _sound(key: str, value: Any) -> bool:
    try:
        if key == "betas":
            return len(value) == 2 and all(0 <= float(b) < 1 for b in value)
        return math.isfinite(value) and bool(value >= 0) and (key != "momentum" or bool(value < 1))
    except (TypeError, ValueError):  # no number at all
        return False


def _check_patterns(whose: str, patterns: Any) -> None:
    """A bare text would be taken letter by letter, and its "*" matches every parameter."""
    listed = isinstance(patterns, Collection) and not isinstance(patterns, str)
    if not listed or not all(isinstance(pattern, str) for pattern in patterns):
        raise ConfigError(f"{whose} = {patterns!r}; needed: a list of name patterns, such as ['*norm*']")


@near_fields
@dataclass(frozen=True)
class AdamW(Settings):
    """Settings of AdamW (Loshchilov and Hutter 2019); `decoupled=False` is Adam with L2 decay in the gradient.

    Defaults are torch's.  `no_decay`: name patterns whose weight decay is 0.  `groups`: mappings with `match` (name
    patterns) and any of `lr`, `weight_decay`, `betas`, `eps`; the first that matches wins.  `state`: how the state is
    stored, fp32 | bf16 | int8 | int8-sr (see docs/optimizer.md).
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2
    no_decay: Sequence[str] = ()
    groups: Sequence[Mapping[str, Any]] = field(default_factory=tuple)
    decoupled: bool = True
    state: str = "fp32"

    name: ClassVar[str] = "adamw"
    keys: ClassVar[tuple[str, ...]] = ("lr", "betas", "eps", "weight_decay")

    @property
    def decouples(self) -> bool:
        return self.decoupled


@near_fields
@dataclass(frozen=True)
class Adam(AdamW):
    """Settings of Adam (Kingma and Ba 2015), whose decay is added to the gradient; otherwise as `AdamW`."""

    weight_decay: float = 0.0
    decoupled: bool = False

    name: ClassVar[str] = "adam"


@near_fields
@dataclass(frozen=True)
class Lion(Settings):
    """Settings of Lion (Chen and others 2023, algorithm 2): one moment, steps of equal size, decoupled decay.

    A good `lr` is three to ten times smaller than AdamW's, with a larger decay.  Other fields as in `AdamW`.
    """

    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.0
    no_decay: Sequence[str] = ()
    groups: Sequence[Mapping[str, Any]] = field(default_factory=tuple)
    state: str = "fp32"

    name: ClassVar[str] = "lion"
    keys: ClassVar[tuple[str, ...]] = ("lr", "betas", "weight_decay")


@near_fields
@dataclass(frozen=True)
class SGD(Settings):
    """Settings of stochastic gradient descent as torch has it: decay in the gradient, momentum without dampening.

    Without momentum nothing is kept but the low half of bf16 weights.  Other fields as in `AdamW`.
    """

    lr: float = 1e-3
    momentum: float = 0.0
    weight_decay: float = 0.0
    no_decay: Sequence[str] = ()
    groups: Sequence[Mapping[str, Any]] = field(default_factory=tuple)
    state: str = "fp32"

    name: ClassVar[str] = "sgd"
    keys: ClassVar[tuple[str, ...]] = ("lr", "momentum", "weight_decay")
    apart: ClassVar[tuple[str, ...]] = ("momentum",)

    @property
    def decouples(self) -> bool:
        return False


KINDS = {kind.name: kind for kind in (AdamW, Adam, Lion, SGD)}
"""`optimizer.name` to its settings."""


def param_groups(settings: Settings, named: Sequence[tuple[str, nn.Parameter]]) -> list[dict[str, Any]]:
    """Torch's parameter groups: one per (matching group, decays or not) that has parameters, each with its names."""
    buckets: dict[tuple[int, bool], dict[str, Any]] = {}
    for name, param in named:
        index = next((i for i, g in enumerate(settings.groups) if _matches(name, g["match"])), -1)
        own = (
            {}
            if index < 0
            else {k: v for k, v in settings.groups[index].items() if k in settings.keys and v is not None}
        )
        bare = _matches(name, settings.no_decay) and "weight_decay" not in own
        group = {k: getattr(settings, k) for k in settings.keys} | own | ({"weight_decay": 0.0} if bare else {})
        bucket = buckets.setdefault((index, bare), {**group, "params": [], "names": []})
        bucket["params"].append(param)
        bucket["names"].append(name)
    if not buckets:
        raise ConfigError("nothing to train: every parameter is frozen; loosen model.freeze")
    for index, group in enumerate(settings.groups):
        if all(index != used for used, _ in buckets):  # allowed; each pattern matches something (`shapes.make_spec`)
            log.warning(
                "optimizer.groups: %s has nothing: all it matches is frozen or an earlier group's", group["match"]
            )
    return [buckets[key] for key in sorted(buckets)]  # the settings' own first: theirs is the rate that is shown


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def seed_of(seed: int, name: str) -> int:
    """What stochastic rounding of a parameter is drawn from: the run's seed and the name, 63 bits."""
    return int.from_bytes(blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "little") >> 1


class RunOptimizer(torch.optim.Optimizer):
    """Torch's interface over a run: groups, schedulers, state; `run.update` is what calls `step`."""

    def __init__(
        self,
        settings: Settings,
        named: Sequence[tuple[str, nn.Parameter]],
        take: Callable[[], None],
        seed: int = 0,
    ) -> None:
        self._take = take
        self.keys = settings.keys
        self.recipe, self.decoupled = settings.recipe, settings.decouples
        self.in_update = False
        self.run: Any = None
        """The run whose optimizer this is; set once it stands."""
        self._seeds = {name: seed_of(seed, name) for name, _ in named}
        super().__init__(param_groups(settings, named), {k: getattr(settings, k) for k in settings.keys})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Called by `run.update` (torch's schedulers count it)."""
        if not self.in_update:
            raise RuntimeError(
                "run.optimizer.step() is called by run.update(); call run.step(batch), or run.backward(loss) and"
                " run.update()"
            )
        self._take()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """What is trained is settled by `offload`; groups come from its settings.  Raises ConfigError for any other."""
        if "names" not in param_group:
            raise ConfigError(
                "run.optimizer.add_param_group: what a run trains is settled; give offload the optimizer with groups="
            )
        super().add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing to do: gradients of a step are gone once it is decided."""

    def state_dict(self) -> dict[str, Any]:
        """Moments as whole fp32 tensors in torch's form, under every recipe and placement: 4 bytes a parameter and
        moment (8 for AdamW), all in memory at once, with several ranks on each of them (all call it).  Raises
        DoesNotFit with both figures; a checkpoint streams."""
        from offloadz.model.torch_state import state_dict

        return state_dict(self.run)

    def load_state_dict(self, told: Mapping[str, Any]) -> None:  # type: ignore[override]
        """Go on from a state in torch's form, such as a plain torch AdamW's with the parameters in the same order."""
        from offloadz.model.torch_state import load_state_dict

        load_state_dict(self.run, told)

    def numbers(self, steps: Mapping[str, int], grad_scale: float) -> dict[str, Numbers]:
        """What each parameter's next update is called with, by name: copied now, so that a schedule may move on."""
        out: dict[str, Numbers] = {}
        for group in self.param_groups:
            check_group(group, self.recipe)
            names, (beta1, beta2) = group["names"], group.get("betas", (0.0, 0.0))
            shared = {
                "lr": float(group["lr"]), "beta1": float(beta1), "beta2": float(beta2),
                "eps": float(group.get("eps", 0.0)), "weight_decay": float(group["weight_decay"]),
                "momentum": float(group.get("momentum", 0.0)), "grad_scale": grad_scale, "decoupled": self.decoupled,
            }  # fmt: skip
            at = {step: Numbers(self.recipe.rule, step=step + 1, **shared) for step in {steps.get(n, 0) for n in names}}
            out |= {name: at[steps.get(name, 0)].seeded(self._seeds[name]) for name in names}
        return out


def check_group(group: Mapping[str, Any], recipe: Recipe) -> None:
    """What a schedule or a caller wrote into a group, looked at before a step is decided by it."""
    for name in ("lr", "eps", "weight_decay", "momentum", "betas"):
        if name in group and not _sound(name, group[name]):
            needed = {"betas": "two numbers from 0 to below 1", "momentum": "a number from 0 to below 1"}
            raise ConfigError(
                f"run.optimizer: {name} = {group[name]!r} in a parameter group; "
                f"needed: {needed.get(name, 'a number of 0 or more')}"
            )
    if "momentum" in group and (float(group["momentum"]) > 0) != recipe.momentum:
        raise ConfigError(
            f"run.optimizer: momentum = {group['momentum']} in a parameter group; a run begun "
            f"{'with' if recipe.momentum else 'without'} momentum stays so"
        )
