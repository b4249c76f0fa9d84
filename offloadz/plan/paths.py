"""Which directory of a swap path belongs to whom, and what lies there takes: asked by the plan (what is there is taken
over), by the tier and by whoever tells of a run.

The name depends on the owner alone, never on an address, a time or a process id, so the next run of the same output
finds it.  Left to others: what lies in it (`memory/swapdir.py`).  The trade-off: 48 bits of a hash; two outputs that
share them would refuse to run at once, and nothing worse.
"""

from __future__ import annotations

import hashlib
import os
import uuid
from contextlib import suppress
from pathlib import Path

PREFIX = "offloadz-"


def owner_name(output: str | Path | None) -> str:
    """Who owns a run's swap directory: its output directory, or this process alone where there is none."""
    if output is None or not str(output):
        return f"pid {os.getpid()} {uuid.uuid4().hex}"
    return str(Path(output).absolute())


def directory_of(swap: str | Path, owner: str) -> Path:
    """Where the directory of `owner` in `swap` is, whether it is there or not."""
    return Path(swap).absolute() / (PREFIX + hashlib.sha256(owner.encode()).hexdigest()[:12])


def held_bytes(*directories: Path) -> int:
    """Bytes that the files below take on their drives (not file lengths: a reserved file is as long as its room, a
    sparse one is not); one with several names counts once, a directory that is not there holds none."""
    found = {}
    for directory in directories:
        for folder, _, names in os.walk(directory):
            for name in names:
                with suppress(FileNotFoundError):  # a record is renamed over the one before while a run goes on
                    told = os.lstat(os.path.join(folder, name))
                    found[told.st_dev, told.st_ino] = told.st_blocks * 512
    return sum(found.values())
