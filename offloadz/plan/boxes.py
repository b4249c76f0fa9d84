"""Where the last bench of this box is kept, for `offload.machine = "auto"`.

In the user's state directory, one file for each box by its name, because a home directory may be shared by several.
`offloadz bench` writes it (`bench/command.py`), plans read it like any machine file (`question.py`).  The trade-off: a
box that was changed since is not noticed; what a plan says of its rates has the date they were measured on.
"""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path


def bench_file() -> Path:
    """The machine file of the last bench of this box, whether it is there or not: below $XDG_STATE_HOME, or
    ~/.local/state."""
    state = Path(os.environ.get("XDG_STATE_HOME", ""))
    if not state.is_absolute():  # as its specification has it, also where it is not set
        state = Path("~/.local/state").expanduser()
    name = re.sub(r"[^\w.-]", "_", platform.node()) or "this-machine"
    return state / "offloadz" / f"bench-{name}.toml"
