"""What is told of a run's state besides its tensors: names, counters, groups, random states, buffers.

Both forms of a checkpoint (`state.py`, `flips.py`) and every flip say the same, so one resume reads all of them.  The
trade-off: random states are Python's, numpy's and torch's default generators and nobody else's; a generator of the
model's own starts anew at a resume.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
import torch

from offloadz.model.export import RunStock
from offloadz.model.files import FileRecord, StreamWriter
from offloadz.plan.errors import ConfigError
from offloadz.runtime.devices import device_generators


def static_of(stock: RunStock) -> dict[str, Any]:
    """What never changes: names in files, and what the tensors are."""
    return {
        "written": stock.written,
        "cuts": {name: cut.told() for name, cut in stock.cuts.items()},
        "buffer_names": {name: stock.buffer_name(name) for name in stock.buffers_in_place()},
        "parameters": {
            name: {"shape": list(shape), "storage": kept, "trainable": trained}
            for name, (shape, kept, trained) in stock.tensors.items()
        },
    }


def moving_of(run: Any, extra: Mapping[str, Any]) -> dict[str, Any]:
    """What changes with every step; asked for when all updates are counted."""
    return {
        "step": int(extra.get("step", getattr(run.session, "step", 0))),
        "steps": dict(run.session.steps),
        "groups": groups_of(run),
        "random": random_states(),
        "extra": dict(extra),
    }


def restore(run: Any, told: Mapping[str, Any]) -> dict[str, Any]:
    """Counters, groups and random states as they were; returns the caller's `extra`."""
    check_groups(run, told["groups"])
    run.session.steps.clear()
    run.session.steps.update({name: int(count) for name, count in told["steps"].items()})
    run.session.step = int(told["step"])
    for group, settings in zip(_groups(run), told["groups"], strict=True):
        group.update(settings)
    states = told.get("random_of_ranks", [])  # as many as there were
    set_random_states(states[run.ranks.rank] if run.ranks.rank < len(states) else told["random"])
    extra: dict[str, Any] = told["extra"]
    return extra


def seed_all(seed: int) -> None:
    """Python's, numpy's and torch's generators: a model's own code may draw from any."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def random_states() -> dict[str, Any]:
    """The states of Python's, numpy's and torch's generators, as plain values and tensors."""
    states = {
        "python": random.getstate(),
        "numpy": numpy.random.get_state(legacy=True),
        "torch": torch.get_rng_state(),
    }
    found = [generator.get_state() for generator in device_generators()]
    return states | ({"device": found} if found else {})


def set_random_states(states: Mapping[str, Any]) -> None:
    """Put back what `random_states` gave."""
    random.setstate(states["python"])
    numpy.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    for generator, state in zip(device_generators(), states.get("device", ()), strict=False):  # as many as are here
        generator.set_state(state)


def groups_of(run: Any) -> list[dict[str, Any]]:
    """Settings of the optimizer's groups without their parameters."""
    return [{key: value for key, value in group.items() if key not in ("params", "names")} for group in _groups(run)]


def check_groups(run: Any, saved: list[dict[str, Any]]) -> None:
    """ConfigError where a run has another number of groups."""
    here = _groups(run)
    if len(here) != len(saved):
        raise ConfigError(f"optimizer.groups: the checkpoint has {len(saved)} groups, this run has {len(here)}")


def write_buffers(path: Path, buffers: Mapping[str, torch.Tensor]) -> FileRecord:
    """All persistent buffers as a file of tensors."""
    writer = StreamWriter(path, {name: (b.dtype, tuple(b.shape)) for name, b in buffers.items()})
    try:
        for name, buffer in buffers.items():
            writer.write(name, 0, buffer.reshape(-1))
        return writer.finish()
    finally:
        writer.close()


def fill_buffers(into: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]) -> None:
    """Put values into the model's own buffers."""
    with torch.no_grad():
        for name, buffer in into.items():
            buffer.copy_(values[name].view(buffer.shape))


def _groups(run: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = getattr(getattr(run, "optimizer", None), "param_groups", [])
    return found
