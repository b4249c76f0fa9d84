"""A device on which a run on a GPU is rehearsed without one: a CPU whose memory is kept apart from the host's.

Its slots are memory that no host lane is given, its streams are threads that do later what was put in, and its backward
runs on a thread of its own, as on a GPU.  So the same lanes, actions and events work as there, and `offload(...,
device=Rehearsal())` finds what an edge too few would do: a transfer that reads too early reads NaN.  Under poison the
computation is late too: its results come to their slots after a delay, and its inputs are looked at again then.

Left out: what only a device has, kernels, an allocator that hands freed memory to another stream, and the check that
operands lie in one memory.  The trade-off: for tests and the smallest models alone; a step of a large one would copy
everything once more than a CPU has to.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor

from offloadz.plan.machine import DeviceFacts
from offloadz.plan.ops import Op
from offloadz.runtime import native
from offloadz.runtime.devices import POISON_S, STREAMED, Cpu
from offloadz.runtime.lanes import Action, InlineLane, WorkerLane, jitter, no_work
from offloadz.runtime.streams import ComputeLane, StreamLane


class ThreadMark:
    """A point in a `ThreadStream`."""

    def __init__(self) -> None:
        self._passed = threading.Event()
        self.error: BaseException | None = None
        self.at_s = 0.0

    def reach(self, error: BaseException | None) -> None:
        self.error, self.at_s = error, time.perf_counter()
        self._passed.set()

    def synchronize(self) -> None:
        self._passed.wait()
        if self.error is not None:
            raise self.error

    def query(self) -> bool:
        return self._passed.is_set()

    def elapsed_time(self, later: ThreadMark) -> float:
        return (later.at_s - self.at_s) * 1e3


class ThreadStream:
    """A stream that is a thread; after an error it does nothing more and tells it at every mark."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | ThreadMark | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"offloadz-stream-{name}", daemon=True)
        self._thread.start()

    def attach(self) -> None:
        """A thread needs nothing set to fill it."""

    def run(self, work: Callable[[], None]) -> None:
        self._jobs.put(work)

    def wait(self, mark: ThreadMark) -> None:
        self._jobs.put(mark.synchronize)

    def mark(self) -> ThreadMark:
        mark = ThreadMark()
        self._jobs.put(mark)
        return mark

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join(1.0)

    def _work(self) -> None:
        error: BaseException | None = None
        while (job := self._jobs.get()) is not None:
            if isinstance(job, ThreadMark):
                job.reach(error)
            elif error is None:
                try:
                    job()
                except BaseException as caught:  # told at the next mark
                    error = caught
            del job


class CallerStream:
    """The stream of the computation: the calling thread works at once, and `tail` says when that counts as done."""

    def __init__(self) -> None:
        self.tail = ThreadStream("compute")

    def attach(self) -> None:
        """Whoever calls works."""

    def run(self, work: Callable[[], None]) -> None:
        self.tail.mark().synchronize()
        work()

    def wait(self, mark: ThreadMark) -> None:
        mark.synchronize()

    def mark(self) -> ThreadMark:
        return self.tail.mark()

    def close(self) -> None:
        self.tail.close()


class Late:
    """Makes a computation late: what it wrote appears after a delay, and what it read must still be there then."""

    def __init__(self, slots: dict[str, Tensor], tail: ThreadStream, delay: Callable[[], None]) -> None:
        self.slots, self.tail, self.delay = slots, tail, delay

    def __call__(self, op: Op) -> None:
        written = {place: self.slots[place].clone() for place in op.writes if "#" in place}
        read = [place for place in op.reads if "#" in place and place not in written]
        sums = {place: native.crc32c(self.slots[place]) for place in read}
        for place in written:
            self.slots[place].fill_(0xFF)
        self.tail.run(partial(self._end, op, written, sums))

    def _end(self, op: Op, written: dict[str, Tensor], sums: dict[str, int]) -> None:
        self.delay()
        for place, wanted in sums.items():
            if native.crc32c(self.slots[place]) != wanted:
                raise RuntimeError(f"{place} was filled anew while the {op.verb} of seat {op.seat} was using it")
        for place, result in written.items():
            self.slots[place].copy_(result)


class Rehearsal(Cpu):
    """See the module.  `device_bytes`: what the plan may count with; `bfloat16`: whether it computes in it."""

    unified = False

    def __init__(self, device_bytes: int = 8 << 30, bfloat16: bool = False) -> None:
        self.facts = DeviceFacts("rehearsal", "a rehearsed GPU", device_bytes, device_bytes, bfloat16)
        self._made = 0

    def empty(self, nbytes: int) -> Tensor:
        self._made += nbytes
        return torch.full((nbytes,), 0xFF, dtype=torch.uint8)

    def peak_bytes(self) -> int:
        return self._made

    def descend(self, tensor: Tensor, grad: Tensor | None) -> None:
        with ThreadPoolExecutor(1, "offloadz-autograd") as thread:
            thread.submit(tensor.backward, grad).result()

    def worker(self, name: str, run: Action, before: Action | None) -> WorkerLane:
        if name not in STREAMED:
            return WorkerLane(name, run, before)
        return StreamLane(name, ThreadStream(name), run, before)

    def compute_lane(self, room: Any, seed: int | None) -> InlineLane:
        stream = CallerStream()
        late = None if seed is None else Late(room.slots, stream.tail, jitter(POISON_S, seed))
        return ComputeLane(stream, after=late or no_work)
