"""The answer to what was asked: where everything is, how a batch is cut, what that takes, and why.

Left to others: how it is found (`search.py`), what of it is printed (`command.py`).  The trade-off: one flat object, as
`plan.json` and scripts read it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from offloadz.plan.copies import linked
from offloadz.plan.footprint import Batch, Footprint
from offloadz.plan.hiding import Hiding
from offloadz.plan.placement import KINDS, Placement
from offloadz.plan.wear import NO_WEAR, Wear


@dataclass(frozen=True)
class Plan:
    """What was decided, with predicted bytes and times."""

    placement: Placement
    batch: Batch
    device: str
    threads: int
    footprint: Footprint
    limits: dict[str, int | None]
    """Most bytes of each tier; None where nothing is known."""
    limit_source: str
    fits: bool
    smallest_change: str
    """Empty where the plan fits; else the smallest change that would make it fit, with its field."""
    shortage: str
    """Empty where the plan fits; else each tier that is too small, with bytes found and needed."""
    reasons: tuple[str, ...]
    step_s: float = 0.0
    tokens_per_s: float = 0.0
    bottleneck: str = ""
    busy_s: dict[str, float] | None = None
    taken_s: dict[str, float] | None = None
    """Seconds of work of each lane, and how long it is busy with it, slowed down by what runs beside it."""
    wear: Wear = NO_WEAR
    hiding: Hiding | None = None
    rates_source: str = ""
    keep: int = 2  # checkpoints that stay
    recipe: str = "fp32"  # format of the optimizer's state
    recipe_told: str = ""
    """The same in words, with the bytes a parameter."""
    machine: str = ""
    seldom_s: float = 0.0  # a step with shadow, to which a run goes over while clipping fires seldom; 0: it does not
    by_commit_s: Mapping[str, float] = field(default_factory=dict)
    """A step by each way of committing that was left to the plan and has room."""
    graph_room_bytes: int = 0  # what kept graphs may take, which may be more than they do
    products_room_bytes: int = -1  # what results of products may take; the same room where both lie in one memory
    recompute: str = "auto"  # as it was asked for

    @property
    def commit(self) -> str:
        """How updates come at first; the room is that of `placement.commit`."""
        return "hold" if self.seldom_s else self.placement.commit

    def step_s_by(self, commit: str) -> float:
        """Seconds of a step while updates come like that."""
        return self.seldom_s if self.seldom_s and commit == "shadow" else self.step_s

    @property
    def micro_batch_size(self) -> int:
        return self.batch.micro_rows

    @property
    def sweeps(self) -> int:
        return self.batch.sweeps

    @property
    def slots(self) -> int:
        return self.placement.slots

    @property
    def linked(self) -> bool:
        """Whether checkpoints are hard links to the state on disk."""
        return linked(self.placement)

    @property
    def bytes(self) -> dict[str, dict[str, int]]:
        """Bytes per tier and phase."""
        return self.footprint.bytes

    @property
    def peak(self) -> dict[str, int]:
        return self.footprint.peak

    def refusal(self) -> str:
        """One paragraph for a plan that does not fit."""
        return f"does not fit: {self.shortage}. Smallest change: {self.smallest_change}"

    def to_json(self) -> dict[str, Any]:
        """The object that `offloadz plan --json` prints and `plan.json` holds."""
        same = (
            "fits", "smallest_change", "shortage", "step_s", "tokens_per_s", "bottleneck", "busy_s", "taken_s", "bytes",
            "peak", "limits", "limit_source", "recipe", "slots", "sweeps", "micro_batch_size", "commit", "device",
            "threads", "rates_source", "machine",
        )  # fmt: skip
        found = {key: getattr(self, key) for key in same}
        found["placement"] = {kind: getattr(self.placement, kind) for kind in KINDS}
        found |= {"zero_stage": self.placement.share.stage, "ranks": self.placement.share.ranks}
        found["compute"], found["storage"] = self.placement.compute, self.placement.storage
        found["copies"], found["keep"], found["linked"] = self.placement.copies, self.keep, self.linked
        found["kept_graphs"], found["kept_products"] = self.placement.kept, self.placement.cheap
        found["step_s_by_commit"] = dict(self.by_commit_s) or {self.commit: self.step_s}
        found["smallest_tokens_per_step"] = self.hiding and self.hiding.tokens
        return found | {"terms": self.footprint.terms, "reasons": list(self.reasons)} | self.wear.to_json()
