"""What each verb does: straight-line functions over buffers, in a table.

An action is told everything by its op; where a plan could have answered there is no `if` here.  All of them run on
worker lanes and call plain C that leaves the interpreter lock free (see [Note: one team for the update] in `lanes.py`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

from offloadz.memory.flat import DTYPES, padded_sections, padded_slopes, shards_at_rest, trained_of
from offloadz.plan.ops import Op
from offloadz.plan.spec import Unit, aligned
from offloadz.runtime import native
from offloadz.runtime.ready import updates_of
from offloadz.runtime.room import Room


def load_parts(room: Room, op: Op) -> None:
    """Parts of a unit's weights or of its open gradient sum, from disk to where they lie in a host slot of the unit."""
    for place in op.reads:
        room.drive.read(room.extents[place], room.part_in(room.slots[op.writes[0]], place))


def store_parts(room: Room, op: Op) -> None:
    """Such parts, from a host slot of the unit to disk."""
    for place in op.writes:
        room.drive.write(room.extents[place], room.part_in(room.slots[op.reads[0]], place))


def load_part(room: Room, op: Op) -> None:
    """A part's state or weights, from disk into a host slot."""
    extent, slot = room.extents[op.reads[0]], room.slots[op.writes[0]]
    room.drive.read(extent, slot[: aligned(extent.nbytes)])


def load_h(room: Room, op: Op) -> None:
    """A part's rounded gradient; its extent may be longer, having held a sum."""
    extent = room.extents[op.reads[0]]
    nbytes = room.padded_bytes(extent, op.nbytes)
    room.drive.read(extent, room.slots[op.writes[0]][: aligned(nbytes)], nbytes)


def store_part(room: Room, op: Op) -> None:
    """A part's state or weights, from a host slot to disk."""
    extent, slot = room.extents[op.writes[0]], room.part_at(op.unit, op.part, op.reads[0])
    room.drive.write(extent, slot[: aligned(extent.nbytes)])


def store_spare(room: Room, op: Op) -> None:
    """A part's new state or weights, from a host slot to disk beside what is valid until the step is decided."""
    _propose(room, op.writes[0], room.part_at(op.unit, op.part, op.reads[0]))


def spare_parts(room: Room, op: Op) -> None:
    """The same of parts of a unit's weights, from where they lie in a host slot of the unit."""
    for place in op.writes:
        _propose(room, place, room.part_in(room.slots[op.reads[0]], place))


def _propose(room: Room, place: str, held: Tensor) -> None:
    extent = room.extents[place.replace("@next", "@disk")]
    room.drive.propose(extent)
    room.drive.write(extent, held[: aligned(extent.nbytes)])


def copy_part(room: Room, op: Op) -> None:
    """A part's state or weights within memory."""
    source = room.part_at(op.unit, op.part, op.reads[0])
    native.copy_(room.buffer(op.writes[0])[: source.nbytes], source)


def store_g(room: Room, op: Op) -> None:
    """A unit's rounded gradient, part by part, from its host slot to disk."""
    whole, unit = room.slots[op.reads[0]], room.spec.units[op.unit]
    for part, place in zip(unit.trained_parts, op.writes, strict=True):
        extent = room.extents[place]
        nbytes = room.padded_bytes(extent, unit.parts[part].weight_bytes)
        room.drive.write(extent, room.part_bytes("g", op.unit, part, whole)[: aligned(nbytes)], nbytes)


CONVERT: dict[tuple[torch.dtype, torch.dtype], Callable[[Tensor, Tensor], None]] = {
    (torch.float32, torch.bfloat16): native.widen_,
    (torch.float32, torch.float32): native.copy_,
    (torch.bfloat16, torch.bfloat16): native.copy_,
}
"""(destination, source) dtype to what brings one into the other."""


def fetch_w(room: Room, op: Op) -> None:
    """A unit's weights into a compute slot, in the dtype of the computation."""
    for target, source in zip(
        room.weights(op.unit, op.writes[0]), room.stored_weights(op.unit, op.reads[0]), strict=True
    ):
        CONVERT[target.dtype, source.dtype](target, source)


def zero_g(room: Room, op: Op) -> None:
    """Where a gradient is made set to zero, as far as its unit reaches."""
    slope = room.unit_bytes("g", op.unit, op.writes[0])
    ctypes.memset(slope.data_ptr(), 0, room.spec.units[op.unit].slope_bytes)


def fetch_g(room: Room, op: Op) -> None:
    """An open gradient sum into the gradient slot."""
    for k, slope in room.slopes_of(room.spec.units[op.unit].summed_parts, op.unit, op.writes[0]):
        native.copy_(slope, room.grad_part(op.unit, k, op.reads[0], torch.float32))


def save_g(room: Room, op: Op) -> None:
    """The gradient slot to its home as the fp32 sum it is."""
    for k, slope in room.slopes_of(room.spec.units[op.unit].summed_parts, op.unit, op.reads[0]):
        native.copy_(room.grad_part(op.unit, k, op.writes[0], torch.float32), slope)


def drain_g(room: Room, op: Op) -> None:
    """The gradient slot to its home, rounded once; the norm is taken of the rounded values, which the update reads."""
    unit = room.spec.units[op.unit]
    for k, slope in room.slopes_of(unit.trained_parts, op.unit, op.reads[0]):
        target = room.grad_part(op.unit, k, op.writes[0], DTYPES[unit.parts[k].dtype])
        room.squares[op.unit, k] = native.drain_(target, slope)


