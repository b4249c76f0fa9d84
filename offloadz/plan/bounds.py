"""What a step takes at least, from bytes and rates alone: which candidates are not worth a walk.

Forward and backward follow each other, each at least as long as the work of its busiest lane, or of its drive; updates
belong to the one (hold) or the other (shadow, in place).  Left to others: the time itself (`estimate.py`).  The
trade-off: lanes run ahead a little at the turn from forward to backward, so both together count as shorter by what lies
in slots, and by no more than a twentieth.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from math import inf

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

Work = Counter[str]
"""Bytes by lane, and parameters of "cpu"."""


def least_s(spec: ModelSpec, placement: Placement, batch: Batch, machine: Machine) -> float:
    """Seconds that no step is shorter than."""
    costs, works = Costs(spec, placement, batch, machine), work_of(spec, placement, batch)
    phases, drives = [], []
    for work, verb in zip(works, ("forward", "backward"), strict=True):
        alone = _seconds(work, costs) | {"device": _device_s(spec, placement, batch, costs, verb)}
        cores = {"cores": alone["device"] + alone["cpu"]} if placement.unified else {}
        phases.append(alone | cores | {"memory": _memory_bytes(work, costs) / _most_memory(costs)})
        drives.append(_drive_s(alone, costs) * (batch.sweeps == 1))
    together: list[float] = [sum(each) for each in zip(*(phase.values() for phase in phases), strict=True)]
    whole_s = sum(max(drive, *phase.values()) for drive, phase in zip(drives, phases, strict=True))
    apart_s = max(APART * whole_s, whole_s - _ahead_s(spec, placement, batch, costs))
    return max(apart_s, *together, *_shared(works[0] + works[1], costs))


def _ahead_s(spec: ModelSpec, placement: Placement, batch: Batch, costs: Costs) -> float:
    """Seconds that transfers may be ahead of the computation, or behind it, at the turn from forward to backward: what
    slots hold, at the rate of the slowest.  With several sweeps there are many such turns: no end is known."""
    if batch.sweeps > 1:
        return inf
    pools = slot_bytes(
        spec, placement, saved_bytes(spec, placement, batch), micro_products_bytes(spec, placement, batch)
    )
    lanes = ("h2d", "d2h", *("disk_read", "disk_write") * any(pool.startswith("host.") for pool in pools))
    return placement.slots * sum(pools.values()) / min(costs.rates[lane] for lane in lanes)


def _drive_s(alone: Mapping[str, float], costs: Costs) -> float:
    """Seconds of a drive that reads and writes at once for as long as it can, as far as that is any faster."""
    read_s, write_s, both = alone["disk_read"], alone["disk_write"], Sharing(costs).both
    return read_s + write_s - max(0.0, 2 - 1 / both) * min(read_s, write_s)


def _shared(work: Work, costs: Costs) -> Iterator[float]:
    """Seconds of drive and host memory for all that passes them, as far as it is known what they give to several."""
    if "disk_both" in costs.rates:
        yield (work["disk_read"] + work["disk_write"]) / costs.rates["disk_both"]
    if "memory_shared" in costs.rates:
        yield _memory_bytes(work, costs) / costs.rates["memory_shared"]


def _memory_bytes(work: Work, costs: Costs) -> float:
    """Bytes that work reads and writes in host memory."""
    updated_bytes = work["cpu"] * costs.spec.recipe.moved_bytes(costs.placement.storage)
    copied_bytes = (work["h2d"] + work["d2h"]) * (2 if costs.placement.unified else 1)
    return (work["disk_read"] + work["disk_write"]) * DISK_PASSES + updated_bytes + copied_bytes


def _most_memory(costs: Costs) -> float:
    """Bytes/s of host memory that are never passed for a while: one lane alone may have more than several together."""
    rates, passes = costs.rates, 2 if costs.placement.unified else 1
    if "memory_shared" not in rates:
        return inf
    moved = costs.spec.recipe.moved_bytes(costs.placement.storage)
    alone = (moved / costs.update_s, passes * rates["h2d"], passes * rates["d2h"])
    drive = (DISK_PASSES * rates["disk_read"], DISK_PASSES * rates["disk_write"])
    return max(rates["memory_shared"], *alone, *drive)


def computed_s(spec: ModelSpec, placement: Placement, batch: Batch, machine: Machine) -> float:
    """Seconds of the computation of a step."""
    costs = Costs(spec, placement, batch, machine)
    return sum(_device_s(spec, placement, batch, costs, verb) for verb in ("forward", "backward"))


def written_bytes(spec: ModelSpec, placement: Placement, batch: Batch) -> int:
    """Bytes of a step that go to the drive."""
    return sum(work["disk_write"] for work in work_of(spec, placement, batch))


def work_of(spec: ModelSpec, placement: Placement, batch: Batch) -> tuple[Work, Work]:
    """What forward and backward move, without what depends on the order of a step."""
    disk = {kind: getattr(placement, kind) == "disk" for kind in ("parameters", "gradients", "optimizer")}
    trained, state, gradients, weights = _sizes(spec)
    forward, backward = Work(), Work()
    update = forward if placement.commit == "hold" else backward
    update["cpu"] += trained
    update["disk_read"] += disk["optimizer"] * state
    update["disk_write"] += disk["optimizer"] * state + disk["parameters"] * weights
    sums = (batch.sweeps - 1) * trained * SUM_BYTES
    backward["disk_read"] += disk["gradients"] * sums
    backward["disk_write"] += disk["gradients"] * (sums + (placement.commit != "in_place") * gradients)
    if placement.commit == "hold":
        forward["disk_read"] += disk["gradients"] * gradients
    passing = inside(placement)
    backward["h2d"] += ("seed.g" not in passing) * sums
    backward["d2h"] += ("drain.g" not in passing) * (sums + gradients)
    for phase, once_bytes in zip((forward, backward), _fetched(spec), strict=True):
        fetched = batch.sweeps * once_bytes
        phase["disk_read"] += disk["parameters"] * fetched
        phase["h2d"] += ("compute" in placement.weight_route and "fetch.w" not in passing) * fetched
    saved = num_saved(spec, placement.kept) * batch.num_micros * batch.sweeps * saved_bytes(spec, placement, batch)
    forward["disk_write"] += (placement.activations == "disk") * saved
    backward["disk_read"] += (placement.activations == "disk") * saved
    if placement.activations != "device" and not placement.unified:
        results = batch.sweeps * products_bytes(spec, placement, batch)
        forward["d2h"] += saved + results
        backward["h2d"] += saved + results
    return forward, backward


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


def _seconds(work: Work, costs: Costs) -> dict[str, float]:
    lanes = ("disk_read", "disk_write", "h2d", "d2h")
    return {lane: work[lane] / costs.rates[lane] for lane in lanes} | {"cpu": work["cpu"] * costs.update_s}


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
