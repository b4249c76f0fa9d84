"""A plan for several ranks of one machine: what each may take of it, and the lowest stage of ZeRO that fits.

Every rank decides by the same figures, as rank 0 does (whose shards are never the short ones), so all have one plan.
Left to others: what a stage keeps where (`share.py`, `spec.py`), placements within a stage (`search.py`).  The
trade-off: ranks share memory, cores, drives and their free room evenly, whatever else each of them is doing.
"""

from __future__ import annotations

from dataclasses import replace

from offloadz.plan.answer import Plan
from offloadz.plan.change import TO_DISK
from offloadz.plan.errors import ConfigError
from offloadz.plan.machine import COMPUTING, Machine
from offloadz.plan.predict import NET_RATE
from offloadz.plan.search import decide
from offloadz.plan.share import STAGES, Share
from offloadz.plan.spec import ModelSpec
from offloadz.plan.wishes import Wishes

SHARED_RATES = ("memory", "memory_shared", "disk_read", "disk_write", "disk_both")
"""What ranks of one machine have together; without GPUs, and buses of their own, they share those too."""


def decide_for(spec: ModelSpec, machine: Machine, wishes: Wishes) -> Plan:
    """The plan of each of `wishes.ranks` ranks; with several, of the stage asked for or the lowest that fits.

    Lowest first, but a stage that keeps in memory what a lower one would have to put on disk goes before it.  Raises
    ConfigError for what is not built over several ranks.
    """
    if wishes.ranks == 1:
        if wishes.zero_stage not in ("auto", 0):
            raise ConfigError(
                f"offload.zero_stage = {wishes.zero_stage} is for several ranks and this is one; start with torchrun "
                '--nproc-per-node N -m offloadz train CONFIG.toml, or write "auto"'
            )
        return decide(spec, machine, wishes)
    _refuse(wishes)
    fair, own = for_each(machine, wishes.ranks), _own(wishes, machine.unified)
    stages = STAGES if wishes.zero_stage == "auto" else (int(wishes.zero_stage),)
    plans = [decide(spec.shared_by(Share(0, wishes.ranks, stage)), fair, own) for stage in stages]
    fitting = [plan for plan in plans if plan.fits]
    plan = min(fitting, key=_num_on_disk) if fitting else plans[-1]
    stage = plan.placement.share.stage
    why = "as configured" if wishes.zero_stage != "auto" else "the lowest that fits" if fitting else "none fits"
    return replace(
        plan,
        shortage=plan.shortage and plan.shortage + plan.placement.share.each,
        tokens_per_s=plan.tokens_per_s * wishes.ranks,
        wear=plan.wear.times(wishes.ranks),
        reasons=(f"zero stage {stage} of {wishes.ranks} ranks: {why}", *plan.reasons),
    )


def for_each(machine: Machine, ranks: int) -> Machine:
    """What each of several ranks has of a machine."""
    if ranks == 1:
        return machine
    shared = (*SHARED_RATES, "h2d", "d2h", "device", "device_few", *COMPUTING) if machine.unified else SHARED_RATES
    split = {k: r / ranks if k in shared or k.startswith("cpu") else r for k, r in machine.rates.items()}
    if machine.unified:  # over the loopback device a core moves the bytes, of which there may be fewer than ranks
        split["net"] = machine.rates.get("net", NET_RATE) * min(1.0, machine.cores / ranks)
    return replace(
        machine,
        host_bytes=machine.host_bytes // ranks,
        host_source=f"{machine.host_source}, shared by {ranks} ranks",
        device_bytes=machine.device_bytes // ranks if machine.unified else machine.device_bytes,
        cores=max(1, machine.cores // ranks),
        rates=split,
    )


def _own(wishes: Wishes, unified: bool) -> Wishes:
    """What each rank asks for: its rows, its share of limits and room.  Checkpoints are one for all.  `unified`: the
    device that is limited is the machine that all share."""
    ranks, room = wishes.ranks, wishes.disk_free
    rows = -(-wishes.batch_size // ranks)
    told = {key: getattr(wishes, key) for key in ("host_memory", *("device_memory",) * unified)}
    return replace(
        wishes,
        batch_size=rows,
        micro_batch_size=min(wishes.micro_batch_size, rows),
        sweeps=min(wishes.sweeps, rows),
        disk_free=None if room is None else room // ranks,
        **{key: size // ranks for key, size in told.items() if size is not None},
    )


def _refuse(wishes: Wishes) -> None:
    if wishes.batch_size < wishes.ranks:
        told = f"train.batch_size = {wishes.batch_size} over {wishes.ranks} ranks"
        raise ConfigError(f"{told}; needed: at least a row for each rank")


def _num_on_disk(plan: Plan) -> int:
    return sum(getattr(plan.placement, kind) == "disk" for kind in TO_DISK)
