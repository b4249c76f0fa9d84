"""What runs where: what a user may ask for, and the plan that answers.

What fits is looked for along a ladder (`candidates.py`); of all that fit with the same bits the fastest is taken, as
far as rates are known (`fastest.py`), then the way of committing (`commit.py`).  What a user fixed stays as it is.  The
trade-off: the format of the optimizer's state changes numbers by much, so it is never chosen by time; the cut of a
batch changes the order of sums, so it is chosen once, and a run that goes on keeps it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from offloadz.plan.candidates import MEMORY_SHARE as MEMORY_SHARE
from offloadz.plan.candidates import Candidate, Space
from offloadz.plan.change import TO_DISK as TO_DISK
from offloadz.plan.change import Asked, needed, smallest_change
from offloadz.plan.commit import FASTEST, chosen_commit
from offloadz.plan.copies import linked, num_kept
from offloadz.plan.errors import ConfigError
from offloadz.plan.estimate import estimate
from offloadz.plan.fastest import fastest
from offloadz.plan.footprint import BASELINE_BYTES, Batch, Footprint
from offloadz.plan.hiding import Hiding
from offloadz.plan.kept import check_recompute, graph_room
from offloadz.plan.machine import UNVERIFIED, Machine
from offloadz.plan.placement import KINDS, Placement
from offloadz.plan.products import products_room
from offloadz.plan.reasons import reasons
from offloadz.plan.spec import ModelSpec
from offloadz.plan.wear import NO_WEAR, Wear, wear_of


@dataclass(frozen=True)
class Wishes:
    """What the user fixed; `auto` and 0 leave it to the plan, None means no limit is known."""

    batch_size: int
    max_length: int
    micro_batch_size: int = 0
    sweeps: int = 0
    cut_told: str = "as configured"
    """Why these two are fixed, where they are."""
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
    opaque: bool = False  # see `Placement.opaque`
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
    """Which blocks run again in the backward: auto (as far as there is no room for their graphs) | all | none
    | cheap (what lies between their products)."""
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
    """Empty where the plan fits; else each tier that is too small, with bytes found and needed."""
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
    by_commit_s: Mapping[str, float] = field(default_factory=dict)
    """A step by each way of committing that was left to the plan and has room."""
    graph_room_bytes: int = 0  # what kept graphs may take, which may be more than they do
    products_room_bytes: int = -1  # what results of products may take; the same room where both lie in one memory
    recompute: str = "auto"  # as it was asked for

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
        found["kept_graphs"], found["kept_products"] = self.placement.kept, self.placement.cheap
        found["step_s_by_commit"] = dict(self.by_commit_s) or {self.commit: self.step_s}
        found["smallest_tokens_per_step"] = self.hiding and self.hiding.tokens
        return found | {"terms": self.footprint.terms, "reasons": list(self.reasons)} | self.wear.to_json()


def decide(spec: ModelSpec, machine: Machine, wishes: Wishes) -> Plan:
    """The fastest plan that fits, with its predicted time; `fits` is False where none does.

    Raises ConfigError for wishes that contradict each other.
    """
    _check(wishes)
    plan = _planned(Space(spec, machine, wishes))
    if plan.fits:
        return chosen_commit(plan, wishes, lambda wishes: _planned(Space(spec, machine, wishes)))

    def fits(spec: ModelSpec, wishes: Wishes) -> bool:
        return not Space(spec, machine, wishes).first()[1]

    change = smallest_change(Asked(spec, wishes), plan.peak, fits)
    told = {"host": wishes.host_memory, "device": wishes.device_memory}
    shares = {tier: MEMORY_SHARE if limit is None else 1.0 for tier, limit in told.items()}
    return replace(plan, smallest_change=change or needed(plan.peak, shares, spec.share.ranks))


def _planned(space: Space) -> Plan:
    """The fastest that fits, with its time; by rates that nobody measured the first that does; or what lacks least."""
    first, shortage = space.first()
    if shortage:
        return _describe(space, first, first, shortage)
    if space.machine.rates_source.startswith(UNVERIFIED):
        return _timed(_describe(space, space.keeping(first), first), space)
    chosen, num_walked = fastest(space, first)
    plan = _timed(_describe(space, chosen, first), space)
    told = f"{num_walked} simulated; others are slower or do not fit" if num_walked > 1 else "all that fit"
    return replace(plan, reasons=(f"{FASTEST} the fastest of {told}", *plan.reasons)) if num_walked else plan


def _timed(plan: Plan, space: Space) -> Plan:
    spec, machine = space.spec, space.machine
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
    for key, number in (("train.batch_size", wishes.batch_size), ("data.max_length", wishes.max_length)):
        if number < 1:
            raise ConfigError(f"{key} = {number}; needed: at least 1")
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


def _describe(space: Space, chosen: Candidate, first: Candidate, shortage: str = "") -> Plan:
    """The plan without its times; `first`: of the ladder, by which reasons tell what fits."""
    spec, machine, wishes, limits = space.spec, space.machine, space.wishes, space.limits
    placement, batch = chosen.placement, chosen.batch
    return Plan(
        placement=placement,
        batch=batch,
        device=machine.device,
        threads=wishes.threads or machine.cores,
        footprint=chosen.footprint,
        limits=limits,
        limit_source=machine.host_source,
        fits=not shortage,
        smallest_change="",
        shortage=shortage,
        reasons=tuple(reasons(spec, placement, batch, wishes, limits["host"] or 0, first, shortage)),
        rates_source=machine.rates_source,
        machine=machine.name,
        graph_room_bytes=graph_room(spec, placement, batch, chosen.footprint, limits, wishes.recompute),
        products_room_bytes=products_room(spec, placement, batch, chosen.footprint, limits, wishes.recompute),
        recompute=wishes.recompute,
        recipe=spec.recipe.state,
        recipe_told=spec.recipe.told(placement.storage),
        keep=num_kept(placement, wishes.keep),
    )
