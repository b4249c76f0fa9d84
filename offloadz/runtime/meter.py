"""What this process takes of memory, as the kernel counts it.

Read from /proc/self/status (20 microseconds), so a step can be told with its peak and a run can be stopped before the
kernel does it.  The trade-off: a peak is that of the whole process since its start, loading included; the kernel keeps
no peak per step.
"""

from __future__ import annotations

from pathlib import Path

FIELDS = {"peak": "VmHWM", "resident": "VmRSS", "anonymous": "RssAnon", "locked": "VmLck"}
"""Peak and present resident bytes, those of them that no file backs, and those that cannot be moved."""


def process_bytes(path: Path = Path("/proc/self/status")) -> dict[str, int]:
    """`FIELDS` of this process in bytes; 0 for what the kernel does not tell."""
    try:
        lines = dict(line.split(":", 1) for line in path.read_text().splitlines() if ":" in line)
    except OSError:
        lines = {}
    words = {name: lines.get(field, "").split() for name, field in FIELDS.items()}
    return {name: int(found[0]) * 1024 if found and found[0].isdigit() else 0 for name, found in words.items()}