def square_g(room: Room, op: Op) -> None:
    """The sum of squares of a gradient that was made where it is kept: as `drain_g` gives it."""
    for k, slope in room.slopes_of(room.spec.units[op.unit].trained_parts, op.unit, op.reads[0]):
        room.squares[op.unit, k] = native.sum_squares(slope)


def seed_g(room: Room, op: Op) -> None:
    """A gradient slot set to zero but for this rank's open sum: then the sum over ranks has it once."""
    zero_g(room, op)
    fetch_g(room, op)


def gather_w(room: Room, op: Op) -> None:
    """A unit's whole weights, from every rank's shards."""
    unit = room.spec.units[op.unit]
    shards = shards_at_rest(unit, room.resting("w", op.unit, op.reads))
    for whole, own in zip(padded_sections(unit, room.slots[op.writes[0]]), shards, strict=True):
        room.ranks.gather(whole, own, f"{op.verb} of {unit.name}")


def spread_w(room: Room, op: Op) -> None:
    """The shards that this rank has updated to all, theirs into their places; frozen sections are as they were."""
    _spread(room, op, trained_of)


def spread_all(room: Room, op: Op) -> None:
    """The shards that this rank has filled to all, theirs into their places among the weights at rest."""
    _spread(room, op, lambda unit, sections: sections)


def _spread(room: Room, op: Op, chosen: Callable[[Unit, list[Tensor]], list[Tensor]]) -> None:
    unit = room.spec.units[op.unit]
    held = room.resting("w", op.unit, op.writes)
    whole, own = chosen(unit, padded_sections(unit, held)), chosen(unit, shards_at_rest(unit, held))
    for section, shard in zip(whole, own, strict=True):
        room.ranks.gather(section, shard, f"{op.verb} of {unit.name}")


def scatter_g(room: Room, op: Op) -> None:
    """The gradient slot summed over ranks, this rank's shards of it into another slot, at their places in the whole."""
    unit = room.spec.units[op.unit]
    terms = padded_slopes(unit, room.slots[op.writes[0]])
    for whole, term in zip(padded_slopes(unit, room.slots[op.reads[0]]), terms, strict=True):
        room.ranks.scatter(whole, term, f"{op.verb} of {unit.name}")


def sum_g(room: Room, op: Op) -> None:
    """The gradient slot summed over ranks."""
    unit = room.spec.units[op.unit]
    for whole in padded_slopes(unit, room.slots[op.writes[0]]):
        room.ranks.sum(whole, f"{op.verb} of {unit.name}")


def save_x(room: Room, op: Op) -> None:
    """A live input into its host buffer; the device lets go of it."""
    source = room.live.pop((op.call, op.micro))
    native.copy_(room.input_at(op.writes[0])[: source.nbytes], source.view(-1))


def store_x(room: Room, op: Op) -> None:
    """A saved input from its host slot to disk."""
    extent = room.extents[op.writes[0]]
    nbytes = room.padded_bytes(extent, input_bytes(room, op))
    room.drive.write(extent, room.slots[op.reads[0]][: aligned(nbytes)], nbytes)


def load_x(room: Room, op: Op) -> None:
    """A saved input from disk into a host slot."""
    extent = room.extents[op.reads[0]]
    nbytes = room.padded_bytes(extent, input_bytes(room, op))
    room.drive.read(extent, room.slots[op.writes[0]][: aligned(nbytes)], nbytes)


def input_bytes(room: Room, op: Op) -> int:
    """Bytes of the saved input that an op moves, without padding."""
    shape, dtype = room.shapes[op.call, op.micro]
    return int(shape.numel()) * dtype.itemsize


def update(room: Room, op: Op) -> None:
    """One optimizer step over parts of a unit, in one call; a parameter without a gradient is left as it is."""
    ready = updates_of(room, op)
    ready.updates.step([room.due.get(name) for name in ready.names], room.threads)


def flip(room: Room, op: Op) -> None:
    """What the step has written becomes the valid state on disk."""
    room.flip()


def turn(room: Room, op: Op) -> None:
    """The same for this run alone, where not all that an update changes is on disk."""
    room.turn()


ACTIONS: dict[str, Callable[[Room, Op], None]] = {
    "load.w": load_parts,
    "load.s": load_part,
    "load.p": load_part,
    "load.h": load_h,
    "load.g": load_parts,
    "load.x": load_x,
    "store.s": store_part,
    "store.p": store_part,
    "spare.s": store_spare,
    "spare.p": store_spare,
    "copy.s": copy_part,
    "copy.p": copy_part,
    "store.g": store_g,
    "store.g.sum": store_parts,
    "store.x": store_x,
    "fetch.w": fetch_w,
    "fetch.g": fetch_g,
    "seed.g": seed_g,
    "gather.w": gather_w,
    "spread.w": spread_w,
    "spread.w.all": spread_all,
    "load.own": load_parts,
    "store.others": store_parts,
    "spare.others": spare_parts,
    "scatter.g": scatter_g,
    "sum.g": sum_g,
    "zero.g": zero_g,
    "save.g": save_g,
    "drain.g": drain_g,
    "square.g": square_g,
    "save.x": save_x,
    "update": update,
    "flip": flip,
    "turn": turn,
    "update.g": update,
}
"""Every verb of a worker lane."""
