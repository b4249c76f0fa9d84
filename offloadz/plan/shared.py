"""What lanes share: cores, a drive that reads and writes at once, and host memory, which all but computations pass.

Two answers from the same figures.  `Sharing.speeds` says how much slower ops are that run side by side (`beside.py`
asks).  `shared_s` says how long a step takes at least of what is shared, whatever its order.  Memory and drive count
where a machine file tells of them: what they give to several at once is measured (`offloadz bench`) or a typical share
(`catalogue.py`).  Cores are always known, and count where the CPU computes.  The trade-off: what is asked for too much
is dealt out by what each asks for, as the kernel does with threads; what caches and a drive's queue make of a mixture
is in the measured rates or nowhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from offloadz.plan.beside import Active
from offloadz.plan.ops import Op

if TYPE_CHECKING:
    from offloadz.plan.predict import Costs

DISK_PASSES = 2
"""Times a byte that comes from or goes to a drive passes host memory: the transfer, and its checksum."""

NET_PASSES = 4
"""Times a byte that comes from another rank over the loopback device passes host memory: read and written as it is sent
and as it is received, by a core.  Between GPUs it passes neither."""

SUMMED = 1.0e10
"""Bytes/s of checksums on one core, which is what a transfer asks of the processor (docs/log.md)."""

Demand = dict[str, float]
"""Of what is shared: cores, bytes/s."""

Each = Callable[[Callable[[Op], float]], Iterable[float]]
"""Asks of every op of a step, in their order."""


class Sharing:
    """What each kind of op asks for at full speed, and what there is."""

    def __init__(self, costs: Costs) -> None:
        self.costs, rates = costs, costs.rates
        self.limits: Demand = {"cores": float(costs.cores)} if costs.placement.unified else {}
        if "memory_shared" in rates:
            self.limits["memory"] = rates["memory_shared"]
        self.both = _both(rates["disk_read"], rates["disk_write"], rates.get("disk_both"))
        """What is left of the speed of a read and of a write on the same drive at once."""

    def demand(self, lane: str, verb: str) -> Demand:
        """What an op asks for."""
        costs, rates = self.costs, self.costs.rates
        if lane == "device":
            return {"cores": float(costs.cores)}
        if verb.startswith("copy."):
            return {"cores": 1.0, "memory": rates["memory"]}
        if lane == "cpu":
            return {"cores": float(costs.cores), "memory": costs.moved_bytes / costs.update_s}
        passes = _passes(lane, verb, costs)
        return {
            "cores": min(1.0, rates[lane] / SUMMED) if lane.startswith("disk") else 1.0,
            "memory": passes * rates[lane],
        }

    def speeds(self, active: Active) -> Iterator[float]:
        """For each of the ops that run at once: its speed, 1 for full."""
        asked = [self.demand(*op) for op in active]
        scarce = {}
        for name, limit in self.limits.items():
            each = [demand.get(name, 0.0) for demand in asked]
            scarce[name] = min(1.0, max(limit, *each) / max(sum(each), 1e-30))
        drive = self.both if {"disk_read", "disk_write"} <= {lane for lane, _ in active} else 1.0
        for (lane, _), demand in zip(active, asked, strict=True):
            slowest = min((scarce[name] for name, much in demand.items() if much and name in scarce), default=1.0)
            yield min(slowest, drive if lane.startswith("disk") else 1.0)


def _both(read: float, write: float, both: float | None) -> float:
    """The speed left to each of a read and a write of equal length, begun together, that moved `both` bytes/s in all:
    the faster one ends first, and the other goes on alone."""
    if both is None:
        return 1.0
    fast, slow = max(read, write), min(read, write)
    beside = fast * (2 / both - 1 / slow) + 1  # over the time that the faster one takes alone
    return min(1.0, 1 / beside) if beside > 0 else 1.0


def shared_s(each: Each, costs: Costs) -> dict[str, float]:
    """Seconds that a step takes at least of what its lanes share: "cores", "memory", "drive", as far as known."""
    rates, found = costs.rates, {}
    if costs.placement.unified:
        sharing = Sharing(costs)
        worked = sum(each(lambda op: costs(op) * sharing.demand(op.lane, op.verb)["cores"]))
        found["cores"] = worked / costs.cores
    if "memory_shared" in rates:
        found["memory"] = sum(each(lambda op: _memory_bytes(op, costs))) / rates["memory_shared"]
    if "disk_both" in rates:
        moved = sum(each(lambda op: costs.nbytes(op) if op.lane in ("disk_read", "disk_write") else 0))
        found["drive"] = moved / rates["disk_both"]
    return found


def _passes(lane: str, verb: str, costs: Costs) -> float:
    """Times a byte that a lane of transfers moves passes host memory."""
    if lane.startswith("disk"):
        return float(DISK_PASSES)
    if lane == "net":
        return float(NET_PASSES * costs.placement.unified)
    return 2.0 if costs.placement.unified else float(verb not in costs.inside)


def _memory_bytes(op: Op, costs: Costs) -> float:
    """Bytes an op reads and writes in host memory."""
    if op.lane == "device":
        return 0.0
    if op.verb.startswith("copy."):
        return op.nbytes * 2.0
    if op.lane == "cpu":
        return op.nbytes * costs.moved_bytes
    return costs.nbytes(op) * _passes(op.lane, op.verb, costs)
