"""What `offloadz plan --set` changes of a machine, and of the room on its drives.

Left to others: parts of the catalogue and figures with units (`catalogue.py`).  The trade-off: changes are made one
after the other, as they are written, so a part that comes later takes its rates back from those set before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from offloadz.plan.catalogue import (
    BYTES,
    COUNT,
    LANES,
    PARTS,
    RATE,
    TEXT,
    UNITS,
    Figure,
    number,
    with_drives,
    with_part,
    with_rates,
)
from offloadz.plan.errors import ConfigError
from offloadz.plan.machine import Drive, Machine
from offloadz.plan.wishes import Wishes
from offloadz.plan.words import nearest

SETTABLE = {
    **dict.fromkeys(("host_memory", "device_memory", "disk_free", "endurance"), BYTES),
    "cores": COUNT,
    "ranks": COUNT,
    **dict.fromkeys(PARTS, TEXT),
    **UNITS["rates"],
    "bandwidth": RATE,
    **dict.fromkeys(LANES.values(), RATE),
}
"""What `offloadz plan --set` may change of the machine, with its unit: sizes, parts of the catalogue, rates."""


def changed(
    machine: Machine, wishes: Wishes, sets: Sequence[str], num_paths: int, elsewhere: bool
) -> tuple[Machine, Wishes]:
    """The machine with `key=value` changes; raises ConfigError for an unknown key or a value that is none."""
    for text in sets:
        key, equals, value = text.partition("=")
        if not equals or key not in SETTABLE:
            guess = nearest(key, SETTABLE)
            hint = f"; nearest is {guess}" if guess and guess != key else ""
            raise ConfigError(f"--set {text!r}; needed: key=value with a key of {', '.join(SETTABLE)}{hint}")
        try:
            if key == "drive":
                machine = with_drives(machine, _each(value.split(","), num_paths))
                wishes = wishes.on_drive(machine.drive_bytes, elsewhere)
            elif key in PARTS:
                machine = with_part(machine, key, value)
            else:
                found = number(value if SETTABLE[key] == BYTES else _plain(value), SETTABLE[key])
                machine, wishes = _set(machine, wishes, key, found, f"--set {text}")
        except ValueError as error:
            raise ConfigError(f"--set {text}: {error}") from None
    return machine, wishes


def _each(names: list[str], num_paths: int) -> list[str]:
    """A name for each swap path."""
    if len(names) == 1:
        return names * max(1, num_paths)
    if len(names) != num_paths:
        raise ValueError(
            f"names {len(names)} drives, offload.swap has {num_paths} paths; name one, or one for each path"
        )
    return names


def _set(machine: Machine, wishes: Wishes, key: str, found: float, source: str) -> tuple[Machine, Wishes]:
    """One figure set anew."""
    if key == "host_memory":
        device = int(found) if machine.unified else machine.device_bytes
        return replace(machine, host_bytes=int(found), device_bytes=device, host_source=source), wishes
    if key == "device_memory":
        if machine.unified:
            raise ValueError(f"{machine.name} computes on its CPU: its memory is host_memory")
        return replace(machine, device_bytes=int(found)), wishes
    if key == "ranks":
        return machine, replace(wishes, ranks=int(found))
    if key == "cores":
        return replace(machine, cores=int(found)), wishes
    if key == "disk_free":
        return machine, wishes.with_room(int(found))
    if key == "endurance":
        drive = machine.drive or Drive("the drive of offload.swap")
        return replace(machine, drive=replace(drive, endurance_bytes=int(found), endurance_source=source)), wishes
    return with_rates(machine, {key: Figure(found, source)}), wishes


def _plain(value: str) -> float | str:
    """A number where the text is one."""
    try:
        return float(value)
    except ValueError:
        return value
