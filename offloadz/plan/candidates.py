"""What a plan may choose from, and whether it fits: placements, slots, copies, what is kept of forwards, the
cut of a batch.

Everything stays in memory while it fits in nine tenths of what is available; then, on a GPU, what fits beside the
computation stays there; then optimizer state goes to disk, then gradients, parameters, and saved inputs, in the order
of bytes won per byte that moves in a step: the *ladder*.  Its first rung that fits also cuts the batch by a rule, from
which `cuts` differ.  What a user fixed stays as it is.  Left to others: which of all that fit is the fastest
(`fastest.py`).  The trade-off: state never stays on a GPU by itself, since the processor updates it, and kinds are
placed whole: half the weights on a GPU is no plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING, Any

from offloadz.plan.change import TO_DISK
from offloadz.plan.copies import copy_choices, linked
from offloadz.plan.footprint import Batch, Footprint, computation, footprint
from offloadz.plan.kept import kept_bytes, may_keep, most
from offloadz.plan.left import most_products, product_seats
from offloadz.plan.machine import Machine
from offloadz.plan.placement import KINDS, Placement, home_bytes, slot_bytes
from offloadz.plan.products import products_bytes, products_room
from offloadz.plan.spec import ModelSpec
from offloadz.plan.words import human

if TYPE_CHECKING:
    from offloadz.plan.wishes import Wishes

MEMORY_SHARE = 0.9
"""Of what is available, left alone for whatever else the box does; a limit that a user sets is used whole."""

MICRO_TOKENS = 4096
"""Tokens of a micro-batch beyond which a CPU's products get no faster, so that more would only cost memory."""

TO_DEVICE = ("activations", "gradients", "parameters")
"""What may stay on a GPU, in the order in which it is tried where memory is short."""

WORKING_SHARE = 0.25
"""Most of the limit that the computation of a micro-batch may take that is cut by the rule."""

MOST_MICROS = 64
"""Micro-batches of a step beyond which no other cut is looked at."""

THIRD = 0.01
"""Share of a memory up to which a third slot of everything takes little."""

MEMORY_COST = 32
"""Bytes of a drive that cost as much as one of memory, about: what lacks least is what is had for least."""


@dataclass(frozen=True)
class Candidate:
    """A placement with a batch as it is cut, and their bytes."""

    placement: Placement
    batch: Batch
    footprint: Footprint


