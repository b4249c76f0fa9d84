"""How a batch was cut into sweeps and micro-batches, kept from one start of a run to the next.

The cut decides the order of sums, and with it bits; nothing else of a plan does.  So a run that goes on keeps it even
where a plan of today, with other rates or less memory, would choose another.  Left to others: where it is saved
(`train/`), which one is best (`fastest.py`).  The trade-off: what else was decided is not kept, so a new bench may move
values to other tiers; `moved` says so.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offloadz.plan.placement import KINDS
from offloadz.plan.words import counted

if TYPE_CHECKING:
    from offloadz.plan.answer import Plan
    from offloadz.plan.wishes import Wishes

MANIFEST = "manifest.json"
"""The list of a checkpoint."""


@dataclass(frozen=True)
class Cut:
    """What an earlier start decided; `source`: what says so, for people."""

    micro_batch_size: int
    sweeps: int
    placement: Mapping[str, str]
    source: str

    @classmethod
    def read(cls, told: Mapping[str, Any] | None, source: object) -> Cut | None:
        """From what `cut_told` said; None where it is not whole."""
        try:
            found = told or {}
            return cls(int(found["micro_batch_size"]), int(found["sweeps"]), dict(found["placement"]), str(source))
        except (KeyError, TypeError, ValueError):
            return None

    def held(self, wishes: Wishes) -> Wishes:
        """What is asked for, with this cut as far as the user fixed none."""
        rows = wishes.batch_size
        return replace(
            wishes,
            micro_batch_size=wishes.micro_batch_size or min(self.micro_batch_size, rows),
            sweeps=wishes.sweeps or min(self.sweeps, rows),
            cut_told=f"as configured, or as {self.source} has it",
        )

    def differs(self, micro_batch_size: int, sweeps: int) -> str:
        """That a run cuts its batches otherwise, in a line; empty where it does not."""
        if (self.micro_batch_size, self.sweeps) == (micro_batch_size, sweeps):
            return ""
        rows = self.micro_batch_size
        kept = f"; micro_batch_size = {rows} and sweeps = {self.sweeps} keep them" if rows else ""
        return (
            f"{self.source} was made in {cut_words(rows, self.sweeps)}, this run computes in "
            f"{cut_words(micro_batch_size, sweeps)}: sums come in another order, so later steps are close and not the "
            f"same bits{kept}"
        )

    def moved(self, plan: Plan) -> str:
        """What a plan keeps elsewhere than before, in a line; empty where nothing is."""
        now = {kind: getattr(plan.placement, kind) for kind in KINDS}
        moved = [f"{k} on {now[k]} (before: {was})" for k, was in self.placement.items() if now.get(k, was) != was]
        return f"{', '.join(moved)}: memory or rates are others than then; the numbers stay the same" if moved else ""


def cut_words(micro_batch_size: int, sweeps: int) -> str:
    """How a batch is cut, for people; micro-batches of 0 rows are all rows of a sweep."""
    rows = counted(micro_batch_size, "row") if micro_batch_size else "all their rows"
    return f"{counted(sweeps, 'sweep')} of micro-batches of {rows}"


def cut_told(plan: Plan) -> dict[str, Any]:
    """What a checkpoint says of the plan that it was made under."""
    placement = {kind: getattr(plan.placement, kind) for kind in KINDS}
    return {"micro_batch_size": plan.micro_batch_size, "sweeps": plan.sweeps, "placement": placement}


def saved_cut(output: str, resume: str) -> Cut | None:
    """That of the checkpoint which the same command would go on from, wherever it lies; None where there is none.

    Whether that checkpoint is whole is for the run to say: only its list is read.
    """
    if not output or resume == "never":
        return None
    places = (Path(output) / "checkpoints").glob("step-*") if resume == "auto" else (Path(resume),)
    found = [told for place in places if (told := _listed(place)) is not None]
    return max(found, key=lambda told: told[0])[1] if found else None


def _listed(checkpoint: Path) -> tuple[int, Cut | None] | None:
    """What the list of a checkpoint says: its order, and how its run cut batches."""
    try:
        told = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))
        return int(told["order"]), Cut.read(told["extra"].get("plan"), checkpoint)
    except (OSError, AttributeError, KeyError, TypeError, ValueError):
        return None
