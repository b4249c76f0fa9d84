"""The whole training state of a run as a directory of logical tensors by name, to be put back into any placement.

It holds fp32 masters, moments in fp32 whatever the recipe stores them in, frozen weights in their own dtype, buffers,
and in `manifest.json` everything else that is needed to go on as if nothing had happened.  When to save, which
directories to keep and what `extra` means is left to `train/`; files and directories to `files.py` and `aside.py`.  The
trade-off: masters are written in fp32 though the run holds them as two halves: 12 bytes a parameter either way, but
these can be read by any placement and any reader of safetensors.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
import torch

from offloadz.memory.flat import spans
from offloadz.model.aside import appearing, require_room
from offloadz.model.export import RunStock, master_of
from offloadz.model.files import FileRecord, StreamReader, StreamWriter
from offloadz.model.manifest import BUFFERS, MANIFEST, MODEL, MOMENTS, WEIGHTS, read_manifest, verify, write_manifest
from offloadz.plan.errors import ConfigError
from offloadz.plan.footprint import EXTRA_ROOM_BYTES
from offloadz.runtime.rest import set_weight

Planned = dict[str, tuple[torch.dtype, tuple[int, ...]]]


def save_state(target: Path, run: Any, extra: Mapping[str, Any] | None = None, order: int = 0) -> Path:
    """Write one checkpoint directory at `target`, whole or not at all; an earlier checkpoint there is replaced.

    `extra`: what the caller wants back from `load_state` (plain values, tensors, arrays); its `step`, where it has one,
    names the state.  `order` decides which of several is the newest: steps repeat when a run goes on from an older one.
    Raises DiskFailed with numbers before anything was touched where there is no room, ConfigError where `target` is
    something else, ValueError for what `extra` cannot hold.
    """
    if target.exists() and any(target.iterdir()) and not (target / MANIFEST).is_file():
        raise ConfigError(f"{target} exists and is no checkpoint; choose another directory")
    extra = dict(extra or {})
    stock = RunStock(run)
    weights, moments = _planned(stock)
    buffers = stock.buffers()
    require_room(target.parent, _size(weights) + _size(moments) + EXTRA_ROOM_BYTES, "a checkpoint")
    with appearing(target) as scratch:
        (scratch / MODEL).mkdir(mode=0o700)
        stock.write_small_files(scratch / MODEL, None)
        records = _write_state(scratch, run, weights, moments)
        records[BUFFERS] = _write_buffers(scratch / BUFFERS, buffers)
        write_manifest(scratch, _told(stock, run, extra, order), records)
    return target


def load_state(path: Path, run: Any, *, checked: bool = False) -> dict[str, Any]:
    """Put a checkpoint into a run of any placement, restore random states and group settings; returns `extra`.

    `checked`: every byte has just been compared with the manifest, so it need not be done again.  Raises DamagedState
    for the files, ConfigError that lists missing, extra and misshapen tensors; both before the run's state is touched.
    """
    path = Path(path)
    told = read_manifest(path)
    if not checked:
        verify(path, told)
    stock = RunStock(run)
    with StreamReader(path / WEIGHTS) as weights, StreamReader(path / MOMENTS) as moments:
        _require_match(path, stock, weights, moments, told)
        _check_groups(run, told["groups"])
        for view in run.session.parts(write=True):
            _fill(view, weights, moments)
    _fill_buffers(path / BUFFERS, stock.buffers_in_place())
    run.session.steps.clear()
    run.session.steps.update({name: int(count) for name, count in told["steps"].items()})
    run.session.step = int(told["step"])
    _restore_groups(run, told["groups"])
    set_random_states(told["random"])
    extra: dict[str, Any] = told["extra"]
    return extra


def random_states() -> dict[str, Any]:
    """The states of Python's, numpy's and torch's CPU generators, as plain values and tensors."""
    return {
        "python": random.getstate(),
        "numpy": numpy.random.get_state(legacy=True),
        "torch": torch.get_rng_state(),
    }


def set_random_states(states: Mapping[str, Any]) -> None:
    """Put back what `random_states` gave."""
    random.setstate(states["python"])
    numpy.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])


def _told(stock: RunStock, run: Any, extra: dict[str, Any], order: int) -> dict[str, Any]:
    """What the manifest says besides files; asked for after the state was streamed, when all updates are counted."""
    return {
        "order": order,
        "step": int(extra.get("step", getattr(run.session, "step", 0))),
        "written": stock.written,
        "cuts": {name: cut.told() for name, cut in stock.cuts.items()},
        "buffer_names": {name: stock.buffer_name(name) for name in stock.buffers_in_place()},
        "parameters": {
            name: {"shape": list(shape), "storage": kept, "trainable": trained}
            for name, (shape, kept, trained) in stock.tensors.items()
        },
        "steps": dict(run.session.steps),
        "groups": _groups_of(run),
        "random": random_states(),
        "extra": extra,
    }


