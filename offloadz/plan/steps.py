"""A step as a sequential program: what has to happen, in an order that one thread could follow.

A step is told as *phases*: turns of seats forward, turns backward, the end of the gradients, updates.  The builder
knows nothing of time; `passes` makes the program fast.  One builder serves every mode (training, several backward
passes, evaluation, what is left after a block came out of turn): they differ in the phases they are given.

Updates stand in the order of need: those of a seat just before its next forward (hold, `design: exact clipping`), so
they run under the forward of the seats before it.  That costs one gradient in the storage dtype per parameter, and buys
exact clipping with the overlap kept.  With `commit = "shadow"` a unit's parts are updated as soon as its gradient is
whole, into a spare, and its gradient is kept: where the step is then clipped the same updates come again, as with hold.
They stand one turn later in the order, so that the weights of the next turn are on their way before the drive is asked
for the state.  With `commit = "in_place"` there is no spare and nothing is kept, so nothing can be clipped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise

from offloadz.plan.ahead import fetched_ahead, scattered, stays
from offloadz.plan.left import GRAPH, PRODUCTS
from offloadz.plan.ops import Program
from offloadz.plan.placement import Placement, accumulates
from offloadz.plan.spec import ITEM_BYTES, ModelSpec
from offloadz.plan.updates import HOPS, NORM, Upkeep


@dataclass(frozen=True)
class Turn:
    """One call of one seat's forward, and later of its backward."""

    seat: int
    call: int
    """Number of the call within the step: what saved inputs are kept under."""
    micros: int = 1
    graded: bool = True
    """Whether a backward will come: then the input is saved, or the graph kept."""
    kept: str = ""
    """What the forward leaves for its backward beside its input: nothing, its `GRAPH` (and no input), so that nothing
    runs again, or the results of its `PRODUCTS`, so that only what lies between them does."""


@dataclass(frozen=True)
class Forward:
    """Turns of seats in the order in which the model meets them."""

    turns: tuple[Turn, ...]


@dataclass(frozen=True)
class Backward:
    """Turns of seats in the reverse order of their forward."""

    turns: tuple[Turn, ...]
    last: bool = True
    """Nothing adds to these gradients afterwards (shared tables apart): they are rounded as they leave."""


@dataclass(frozen=True)
class Finish:
    """The end of the gradients: rows of tables are added, open sums rounded, the norm decided."""

    tables: tuple[int, ...] = ()


@dataclass(frozen=True)
class Updates:
    """Updates by themselves (a flush)."""


@dataclass(frozen=True)
class Spread:
    """Weights that were filled by shards, given to all ranks."""


Phase = Forward | Backward | Finish | Updates | Spread


@dataclass(frozen=True)
class Owed:
    """What earlier programs of a run have left to do."""

    pending: tuple[int, ...] = ()
    """Units whose update is due."""
    summed: tuple[int, ...] = ()
    """Units whose stored gradient holds an open fp32 sum."""
    unended: bool = False
    """Whether a step was decided and the end of its updates (`Placement.ending`) is to come."""
    left: tuple[tuple[str, str], ...] = ()
    """Values that the first updates read and that lie in slots, with those slots (`ahead.py`)."""


NOTHING = Owed()

CLOSING = ("drain.g", "square.g")
TERMS = dict.fromkeys(("backward", "scatter", "save.g"), "sum") | dict.fromkeys(CLOSING, "done")
"""What ops leave of a gradient, if they write one: terms to which others may come, or all of them."""


def graph_of(turn: Turn, unit: int, micro: int) -> tuple[str, ...]:
    """The place of a graph that is kept from forward to backward."""
    return (f"k{turn.call}.{unit}.{micro}@live",)


