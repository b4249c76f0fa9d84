"""What a step takes at least, from bytes and rates alone: which candidates are not worth a walk.

Forwards and backwards of sweeps follow each other, each at least as long as the work of its busiest lane, or of its
drive; updates belong to the first forward (hold) or to the last backward (shadow, in place).  With one slot what a
computation reads from the bus is brought in turn with it, and what it gives leaves so.  Left to others: the time
itself (`estimate.py`).  The trade-off: lanes run ahead a little wherever one ends, so all of them together count as
shorter by what lies in slots at each such turn; where there is one sweep by no more than a twentieth.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from math import inf
from typing import NamedTuple

from offloadz.plan.ahead import fetched_ahead, staying_bytes
from offloadz.plan.alike import once, seats_alike, unit_kinds
from offloadz.plan.footprint import Batch, num_saved, saved_bytes
from offloadz.plan.left import GRAPH, PRODUCTS, left_by
from offloadz.plan.machine import Machine
from offloadz.plan.ops import Op
from offloadz.plan.placement import Placement, slot_bytes
from offloadz.plan.predict import Costs, inside
from offloadz.plan.products import micro_products_bytes, products_bytes
from offloadz.plan.shared import DISK_PASSES, Sharing
from offloadz.plan.spec import ModelSpec

APART = 0.95
"""Share of forward and backward that certainly follow each other."""

SUM_BYTES = 4
"""Of an element of a gradient to which more is added."""


class Work(NamedTuple):
    """Bytes by lane, and parameters that are updated."""

    disk_read: int = 0
    disk_write: int = 0
    h2d: int = 0
    d2h: int = 0
    cpu: int = 0

    def plus(self, *others: Work) -> Work:
        return Work(*map(sum, zip(self, *others, strict=True)))


class Phase(NamedTuple):
    """Forwards or backwards that are alike: which, how many of a step, and what each moves."""

    verb: str
    times: int
    work: Work

    @property
    def whole(self) -> Work:
        """Of all of them."""
        return Work(*[self.times * size for size in self.work])


def least_s(spec: ModelSpec, placement: Placement, batch: Batch, machine: Machine) -> float:
    """Seconds that no step is shorter than."""
    costs, phases = Costs(spec, placement, batch, machine), phases_of(spec, placement, batch)
    each_s, whole_s, both = [], 0.0, Sharing(costs).both
    computed = {verb: _device_s(spec, placement, batch, costs, verb) / batch.sweeps for verb in ("forward", "backward")}
    for phase in phases:
        device_s = computed[phase.verb]
        alone = _seconds(phase.work, device_s, costs)
        if placement.slots == 1:
            alone["turns"] = device_s + max(alone["h2d"], alone["d2h"] * (phase.verb == "backward"))
        whole_s += phase.times * max(_drive_s(alone, both), *alone.values())
        each_s.append([phase.times * seconds for seconds in alone.values()])
    together = map(sum, zip(*each_s, strict=True))
    turns, whole_s = 2 * batch.sweeps - 1, whole_s - _fetched_s(spec, placement, costs)
    apart_s = whole_s - turns * _ahead_s(spec, placement, batch, costs)
    least = max(APART * whole_s, apart_s) if turns == 1 else apart_s
    return max(least, *together, *_shared(Work().plus(*[phase.whole for phase in phases]), costs))


def _ahead_s(spec: ModelSpec, placement: Placement, batch: Batch, costs: Costs) -> float:
    """Seconds that transfers may be ahead of the computation, or behind it, where a forward or backward ends: what
    slots hold, at the rate of the slowest."""
    pools = slot_bytes(
        spec, placement, saved_bytes(spec, placement, batch), micro_products_bytes(spec, placement, batch)
    )
    lanes = ("h2d", "d2h", *("disk_read", "disk_write") * any(pool.startswith("host.") for pool in pools))
    return placement.slots * sum(pools.values()) / min(costs.rates[lane] for lane in lanes)


def _fetched_s(spec: ModelSpec, placement: Placement, costs: Costs) -> float:
    """Seconds of what a step reads for the next one's first updates, and a forward not."""
    fetched = fetched_ahead(spec, placement) if placement.commit == "hold" else ()
    return sum(one.nbytes for one in fetched) / costs.rates["disk_read"] if fetched else 0.0


