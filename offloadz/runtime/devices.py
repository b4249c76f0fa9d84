"""The compute device of a run: where its memory is made, how work gets there, and what the plan is told of it.

Two kinds: `Cpu`, whose memory is the host's, and `Accelerator`, any device that torch knows by streams and events
(CUDA, ROCm, XPU); what both have to answer is `Device`.  A third, `rehearsal.py`, is a CPU that behaves like an
accelerator.
Which actions belong to which is `actions.py` and `device_actions.py`; lanes are `lanes.py` and `streams.py`.

The trade-off: the computation uses whichever stream is current where the model is called, so that the model's own code
around the blocks needs no care; two threads that call the model in turn on different streams have to order them.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

import torch
from torch import Tensor

from offloadz.memory.host import HostPool
from offloadz.plan.errors import DoesNotFit
from offloadz.plan.machine import DeviceFacts
from offloadz.plan.ops import Op
from offloadz.runtime import native
from offloadz.runtime.lanes import Action, InlineLane, WorkerLane, jitter, no_work
from offloadz.runtime.streams import ComputeLane, StreamLane

log = logging.getLogger("offloadz")

BUS = ("h2d", "d2h")
"""The ways between host and device."""

STREAMED = (*BUS, "net")
"""Lanes that are streams on a device with memory of its own."""

POISON_S = 0.002
"""Longest random delay before a transfer under `debug.poison`."""

POLL_S = 5e-5
"""How long a thread sleeps between two looks at an event."""

Harm = tuple[Callable[[float], None], Callable[[Tensor], None]]
"""How a lane's poison waits (seconds) and spoils a slot."""


class Device(Protocol):
    """What a run asks of its compute device."""

    torch: torch.device
    """Where tensors of the computation are."""
    unified: bool
    """Whether its memory is the host's."""
    facts: DeviceFacts | None
    """What the plan is told of it; None where it is the host."""

    def empty(self, nbytes: int) -> Tensor:
        """Memory of the device, uint8.  Raises DoesNotFit."""

    def zeros(self, nbytes: int) -> Tensor:
        """The same, set to zero before any stream can read it."""

    def host(self, nbytes: int) -> Tensor:
        """Host memory for a saved input, from and to which copies are fast."""

    def lock(self, pool: HostPool) -> None:
        """Let copies from and to a pool go at full speed and without waiting, as far as the system allows."""

    def unlock(self, pool: HostPool) -> None:
        """Take `lock` back, before the pool is closed."""

    def bring(self, value: Any) -> Any:
        """Tensors, and those in dicts, lists and tuples, on the device; everything else as it is."""

    def ask(self, value: Tensor) -> Tensor:
        """A tensor on the host, where it can be looked at; waits for the computation that makes it."""

    def reach(self) -> None:
        """Return when the stream that the calling thread fills has come past all that was put in."""

    def hold(self, source: Tensor) -> None:
        """Keep memory of the computation from being used anew before this stream has read it."""

    def squares(self, x: Tensor) -> Tensor:
        """The sum of squares of a flat tensor on the device, float64 without dimensions, there."""

    def generators(self) -> Sequence[torch.Generator]:
        """All generators that a model's computation may draw from."""

    def descend(self, tensor: Tensor, grad: Tensor | None) -> None:
        """`tensor.backward(grad)`."""

    def peak_bytes(self) -> int:
        """Most bytes of its memory that were in use; 0 where it is the host's."""

    def worker(self, name: str, run: Action, before: Action | None) -> WorkerLane:
        """A lane that is not the computation's."""

    def compute_lane(self, room: Any, seed: int | None) -> InlineLane:
        """The lane of the computation; with a seed, under poison."""

    def harm(self, name: str) -> Harm:
        """How poison acts on a lane."""


