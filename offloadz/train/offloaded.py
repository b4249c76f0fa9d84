"""The run of a configuration: the model under its plan, its weights read, or a dead run's state taken over.

Left to others: what there is to go on from (`begin.py`), what else is put back (`loop.py`).  The trade-off: whether
state can be taken over shows only when the run's own layout is known, so the module may be built twice (on meta, a
second).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import offloadz
from offloadz.memory.disk import DiskTier
from offloadz.memory.record import TABLES_FILE
from offloadz.memory.swapdir import STATE
from offloadz.model.aside import remove_directory
from offloadz.model.flips import cannot_link, shadow_of
from offloadz.model.weights import add_text
from offloadz.plan.answer import Plan
from offloadz.plan.copies import kept_reason
from offloadz.plan.errors import CannotGoOn, DoesNotFit
from offloadz.plan.paths import held_bytes
from offloadz.plan.rooms import apart, rooms_of
from offloadz.plan.words import human
from offloadz.train.begin import Start, instead_of
from offloadz.train.checkpoint import beyond
from offloadz.train.planning import Task, optimizer_of, threads_asked
from offloadz.train.templates import template_text
from offloadz.train.tokens import listed

if TYPE_CHECKING:
    from offloadz.config import Config
    from offloadz.model.run import Run

LATER = "removed once the next one is saved"


def begun(
    config: Config, plan: Plan, task: Task, start: Start | None, say: Callable[[str], None]
) -> tuple[Run, Start | None]:
    """The run, with what it goes on from: state taken over as it lies where that can be, else still to be read."""
    if start is not None:
        _make_room(config, plan, start, say)
    if start is not None and start.linked:
        try:
            return _offloaded(config, plan, task, start.path), start
        except CannotGoOn as reason:
            start = instead_of(start, str(reason), config, plan.keep, say)
    return _offloaded(config, plan, task), start


def _make_room(config: Config, plan: Plan, start: Start, say: Callable[[str], None]) -> None:
    """Say which checkpoints of an earlier start are more than the plan keeps, and remove those that hold copies of the
    state that the run takes over: it needs these.  Others go once the next one is there, and so do all where a user
    went back to one of several."""
    output, needs = Path(config.train.output), start.linked and plan.placement.flips and config.train.resume == "auto"
    going = beyond(output / "checkpoints", plan.keep, None if start.flip else start.path)
    now = [path for path in going if needs and (path / TABLES_FILE).exists()]
    if now:
        _check_room(config, plan, output)
    for paths, when in ((now, "removed now"), ([path for path in going if path not in now], LATER)):
        if paths:
            why = kept_reason(plan.placement, config.train.keep)
            say(f"checkpoints: {', '.join(path.name for path in paths)} {when}: {why}")
    for path in now:
        remove_directory(path)


def _check_room(config: Config, plan: Plan, output: Path) -> None:
    """DoesNotFit where the drive has less room than when the plan was made: before a checkpoint goes for a run that
    then cannot begin."""
    room_bytes, needed_bytes = sum(rooms_of(apart(config.offload.swap), output)), plan.peak["disk"]
    if room_bytes < needed_bytes:
        raise DoesNotFit(
            f"offload.swap: {human(needed_bytes, up=True)} are needed, {human(room_bytes)} are there with what this "
            "run holds already; free some or name a larger drive; no checkpoint was removed"
        )


def _offloaded(config: Config, plan: Plan, task: Task, adopt: Path | None = None) -> Run:
    """The model under its plan, with its weights where they belong."""
    model, offload, threads = config.model, config.offload, threads_asked(config, plan)
    module = offloadz.load(
        model.path, dtype=getattr(torch, model.dtype), init=model.init, seed=config.train.seed,
        attention=model.attention, add_tokens=model.add_tokens, trust_remote_code=model.trust_remote_code,
    )  # fmt: skip
    _note_dialogue(module, task, config.data.chat_template)
    module.train()
    return offloadz.offload(
        module, optimizer=optimizer_of(config), plan=plan, swap=list(offload.swap), slots=plan.slots,
        sweeps=plan.sweeps, micro_batch_size=plan.micro_batch_size, batch_size=config.train.batch_size,
        max_length=config.data.max_length, max_grad_norm=config.optimizer.max_grad_norm, dtype=model.dtype,
        keep_float32=model.keep_float32, freeze=model.freeze, threads=threads, seed=config.train.seed,
        checksum=offload.checksum, io=offload.io, poison=config.debug.poison, output=config.train.output,
        adopt=adopt, device=offload.device, kernels=model.kernels,
    )  # fmt: skip


def _note_dialogue(model: Any, task: Task, chat_template: str) -> None:
    """Note in every export how the model is to be asked: by the template it is trained with, up to what ends a turn."""
    if chat_template:
        add_text(model, "chat_template.jinja", template_text(chat_template))
    generation = getattr(model, "generation_config", None)
    if generation is not None and task.samples.template is not None:
        known = listed(generation.eos_token_id)
        generation.eos_token_id = [*known, *(token for token in task.ends if token not in known)] or None


def tell_swap(disk: DiskTier, say: Callable[[str], None]) -> None:
    """A line for each swap path: its directory, its share where there are several, and how bytes are moved there."""
    checked = ", every piece checked" if disk.checksum else ""
    for files, weight in zip(disk.paths, disk.weights, strict=True):
        how = "direct" if files.probe.direct else "buffered, with the page cache dropped"
        share = f"{weight / sum(disk.weights):.0%} of every extent, " if len(disk.paths) > 1 else ""
        say(f"swap: {files.path}, {share}I/O by {files.io.name}, {how}{checked}")


def tell_unlinked(run: Run, plan: Plan, output: Path, say: Callable[[str], None]) -> None:
    """One line where checkpoints were planned as links and the system does not make them."""
    shadow = shadow_of(run)
    if shadow is not None and plan.linked:
        reason = cannot_link(run, output / "checkpoints" / "step-000000", tuple(shadow.copies.pins))
        if reason:
            say(f"checkpoints are written out as safetensors, not linked: {reason}")


def tell_kept(run: Run, say: Callable[[str], None]) -> None:
    """After the end of a run: one line where state newer than its last checkpoint stays on disk."""
    shadow = shadow_of(run)
    if shadow is None or not shadow.worth_keeping:
        return
    states = [place / STATE for place in shadow.places]
    step = shadow.flipped["step"] if shadow.flipped else "of the run before"
    told = " and ".join(map(str, states))
    say(f"state of step {step} stays in {told} ({human(held_bytes(*states))}); the same command goes on from there")