def build(spec: ModelSpec, placement: Placement, phases: tuple[Phase, ...], owed: Owed = NOTHING) -> Program:
    """The sequential program of `phases`.  Places are values on tiers; run `passes.compiled` on the result."""
    pending, unended = list(owed.pending), owed.unended or bool(owed.pending)
    held, left = dict(owed.left), leaves(spec, placement, phases)
    script = Script(
        spec, placement, pending, unended, held=set(held), staying=left, grads=dict.fromkeys(owed.summed, "sum")
    )
    for phase in phases:
        if isinstance(phase, Forward):
            for turn in phase.turns:
                script.forward(turn)
            script.depart()
        elif isinstance(phase, Backward):
            script.updates(tuple(script.pending))
            for index, turn in enumerate(phase.turns):
                later = {u for t in phase.turns[index + 1 :] for u in spec.seats[t.seat].units}
                script.backward(turn, later if phase.last else set(spec.seats[turn.seat].units))
        elif isinstance(phase, Finish):
            script.updates(tuple(script.pending))
            script.finish(phase.tables)
        elif isinstance(phase, Spread):
            for unit in range(len(spec.units)):
                script.spread(unit, filled=True)
        else:
            script.updates(tuple(script.pending))
    script.apply()
    script.fetch_ahead(one for one in fetched_ahead(spec, placement) if one.at("ahead") in left)
    return Program(tuple(script.ops), held=held, left=left)


def leaves(spec: ModelSpec, placement: Placement, phases: Sequence[Phase]) -> dict[str, str]:
    """What a program of these phases, if it ends with updates to come, leaves for the first of them, and its slots."""
    tables = next((phase.tables for phase in phases if isinstance(phase, Finish)), None)
    if placement.commit != "hold" or tables is None:
        return {}
    fetched = {one.at("ahead"): one.slot for one in fetched_ahead(spec, placement)}
    return fetched | {f"g{unit}@host": slot for unit, slot in stays(spec, placement, tables).items()}


