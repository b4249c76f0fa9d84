"""What each verb does where the compute device has memory of its own: copies and kernels put into a stream.

The host's verbs (drive and update) are those of `actions.py`; here are the ones of the streams.  Each runs on the
thread that fills its stream and returns when its work stands there, so none may look at a value.  Copies leave the
dtype as it is, since a copy that also converts goes through pageable memory and waits; what has to be widened or
rounded passes through a buffer on the device (`Room.passing`, one for each stream).

The trade-off: rounding and the sum of squares stand in the stream of the copies, not in that of the computation: per
part 20 us of kernels beside 300 us of copying, and a gradient leaves without disturbing what is computed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from offloadz.memory.flat import DTYPES, typed
from offloadz.plan.ops import Op
from offloadz.runtime import actions
from offloadz.runtime.actions import ACTIONS, input_bytes
from offloadz.runtime.room import Room


def copied(room: Room, target: Tensor, source: Tensor) -> None:
    """Equal dtypes: the bytes as they are."""
    target.copy_(source, non_blocking=True)


def widened(room: Room, target: Tensor, source: Tensor) -> None:
    """Bytes over the bus as they are stored, widened there."""
    passing = room.passing["h2d"].view(source.dtype)
    for wide, piece in zip(target.split(passing.numel()), source.split(passing.numel()), strict=True):
        wide.copy_(passing[: piece.numel()].copy_(piece, non_blocking=True))


BROUGHT: dict[tuple[torch.dtype, torch.dtype], Callable[[Room, Tensor, Tensor], None]] = {
    (torch.float32, torch.bfloat16): widened,
    (torch.float32, torch.float32): copied,
    (torch.bfloat16, torch.bfloat16): copied,
}
"""(destination, source) dtype to what brings one into the other."""


def as_it_is(room: Room, slope: Tensor) -> Tensor:
    """A gradient that is stored in float32."""
    return slope


def rounded(room: Room, slope: Tensor) -> Tensor:
    """A gradient rounded once to bfloat16, to nearest, in the stream's own buffer."""
    return typed(room.passing["d2h"], 0, slope.numel(), torch.bfloat16).copy_(slope)


ROUNDED: dict[torch.dtype, Callable[[Room, Tensor], Tensor]] = {torch.float32: as_it_is, torch.bfloat16: rounded}
"""Dtype in which a gradient is stored to what makes it so."""


def fetch_w(room: Room, op: Op) -> None:
    """A unit's weights into a compute slot, in the dtype of the computation."""
    targets, sources = room.weights(op.unit, op.writes[0]), room.stored_weights(op.unit, op.reads[0])
    for target, source in zip(targets, sources, strict=True):
        BROUGHT[target.dtype, source.dtype](room, target, source)


def bring_w(room: Room, op: Op) -> None:
    """What this rank keeps of a unit's weights, as it is stored, from where other ranks get it."""
    kept = room.spec.units[op.unit].weight_bytes
    room.slots[op.writes[0]][:kept].copy_(room.resting("w", op.unit, op.reads)[:kept], non_blocking=True)


def spread_w(room: Room, op: Op) -> None:
    """See `actions.spread_w`: by the host where the weights are at rest there, once this stream has come so far."""
    room.device.reach()
    actions.spread_w(room, op)


def spread_all(room: Room, op: Op) -> None:
    """See `actions.spread_all`; likewise."""
    room.device.reach()
    actions.spread_all(room, op)


def zero_g(room: Room, op: Op) -> None:
    """A gradient slot set to zero, as far as its unit reaches."""
    room.slots[op.writes[0]][: room.spec.units[op.unit].slope_bytes].zero_()


def fetch_g(room: Room, op: Op) -> None:
    """An open gradient sum into the gradient slot."""
    for k, slope in room.slopes_of(room.spec.units[op.unit].summed_parts, op.unit, op.writes[0]):
        slope.copy_(room.grad_part(op.unit, k, op.reads[0], torch.float32), non_blocking=True)


def seed_g(room: Room, op: Op) -> None:
    """A gradient slot set to zero but for this rank's open sum: then the sum over ranks has it once."""
    zero_g(room, op)
    fetch_g(room, op)


def save_g(room: Room, op: Op) -> None:
    """The gradient slot to its home as the fp32 sum it is."""
    for k, slope in room.slopes_of(room.spec.units[op.unit].summed_parts, op.unit, op.reads[0]):
        room.grad_part(op.unit, k, op.writes[0], torch.float32).copy_(slope, non_blocking=True)


def drain_g(room: Room, op: Op) -> None:
    """The gradient slot to its home, rounded once; the sum of squares of the rounded values comes home with it."""
    unit = room.spec.units[op.unit]
    for k, slope in room.slopes_of(unit.trained_parts, op.unit, op.reads[0]):
        dtype = DTYPES[unit.parts[k].dtype]
        grad = ROUNDED[dtype](room, slope)
        room.grad_part(op.unit, k, op.writes[0], dtype).copy_(grad, non_blocking=True)
        home = room.square_homes[op.unit, k]
        home.copy_(room.device.squares(grad), non_blocking=True)
        room.squares[op.unit, k] = home


def save_x(room: Room, op: Op) -> None:
    """A live input into its host buffer; the device lets go of it."""
    source = room.live.pop((op.call, op.micro))
    typed(room.input_at(op.writes[0]), 0, source.numel(), source.dtype).view(source.shape).copy_(
        source, non_blocking=True
    )
    room.device.hold(source)


def fetch_x(room: Room, op: Op) -> None:
    """A saved input into a slot of the device."""
    nbytes = input_bytes(room, op)
    room.slots[op.writes[0]][:nbytes].copy_(room.input_at(op.reads[0])[:nbytes], non_blocking=True)


def save_y(room: Room, op: Op) -> None:
    """Results of products from the slot they were laid into to their host buffer, whose length they have."""
    home = room.input_at(op.writes[0])
    home.copy_(room.slots[op.reads[0]][: home.numel()], non_blocking=True)


def fetch_y(room: Room, op: Op) -> None:
    """Results of products into a slot of the device."""
    home = room.input_at(op.reads[0])
    room.slots[op.writes[0]][: home.numel()].copy_(home, non_blocking=True)


def move_part(room: Room, op: Op) -> None:
    """A part of the state, the weights or a rounded gradient between its home on the device and a host slot."""
    source, target = room.buffer(op.reads[0]), room.buffer(op.writes[0])
    target[: op.nbytes].copy_(source[: op.nbytes], non_blocking=True)


MOVES = {f"{verb}.{kind}": move_part for verb in ("lower", "raise") for kind in "sph"}

DEVICE_ACTIONS: dict[str, Callable[[Room, Op], None]] = ACTIONS | {
    **MOVES,
    "bring.w": bring_w,
    "fetch.w": fetch_w,
    "fetch.g": fetch_g,
    "seed.g": seed_g,
    "spread.w": spread_w,
    "spread.w.all": spread_all,
    "fetch.x": fetch_x,
    "fetch.y": fetch_y,
    "zero.g": zero_g,
    "save.g": save_g,
    "drain.g": drain_g,
    "save.x": save_x,
    "save.y": save_y,
}
"""Every verb of a lane that is not the computation's, for a device with memory of its own."""

TABLES = {True: ACTIONS, False: DEVICE_ACTIONS}
"""Whether host and device are one memory to the actions of a run."""
