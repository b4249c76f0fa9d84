"""The time of a step, by walking its own program over lanes that answer with times.

A step is walked from idle lanes to idle lanes, as a run does it: only then is it decided.  With hold its program begins
with the updates of the step before, which run under its forward.  Costs come from the rates of a `Machine`; ops that
run side by side slow each other down by what they share (`shared.py`).  The trade-off: rates that were not measured can
be off by a factor of two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from offloadz.plan.ahead import found, trained_tables
from offloadz.plan.alike import once
from offloadz.plan.beside import Queues, SharedLane, settled
from offloadz.plan.footprint import HEAD_CHUNK_TOKENS, Batch, saved_bytes
from offloadz.plan.left import GRAPH, PRODUCTS, left_by
from offloadz.plan.machine import Machine
from offloadz.plan.ops import LANES, Op, Program
from offloadz.plan.pace import program_of
from offloadz.plan.placement import Placement, accumulates
from offloadz.plan.products import again_bytes, product_token_bytes
from offloadz.plan.recipes import Recipe
from offloadz.plan.shared import Sharing, shared_s
from offloadz.plan.spec import ITEM_BYTES, PART_ELEMENTS, PIECE_BYTES, ModelSpec, Unit, aligned
from offloadz.plan.steps import Backward, Finish, Forward, Owed, Phase, Turn, leaves
from offloadz.plan.tempo import Steady, steady
from offloadz.plan.timeline import Timeline, from_virtual
from offloadz.plan.unread import unread_elements
from offloadz.plan.walk import simulate

MANY_TOKENS, FEW_TOKENS = 1024, 128
"""Tokens for which rates of a CPU's computation are told, and those of their `_few`: weights have to be read for any
number."""

DEVICE_TOKENS = 4096
"""Tokens for which rates of a GPU's computation are told; more are no faster, neither there nor on a CPU."""

PART_BYTES = 2 * PART_ELEMENTS
"""Length of the extents that rates ending in `_parts` are of."""

NET_RATE = 1.0e9
"""Bytes/s that come to a rank from the others of its machine, gloo over the loopback device (typical, unverified); with
GPUs their bus."""

LOGITS_BYTES = {"forward": 4 * 7, "backward": 4 * 11}
"""Bytes that a float32 logit moves through memory beside what its products read: forward it is written, read for the
highest, twice each for the difference and its exponential, and for the sum; backward the difference, its exponential
and the gradient are made likewise, put in their place (zeros and a copy), and read by both products.  On a CPU with
slow exponentials it takes longer."""

ATTENTION_BACK = 2.5
"""Products of attention's backward for each of its forward, which makes scores and mixes by them: scores again, and
four gradients."""

CORES_SHARE = 0.8
"""A lane that has this share of the work of all cores is what keeps them busy."""


@dataclass(frozen=True)
class Prediction:
    """A steady step: its program, its timeline and what follows from them."""

    program: Program
    lanes: Mapping[str, SharedLane]
    step_s: float
    busy_s: dict[str, float]
    """Seconds of work of each lane."""
    disk_read_bytes: int
    disk_written_bytes: int
    shared_s: dict[str, float] = field(default_factory=dict)
    """Least seconds of what several lanes share (`shared.py`)."""
    taken_s: dict[str, float] = field(default_factory=dict)
    """Seconds that each lane is busy, slowed down by what runs beside it: what a run measures."""

    @cached_property
    def timeline(self) -> Timeline:
        """Of the program."""
        return from_virtual(self.lanes)

    @property
    def bottleneck(self) -> str:
        """The lane, or what lanes share, that is busy longest; cores, where no lane alone has most of them."""
        busy = {**self.busy_s, **self.shared_s, "cores": CORES_SHARE * self.shared_s.get("cores", 0.0)}
        return max(busy, key=lambda name: busy[name])


