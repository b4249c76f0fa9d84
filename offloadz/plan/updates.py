"""The part of a step that updates: what an update reads and writes, in which order, and by which lanes it travels.

A script (`steps.py`) says which units are updated when; here is what that means for a unit under a placement: in place
or beside what is valid, from its home or in the slot a block computes from.  The trade-off: weights on disk that are
updated under the forward keep their host slot from the update to the computation, one block earlier than they would
be fetched, and are read once instead of twice.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain, pairwise

from offloadz.plan.ahead import Fetched
from offloadz.plan.ops import Op
from offloadz.plan.placement import Placement
from offloadz.plan.spec import ITEM_BYTES, ModelSpec

NORM = "norm@live"
"""The global norm of a step: decided once all gradients are home, read by every update."""

HOPS = {
    ("disk", "host"): ("disk_read", "load"),
    ("host", "disk"): ("disk_write", "store"),
    ("host", "compute"): ("h2d", "fetch"),
    ("device", "compute"): ("h2d", "fetch"),
    ("device", "host"): ("d2h", "lower"),
    ("host", "device"): ("h2d", "raise"),
    ("compute", "host"): ("d2h", "save"),
    ("compute", "device"): ("d2h", "save"),
    ("host", "shard"): ("h2d", "bring"),
    ("whole", "compute"): ("h2d", "fetch"),
}
"""Lane and verb of each step of a route."""


@dataclass
class Upkeep:
    """The ops so far, and what is known about updates at this point of the order."""

    spec: ModelSpec
    placement: Placement
    pending: list[int]
    """Units whose update is due."""
    unended: bool = False
    """Whether behind the last of `pending` the step they belong to is ended."""
    ops: list[Op] = field(default_factory=list)
    phase: str = "forward"
    arrived: list[tuple[int, tuple[str, ...]]] = field(default_factory=list)
    """Units whose gradient has just been rounded, to be updated at once, and the host slot of their weights, if any."""
    held: set[str] = field(default_factory=set)
    """Values that the program before has left in slots for the updates of this one (`ahead.py`)."""
    updated: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """Host slots of weights that were updated in them and that a block can compute from."""

    def emit(self, lane: str, verb: str, **fields: object) -> None:
        self.ops.append(Op(lane, verb, self.phase, **fields))  # type: ignore[arg-type]

    def carry(self, kind: str, route: tuple[str, ...], unit: int, nbytes: int, part: int = -1) -> tuple[str, ...]:
        """Bring a stored value along a route; returns the places to read it from."""
        name = f"{kind}{unit}" if part < 0 else f"{kind}{unit}.{part}"
        places = self.home(kind, unit, route[0], part)
        return self.along(route, kind, name, places, unit=unit, part=part, nbytes=nbytes)

    def along(
        self, route: tuple[str, ...], kind: str, name: str, places: tuple[str, ...], **fields: int
    ) -> tuple[str, ...]:
        """An op per step of a route, for the value `name` that stands at `places`; returns where it then is."""
        for tier, onward in pairwise(route):
            lane, verb = HOPS[tier, onward]
            target = (f"{name}@{onward}",)
            if target[0] not in self.held:
                self.emit(lane, f"{verb}.{kind}", reads=places, writes=target, **fields)
            self.held.discard(target[0])
            places = target
        return places

    def home(self, kind: str, unit: int, tier: str, part: int = -1) -> tuple[str, ...]:
        """Places of a value at rest: one per part, so that an update of one part holds up nobody else."""
        stored = {"p": "w", "h": "g"}.get(kind, kind)
        owner = self.spec.units[unit]
        every = owner.kept_parts if stored == "w" else owner.trained_parts
        return tuple(f"{stored}{unit}.{k}@{tier}" for k in ([part] if part >= 0 else every))

    def fetch_ahead(self, fetched: Iterable[Fetched]) -> None:
        """Bring what the first updates of the next step read besides gradients."""
        self.phase = "ahead"
        for one in fetched:
            self.emit(
                "disk_read", f"load.{one.kind}", reads=self.home(one.kind, one.unit, "disk", one.part),
                writes=(one.at("ahead"),), unit=one.unit, part=one.part, nbytes=one.nbytes,
            )  # fmt: skip

    def apply(self) -> None:
        """Update what has arrived (nothing, where gradients are held)."""
        phase, self.phase = self.phase, "arrival"
        for unit, held in self.arrived:
            self.arrival(unit, held)
        self.arrived.clear()
        self.phase = phase

    def arrival(self, unit: int, held: tuple[str, ...]) -> None:
        """Update a unit in place or, with shadow, into its spare; of weights in memory that is a whole second home.

        `held`: the host slot that has its weights; copied from there, which is soon free again, and not read again.
        Weights on disk that all ranks keep whole are updated in that slot, where the other ranks' come to as well.
        """
        owner, routes = self.spec.units[unit], self.placement
        spare = routes.commit == "shadow"
        slot = (f"g{unit}@host",) if not spare or routes.gradients == "disk" else ()
        if routes.share.spreads and routes.parameters == "disk":
            whole = held or self.carry("w", ("disk", "host"), unit, owner.weight_bytes)
            self.in_slot(unit, whole, slot=slot, spare=spare)
            return
        for first, *more in self.together(unit, slot):  # one by one where weights are on disk, as `held` are
            copy = held and self.copied(
                "p", held, f"p{unit}.{first}@host", unit, first, owner.parts[first].weight_bytes
            )
            self.update(unit, (first, *more), slot, spare=spare, weights=copy)
        if spare and routes.parameters != "disk":
            self.complete(unit)
        self.spread(unit, spare=spare)

    def complete(self, unit: int) -> None:
        """Copy to the spare what is never updated of weights that are kept here."""
        owner, routes = self.spec.units[unit], self.placement
        how = ("cpu", "copy") if len(routes.part_route) == 1 else ("d2h", "lower")
        for part in (k for k in owner.kept_parts if k not in owner.trainable_parts):
            home, nbytes = self.home("p", unit, routes.parameters, part), owner.parts[part].weight_bytes
            self.copied("p", home, f"w{unit}.{part}@spare", unit, part, nbytes, how)

    def updates(self, units: tuple[int, ...], in_slot: bool = False) -> None:
        """The updates of `units` that are due; behind a step's last, its end (it follows all stores by its lane).

        `in_slot`: in the host slot from which the weights are computed with next, so that they are read once.
        """
        phase, self.phase = self.phase, "update"
        for unit in units:
            if unit in self.pending:
                self.pending.remove(unit)
                self.due(unit, in_slot)
        if self.unended and not self.pending:
            self.unended = False
            if self.placement.ending:
                self.emit("disk_write", self.placement.ending)
        self.phase = phase

    def due(self, unit: int, in_slot: bool) -> None:
        """The updates of a unit, which are due."""
        owner = self.spec.units[unit]
        if in_slot:
            self.updated[unit] = self.carry("w", ("disk", "host"), unit, owner.weight_bytes)
            self.in_slot(unit, self.updated[unit], known=(NORM,))
            return
        slot = tuple(self.held & {f"g{unit}@host"})
        self.held.difference_update(slot)
        for parts in self.together(unit, slot):
            self.update(unit, parts, slot, known=(NORM,))
        self.spread(unit)

    def in_slot(
        self,
        unit: int,
        whole: tuple[str, ...],
        slot: tuple[str, ...] = (),
        known: tuple[str, ...] = (),
        spare: bool = False,
    ) -> None:
        """Update a unit in the host slot `whole` that has its weights, and put them back from there; see `update`."""
        owner = self.spec.units[unit]
        for parts in self.together(unit, slot, whole=True):
            self.update(unit, parts, slot, known, whole, spare)
        self.spread(unit, whole, spare=spare)
        # Behind all updates: a store of a part reads the slot that the next part's update writes.
        for part in owner.trained_parts:
            nbytes = owner.parts[part].weight_bytes
            self.put_back("p", whole, self.placement.part_route, unit, part, nbytes, spare)

    def spread(self, unit: int, slot: tuple[str, ...] = (), filled: bool = False, spare: bool = False) -> None:
        """Give the weights of this rank's shards to all, and take theirs, where weights are whole at rest.

        `slot`: the host slot they were updated in, if they were.  `filled`: frozen sections too, which change only by
        being filled.  `spare`: of weights in memory in their spare, of those on disk beside what is valid.
        """
        if not self.placement.share.spreads:
            return
        owner, tier = self.spec.units[unit], self.placement.parameters
        aside = {"disk": "next"}.get(tier, "spare") if spare else tier
        moving = tuple(range(len(owner.parts))) if filled else owner.trainable_parts
        own = tuple(k for k in moving if k in owner.own_parts)
        others = tuple(k for k in moving if k not in own)
        mine, theirs = (tuple(f"w{unit}.{k}@{aside}" for k in some) for some in (own, others))
        sized = zip(owner.padded_elements, owner.sections, strict=True)
        whole_bytes = sum(n * ITEM_BYTES[s.dtype] for n, s in sized if s.trainable or filled)
        verb, coming = "spread.w.all" if filled else "spread.w", self.from_others(whole_bytes)
        if tier != "disk":
            self.emit("net", verb, reads=mine, writes=(*mine, *theirs), unit=unit, nbytes=coming)
            return
        if not slot:
            slot, own_bytes = (f"w{unit}@host",), sum(owner.parts[k].weight_bytes for k in own)
            self.emit("disk_read", "load.own", reads=mine, writes=slot, unit=unit, nbytes=own_bytes)
        self.emit("net", verb, reads=slot, writes=slot, unit=unit, nbytes=coming)
        left_bytes = sum(owner.parts[k].weight_bytes for k in others)
        verb = "spare.others" if spare else "store.others"
        self.emit("disk_write", verb, reads=slot, writes=theirs, unit=unit, nbytes=left_bytes)

    def from_others(self, nbytes: int) -> int:
        """Of the bytes of all shards, those that come over the net."""
        return nbytes * (self.placement.share.ranks - 1) // self.placement.share.ranks

    def together(self, unit: int, slot: tuple[str, ...] = (), whole: bool = False) -> list[tuple[int, ...]]:
        """The parts that are updated here, in one tuple those of one op: all, if none of what they need is brought part
        by part.  `slot` as in `update`, `whole`: weights lie in the slot of their unit."""
        parts, routes = self.spec.units[unit].trained_parts, self.placement
        ways = [self.state_route(unit, k) for k in parts]
        ways += [() if whole else routes.part_route, () if slot else routes.grad_part_route]
        if parts and all(len(way) < 2 for way in ways):
            return [parts]
        return [(part,) for part in parts]

    def state_route(self, unit: int, part: int) -> tuple[str, ...]:
        """Tiers from the home of a part's state to its update; there may be nothing to bring (sgd without momentum)."""
        return self.placement.state_route if self.spec.units[unit].parts[part].state_bytes else ("host",)

    def update(
        self,
        unit: int,
        parts: tuple[int, ...],
        slot: tuple[str, ...] = (),
        known: tuple[str, ...] = (),
        weights: tuple[str, ...] = (),
        spare: bool = False,
    ) -> None:
        """Read state, weights and gradients of some parts; update; write state and weights back, or to the spare.

        `slot`: where the whole unit's gradient lies, if it need not be brought, and `weights` likewise (those of a
        whole unit are put back by the caller).  `known`: what is waited for besides.  The op reads of each part three
        places: gradient, state, weights.
        """
        owner, routes = self.spec.units[unit], self.placement
        held = [self.operands(unit, part, weights, spare) for part in parts]
        grads = [slot or self.carry("h", routes.grad_part_route, unit, owner.parts[k].weight_bytes, k) for k in parts]
        reads = tuple(place for grad, own in zip(grads, held, strict=True) for place in (*grad, *own))
        self.emit(
            "cpu", "update.g" if slot else "update", reads=(*reads, *known), writes=tuple(chain.from_iterable(held)),
            unit=unit, part=parts[0] if len(parts) == 1 else -1, nbytes=sum(owner.parts[k].num_elements for k in parts),
        )  # fmt: skip
        for part, own in zip(parts, held, strict=True):
            for (kind, route, nbytes), place in zip(self.moved(unit, part), own, strict=True):
                if len(route) > 1 and place != f"w{unit}@host":
                    self.put_back(kind, (place,), route, unit, part, nbytes, spare)

    def moved(self, unit: int, part: int) -> tuple[tuple[str, tuple[str, ...], int], ...]:
        """Kind, route and bytes of what an update of a part writes."""
        owner = self.spec.units[unit].parts[part]
        state = ("s", self.state_route(unit, part), owner.state_bytes)
        return state, ("p", self.placement.part_route, owner.weight_bytes)

    def operands(self, unit: int, part: int, weights: tuple[str, ...], spare: bool) -> tuple[str, ...]:
        """Bring a part's state and weights to where they are updated; returns the place of each."""
        brought: list[str] = []
        for kind, route, nbytes in self.moved(unit, part):
            places = weights if kind == "p" and weights else self.carry(kind, route, unit, nbytes, part)
            if spare and len(route) == 1 and nbytes:
                name = self.home(kind, unit, "spare", part)[0]
                places = self.copied(kind, places, name, unit, part, nbytes)
            brought += places
        return tuple(brought)

    def copied(
        self, kind: str, places: tuple[str, ...], target: str, unit: int, part: int, nbytes: int,
        how: tuple[str, str] = ("cpu", "copy"),
    ) -> tuple[str, ...]:  # fmt: skip
        """Copy a part within memory, by a lane and verb of that memory; returns the place it then is at."""
        lane, verb = how
        self.emit(lane, f"{verb}.{kind}", reads=places, writes=(target,), unit=unit, part=part, nbytes=nbytes)
        return (target,)

    def put_back(
        self, kind: str, places: tuple[str, ...], route: tuple[str, ...], unit: int, part: int, nbytes: int,
        spare: bool = False,
    ) -> None:  # fmt: skip
        """Send an updated part home, or beside what is valid there."""
        lane, verb = HOPS[route[1], route[0]]
        verb = "spare" if spare and route[0] == "disk" else verb
        target = self.home(kind, unit, {"disk": "next"}.get(route[0], "spare") if spare else route[0], part)
        self.emit(lane, f"{verb}.{kind}", reads=places, writes=target, unit=unit, part=part, nbytes=nbytes)
