"""What a seat's forward leaves for its backward: only its input, with it the results of its products, or its graph.

The last seats keep graphs, those before them results of products, the rest runs all of its forward again: what is left
last is needed first, and so takes room for the shortest time.  Left to others: how many of each there are (`kept.py`,
`products.py`).  The trade-off: one order for all models, where a block with few products would better recompute.
"""

from __future__ import annotations

from offloadz.plan.alike import once
from offloadz.plan.spec import ModelSpec

GRAPH, PRODUCTS = "graph", "products"
"""What a seat can leave instead of running all of its forward again."""


@once
def multiplying_seats(spec: ModelSpec) -> frozenset[int]:
    """Blocks and single modules that have a matrix; a head is a product and nothing else."""
    matrices = [any(len(m.shape) > 1 for s in unit.sections for m in s.members) for unit in spec.units]
    each = ((i, seat) for i, seat in enumerate(spec.seats) if seat.kind in ("block", "module"))
    return frozenset(i for i, seat in each if any(matrices[unit] for unit in seat.units))


def most_products(spec: ModelSpec, kept: int = 0) -> int:
    """How many seats can keep results of products before those `kept` that keep their graph."""
    return len(product_seats(spec, len(spec.seats), kept))


@once
def product_seats(spec: ModelSpec, count: int, kept: int = 0) -> frozenset[int]:
    """The last `count` seats that can keep results of products before those `kept` that keep their graph."""
    able = [seat for seat in spec.other_seats(kept) if seat in multiplying_seats(spec)]
    return frozenset(able[max(0, len(able) - count) :])


def left_by(spec: ModelSpec, kept: int, cheap: int = 0) -> dict[int, str]:
    """Per seat that leaves more than its input, what that is (`Placement.kept`, `Placement.cheap`)."""
    products = dict.fromkeys(product_seats(spec, cheap, kept), PRODUCTS)
    return products | dict.fromkeys(spec.keeping_seats(kept), GRAPH)
