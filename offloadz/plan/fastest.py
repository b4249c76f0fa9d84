"""The fastest of all candidates that fit, by simulation.

Those that only send more to the drive, or that bytes and rates alone show to be slower (`bounds.py`), are not walked,
and the search ends with the first of the mild ones that comes as close to the least possible time as makes no
difference.  Left to others: what fits (`candidates.py`), what a step takes (`estimate.py`).  The trade-off: two steps
within a fiftieth count as equally fast, which is what a simulation is worth, and then the drive, the memory and the
order of the ladder decide.
"""

from __future__ import annotations

from dataclasses import dataclass

from offloadz.plan.bounds import least_s, written_bytes
from offloadz.plan.candidates import Candidate, Space
from offloadz.plan.estimate import estimate
from offloadz.plan.placement import KINDS

TIE = 0.02
"""Share of a step by which two count as equally fast."""

MOST = 12
"""Candidates that are simulated at most."""


@dataclass(eq=False)
class Choice:
    """A candidate with what is known of it."""

    candidate: Candidate
    beside: Candidate | None
    """The same with shadow, to which a run goes over while clipping fires seldom."""
    mildness: tuple[int, int, int]
    """What decides between equally fast ones, less being better: bytes written, bytes of memory, place in the order."""
    least_s: float
    step_s: float = 0.0


def fastest(space: Space, first: Candidate) -> tuple[Candidate, int]:
    """The fastest that fits, with the batch of the first that does, and how many were simulated (0: there is no other).

    With as many kept graphs as fit: a graph that is kept takes work away from a step and adds none.  Where clipping
    decides whether a step comes by hold or by shadow, one of each counts.
    """
    choices = [_choice(space, bare, order) for order, bare in enumerate(space.others(first.batch))]
    if len(choices) < 2:
        return space.keeping(first), 0
    choices = [one for one in choices if not any(_does_less(other, one) for other in choices)]
    choices.sort(key=lambda choice: choice.mildness)
    least = min(choice.least_s for choice in choices)
    walked: list[Choice] = []
    for number, choice in enumerate([min(choices, key=lambda choice: choice.least_s), *choices]):
        best = min((other.step_s for other in walked), default=choice.least_s)
        if choice not in walked and choice.least_s <= best * (1 + TIE) and len(walked) < MOST:
            choice.step_s = _step_s(space, choice)
            walked.append(choice)
        if number and choice in walked and choice.step_s <= least * (1 + TIE):
            return choice.candidate, len(walked)  # the milder ones are slower
    best = min(choice.step_s for choice in walked)
    equal = [choice for choice in walked if choice.step_s <= best * (1 + TIE)]
    return min(equal, key=lambda choice: choice.mildness).candidate, len(walked)


def _step_s(space: Space, choice: Choice) -> float:
    """Seconds of a step, the mean where it comes in two ways."""
    ways = [way for way in (choice.candidate, choice.beside) if way is not None]
    times = [estimate(space.spec, way.placement, way.batch, space.machine).step_s for way in ways]
    return (times[0] + min(times)) / 2


def _does_less(one: Choice, other: Choice) -> bool:
    """Whether all that is on disk by `one` is there by `other` too, and more, with nothing won by it.

    State that leaves memory wins something with shadow, which else copies it there; less in memory leaves more graphs.
    """
    here, there = one.candidate.placement, other.candidate.placement
    moved = [kind for kind in KINDS if getattr(here, kind) != getattr(there, kind)]
    away = bool(moved) and all(getattr(there, kind) == "disk" for kind in moved)
    shadows = here.commit == "shadow" or other.beside is not None
    wins = shadows and not {"parameters", "optimizer"}.isdisjoint(moved)
    roomy = shadows and other.beside is not None and one.beside is None
    return away and not wins and not roomy and here.kept >= there.kept and here.slots >= there.slots


def _choice(space: Space, bare: Candidate, order: int) -> Choice:
    kept, beside, host = space.keeping(bare), space.beside(bare), bare.footprint.peak["host"]
    written = written_bytes(space.spec, bare.placement, bare.batch)
    ways = (kept, beside or kept)
    least = [least_s(space.spec, way.placement, way.batch, space.machine) for way in ways]
    return Choice(kept, beside, (written, host, order), (least[0] + min(least)) / 2)
