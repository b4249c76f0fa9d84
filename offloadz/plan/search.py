"""What runs where: a first search by size.

Everything stays in memory while it fits in nine tenths of what is available; then optimizer state goes to disk, then
gradients, parameters, and saved inputs, in the order of bytes won per byte that moves in a step.  What a user fixed
stays as it is.  The winner is simulated once for its time.  The trade-off: no candidate is simulated against another,
so a faster placement that also fits may be missed; only the way of committing is chosen by time (`commit.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from offloadz.plan.change import TO_DISK, Asked, needed, smallest_change
from offloadz.plan.commit import chosen_commit
from offloadz.plan.copies import copy_choices, linked, num_kept
from offloadz.plan.errors import ConfigError
from offloadz.plan.estimate import estimate
from offloadz.plan.footprint import BASELINE_BYTES, Batch, Footprint, computation, footprint
from offloadz.plan.hiding import Hiding
from offloadz.plan.kept import check_recompute, graph_room, may_keep, most_kept
from offloadz.plan.machine import Machine
from offloadz.plan.placement import KINDS, Placement
from offloadz.plan.reasons import reasons
from offloadz.plan.recipes import Recipe
from offloadz.plan.spec import ModelSpec
from offloadz.plan.wear import NO_WEAR, Wear, wear_of
from offloadz.plan.words import human as human

MEMORY_SHARE = 0.9
"""Of what is available, left alone for whatever else the box does; a limit that a user sets is used whole."""

MICRO_TOKENS = 4096
"""Tokens of a micro-batch beyond which a CPU's products get no faster, so that more would only cost memory."""

WORKING_SHARE = 0.25
"""Most of the limit that a micro-batch's computation may take where the plan chooses its size."""


@dataclass(frozen=True)
class Wishes:
    """What the user fixed; `auto` and 0 leave it to the plan, None means no limit is known."""

    batch_size: int
    max_length: int
    micro_batch_size: int = 0
    sweeps: int = 0
    slots: int = 0
    parameters: str = "auto"
    gradients: str = "auto"
    optimizer: str = "auto"
    activations: str = "auto"
    swap: bool = False
    """Whether a swap directory is given; without one nothing goes to disk."""
    disk_free: int | None = None
    checkpoint_free: int | None = None
    same_drive: bool = False
    """Whether `offload.swap` and `train.output` share a file system, and with it the room."""
    host_memory: int | None = None
    device_memory: int | None = None
    compute: str = "float32"
    """Dtype of computation: float32 on a CPU, whose bf16 products are unusably slow without special instructions."""
    score_copies: int = 0  # see `footprint.score_copies`
    keep: int = 2
    copies: int = 1
    """`keep`: 0 is 2 checkpoints, or 1 where they are links.  `copies`: of the state on disk; 0 is as many as fit."""
    linkable: bool = False  # checkpoints may be links to the state on disk: one file system, and checksums
    threads: int = 0
    baseline_bytes: int = BASELINE_BYTES
    export_item_bytes: int = 2
    reading_bytes: int = 0  # beside the interpreter while data are read
    random: bool = False  # whether the weights are drawn at random
    recompute: str = "auto"
    """Which blocks run again in the backward: auto (as far as there is no room for their graphs) | all | none."""
    commit: str = "auto"
    """`in_place` is only taken where it is asked for: a step that fails half-way then ends the run."""
    clipping: bool = True  # whether a step may be clipped, and so updated twice with shadow
    ranks: int = 1
    zero_stage: str | int = "auto"  # see stages.py


