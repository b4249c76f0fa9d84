"""What runs where: the plan that answers what a user asks for.

What fits is looked for along a ladder (`candidates.py`); of all that fit with the same bits the fastest is taken, as
far as rates are known (`fastest.py`), then the way of committing (`commit.py`).  What a user fixed stays as it is.  The
trade-off: the format of the optimizer's state changes numbers by much, so it is never chosen by time; the cut of a
batch changes the order of sums, so it is chosen once, and a run that goes on keeps it.
"""

from __future__ import annotations

from dataclasses import replace

from offloadz.plan.answer import Plan
from offloadz.plan.candidates import MEMORY_SHARE, Candidate, Space
from offloadz.plan.change import Asked, needed, smallest_change
from offloadz.plan.commit import FASTEST, chosen_commit
from offloadz.plan.copies import num_kept
from offloadz.plan.estimate import estimate
from offloadz.plan.fastest import fastest
from offloadz.plan.hiding import Hiding
from offloadz.plan.kept import graph_room
from offloadz.plan.machine import UNVERIFIED, Machine
from offloadz.plan.products import products_bytes, products_room
from offloadz.plan.reasons import reasons
from offloadz.plan.spec import ModelSpec
from offloadz.plan.wear import wear_of
from offloadz.plan.wishes import Wishes, check_wishes


def decide(spec: ModelSpec, machine: Machine, wishes: Wishes) -> Plan:
    """The fastest plan that fits, with its predicted time; `fits` is False where none does.

    Raises ConfigError for wishes that contradict each other.
    """
    check_wishes(wishes)
    plan = _planned(Space(spec, machine, wishes))
    if plan.fits:
        return chosen_commit(plan, wishes, lambda wishes: _planned(Space(spec, machine, wishes)))

    def first(asked: Asked) -> tuple[Candidate, str]:
        return Space(asked.spec, machine, asked.wishes).first()

    change = smallest_change(Asked(spec, wishes), plan.peak, first)
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


def _describe(space: Space, chosen: Candidate, first: Candidate, shortage: str = "") -> Plan:
    """The plan without its times; `first`: of the ladder, by which reasons tell what fits."""
    spec, machine, wishes, limits = space.spec, space.machine, space.wishes, space.limits
    placement, batch = chosen.placement, chosen.batch
    room = (spec, placement, batch, chosen.footprint, limits, wishes.recompute)
    shared = len(placement.products_route) == 1
    return Plan(
        placement=placement,
        batch=batch,
        device=machine.device,
        threads=wishes.threads or machine.cores,
        footprint=chosen.footprint,
        limits=limits,
        limit_source=space.limit_source,
        fits=not shortage,
        smallest_change="",
        shortage=shortage,
        reasons=tuple(reasons(spec, placement, batch, wishes, limits["host"] or 0, first, shortage)),
        rates_source=machine.rates_source,
        machine=machine.name,
        graph_room_bytes=graph_room(*room, products_bytes(spec, placement, batch) if shared else 0),
        products_room_bytes=products_room(*room),
        recompute=wishes.recompute,
        recipe=spec.recipe.state,
        recipe_told=spec.recipe.told(placement.storage),
        keep=num_kept(placement, wishes.keep),
    )
