"""What state on disk asks of the other ranks of a run: that a flip is one for all.

[Note: a flip over ranks]  Each rank has its own files, and there is one record, the first rank's, which tells of the
copies of all.  It is written once every rank has flushed what it wrote, and no rank writes to what was valid before
until it is there.  So one rename decides for all of them, and a kill of any rank at any moment leaves one whole step.

Left to others: who the ranks are (`runtime/ranks.py`).  The trade-off: a step ends on disk when the slowest rank has
flushed, and the checksums of all state go through one process, 8 bytes a MiB.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Peers(Protocol):
    """The ranks of a run, this one among them."""

    rank: int

    def beside(self, work: Callable[[], bytes]) -> list[bytes]:
        """What `work` makes on every rank, in their order; an error of one is raised on all.  From one thread at a
        time, beside whatever else ranks exchange."""


class Alone:
    """A run of one rank."""

    rank = 0

    def beside(self, work: Callable[[], bytes]) -> list[bytes]:
        return [work()]
