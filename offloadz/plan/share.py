"""Which of several ranks this is, and what each of them keeps alone: the stage of ZeRO.

Rajbhandari et al., "ZeRO" (2020), section 5: stage 1 cuts the optimizer's state, 2 gradients too, 3 parameters too.
Sections are cut, never units, so all ranks take part in every block; `spec.py` says where the cuts are.  Left to
others: who the ranks are and how bytes move between them (`runtime/ranks.py`).  The trade-off: cuts lie on pages, so
that each rank's drive moves its shard directly, and a section below a page a rank is not shared at all.
"""

from __future__ import annotations

from dataclasses import dataclass

STAGES = (0, 1, 2, 3)


@dataclass(frozen=True)
class Share:
    """This rank's part in a group.  `stage` 0: every rank keeps everything."""

    rank: int = 0
    ranks: int = 1
    stage: int = 0

    @property
    def shards(self) -> int:
        """Shards that a section is cut into."""
        return self.ranks if self.stage else 1

    @property
    def own(self) -> int:
        """Which of them is this rank's."""
        return self.rank if self.stage else 0

    @property
    def each(self) -> str:
        """Said behind a figure that is this rank's."""
        return f" for each of {self.ranks} ranks" if self.ranks > 1 else ""

    @property
    def all(self) -> str:
        """Said behind a figure that is of all ranks."""
        return f" over all {self.ranks} ranks" if self.ranks > 1 else ""

    @property
    def spreads(self) -> bool:
        """Whether weights are whole at rest and updated by shards, so that each rank must be given the others'."""
        return self.ranks > 1 and self.stage in (1, 2)

    @property
    def sums_whole(self) -> bool:
        """Whether a gradient that waits for further terms is kept whole, and summed over ranks once it has them."""
        return self.ranks == 1 or self.stage < 2


ALONE = Share()
