"""A device that was found on this box, as far as the plan is concerned.

Who finds it is above (`runtime/chosen.py` asks torch, which this room does not import); here is whether it is worth
asking, and what rates a device has of which the driver tells name and memory.  The trade-off: a card of the catalogue
is known by its name alone, so a laptop's card of the same name is taken for the desktop's; `offloadz bench` measures.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from offloadz.plan.catalogue import part, part_names
from offloadz.plan.machine import UNVERIFIED, DeviceFacts, Machine, with_device

Find = Callable[[str], DeviceFacts | None]
"""From `offload.device` to what there is; None where the host computes.  Raises ConfigError where it is not there."""

DRIVER_FILES = ("dev/nvidiactl", "dev/kfd", "dev/dri/render*")
"""What the drivers of CUDA, ROCm and XPU show."""


def worth_asking(told: str, root: str | Path = "/") -> bool:
    """Whether torch has to be asked what `offload.device` means: for auto, only where a driver shows a device."""
    if told == "auto":
        return any(True for pattern in DRIVER_FILES for _ in Path(root).glob(pattern))
    return told != "cpu"


def catalogued(gpu: str) -> str:
    """The card of the catalogue that a driver's name means, the longest that fits; "" where there is none."""
    plain = _letters(gpu)
    return max((name for name in part_names("gpu") if _letters(name) in plain), key=len, default="")


def with_found(machine: Machine, facts: DeviceFacts | None) -> Machine:
    """This box computing on the device that was found, at the rates of a machine file, else of the catalogue, else of
    no card in particular; never with more memory than is free there."""
    if facts is None:
        return machine
    if not machine.unified:  # a machine file that knows the card
        free = min(machine.device_bytes, facts.free_bytes)
        return replace(machine, device=facts.name, device_bytes=free, gpu=facts.gpu)
    found, card = with_device(machine, facts), catalogued(facts.gpu)
    figures = part("gpu", card, "gpu") if card else {}
    rates = {lane: figure.value for lane, figure in figures.items() if lane != "memory"}
    source = f"{machine.rates_source}; the GPU: {f'{card} of the catalogue' if card else UNVERIFIED}"
    return replace(found, rates={**found.rates, **rates}, rates_source=source)


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