def training_phases(spec: ModelSpec, sweeps: int, num_micros: int, kept: int = 0, cheap: int = 0) -> tuple[Phase, ...]:
    """The phases of one optimizer step: per sweep a forward and a backward, then the end of the gradients.

    `kept`: seats, the last ones, that keep their graph; `cheap`: before them, that keep results of products.
    """
    phases: list[Phase] = []
    lowest, left = spec.first_trained_seat, left_by(spec, kept, cheap)
    for sweep in range(sweeps):
        turns = []
        for seat, place in enumerate(spec.seats):
            micros = 1 if place.kind == "table" else num_micros
            turns.append(Turn(seat, sweep * len(spec.seats) + seat, micros, seat >= lowest, left.get(seat, "")))
        back = tuple(t for t in reversed(turns) if t.graded)
        phases += [Forward(tuple(turns)), Backward(back, last=sweep == sweeps - 1)]
    return (*phases, Finish(trained_tables(spec)))


def step_program(spec: ModelSpec, placement: Placement, batch: Batch) -> Program:
    """The compiled program of a steady step: every trained unit still has its update from the step before."""
    return walked_step(spec, placement, batch).program


def walked_step(spec: ModelSpec, placement: Placement, batch: Batch) -> Steady:
    """The same, with what a walk over it submits."""
    plain = spec.with_recipe(spec.recipe.plain)
    step = _steady(plain, placement, batch.sweeps, batch.num_micros)
    if plain is spec:
        return step
    return replace(step, program=replace(step.program, ops=_stored(spec, step.program.ops)))


def _stored(spec: ModelSpec, ops: Sequence[Op]) -> tuple[Op, ...]:
    """Ops of the same program under this model's recipe: parts of the state have other bytes."""
    units = spec.units
    return tuple([op.moving(units[op.unit].parts[op.part].state_bytes) if op.verb.endswith(".s") else op for op in ops])


@once
def _steady(spec: ModelSpec, placement: Placement, sweeps: int, num_micros: int) -> Steady:
    """Remembered, since neither rates nor the length of rows change anything of it, and a recipe only bytes."""
    held = placement.commit == "hold"  # else a step leaves no update to the next
    pending = tuple(i for i, unit in enumerate(spec.units) if unit.trainable and held)
    phases = training_phases(spec, sweeps, num_micros, placement.kept, placement.cheap)
    left = found(leaves(spec, placement, phases))
    program = program_of(spec, placement, phases, Owed(pending, unended=True, left=left))
    queues = Queues(dict.fromkeys(op.lane for op in program.ops))  # in one order always: sums of seconds depend on it
    simulate(program, queues.by_name)
    return steady(spec, program, queues)


