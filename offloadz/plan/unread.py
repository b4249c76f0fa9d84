"""Weights of a block whose product is left out where the block runs again for its graph: nobody reads what it gives.

The last product of a block is added to the hidden state, and a sum saves nothing for the backward
(`model/unread.py` finds out by what autograd saves).  Where a norm follows it is read.  Told here by shapes, and by the
name of such a norm; experts are weighted behind their products, so theirs are read.  The trade-off: a family that is
told wrong is planned a twentieth too fast or slow where it recomputes.
"""

from __future__ import annotations

from offloadz.plan.alike import each_unit, once
from offloadz.plan.spec import ModelSpec, Unit

NORMED = ("post_feedforward", "post_mlp")
"""What norms behind a block's last product are called."""


@once
def unread_elements(spec: ModelSpec) -> tuple[int, ...]:
    """Per unit the elements of its last product's weights, if nobody reads the result."""
    return each_unit(spec, lambda unit: _unread(spec, unit))


def _unread(spec: ModelSpec, unit: Unit) -> int:
    members = [m for s in unit.sections for m in s.members]
    products = [m for m in members if len(m.shape) > 1]
    read = unit.kind != "block" or any(len(m.shape) > 2 for m in products)
    if read or not products or any(name in m.name for m in members for name in NORMED):
        return 0
    last = products[-1]
    return last.num_elements if spec.hidden_size in last.shape else 0