@dataclass(frozen=True)
class Plan:
    """What was decided, with predicted bytes and times."""

    placement: Placement
    batch: Batch
    device: str
    threads: int
    footprint: Footprint
    limits: dict[str, int | None]
    """Most bytes of each tier; None where nothing is known."""
    limit_source: str
    fits: bool
    smallest_change: str
    """Empty where the plan fits; else the smallest change that would make it fit, with its field."""
    shortage: str
    """Empty where the plan fits; else the tier that is too small, with the bytes found and needed."""
    reasons: tuple[str, ...]
    step_s: float = 0.0
    tokens_per_s: float = 0.0
    bottleneck: str = ""
    busy_s: dict[str, float] | None = None
    taken_s: dict[str, float] | None = None
    """Seconds of work of each lane, and how long it is busy with it, slowed down by what runs beside it."""
    wear: Wear = NO_WEAR
    hiding: Hiding | None = None
    rates_source: str = ""
    keep: int = 2  # checkpoints that stay
    recipe: str = "fp32"  # format of the optimizer's state
    recipe_told: str = ""
    """The same in words, with the bytes a parameter."""
    machine: str = ""
    seldom_s: float = 0.0  # a step with shadow, to which a run goes over while clipping fires seldom; 0: it does not
    graph_room_bytes: int = 0  # what kept graphs may take, which may be more than they do

    @property
    def commit(self) -> str:
        """How updates come at first; the room is that of `placement.commit`."""
        return "hold" if self.seldom_s else self.placement.commit

    def step_s_by(self, commit: str) -> float:
        """Seconds of a step while updates come like that."""
        return self.seldom_s if self.seldom_s and commit == "shadow" else self.step_s

    @property
    def micro_batch_size(self) -> int:
        return self.batch.micro_rows

    @property
    def sweeps(self) -> int:
        return self.batch.sweeps

    @property
    def slots(self) -> int:
        return self.placement.slots

    @property
    def linked(self) -> bool:
        """Whether checkpoints are hard links to the state on disk."""
        return linked(self.placement)

    @property
    def bytes(self) -> dict[str, dict[str, int]]:
        """Bytes per tier and phase."""
        return self.footprint.bytes

    @property
    def peak(self) -> dict[str, int]:
        return self.footprint.peak

    def refusal(self) -> str:
        """One paragraph for a plan that does not fit."""
        return f"does not fit: {self.shortage}. Smallest change: {self.smallest_change}"

    def to_json(self) -> dict[str, Any]:
        """The object that `offloadz plan --json` prints and `plan.json` holds."""
        same = (
            "fits", "smallest_change", "shortage", "step_s", "tokens_per_s", "bottleneck", "busy_s", "taken_s", "bytes",
            "peak", "limits", "limit_source", "recipe", "slots", "sweeps", "micro_batch_size", "commit", "device",
            "threads", "rates_source", "machine",
        )  # fmt: skip
        found = {key: getattr(self, key) for key in same}
        found["placement"] = {kind: getattr(self.placement, kind) for kind in KINDS}
        found |= {"zero_stage": self.placement.share.stage, "ranks": self.placement.share.ranks}
        found["compute"], found["storage"] = self.placement.compute, self.placement.storage
        found["copies"], found["keep"], found["linked"] = self.placement.copies, self.keep, self.linked
        found["kept_graphs"] = self.placement.kept
        found["smallest_tokens_per_step"] = self.hiding and self.hiding.tokens
        return found | {"terms": self.footprint.terms, "reasons": list(self.reasons)} | self.wear.to_json()


@dataclass(frozen=True)
class _Candidate:
    placement: Placement
    batch: Batch
    footprint: Footprint
    recipe: Recipe


def decide(spec: ModelSpec, machine: Machine, wishes: Wishes) -> Plan:
    """The first placement that fits, with its predicted time; `fits` is False where none does.

    Raises ConfigError for wishes that contradict each other.
    """
    _check(wishes)
    plan = _planned(spec, machine, wishes)
    if plan.fits:
        return chosen_commit(plan, wishes, lambda wishes: _planned(spec, machine, wishes))

    def fits(spec: ModelSpec, wishes: Wishes) -> bool:
        return not _first_that_fits(spec, machine, wishes, _limits(machine, wishes))[1]

    change = smallest_change(Asked(spec, wishes), plan.peak, fits)
    share = MEMORY_SHARE if wishes.host_memory is None else 1.0
    return replace(plan, smallest_change=change or needed(plan.peak, share, spec.share.ranks))


def _planned(spec: ModelSpec, machine: Machine, wishes: Wishes) -> Plan:
    """The first that fits, with its time, or the one that lacks least."""
    limits = _limits(machine, wishes)
    chosen, shortage = _first_that_fits(spec, machine, wishes, limits)

    def keeping(count: int) -> _Candidate:
        placement = replace(chosen.placement, kept=count)
        return replace(chosen, placement=placement, footprint=_footprint(spec, placement, chosen.batch, wishes))

    if not shortage and may_keep(chosen.placement, wishes.recompute):
        chosen = keeping(most_kept(spec, lambda n: not _lacking(keeping(n).footprint, limits, machine, wishes)))
    plan = _describe(spec, chosen, machine, wishes, limits, shortage)
    return plan if shortage else _timed(plan, spec, machine)


def _timed(plan: Plan, spec: ModelSpec, machine: Machine) -> Plan:
    found = estimate(spec, plan.placement, plan.batch, machine)
    return replace(
        plan,
        step_s=found.step_s,
        tokens_per_s=plan.batch.tokens / found.step_s if found.step_s else 0.0,
        bottleneck=found.bottleneck,
        busy_s=found.busy_s,
        taken_s=found.taken_s,
        wear=wear_of(spec, plan.placement, found.disk_written_bytes, found.step_s, machine.drive),
        hiding=Hiding(spec, plan.placement, plan.batch, machine, found.step_s, found.busy_s["device"]),
    )


