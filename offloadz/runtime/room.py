"""The buffers of a run and where to find them: slots, homes, extents, saved inputs.

Made once from the spec and the placement; `placement.slot_bytes` and `home_bytes` say how large everything is, so the
plan's table and this room cannot disagree.  It moves nothing: `actions.py` does, told by ops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from offloadz.memory.disk import DiskTier
from offloadz.memory.flat import DTYPES, compute_sections, slope_sections, stored_sections, typed
from offloadz.memory.host import HostPool, needed_bytes
from offloadz.memory.tier import PIECE_BYTES, Extent
from offloadz.plan.ops import part_named
from offloadz.plan.placement import COMPUTED, Placement, accumulates, passing_bytes, rests, slot_bytes, spares
from offloadz.plan.spec import ModelSpec, Part, Unit, aligned
from offloadz.runtime.devices import Cpu, Device
from offloadz.runtime.native import Numbers
from offloadz.runtime.ranks import Solo

ROLES = {
    "w": ("state", "weights", "parameters"),
    "s": ("state", "optimizer", "optimizer"),
    "g": ("scratch", "gradients", "gradients"),
}
"""Per kind of stored value: area and role on disk, and its name in a placement."""

WHOLE = ("w", "g")
"""Kinds of slots that hold a whole unit; others hold a part of one."""


Sizes = dict[Any, int]
"""Name of a slot, or (kind, unit), to bytes."""


LEFT: list[HostPool] = []
"""Memory of ended runs that a lane may still write to, such as one that waits for a rank that will not come."""


@dataclass
class Room:
    """All memory of a run.  `disk` may be None where nothing is placed there."""

    spec: ModelSpec
    placement: Placement
    disk: DiskTier | None = None
    ranks: Solo = field(default_factory=Solo)
    slots: dict[str, Tensor] = field(default_factory=dict)
    """Slot name (`host.w#1`) to its bytes."""
    homes: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    """(kind, unit) to the bytes of a value that stays in memory."""
    spares: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    """The same of what updates are written to beside what is valid (`commit = "shadow"`)."""
    extents: dict[str, Extent] = field(default_factory=dict)
    """Place (`w3.0@disk`) to its extent."""
    live: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    """(call, micro) to an input that has not left the device."""
    graphs: dict[tuple[int, int], Any] = field(default_factory=dict)
    """(call, micro) to what a computation keeps for its backward: of no concern to this room, but that it is let go."""
    saved: dict[str, Tensor] = field(default_factory=dict)
    """Place (`x3.0@host`) to the bytes of a saved input at home."""
    shapes: dict[tuple[int, int], tuple[torch.Size, torch.dtype]] = field(default_factory=dict)
    squares: dict[tuple[int, int], float | Tensor] = field(default_factory=dict)
    """(unit, part) to the sum of squares of its rounded gradient."""
    device: Device = field(default_factory=Cpu)
    passing: dict[str, Tensor] = field(default_factory=dict)
    """Stream to its buffer on the device for what is widened or rounded on its way; none where memory is one."""
    square_homes: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    """(unit, part) to where its sum of squares comes home to; none where memory is one."""
    due: dict[str, Numbers | None] = field(default_factory=dict)
    """Parameter name to the numbers of the update that is due; none (or None) for a parameter without a gradient."""
    threads: int = 1
    """How many threads an update may use."""
    ready: dict[tuple[int, int], list[Any]] = field(default_factory=dict)
    """(unit, part, or -1 for all) to updates that were made ready for where it lies (`ready.py`)."""
    told: dict[str, Any] = field(default_factory=dict)
    """What the flip of the decided step tells besides the state: JSON, of no concern to this room."""
    before_flip: Callable[[], None] = lambda: None
    """Called on the lane before a flip: what must be on the drive when the flip is."""
    spare: list[Extent] = field(default_factory=list)
    """Extents of saved inputs that grew out of them."""
    pools: list[HostPool] = field(default_factory=list)
    nothing: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    grown: HostPool | None = None
    """The pool of slots for saved inputs that turned out larger than planned; a still larger one takes its place."""

    @property
    def compute_dtype(self) -> torch.dtype:
        return DTYPES[self.placement.compute]

    def build(self, saved_bytes: int = 0, product_bytes: int = 0) -> None:
        """Make every buffer (sizes as in `slot_bytes`), reserve every extent.  Raises DoesNotFit (memory or drive)."""
        sizes = {
            f"{pool}#{i}": aligned(nbytes)
            for pool, nbytes in slot_bytes(self.spec, self.placement, saved_bytes, product_bytes).items()
            for i in range(self.placement.slots)
        }
        homes = {key: aligned(n) for key, n in self._home_sizes() if n}
        spares = {key: n for key, n in homes.items() if self._has_spare(*key)}
        self.pools.append(self._lay(sizes, homes, spares))
        self._lay_passing()
        self._reserve()
        if self.disk is not None:
            for name, slot in self.slots.items():
                if not self._lies_away(name) and not name.startswith("compute."):
                    self.disk.fix(slot)

    def _lay(self, slots: Sizes, homes: Sizes, spares: Sizes) -> HostPool:
        """Buffers of these sizes: on the device what belongs there, all others in one host pool, in this order."""
        kinds = (
            ("{}", slots, self.slots, self.device.empty),
            ("{0[0]}{0[1]}", homes, self.homes, self.device.zeros),
            ("spare {0[0]}{0[1]}", spares, self.spares, self.device.zeros),
        )
        near = [nbytes for _, sizes, *_ in kinds for key, nbytes in sizes.items() if not self._lies_away(key)]
        for _, sizes, held, made in kinds:  # the device first: it may refuse, and a pool that is locked would stay so
            held.update({key: made(nbytes) for key, nbytes in sizes.items() if self._lies_away(key)})
        pool = HostPool(needed_bytes(near))
        self.device.lock(pool)
        for name, sizes, held, _ in kinds:
            held.update({k: pool.take(name.format(k), n) for k, n in sizes.items() if not self._lies_away(k)})
        return pool

    def _lies_away(self, key: Any) -> bool:
        """Whether a slot (by its name) or a home (by kind and unit) is memory that the host cannot touch."""
        return self.is_away(self.home_tier(key[0]) if isinstance(key, tuple) else key.partition(".")[0])

    def is_away(self, tier: str) -> bool:
        """Whether a tier is memory that the host cannot touch."""
        return tier in ("device", *COMPUTED) and not self.placement.unified

    def home_tier(self, kind: str) -> str:
        """The tier where values of a kind are at rest."""
        return str(getattr(self.placement, ROLES[kind][2]))

    def _lay_passing(self) -> None:
        """What a device with memory of its own needs besides slots: see `passing_bytes`."""
        if self.placement.unified:
            return
        nbytes = passing_bytes(self.spec, self.placement)
        self.passing = {stream: self.device.empty(aligned(nbytes)) for stream in ("h2d", "d2h")}
        keys = [(index, k) for index, unit in enumerate(self.spec.units) for k in unit.trained_parts]
        pool = HostPool(aligned(8 * len(keys)))
        self.device.lock(pool)
        self.pools.append(pool)
        values = pool.take("sums of squares", 8 * len(keys)).view(torch.float64)
        self.square_homes = dict(zip(keys, values, strict=True))

    def _home_sizes(self) -> Iterator[tuple[tuple[str, int], int]]:
        for kind, (_, _, name) in ROLES.items():
            if getattr(self.placement, name) != "disk":
                for index, unit in enumerate(self.spec.units):
                    yield (kind, index), self._unit_bytes(kind, index, unit)

    def _has_spare(self, kind: str, unit: int) -> bool:
        return kind != "g" and spares(self.placement, self.spec.units[unit], ROLES[kind][2])

    def _unit_bytes(self, kind: str, index: int, unit: Unit) -> int:
        if kind == "g":
            kept = rests(self.spec, self.placement, index)
            return unit.grad_bytes(accumulates(self.spec, self.placement, index)) if kept else 0
        return unit.weight_bytes if kind == "w" else unit.state_bytes

    def _reserve(self) -> None:
        for kind, (area, role, name) in ROLES.items():
            if getattr(self.placement, name) != "disk":
                continue
            for index, unit in enumerate(self.spec.units):
                if kind == "g" and not rests(self.spec, self.placement, index):
                    continue
                for k in self._resting(kind, index, unit):
                    nbytes = self._part_bytes(kind, index, unit.parts[k])
                    if nbytes:
                        extent = self.drive.reserve(area, f"{role}/{unit.name}#{k}", nbytes)
                        self.extents[f"{kind}{index}.{k}@disk"] = extent
        if self.disk is not None:
            self.disk.allocate()

    def _resting(self, kind: str, index: int, unit: Unit) -> tuple[int, ...]:
        """Parts of a unit of which this rank keeps weights, state or gradients."""
        sums = kind == "g" and accumulates(self.spec, self.placement, index)
        return unit.kept_parts if kind == "w" else unit.summed_parts if sums else unit.trained_parts

    def _part_bytes(self, kind: str, index: int, part: Part) -> int:
        if kind == "g":
            return part.num_elements * 4 if accumulates(self.spec, self.placement, index) else part.weight_bytes
        return part.weight_bytes if kind == "w" else part.state_bytes

    @property
    def drive(self) -> DiskTier:
        if self.disk is None:
            raise ValueError("something is placed on disk and there is no swap path; set offload.swap")
        return self.disk

    def buffer(self, place: str) -> Tensor:
        """Bytes of a place in memory: a slot, or the part of a home (`s3.0@host`) or of a spare (`s3.0@spare`)."""
        if "#" in place:
            return self.slots[place]
        kind, unit, _ = part_named(place)
        return self.part_in(self.spares[kind, unit] if place.endswith("@spare") else self.home(kind, unit), place)

    def part_in(self, whole: Tensor, place: str) -> Tensor:
        """Bytes of the part that a place tells (`w3.0@disk`), within a buffer of its whole unit."""
        return self.part_bytes(*part_named(place), whole)

    def part_at(self, unit: int, part: int, place: str) -> Tensor:
        """Bytes of a part where a place holds it, alone or within its whole unit (`host.w#1`, `host.g#0`)."""
        held, kind = self.buffer(place), place.partition(".")[2][:1]
        return self.part_bytes(kind, unit, part, held) if "#" in place and kind in WHOLE else held

    def home(self, kind: str, unit: int) -> Tensor:
        """The bytes of a unit's value that stays in memory; none where nothing is kept (sgd without momentum)."""
        return self.homes.get((kind, unit), self.nothing)

    def part_bytes(self, kind: str, unit: int, part: int, whole: Tensor) -> Tensor:
        """A part's bytes, padded to whole pages, within the buffer of its unit."""
        owner = self.spec.units[unit]
        if kind == "w":
            at = owner.part_weight_offset(owner.parts[part])
            return whole[at : at + aligned(owner.parts[part].weight_bytes)]
        if kind == "s":
            at = owner.state_offsets[part]
            return whole[at : at + aligned(owner.parts[part].state_bytes)]
        at = owner.grad_offset(part, accumulates(self.spec, self.placement, unit))
        return whole[at : at + aligned(self._part_bytes("g", unit, owner.parts[part]))]

    def unit_bytes(self, kind: str, unit: int, place: str) -> Tensor:
        """The buffer of a whole unit: the slot named by `place`, its spare, else its home."""
        if "#" in place:
            return self.slots[place]
        return (self.spares if place.endswith("@spare") else self.homes)[kind, unit]

    def resting(self, kind: str, unit: int, places: tuple[str, ...]) -> Tensor:
        """The buffer that holds what a rank keeps of a unit, which may be no part at all: a slot, or its home."""
        return self.unit_bytes(kind, unit, places[0] if places else "")

    def stored_weights(self, unit: int, place: str) -> list[Tensor]:
        return stored_sections(self.spec.units[unit], self.unit_bytes("w", unit, place))

    def weights(self, unit: int, place: str) -> list[Tensor]:
        """Flat sections to compute from; `place` is the first place a computation reads."""
        if place.startswith("compute."):
            return compute_sections(self.spec.units[unit], self.slots[place], self.compute_dtype)
        return self.stored_weights(unit, place)

    def slopes(self, unit: int, place: str) -> list[Tensor]:
        """Flat fp32 gradient sections where a gradient is made: in a slot, or at home, which is then laid out alike."""
        return slope_sections(self.spec.units[unit], self.unit_bytes("g", unit, place))

    def slopes_of(self, parts: tuple[int, ...], unit: int, place: str) -> Iterator[tuple[int, Tensor]]:
        """(part, its flat fp32 gradient) in a slot, for some parts of a unit."""
        slopes = self.slopes(unit, place)
        for k in parts:
            part = self.spec.units[unit].parts[k]
            yield k, slopes[part.section][part.start : part.stop]

    def grad_part(self, unit: int, part: int, place: str, dtype: torch.dtype) -> Tensor:
        """Flat view of a part of a stored gradient, in the slot of its unit or at home."""
        whole = self.unit_bytes("g", unit, place)
        return typed(self.part_bytes("g", unit, part, whole), 0, self.spec.units[unit].parts[part].num_elements, dtype)

    def padded_bytes(self, extent: Extent, nbytes: int) -> int:
        """Length of a transfer that must end a piece or the extent."""
        return min(aligned(nbytes, PIECE_BYTES), extent.nbytes)

    def lay_input(self, call: int, micro: int, x: Tensor) -> None:
        """Lay an input ready to be saved, with a home for it."""
        key = (call, micro)
        self.live[key], self.shapes[key] = x, (x.shape, x.dtype)
        place, home = f"x{call}.{micro}", self.placement.activations
        if home == "host":
            self.lay_home(f"{place}@host", x.nbytes)
        if home == "disk":
            self._keep_extent(f"{place}@disk", x.nbytes)

    def lay_home(self, place: str, nbytes: int) -> None:
        """Host memory for what a forward leaves: what it had, if that has the size."""
        held = self.saved.get(place)
        if held is None or held.numel() != nbytes:
            self.saved[place] = self.device.host(nbytes)

    def _keep_extent(self, place: str, nbytes: int) -> None:
        """An extent for a saved input: the one it had, one that another outgrew, or a new one with room to grow."""
        held = self.extents.get(place)
        if held is not None and held.nbytes >= nbytes:
            return
        if held is not None:
            self.spare.append(held)
        fitting = [extent for extent in self.spare if extent.nbytes >= nbytes]
        if fitting:
            self.extents[place] = min(fitting, key=lambda extent: extent.nbytes)
            self.spare.remove(self.extents[place])
            return
        size = aligned(max(nbytes, held.nbytes * 5 // 4 if held is not None else 0))
        self.extents[place] = self.drive.reserve("scratch", f"activations/{place}.{size}", size)
        self.drive.allocate()

    def saved_input(self, call: int, micro: int, place: str) -> Tensor:
        """A saved input, from where it was brought to."""
        shape, dtype = self.shapes[call, micro]
        if place.endswith("@live"):
            return self.live[call, micro]
        return typed(self.input_at(place), 0, shape.numel(), dtype).view(shape)

    def input_at(self, place: str) -> Tensor:
        """The bytes that hold a saved input: a slot, or its home in memory."""
        return self.slots[place] if "#" in place else self.saved[place]

    def fits_saved(self, nbytes: int) -> bool:
        return all(self.slots[name].numel() >= nbytes for name in self._saved_slots())

    def grow_saved(self, nbytes: int) -> None:
        """Larger slots for saved inputs; all lanes must be idle.  Where these are refused there are none."""
        names = self._saved_slots()
        self.slots |= dict.fromkeys(names, self.nothing)
        if self.grown is not None:
            self._close(self.grown)
        self.grown = None
        self.grown = self._lay(dict.fromkeys(names, aligned(nbytes, PIECE_BYTES)), {}, {})

    def _saved_slots(self) -> list[str]:
        return [name for name in self.slots if name.partition("#")[0].endswith(".x")]

    def widen_gradients(self, placement: Placement) -> None:
        """Homes and slots of gradients that hold fp32 sums; all lanes idle, no gradient at rest."""
        self.placement = placement
        count = placement.slots
        sizes = {
            f"{p}#{i}": aligned(n)
            for p, n in slot_bytes(self.spec, placement).items()
            if p == "host.g"
            for i in range(count)
        }
        homes = {key: aligned(n) for key, n in self._home_sizes() if n and key[0] == "g"}
        self.pools.append(self._lay(sizes, homes, {}))
        for index, unit in enumerate(self.spec.units if placement.gradients == "disk" else ()):
            for k in unit.summed_parts:
                nbytes = self._part_bytes("g", index, unit.parts[k])
                extent = self.drive.reserve("scratch", f"gradient_sums/{unit.name}#{k}", nbytes)
                self.extents[f"g{index}.{k}@disk"] = extent
        if self.disk is not None:
            self.disk.allocate()

    def flip(self) -> None:
        """Make what was written since the last flip the valid state on disk."""
        if self.drive.shadow is None:
            raise RuntimeError("a flip was planned and the state is not in copies")
        self.before_flip()
        self.drive.shadow.flip(self.told)

    def turn(self) -> None:
        """The same in this run alone: the newest copy of each is the one to keep."""
        if self.drive.shadow is None:
            raise RuntimeError("a turn was planned and the state is not in copies")
        self.drive.shadow.copies.flip()

    def decide(self, units: tuple[int, ...]) -> None:
        """Spares of `units` and what was proposed on disk are valid from now on; of no units: what spares hold is
        forgotten.  All lanes idle."""
        turned = [key for key in self.spares if key[1] in units]
        new, old = {key: self.spares[key] for key in turned}, {key: self.homes[key] for key in turned}
        if self.disk is not None and self.disk.shadow is not None:
            self.disk.shadow.copies.decide(bool(units))
        self.homes, self.spares = self.homes | new, self.spares | old

    def forget_inputs(self) -> None:
        """The step is over: nothing will ask for its inputs again."""
        self.live.clear()
        self.shapes.clear()
        self.graphs.clear()

    def leave_memory(self) -> None:
        """Have `close` leave the pools as they are: a lane that was left behind may still write to them."""
        LEFT.extend([*self.pools, *([self.grown] if self.grown else [])])
        self.pools, self.grown = [], None

    def close(self, keep_state: bool = False) -> None:
        """Give all memory back; scratch goes, state too unless it is to be kept."""
        held = (self.slots, self.homes, self.spares, self.live, self.saved, self.shapes, self.squares, self.due)
        for named in (*held, self.ready, self.passing, self.square_homes, self.graphs):
            named.clear()  # type: ignore[attr-defined]
        try:
            if self.disk is not None:
                self.disk.close(keep_state)  # first: it holds on to the slots it was told of
        finally:
            for pool in (*self.pools, *([self.grown] if self.grown else [])):
                self._close(pool)

    def _close(self, pool: HostPool) -> None:
        self.device.unlock(pool)
        pool.close()
