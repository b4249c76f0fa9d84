"""From a configuration to what the search is asked: the user's choices, this box, and the room on its drives.

`offloadz plan`, `offloadz show` and `offloadz train` all ask here, so they cannot disagree.  Reads the model's headers
and asks the system for free space; opens no tensor.  The trade-off: space that an earlier run of the same output holds
counts as free, because this run takes it over; another program that fills the drive meanwhile is not foreseen.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from glob import glob
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offloadz.plan.answer import Plan
from offloadz.plan.boxes import bench_file
from offloadz.plan.catalogue import LANES, read_machine
from offloadz.plan.changed import changed
from offloadz.plan.cut import Cut
from offloadz.plan.estimate import estimate
from offloadz.plan.families import shapes_note
from offloadz.plan.footprint import Batch, baseline, reading, score_copies
from offloadz.plan.found import Find, with_found
from offloadz.plan.headers import find_directory, has_weights, model_spec, read_config
from offloadz.plan.machine import DeviceFacts, Machine, compute_dtype, probe_machine
from offloadz.plan.placement import Placement
from offloadz.plan.positions import positions_note
from offloadz.plan.predict import Prediction, predict
from offloadz.plan.products import check_cheap
from offloadz.plan.recipes import recipe_of
from offloadz.plan.rooms import apart, drive_of, room_at, rooms_of, shared_lines
from offloadz.plan.spec import ModelSpec
from offloadz.plan.stages import decide_for, for_each
from offloadz.plan.wishes import Wishes
from offloadz.plan.words import human

if TYPE_CHECKING:
    from offloadz.config import Config


@dataclass(frozen=True)
class Question:
    """What `decide` is given."""

    spec: ModelSpec
    machine: Machine
    wishes: Wishes
    notes: tuple[str, ...] = ()
    """What the user should know, and need not change."""

    def answer(self) -> Plan:
        return decide_for(self.spec, self.machine, self.wishes)

    def step_of(self, plan: Plan) -> Prediction:
        """A steady step of an answer, on each of its ranks, walked over all blocks."""
        return predict(*self._simulated(plan))

    def few_blocks_of(self, plan: Plan) -> Prediction:
        """The same from a walk over some of the blocks."""
        return estimate(*self._simulated(plan))

    def _simulated(self, plan: Plan) -> tuple[ModelSpec, Placement, Batch, Machine]:
        share, placement = plan.placement.share, replace(plan.placement, commit=plan.commit)
        return self.spec.shared_by(share), placement, plan.batch, for_each(self.machine, share.ranks)


def question(
    config: Config,
    machine_name: str | None = None,
    sets: Sequence[str] = (),
    find: Find = lambda told: None,
    weightless: bool = False,
    cut: Cut | None = None,
) -> Question:
    """Model, machine and wishes of a configuration; `sets` are `key=value` over this machine's facts.

    `find`: what says of this box which device `offload.device` means; the host, where it is left out.  `weightless`:
    whether a model whose weights are not there is known by its config.json.  `cut`: of the run that this one goes on
    with.

    Raises ConfigError for what is wrong or not built.
    """
    model, directory = config.model, find_directory(config.model.path)
    absent = weightless and not has_weights(directory)
    init = "random" if absent else model.init
    spec = model_spec(
        model.path, model.dtype, init=init, keep_float32=model.keep_float32, freeze=model.freeze,
        groups=[pattern for group in config.optimizer.groups for pattern in group.match], add_tokens=model.add_tokens,
    )  # fmt: skip
    told = config.optimizer
    spec = spec.with_recipe(recipe_of(told.name, told.state, told.momentum))
    note = positions_note(spec, read_config(directory), config.data.max_length, "data.max_length")
    wishes = wishes_of(config, read_config(directory))
    wishes = cut.held(wishes) if cut is not None else wishes
    wishes = replace(wishes, reading_bytes=_reading_bytes(config, directory), random=model.init == "random")
    facts = None if machine_name else find(config.offload.device)
    machine = asked_machine(config, machine_name, facts)
    elsewhere = bool(machine_name)
    size = machine.drive_bytes
    wishes = wishes.on_drive(size, elsewhere) if elsewhere else wishes.within(size)
    machine, wishes = changed(machine, wishes, sets, len(config.offload.swap), elsewhere)
    compute = compute_dtype(facts, spec.dtype) if facts or machine.unified else spec.dtype
    kernels = "eager" if model.kernels == "auto" else model.kernels
    check_cheap(wishes.recompute, kernels)
    machine = machine.computing(compute, kernels)
    more = [_room_note(machine, wishes)] if elsewhere else [_gpu_note(machine), *_swap_notes(config)]
    more.append(_kernels_note(machine, kernels, compute))
    notes = [note, *_shape_notes(config, directory, init), *more]
    wishes = replace(wishes, compute=compute, opaque=kernels != "eager")
    return Question(spec, machine, wishes, tuple(filter(None, notes)))


def _shape_notes(config: Config, directory: Path, init: str) -> Iterator[str]:
    """What shapes rest on where they are not those of files."""
    if init != config.model.init:
        yield (
            f"{directory} holds no weights: shapes from its config.json alone; a run needs model.safetensors, or "
            'model.init = "random"'
        )
    if init == "random":
        yield shapes_note(read_config(directory))


def _swap_notes(config: Config) -> Iterator[str]:
    """What is to be known of several swap paths: the room of each, and whether they are several drives."""
    paths, output = apart(config.offload.swap), Path(config.train.output) if config.train.output else None
    if len(paths) > 1:
        rooms = zip(paths, rooms_of(paths, output), strict=True)
        told = ", ".join(f"{path} has room for {human(room)}" for path, room in rooms)
        how = "by its speed, measured at the first start, as far as it has room"
        yield f"offload.swap: {told}; each gets a share {how}"
        yield from (f"offload.swap: {line}" for line in shared_lines(paths))


def _gpu_note(machine: Machine) -> str:
    """What a machine file about this box says and a run does not use."""
    if not machine.gpu or not machine.unified:
        return ""
    return (
        f"{machine.name} has a GPU ({machine.gpu}); this run computes on the CPU: offload.device says so, or torch"
        " finds none"
    )


def _kernels_note(machine: Machine, kernels: str, compute: str) -> str:
    """What is to be known of kernels that were asked for."""
    told = ["blocks are compiled at the first step of each length of rows, some ten seconds"] * (kernels == "compile")
    if kernels != "eager" and (kernels not in machine.rates or compute != "bfloat16"):
        told.append(
            f"how fast they are in {compute} on {machine.name} is not known, so times are those of eager blocks"
        )
    return f'model.kernels = "{kernels}": {"; ".join(told)}' if told else ""


def _reading_bytes(config: Config, directory: Path) -> int:
    """What reading the tokenizer and the records takes, from the sizes of their files."""
    tokenizer = directory / "tokenizer.json"
    records = {path for pattern in (*config.data.train, *config.data.eval) for path in glob(pattern)}
    tokenizer_bytes = tokenizer.stat().st_size if tokenizer.exists() else 0
    return reading(tokenizer_bytes, sum(os.path.getsize(path) for path in records))


def asked_machine(config: Config, name: str | None = None, facts: DeviceFacts | None = None) -> Machine:
    """The box a plan is for: `name` (a file or catalogue name) as it stands; else this one.

    A file of `offload.machine`, or with "auto" that of the last bench, says what is known of this one, so it lowers its
    memory and cores and never raises them.
    `facts`: the device that was found here and computes; that of another box does, unless `offload.device = "cpu"`.
    """
    box, told = probe_machine(), config.offload.machine
    swap = apart(config.offload.swap)
    drives = max(1, len({drive_of(path) for path in swap}))
    box = replace(box, rates={lane: r * (drives if lane in LANES.values() else 1) for lane, r in box.rates.items()})
    if name:
        return read_machine(name, box, swap, gpu=config.offload.device != "cpu")
    if told == "auto":
        if not bench_file().is_file():
            return with_found(box, facts)
        told = str(bench_file())
    found = read_machine(told, box, swap, gpu=facts is not None)
    if found.host_bytes > box.host_bytes:
        device_bytes = box.host_bytes if found.unified else found.device_bytes
        found = replace(found, host_bytes=box.host_bytes, device_bytes=device_bytes, host_source=box.host_source)
    return with_found(replace(found, cores=min(found.cores, box.cores)), facts)


def _room_note(machine: Machine, wishes: Wishes) -> str:
    """What is taken for the room on the drive of a box elsewhere of which it is not known."""
    if wishes.checkpoint_free is not None:
        return ""
    return f"the drive of {machine.name} is not known: its room counts as unlimited; tell it with --set disk_free=SIZE"


def wishes_of(config: Config, model_config: dict[str, Any]) -> Wishes:
    """The user's choices and the room on the drives they name."""
    train, offload = config.train, config.offload
    attention = "sdpa" if config.model.attention == "auto" else config.model.attention
    swap = apart(offload.swap)
    output = Path(train.output) if train.output else None
    together = [drive_of(path) == drive_of(output) for path in swap if output is not None]
    return Wishes(
        batch_size=train.batch_size,
        max_length=config.data.max_length,
        micro_batch_size=train.micro_batch_size,
        sweeps=offload.sweeps,
        slots=offload.slots,
        parameters=offload.parameters,
        gradients=offload.gradients,
        optimizer=offload.optimizer,
        activations=offload.activations,
        recompute=offload.recompute,
        commit=offload.commit,
        clipping=config.optimizer.max_grad_norm > 0,
        zero_stage=offload.zero_stage,
        swap=bool(swap),
        disk_free=sum(rooms_of(swap, output)) if swap else None,
        checkpoint_free=room_at(output, swap, output) if output is not None else None,
        same_drive=any(together),
        host_memory=offload.host_memory_bytes,
        device_memory=offload.device_memory_bytes,
        score_copies=score_copies(attention, model_config),
        keep=train.keep,
        copies=0,
        linkable=bool(together) and all(together) and offload.checksum,
        threads=offload.threads,
        baseline_bytes=baseline(config.model.kernels),
        export_item_bytes=4 if config.model.dtype == "float32" else 2,
    )
