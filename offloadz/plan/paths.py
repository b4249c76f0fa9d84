"""Which directory of a swap path belongs to whom: asked by the plan (what is there is taken over) and by the tier.

The name depends on the owner alone, never on an address, a time or a process id, so the next run of the same output
finds it.  Left to others: what lies in it (`memory/swapdir.py`).  The trade-off: 48 bits of a hash; two outputs that
share them would refuse to run at once, and nothing worse.
"""

from __future__ import annotations

import hashlib
import os
import uuid
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
