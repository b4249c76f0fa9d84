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

from dataclasses import dataclass, field
from itertools import pairwise

from offloadz.plan.ops import Op, Program
from offloadz.plan.placement import Placement, accumulates
from offloadz.plan.spec import ITEM_BYTES, ModelSpec


@dataclass(frozen=True)
class Turn:
    """One call of one seat's forward, and later of its backward."""

    seat: int
    call: int
    """Number of the call within the step: what saved inputs are kept under."""
    micros: int = 1
    graded: bool = True
    """Whether a backward will come: then the input is saved."""


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


NORM = "norm@live"
"""The global norm of a step: decided once all gradients are home, read by every update."""

Phase = Forward | Backward | Finish | Updates


def build(
    spec: ModelSpec,
    placement: Placement,
    phases: tuple[Phase, ...],
    pending: tuple[int, ...] = (),
    summed: tuple[int, ...] = (),
    unended: bool = False,
) -> Program:
    """The sequential program of `phases`.

    `pending`: units whose update is due from an earlier step.  `summed`: units whose stored gradient already holds an
    open fp32 sum.  `unended`: an earlier step was decided, and the end of its updates (`Placement.ending`) is to come.
    Places are values on tiers; run `passes.compiled` on the result.
    """
    script = Script(spec, placement, list(pending), dict.fromkeys(summed, "sum"), unended=unended or bool(pending))
    for phase in phases:
        if isinstance(phase, Forward):
            for turn in phase.turns:
                script.updates(spec.seats[turn.seat].units)
                script.depart()
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
        else:
            script.updates(tuple(script.pending))
    script.apply()
    return Program(tuple(script.ops))


HOPS = {
    ("disk", "host"): ("disk_read", "load"),
    ("host", "disk"): ("disk_write", "store"),
    ("host", "compute"): ("h2d", "fetch"),
    ("device", "compute"): ("h2d", "fetch"),
    ("device", "host"): ("d2h", "lower"),
    ("host", "device"): ("h2d", "raise"),
    ("compute", "host"): ("d2h", "save"),
    ("compute", "device"): ("d2h", "save"),
}
"""Lane and verb of each step of a route."""


