"""Whether updates wait for the norm (hold) or come with their gradients (shadow), where that is left to the plan.

Both are simulated on the placement that was found; shadow is taken where it is sooner and there is room for what it
writes beside.  In place is never taken by itself.  A clipped step is updated twice with shadow, and in fine-tuning
every step may be clipped (docs/log.md), so with clipping a run begins with hold, in the room that shadow needs.  The
trade-off: a spare takes memory that other programs may want, so a gain below a twentieth, or one by rates that nobody
measured, is left.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from offloadz.plan.machine import UNVERIFIED
from offloadz.plan.placement import KINDS

if TYPE_CHECKING:
    from offloadz.plan.search import Plan, Wishes

TIMES = ("step_s", "tokens_per_s", "bottleneck", "busy_s", "taken_s", "wear", "hiding")
"""What a plan says of its steps."""

LEAST_GAIN = 0.05
"""Share of a step that shadow has to win."""


def chosen_commit(held: Plan, wishes: Wishes, decide: Callable[[Wishes], Plan]) -> Plan:
    """The plan with hold that was found, or the same with shadow; `decide` plans what is asked for."""
    if wishes.commit != "auto" or held.rates_source.startswith(UNVERIFIED):
        return held
    same: dict[str, Any] = {kind: getattr(held.placement, kind) for kind in KINDS}
    same |= {"slots": held.slots, "sweeps": held.sweeps, "micro_batch_size": held.micro_batch_size}
    beside = decide(replace(wishes, commit="shadow", **same))
    gain = 1 - beside.step_s / held.step_s if beside.fits and held.step_s else 0.0
    if gain < LEAST_GAIN or (beside.keep, beside.linked) != (held.keep, held.linked):
        why = f"shadow would win {gain:.0%}" if beside.fits else f"no room for shadow: {beside.shortage}"
        return replace(held, reasons=(*held.reasons, f"commit hold: {why}"))
    own = ("state on disk", "recompute")
    copies = [reason for reason in beside.reasons if reason.startswith(own)]
    others = [reason for reason in held.reasons if not reason.startswith(own)]
    if not wishes.clipping:
        return replace(beside, reasons=(*others, *copies, f"commit shadow: wins {gain:.0%} over hold"))
    why = f"commit hold at first: shadow wins {gain:.0%}, and the run goes over to it while clipping fires seldom"
    times = {name: getattr(held, name) for name in TIMES}
    return replace(beside, seldom_s=beside.step_s, reasons=(*others, *copies, why), **times)
