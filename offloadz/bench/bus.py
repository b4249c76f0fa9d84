"""What goes over the bus to a device and back, both at once, by the lanes and the locked memory of a run.

A step fetches weights while gradients and saved inputs leave, so each way is measured beside the other.  The trade-off:
where both share one wire, a forward that saves nothing is faster than its prediction.
"""

from __future__ import annotations

from types import TracebackType

from offloadz.bench.compute import Rate
from offloadz.memory.host import HostPool, needed_bytes
from offloadz.plan.ops import Op
from offloadz.runtime.devices import BUS, Device

CLOSE_S = 10.0
BESIDE = 2
"""Copies the other way while one is measured: it is under way until the end."""


class Bus:
    """Buffers of `nbytes` on both sides and a lane for each way; a context manager."""

    def __init__(self, device: Device, nbytes: int) -> None:
        self._device, self._nbytes = device, nbytes
        self._pool = HostPool(needed_bytes([nbytes] * len(BUS)))
        device.lock(self._pool)
        self._host = {name: self._pool.take(name, nbytes).zero_() for name in BUS}
        self._card = {name: device.zeros(nbytes) for name in BUS}
        self._lanes = {name: device.worker(name, self._copy, None) for name in BUS}

    def _copy(self, op: Op) -> None:
        host, card = self._host[op.lane], self._card[op.lane]
        to, of = (card, host) if op.lane == "h2d" else (host, card)
        to.copy_(of, non_blocking=True)

    def rate(self, name: str) -> Rate:
        """Bytes/s of the lane `name` while the other one copies too."""
        ops = [Op(other, "copy", "forward") for other in BUS for _ in range(1 if other == name else BESIDE)]

        def work() -> float:
            lane = self._lanes[name]
            lane.clock.catch_up()
            before_s = lane.clock.busy_s
            for op in sorted(ops, key=lambda op: op.lane == name):
                self._lanes[op.lane].submit(op, ())
            for each in self._lanes.values():
                each.drain()
                if each.error is not None:
                    raise each.error[1]
            lane.clock.catch_up()
            return self._nbytes / max(lane.clock.busy_s - before_s, 1e-9)

        return work

    def __enter__(self) -> Bus:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for lane in self._lanes.values():
            lane.close(CLOSE_S)
        self._device.unlock(self._pool)
        self._host.clear()
        self._pool.close()
