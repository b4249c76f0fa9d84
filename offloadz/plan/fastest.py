"""The fastest of all candidates that fit, by simulation.

Placements under the rule's cut of the batch come first, each with results of products and without.  Those that only
send more to the drive, or that bytes and rates alone show to be slower (`bounds.py`), are not walked, and the search
ends with the first of the mild ones that comes as close to the least possible time as makes no difference.  Then other
cuts of the batch, in any placement, of which bytes and rates alone do not show that they win less than a twentieth.
Left to others: what fits (`candidates.py`), what a step takes (`estimate.py`).  The trade-off: two steps within a
fiftieth count as equally fast, which is what a simulation is worth, and then the drive, the memory and the order of the
ladder decide; of other cuts only those few are walked that could win most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from offloadz.plan.bounds import computed_s, least_s, written_bytes
from offloadz.plan.candidates import Candidate, Space
from offloadz.plan.estimate import estimate
from offloadz.plan.footprint import Batch
from offloadz.plan.placement import KINDS, Placement

TIE = 0.02
"""Share of a step by which two count as equally fast."""

MOST = 12
"""Candidates that are simulated at most."""

CUT_GAIN = 0.05
"""Share of a step that another cut of the batch has to win: numbers differ a little by it."""

MOST_CUTS = 3
"""Candidates that are simulated at most with the batch cut in another way; with results of products as many more, under
either cut."""


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
    """By bytes and rates alone."""
    walked_s: float = 0.0
    """As far as it was simulated: at least so much."""
    whole: bool = False
    """Whether that was all of it."""

    @property
    def at_least_s(self) -> float:
        return max(self.least_s, self.walked_s)

    @property
    def step_s(self) -> float:
        """Seconds of a step, the mean where it comes in two ways; without end as long as nobody had to know."""
        return self.walked_s if self.whole else inf


def fastest(space: Space, first: Candidate) -> tuple[Candidate, int]:
    """The fastest that fits, and how many were simulated (0: there is no other).

    With as many kept graphs as fit: a graph that is kept takes work away from a step and adds none.  Results of
    products may have to go over the bus, so one with them has to be faster than all without.  Where clipping decides
    whether a step comes by hold or by shadow, one of each counts.
    """
    choices = [_kept(space, bare, order) for order, bare in enumerate(space.others(first.batch))]
    choices = choices or [_kept(space, first, 0)]
    plain, num_walked = _of_one_cut(space, choices) if len(choices) > 1 else (choices[0], 0)
    choice, num_made = _sooner(space, plain, TIE, lambda goal_s: _with_results(space, plain, choices, goal_s))
    known = {_tiers(one.candidate.placement): one for one in (*choices, choice)}
    choice, num_cut = _sooner(space, choice, CUT_GAIN, lambda goal_s: _hopeful(space, choice, goal_s, known))
    return choice.candidate, num_walked + num_made + num_cut


def _of_one_cut(space: Space, choices: Sequence[Choice]) -> tuple[Choice, int]:
    """Of those with the batch cut by the rule the mildest that comes as close to the least possible time as makes no
    difference, or where none does, that is as fast as the fastest; and how many were simulated."""
    some = [one for one in choices if not any(_does_less(other, one) for other in choices)]
    walks, rivals = Walks(space), sorted(some, key=lambda one: (_is_told_low(one), one.least_s))
    mildest, near_s = sorted(some, key=lambda one: one.mildness), min(one.least_s for one in some) * (1 + TIE)

    def counts(step_s: float) -> bool:
        """Whether so many seconds are as fast as the fastest, for which those are simulated that may be faster."""
        for rival in rivals:
            if rival.at_least_s * (1 + TIE) < step_s <= walks.fast_s:
                walks.tell(rival)
        return step_s <= walks.fast_s

    for mild in mildest:
        if mild.at_least_s <= near_s and walks.tell(mild, near_s) <= near_s:
            return mild, len(walks.done)  # the milder ones are slower
    for mild in mildest:
        if counts(mild.at_least_s) and counts(walks.tell(mild)):
            break
    return _mildest(walks.done), len(walks.done)


def _is_told_low(choice: Choice) -> bool:
    """Whether bytes and rates tell least of a step: lanes then wait for each other most."""
    place = choice.candidate.placement
    return place.slots == 1 or place.activations == "disk"


def _sooner(
    space: Space, usual: Choice, gain: float, others: Callable[[float], Iterable[Choice]]
) -> tuple[Choice, int]:
    """The fastest of others if it wins that share of a step, and how many were simulated; else `usual`.

    `others`: that may be sooner done than so many seconds.
    """
    walks = Walks(space, Walks(space).tell(usual) * (1 - gain))
    for choice in _soonest(others(walks.goal_s), usual):
        if choice.least_s <= walks.best_s:
            walks.tell(choice)
    better = [choice for choice in walks.done if choice.step_s < walks.goal_s]
    return (_mildest(better) if better else usual), len(walks.done)


def _soonest(choices: Iterable[Choice], usual: Choice) -> list[Choice]:
    """The few that could be done soonest, of those without results of products and of those with them: of these before
    all the ones that are placed as `usual`, which is known to be fast."""
    here, kinds = _tiers(usual.candidate.placement), dict[bool, list[Choice]]()
    for choice in choices:
        kinds.setdefault(choice.candidate.placement.cheap > 0, []).append(choice)
    plain = sorted(kinds.get(False, ()), key=lambda one: one.least_s)
    made = sorted(kinds.get(True, ()), key=lambda one: (_tiers(one.candidate.placement) != here, one.least_s))
    return sorted((*plain[:MOST_CUTS], *made[:MOST_CUTS]), key=lambda one: one.least_s)


def _with_results(space: Space, usual: Choice, choices: Iterable[Choice], goal_s: float) -> Iterator[Choice]:
    """The same with results of products, as far as they may be sooner done than `goal_s`: of those that write no more
    to the drive than `usual`, since a drive wears and products do not."""
    for plain in (one for one in choices if one.mildness[0] <= usual.mildness[0]):
        kept, batch = plain.candidate, plain.candidate.batch
        own_s, cheap = min(goal_s, plain.least_s * (1 - TIE)), space.most_results(kept, space.results_bytes(batch))
        if cheap and _may_take(space, batch, replace(kept.placement, cheap=cheap), own_s):
            yield from (made for made in _made(space, plain) if made.least_s < own_s)


def _hopeful(space: Space, usual: Choice, goal_s: float, known: Mapping[Tiers, Choice]) -> Iterator[Choice]:
    """What may be sooner done than `goal_s` with the batch cut in another way, as far as bytes and rates tell: of a
    placement that the usual cut has room for, where they are fewer; with results of products in memory, or placed as
    the usual one."""
    place = usual.candidate.placement
    near = {_tiers(place), _tiers(space.in_memory)}

    def goal(place: Placement) -> float:
        same = known.get(_tiers(place))
        if same is None or same.candidate.placement.slots < place.slots:
            return goal_s
        return min(goal_s, same.least_s * (1 - CUT_GAIN))

    def ways(place: Placement, graphs: int, results_bytes: int) -> Iterator[Placement]:
        """With the most that it can keep of its forwards."""
        place = replace(place, kept=space.graphs_of(place, graphs))
        yield place
        same = known.get(_tiers(place)) if _tiers(place) in near else None
        if same is not None and (cheap := space.most_results(same.candidate, results_bytes)):
            yield replace(place, cheap=cheap)

    for batch in space.cuts(usual.candidate.batch):
        most = space.most_graphs(batch), space.results_bytes(batch)

        def hopeful(place: Placement, batch: Batch = batch, most: tuple[int, int] = most) -> bool:
            return any(_may_take(space, batch, way, goal(way)) for way in ways(place, *most))

        every = replace(place, kept=most[0], cheap=max(place.cheap, space.num_able))
        if computed_s(space.spec, every, batch, space.machine) < goal_s:
            for order, bare in enumerate(space.others(batch, hopeful)):
                plain = _kept(space, bare, order)
                found = (plain, *(_made(space, plain) if _tiers(bare.placement) in near else ()))
                yield from (choice for choice in found if choice.least_s < goal(choice.candidate.placement))


def _may_take(space: Space, batch: Batch, place: Placement, most_s: float) -> bool:
    """Whether a step may take less than so many seconds, with the ways of committing that a run comes to by itself."""
    held_s = least_s(space.spec, place, batch, space.machine)
    if not space.goes_over:
        return held_s < most_s
    if _mean(held_s, computed_s(space.spec, place, batch, space.machine)) >= most_s:
        return False  # no way of committing computes less
    return _mean(held_s, least_s(space.spec, replace(place, commit="shadow"), batch, space.machine)) < most_s


def _tiers(place: Placement) -> Tiers:
    return tuple(getattr(place, kind) for kind in KINDS)


def _mildest(walked: Sequence[Choice]) -> Choice:
    """Of those that are as fast as the fastest."""
    best = min(choice.step_s for choice in walked)
    return min((choice for choice in walked if choice.step_s <= best * (1 + TIE)), key=lambda choice: choice.mildness)


@dataclass
class Walks:
    """What was simulated; `goal_s`: the seconds of a step that one has to be below to be of use."""

    space: Space
    goal_s: float = inf
    done: list[Choice] = field(default_factory=list)

    @property
    def best_s(self) -> float:
        return min((one.step_s for one in self.done), default=self.goal_s)

    @property
    def fast_s(self) -> float:
        """Seconds of a step up to which it counts as fast as the best."""
        return self.best_s * (1 + TIE)

    def tell(self, choice: Choice, most_s: float = inf) -> float:
        """Seconds of a step, simulated as far as it takes to know whether they are more than `most_s` or than makes a
        difference; without end where they are, and where `MOST` others were simulated."""
        if choice not in self.done and len(self.done) < MOST:
            self.done.append(choice)
        limit_s = min(most_s, self.goal_s, self.fast_s)
        if choice in self.done and not choice.whole and choice.at_least_s <= limit_s:
            _simulate(self.space, choice, limit_s)
        return choice.step_s


def _simulate(space: Space, choice: Choice, most_s: float) -> None:
    """Simulate its steps; the second way only if the mean may then be `most_s`."""

    def step_s(way: Candidate) -> float:
        return estimate(space.spec, way.placement, way.batch, space.machine).step_s

    held_s, beside = step_s(choice.candidate), choice.beside
    if beside is not None:
        choice.walked_s = _mean(held_s, least_s(space.spec, beside.placement, beside.batch, space.machine))
    if beside is None or choice.walked_s <= most_s:
        choice.walked_s, choice.whole = held_s if beside is None else _mean(held_s, step_s(beside)), True


def _mean(held_s: float, beside_s: float) -> float:
    """Seconds of a step that comes in both ways as often, the second where it is sooner done."""
    return (held_s + min(held_s, beside_s)) / 2


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


def _kept(space: Space, bare: Candidate, order: int) -> Choice:
    """With as many graphs as fit, which do not count as memory that it takes."""
    return _choice(space, bare, space.keeping(bare), space.beside(bare), order)


def _made(space: Space, plain: Choice) -> Iterator[Choice]:
    """The same with results of products, if they fit."""
    if (made := space.making(plain.candidate)) is not None:
        beside = plain.beside and (space.making(plain.beside) or plain.beside)
        yield _choice(space, made, made, beside, plain.mildness[-1])


def _choice(space: Space, bare: Candidate, candidate: Candidate, beside: Candidate | None, order: int) -> Choice:
    """`bare`: what its mildness is told by."""
    resident = sum(getattr(bare.placement, kind) == "device" for kind in KINDS)
    written = written_bytes(space.spec, bare.placement, bare.batch)
    ways = [way.placement for way in (candidate, beside) if way is not None]
    least = _least_s(space, bare.batch, ways)
    return Choice(candidate, beside, (written, resident, bare.footprint.peak["host"], order), least)


def _least_s(space: Space, batch: Batch, ways: Sequence[Placement]) -> float:
    """Seconds that no step is shorter than, the mean where it comes in two ways."""
    least = [least_s(space.spec, way, batch, space.machine) for way in ways]
    return _mean(least[0], least[-1])
