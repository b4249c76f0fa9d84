"""What a flip tells besides the state, and checkpoints that are links to it.

At the start of a run whose state is in copies, what never changes is laid beside them once: the layout, names, the
model's small files.  Each decided step then tells what a resume must know (counters, groups, random states, buffers,
the loop's own progress), so `state/` alone is enough to go on from, or to become a checkpoint.  Left to others: copies,
links and the record (`memory/shadow.py`), reading them (`linked.py`).  The trade-off: a flip carries the buffers and
some 20 kB of text whether they changed or not, which is nothing beside a step's gigabytes.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from offloadz.memory.record import LAYOUT_FILE, TABLES_FILE, Saved, layout_text, put_record, read_saved, record_bytes
from offloadz.memory.shadow import Shadow
from offloadz.model.aside import appearing, flush, write_text
from offloadz.model.export import RunStock
from offloadz.model.linked import layout_of
from offloadz.model.manifest import (
    BUFFERS,
    MANIFEST,
    MODEL,
    decode,
    encode,
    read_manifest,
    verify,
    write_manifest,
)
from offloadz.model.together import appearing_to_all, by_first, together
from offloadz.model.told import moving_of, random_states, static_of, write_buffers
from offloadz.plan.errors import CannotGoOn, ConfigError
from offloadz.plan.footprint import EXTRA_ROOM_BYTES
from offloadz.plan.spec import ModelSpec

STATIC = ("written", "cuts", "buffer_names", "parameters")


def begin(run: Any) -> None:
    """Lay beside the state what never changes, and have every decided step tell what does; nothing without copies."""
    shadow = shadow_of(run)
    if shadow is None:
        return
    stock, state = RunStock(run), shadow.path / "state"
    (state / MODEL).mkdir(mode=0o700, exist_ok=True)
    stock.write_small_files(state / MODEL, None)
    places = [[e.file, e.offset, e.nbytes, e.label] for e in shadow.copies.extents]
    weights = run.session.room.disk.weights
    paths = [
        [str(place / "state"), weight, run.ranks.rank] for place, weight in zip(shadow.places, weights, strict=True)
    ]
    told = {"paths": paths, "extents": places}
    every = {key: [one for own in run.ranks.each(held) for one in own] for key, held in told.items()}
    layout = {**layout_of(run.session.spec), **every, **encode(static_of(stock))}
    for place, *_ in paths:
        write_text(Path(place) / LAYOUT_FILE, layout_text(layout))
    flushed = [Path(place) / name for place, *_ in paths for name in (LAYOUT_FILE, "")]
    for path in [*(state / MODEL).iterdir(), state / MODEL, *flushed]:
        flush(path)
    run.session.tell = lambda: told_now(run, stock, run.progress())
    run.session.room.before_flip = lambda: run.before_flip()


def told_now(run: Any, stock: RunStock, extra: Mapping[str, Any]) -> dict[str, Any]:
    """What is to be known of the run as it is now, as JSON."""
    told: dict[str, Any] = encode({**moving_of(run, extra), "buffers": stock.buffers()})
    return told | {"random_of_ranks": run.ranks.each(encode(random_states()))}


def shadow_of(run: Any) -> Shadow | None:
    """The state in copies of a run, where it is all that a step changes."""
    disk = getattr(getattr(run.session, "room", None), "disk", None)
    return disk.shadow if disk is not None and run.session.placement.flips else None


def cannot_link(run: Any, target: Path, going: tuple[Path, ...] = ()) -> str:
    """Why a checkpoint at `target` cannot be links, on whichever rank; empty if it can."""
    shadow = shadow_of(run)
    if shadow is None:
        return "the state is not on disk in copies"
    if not run.session.room.disk.checksum:
        return "offload.checksum is false, and what is not checked cannot be trusted later"
    reason: str = next(filter(None, run.ranks.each(shadow.can_link(target, going))), "")
    return reason


def save_linked(target: Path, run: Any, extra: Mapping[str, Any], order: int) -> Path:
    """A checkpoint of hard links at `target`, whole or not at all; see `state.save_state`."""
    shadow, stock, ranks = shadow_of(run), RunStock(run), run.ranks
    if shadow is None:
        raise ValueError("the state is not on disk in copies")
    run.session.settle()
    told = told_now(run, stock, extra)
    if ranks.most(bool(shadow.copies.unflipped)):
        shadow.flip(told)
    appears = appearing_to_all(ranks, target, EXTRA_ROOM_BYTES, "a checkpoint")
    with shadow.replacing(target), appears as scratch:
        told_names = ranks.each(together(ranks, lambda: shadow.link_into(scratch)))

        def filled() -> None:
            (scratch / MODEL).mkdir(mode=0o700)
            stock.write_small_files(scratch / MODEL, None)
            layout = (shadow.path / "state" / LAYOUT_FILE).read_text()
            manifest = {**static_of(stock), **decode(told), "order": order}
            names = [name for own in told_names for name in own]
            _fill(scratch, names, layout, manifest, manifest.pop("buffers"))

        by_first(ranks, filled)
        shadow.pin(target)  # before the name is there: nobody may write what it holds
    return target


def _fill(
    scratch: Path, names: list[str], layout: str, manifest: dict[str, Any], buffers: Mapping[str, torch.Tensor]
) -> None:
    """Everything of a linked checkpoint but its links and `model/`."""
    write_text(scratch / LAYOUT_FILE, layout)
    records = {BUFFERS: write_buffers(scratch / BUFFERS, buffers)}
    sizes = {name: (scratch / name).stat().st_size for name in names}
    manifest = {**manifest, "linked": sizes}
    write_manifest(scratch, manifest, records, small=(LAYOUT_FILE, TABLES_FILE))


def told_of(saved: Saved) -> dict[str, Any]:
    """What the flip of state on disk told, and what never changes, as a manifest has it."""
    static = {key: saved.layout[key] for key in STATIC}
    told: dict[str, Any] = decode({**static, **saved.record.note})
    return told


def checkpoint_of(saved: Saved, target: Path, order: int) -> Path:
    """Make the flipped state of a dead run a checkpoint at `target`, by links; every byte is read before it is there.

    Raises CannotGoOn where links are not possible, DamagedState where the state is not whole.
    """
    told = told_of(saved)
    buffers = told.pop("buffers")
    choice, tables = saved.record.choice, saved.record.tables
    try:
        with appearing(target) as scratch:
            shutil.copytree(saved.directory / MODEL, scratch / MODEL)
            names = [file.rpartition("/")[2] for file in saved.files]
            for name in names:
                os.link(saved.where(name), scratch / name)
            put_record(scratch / TABLES_FILE, record_bytes({}, choice, tables))
            layout = (saved.directory / LAYOUT_FILE).read_text()
            _fill(scratch, names, layout, {**told, "order": order}, buffers)
            verify(scratch, read_manifest(scratch))
    except OSError as error:
        reason = error.strerror or os.strerror(error.errno or errno.EIO)
        raise CannotGoOn(f"no checkpoint can be made of the state in {saved.directory}: {reason}") from error
    return target


def adoptable(directory: Path, spec: ModelSpec, copies: int) -> Saved:
    """State to take over as it lies; CannotGoOn says why it cannot be, ConfigError that there is none."""
    if not (directory / LAYOUT_FILE).is_file():
        hint = "a written out checkpoint is read with run.load" if (directory / MANIFEST).is_file() else "found none"
        raise ConfigError(f"adopt = {directory}: needed is a linked checkpoint, or state/ of a swap directory; {hint}")
    saved, wanted = read_saved(directory), layout_of(spec)
    if copies < 2:
        raise CannotGoOn("this run does not keep parameters and optimizer state on disk in copies")
    for key, what in (("recipe", "recipe"), ("units", "layout"), ("share", "number of ranks, or stage")):
        if saved.layout.get(key, [1, 0]) != wanted[key]:
            raise CannotGoOn(f"the state in {directory} is of another {what}")
    return saved