def _drive_s(alone: Mapping[str, float], both: float) -> float:
    """Seconds of a drive that reads and writes at once for as long as it can, as far as that is any faster; `both`:
    what is then left of the speed of each."""
    read_s, write_s = alone["disk_read"], alone["disk_write"]
    return read_s + write_s - max(0.0, 2 - 1 / both) * min(read_s, write_s)


def _shared(work: Work, costs: Costs) -> Iterator[float]:
    """Seconds of drive and host memory for all that passes them, as far as it is known what they give to several."""
    if "disk_both" in costs.rates:
        yield (work.disk_read + work.disk_write) / costs.rates["disk_both"]
    if "memory_shared" in costs.rates:
        yield _memory_bytes(work, costs) / costs.rates["memory_shared"]


def _memory_bytes(work: Work, costs: Costs) -> float:
    """Bytes that work reads and writes in host memory."""
    copied_bytes = (work.h2d + work.d2h) * (2 if costs.placement.unified else 1)
    return (work.disk_read + work.disk_write) * DISK_PASSES + work.cpu * costs.moved_bytes + copied_bytes


def _most_memory(costs: Costs) -> float:
    """Bytes/s of host memory that are never passed for a while: one lane alone may have more than several together."""
    rates, passes = costs.rates, 2 if costs.placement.unified else 1
    if "memory_shared" not in rates:
        return inf
    alone = (costs.moved_bytes / costs.update_s, passes * rates["h2d"], passes * rates["d2h"])
    drive = (DISK_PASSES * rates["disk_read"], DISK_PASSES * rates["disk_write"])
    return max(rates["memory_shared"], *alone, *drive)


def computed_s(spec: ModelSpec, placement: Placement, batch: Batch, machine: Machine) -> float:
    """Seconds of the computation of a step."""
    costs = Costs(spec, placement, batch, machine)
    return sum(_device_s(spec, placement, batch, costs, verb) for verb in ("forward", "backward"))


def written_bytes(spec: ModelSpec, placement: Placement, batch: Batch) -> int:
    """Bytes of a step that go to the drive."""
    return sum(phase.whole.disk_write for phase in phases_of(spec, placement, batch))


def phases_of(spec: ModelSpec, placement: Placement, batch: Batch) -> list[Phase]:
    """What the forwards and backwards of a step move, without what depends on their order."""
    passing = inside(placement)
    forward, backward = _each(spec, placement, batch, passing)
    updates, rounded = _updates(spec, placement, passing)
    held, more = placement.commit == "hold", batch.sweeps - 1
    first = Phase("forward", 1, forward.plus(updates) if held else forward)
    last = backward.plus(rounded) if held else backward.plus(rounded, updates)
    if not more:
        return [first, Phase("backward", 1, last)]
    opened, added = _sums(spec, placement, passing)
    between = Phase("backward", more - 1, backward.plus(added, opened))
    rest = [Phase("forward", more, forward), between, Phase("backward", 1, last.plus(added))]
    return [first, Phase("backward", 1, backward.plus(opened)), *rest]


