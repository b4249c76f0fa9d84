"""Where each kind of value lives, the way it takes to where it is used, and how large every pool is.

The same functions answer the plan (how many bytes per tier) and the session (which buffers to make), so the two cannot
disagree.  Tiers: `disk`, `host`, `device` (kept there between steps) and `compute` (the slot a block computes from).
Over several ranks `whole` is where weights are put together of all ranks' shards, `shard` where a gradient is summed
over them.  Where two tiers are the same memory in the same dtype the step between them is left out of the route; on a
CPU with fp32 weights a block computes straight from the buffer the drive wrote into.
"""

from __future__ import annotations

from dataclasses import dataclass

from offloadz.plan.alike import once, part_kinds, unit_kinds
from offloadz.plan.share import ALONE, Share
from offloadz.plan.spec import ITEM_BYTES, PIECE_BYTES, ModelSpec, Unit, aligned

TIERS = ("device", "host", "disk")
KINDS = ("parameters", "gradients", "optimizer", "activations")
COMPUTED = ("compute", "shard", "whole")
"""Tiers of slots that lie in the memory of the device."""

COMMITS = ("auto", "hold", "shadow", "in_place")


@dataclass(frozen=True)
class Placement:
    """The decisions that shape a program."""

    parameters: str = "host"
    gradients: str = "host"
    optimizer: str = "host"
    activations: str = "host"
    slots: int = 2
    """Slots of each pool: 1 runs everything in turn, 2 is double buffering."""
    unified: bool = True
    """Host and device are the same memory (the compute device is the CPU)."""
    compute: str = "float32"
    """Dtype the blocks compute in."""
    storage: str = "float32"
    """Dtype of the working weights at rest."""
    opaque: bool = False
    """Blocks run by kernels of their own: one that runs again runs whole (`unread.py`)."""
    accumulate: bool = False
    """Several backward passes add to a gradient before it is rounded (sweeps, several `run.backward`)."""
    copies: int = 1
    """Times that everything in the swap path's `state/` exists: 1, or 2 and one for each checkpoint held by links."""
    kept: int = 0
    """Seats, the last ones, that keep their graph from forward to backward; the others recompute it."""
    cheap: int = 0
    """Seats before those that keep the results of their products, and so recompute only what is cheap."""
    commit: str = "hold"
    """When a unit is updated, and when that is final: `hold` (both once the whole gradient is known), `shadow` (as its
    gradient comes, beside what is valid; final once the whole gradient is known), `in_place` (both as it comes)."""
    share: Share = ALONE
    """What of everything is kept by this rank of several."""

    @property
    def state_on_disk(self) -> bool:
        """Whether all that an update changes lies in the swap path: what can be flipped, and linked, as a whole."""
        return self.parameters == self.optimizer == "disk"

    @property
    def flips(self) -> bool:
        """Whether a step ends with a record that makes it the valid state on disk."""
        return self.copies > 1 and self.state_on_disk and self.commit != "in_place"

    @property
    def ending(self) -> str:
        """The verb behind a step's last update: what lies in copies is made the valid one, with a record (`flip`) where
        it is all that an update changes, else for this run alone (`turn`); empty where nothing lies in copies."""
        if self.flips:
            return "flip"
        kept = self.copies > 1 and self.commit != "in_place"
        return "turn" if kept and "disk" in (self.parameters, self.optimizer) else ""

    @property
    def least_copies(self) -> int:
        """Of state on disk: a spare is written while the valid one is kept."""
        return 2 if self.commit == "shadow" and "disk" in (self.parameters, self.optimizer) else 1

    @property
    def widens(self) -> bool:
        return self.compute != self.storage

    @property
    def weight_route(self) -> tuple[str, ...]:
        """Tiers from the home of the weights to where a block computes from them."""
        route = {"disk": ("disk", "host"), "host": ("host",), "device": ("device",)}[self.parameters]
        if self.share.stage == 3:  # over each rank's own bus, then between devices
            route = (*route, "whole") if self.unified or self.parameters == "device" else (*route, "shard", "whole")
        direct = not self.widens and (self.unified or self.parameters == "device" or "whole" in route)
        return route if direct else (*route, "compute")

    @property
    def part_route(self) -> tuple[str, ...]:
        """Tiers from the home of the weights to where the CPU updates them."""
        return self._to_host(self.parameters)

    @property
    def state_route(self) -> tuple[str, ...]:
        return self._to_host(self.optimizer)

    @property
    def direct(self) -> bool:
        """Whether gradients are made where they are kept, or go to a drive from: where host and device are one memory,
        nothing is rounded or added up over ranks, and one is kept at all."""
        alike = self.unified and self.compute == self.storage == "float32"
        return alike and self.share.ranks == 1 and self.commit != "in_place"

    @property
    def grad_route(self) -> tuple[str, ...]:
        """Tiers from where gradients are made to their home."""
        route = {"disk": ("host", "disk"), "host": ("host",), "device": ("device",)}[self.gradients]
        return route if self.direct else ("compute", *route)

    @property
    def grad_part_route(self) -> tuple[str, ...]:
        return self._to_host(self.gradients)

    @property
    def saved_route(self) -> tuple[str, ...]:
        """Tiers from a live activation to its home; a single tier means it is kept as it is."""
        return {"disk": ("compute", "host", "disk"), "host": ("compute", "host"), "device": ("compute",)}[
            self.activations
        ]

    @property
    def products_route(self) -> tuple[str, ...]:
        """Tiers from where results of products are made to their home; a single tier means they stay there."""
        return ("compute",) if self.unified or self.activations == "device" else ("compute", "host")

    @property
    def restored_route(self) -> tuple[str, ...]:
        """Tiers from the home of a saved activation to where the backward reads it."""
        route = ("disk", "host") if self.activations == "disk" else ("host",)
        return route if self.unified else (*route, "compute")

    def _to_host(self, home: str) -> tuple[str, ...]:
        return {
            "disk": ("disk", "host"),
            "host": ("host",),
            "device": ("device",) if self.unified else ("device", "host"),
        }[home]