class Costs:
    """Seconds of an op on its lane.

    `spared`: share of the blocks that keep their graph where the program has none that does; each backward then counts
    as shorter by that share of a forward, each saved input as smaller.  `made`: share of the blocks that keep results
    of products where in the program all do.
    """

    def __init__(
        self,
        spec: ModelSpec,
        placement: Placement,
        batch: Batch,
        machine: Machine,
        spared: float = 0.0,
        made: float = 1.0,
    ) -> None:
        self.spec, self.placement, self.batch, self.spared, self.made = spec, placement, batch, spared, made
        net = NET_RATE if placement.unified else machine.rates["h2d"]  # no machine file tells it
        self.rates = {"net": net, **machine.rates}
        self.cores = machine.cores
        self.saved_bytes = saved_bytes(spec, placement, batch)
        self.product_bytes: dict[int, int] = {}
        """Per seat the bytes of its results of products for a micro-batch, as they are asked for."""
        rate, state = machine.update_rate(spec.recipe.state)  # of AdamW in a format; another is as fast as its bytes
        moved, known = spec.recipe.moved_bytes(placement.storage), Recipe(state).moved_bytes(placement.storage)
        self.moved_bytes, self.update_s = moved, moved / known / rate
        self.fast = self.rates.get("bandwidth", self.rates["memory"])
        """Bytes/s of the memory that the device computes from."""
        self.token_s, self.pass_s = self._flop_s()
        self.widening = 1 + (ITEM_BYTES[placement.compute] / ITEM_BYTES[placement.storage] if placement.widens else 1)
        self.inside = inside(placement)
        self.start_s = {lane: _start_s(self.rates, lane) for lane in ("disk_read", "disk_write")}

    def _flop_s(self) -> tuple[float, float]:
        """Seconds of an operation for each token and, whatever their number, once for each use of a weight: as few
        tokens were measured, else as long as it takes to read the weight."""
        rate, few = self.rates["device"], self.rates.get("device_few")
        tokens = MANY_TOKENS if self.placement.unified else DEVICE_TOKENS
        read_s = ITEM_BYTES[self.placement.compute] / 2 / self.fast  # for the two operations of a product
        pass_s = read_s if few is None else (1 / few - 1 / rate) / (1 / FEW_TOKENS - 1 / MANY_TOKENS)
        pass_s = min(max(pass_s, 0.0), tokens / rate)
        return 1 / rate - pass_s / tokens, pass_s

    def __call__(self, op: Op) -> float:
        if op.lane == "device":
            return self.device_s(op)
        if op.verb.startswith("copy."):
            return 2 * op.nbytes / self.rates["memory"]
        if op.lane == "cpu":
            return op.nbytes * self.update_s
        if op.verb in self.inside:
            return op.nbytes / self.fast
        if op.lane in self.start_s:  # a transfer for each extent
            coarse = 1 if op.verb.endswith(".x") else self.spec.units[op.unit].coarse  # parts taken together
            extents = max(len(op.reads), len(op.writes)) * coarse
            return self.nbytes(op) / self.rates[op.lane] + extents * self.start_s[op.lane]
        return self.nbytes(op) * (self.widening / 2 if op.verb == "fetch.w" else 1.0) / self.rates[op.lane]

    def nbytes(self, op: Op) -> int:
        """Bytes an op of a transfer lane moves; what a forward leaves has the size of a micro-batch."""
        if op.verb.endswith(".y"):
            return self.results_bytes(op.seat)
        return round(self.saved_bytes * (1 - self.spared)) if op.verb.endswith(".x") else op.nbytes

    def results_bytes(self, seat: int) -> int:
        """Bytes of the results that a seat keeps of a micro-batch."""
        if seat not in self.product_bytes:
            each = product_token_bytes(self.spec, seat, self.placement)
            self.product_bytes[seat] = int(self.made * self.batch.tokens_per_micro * each)
        return self.product_bytes[seat]

    def written_bytes(self, op: Op) -> int:
        """Bytes an op of the lane that writes puts on the drive, in whole pages, as the disk tier does.

        A rounded gradient may lie where its fp32 sum did and then ends a checksum piece instead of its extent.
        """
        if not op.verb.startswith("store.g"):
            return aligned(self.nbytes(op))
        unit, sums = self.spec.units[op.unit], accumulates(self.spec, self.placement, op.unit)
        total = 0
        open_sum = op.verb.endswith(".sum")
        for part in (unit.parts[k] for k in (unit.summed_parts if open_sum else unit.trained_parts)):
            room = part.num_elements * 4 if sums else part.weight_bytes
            whole = room if open_sum else min(aligned(part.weight_bytes, PIECE_BYTES), room)
            total += aligned(whole)
        return total

    def device_s(self, op: Op) -> float:
        """Seconds of a computation: 2 flop per weight and token forward, 6 in a backward that recomputes first (its
        forward but for a last product that nobody reads, the gradients of inputs and of weights), 4 in one through a
        kept graph, or through one whose products were kept, with what lies between them as it goes through memory; of
        a head, which takes a chunk of tokens at a time, with what becomes of its logits."""
        if op.verb not in ("forward", "backward") or op.unit < 0:
            return op.nbytes * 4 / self.fast
        tokens = self.batch.tokens_per_micro
        kind = self.spec.seats[op.seat].kind
        elements = 0 if kind == "module" else op.nbytes
        attention = self.batch.length * attended_size(self.spec) * 2 if kind == "block" else 0
        left, multiplied = _left(op), 1.0 * elements + attention
        if op.verb == "backward":
            multiplied += (1.0 + self.spec.units[op.unit].trainable) * elements + ATTENTION_BACK * attention
            spared = 1.0 if left == GRAPH else self.spared + self.made * (left == PRODUCTS)
            unread = 0 if self.placement.opaque else unread_elements(self.spec)[op.unit]
            multiplied -= spared * (elements + attention) + (1.0 - spared) * unread
        uses = max(1.0, tokens / (HEAD_CHUNK_TOKENS if kind == "head" else DEVICE_TOKENS))
        product_s = tokens * self.token_s + uses * self.pass_s
        return 2.0 * multiplied * product_s + tokens * self._between(op, kind, left) / self.fast

    def _between(self, op: Op, kind: str, left: str) -> float:
        """Bytes through memory, for one token, beside products: of logits, and of what is made again between those
        that were kept."""
        if kind == "head":
            return LOGITS_BYTES[op.verb] * num_words(self.spec.units[op.unit])
        if left != PRODUCTS:
            return 0.0
        return self.made * again_bytes(self.spec, op.seat, self.placement, self.batch)


