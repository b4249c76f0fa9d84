"""The state of a run's optimizer in torch's form: whole fp32 tensors by number, and groups.

What torch's own AdamW, Adam and SGD save can be loaded here and the other way round, whatever the run stores its state
in.  A checkpoint (`state.py`) holds the same and more.  The trade-off: this form exists whole in memory (8 bytes a
parameter for AdamW), which is refused with numbers where there is no room; checkpoints are streamed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from offloadz.memory.flat import spans
from offloadz.model.optimizer import check_group
from offloadz.model.together import NOTHING, joined, require_memory
from offloadz.plan.errors import ConfigError
from offloadz.plan.machine import host_limit
from offloadz.plan.recipes import Recipe

OURS = ("params", "names", "param_names")
"""Entries of a group that are no settings."""

NEUTRAL = {"amsgrad": False, "maximize": False, "nesterov": False, "dampening": 0}
"""Settings of torch's that change the arithmetic, and the only value that is built."""


def state_dict(run: Any) -> dict[str, Any]:
    """`{"state": {i: {"step", moments}}, "param_groups": [...]}`; parameters that had no update have no state.

    Raises DoesNotFit where the tensors would not fit into the memory that is available.
    """
    run.flush()
    optimizer, steps = run.optimizer, run.session.steps
    params = [(n, p) for g in optimizer.param_groups for n, p in zip(g["names"], g["params"], strict=True)]
    updated = [(i, name, p) for i, (name, p) in enumerate(params) if steps.get(name, 0)]
    need = sum(4 * p.numel() * optimizer.recipe.num_moments for _, _, p in updated)
    what, free = "run.optimizer.state_dict()", host_limit().available_bytes
    require_memory(run.ranks, need, free, f"{what} takes", "run.save() writes the same in pieces")
    state: dict[int, dict[str, Tensor]] = {}
    by_name: dict[str, dict[str, Tensor]] = {}
    for i, name, param in updated:
        whole = {moment: torch.full(param.shape, NOTHING) for moment in optimizer.recipe.moments}
        state[i] = by_name[name] = {"step": torch.tensor(float(steps[name])), **whole}
    for view in run.session.parts():
        for span in (s for s in spans(view.unit, view.part) if s.member.name in by_name):
            for moment, values in view.moments.items():
                flat = by_name[span.member.name][moment].view(-1)
                flat[span.first_element : span.first_element + span.stop - span.start] = values[span.part_slice]
    joined(run.session, (held[moment] for held in by_name.values() for moment in optimizer.recipe.moments), what)
    return {"state": state, "param_groups": _groups(optimizer)}


def _groups(optimizer: Any) -> list[dict[str, Any]]:
    """Groups with numbers in place of parameters, and what torch's optimizers expect beside our settings."""
    groups, first = [], 0
    for group in optimizer.param_groups:
        told = {key: value for key, value in group.items() if key not in OURS}
        extra = {"dampening": 0, "nesterov": False} if optimizer.recipe.rule == "sgd" else {}
        if optimizer.recipe.rule == "adam":
            extra = {"amsgrad": False, "decoupled_weight_decay": optimizer.decoupled}
        numbers = list(range(first, first + len(group["names"])))
        groups.append({**told, **extra, "params": numbers, "param_names": list(group["names"])})
        first += len(numbers)
    return groups


def load_state_dict(run: Any, told: Mapping[str, Any]) -> None:
    """Moments, counters and group settings from torch's form; weights stay as they are.

    Parameters belong together by torch's rule: groups in order, and in each the parameters in order; by name where both
    sides have the same names (`param_names`).  Raises ConfigError before anything is changed: another number of groups
    or parameters, other shapes, the state of another rule, amsgrad, maximize, nesterov, dampening.
    """
    run.flush()
    optimizer = run.optimizer
    saved = _matched(optimizer, told)
    shapes = {n: p.shape for g in optimizer.param_groups for n, p in zip(g["names"], g["params"], strict=True)}
    for name, state in saved.items():
        _check_state(name, state, shapes[name], optimizer.recipe)
    settings = _settings(optimizer, told)
    for view in run.session.parts(write=True):
        for span in spans(view.unit, view.part):
            for moment, values in view.moments.items():
                whole = saved[span.member.name].get(moment)
                at, count = span.first_element, span.stop - span.start
                values[span.part_slice] = 0 if whole is None else whole.detach().reshape(-1)[at : at + count]
    run.session.steps.clear()
    run.session.steps.update({name: count for name, state in saved.items() if (count := _count(state))})
    for group, new in zip(optimizer.param_groups, settings, strict=True):
        group.update(new)