@dataclass(frozen=True)
class Space:
    """What was asked for, and what it has to fit in."""

    spec: ModelSpec
    machine: Machine
    wishes: Wishes

    @cached_property
    def limits(self) -> dict[str, int | None]:
        """Most bytes per tier: what a user set, or a share of what is there."""
        machine, wishes = self.machine, self.wishes
        host, device = _most(machine.host_bytes, wishes.host_memory), _most(machine.device_bytes, wishes.device_memory)
        if machine.unified and wishes.device_memory is not None:
            host = min(host, wishes.device_memory)
        tiers = {"host": host} if machine.unified else {"device": device, "host": host}
        return {**tiers, "disk": wishes.disk_free, "checkpoint": wishes.checkpoint_free}

    @property
    def limit_source(self) -> str:
        """What bounds host memory: the key that says so, or what was looked up."""
        return self._told_limit or f"{MEMORY_SHARE:.0%} of {self.machine.host_source}"

    @property
    def _told_limit(self) -> str:
        told = (key for key in ("host_memory", "device_memory") if getattr(self.wishes, key) == self.limits["host"])
        return next((f"offload.{key}" for key in told), "")

    def candidate(self, placement: Placement, batch: Batch) -> Candidate:
        """With its bytes."""
        wishes = self.wishes
        found = footprint(
            self.spec, placement, batch,
            baseline_bytes=wishes.baseline_bytes, keep=wishes.keep or 2, linked=linked(placement),
            export_item_bytes=wishes.export_item_bytes,
            reading_bytes=wishes.reading_bytes, random=wishes.random,
        )  # fmt: skip
        return Candidate(placement, batch, found)

    def lacking(self, found: Footprint) -> list[tuple[int, str]]:
        """(bytes too many as they cost, the tier in words with what it has and needs), empty where everything fits."""
        limits, wishes = self.limits, self.wishes
        lacking = []
        for tier, limit in limits.items():
            if limit is not None and found.peak[tier] > limit:
                phase = max(found.bytes[tier], key=lambda p: found.bytes[tier][p])
                text = f"{self._named(tier)} has {human(limit)} to use and {phase} needs "
                cost = MEMORY_COST if tier in ("host", "device") else 1
                lacking.append((cost * (found.peak[tier] - limit), text + human(found.peak[tier], up=True)))
        shared_bytes = found.peak["checkpoint"] // self.spec.share.ranks  # one for all
        both, room = found.peak["disk"] + shared_bytes, wishes.disk_free
        if wishes.same_drive and room is not None and both > room:
            text = f"the drive of offload.swap and train.output has {human(room)} and both need {human(both, up=True)}"
            lacking.append((both - room, text))
        return lacking

    def _named(self, tier: str) -> str:
        """What a user knows a tier by."""
        host = self.limit_source if self._told_limit else f"host memory ({self.limit_source})"
        device = f"the memory of {self.machine.gpu}"
        return {"host": host, "device": device, "disk": "offload.swap", "checkpoint": "train.output"}[tier]

    def first(self) -> tuple[Candidate, str]:
        """The first of the ladder that fits and "", or the one that lacks least and all that it lacks."""
        closest: tuple[int, str, Candidate] | None = None
        for largest in self._rungs():
            for candidate in self._in_copies(largest):
                lacking = self.lacking(candidate.footprint)
                if not lacking:
                    return candidate, ""
                excess = sum(cost for cost, _ in lacking)
                if closest is None or excess < closest[0]:
                    closest = (excess, "; ".join(text for _, text in lacking), candidate)
        assert closest is not None  # the first rung of the ladder is always there
        return closest[2], closest[1]

    def others(self, batch: Batch, hopeful: Callable[[Placement], bool] = lambda place: True) -> Iterator[Candidate]:
        """Every `hopeful` placement of what is left to the plan, in the most slots and copies that fit; little on disk
        first, then little on the device.

        `hopeful`: false for fewer slots where it is for more, so they are not asked about.
        """
        for largest in self._places[batch.sweeps > 1]:
            for slots in self._slot_choices:
                place = largest if slots == largest.slots else replace(largest, slots=slots)
                if not hopeful(place):
                    break
                if fitting := self._fitting(place, batch):
                    yield fitting
                    break

    def cuts(self, usual: Batch) -> Iterator[Batch]:
        """How else a batch may be cut, as far as that is left to the plan: in sweeps and micro-batches of halves."""
        wishes, rows = self.wishes, usual.rows
        for sweeps in [wishes.sweeps] if wishes.sweeps else _halves(rows):
            each = -(-rows // sweeps)
            for parts in [-(-each // min(wishes.micro_batch_size, each))] if wishes.micro_batch_size else _halves(each):
                cut = replace(usual, sweeps=sweeps, micro_rows=min(wishes.micro_batch_size or each, -(-each // parts)))
                if cut != usual and cut.num_micros * sweeps <= MOST_MICROS:
                    yield cut

    def most_graphs(self, batch: Batch) -> int:
        """Seats whose graphs fit if nothing else is there: no placement keeps more."""
        place, limit = self.in_memory, self.limits["host" if self.machine.unified else "device"] or 0
        if self.wishes.recompute != "auto":
            return max(place.kept, self._num_behind)
        seats = len(self.spec.unfolding_seats)
        return most(seats, lambda count: kept_bytes(self.spec, replace(place, kept=count), batch) <= limit)

    def graphs_of(self, place: Placement, most: int) -> int:
        """How many graphs a placement keeps at most, where those of `most_graphs` are the most of any: what is asked
        for is kept wherever inputs are."""
        return most if may_keep(place, self.wishes.recompute) or self.wishes.recompute != "auto" else place.kept

    @property
    def goes_over(self) -> bool:
        """Whether a run may come to shadow by itself."""
        return self.wishes.commit == "auto" and self.wishes.clipping

    def beside(self, held: Candidate) -> Candidate | None:
        """The same placement with shadow, as far as a run may come to it by itself; None where it does not fit."""
        if not self.goes_over:
            return None
        place = replace(held.placement, commit="shadow")
        found = self._fitting(replace(place, copies=self._copy_choices(place)[0]), held.batch)
        return found and self.keeping(found)

    def _fitting(self, placement: Placement, batch: Batch) -> Candidate | None:
        """With its state on disk in the most copies that fit."""
        some = self._in_copies(self.candidate(placement, batch))
        return next((one for one in some if not self.lacking(one.footprint)), None)

    def keeping(self, chosen: Candidate) -> Candidate:
        """The same with as many kept graphs as fit; where every block recomputes, with those behind the blocks, if they
        take no memory that a block would not need after them."""
        if may_keep(chosen.placement, self.wishes.recompute):
            return self._leaving(chosen, len(self.spec.unfolding_seats), 0, self._fits)
        least = chosen.footprint.bytes

        def is_free(found: Candidate) -> bool:
            return all(found.footprint.bytes[tier]["step"] <= least[tier]["step"] for tier in least)

        return self._leaving(chosen, self._num_behind, 0, is_free) if self._num_behind else chosen

    @cached_property
    def _num_behind(self) -> int:
        """Seats behind the blocks that can keep their graph, where every block recomputes."""
        blocks = [i for i, seat in enumerate(self.spec.seats) if seat.kind == "block"]
        all_again = self.wishes.recompute == "all" and self.in_memory.activations != "disk"
        return sum(i > blocks[-1] for i in self.spec.unfolding_seats) if blocks and all_again else 0

    def making(self, held: Candidate) -> Candidate | None:
        """`held` with results of products of as many blocks as fit, and with as many of its graphs as fit beside them;
        None where that is of none."""
        place, batch = replace(held.placement, kept=0, cheap=1), held.batch
        if not self.num_able or not may_keep(place, "auto") or held.placement.kept == len(self.spec.unfolding_seats):
            return None
        one = self.candidate(place, batch)
        room = products_room(self.spec, place, batch, one.footprint, self.limits, self.wishes.recompute)

        def fits(cheap: int) -> bool:
            return products_bytes(self.spec, replace(place, cheap=cheap), batch) <= room

        cheap = most(self.num_able, fits)
        return self._leaving(held, held.placement.kept, cheap, self._fits) if cheap and self._fits(one) else None

    @cached_property
    def num_able(self) -> int:
        """Blocks of which results of products are kept where that makes a step shorter."""
        left = self.wishes.recompute == "auto" and not self.wishes.opaque
        return most_products(self.spec) if left else 0

    def results_bytes(self, batch: Batch) -> int:
        """Bytes of the results of every block that can keep them."""
        return products_bytes(self.spec, replace(self.in_memory, kept=0, cheap=self.num_able), batch)

    def most_results(self, same: Candidate, nbytes: int) -> int:
        """Blocks whose results, of all of which there are `nbytes`, fit beside what this has at rest: with the batch
        cut in another way the same placement keeps no more."""
        place = same.placement
        if not may_keep(place, self.wishes.recompute):
            return 0
        tier = "host" if place.unified or len(place.products_route) > 1 else "device"
        room, able = (self.limits[tier] or 0) - same.footprint.bytes[tier]["load"], self.num_able
        return min(able, able * max(0, room) // max(1, nbytes))

    def _fits(self, found: Candidate) -> bool:
        return not self.lacking(found.footprint)

    def _leaving(self, chosen: Candidate, kept: int, cheap: int, fits: Callable[[Candidate], bool]) -> Candidate:
        """The same with results of products of `cheap` blocks, and before that with as many graphs as it `fits` with,
        `kept` at most."""

        def leaving(graphs: int) -> Candidate:
            some = len(product_seats(self.spec, cheap, graphs))
            return self.candidate(replace(chosen.placement, kept=graphs, cheap=some), chosen.batch)

        return leaving(most(kept, lambda graphs: fits(leaving(graphs))))

    @cached_property
    def in_memory(self) -> Placement:
        """All that is left to the plan in memory."""
        return self._placed({})

    @cached_property
    def _slot_choices(self) -> list[int]:
        """How many, the most first.  A third of everything, where it takes little: a small unit, such as a norm before
        the head, has a whole slot too, and with two the drive would wait behind it."""
        if self.wishes.slots:
            return [self.wishes.slots]
        taken = {"host": 0, "device": 0}
        for pool, nbytes in slot_bytes(self.spec, self._placed(dict.fromkeys(self._free, "disk"))).items():
            taken["host" if self.machine.unified or pool.startswith("host.") else "device"] += nbytes
        little = all(nbytes <= THIRD * (self.limits.get(tier) or 0) for tier, nbytes in taken.items() if nbytes)
        return [3, 2, 1] if any(taken.values()) and little else [2, 1]

    @cached_property
    def _free(self) -> tuple[str, ...]:
        """What may go to disk."""
        return tuple(kind for kind in TO_DISK if self.wishes.swap and getattr(self.wishes, kind) == "auto")

    @cached_property
    def _residents(self) -> tuple[str, ...]:
        """What may stay on a GPU: no kind of which it cannot hold all."""
        if self.machine.unified:
            return ()
        there = home_bytes(self.spec, replace(self.in_memory, parameters="device", gradients="device"))["device"]
        free = (kind for kind in TO_DEVICE if getattr(self.wishes, kind) == "auto")
        return tuple(kind for kind in free if there.get(kind, 0) <= (self.limits["device"] or 0))

    @cached_property
    def _tiers(self) -> list[dict[str, str]]:
        """Where what is left to the plan may be if not in memory; little on disk first, then little on the device."""
        each = [("", *["device"] * (kind in self._residents), *["disk"] * (kind in self._free)) for kind in TO_DISK]
        found = [{kind: tier for kind, tier in zip(TO_DISK, tiers, strict=True) if tier} for tiers in product(*each)]
        rank = {kind: number for number, kind in enumerate(TO_DISK)}
        return sorted(found, key=lambda some: ([*some.values()].count("disk"), len(some), [rank[k] for k in some]))

    @cached_property
    def _places(self) -> tuple[list[Placement], list[Placement]]:
        """Every placement in the most slots, for one sweep and for several."""
        one, more = (
            [replace(self._placed(tiers), slots=self._slot_choices[0], accumulate=several) for tiers in self._tiers]
            for several in (False, True)
        )
        return one, more

    def _rungs(self) -> Iterator[Candidate]:
        """From everything in memory to everything on disk; when all is there, fewer slots and more sweeps."""
        wishes, choices = self.wishes, self._slot_choices
        usual = choices[:-1] or choices
        there = [dict.fromkeys(self._residents[:count], "device") for count in range(len(self._residents) + 1)]
        down = [dict.fromkeys(self._free[:count], "disk") for count in range(1, len(self._free) + 1)]
        for tiers, slots in product((*there, *down), usual):
            yield self._sized(replace(self._placed(tiers), slots=slots), wishes.sweeps or 1)
        last = self._placed(dict.fromkeys(self._free, "disk"))
        for slots in choices[len(usual) :]:
            yield self._sized(replace(last, slots=slots), wishes.sweeps or 1)
        sweeps = 2
        while not wishes.sweeps and sweeps * max(1, wishes.micro_batch_size) <= wishes.batch_size:
            yield self._sized(replace(last, slots=choices[-1], accumulate=True), sweeps)
            sweeps *= 2

    def _placed(self, tiers: Mapping[str, str]) -> Placement:
        """With these kinds where it says; on a CPU saved inputs that stay in memory are kept as they are."""
        wishes, unified = self.wishes, self.machine.unified
        memory = dict.fromkeys(KINDS, "host") | {"activations": "device" if unified else "host"}
        asked = {kind: tier for kind in KINDS if (tier := getattr(wishes, kind)) != "auto"}
        placed: dict[str, Any] = {**memory, **asked, **tiers}
        placement = Placement(
            **placed,
            unified=unified, compute=wishes.compute, opaque=wishes.opaque, storage=self.spec.dtype,
            share=self.spec.share, accumulate=wishes.sweeps > 1,
            commit="hold" if wishes.commit == "auto" else wishes.commit,
            kept=len(self.spec.unfolding_seats) if wishes.recompute == "none" else 0,
            cheap=most_products(self.spec) if wishes.recompute == "cheap" else 0,
        )  # fmt: skip
        return replace(placement, copies=self._copy_choices(placement)[0])

    def _copy_choices(self, placement: Placement) -> list[int]:
        return copy_choices(placement, self.wishes.keep, self.wishes.copies, self.wishes.linkable)

    def _in_copies(self, largest: Candidate) -> Iterator[Candidate]:
        """A candidate, then with its state on disk in fewer and fewer copies, which help the drive alone."""
        yield largest
        if largest.footprint.peak["host"] <= (self.limits["host"] or 0):
            for copies in self._copy_choices(largest.placement)[1:]:
                yield self.candidate(replace(largest.placement, copies=copies), largest.batch)

    def _sized(self, placement: Placement, sweeps: int) -> Candidate:
        """With the largest micro-batch of reasonable cost: few tokens, and a small share of the memory."""
        wishes = self.wishes
        whole = Batch(wishes.batch_size, wishes.max_length, 1, sweeps, wishes.score_copies)
        rows = min(wishes.micro_batch_size or whole.rows_per_sweep, whole.rows_per_sweep)
        if not wishes.micro_batch_size:
            rows = max(1, min(rows, MICRO_TOKENS // wishes.max_length))
            while rows > 1 and not self._reasonable(placement, replace(whole, micro_rows=rows)):
                rows -= 1
            rows = -(-whole.rows_per_sweep // -(-whole.rows_per_sweep // rows))  # equal micro-batches, as many
        return self.candidate(placement, replace(whole, micro_rows=rows))

    def _reasonable(self, placement: Placement, batch: Batch) -> bool:
        tier = "host" if placement.unified else "device"
        limit = self.limits[tier] or 0
        if sum(computation(self.spec, placement, batch).values()) > WORKING_SHARE * limit:
            return False
        return self.candidate(placement, batch).footprint.peak[tier] <= limit


def _halves(rows: int) -> list[int]:
    """1, 2, 4 and so on, up to `rows`."""
    return [1 << power for power in range(rows.bit_length())]


def _most(total_bytes: int, told_bytes: int | None) -> int:
    return int(total_bytes * MEMORY_SHARE) if told_bytes is None else min(told_bytes, total_bytes)
