"""The fastest of all candidates that fit, by simulation.

Placements under the rule's cut of the batch come first.  Those that only send more to the drive, or that bytes and
rates alone show to be slower (`bounds.py`), are not walked, and the search ends with the first of the mild ones that
comes as close to the least possible time as makes no difference.  Then other cuts of the batch, in any placement, of
which bytes and rates alone do not show that they win less than a twentieth.  Left to others: what fits
(`candidates.py`), what a step takes (`estimate.py`).  The trade-off: two steps within a fiftieth count as equally fast,
which is what a simulation is worth, and then the drive, the memory and the order of the ladder decide; of other cuts
only those few are walked that could win most.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from offloadz.plan.bounds import computed_s, least_s, written_bytes
from offloadz.plan.candidates import Candidate, Space
from offloadz.plan.estimate import estimate
from offloadz.plan.footprint import Batch
from offloadz.plan.kept import may_keep
from offloadz.plan.placement import KINDS, Placement

TIE = 0.02
"""Share of a step by which two count as equally fast."""

MOST = 12
"""Candidates that are simulated at most."""

CUT_GAIN = 0.05
"""Share of a step that another cut of the batch has to win: numbers differ a little by it."""

MOST_CUTS = 3
"""Candidates that are simulated at most with the batch cut in another way."""


Tiers = tuple[str, ...]
"""Where each kind of value is."""


@dataclass(eq=False)
class Choice:
    """A candidate with what is known of it."""

    candidate: Candidate
    beside: Candidate | None
    """The same with shadow, to which a run goes over while clipping fires seldom."""
    mildness: tuple[int, int, int, int]
    """What decides between equally fast ones, less being better: bytes written, kinds that stay on the device, bytes of
    memory, place in the order."""
    least_s: float
    step_s: float = 0.0


def fastest(space: Space, first: Candidate) -> tuple[Candidate, int]:
    """The fastest that fits, and how many were simulated (0: there is no other).

    With as many kept graphs as fit: a graph that is kept takes work away from a step and adds none.  Where clipping
    decides whether a step comes by hold or by shadow, one of each counts.
    """
    choices = [_choice(space, bare, order) for order, bare in enumerate(space.others(first.batch))]
    choice, num_walked = _of_one_cut(space, choices) if len(choices) > 1 else (_choice(space, first, 0), 0)
    known = {_tiers(one.candidate.placement): one for one in (*choices, choice)}
    better, num_more = _of_other_cuts(space, choice, known)
    return better.candidate, num_walked + num_more


def _of_one_cut(space: Space, choices: Sequence[Choice]) -> tuple[Choice, int]:
    """The fastest of those with the batch cut by the rule, and how many were simulated."""
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
            return choice, len(walked)  # the milder ones are slower
    return _mildest(walked), len(walked)


def _of_other_cuts(space: Space, usual: Choice, known: Mapping[Tiers, Choice]) -> tuple[Choice, int]:
    """The fastest under another cut, if it wins enough, and how many were simulated; else `usual`.

    `known`: each placement that fits under the rule's cut.
    """
    if next(space.cuts(usual.candidate.batch), None) is None:
        return usual, 0
    usual.step_s = usual.step_s or _step_s(space, usual)
    goal_s, walked = usual.step_s * (1 - CUT_GAIN), list[Choice]()
    for choice in sorted(_hopeful(space, usual, goal_s, known), key=lambda choice: choice.least_s)[:MOST_CUTS]:
        if choice.least_s <= min((other.step_s for other in walked), default=goal_s):
            choice.step_s = _step_s(space, choice)
            walked.append(choice)
    best = _mildest(walked) if walked else usual
    return (best if best.step_s < goal_s else usual), len(walked)


def _hopeful(space: Space, usual: Choice, goal_s: float, known: Mapping[Tiers, Choice]) -> Iterator[Choice]:
    """What may be sooner done than `goal_s` with the batch cut in another way, as far as bytes and rates tell: of a
    placement that the usual cut has room for, where they are fewer."""

    def goal(place: Placement) -> float:
        same = known.get(_tiers(place))
        if same is None or same.candidate.placement.slots < place.slots:
            return goal_s
        return min(goal_s, same.least_s * (1 - CUT_GAIN))

    for batch in space.cuts(usual.candidate.batch):
        graphs = space.most_graphs(batch)

        def hopeful(place: Placement, batch: Batch = batch, graphs: int = graphs) -> bool:
            place = replace(place, kept=graphs if may_keep(place, space.wishes.recompute) else place.kept)
            return _least_s(space, batch, [place, *[replace(place, commit="shadow")] * space.goes_over]) < goal(place)

        if computed_s(space.spec, replace(usual.candidate.placement, kept=graphs), batch, space.machine) < goal_s:
            found = (_choice(space, bare, order) for order, bare in enumerate(space.others(batch, hopeful)))
            yield from (choice for choice in found if choice.least_s < goal(choice.candidate.placement))


def _tiers(place: Placement) -> Tiers:
    return tuple(getattr(place, kind) for kind in KINDS)


def _mildest(walked: Sequence[Choice]) -> Choice:
    """Of those that are as fast as the fastest."""
    best = min(choice.step_s for choice in walked)
    return min((choice for choice in walked if choice.step_s <= best * (1 + TIE)), key=lambda choice: choice.mildness)


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
    keeps = here.kept >= there.kept and here.kept + here.cheap >= there.kept + there.cheap
    return away and not wins and not roomy and keeps and here.slots >= there.slots


def _choice(space: Space, bare: Candidate, order: int) -> Choice:
    kept, beside, peak = space.keeping(bare), space.beside(bare), bare.footprint.peak
    resident = sum(getattr(bare.placement, kind) == "device" for kind in KINDS)
    mildness = (written_bytes(space.spec, bare.placement, bare.batch), resident, peak["host"], order)
    ways = [way.placement for way in (kept, beside) if way is not None]
    return Choice(kept, beside, mildness, _least_s(space, bare.batch, ways))


def _least_s(space: Space, batch: Batch, ways: Sequence[Placement]) -> float:
    """Seconds that no step is shorter than, the mean where it comes in two ways."""
    least = [least_s(space.spec, way, batch, space.machine) for way in ways]
    return (least[0] + min(least)) / 2
