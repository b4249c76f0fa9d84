"""The fastest of all candidates that fit, by simulation.

Those that bytes and rates alone show to be slower (`bounds.py`) are not walked, and the search ends with the first of
the mild ones that comes as close to the least possible time as makes no difference.  Left to others: what fits
(`candidates.py`), what a step takes (`estimate.py`).  The trade-off: two steps within a fiftieth count as equally fast,
which is what a simulation is worth, and then the drive, the memory and the order of the ladder decide.
"""

from __future__ import annotations

from dataclasses import dataclass

from offloadz.plan.bounds import least_s, written_bytes
from offloadz.plan.candidates import Candidate, Space
from offloadz.plan.estimate import estimate

TIE = 0.02
"""Share of a step by which two count as equally fast."""

MOST = 12
"""Candidates that are simulated at most."""


@dataclass(eq=False)
class Choice:
    """A candidate with what is known of it."""

    candidate: Candidate
    mildness: tuple[int, int, int]
    """What decides between equally fast ones, less being better: bytes written, bytes of memory, place in the order."""
    least_s: float
    step_s: float = 0.0


def fastest(space: Space, first: Candidate) -> tuple[Candidate, int]:
    """The fastest that fits, with the batch of the first that does, and how many were simulated (0: there is no other).

    With as many kept graphs as fit: a graph that is kept takes work away from a step and adds none.
    """
    choices = [_choice(space, bare, order) for order, bare in enumerate(space.others(first.batch))]
    if len(choices) < 2:
        return space.keeping(first), 0
    choices.sort(key=lambda choice: choice.mildness)
    least = min(choice.least_s for choice in choices)
    walked: list[Choice] = []
    for number, choice in enumerate([min(choices, key=lambda choice: choice.least_s), *choices]):
        best = min((other.step_s for other in walked), default=choice.least_s)
        if choice not in walked and choice.least_s <= best * (1 + TIE) and len(walked) < MOST:
            found = choice.candidate
            choice.step_s = estimate(space.spec, found.placement, found.batch, space.machine).step_s
            walked.append(choice)
        if number and choice in walked and choice.step_s <= least * (1 + TIE):
            return choice.candidate, len(walked)  # the milder ones are slower
    best = min(choice.step_s for choice in walked)
    equal = [choice for choice in walked if choice.step_s <= best * (1 + TIE)]
    return min(equal, key=lambda choice: choice.mildness).candidate, len(walked)


def _choice(space: Space, bare: Candidate, order: int) -> Choice:
    kept, host = space.keeping(bare), bare.footprint.peak["host"]
    written = written_bytes(space.spec, bare.placement, bare.batch)
    bound = least_s(space.spec, kept.placement, kept.batch, space.machine)
    return Choice(kept, (written, host, order), bound)