def _updates(spec: ModelSpec, placement: Placement, passing: Collection[str]) -> tuple[Work, Work]:
    """What updates move, and gradients on their way home once they are whole."""
    trained, state, gradients, weights = _sizes(spec)
    state, weights = state * (placement.optimizer == "disk"), weights * (placement.parameters == "disk")
    stay = staying_bytes(spec, placement) if placement.commit == "hold" else 0
    stored = (gradients - stay) * (placement.gradients == "disk" and placement.commit != "in_place")
    moved = ("drain.g" not in passing) * (gradients // 2 if placement.direct else gradients)  # direct: read alone
    read = state + (gradients - stay) * (placement.gradients == "disk" and placement.commit == "hold")
    return Work(read, state + weights, cpu=trained), Work(disk_write=stored, d2h=moved)


def _sums(spec: ModelSpec, placement: Placement, passing: Collection[str]) -> tuple[Work, Work]:
    """What gradients to which more is added move: on their way home, and back."""
    sums = _sizes(spec)[0] * SUM_BYTES
    stored, moved = (placement.gradients == "disk") * sums, (not placement.direct) * sums
    opened = Work(disk_write=stored, d2h=("drain.g" not in passing) * moved)
    return opened, Work(disk_read=stored, h2d=("seed.g" not in passing) * moved)


def _each(spec: ModelSpec, placement: Placement, batch: Batch, passing: Collection[str]) -> tuple[Work, Work]:
    """What every forward and every backward moves."""
    bus = "compute" in placement.weight_route and "fetch.w" not in passing
    forward, backward = (
        Work((placement.parameters == "disk") * fetched, h2d=bus * fetched) for fetched in _fetched(spec)
    )
    saved = num_saved(spec, placement.kept) * batch.num_micros * saved_bytes(spec, placement, batch)
    stored, left = (placement.activations == "disk") * saved, 0
    if placement.activations != "device" and not placement.unified:
        left = saved + products_bytes(spec, placement, batch)
    return forward.plus(Work(disk_write=stored, d2h=left)), backward.plus(Work(stored, h2d=left))


@once
def _sizes(spec: ModelSpec) -> tuple[int, int, int, int]:
    """Of this rank's trained parts: elements, bytes of state, of rounded gradients, of weights."""
    found = [0, 0, 0, 0]
    for kind in unit_kinds(spec):
        for part in (kind.unit.parts[k] for k in kind.unit.trained_parts):
            each = (part.num_elements, part.state_bytes, part.weight_bytes, part.weight_bytes)
            found = [total + kind.count * size for total, size in zip(found, each, strict=True)]
    return found[0], found[1], found[2], found[3]


@once
def _fetched(spec: ModelSpec) -> tuple[int, int]:
    """Bytes of weights that a forward and a backward bring to compute with; rows of a table are looked up at home."""

    def fetched(seats: Iterable[int]) -> int:
        alike = (
            (spec.seats[seat], count) for seat, count in seats_alike(spec, seats) if spec.seats[seat].kind != "table"
        )
        return sum(count * spec.units[u].weight_bytes for seat, count in alike for u in seat.units)

    return fetched(range(len(spec.seats))), fetched(spec.unfolding_seats)


def _seconds(work: Work, device_s: float, costs: Costs) -> dict[str, float]:
    """Seconds of each lane, and of what they share, with nothing beside them."""
    rates, update_s = costs.rates, work.cpu * costs.update_s
    return {
        "disk_read": work.disk_read / rates["disk_read"],
        "disk_write": work.disk_write / rates["disk_write"],
        "h2d": work.h2d / rates["h2d"],
        "d2h": work.d2h / rates["d2h"],
        "cpu": update_s,
        "device": device_s + update_s * costs.placement.unified,  # which share the cores
        "memory": _memory_bytes(work, costs) / _most_memory(costs),
    }


def _device_s(spec: ModelSpec, placement: Placement, batch: Batch, costs: Costs, verb: str) -> float:
    """Seconds of the computation itself."""
    key = (
        "device_s",
        verb,
        placement.kept,
        placement.cheap,
        placement.unified,
        batch,
        costs.token_s,
        costs.pass_s,
        costs.fast,
    )
    if key not in spec.memo:
        spec.memo[key] = _computed_s(spec, placement, batch, costs, verb)
    found: float = spec.memo[key]
    return found


def _computed_s(spec: ModelSpec, placement: Placement, batch: Batch, costs: Costs, verb: str) -> float:
    seats = range(len(spec.seats)) if verb == "forward" else spec.unfolding_seats
    left = left_by(spec, placement.kept, placement.cheap) if verb == "backward" else {}
    total = 0.0
    for reads, kind in (((), ""), (("k",), GRAPH), (("y",), PRODUCTS)):
        some = [seat for seat in seats if left.get(seat, "") == kind]
        for seat, count in seats_alike(spec, some):
            units = spec.seats[seat].units if spec.seats[seat].kind != "table" else ()
            ops = (Op("device", verb, verb, reads, (), seat, u, nbytes=spec.units[u].num_elements) for u in units)
            total += count * sum(costs(op) for op in ops)
    return total * batch.num_micros * batch.sweeps