def slot_bytes(spec: ModelSpec, placement: Placement, saved_bytes: int = 0, product_bytes: int = 0) -> dict[str, int]:
    """Bytes of one slot of each pool (`tier.kind`) the placement needs.  Of a micro-batch `saved_bytes`: the largest
    saved input; `product_bytes`: the most results of products that are kept."""
    item = ITEM_BYTES[placement.compute]
    pools, route = dict[str, int](), placement.weight_route
    if "host" in route[1:]:
        pools["host.w"] = _largest(spec, "weight_bytes")
    if "shard" in route:
        pools["shard.w"] = _largest(spec, "weight_bytes")
    if "whole" in route:
        pools["whole.w"] = _largest(spec, "whole_bytes")
    if "compute" in route:
        pools["compute.w"] = _largest_computed(spec, item)
    any_bytes, trained_bytes, state_bytes = _largest_parts(spec)
    if not trained_bytes:
        return pools
    if "compute" in placement.grad_route:
        pools["compute.g"] = _largest(spec, "slope_bytes")
    if placement.share.shards > 1:
        pools["shard.g"] = pools["compute.g"]  # every rank's terms of the own shard: as many as the whole has
    if placement.gradients == "disk" or placement.commit == "in_place":
        pools["host.g"] = _largest_gradient(spec, placement.accumulate)
    if "host" in placement.part_route[1:]:
        pools["host.p"] = aligned(any_bytes)
    if "host" in placement.state_route[1:] and state_bytes:
        pools["host.s"] = aligned(state_bytes)
    if "host" in placement.grad_part_route[1:] and placement.commit != "in_place":
        pools["host.h"] = aligned(trained_bytes, PIECE_BYTES)  # a transfer ends a checksum piece
    if placement.activations == "disk":
        pools["host.x"] = aligned(saved_bytes, PIECE_BYTES)  # a transfer ends a checksum piece
    if placement.activations != "device" and not placement.unified:
        pools["compute.x"] = aligned(saved_bytes)
    if placement.cheap and len(placement.products_route) > 1:
        pools["compute.y"] = aligned(product_bytes)
    return pools


