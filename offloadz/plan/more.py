"""What more would bring: the plan of the same run with 32 GiB more memory, and with one more drive.

Left to others: how fast each is (`search.py`).  The trade-off: the new drive is like those that are there, and memory
stays as fast as it is, whatever more modules make of its clock.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from offloadz.plan.search import Plan
    from offloadz.plan.wishes import Question

HOST_BYTES = 32 << 30
"""Memory that a box is asked about in addition to its own."""

LEAST_GAIN = 0.01
"""Share of tokens a second below which something brings nothing."""


@dataclass(frozen=True)
class More:
    """The plan as it is, and the plans with more; None where there is no drive in it, or nothing fits."""

    plan: Plan
    host_memory: Plan | None
    drive: Plan | None
    num_drives: int

    def to_json(self) -> dict[str, dict[str, float] | None]:
        """Tokens and seconds by what there would be more of."""

        def told(found: Plan | None) -> dict[str, float] | None:
            return None if found is None else {"tokens_per_s": found.tokens_per_s, "step_s": found.step_s}

        return {"host_memory_32GiB": told(self.host_memory), "second_drive": told(self.drive)}

    def lines(self) -> Iterator[str]:
        """The same for people: what brings something, then what does not."""
        drive = "a second drive" if self.num_drives < 2 else "one more drive"
        nothing = []
        for name, found in (("32GiB more memory", self.host_memory), (drive, self.drive)):
            gain = found.tokens_per_s / self.plan.tokens_per_s - 1 if found and self.plan.tokens_per_s else 0.0
            if found and gain >= LEAST_GAIN:
                yield f"with {name}: {found.tokens_per_s:,.0f} tokens/s (+{gain:.0%})"
            elif found:
                nothing.append(name)
        if nothing:
            yield f"{' or '.join(nothing)} would bring nothing"


def more_of(asked: Question, plan: Plan, num_drives: int) -> More:
    """What more would bring to a plan of what was asked; `num_drives`: how many share the state now."""
    plans = [question.answer() if question and plan.fits else None for question in _questions(asked, num_drives)]
    host, drive = (found if found and found.fits else None for found in plans)
    return More(plan, host, drive, num_drives)


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
