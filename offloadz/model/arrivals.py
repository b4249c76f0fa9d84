"""Updates in place: settings laid ready as each gradient comes, and what is left of a run that was torn by one.

With `commit = "in_place"` a step is applied before it is decided, so it can neither be clipped nor taken back.  What a
unit's update is called with is fixed when its gradient arrives; a step that then comes to no good end leaves weights of
no step, and every later call of the run says so.  The trade-off: 2 bytes a parameter of held gradients are saved.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from offloadz.model.optimizer import RunOptimizer
from offloadz.model.stage import Stage
from offloadz.plan.errors import UpdateFailed


@dataclass
class Arrivals:
    """The updates of this step that have begun; `stage.session.arrive` is its `take`."""

    stage: Stage
    optimizer: RunOptimizer
    threads: int
    applied: set[str] = field(default_factory=set)
    """Parameters whose update of this step has begun."""
    torn: str = ""
    """Why the weights are those of no step; empty while they are."""

    def take(self, unit: int) -> None:
        """The gradient of a unit has come: lay the settings of its parameters ready, as they are at this moment."""
        session = self.stage.session
        members = {m.name for s in session.spec.units[unit].sections if s.trainable for m in s.members}
        new = (members & self.stage.touched) - self.applied
        if not new:
            return
        session.due_step = session.step
        due = self.optimizer.settings(session.steps, 1.0, self.threads)
        session.room.due |= {name: due[name] for name in new}
        session.steps |= {name: session.steps.get(name, 0) + 1 for name in new}
        self.applied |= new

    def require_whole(self, reason: str = "") -> None:
        """Raise UpdateFailed where a step was torn, before or (for `reason`) now."""
        if self.applied and reason:
            self.tear(reason)
        if self.torn:
            raise UpdateFailed(self.torn)

    def tear(self, reason: str) -> None:
        """The step that has begun to be applied does not come to its end."""
        if self.applied and not self.torn:
            self.torn = (
                f"step {self.stage.session.step} ended half-way ({reason}) and commit = 'in_place' had begun to apply"
                " it: the weights are those of no step; go back to the last checkpoint"
            )
