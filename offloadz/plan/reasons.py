"""Why a plan is as it is, in a line for each thing that was decided."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from offloadz.plan.copies import copies_reason
from offloadz.plan.footprint import Batch
from offloadz.plan.kept import kept_reason
from offloadz.plan.placement import KINDS, Placement
from offloadz.plan.spec import ModelSpec
from offloadz.plan.words import human

if TYPE_CHECKING:
    from offloadz.plan.search import Wishes


def reasons(
    spec: ModelSpec,
    placement: Placement,
    batch: Batch,
    wishes: Wishes,
    host_limit: int,
    first: Placement,
    shortage: str = "",
) -> Iterator[str]:
    """Why each thing is as it is, one line each; `first`: the first that fits, of those with more and more on disk.

    `shortage`: what the placement lacks, which then is the one that lacks least.
    """
    for kind in KINDS:
        tier = getattr(placement, kind)
        if getattr(wishes, kind) != "auto":
            why = "as configured"
        elif shortage:
            why = "nothing fits, and this lacks least"
        elif tier != getattr(first, kind):
            why = "a step is sooner done than with it " + ("in memory" if tier == "disk" else "on disk")
        elif tier == "disk":
            why = f"it does not fit in the {human(host_limit)} of memory with the kinds before it"
        else:
            why = "memory has room"
        yield f"{kind} on {tier}: {why}"
    if placement.state_on_disk or placement.ending:
        yield copies_reason(placement, wishes.copies, wishes.keep, wishes.linkable)
    slots = "as configured" if wishes.slots else "double buffering" if placement.slots > 1 else "two do not fit"
    yield f"slots {placement.slots}: {slots}"
    tokens = batch.tokens_per_micro
    micro = "as configured" if wishes.micro_batch_size else f"{tokens} tokens keep the computation within its share"
    yield f"micro_batch_size {batch.micro_rows}: {micro}"
    sweeps = (
        "as configured" if wishes.sweeps else "weights move twice a step" if batch.sweeps == 1 else "fewer do not fit"
    )
    yield f"sweeps {batch.sweeps}: {sweeps}"
    yield kept_reason(spec, placement, batch, wishes.recompute)