def _planned(stock: RunStock) -> tuple[Planned, Planned]:
    """Entries of the two large files: masters and frozen weights; moments."""
    weights: Planned = {}
    moments: Planned = {}
    for name, (shape, kept, trained) in stock.tensors.items():
        weights[name] = (torch.float32 if trained or kept == "float32" else torch.bfloat16, shape)
        for kind in stock.moments if trained else ():
            moments[f"{name}.{kind}"] = (torch.float32, shape)
    return weights, moments


def _write_state(scratch: Path, run: Any, weights: Planned, moments: Planned) -> dict[str, FileRecord]:
    """Stream every part once into both files."""
    writers = {WEIGHTS: StreamWriter(scratch / WEIGHTS, weights), MOMENTS: StreamWriter(scratch / MOMENTS, moments)}
    try:
        for view in run.session.parts(write=False):
            value = master_of(view.weight, view.low) if view.trained else view.weight
            for span in spans(view.unit, view.part):
                name, cut = span.member.name, span.part_slice
                writers[WEIGHTS].write(name, span.first_element, value[cut])
                for kind, moment in view.moments.items():
                    writers[MOMENTS].write(f"{name}.{kind}", span.first_element, moment[cut])
        return {name: writer.finish() for name, writer in writers.items()}
    finally:
        for writer in writers.values():
            writer.close()


def _write_buffers(path: Path, buffers: Mapping[str, torch.Tensor]) -> FileRecord:
    writer = StreamWriter(path, {name: (b.dtype, tuple(b.shape)) for name, b in buffers.items()})
    try:
        for name, buffer in buffers.items():
            writer.write(name, 0, buffer.reshape(-1))
        return writer.finish()
    finally:
        writer.close()


def _fill(view: Any, weights: StreamReader, moments: StreamReader) -> None:
    """Read one part's weights and state from the files into its views, tensor by tensor."""
    for span in spans(view.unit, view.part):
        name, first, cut = span.member.name, span.first_element, span.part_slice
        value = weights.read(name, first, span.stop - span.start)
        set_weight(view.weight[cut], None if view.low is None else view.low[cut], value.float())
        for kind, moment in view.moments.items():
            moment[cut].copy_(moments.read(f"{name}.{kind}", first, value.numel()))


def _fill_buffers(path: Path, buffers: Mapping[str, torch.Tensor]) -> None:
    with StreamReader(path) as reader, torch.no_grad():
        for name, buffer in buffers.items():
            buffer.copy_(reader.read(name).view(buffer.shape))


def _require_match(
    path: Path, stock: RunStock, weights: StreamReader, moments: StreamReader, told: Mapping[str, Any]
) -> None:
    """ConfigError where checkpoint and run do not hold the same tensors."""
    wanted_weights, wanted_moments = _planned(stock)
    _require_moments(path, stock, moments)
    wanted = {name: shape for name, (_, shape) in (wanted_weights | wanted_moments).items()}
    buffers = stock.buffers_in_place()
    wanted |= {f"buffer {name}": tuple(buffer.shape) for name, buffer in buffers.items()}
    found = {name: entry.shape for name, entry in (weights.entries | moments.entries).items()}
    with StreamReader(path / BUFFERS) as reader:
        found |= {f"buffer {name}": entry.shape for name, entry in reader.entries.items()}
    lists = {
        "missing": sorted(set(wanted) - set(found)),
        "extra": sorted(set(found) - set(wanted)),
        "misshapen": [
            f"{name} is {found[name]}, the model needs {shape}"
            for name, shape in wanted.items()
            if name in found and found[name] != shape
        ],
    }
    problems = [f"{what}: {', '.join(names[:20])}" for what, names in lists.items() if names]
    if problems:
        raise ConfigError(f"the checkpoint {path} is of another model or other frozen weights; {'; '.join(problems)}")


def _require_moments(path: Path, stock: RunStock, moments: StreamReader) -> None:
    """ConfigError where the checkpoint has the moments of another rule; their format never matters."""
    kept = {name.rpartition(".")[2] for name in moments.entries}
    if kept and stock.moments and kept != set(stock.moments):
        raise ConfigError(
            f"the checkpoint {path} holds {' and '.join(sorted(kept))}, this optimizer keeps "
            f"{' and '.join(stock.moments)}: the moments of one rule say nothing to another; set optimizer.name back"
        )


def _groups_of(run: Any) -> list[dict[str, Any]]:
    """Settings of the optimizer's groups without their parameters."""
    groups = getattr(getattr(run, "optimizer", None), "param_groups", [])
    return [{key: value for key, value in group.items() if key not in ("params", "names")} for group in groups]


def _check_groups(run: Any, saved: list[dict[str, Any]]) -> None:
    here = getattr(getattr(run, "optimizer", None), "param_groups", [])
    if len(here) != len(saved):
        raise ConfigError(f"optimizer.groups: the checkpoint has {len(saved)} groups, this run has {len(here)}")


def _restore_groups(run: Any, saved: list[dict[str, Any]]) -> None:
    for group, settings in zip(getattr(getattr(run, "optimizer", None), "param_groups", []), saved, strict=True):
        group.update(settings)


def _size(planned: Planned) -> int:
    return sum(torch.Size(shape).numel() * dtype.itemsize for dtype, shape in planned.values())