def _matched(optimizer: Any, told: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Name to the saved state of its parameter; empty where it has none."""
    if not isinstance(told, Mapping) or not {"state", "param_groups"} <= set(told):
        raise ConfigError(
            "load_state_dict: needed: what a torch optimizer's state_dict() returns, state and param_groups"
        )
    own = [group["names"] for group in optimizer.param_groups]
    theirs = [list(group["params"]) for group in told["param_groups"]]
    names = [name for group in told["param_groups"] for name in group.get("param_names") or ()]
    flat = [name for group in own for name in group]
    if sorted(names) != sorted(flat):
        if [len(g) for g in own] != [len(g) for g in theirs]:
            raise ConfigError(
                f"load_state_dict: its groups hold {[len(g) for g in theirs]} parameters, this run's "
                f"{[len(g) for g in own]}; give offload the optimizer settings (groups, no_decay) that lead to the same"
            )
        names = flat
    keys = [key for group in theirs for key in group]
    if strangers := set(told["state"]) - set(keys):
        raise ConfigError(
            f"load_state_dict: its state has {sorted(map(repr, strangers))[0]}, which no group names; needed: the "
            "numbers in params of param_groups (JSON makes texts of them)"
        )
    return {name: told["state"].get(key, {}) for name, key in zip(names, keys, strict=True)}


def _check_state(name: str, state: Mapping[str, Any], shape: torch.Size, recipe: Recipe) -> None:
    moments = recipe.moments
    found = {key: value for key, value in state.items() if key != "step" and value is not None}
    if found and set(found) != set(moments):
        raise ConfigError(
            f"load_state_dict: {name} has {', '.join(sorted(found))}; this optimizer keeps "
            f"{', '.join(moments) or 'nothing'}"
        )
    if found and recipe.rule == "adam" and "step" not in state:
        raise ConfigError(f"load_state_dict: {name} has no step, which corrects the moments of Adam")
    step = float(state.get("step", 0.0))
    if not (step >= 0 and step.is_integer()):
        raise ConfigError(f"load_state_dict: step of {name} is {step}; needed: a whole number of 0 or more")
    for moment, value in found.items():
        if not isinstance(value, Tensor) or value.is_meta or not bool(torch.isfinite(value).all()):
            kind = "a tensor that is not finite, or on meta" if isinstance(value, Tensor) else type(value).__name__
            raise ConfigError(f"load_state_dict: {moment} of {name} is {kind}; needed: a tensor of finite numbers")
        if value.shape != shape:
            raise ConfigError(
                f"load_state_dict: {moment} of {name} is {tuple(value.shape)}, the parameter {tuple(shape)}; are the "
                "parameters in another order?"
            )


def _settings(optimizer: Any, told: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The new settings of each of our groups: those of the saved group that holds its first parameter."""
    groups = told["param_groups"]
    where = {name: g for g in groups for name in g.get("param_names") or ()}
    found = []
    for index, group in enumerate(optimizer.param_groups):
        new = where[group["names"][0]] if set(group["names"]) <= set(where) else groups[index]
        for key, needed in NEUTRAL.items():
            if new.get(key, needed) != needed:
                raise ConfigError(f"load_state_dict: {key} = {new[key]} is not built; needed: {needed}")
        decoupled = new.get("decoupled_weight_decay")
        if optimizer.recipe.rule == "adam" and new["weight_decay"] and decoupled not in (None, optimizer.decoupled):
            kind = "AdamW" if decoupled else "Adam"
            raise ConfigError(
                f"load_state_dict: it is the state of {kind}, whose decay is another; offload with {kind}"
            )
        keys = (*optimizer.keys, "initial_lr")
        taken = {k: float(v) if isinstance(v, Tensor) else v for k, v in new.items() if k in keys}
        check_group({**group, **taken}, optimizer.recipe)
        found.append(taken)
    return found


def _count(state: Mapping[str, Any]) -> int:
    """Updates a parameter has had; torch's SGD does not count, and asks only whether there was one."""
    if "step" in state:
        return int(state["step"])
    return int(any(value is not None for value in state.values()))