@dataclass
class Script:
    """The ops so far, and what is known about updates and gradients at this point of the order."""

    spec: ModelSpec
    placement: Placement
    pending: list[int]
    grads: dict[int, str]
    """Per unit: `sum` while terms may still come, `done` once rounded."""
    ops: list[Op] = field(default_factory=list)
    phase: str = "forward"
    arrived: list[int] = field(default_factory=list)
    """Units whose gradient has just been rounded, to be updated at once."""
    unended: bool = False
    """Whether behind the last of `pending` the step they belong to is ended."""
    leaving: list[tuple[Turn, int, int]] = field(default_factory=list)
    """Inputs (turn, unit, micro-batch) that were computed from and are still live."""

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
            self.emit(lane, f"{verb}.{kind}", reads=places, writes=target, **fields)
            places = target
        return places

    def home(self, kind: str, unit: int, tier: str, part: int = -1) -> tuple[str, ...]:
        """Places of a value at rest: one per part, so that an update of one part holds up nobody else."""
        stored = {"p": "w", "h": "g"}.get(kind, kind)
        owner = self.spec.units[unit]
        every = owner.trained_parts if stored in "gs" else range(len(owner.parts))
        return tuple(f"{stored}{unit}.{k}@{tier}" for k in ([part] if part >= 0 else every))

    def weights(self, unit: int) -> tuple[str, ...]:
        return self.carry("w", self.placement.weight_route, unit, self.spec.units[unit].weight_bytes)

    def forward(self, turn: Turn) -> None:
        """A turn forward: a table is looked up at home, other weights are brought; inputs of graded turns are saved."""
        self.phase = "forward"
        seat = self.spec.seats[turn.seat]
        if seat.kind == "table":
            tier = self.placement.parameters
            places = tuple(p for u in seat.units for p in self.home("w", u, tier))
            self.emit("device", "forward", reads=places, seat=turn.seat, call=turn.call)
            return
        for unit in seat.units:
            places = self.weights(unit)
            for micro in range(turn.micros):
                saves = turn.graded and seat.kind != "head"
                self.compute("forward", turn, unit, micro, places, (f"x{turn.call}.{micro}@live",) if saves else ())
                if saves:
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

    def kept(self, turn: Turn, unit: int, micro: int) -> tuple[str, ...]:
        """Bring the saved input back; returns the places to read it from."""
        name, home = f"x{turn.call}.{micro}", self.placement.saved_route[-1]
        if home == "compute":
            return (f"{name}@live",)
        return self.along(
            self.placement.restored_route, "x", name, (f"{name}@{home}",), seat=turn.seat, unit=unit, call=turn.call,
            micro=micro,
        )  # fmt: skip

    def backward(self, turn: Turn, more: set[int]) -> None:
        """A turn backward; `more`: units whose gradient gets further terms from later turns."""
        self.phase = "backward"
        seat = self.spec.seats[turn.seat]
        if seat.kind == "table":
            self.emit("device", "backward", seat=turn.seat, call=turn.call)
            return
        for unit in seat.units:
            places = self.weights(unit)
            slope = self.open_gradient(unit)
            for micro in range(turn.micros):
                saved = self.kept(turn, unit, micro) if seat.kind != "head" else ()
                self.apply()
                self.compute("backward", turn, unit, micro, (*places, *saved, *slope), slope)
            self.close_gradient(unit, unit not in more and unit not in self.spec.table_units)

    def open_gradient(self, unit: int) -> tuple[str, ...]:
        """A gradient slot that holds zeros or the sum so far."""
        if not self.spec.units[unit].trainable:
            return ()
        if self.grads.get(unit) == "done":
            raise RuntimeError(
                f"{self.spec.units[unit].name}: a second backward in a step whose gradients were already rounded"
            )
        slope = (f"g{unit}@compute",)
        nbytes = self.spec.units[unit].slope_bytes
        if self.grads.get(unit) == "sum":
            self.carry("g", tuple(reversed(self.placement.grad_route)), unit, nbytes)
        else:
            self.emit("h2d", "zero.g", writes=slope, unit=unit, nbytes=nbytes)
        return slope

    def close_gradient(self, unit: int, last: bool) -> None:
        """Send a gradient home: rounded once and measured if `last`, else as the fp32 sum it is."""
        if not self.spec.units[unit].trainable:
            return
        if not last and not accumulates(self.spec, self.placement, unit):
            raise RuntimeError(f"{self.spec.units[unit].name}: several backward turns in a step planned for one")
        places: tuple[str, ...] = (f"g{unit}@compute",)
        in_place = last and self.placement.commit == "in_place"
        route = ("compute", "host") if in_place else self.placement.grad_route
        for tier, onward in pairwise(route):
            lane, verb = HOPS[tier, onward]
            final = onward == route[-1] and not in_place
            target = self.home("g", unit, onward) if final else (f"g{unit}@{onward}",)
            verb = f"{verb}.g" if tier != "compute" else ("drain.g" if last else "save.g")
            verb += ".sum" if tier != "compute" and not last else ""
            self.emit(lane, verb, reads=places, writes=target, unit=unit, nbytes=self.grad_bytes(unit, last))
            places = target
        self.grads[unit] = "done" if last else "sum"
        self.arrived += [unit] * (last and self.placement.commit != "hold")
        if self.placement.slots == 1:
            self.apply()  # the one slot of gradients is needed again

    def grad_bytes(self, unit: int, last: bool) -> int:
        """Bytes a gradient moves: in each section's own dtype once rounded, else fp32."""
        trained = (s for s in self.spec.units[unit].sections if s.trainable)
        return sum(s.num_elements * (ITEM_BYTES[s.dtype] if last else 4) for s in trained)

    def finish(self, tables: tuple[int, ...]) -> None:
        """Add the rows of looked-up tables, round what is still an open sum, then the norm over all gradients."""
        self.phase = "finish"
        self.apply()
        for seat in tables:
            for unit in self.spec.seats[seat].units:
                if not self.spec.units[unit].trainable:
                    continue
                slope = self.open_gradient(unit)
                self.compute("scatter", Turn(seat, -1), unit, -1, slope, slope)
                self.close_gradient(unit, True)
                self.apply()
        for unit in sorted(u for u, state in self.grads.items() if state == "sum"):
            self.open_gradient(unit)
            self.close_gradient(unit, True)
            self.apply()
        self.emit("device", "norm", reads=self.decided_by(), writes=(NORM,))

    def decided_by(self) -> tuple[str, ...]:
        """Places from which the norm is known: all gradients at home, or all weights already updated."""
        if self.placement.commit == "in_place":
            return tuple(p for u in self.grads for p in self.home("w", u, self.placement.parameters))
        return tuple(p for u in self.grads for p in self.home("g", u, self.placement.gradients))

    def apply(self) -> None:
        """Update what has arrived (nothing, where gradients are held)."""
        phase, self.phase = self.phase, "arrival"
        for unit in self.arrived:
            self.arrival(unit)
        self.arrived.clear()
        self.phase = phase

    def arrival(self, unit: int) -> None:
        """Update a unit in place or, with shadow, into its spare; of weights in memory that is a whole second home."""
        owner, routes = self.spec.units[unit], self.placement
        spare = routes.commit == "shadow"
        slot = (f"g{unit}@host",) if not spare or routes.gradients == "disk" else ()
        for part, cut in enumerate(owner.parts):
            if part in owner.trained_parts:
                self.update(unit, part, slot, spare=spare)
            elif spare and routes.parameters != "disk":
                how = ("cpu", "copy") if len(routes.part_route) == 1 else ("d2h", "lower")
                self.copied("p", self.home("p", unit, routes.parameters, part), unit, part, cut.weight_bytes, how)

    def updates(self, units: tuple[int, ...]) -> None:
        """The updates of `units` that are due; behind a step's last, its end (it follows all stores by its lane)."""
        phase, self.phase = self.phase, "update"
        for unit in units:
            if unit in self.pending:
                self.pending.remove(unit)
                for part in self.spec.units[unit].trained_parts:
                    self.update(unit, part, known=(NORM,))
        if self.unended and not self.pending:
            self.unended = False
            if self.placement.ending:
                self.emit("disk_write", self.placement.ending)
        self.phase = phase

    def update(
        self, unit: int, part: int, slot: tuple[str, ...] = (), known: tuple[str, ...] = (), spare: bool = False
    ) -> None:
        """Read a part's state, weights and gradient; update; write state and weights back, or to the spare.

        `slot`: where the whole unit's gradient lies, if it need not be brought.  `known`: what is waited for besides.
        """
        owner, routes = self.spec.units[unit].parts[part], self.placement
        state_route = routes.state_route if owner.state_bytes else ("host",)  # nothing to bring: sgd without momentum
        moved = (("s", state_route, owner.state_bytes), ("p", routes.part_route, owner.weight_bytes))
        brought = [self.carry(kind, route, unit, nbytes, part) for kind, route, nbytes in moved]
        if spare:
            brought = [
                self.copied(kind, places, unit, part, nbytes) if len(route) == 1 and nbytes else places
                for (kind, route, nbytes), places in zip(moved, brought, strict=True)
            ]
        both = tuple(place for places in brought for place in places)
        grad = slot or self.carry("h", routes.grad_part_route, unit, owner.weight_bytes, part)
        verb = "update.g" if slot else "update"
        self.emit(
            "cpu", verb, reads=(*grad, *both, *known), writes=both, unit=unit, part=part, nbytes=owner.num_elements
        )
        for (kind, route, nbytes), places in zip(moved, brought, strict=True):
            if len(route) > 1:
                lane, verb = HOPS[route[1], route[0]]
                verb = "spare" if spare and route[0] == "disk" else verb
                target = self.home(kind, unit, {"disk": "next"}.get(route[0], "spare") if spare else route[0], part)
                self.emit(lane, f"{verb}.{kind}", reads=places, writes=target, unit=unit, part=part, nbytes=nbytes)

    def copied(
        self, kind: str, places: tuple[str, ...], unit: int, part: int, nbytes: int,
        how: tuple[str, str] = ("cpu", "copy"),
    ) -> tuple[str, ...]:  # fmt: skip
        """Copy a part in memory to its spare, by a lane and verb of that memory; returns the place there."""
        target = (f"{places[0].partition('@')[0]}@spare",)
        self.emit(how[0], f"{how[1]}.{kind}", reads=places, writes=target, unit=unit, part=part, nbytes=nbytes)
        return target
