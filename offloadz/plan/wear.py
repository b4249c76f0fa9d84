"""What a run does to a drive: bytes written by a step, how long the drive lasts, and which formats write less.

Bytes come from the step's own program, in whole pages as the disk tier writes them; a test holds them to what a run
counts.  Left to others: how large a format is (`recipes.py`), where an endurance comes from (`catalogue.py`).  The
trade-off: only steps are counted.  Filling the drive at the start and checkpoints that are written out come on top
(each about as much as one step); what the drive itself writes more than it is told is in no figure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from offloadz.plan.alike import unit_kinds
from offloadz.plan.machine import Drive
from offloadz.plan.placement import Placement
from offloadz.plan.recipes import Recipe, cheaper
from offloadz.plan.spec import ModelSpec, Part, aligned
from offloadz.plan.words import human

HOW_TO_TELL = "offloadz plan --set endurance=600TB, or endurance under [[drive]] in the file of offload.machine"


@dataclass(frozen=True)
class Wear:
    """Bytes a steady step writes to `offload.swap`, and what that means for its drive."""

    written_bytes: int = 0
    step_s: float = 0.0
    num_trained: int = 0
    drive: Drive | None = None
    less: tuple[tuple[str, int], ...] = ()
    """(`optimizer.state`, bytes a step) of formats that write less; empty unless that state is on disk."""
    whose: str = ""
    """Of which ranks these bytes are; empty where there is one."""

    def times(self, ranks: int) -> Wear:
        """Of several ranks that write as much each to the same drives."""
        less = tuple((state, ranks * written) for state, written in self.less)
        whose = f" over all {ranks} ranks"
        return replace(self, written_bytes=ranks * self.written_bytes, less=less, whose=whose)

    def life_steps(self, written_bytes: int) -> int | None:
        """Steps until the endurance is used up at so many bytes a step; None where there is no end, or none known."""
        endurance = self.drive.endurance_bytes if self.drive else None
        return endurance // written_bytes if endurance and written_bytes else None

    def days(self, num_steps: int) -> float:
        """Days of so many steps without a pause."""
        return num_steps * self.step_s / 86400

    @property
    def per_day_bytes(self) -> int:
        return int(self.written_bytes * (86400 / self.step_s)) if self.step_s else 0

    def to_json(self) -> dict[str, Any]:
        """The figures of `plan.json`."""
        life = self.life_steps(self.written_bytes)
        drive = self.drive
        return {
            "disk_written_per_step": self.written_bytes,
            "disk_written_per_1000_steps": self.written_bytes * 1000,
            "disk_written_per_day": self.per_day_bytes,
            "drive_life_steps": life,
            "drive_life_days": None if life is None else self.days(life),
            "drive": drive
            and {"name": drive.name, "endurance": drive.endurance_bytes, "source": drive.endurance_source},
            "writes_less": {
                state: {"disk_written_per_step": written, "drive_life_steps": self.life_steps(written)}
                for state, written in self.less
            },
        }

    def lines(self) -> Iterator[str]:
        """The same in words; what writes less is named with its figures."""
        if not self.written_bytes:
            yield "written to swap: nothing"
            return
        yield (
            f"written to swap{self.whose}: {human(self.written_bytes)} a step, "
            f"{human(self.written_bytes * 1000)} in 1,000 steps, {human(self.per_day_bytes)} a day without a pause; "
            "saves come on top"
        )
        life = self.life_steps(self.written_bytes)
        if life is None or self.drive is None:
            yield f"drive life: the endurance of the drive is not known; tell it with {HOW_TO_TELL}"
        else:
            yield (
                f"drive life: {life:,} steps, {self.days(life):,.1f} days without a pause; {self.drive.name} takes "
                f"{(self.drive.endurance_bytes or 0) / 1e12:,.6g}TB ({self.drive.endurance_source})"
            )
        yield from self._less_lines()

    def _less_lines(self) -> Iterator[str]:
        now = self.written_bytes / max(1, self.num_trained)
        for state, written in self.less:
            life = self.life_steps(written)
            lasts = f", a life of {life:,} steps" if life is not None else ""
            yield (
                f'optimizer.state = "{state}" would write {written / max(1, self.num_trained):.3g} bytes a trained '
                f"parameter instead of {now:.3g}: {human(written)} a step{lasts}"
            )


NO_WEAR = Wear()
"""Of a plan that does not fit."""


def wear_of(spec: ModelSpec, placement: Placement, written_bytes: int, step_s: float, drive: Drive | None) -> Wear:
    """The wear of a step that writes `written_bytes` in `step_s` seconds under a placement."""
    trained = sum(unit.num_trainable for unit in spec.units)
    less = []
    if placement.optimizer == "disk":
        rest = written_bytes - _state_bytes(spec, spec.recipe)
        for recipe in cheaper(spec.recipe, spec.dtype):
            written = rest + _state_bytes(spec, recipe)
            less += [(recipe.state, written)] if written < written_bytes else []
    return Wear(written_bytes, step_s, trained, drive, tuple(less))


def _state_bytes(spec: ModelSpec, recipe: Recipe) -> int:
    """State of a recipe that a step writes: that of trained parts, in whole pages; each kind is sized once."""
    kinds = Counter[tuple[str, int, int]]()
    for kind in unit_kinds(spec):
        for part in (kind.unit.parts[k] for k in kind.unit.trained_parts):
            kinds[part.dtype, part.num_elements, part.num_blocks] += kind.count
    return sum(n * aligned(Part(0, 0, size, dtype, recipe, k).state_bytes) for (dtype, size, k), n in kinds.items())
