"""Updates as gradients come: settings laid ready at the first, and what becomes of them when the step is decided.

With `commit = "shadow"` a unit is updated into its spare.  If the decision is for the very settings laid ready (nothing
clipped, no group changed meanwhile, a gradient for the same parameters) the spares are valid as they are, else they are
forgotten and the updates are due again, from what is valid and the gradients that were kept.  With `commit =
"in_place"` a step is applied before it is decided, so it can neither be clipped nor taken back; one that comes to no
good end leaves weights of no step, and every later call of the run says so.  The trade-off: a clipped step is updated
twice with shadow, so a run whose plan was free to choose begins with hold, and goes over to shadow while clipping fires
seldom.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field

from offloadz.model.optimizer import RunOptimizer
from offloadz.model.stage import Stage
from offloadz.plan.errors import UpdateFailed
from offloadz.runtime.native import Numbers

log = logging.getLogger("offloadz")

Due = dict[str, Numbers]

WINDOW = 32
"""Decided steps that tell how often clipping fires."""

OFTEN, SELDOM = 0.25, 0.1
"""Share of them from which on updates wait for the norm, and up to which they come on arrival again."""


@dataclass
class Arrivals:
    """The updates of this step that have begun; `stage.session.arrive` is its `take`.

    `free`: whether there is room for shadow and the choice is the plan's: it begins with hold and may change.
    """

    stage: Stage
    optimizer: RunOptimizer
    free: bool = False
    applied: set[str] = field(default_factory=set)
    """Parameters whose update of this step has begun in place."""
    begun: Due = field(default_factory=dict)
    """What the updates of this step were called with."""
    torn: str = ""
    """Why the weights are those of no step; empty while they are."""
    _step: Due = field(default_factory=dict)
    """What every parameter's update of this step is called with, from the first arrival on."""
    _again: deque[bool] = field(default_factory=lambda: deque(maxlen=WINDOW))
    """Of the last decided steps, whether updates on arrival come, or would have come, twice."""

    def __post_init__(self) -> None:
        if self.free:
            self.stage.session.commit_by("hold")

    def take(self, unit: int) -> None:
        """The gradient of a unit has come: lay the settings of its parameters ready, as they are in this step; none for
        those that it does not train, of which a clipped step before may have left some."""
        session = self.stage.session
        self._step = self._step or self.optimizer.numbers(session.steps, 1.0)
        members = {m.name for s in session.spec.units[unit].sections if s.trainable for m in s.members}
        touched = set().union(*session.room.ranks.each(sorted(members & self.stage.touched)))
        new = {name: self._step[name] for name in touched - self.begun.keys()}
        self.begun |= new
        session.room.due |= {name: self.begun.get(name) for name in members}
        if session.placement.commit == "in_place":
            session.steps |= {name: session.steps.get(name, 0) + 1 for name in new}
            self.applied |= new.keys()

    def decide(self, due: Due) -> bool:
        """The step's updates are to be called with `due`: whether the spares hold just that.  Ends the step."""
        taken = self.stage.session.placement.commit == "shadow" and bool(due) and self.begun == due
        if self.free and due:
            self._weigh(any(numbers.scales for numbers in due.values()))
        self.forget()
        return taken

    def _weigh(self, again: bool) -> None:
        """Count a decided step, and go over to the way of committing that suits how often clipping fires."""
        self._again.append(again)
        session, num = self.stage.session, sum(self._again)
        often = {"shadow": num >= OFTEN * WINDOW, "hold": num > SELDOM * len(self._again)}[session.placement.commit]
        commit = "hold" if often else "shadow"
        if commit != session.placement.commit and (often or len(self._again) == WINDOW):
            log.warning(
                "step %d: clipping fired in %d of the last %d steps; from here on updates %s",
                session.step, num, len(self._again),
                "wait for the norm (commit hold)" if often else "come with their gradients (commit shadow)",
            )  # fmt: skip
            session.commit_by(commit)

    def forget(self) -> None:
        """The step is decided, or given up."""
        self.applied.clear()
        self.begun, self._step = {}, {}

    def require_whole(self, reason: str = "") -> None:
        """Raise UpdateFailed where a step was torn, before or (for `reason`) now."""
        if self.applied and reason:
            self.tear(reason)
        if self.torn:
            raise UpdateFailed(self.torn)

    def tear(self, reason: str) -> None:
        """The step that has begun to be applied in place does not come to its end."""
        if self.applied and not self.torn:
            self.torn = (
                f"step {self.stage.session.step} ended half-way ({reason}) and commit = 'in_place' had begun to apply"
                " it: the weights are those of no step; go back to the last checkpoint"
            )
