"""Whether updates wait for the norm (hold) or come with their gradients (shadow), where that is left to the plan.

Both are simulated; shadow is taken where it is sooner and there is room for what it writes beside.  In place is never
taken by itself.  A clipped step is updated twice with shadow, and in fine-tuning every step may be clipped
(docs/log.md), so with clipping a run begins with hold, in the room that shadow needs.  The trade-off: a spare takes
memory that other programs may want, so a gain that makes no difference (`fastest.TIE`), or one by rates that nobody
measured, is left.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from offloadz.plan.fastest import TIE
from offloadz.plan.machine import UNVERIFIED
from offloadz.plan.placement import KINDS
from offloadz.plan.words import lasting

if TYPE_CHECKING:
    from offloadz.plan.answer import Plan
    from offloadz.plan.wishes import Wishes

FASTEST = "placement:"
"""How the line begins that says how a placement was found."""

TIMES = ("step_s", "tokens_per_s", "bottleneck", "busy_s", "taken_s", "wear", "hiding")
"""What a plan says of its steps."""


def chosen_commit(held: Plan, wishes: Wishes, decide: Callable[[Wishes], Plan]) -> Plan:
    """The plan with hold that was found, or one with shadow; `decide` plans what is asked for.

    With clipping both have one placement, without it shadow may have another; the batch is cut alike.
    """
    if wishes.commit != "auto" or held.rates_source.startswith(UNVERIFIED):
        return held
    same: dict[str, Any] = {"sweeps": held.sweeps, "micro_batch_size": held.micro_batch_size}
    if wishes.clipping:
        same |= {kind: getattr(held.placement, kind) for kind in KINDS} | {"slots": held.slots}
    beside = decide(replace(wishes, commit="shadow", **same))
    gain = 1 - beside.step_s / held.step_s if beside.fits and held.step_s else 0.0
    by = {"hold": held.step_s} | ({"shadow": beside.step_s} if beside.fits else {})
    both = f" ({', '.join(f'{commit} {lasting(step_s)}' for commit, step_s in by.items())} a step)"
    if gain < TIE or _keeps_less(beside, held):
        win = f"would win {gain:.0%}" if gain > 0 else "would win nothing"
        why = f"shadow {win}{both}" if beside.fits else f"no room for shadow: {beside.shortage}"
        return replace(held, reasons=(*held.reasons, f"commit hold: {why}"), by_commit_s=by)
    lines = tuple(_told(held, beside, same))
    if not wishes.clipping:
        why = f"commit shadow: wins {gain:.0%} over hold{both}"
        return replace(beside, reasons=(*lines, why), by_commit_s=by)
    why = f"commit hold at first: shadow wins {gain:.0%}{both}, and the run goes over to it while clipping fires seldom"
    times = {name: getattr(held, name) for name in TIMES}
    return replace(beside, seldom_s=beside.step_s, reasons=(*lines, why), by_commit_s=by, **times)


def _keeps_less(beside: Plan, held: Plan) -> bool:
    """Whether the same state on disk is held in fewer checkpoints, or no longer in links."""
    places = [(plan.placement.parameters, plan.placement.optimizer) for plan in (beside, held)]
    return places[0] == places[1] and (beside.keep, beside.linked) != (held.keep, held.linked)


def _told(held: Plan, beside: Plan, same: Collection[str]) -> Iterator[str]:
    """The reasons of `beside`; of what was taken over from `held` those of that."""
    before = {line.split()[0]: line for line in held.reasons}
    if "slots" in same and FASTEST in before:
        yield before[FASTEST]
    for line in beside.reasons:
        name = line.split()[0]
        yield before[name] if name in same else line
