"""Why a plan is as it is, in a line for each thing that was decided."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from offloadz.plan.copies import copies_reason
from offloadz.plan.footprint import Batch
from offloadz.plan.placement import KINDS, Placement
from offloadz.plan.products import kept_reason
from offloadz.plan.spec import ModelSpec
from offloadz.plan.words import counted, human

if TYPE_CHECKING:
    from offloadz.plan.candidates import Candidate
    from offloadz.plan.wishes import Wishes

WHERE = {"host": "in memory", "device": "on the device", "disk": "on disk"}


def reasons(
    spec: ModelSpec,
    placement: Placement,
    batch: Batch,
    wishes: Wishes,
    host_limit: int,
    first: Candidate,
    shortage: str = "",
) -> Iterator[str]:
    """Why each thing is as it is, one line each; `first`: the first that fits, of those with more and more on
    disk, with the batch as the rule cuts it.

    `shortage`: what the placement lacks, which then is the one that lacks least.
    """
    lacking = "nothing fits, and this lacks least" if shortage else ""
    for kind in KINDS:
        tier = getattr(placement, kind)
        if getattr(wishes, kind) != "auto":
            why = "as configured"
        elif shortage:
            why = lacking
        elif tier != (usual := getattr(first.placement, kind)):
            why = f"a step is sooner done than with it {WHERE[usual]}"
        elif tier == "disk" or (tier == "device" and not placement.unified):
            why = f"it does not fit in the {human(host_limit)} of memory with the kinds before it"
        else:
            why = "memory has room"
        yield f"{kind} on {tier}: {why}"
    if placement.state_on_disk or placement.ending:
        yield copies_reason(placement, wishes.copies, wishes.keep, wishes.linkable)
    usual_slots = {3: "a third takes little memory", 2: "double buffering"}.get(placement.slots, lacking)
    slots = "as configured" if wishes.slots else usual_slots or "two do not fit"
    yield f"slots {placement.slots}: {slots}"
    usual = first.batch
    if wishes.micro_batch_size:
        micro = wishes.cut_told
    elif batch != usual:
        micro = f"a step is sooner done than with {usual.micro_rows} in {counted(usual.sweeps, 'sweep')}"
    else:
        micro = f"{counted(batch.tokens_per_micro, 'token')} keep the computation within its share of the memory"
    yield f"micro_batch_size {batch.micro_rows}: {micro}"
    if wishes.sweeps:
        sweeps = wishes.cut_told
    elif batch.sweeps != usual.sweeps:
        sweeps = f"a step is sooner done than with {usual.sweeps}"
    else:
        sweeps = "weights move twice a step" if batch.sweeps == 1 else lacking or "fewer do not fit"
    yield f"sweeps {batch.sweeps}: {sweeps}"
    yield kept_reason(spec, placement, batch, wishes.recompute)
