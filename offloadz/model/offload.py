"""`offload`: from a module and a few wishes to a run.

In order: outline the module, decide the plan, make the buffers, put the weights where they belong, put the stand-ins in
place.  Nothing of the size of the model is allocated outside what the plan says.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offloadz.memory.flat import spans
from offloadz.model.asked import check_arguments, check_commit, check_kinds, most_bytes, stored_dtype
from offloadz.model.blocks import BlockSeat
from offloadz.model.body import Body
from offloadz.model.drives import Drives
from offloadz.model.flips import adoptable, begin
from offloadz.model.graphs import Keeping
from offloadz.model.head import HeadSeat, LossHead
from offloadz.model.kernels import KernelSeat, forwards_of
from offloadz.model.materialize import move_buffers
from offloadz.model.near import near_names
from offloadz.model.optimizer import AdamW, RunOptimizer, Settings
from offloadz.model.outline import Outline, config_of, outline
from offloadz.model.run import RUNS, Run, SeatLike
from offloadz.model.sources import ModuleSource, RandomSource, Source
from offloadz.model.stage import Stage
from offloadz.model.tables import TableSeat
from offloadz.model.weights import names_of, source_of
from offloadz.plan.answer import Plan
from offloadz.plan.errors import ConfigError, DoesNotFit
from offloadz.plan.footprint import baseline, saved_bytes, score_copies
from offloadz.plan.kept import SLACK, UNLIMITED, graph_token_bytes, kept_bytes
from offloadz.plan.left import product_seats
from offloadz.plan.machine import Machine, compute_dtype, probe_machine, with_device
from offloadz.plan.placement import KINDS
from offloadz.plan.products import check_cheap, micro_products_bytes, product_token_bytes, products_bytes
from offloadz.plan.rooms import apart, rooms_of
from offloadz.plan.spec import ModelSpec
from offloadz.plan.stages import decide_for
from offloadz.plan.wishes import Wishes
from offloadz.runtime import native
from offloadz.runtime.chosen import device_named
from offloadz.runtime.devices import Device
from offloadz.runtime.level import level
from offloadz.runtime.ranks import Solo, join
from offloadz.runtime.room import Room
from offloadz.runtime.session import Session
from offloadz.runtime.threads import update_threads
from offloadz.runtime.transfer import check_io

log = logging.getLogger("offloadz")


@dataclass(frozen=True)
class RunUpdates:
    """What a run's updates need beside gradients."""

    settings: Settings
    threads: int
    max_grad_norm: float
    seed: int


SEED_STEP = 1 << 32
"""Between the seeds of dropout of two ranks, whose rows are not the same."""


