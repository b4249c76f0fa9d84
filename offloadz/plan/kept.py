"""What a kept graph takes, and how many are kept.

A block runs backward through the graph of its forward.  Kept from one to the other it takes some twenty times the bytes
of the block's input; made anew it takes a third more products.  Bytes are a formula over shapes that knows no family:
what a product reads or makes beside the hidden state, what its norms read and scale, the inputs of attention and
feed-forward, the gate's activation.  Within 2 % of what torch 2.13 saves for Llama, Mistral, Qwen3, Gemma 3, OLMo 2
and GPT-NeoX (`tests/plan/test_kept.py` measures it again), 10 % low where products are fused (Phi-3).  Activations
written out in small steps (GPT-2) keep up to half as much again, routed experts much less: a run learns the true size
from its first graph (`model/graphs.py`) and never keeps more than there is room for.

How many are kept is decided by room: as many of the last seats as fit beside all else, and none where saved inputs go
to a drive, since who sends those away wants the memory.  The trade-off: nothing goes to a drive to make room for
graphs, since a drive wears and products do not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import TYPE_CHECKING

from offloadz.plan.alike import each_unit, once, seats_alike
from offloadz.plan.errors import ConfigError
from offloadz.plan.placement import Placement
from offloadz.plan.spec import ITEM_BYTES, Member, ModelSpec, Unit

if TYPE_CHECKING:
    from offloadz.plan.footprint import Batch, Footprint

CHOICES = ("auto", "all", "none", "cheap")
"""What recomputes: as room and speed decide, every block, none, or what is cheap of every block (`products.py`)."""


def check_recompute(recompute: str) -> None:
    """Raise ConfigError for what is no choice."""
    if recompute not in CHOICES:
        raise ConfigError(f"offload.recompute = {recompute!r}; needed: one of {', '.join(CHOICES)}")


def may_keep(placement: Placement, recompute: str) -> bool:
    """Whether graphs are kept as far as there is room for them."""
    return recompute == "auto" and placement.activations != "disk"


def kept_bytes(spec: ModelSpec, placement: Placement, batch: Batch) -> int:
    """Bytes of all graphs that a sweep keeps, when its forward has come to the end."""
    return sum(count * graph_kept_bytes(spec, seat, placement, batch) for seat, count in _keeping(spec, placement.kept))


@once
def _keeping(spec: ModelSpec, kept: int) -> tuple[tuple[int, int], ...]:
    """Seats that keep their graph: one of each kind, and how many are like it."""
    return tuple(seats_alike(spec, spec.keeping_seats(kept)))


def graph_kept_bytes(spec: ModelSpec, seat: int, placement: Placement, batch: Batch) -> int:
    """Bytes of the graph of one seat for the rows of a sweep, its input among them."""
    tokens = batch.rows_per_sweep * batch.length
    return int(tokens * graph_token_bytes(spec, seat, placement, batch))


def graph_token_bytes(spec: ModelSpec, seat: int, placement: Placement, batch: Batch) -> float:
    """Bytes of the graph of one seat for one token."""
    item, units = ITEM_BYTES[placement.compute], [spec.units[u] for u in spec.seats[seat].units]
    if spec.seats[seat].kind == "head":
        return sum(4.0 * u.sections[0].members[0].shape[0] for u in units)  # logits in fp32
    if spec.seats[seat].kind == "module":
        return 2.0 * item * sum(u.num_elements for u in units)
    scores = max(0, batch.score_copies - 1) * spec.num_heads * batch.length
    return float(item * (sum(_elements(spec)[u] for u in spec.seats[seat].units) + scores))


@once
def _elements(spec: ModelSpec) -> tuple[int, ...]:
    """Per unit the elements per token that autograd saves of a forward, if it is a block's, attention scores apart."""
    return each_unit(spec, lambda unit: _saved(spec, unit))


def _saved(spec: ModelSpec, unit: Unit) -> int:
    members = [m for s in unit.sections for m in s.members]
    products = [m for m in members if len(m.shape) > 1]
    norms = [m for m in members if len(m.shape) == 1 and _is_norm(m) and not m.name.endswith("bias")]
    wide = [m for m in norms if m.num_elements >= spec.hidden_size or not spec.num_heads]
    inner = spec.intermediate_size
    gated = sum(_inside(spec, m) for m in products if inner and _inside(spec, m) % inner == 0) >= 3 * inner > 0
    found = sum(_inside(spec, m) * prod(m.shape[:-2]) for m in products) + 2 * spec.hidden_size + inner * gated
    return found + 2 * sum(m.num_elements for m in wide) + 2 * _narrow_normed(spec, norms, products)


def _inside(spec: ModelSpec, member: Member) -> int:
    """The side of a product that is not the hidden state."""
    one, other = member.shape[-2:]
    return other if one == spec.hidden_size else one if other == spec.hidden_size else max(one, other)


def _narrow_normed(spec: ModelSpec, norms: list[Member], products: list[Member]) -> int:
    """Elements that go through norms narrower than the hidden state: a whole product, or one head after the other."""
    narrow = [m.num_elements for m in norms if spec.num_heads and m.num_elements < spec.hidden_size]
    sides = [_inside(spec, m) for m in products]
    heads = [n for n in narrow if n not in sides]
    each = (spec.num_heads * heads[0] + min(sides, default=0)) // 2 if heads else 0  # queries, and keys of fewer heads
    return sum(narrow) - sum(heads) + each * len(heads)


def _is_norm(member: Member) -> bool:
    return "norm" in member.name or ".ln" in member.name


UNLIMITED = 1 << 62
SLACK = 1.05
"""How far graphs may be above what the plan says of them before fewer are kept."""


def graph_room(
    spec: ModelSpec,
    placement: Placement,
    batch: Batch,
    found: Footprint,
    limits: Mapping[str, int | None],
    recompute: str,
    results_bytes: int = 0,
) -> int:
    """Bytes that kept graphs may take: what a step leaves of the memory it computes in; -1: none are kept.

    `results_bytes`: of results of products that lie in the same room.
    """
    if recompute == "none":
        return UNLIMITED
    if not placement.kept:
        return -1
    if recompute == "all":
        return int(SLACK * kept_bytes(spec, placement, batch))
    tier = "host" if placement.unified else "device"
    return (limits[tier] or 0) - found.bytes[tier]["step"] + kept_bytes(spec, placement, batch) + results_bytes


def most(count: int, fits: Callable[[int], bool]) -> int:
    """The most of `count` seats that may keep what they make so that it `fits`; fewer always need less."""
    low, high = 0, count
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
