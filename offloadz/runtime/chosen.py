"""Which device computes: the one that `offload.device` means, of several ranks each its own.

Left to others: what a device is and does (`devices.py`).  The trade-off: a rank is told its device by the launcher's
LOCAL_RANK, so two jobs on one machine must be kept apart by the devices that each may see.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from offloadz.plan.errors import ConfigError
from offloadz.plan.machine import DeviceFacts
from offloadz.runtime.devices import Accelerator, Cpu, Device, facts_of
from offloadz.runtime.threads import ranks_here


def device_named(told: Any) -> Device:
    """The device of `offload.device`: "auto" takes the current accelerator if there is one, else the CPU.

    A `Device` is taken as it is.  Raises ConfigError with what was found.
    """
    if not isinstance(told, str | torch.device):
        if hasattr(told, "compute_lane"):
            return told  # type: ignore[no-any-return]
        raise ConfigError(f'device = {told!r}; needed: "auto", "cpu", or a device of torch such as "cuda:0"')
    chosen = _chosen(told)
    return Cpu() if chosen is None else Accelerator(chosen)


def facts_named(told: str) -> DeviceFacts | None:
    """What the plan is told of `offload.device`; None where the host computes.  Raises as `device_named` does."""
    chosen = _chosen(told)
    return None if chosen is None else facts_of(chosen)


def _chosen(told: str | torch.device) -> torch.device | None:
    """The accelerator that is meant; None for the CPU."""
    here = torch.accelerator.current_accelerator(check_available=True)
    if str(told) == "cpu" or (told == "auto" and here is None):
        return None
    count = torch.accelerator.device_count() if here is not None else 0
    wanted = _parsed(here if told == "auto" else told)
    if here is None or wanted is None or wanted.type != here.type or (wanted.index or 0) >= count:
        found = ", ".join(f"{here.type}:{i}" for i in range(count)) if here is not None else "no accelerator"
        needed = "auto or cpu" if here is None else "auto, cpu, or one of these"
        raise ConfigError(f'offload.device = "{told}": torch finds {found} here; needed: {needed}')
    return torch.device(wanted.type, _own_index(count) if wanted.index is None else wanted.index)


def _own_index(count: int) -> int:
    """The one of `count` devices that this process is to take: of several ranks each its own, else the current one."""
    local = os.environ.get("LOCAL_RANK", "").strip()
    if ranks_here() == 1 or not local.isdecimal():
        return torch.accelerator.current_device_index()
    if int(local) >= count:
        raise ConfigError(
            f"{ranks_here()} ranks here and {count} devices; needed: one for each rank, or offload.device = "
            f'"cpu", or torchrun --nproc-per-node {count}'
        )
    return int(local)


def _parsed(told: str | torch.device | None) -> torch.device | None:
    try:
        return torch.device(told)  # type: ignore[arg-type]
    except RuntimeError:
        return None
