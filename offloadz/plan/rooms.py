"""Which drives the swap paths lie on, and how many bytes a run may put on each.

Asked by the plan and, for the shares of several paths, by the run that opens them, so both count the same room.  The
trade-off: paths on one file system are told half of its room each (or less), though one could have more of it; what
they hold together is then right, and nothing is gained by such paths anyway.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from offloadz.plan.errors import ConfigError
from offloadz.plan.machine import disk_free
from offloadz.plan.paths import directory_of, held_bytes, owner_name


def drive_of(place: Path) -> int:
    """The file system of a path, or of its nearest ancestor that exists."""
    place = place.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    return os.stat(place).st_dev


def apart(paths: Iterable[str | Path]) -> list[Path]:
    """The swap paths, once they are known to be different directories; ConfigError names one that is there twice."""
    found: dict[Path, Path] = {}
    for path in map(Path, paths):
        place = path.resolve()
        if place in found:
            raise ConfigError(f"offload.swap: {path} is the same directory as {found[place]}; name each once")
        found[place] = path
    return list(found.values())


def shared_lines(paths: Sequence[Path]) -> Iterator[str]:
    """A line for every swap path that lies on the drive of one before it."""
    for number, path in enumerate(paths):
        other = next((one for one in paths[:number] if drive_of(one) == drive_of(path)), None)
        if other is not None:
            yield f"{path} and {other} lie on one file system: they share its room, and two on one drive are not faster"


def rooms_of(paths: Sequence[Path], output: Path | None) -> tuple[int, ...]:
    """Bytes that a run may put on each swap path: what is free, with what an earlier run of the same output holds.

    Paths on one file system share its bytes evenly.
    """
    drives = [drive_of(path) for path in paths]
    return tuple(room_at(path, paths, output) // drives.count(drive) for path, drive in zip(paths, drives, strict=True))


def room_at(place: Path, paths: Sequence[Path], output: Path | None) -> int:
    """Free bytes on the file system of `place`, with what an earlier run of the same output holds there."""
    drive, own = drive_of(place), []
    if output is not None:
        own = [directory_of(path, owner_name(output)) for path in paths if drive_of(path) == drive]
        own += [output / "checkpoints"] if drive_of(output) == drive else []
    return disk_free(place) + held_bytes(*own)
