"""What lanes share: a drive that reads and writes at once, and host memory, which all transfers and updates pass.

A step is never shorter than the bytes it moves through such a thing take, at the rate that thing gives to several at
once.  Only a machine file that measured this rate (`offloadz bench` does) brings a bound.  The trade-off: the bound is
one for the whole step; a moment of it in which all lanes are busy is not seen, and neither is what a CPU's own products
read from memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from offloadz.plan.ops import Op, Program

if TYPE_CHECKING:
    from offloadz.plan.predict import Costs

DISK_PASSES = 2
"""Times a byte that comes from or goes to a drive passes host memory: the transfer, and its checksum."""


def shared_s(program: Program, costs: Costs) -> dict[str, float]:
    """Seconds that a step takes at least of what its lanes share: "memory", "drive"; empty where no rate is known."""
    rates, found = costs.rates, {}
    if "memory_shared" in rates:
        found["memory"] = sum(_memory_bytes(op, costs) for op in program.ops) / rates["memory_shared"]
    if "disk_both" in rates:
        moved = sum(costs.nbytes(op) for op in program.ops if op.lane in ("disk_read", "disk_write"))
        found["drive"] = moved / rates["disk_both"]
    return found


def _memory_bytes(op: Op, costs: Costs) -> float:
    """Bytes an op reads and writes in host memory."""
    if op.lane == "cpu":
        return op.nbytes * costs.spec.recipe.moved_bytes(costs.placement.storage)
    if op.lane in ("h2d", "d2h"):
        return costs.nbytes(op) * (2.0 if costs.placement.unified else float(op.verb != "zero.g"))
    return costs.nbytes(op) * DISK_PASSES if op.lane.startswith("disk") else 0.0
