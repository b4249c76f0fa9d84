"""The whole training state of a run as a directory of logical tensors by name, to be put back into any placement.

It holds fp32 masters, moments in fp32 whatever the recipe stores them in, frozen weights in their own dtype, buffers,
and in `manifest.json` everything else that is needed to go on as if nothing had happened.  When to save, which
directories to keep and what `extra` means is left to `train/`; files and directories to `files.py` and `aside.py`.  The
trade-off: masters are written in fp32 though the run holds them as two halves: 12 bytes a parameter either way, but
these can be read by any placement and any reader of safetensors.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from offloadz.memory.flat import spans
from offloadz.model import flips
from offloadz.model.export import RunStock, master_of
from offloadz.model.files import FileRecord, StreamReader, StreamWriter
from offloadz.model.linked import Tensors, open_tensors
from offloadz.model.manifest import (
    BUFFERS,
    MANIFEST,
    MODEL,
    MOMENTS,
    WEIGHTS,
    decode,
    encode,
    read_manifest,
    verify,
    write_manifest,
)
from offloadz.model.together import appearing_to_all, by_first, together, write_together, writes
from offloadz.model.told import (
    check_groups,
    fill_buffers,
    moving_of,
    random_states,
    restore,
    static_of,
    write_buffers,
)
from offloadz.plan.cut import Cut, cut_told
from offloadz.plan.errors import ConfigError
from offloadz.plan.footprint import EXTRA_ROOM_BYTES
from offloadz.runtime.rest import set_weight

log = logging.getLogger("offloadz")

Planned = dict[str, tuple[torch.dtype, tuple[int, ...]]]


def save_state(
    target: Path,
    run: Any,
    extra: Mapping[str, Any] | None = None,
    order: int = 0,
    portable: bool = False,
    going: tuple[Path, ...] = (),
) -> Path:
    """Write one checkpoint directory at `target`, whole or not at all; an earlier checkpoint there is replaced.

    Where the state is on disk in copies it is hard links to them, unless `portable` asks for safetensors or no copy
    would be left to write to; `going`: checkpoints that the caller removes afterwards.

    `extra`: what the caller wants back from `load_state` (plain values, tensors, arrays); its `step`, where it has one,
    names the state.  `order` decides which of several is the newest: steps repeat when a run goes on from an older one.
    Raises DiskFailed with numbers before anything was touched where there is no room, ConfigError where `target` is
    something else, ValueError for what `extra` cannot hold.
    """
    if target.exists() and any(target.iterdir()) and not (target / MANIFEST).is_file():
        raise ConfigError(f"{target} exists and is no checkpoint; choose another directory")
    extra = dict(extra or {})
    shadow = flips.shadow_of(run)
    if not portable and shadow is not None:
        reason = flips.cannot_link(run, target, going)
        if not reason:
            return flips.save_linked(target, run, extra, order)
        if reason != shadow.told:
            log.warning("from %s on written out as safetensors instead of linked: %s", target, reason)
        shadow.told = reason
    stock, ranks = RunStock(run), run.ranks
    weights, moments = _planned(stock)
    buffers, states = stock.buffers(), decode(ranks.each(encode(random_states())))
    nbytes = _size(weights) + _size(moments) + EXTRA_ROOM_BYTES
    with appearing_to_all(ranks, target, nbytes, "a checkpoint") as scratch:
        records = _write_state(scratch, run, weights, moments)

        def ended() -> None:
            (scratch / MODEL).mkdir(mode=0o700)
            stock.write_small_files(scratch / MODEL, None)
            records[BUFFERS] = write_buffers(scratch / BUFFERS, buffers)
            # Asked for after the state was streamed, when all updates are counted.
            told = {**static_of(stock), **moving_of(run, extra), "random_of_ranks": states, "order": order}
            write_manifest(scratch, told, records)

        by_first(ranks, ended)
    return target


def load_state(path: Path, run: Any, *, checked: bool = False, adopted: bool = False) -> dict[str, Any]:
    """Put a checkpoint into a run of any placement, restore random states and group settings; returns `extra`.

    `checked`: every byte has just been compared with the manifest, so it need not be done again.  `adopted`: the run
    has taken the checkpoint's files over as its own state, and only the rest is put back.  Raises DamagedState for the
    files, ConfigError that lists missing, extra and misshapen tensors; both before the run's state is touched.
    """
    path = Path(path)
    told = read_manifest(path)
    if not (checked or adopted):
        by_first(run.ranks, lambda: verify(path, told))
    stock = RunStock(run)
    check_groups(run, told["groups"])
    if not adopted:
        with open_tensors(path, told) as (weights, moments):
            _require_match(path, stock, weights, moments)
            together(run.ranks, lambda: _fill_all(run, weights, moments))
        run.session.spread()
    with StreamReader(path / BUFFERS) as reader:
        fill_buffers(stock.buffers_in_place(), {name: reader.read(name) for name in reader.entries})
    return restore(run, told)


def cut_of(run: Any) -> dict[str, Any]:
    """What a checkpoint says of how a run cuts its batches, and of its placement."""
    return cut_told(run.plan) | {"micro_batch_size": run.stage.micro_rows, "sweeps": run.sweeps}


def tell_cut(path: Path, run: Any, extra: Mapping[str, Any]) -> None:
    """Say where the run that saved a checkpoint cut its batches otherwise; `extra`: of the checkpoint."""
    saved = Cut.read(extra.get("plan"), path)
    if told := saved.differs(run.stage.micro_rows, run.sweeps) if saved else "":
        log.warning("run.load: %s", told)


def load_flip(told: Mapping[str, Any], run: Any) -> dict[str, Any]:
    """Put back what a flip told (`flips.told_of`) into a run that has taken its state over; returns `extra`."""
    fill_buffers(RunStock(run).buffers_in_place(), told["buffers"])
    return restore(run, told)


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
    """Stream every part once into both files: each rank its own, rank 0 all where all have the same."""

    def fill(writers: dict[Path, StreamWriter]) -> None:
        for view in run.session.parts(write=False) if writes(run) else ():
            value = master_of(view.weight, view.low) if view.trained else view.weight
            for span in spans(view.unit, view.part):
                name, cut = span.member.name, span.part_slice
                writers[scratch / WEIGHTS].write(name, span.first_element, value[cut])
                for kind, moment in view.moments.items():
                    writers[scratch / MOMENTS].write(f"{name}.{kind}", span.first_element, moment[cut])

    return write_together(run.ranks, {scratch / WEIGHTS: weights, scratch / MOMENTS: moments}, fill)


def _fill_all(run: Any, weights: Tensors, moments: Tensors) -> None:
    for view in run.session.parts(write=True):
        _fill(view, weights, moments)


def _fill(view: Any, weights: Tensors, moments: Tensors) -> None:
    """Read one part's weights and state from the files into its views, tensor by tensor."""
    for span in spans(view.unit, view.part):
        name, first, cut = span.member.name, span.first_element, span.part_slice
        value = weights.read(name, first, span.stop - span.start)
        set_weight(view.weight[cut], None if view.low is None else view.low[cut], value.float())
        for kind, moment in view.moments.items():
            moment[cut].copy_(moments.read(f"{name}.{kind}", first, value.numel()))


def _require_match(path: Path, stock: RunStock, weights: Tensors, moments: Tensors) -> None:
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
    if lists["misshapen"] and all(found[name][1:] == wanted[name][1:] for name in wanted if name in found):
        problems.append("where only lengths of tables differ it is model.add_tokens, which cannot: put it back")
    if problems:
        raise ConfigError(f"the checkpoint {path} is of another model or other frozen weights; {'; '.join(problems)}")


def _require_moments(path: Path, stock: RunStock, moments: Tensors) -> None:
    """ConfigError where the checkpoint has the moments of another rule; their format never matters."""
    kept = {name.rpartition(".")[2] for name in moments.entries}
    if kept != set(stock.moments):
        raise ConfigError(
            f"the checkpoint {path} holds {' and '.join(sorted(kept)) or 'no moments'}, this optimizer keeps "
            f"{' and '.join(stock.moments) or 'none'}: the moments of one rule say nothing to another; set "
            "optimizer.name back"
        )


def _size(planned: Planned) -> int:
    return sum(torch.Size(shape).numel() * dtype.itemsize for dtype, shape in planned.values())