@once
def _largest(spec: ModelSpec, size: str) -> int:
    """Bytes of the unit that has most, by the name of one of its sizes."""
    sizes: list[int] = [getattr(kind.unit, size) for kind in unit_kinds(spec)]
    return max(sizes)


@once
def _largest_computed(spec: ModelSpec, item_bytes: int) -> int:
    return max(kind.unit.compute_bytes(item_bytes) for kind in unit_kinds(spec))


@once
def _largest_gradient(spec: ModelSpec, accumulate: bool) -> int:
    """Bytes of the largest stored gradient; `accumulate`: of every unit as an fp32 sum."""
    return max(kind.unit.grad_bytes(accumulate or kind.index in spec.shared_units) for kind in unit_kinds(spec))


@once
def _largest_parts(spec: ModelSpec) -> tuple[int, int, int]:
    """Most bytes of the weights of a part, of one that is trained, and of such a one's state; 0 where there is none."""
    trained = [part for part, is_trained in part_kinds(spec) if is_trained]
    each = max((part.weight_bytes for part, _ in part_kinds(spec)), default=0)
    return each, max((p.weight_bytes for p in trained), default=0), max((p.state_bytes for p in trained), default=0)


def passing_bytes(spec: ModelSpec, placement: Placement) -> int:
    """Bytes of one stream's buffer on the device for weights that are widened, or gradients rounded, on their way."""
    narrow = [p.weight_bytes for p, _ in part_kinds(spec) if p.dtype != "float32"]
    return 0 if placement.unified else max(narrow, default=0)


def accumulates(spec: ModelSpec, placement: Placement, unit: int) -> bool:
    """Whether the stored gradient of a unit may have to hold an fp32 sum before its last term has come."""
    return placement.accumulate or unit in spec.shared_units


def rests(spec: ModelSpec, placement: Placement, unit: int) -> bool:
    """Whether a gradient of this unit is ever kept: in place, only while it is an open sum."""
    return placement.commit != "in_place" or accumulates(spec, placement, unit)


def spares(placement: Placement, unit: Unit, kind: str) -> bool:
    """Whether a unit's weights ("parameters") or state ("optimizer") have a second home in memory for its updates."""
    return placement.commit == "shadow" and unit.trainable and getattr(placement, kind) != "disk"


def home_bytes(spec: ModelSpec, placement: Placement) -> dict[str, dict[str, int]]:
    """Bytes at rest per tier and kind (activations apart: they depend on the batch); on disk in all copies."""
    kinds = unit_kinds(spec)
    resting = [k for k in kinds if rests(spec, placement, k.index)]
    sizes = {
        "parameters": sum(k.count * k.unit.weight_bytes for k in kinds),
        "gradients": sum(k.count * k.unit.grad_bytes(accumulates(spec, placement, k.index)) for k in resting),
        "optimizer": sum(k.count * k.unit.state_bytes for k in kinds),
    }
    homes: dict[str, dict[str, int]] = {tier: {} for tier in TIERS}
    for kind, nbytes in sizes.items():
        tier = getattr(placement, kind)
        copies = placement.copies if kind != "gradients" and tier == "disk" and placement.ending else 1
        homes[tier][kind] = nbytes * copies
    for kind, each in (("parameters", "weight_bytes"), ("optimizer", "state_bytes")):
        spare = sum(k.count * getattr(k.unit, each) for k in kinds if spares(placement, k.unit, kind))
        homes[getattr(placement, kind)] |= {f"spare {kind}": spare} if spare else {}
    return homes
