"""Hard links to files of state: whether they can be made, and who holds them.

Left to others: which files a checkpoint holds (`shadow.py`).  The trade-off: a link is known by its number and name
alone, so a checkpoint that was moved counts as a stranger's and keeps what it holds.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable
from pathlib import Path

from offloadz.memory.record import make_directories


def cannot_link(place: Path, target: Path) -> str:
    """Why a checkpoint at `target` cannot be links to files in `place`, found by trying; empty if it can."""
    # Not the name of a checkpoint: a kill in here leaves it, and it would be taken for one that is not whole.
    probe, other = place / "link.bin", target.parent / f".link-{os.getpid()}"
    try:
        make_directories(target.parent)
        probe.touch(mode=0o600)
        other.unlink(missing_ok=True)
        os.link(probe, other)
    except OSError as error:
        return f"hard links from {place} to {target.parent}: {os.strerror(error.errno or errno.EIO)}"
    finally:
        for path in (probe, other):
            with contextlib.suppress(OSError):
                path.unlink()
    return ""


def is_named(path: Path, fd: int) -> bool:
    """Whether a path still names an open file."""
    told = os.fstat(fd)
    try:
        return is_file(path, told.st_ino, told.st_dev)
    except OSError:
        return False


def links_match(path: Path, pins: Iterable[Path]) -> bool:
    """Whether every hard link to a file is known: its own name, and one in each of these directories that has it."""
    found = path.stat()
    known = 1
    for directory in pins:
        try:
            known += is_file(directory / path.name, found.st_ino, found.st_dev)
        except OSError:
            continue
    return found.st_nlink == known


def is_file(path: Path, inode: int, device: int) -> bool:
    """Whether `path` is the file with this inode."""
    there = path.stat()
    return (there.st_ino, there.st_dev) == (inode, device)


def identity(path: Path) -> tuple[int, int] | None:
    """What tells a file or directory from another that takes its name; None where there is none."""
    try:
        told = path.stat()
    except OSError:
        return None
    return told.st_ino, told.st_dev