def _check(wishes: Wishes) -> None:
    check_recompute(wishes.recompute)
    for field, number in (("train.batch_size", wishes.batch_size), ("data.max_length", wishes.max_length)):
        if number < 1:
            raise ConfigError(f"{field} = {number}; needed: at least 1")
    if not wishes.swap:
        fixed = [kind for kind in KINDS if getattr(wishes, kind) == "disk"]
        if fixed:
            raise ConfigError(
                f'offload.{fixed[0]} = "disk", and offload.swap is empty; name a directory in offload.swap'
            )
    if wishes.micro_batch_size > wishes.batch_size:
        raise ConfigError(
            f"train.micro_batch_size = {wishes.micro_batch_size} is above train.batch_size = {wishes.batch_size}"
        )
    if wishes.sweeps > wishes.batch_size:
        raise ConfigError(f"offload.sweeps = {wishes.sweeps} is above train.batch_size = {wishes.batch_size}")


def _limits(machine: Machine, wishes: Wishes) -> dict[str, int | None]:
    """Most bytes per tier: what a user set, or a share of what is there."""
    host, device = _most(machine.host_bytes, wishes.host_memory), _most(machine.device_bytes, wishes.device_memory)
    if machine.unified and wishes.device_memory is not None:
        host = min(host, wishes.device_memory)
    tiers = {"host": host} if machine.unified else {"device": device, "host": host}
    return {**tiers, "disk": wishes.disk_free, "checkpoint": wishes.checkpoint_free}


def _most(total_bytes: int, told_bytes: int | None) -> int:
    return int(total_bytes * MEMORY_SHARE) if told_bytes is None else min(told_bytes, total_bytes)


def _first_that_fits(
    spec: ModelSpec, machine: Machine, wishes: Wishes, limits: dict[str, int | None]
) -> tuple[_Candidate, str]:
    """The first candidate that fits and "", or the one that lacks least and what it lacks."""
    closest: tuple[int, str, _Candidate] | None = None
    for largest in _candidates(spec, machine, wishes, limits):
        for candidate in chain([largest], _fewer_copies(spec, largest, wishes)):
            lacking = _lacking(candidate.footprint, limits, machine, wishes)
            if not lacking:
                return candidate, ""
            excess = sum(nbytes for nbytes, _ in lacking)
            if closest is None or excess < closest[0]:
                closest = (excess, lacking[0][1], candidate)
            if candidate.footprint.peak["host"] > (limits["host"] or 0):
                break  # fewer copies only help the drive
    assert closest is not None  # the first rung of the ladder is always there
    return closest[2], closest[1]


def _fewer_copies(spec: ModelSpec, largest: _Candidate, wishes: Wishes) -> Iterator[_Candidate]:
    """A candidate with its state on disk in fewer and fewer copies."""
    for copies in copy_choices(largest.placement, wishes.keep, wishes.copies, wishes.linkable)[1:]:
        placement = replace(largest.placement, copies=copies)
        yield replace(largest, placement=placement, footprint=_footprint(spec, placement, largest.batch, wishes))


def _lacking(
    found: Footprint, limits: dict[str, int | None], machine: Machine, wishes: Wishes
) -> list[tuple[int, str]]:
    """(bytes too many, the tier in words with what it has and what is needed), empty where everything fits."""
    fixed = [key for key in ("host_memory", "device_memory") if getattr(wishes, key) == limits["host"]]
    source = f"offload.{fixed[0]}" if fixed else f"host memory ({machine.host_source})"
    names = {"host": source, "disk": "offload.swap", "checkpoint": "train.output"}
    names["device"] = f"the memory of {machine.gpu}"
    lacking = []
    for tier, limit in limits.items():
        if limit is not None and found.peak[tier] > limit:
            phase = max(found.bytes[tier], key=lambda p: found.bytes[tier][p])
            text = f"{names[tier]} has {human(limit)} to use and {phase} needs {human(found.peak[tier], up=True)}"
            lacking.append((found.peak[tier] - limit, text))
    both, room = found.peak["disk"] + found.peak["checkpoint"], wishes.disk_free
    if wishes.same_drive and room is not None and both > room:
        text = f"the drive of offload.swap and train.output has {human(room)} and both need {human(both, up=True)}"
        lacking.append((both - room, text))
    return lacking