@near_names
def offload(
    model: nn.Module,
    optimizer: Settings | None = None,
    plan: Plan | None = None,
    swap: Sequence[str | Path] | str | Path = (),
    *,
    parameters: str = "auto",
    gradients: str = "auto",
    optimizer_state: str = "auto",
    activations: str = "auto",
    recompute: str = "auto",
    slots: int = 0,
    sweeps: int = 0,
    micro_batch_size: int = 0,
    batch_size: int = 0,
    max_length: int = 0,
    max_grad_norm: float = 1.0,
    commit: str = "auto",
    dtype: torch.dtype | str | None = None,
    keep_float32: Sequence[str] = (),
    freeze: Sequence[str] = (),
    blocks: Sequence[str] = (),
    device: str | torch.device | Device = "auto",
    device_memory: int | str | None = None,
    host_memory: int | str | None = None,
    threads: int = 0,
    seed: int = 0,
    checksum: bool = True,
    io: str = "auto",
    poison: bool = False,
    output: str | Path | None = None,
    copies: int = 1,
    adopt: Path | None = None,
    zero_stage: str | int = "auto",
    kernels: str = "auto",
) -> Run:
    """Offload a module; returns the run that trains it.

    `model`: any module with repeated blocks, with its weights or (from `offloadz.load`) on meta.  `optimizer`: AdamW
    (by default), Adam, Lion or SGD.  `plan`: what `offloadz.plan.search.decide` returned; by default made from the
    wishes that follow.  `swap`: directories for what is placed on disk.  `parameters`, `gradients`, `optimizer_state`,
    `activations`: auto | device | host | disk.  `dtype`: of the working weights at rest, by default the parameters'
    own.  `micro_batch_size`, `batch_size` in rows, `max_length` in tokens (0: unknown, grows as met) only size the
    plan: larger batches take more memory.  `blocks`: names of the lists of blocks, where the longest is not meant.
    `output`: directory of the run.  `slots`, `sweeps`: 0 leaves them to the plan.  `max_grad_norm`: 0 is off.
    `commit`: auto, hold, shadow (updates as gradients come, into a second copy) or in_place (the same, nothing kept: no
    clipping).  `device`: what computes, auto | cpu | one of torch's (auto: the current accelerator, else the CPU), or a
    `Device`.  `host_memory`, `device_memory`: most bytes, a number or "48GiB".  `keep_float32`, `freeze`: name
    patterns.  `threads`: of updates.  `recompute`: blocks that run again in the backward, auto (where their graphs have
    no room) | all | none | cheap.  `seed`: of dropout and stochastic rounding.  `poison`: see docs.  `copies`: of
    parameters and optimizer state where both are on disk; from 2 on a step is there whole or not, from 3 on `run.save`
    makes hard links to one.  `adopt`: a directory of such state to take over instead of weights (CannotGoOn where it
    does not fit).  `checksum`: CRC32C of every MiB there.  `io`: auto | io_uring | threads.  `zero_stage`: auto or 0 to
    3, for ranks that share the `batch_size`.  `kernels`: auto (eager) | eager | compile | liger (docs/stand-ins.md).
    Raises ConfigError for what is not built or wrong, DoesNotFit with numbers, before a weight is read.
    """
    tiers = {"parameters": parameters, "gradients": gradients, "optimizer_state": optimizer_state}
    check_arguments(model, tiers | {"activations": activations}, optimizer)
    check_kinds(kept := {"keep_float32": keep_float32, "freeze": freeze, "blocks": blocks}, copies)
    check_commit(plan.commit if plan is not None and commit == "auto" else commit, max_grad_norm)
    stored, ranks = stored_dtype(model, dtype), join()
    updates = RunUpdates(optimizer or AdamW(), update_threads(threads)[0], max_grad_norm, seed)
    drawn = outline(model, stored, updates.settings.recipe, groups=updates.settings.matches, **kept)
    paths, computer = apart([swap] if isinstance(swap, str | Path) else swap), device_named(device)
    check_cheap(recompute if plan is None else "cheap" if plan.placement.cheap else plan.recompute, kernels)
    forwards = forwards_of(kernels, model, computer)
    wishes = Wishes(
        batch_size=batch_size or max(1, micro_batch_size) * max(1, sweeps) * ranks.size, max_length=max_length or 512,
        micro_batch_size=micro_batch_size, sweeps=sweeps, slots=slots, parameters=parameters, gradients=gradients,
        optimizer=optimizer_state, activations=activations, swap=bool(paths), commit=commit, recompute=recompute,
        disk_free=sum(rooms_of(paths, None)) if paths else None, compute=compute_dtype(computer.facts, stored),
        **most_bytes(host_memory=host_memory, device_memory=device_memory), threads=threads, zero_stage=zero_stage,
        **_known(model), copies=copies, baseline_bytes=baseline(kernels), opaque=forwards is not None,
    )  # fmt: skip
    plan = _settled(plan, drawn.spec, wishes, with_device(probe_machine(), computer.facts), ranks)
    room = _furnish(drawn.spec, plan, Drives(paths, checksum, io, output, adopt, ranks), computer, ranks)
    session, keeping = Session(room, poison=poison, seed=seed), _keeping(drawn.spec, plan, bool(batch_size))
    stage = Stage(session, model, seed + ranks.rank * SEED_STEP, keeping, forwards=forwards)
    run = _stand_in(model, drawn, plan, stage, None if adopt else source_of(model) or ModuleSource(model), updates)
    return _sized(run, micro_batch_size, sweeps, bool(batch_size), bool(batch_size and max_length))


def _sized(run: Run, micro_rows: int, sweeps: int, rows_known: bool, all_known: bool) -> Run:
    """The run with what it cuts a batch into: as asked for, else as planned where the plan knew the batch."""
    plan: Plan = run.plan
    run.sweeps = sweeps or (plan.sweeps if rows_known else 1)
    run.stage.micro_rows = micro_rows or (plan.micro_batch_size if rows_known else 0)
    run.stage.planned_positions = plan.batch.rows * plan.batch.length if all_known else 0
    return run