def attended_size(spec: ModelSpec) -> int:
    """Elements of a token that attention compares, and mixes: those of all heads, which may be more than it has."""
    return spec.num_heads * spec.head_size or spec.hidden_size


def num_words(tile: Unit) -> int:
    """Logits of a token against a tile."""
    return sum(member.shape[0] for member in tile.sections[0].members)


def _left(op: Op) -> str:
    """What a backward has of its forward besides its input: a graph, results of products, or nothing."""
    if op.verb != "backward":
        return ""
    kinds = {place.removeprefix("compute.")[:1] for place in op.reads}
    return GRAPH if "k" in kinds else PRODUCTS if "y" in kinds else ""


def inside(placement: Placement) -> frozenset[str]:
    """Verbs of transfers that stay in the memory of a device of its own: nothing passes the bus, nor host memory."""
    weights = ("fetch.w",) if placement.parameters == "device" else ()
    gradients = ("drain.g", "save.g", "seed.g") if placement.gradients == "device" else ()
    return frozenset(() if placement.unified else ("zero.g", *weights, *gradients))


def _start_s(rates: Mapping[str, float], lane: str) -> float:
    """Seconds until a transfer is at its full rate, from what it reaches of extents of `PART_BYTES`."""
    short = rates.get(f"{lane}_parts", rates[lane])
    return max(0.0, PART_BYTES / short - PART_BYTES / rates[lane])


def predict(
    spec: ModelSpec, placement: Placement, batch: Batch, machine: Machine, spared: float = 0.0, made: float = 1.0
) -> Prediction:
    """Simulate a step, from idle lanes to idle lanes: only then is it decided, and the next one begun.

    `spared`, `made`: see `Costs`.
    """
    costs, step = Costs(spec, placement, batch, machine, spared, made), walked_step(spec, placement, batch)
    lanes, shared, step_s = simulated(step, costs)
    taken = dict.fromkeys(LANES, 0.0)
    taken |= {name: lane.taken_s for name, lane in lanes.items()}
    read = sum(step.each(lambda op: costs.nbytes(op) * (op.lane == "disk_read")))
    written = sum(step.each(lambda op: costs.written_bytes(op) if op.lane == "disk_write" else 0))
    busy = dict.fromkeys(LANES, 0.0) | {name: lane.work_s for name, lane in lanes.items()}
    return Prediction(step.program, lanes, step_s, busy, read, written, shared, taken)


def simulated(step: Steady, costs: Costs) -> tuple[Mapping[str, SharedLane], dict[str, float], float]:
    """What the lanes do in a step that was walked, the least seconds of what they share, and those of the step."""
    shared = shared_s(step.each, costs)
    lanes = settled(step.queues, step.program.ops, list(step.each(costs)), Sharing(costs).speeds)
    last_s = max((lane.ends_s[-1] for lane in lanes.values()), default=0.0)
    return lanes, shared, max(last_s, *shared.values(), 0.0)
