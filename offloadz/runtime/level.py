"""The facts that all ranks plan by: the least that any of them found, since what is free changes while they look.

Left to others: what each may take of it (`plan/stages.py`).  The trade-off: the rank with the least sets the pace of
all, and in return no rank plans what another refuses.
"""

from __future__ import annotations

import os
from dataclasses import replace

from offloadz.plan.errors import ConfigError
from offloadz.plan.machine import Machine
from offloadz.plan.wishes import Wishes
from offloadz.runtime.ranks import Solo


def level(machine: Machine, wishes: Wishes, ranks: Solo) -> tuple[Machine, Wishes]:
    """Machine and wishes alike on all ranks.  Raises ConfigError for ranks on several machines, which are not built."""
    here = os.environ.get("LOCAL_WORLD_SIZE", "").strip()
    if here.isdigit() and ranks.size > 1 and int(here) != ranks.size:
        raise ConfigError(f"{ranks.size} ranks, {here} of them here: ranks on several machines are not built")
    mine = [machine.host_bytes, machine.device_bytes, machine.cores, wishes.disk_free, wishes.checkpoint_free]
    host, device, cores, disk, checkpoint = (
        min(column) if None not in column else None for column in zip(*ranks.each(mine), strict=True)
    )
    return (
        replace(machine, host_bytes=host, device_bytes=device, cores=cores),
        replace(wishes, disk_free=disk, checkpoint_free=checkpoint, ranks=ranks.size),
    )