def _keeping(spec: ModelSpec, plan: Plan, known: bool) -> Keeping:
    """What is kept of forwards: what the plan says, as long as it takes what it says.  Of batches that are not `known`
    what half the room takes, since all else grows with them too."""
    where, batch = plan.placement, plan.batch
    graphs, results = kept_bytes(spec, where, batch), products_bytes(spec, where, batch)
    shared = len(where.products_route) == 1
    planned = (graphs + results,) * 2 if shared else (graphs, results)
    rooms = [
        room if room == UNLIMITED else min(room, int(SLACK * taken)) if known else room // 2
        for room, taken in zip((plan.graph_room_bytes, plan.products_room_bytes), planned, strict=True)
    ]
    may = spec.keeping_seats(where.kept) if plan.recompute == "all" else spec.unfolding_seats
    each = {s: graph_token_bytes(spec, s, where, batch) if s in may else inf for s in spec.unfolding_seats}
    able = product_seats(spec, len(spec.seats), 0 if shared else where.kept) if where.cheap else ()
    products = {seat: product_token_bytes(spec, seat, where) for seat in able}
    return Keeping(rooms[0], [each.get(seat, 0.0) for seat in range(len(spec.seats))], rooms[1], products, shared)


def _settled(plan: Plan | None, spec: ModelSpec, wishes: Wishes, machine: Machine, ranks: Solo) -> Plan:
    """The plan that is given, if it agrees with the wishes beside it, or the one that the wishes lead to."""
    if plan is not None:
        _check_agrees(plan, wishes)
        if plan.placement.unified != machine.unified:
            raise ConfigError(f"offload: device {machine.device} beside a plan for {plan.device}; give one of the two")
        if plan.placement.share.ranks != ranks.size:
            raise ConfigError(f"offload: a plan for {plan.placement.share.ranks} ranks, and there are {ranks.size}")
        if plan.recipe != spec.recipe.state:
            raise ConfigError(f"offload: state = {spec.recipe.state!r} beside a plan that says {plan.recipe!r}")
        if wishes.commit != "auto":  # asked for, so it stays: the room to go over to another way is not made
            plan = replace(plan, placement=replace(plan.placement, commit=plan.commit), seldom_s=0.0)
    plan = plan or decide_for(spec, *level(machine, wishes, ranks))
    where = plan.placement
    if wishes.copies > 1 and not where.flips:
        raise ConfigError(
            f"copies = {wishes.copies} is of parameters and optimizer state that are both on disk, with commit = 'hold'"
            f" or 'shadow'; found parameters on {where.parameters}, optimizer state on {where.optimizer}, commit "
            f"{where.commit}; set parameters and optimizer_state to 'disk', or leave copies out"
        )
    if not plan.fits:
        raise DoesNotFit(plan.refusal())
    return plan


def _check_agrees(plan: Plan, wishes: Wishes) -> None:
    told = {kind: (getattr(wishes, kind), getattr(plan.placement, kind)) for kind in KINDS}
    told |= {"slots": (wishes.slots or plan.slots, plan.slots), "sweeps": (wishes.sweeps or plan.sweeps, plan.sweeps)}
    told["commit"] = (wishes.commit, plan.commit)
    told["recompute"] = (wishes.recompute, plan.recompute)
    told["zero_stage"] = (wishes.zero_stage, plan.placement.share.stage)
    told["copies"] = (wishes.copies if wishes.copies > 1 else plan.placement.copies, plan.placement.copies)
    for name, (wished, planned) in told.items():
        if wished not in ("auto", planned):
            raise ConfigError(f"offload: {name} = {wished!r} beside a plan that says {planned!r}; give one of the two")


def _known(model: nn.Module) -> dict[str, Any]:
    """What the plan has to know of a model beside its shapes."""
    config, told = getattr(model, "config", None), config_of(model)
    attention = getattr(config, "_attn_implementation", None) or "sdpa"
    copies = score_copies(attention, told) if told else 0  # of the attention scores
    return {"random": isinstance(source_of(model), RandomSource), "score_copies": copies}


def _furnish(spec: ModelSpec, plan: Plan, drives: Drives, device: Device, ranks: Solo) -> Room:
    """The room of a plan, its buffers made and its extents reserved or taken over."""
    native.shape_heap()
    check_io(drives.io)
    if reason := ranks.meet(device.torch):
        log.warning("tensors cross between ranks through the host, which is slower, to the same bits: %s", reason)
    share = ranks.share(plan.placement.share.stage)
    spec = spec.shared_by(share)
    placement = replace(plan.placement, storage=spec.dtype, accumulate=plan.sweeps > 1, share=share)
    on_disk = "disk" in (placement.parameters, placement.gradients, placement.optimizer, placement.activations)
    if on_disk and not drives.paths:
        raise ConfigError("something is placed on disk and swap is empty; name a directory in offload.swap")
    copies = placement.copies if placement.ending else 1
    if drives.adopt and ranks.size > 1:
        raise ConfigError(f"adopt over {ranks.size} ranks is not built; leave it out and read the state with run.load")
    saved = adoptable(drives.adopt, spec, copies if placement.flips else 1) if drives.adopt else None
    disk = drives.open(plan, copies, saved) if on_disk else None
    room = Room(spec, placement, disk, ranks, device=device)
    try:
        results_bytes = int(SLACK * micro_products_bytes(spec, placement, plan.batch))
        room.build(saved_bytes(spec, placement, plan.batch), results_bytes)
    except BaseException:
        room.close()
        raise
    return room


