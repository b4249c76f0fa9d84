"""What else would bring: the plan of the same run with more memory, one more drive, or a cheaper format of the state.

Also what it does not need.  Left to others: how fast each is (`search.py`).  The trade-off: the batch is cut as in the
plan; the new drive is like those that are there, and memory stays as fast as it is, whatever more modules make of its
clock.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from offloadz.plan.recipes import cheaper
from offloadz.plan.words import human, lasting

if TYPE_CHECKING:
    from offloadz.plan.answer import Plan
    from offloadz.plan.question import Question

HOST_BYTES = 32 << 30
"""Memory that a box is asked about in addition to its own."""

LEAST_GAIN = 0.01
"""Share of tokens a second below which something brings nothing."""

LEAST_SPARE = 0.1
"""Share of what a run may use of memory below which nobody wants to hear that it is not needed."""


@dataclass(frozen=True)
class More:
    """The plan as it is, and others; None where there is no drive in it, or nothing fits."""

    plan: Plan
    host_memory: Plan | None
    drive: Plan | None
    num_drives: int
    states: dict[str, Plan] = field(default_factory=dict)
    """By `optimizer.state`, of formats that take less."""

    @property
    def spare_bytes(self) -> int:
        """Memory that a run may use and does not."""
        return max(0, (self.plan.limits["host"] or 0) - self.plan.peak["host"]) if self.plan.fits else 0

    def to_json(self) -> dict[str, Any]:
        """Tokens and seconds by what there would be more of, and by format; bytes that are not needed."""

        def told(found: Plan | None) -> dict[str, float] | None:
            return None if found is None else {"tokens_per_s": found.tokens_per_s, "step_s": found.step_s}

        states = {
            state: {"tokens_per_s": found.tokens_per_s, "step_s": found.step_s, "host_peak": found.peak["host"],
                    "disk_written_per_step": found.wear.written_bytes,
                    "drive_life_steps": found.wear.life_steps(found.wear.written_bytes)}
            for state, found in self.states.items()
        }  # fmt: skip
        return {
            "host_memory_32GiB": told(self.host_memory), "second_drive": told(self.drive), "optimizer_state": states,
            "spare_host_memory": self.spare_bytes,
        }  # fmt: skip

    def lines(self) -> Iterator[str]:
        """The same for people: what brings something, then what does not, then what is not needed."""
        drive = "a second drive" if self.num_drives < 2 else "one more drive"
        nothing = []
        for name, found in (("32GiB more memory", self.host_memory), (drive, self.drive)):
            if found and self._gain(found) >= LEAST_GAIN:
                yield f"with {name}: {self._speed(found)}"
            elif found:
                nothing.append(name)
        if nothing:
            yield f"{' or '.join(nothing)} would bring nothing"
        if self.spare_bytes > LEAST_SPARE * (self.plan.limits["host"] or 0):
            told = human(self.spare_bytes)
            yield f"{told} of the host memory that the run may use are not needed{self.plan.placement.share.each}"
        for state, found in self.states.items():
            wear = found.wear.written_bytes
            written = f"{human(wear)} written to swap a step" if wear else "nothing written to swap"
            memory = f"{human(found.peak['host'])} of host memory"
            yield f'with optimizer.state = "{state}": {self._speed(found)}, {memory}, {written}'

    def _gain(self, found: Plan) -> float:
        return found.tokens_per_s / self.plan.tokens_per_s - 1 if self.plan.tokens_per_s else 0.0

    def _speed(self, found: Plan) -> str:
        return f"{found.tokens_per_s:,.0f} tokens/s ({self._gain(found):+.0%}), {lasting(found.step_s)} a step"


def more_of(asked: Question, plan: Plan, num_drives: int) -> More:
    """What more would bring to a plan of what was asked; `num_drives`: how many share the state now."""
    if not plan.fits:
        return More(plan, None, None, num_drives)
    wishes = replace(asked.wishes, micro_batch_size=plan.micro_batch_size, sweeps=plan.sweeps)
    asked = replace(asked, wishes=wishes)
    plans = [question.answer() if question else None for question in _questions(asked, num_drives)]
    host, drive = (found if found and found.fits else None for found in plans)
    recipes = cheaper(asked.spec.recipe, asked.spec.dtype)
    states = {recipe.state: replace(asked, spec=asked.spec.with_recipe(recipe)).answer() for recipe in recipes}
    return More(plan, host, drive, num_drives, {state: found for state, found in states.items() if found.fits})


def _questions(asked: Question, num_drives: int) -> tuple[Question, Question | None]:
    machine, wishes = asked.machine, asked.wishes
    device = machine.device_bytes + HOST_BYTES * machine.unified
    larger = replace(machine, host_bytes=machine.host_bytes + HOST_BYTES, device_bytes=device)
    told = {key: getattr(wishes, key) for key in ("host_memory", *("device_memory",) * machine.unified)}
    wider = replace(wishes, **{key: size + HOST_BYTES for key, size in told.items() if size is not None})
    memory = replace(asked, machine=larger, wishes=wider)
    if not wishes.swap:
        return memory, None
    times = 1 + 1 / max(1, num_drives)
    rates = {lane: rate * (times if lane.startswith("disk") else 1) for lane, rate in machine.rates.items()}
    room = None if wishes.disk_free is None else int(wishes.disk_free * times)
    faster = replace(machine, rates=rates)
    return memory, replace(asked, machine=faster, wishes=replace(wishes, disk_free=room))