class Cpu:
    """The host itself: its memory is the device's, and the calling thread computes."""

    torch = torch.device("cpu")
    unified = True
    facts: DeviceFacts | None = None

    def empty(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    host = empty

    def zeros(self, nbytes: int) -> Tensor:
        return self.empty(nbytes).zero_()

    def lock(self, pool: HostPool) -> None:
        """Nothing copies from it by itself."""

    unlock = lock

    def bring(self, value: Any) -> Any:
        return value

    def ask(self, value: Tensor) -> Tensor:
        return value.cpu()

    def reach(self) -> None:
        """Who works has come so far."""

    def hold(self, source: Tensor) -> None:
        """A thread that reads holds it."""

    def squares(self, x: Tensor) -> Tensor:
        return torch.tensor(native.sum_squares(x), dtype=torch.float64)

    def generators(self) -> Sequence[torch.Generator]:
        return (torch.default_generator,)

    def descend(self, tensor: Tensor, grad: Tensor | None) -> None:
        tensor.backward(grad)  # type: ignore[no-untyped-call]

    def peak_bytes(self) -> int:
        return 0

    def worker(self, name: str, run: Action, before: Action | None) -> WorkerLane:
        return WorkerLane(name, run, before)

    def compute_lane(self, room: Any, seed: int | None) -> InlineLane:
        return InlineLane()

    def harm(self, name: str) -> Harm:
        return time.sleep, native.fill_nan_


class TorchMark:
    """An event of torch's, asked until it has passed: waiting for one takes a whole core (`blocking` is accepted by
    `torch.Event` and, as its documentation says, does nothing), and threads of the update want the cores."""

    def __init__(self, event: torch.Event) -> None:
        self.event = event

    def synchronize(self) -> None:
        while not self.event.query():
            time.sleep(POLL_S)

    def query(self) -> bool:
        return bool(self.event.query())

    def elapsed_time(self, later: TorchMark) -> float:
        return float(self.event.elapsed_time(later.event))


class TorchStream:
    """A stream of torch's; without one, whichever is current in the calling thread."""

    def __init__(self, device: torch.device, stream: torch.Stream | None = None) -> None:
        self._device, self._stream = device, stream

    def attach(self) -> None:
        torch.accelerator.set_device_index(self._device.index)
        torch.accelerator.set_stream(self._now())

    def _now(self) -> torch.Stream:
        return self._stream or torch.accelerator.current_stream(self._device)

    def run(self, work: Callable[[], None]) -> None:
        work()

    def wait(self, mark: TorchMark) -> None:
        self._now().wait_event(mark.event)

    def mark(self) -> TorchMark:
        event = torch.Event(self._device, enable_timing=True)
        event.record(self._now())
        return TorchMark(event)

    def close(self) -> None:
        """Streams are torch's, and go with the last reference."""


class Accelerator(Cpu):
    """A device of torch's with memory and streams of its own."""

    unified = False

    def __init__(self, device: torch.device) -> None:
        torch.accelerator.set_device_index(device.index)
        self.torch = device  # type: ignore[misc]
        self.module = torch.get_device_module(device)
        self.facts = facts_of(device)
        self._bad = torch.full((1 << 20,), 0xFF, dtype=torch.uint8, device=device)
        self._locked: dict[int, int] = {}
        """Addresses of locked memory, with their bytes."""
        self._refused = False
        torch.accelerator.synchronize(device)

    def empty(self, nbytes: int) -> Tensor:
        """Memory from torch's allocator, which no other stream is still using.  Raises DoesNotFit with what is free."""
        try:
            made = torch.empty(nbytes, dtype=torch.uint8, device=self.torch)
            torch.accelerator.synchronize(self.torch)
            return made
        except torch.OutOfMemoryError as error:
            free, total = torch.accelerator.get_memory_info(self.torch)
            raise DoesNotFit(
                f"{self.torch}: a buffer of {nbytes} bytes was refused, {free} of {total} are free; end what else uses"
                " this device, or lower offload.device_memory so that the plan fits what is left"
            ) from error

    def zeros(self, nbytes: int) -> Tensor:
        made = super().zeros(nbytes)
        torch.accelerator.synchronize(self.torch)
        return made

    def host(self, nbytes: int) -> Tensor:
        pool = HostPool(nbytes)
        self.lock(pool)
        held = pool.take("a saved input", nbytes)
        weakref.finalize(held, self.unlock, pool)
        return held

    def lock(self, pool: HostPool) -> None:
        """Register the pool page-locked in its exact size; a refusal is one warning with numbers."""
        runtime = getattr(self.module, "cudart", None)
        nbytes = pool.capacity_bytes
        if not nbytes or self._refused:
            return
        refused = "torch has no call for it on this device" if runtime is None else ""
        if runtime is not None:
            code = int(runtime().cudaHostRegister(pool.address, nbytes, 0))
            refused = f"cudaHostRegister answered {code}" if code else ""
        if not refused:
            self._locked[pool.address] = nbytes
            return
        self._refused = True
        with suppress(RuntimeError):  # the runtime keeps a refusal and tells it to the next kernel, which is this one
            torch.zeros(1, device=self.torch)
        log.warning(
            "host memory (not GPU memory): page-locking %d bytes for %s was refused (%s); %d bytes are locked;"
            " the run goes on with pageable memory: copies are slower and wait, results are the same",
            nbytes, self.torch, refused, sum(self._locked.values()),
        )  # fmt: skip

    def unlock(self, pool: HostPool) -> None:
        if self._locked.pop(pool.address, 0):
            self.module.cudart().cudaHostUnregister(pool.address)

    def bring(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(self.torch, non_blocking=True)
        if type(value) is dict:  # others, such as a cache, are somebody's object and stay that object
            return {key: self.bring(item) for key, item in value.items()}
        return type(value)(map(self.bring, value)) if type(value) in (list, tuple) else value

    def reach(self) -> None:
        torch.accelerator.current_stream(self.torch).synchronize()

    def hold(self, source: Tensor) -> None:
        source.record_stream(torch.accelerator.current_stream(self.torch))

    def squares(self, x: Tensor) -> Tensor:
        return x.double().square_().sum()

    def generators(self) -> Sequence[torch.Generator]:
        self.module.init()
        return (torch.default_generator, self.module.default_generators[self.torch.index])

    def peak_bytes(self) -> int:
        return int(torch.accelerator.max_memory_allocated(self.torch))

    def worker(self, name: str, run: Action, before: Action | None) -> WorkerLane:
        if name not in STREAMED:
            return WorkerLane(name, run, before)
        return StreamLane(name, TorchStream(self.torch, torch.Stream(self.torch)), run, before)

    def compute_lane(self, room: Any, seed: int | None) -> InlineLane:
        delay = None if seed is None else jitter(POISON_S, seed, self._pause)
        before: Action = no_work if delay is None else lambda op: delay()
        return ComputeLane(TorchStream(self.torch), before)

    def harm(self, name: str) -> Harm:
        return (self._pause, self._spoil) if name in STREAMED else super().harm(name)

    def _pause(self, seconds: float) -> None:
        """A delay in the stream where the device has one, else before what follows is put in."""
        sleep = getattr(self.module, "_sleep", None)
        if sleep is None:
            time.sleep(seconds)
        else:
            sleep(int(seconds * 1.5e9))  # cycles

    def _spoil(self, slot: Tensor) -> None:
        """By copies in the stream: a slot of the host may still be read by an earlier one."""
        for piece in slot.view(torch.uint8).split(self._bad.numel()):
            piece.copy_(self._bad[: piece.numel()], non_blocking=True)


def facts_of(device: torch.device) -> DeviceFacts:
    """What the plan is told of a device: its name, its memory, and whether it multiplies in bfloat16."""
    module = torch.get_device_module(device)
    free, total = torch.accelerator.get_memory_info(device)
    native_bf16 = getattr(module, "is_bf16_supported", lambda **_: True)
    try:
        bf16 = native_bf16(including_emulation=False)
    except TypeError:
        bf16 = native_bf16()
    return DeviceFacts(str(device), module.get_device_name(device), int(free), int(total), bool(bf16))


def device_generators() -> tuple[torch.Generator, ...]:
    """The default generators of all accelerators here, once any of them is in use."""
    if not torch.accelerator.is_available() or not torch.get_device_module().is_initialized():
        return ()
    return tuple(torch.get_device_module().default_generators)


def delays(room: Any, lane: int, name: str, seed: int) -> Action:
    """What `debug.poison` does before each transfer: wait at random, and spoil the slots that are to be filled."""
    pause, spoil = room.device.harm(name)
    delay = jitter(POISON_S, seed * 31 + lane, pause)

    def before(op: Op) -> None:
        delay()
        for place in op.writes:
            if ("#" in place or place.endswith("@spare")) and place not in op.reads:
                spoil(room.buffer(place))

    return before