def _stand_in(
    model: nn.Module, drawn: Outline, plan: Plan, stage: Stage, source: Source | None, updates: RunUpdates
) -> Run:
    """Stand-ins where the blocks were and weights at home (no source: they are); all is put back where that fails."""
    seats: list[SeatLike] = []
    names_of(model)  # noted while its modules are its own
    try:
        for index, module in enumerate(drawn.modules):
            seats.append(_seat(stage, index, module, drawn))  # refuses what is not built before a weight is read
        if source is not None:
            fill(stage.session, source)
        run = _assemble(model, drawn, plan, stage, seats, updates)
        begin(run)
        return run
    except BaseException:
        for seat in seats:
            seat.body.stand_out()
        stage.session.close()
        raise


def fill(session: Session, source: Source) -> None:
    """Every weight from its source to its home, part by part: never more than one part in flight."""
    last = {
        m.name: (i, k)
        for i, u in enumerate(session.spec.units)
        for k in u.own_parts
        for m in (s.member for s in spans(u, u.parts[k]))
    }
    for index, unit in enumerate(session.spec.units):
        for k in unit.own_parts:
            part = unit.parts[k]
            master = torch.empty(part.num_elements, dtype=torch.float32)
            for span in spans(unit, part):
                master[span.part_slice] = source.read(
                    span.member.name, span.first_element, span.stop - span.start
                ).float()
            session.put(index, k, master)
            for span in spans(unit, part):
                if last[span.member.name] == (index, k):
                    source.release(span.member.name)
    session.spread()


def _assemble(
    model: nn.Module,
    drawn: Outline,
    plan: Plan,
    stage: Stage,
    seats: list[SeatLike],
    updates: RunUpdates,
) -> Run:
    """The weights let go of, the loss head over the stand-ins, and the run around all."""
    move_buffers(model, stage.device.torch)
    _to_meta(seats, {m.name for u in drawn.spec.units for s in u.sections if s.trainable for m in s.members})
    heads = [s for s in seats if isinstance(s, HeadSeat)]
    base = getattr(model, "base_model", None)
    has_base = isinstance(base, nn.Module) and base is not model
    stage.watch(*([model, base] if has_base else [model]))  # type: ignore[list-item]
    loss_head = LossHead(stage, model, base, heads[0]) if heads and has_base else None  # type: ignore[arg-type]
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    stage.still = {n: p for n, p in model.named_parameters() if not p.requires_grad}
    run_box: list[Run] = []
    optimizer = RunOptimizer(updates.settings, named, lambda: run_box[0]._take(), updates.seed)
    run = Run(
        model, stage, stage.session, seats, optimizer, loss_head, plan,
        max_grad_norm=updates.max_grad_norm, threads=updates.threads,
    )  # fmt: skip
    run_box.append(run)
    optimizer.run = run
    RUNS[id(model)] = stage.run = run
    return run


def _seat(stage: Stage, index: int, module: nn.Module, drawn: Outline) -> SeatLike:
    seat = drawn.spec.seats[index]
    body = Body(module, drawn.spec.units[seat.units[0]] if seat.kind in ("block", "module") else None, drawn.names)
    if seat.kind == "table":
        return TableSeat(stage, index, seat.name, module, body)  # type: ignore[arg-type]
    if seat.kind == "head":
        return HeadSeat(stage, index, seat.name, body)
    told = (stage, index, seat.name, seat.kind, seat.units[0], body)
    if seat.kind == "block" and stage.forwards is not None:
        return KernelSeat(*told, forward=stage.forwards(body))
    return BlockSeat(*told)


def _to_meta(seats: list[SeatLike], trained: set[str]) -> None:
    """Parameters keep name, shape and dtype, and hold nothing; tied ones stay one object."""
    made: dict[str, nn.Parameter] = {}
    for seat in seats:
        for place in seat.body.places:
            old = place.module._parameters[place.attribute]
            if place.name not in made and old is not None:
                made[place.name] = nn.Parameter(torch.empty_like(old, device="meta"), place.name in trained)
            place.module._parameters[place.attribute] = made[place.name]