@dataclass
class Script(Upkeep):
    """The ops so far, and what is known about gradients and inputs at this point of the order."""

    grads: dict[int, str] = field(default_factory=dict)
    """Per unit: `sum` while terms may still come, `done` once rounded."""
    staying: Mapping[str, str] = field(default_factory=dict)
    """What has to be in slots at the end (`leaves`)."""
    leaving: list[tuple[Turn, int, int]] = field(default_factory=list)
    """Inputs (turn, unit, micro-batch) that were computed from and are still live."""

    def weights(self, unit: int) -> tuple[str, ...]:
        """Bring a unit's weights to where a block computes, from the slot they were updated in or from home."""
        route, owner = self.placement.weight_route, self.spec.units[unit]
        at = route.index("whole") if "whole" in route else len(route)
        if held := self.updated.pop(unit, ()):
            places = self.along(route[1:at], "w", f"w{unit}", held, unit=unit, nbytes=owner.weight_bytes)
        else:
            places = self.carry("w", route[:at], unit, owner.weight_bytes)
        if at == len(route):
            return places
        whole, nbytes = (f"w{unit}@whole",), owner.whole_bytes
        self.emit("net", "gather.w", reads=places, writes=whole, unit=unit, nbytes=self.from_others(nbytes))
        return self.along(route[at:], "w", f"w{unit}", whole, unit=unit, nbytes=nbytes)

    def forward(self, turn: Turn) -> None:
        """A turn forward, behind the updates it needs: a table is looked up at home, other weights are brought.

        Inputs or graphs of graded turns stay.
        """
        self.phase = "forward"
        seat = self.spec.seats[turn.seat]
        if seat.kind == "table":
            self.updates(seat.units)
            self.depart()
            tier = self.placement.parameters
            places = tuple(p for u in seat.units for p in self.home("w", u, tier))
            self.emit("device", "forward", reads=places, seat=turn.seat, call=turn.call)
            return
        for unit in seat.units:
            self.updates((unit,), in_slot=self.placement.parameters == "disk")
            self.depart()
            places = self.weights(unit)
            for micro in range(turn.micros):
                saves = turn.graded and seat.kind != "head" and turn.kept != GRAPH
                left = graph_of(turn, unit, micro) if turn.kept == GRAPH else ()
                left += self.products_of(turn, micro) + (f"x{turn.call}.{micro}@live",) * saves
                self.compute("forward", turn, unit, micro, places, left)
                if saves:
                    self.keep_products(turn, unit, micro)
                    self.leaving.append((turn, unit, micro))

    def compute(
        self, verb: str, turn: Turn, unit: int, micro: int, reads: tuple[str, ...], writes: tuple[str, ...]
    ) -> None:
        size = self.spec.units[unit].num_elements
        self.emit(
            "device", verb, reads=reads, writes=writes, seat=turn.seat, unit=unit, call=turn.call, micro=micro,
            nbytes=size,
        )  # fmt: skip

    def depart(self) -> None:
        """Send home the inputs of the turn before, behind the updates of the one to come: a lane that writes would
        else hold those up until the computation between them is done."""
        for turn, unit, micro in self.leaving:
            self.keep(turn, unit, micro)
        self.leaving.clear()

    def keep(self, turn: Turn, unit: int, micro: int) -> None:
        """Send the input of a micro-batch to its home."""
        name = f"x{turn.call}.{micro}"
        self.along(
            self.placement.saved_route, "x", name, (f"{name}@live",), seat=turn.seat, unit=unit, call=turn.call,
            micro=micro,
        )  # fmt: skip

    def products_of(self, turn: Turn, micro: int) -> tuple[str, ...]:
        """Where a forward puts the results of its products, if they are kept: a slot, where they go on from there."""
        away = len(self.placement.products_route) > 1
        return (f"y{turn.call}.{micro}@{'compute' if away else 'live'}",) * (turn.kept == PRODUCTS)

    def keep_products(self, turn: Turn, unit: int, micro: int) -> None:
        """Send them to their home, and at once, since their slot is soon needed again."""
        route, name = self.placement.products_route, f"y{turn.call}.{micro}"
        if places := self.products_of(turn, micro):
            self.along(route, "y", name, places, seat=turn.seat, unit=unit, call=turn.call, micro=micro)

    def left(self, turn: Turn, unit: int, micro: int) -> tuple[str, ...]:
        """Bring back what the forward left: a graph, or the saved input and before it results of products; returns the
        places to read it from."""
        if turn.kept == GRAPH:
            return graph_of(turn, unit, micro)
        name, home = f"x{turn.call}.{micro}", self.placement.saved_route[-1]
        where = {"seat": turn.seat, "unit": unit, "call": turn.call, "micro": micro}
        products, route = self.products_of(turn, micro), self.placement.products_route
        if products and len(route) > 1:
            kept = (f"y{turn.call}.{micro}@{route[-1]}",)
            products = self.along(tuple(reversed(route)), "y", f"y{turn.call}.{micro}", kept, **where)
        if home == "compute":
            return (*products, f"{name}@live")
        return products + self.along(self.placement.restored_route, "x", name, (f"{name}@{home}",), **where)

    def backward(self, turn: Turn, more: set[int]) -> None:
        """A turn backward; `more`: units whose gradient gets further terms from later turns."""
        self.phase = "backward"
        seat = self.spec.seats[turn.seat]
        if seat.kind == "table":
            self.emit("device", "backward", seat=turn.seat, call=turn.call)
            return
        for unit in seat.units:
            places = self.weights(unit)
            holds = seat.kind == "head" or unit in self.grads
            slope = self.open_gradient(unit, zeroed=seat.kind == "head")
            for micro in range(turn.micros):
                saved = self.left(turn, unit, micro) if turn.kept or seat.kind != "head" else ()
                self.apply()
                summed = slope * (holds or micro > 0)
                self.compute("backward", turn, unit, micro, (*places, *saved, *summed), slope)
            held = (f"w{unit}@host",) if self.placement.parameters == "disk" else ()
            self.close_gradient(unit, unit not in more and unit not in self.spec.table_units, held)

    def open_gradient(self, unit: int, zeroed: bool = True) -> tuple[str, ...]:
        """Where a gradient is made: it holds the sum so far, or else zeros if it has to be `zeroed`."""
        if not self.spec.units[unit].trainable:
            return ()
        if self.grads.get(unit) == "done":
            raise RuntimeError(
                f"{self.spec.units[unit].name}: a second backward in a step whose gradients were already rounded"
            )
        slope = self.slope(unit)
        nbytes = self.spec.units[unit].slope_bytes
        if self.grads.get(unit) == "sum":
            route = tuple(reversed(self.placement.grad_route))
            self.along(route, "g", f"g{unit}", self.sums(unit, route[0]), unit=unit, nbytes=nbytes)
            if not self.placement.share.sums_whole:
                self.ops[-1] = self.ops[-1]._replace(verb="seed.g")
        elif zeroed:
            self.emit("h2d", "zero.g", writes=slope, unit=unit, nbytes=nbytes)
        return slope

    def slope(self, unit: int) -> tuple[str, ...]:
        """Places a gradient is made at: a slot, or its home."""
        first, *onward = self.placement.grad_route
        return (f"g{unit}@{first}",) if onward else self.sums(unit, first)

    def sums(self, unit: int, tier: str) -> tuple[str, ...]:
        """Places of a gradient at rest that further terms may come to."""
        return tuple(f"g{unit}.{k}@{tier}" for k in self.spec.units[unit].summed_parts)

    def over_ranks(self, unit: int, last: bool) -> tuple[str, ...]:
        """The gradient over all ranks, of which each gets its shard; a sum that is kept whole, when it is complete."""
        places, share = self.slope(unit), self.placement.share
        if share.ranks == 1 or (share.sums_whole and not last):
            return places
        nbytes = self.from_others(self.spec.units[unit].slope_bytes)
        if share.shards == 1:
            self.emit("net", "sum.g", reads=places, writes=places, unit=unit, nbytes=2 * nbytes)
            return places
        target = (f"g{unit}@shard",)
        self.emit("net", "scatter.g", reads=places, writes=target, unit=unit, nbytes=nbytes)
        return target

    def close_gradient(self, unit: int, last: bool, held: tuple[str, ...] = ()) -> None:
        """Send a gradient home: rounded once and measured if `last`, else as the fp32 sum it is.

        `held`: the host slot that has the unit's weights.
        """
        if not self.spec.units[unit].trainable:
            return
        if not last and not accumulates(self.spec, self.placement, unit):
            raise RuntimeError(f"{self.spec.units[unit].name}: several backward turns in a step planned for one")
        places = self.over_ranks(unit, last)
        if last and self.placement.direct:
            nbytes = self.grad_bytes(unit, last) // 2  # read, and not written
            self.emit("d2h", "square.g", reads=places, writes=places, unit=unit, nbytes=nbytes)
        stays = last and self.stays(unit)
        route = self.placement.grad_route
        route = tuple(dict.fromkeys((route[0], "host"))) if stays else route
        for tier, onward in pairwise(route):
            lane, verb = HOPS[tier, onward]
            final = onward == route[-1] and not stays
            home = self.home("g", unit, onward) if last else self.sums(unit, onward)
            target = home if final else (f"g{unit}@{onward}",)
            verb = f"{verb}.g" if tier != "compute" else ("drain.g" if last else "save.g")
            verb += ".sum" if tier != "compute" and not last else ""
            self.emit(lane, verb, reads=places, writes=target, unit=unit, nbytes=self.grad_bytes(unit, last))
            places = target
        self.grads[unit] = "done" if last else "sum"
        self.arrived += [(unit, held)] * (last and self.placement.commit != "hold")
        if self.placement.slots == 1:
            self.apply()  # the one slot of gradients is needed again

    def stays(self, unit: int) -> bool:
        """Whether a gradient, once whole, goes no further than to a host slot: its update takes it from there."""
        return self.placement.commit == "in_place" or f"g{unit}@host" in self.staying

    def grad_bytes(self, unit: int, last: bool) -> int:
        """Bytes a gradient moves on this rank: in each section's own dtype once rounded, else fp32."""
        owner = self.spec.units[unit]
        moving = (owner.parts[k] for k in (owner.trained_parts if last else owner.summed_parts))
        return sum(p.num_elements * (ITEM_BYTES[p.dtype] if last else 4) for p in moving)

    def finish(self, tables: tuple[int, ...]) -> None:
        """Add the rows of looked-up tables, round what is still an open sum, then the norm over all gradients."""
        self.phase = "finish"
        self.apply()
        looked_up = scattered(self.spec, tables)
        for unit in sorted(u for u, state in self.grads.items() if state == "sum" and u not in dict(looked_up)):
            self.open_gradient(unit)
            self.close_gradient(unit, True)
            self.apply()
        for unit, seat in looked_up:
            slope = self.open_gradient(unit)
            self.compute("scatter", Turn(seat, -1), unit, -1, slope, slope)
            self.close_gradient(unit, True)
            self.apply()
        self.emit("device", "norm", reads=self.decided_by(), writes=(NORM,))

    def decided_by(self) -> tuple[str, ...]:
        """Places from which the norm is known: all gradients at home, or all weights already updated."""
        if self.placement.commit == "in_place":
            return tuple(p for u in self.grads for p in self.home("w", u, self.placement.parameters))
        homes = (self.home("g", u, self.placement.gradients) for u in self.grads if not self.stays(u))
        return (*chain.from_iterable(homes), *(f"g{u}@host" for u in self.grads if self.stays(u)))
