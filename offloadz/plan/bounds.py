"""What a step takes at least, from bytes and rates alone: which candidates are not worth a walk.

Forward and backward follow each other, each at least as long as the work of its busiest lane; updates belong to the
one (hold) or the other (shadow, in place).  Left to others: the time itself (`estimate.py`).  The trade-off: lanes run
ahead a little at the turn from forward to backward, so both together count as a twentieth shorter than they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from offloadz.plan.alike import once, seats_alike, unit_kinds
from offloadz.plan.footprint import Batch, num_saved, saved_bytes
from offloadz.plan.machine import Machine
from offloadz.plan.ops import Op
from offloadz.plan.placement import Placement
from offloadz.plan.predict import Costs
from offloadz.plan.shared import DISK_PASSES
from offloadz.plan.spec import ModelSpec

APART = 0.95
"""Share of forward and backward that certainly follow each other."""

Work = Counter[str]
"""Bytes by lane, and parameters of "cpu"."""


def least_s(spec: ModelSpec, placement: Placement, batch: Batch, machine: Machine) -> float:
    """Seconds that no step is shorter than."""
    costs = Costs(spec, placement, batch, machine)
    works = work_of(spec, placement, batch)
    phases = [_seconds(work, costs) for work in works]
    for phase, verb in zip(phases, ("forward", "backward"), strict=True):
        phase["device"] = _device_s(spec, placement, batch, costs, verb)
    both = {lane: phases[0][lane] + phases[1][lane] for lane in phases[0]}
    shared = [both["device"] + both["cpu"]] if placement.unified else []
    drive_bytes = sum(work["disk_read"] + work["disk_write"] for work in works)
    if "disk_both" in costs.rates:
        shared.append(drive_bytes / costs.rates["disk_both"])
    if "memory_shared" in costs.rates:
        updated_bytes = sum(work["cpu"] for work in works) * spec.recipe.moved_bytes(placement.storage)
        shared.append((drive_bytes * DISK_PASSES + updated_bytes) / costs.rates["memory_shared"])
    return max(APART * sum(max(phase.values()) for phase in phases), *both.values(), *shared)


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
    if placement.commit != "in_place":
        backward["disk_write"] += disk["gradients"] * gradients
    if placement.commit == "hold":
        forward["disk_read"] += disk["gradients"] * gradients
    for phase, seats in ((forward, range(len(spec.seats))), (backward, spec.unfolding_seats)):
        fetched = batch.sweeps * _fetched(spec, seats)
        phase["disk_read"] += disk["parameters"] * fetched
        phase["h2d"] += (placement.parameters != "device") * (not placement.unified) * fetched
    saved = num_saved(spec, placement.kept) * batch.num_micros * batch.sweeps * saved_bytes(spec, placement, batch)
    forward["disk_write"] += (placement.activations == "disk") * saved
    backward["disk_read"] += (placement.activations == "disk") * saved
    if placement.activations != "device" and not placement.unified:
        forward["d2h"] += saved
        backward["h2d"] += saved
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


def _fetched(spec: ModelSpec, seats: Iterable[int]) -> int:
    """Bytes of weights that are brought to compute with, once; rows of a table are looked up at home."""
    alike = ((spec.seats[seat], count) for seat, count in seats_alike(spec, seats))
    return sum(count * spec.units[u].weight_bytes for seat, count in alike if seat.kind != "table" for u in seat.units)


def _seconds(work: Work, costs: Costs) -> dict[str, float]:
    lanes = ("disk_read", "disk_write", "h2d")
    return {lane: work[lane] / costs.rates[lane] for lane in lanes} | {"cpu": work["cpu"] * costs.update_s}


def _device_s(spec: ModelSpec, placement: Placement, batch: Batch, costs: Costs, verb: str) -> float:
    """Seconds of the computation itself."""
    seats = range(len(spec.seats)) if verb == "forward" else spec.unfolding_seats
    keeping = spec.keeping_seats(placement.kept) if verb == "backward" else frozenset()
    total = 0.0
    for some, reads in (([s for s in seats if s not in keeping], ()), (sorted(keeping), ("k",))):
        for seat, count in seats_alike(spec, some):
            units = spec.seats[seat].units if spec.seats[seat].kind != "table" else ()
            ops = (Op("device", verb, verb, reads, (), seat, u, nbytes=spec.units[u].num_elements) for u in units)
            total += count * sum(costs(op) for op in ops)
    return total * batch.num_micros * batch.sweeps