def _candidates(
    spec: ModelSpec, machine: Machine, wishes: Wishes, limits: dict[str, int | None]
) -> Iterator[_Candidate]:
    """From everything in memory to everything on disk; when all is there, fewer slots and more sweeps."""
    ladder = list(_ladder(spec, machine, wishes))
    slot_choices = [wishes.slots] if wishes.slots else [2, 1]
    for slots in slot_choices:
        for placement in ladder if slots == slot_choices[0] else ladder[-1:]:
            yield _sized(spec, replace(placement, slots=slots), wishes, limits, wishes.sweeps or 1)
    sweeps = 2
    while not wishes.sweeps and sweeps * max(1, wishes.micro_batch_size) <= wishes.batch_size:
        placement = replace(ladder[-1], slots=slot_choices[-1], accumulate=True)
        yield _sized(spec, placement, wishes, limits, sweeps)
        sweeps *= 2


def _ladder(spec: ModelSpec, machine: Machine, wishes: Wishes) -> Iterator[Placement]:
    """Placements with more and more on disk; on a CPU saved inputs that stay in memory are kept as they are."""
    rest = {kind: getattr(wishes, kind) for kind in KINDS}
    memory = dict.fromkeys(KINDS, "host") | {"activations": "device" if machine.unified else "host"}
    chosen = {kind: memory[kind] if rest[kind] == "auto" else rest[kind] for kind in KINDS}
    for kind in ("", *TO_DISK):
        if kind and not (wishes.swap and rest[kind] == "auto"):
            continue
        if kind:
            chosen[kind] = "disk"
        placement = Placement(
            parameters=chosen["parameters"], gradients=chosen["gradients"], optimizer=chosen["optimizer"],
            activations=chosen["activations"], unified=machine.unified, compute=wishes.compute, storage=spec.dtype,
            accumulate=wishes.sweeps > 1, commit="hold" if wishes.commit == "auto" else wishes.commit,
            share=spec.share, kept=len(spec.unfolding_seats) if wishes.recompute == "none" else 0,
        )  # fmt: skip
        yield replace(placement, copies=copy_choices(placement, wishes.keep, wishes.copies, wishes.linkable)[0])


def _sized(
    spec: ModelSpec, placement: Placement, wishes: Wishes, limits: dict[str, int | None], sweeps: int
) -> _Candidate:
    """The candidate with the largest micro-batch of reasonable cost: few tokens, and a small share of the memory."""
    whole = Batch(wishes.batch_size, wishes.max_length, 1, sweeps, wishes.score_copies)
    rows = min(wishes.micro_batch_size or whole.rows_per_sweep, whole.rows_per_sweep)
    if not wishes.micro_batch_size:
        rows = max(1, min(rows, MICRO_TOKENS // wishes.max_length))
        while rows > 1 and not _reasonable(spec, placement, replace(whole, micro_rows=rows), wishes, limits):
            rows -= 1
        rows = -(-whole.rows_per_sweep // -(-whole.rows_per_sweep // rows))  # equal micro-batches, as many
    batch = replace(whole, micro_rows=rows)
    return _Candidate(placement, batch, _footprint(spec, placement, batch, wishes), spec.recipe)


def _reasonable(
    spec: ModelSpec, placement: Placement, batch: Batch, wishes: Wishes, limits: dict[str, int | None]
) -> bool:
    tier = "host" if placement.unified else "device"
    limit = limits[tier] or 0
    working = sum(computation(spec, placement, batch).values())
    if working > WORKING_SHARE * limit:
        return False
    return _footprint(spec, placement, batch, wishes).peak[tier] <= limit


def _footprint(spec: ModelSpec, placement: Placement, batch: Batch, wishes: Wishes) -> Footprint:
    return footprint(
        spec, placement, batch,
        baseline_bytes=wishes.baseline_bytes, keep=wishes.keep or 2, linked=linked(placement),
        export_item_bytes=wishes.export_item_bytes,
        reading_bytes=wishes.reading_bytes, random=wishes.random,
    )  # fmt: skip


def _describe(
    spec: ModelSpec, chosen: _Candidate, machine: Machine, wishes: Wishes, limits: dict[str, int | None], shortage: str
) -> Plan:
    return Plan(
        placement=chosen.placement,
        batch=chosen.batch,
        device=machine.device,
        threads=wishes.threads or machine.cores,
        footprint=chosen.footprint,
        limits=limits,
        limit_source=machine.host_source,
        fits=not shortage,
        smallest_change="",
        shortage=shortage,
        reasons=tuple(reasons(spec, chosen.placement, chosen.batch, wishes, limits["host"] or 0)),
        rates_source=machine.rates_source,
        machine=machine.name,
        graph_room_bytes=graph_room(spec, chosen.placement, chosen.batch, chosen.footprint, limits, wishes.recompute),
        recipe=chosen.recipe.state,
        recipe_told=chosen.recipe.told(chosen.placement.storage),
        keep=num_kept(chosen.placement, wishes.keep),
    )
