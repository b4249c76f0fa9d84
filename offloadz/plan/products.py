"""What results of products take that are kept from forward to backward, and the time of what is then made again.

Between recomputing a block and keeping its graph: the results of its products and of attention are kept, about half the
bytes of its graph, and the norms, activations and reshapes between them are made again in the backward.  Bytes are a
formula over shapes that knows no family: what attention makes, and every product whose result is read (`unread.py`).
Within 2 % of what stays for Llama, Mistral, Qwen3, Gemma 3, OLMo 2 and GPT-NeoX (`tests/plan/test_products.py` measures
it again); of weights that lie transposed (GPT-2) a quarter low, of routed experts as much too high as few of them are
asked.

The trade-off: time between products counts as memory traffic, which is what it is on a GPU; on a CPU with slow
exponentials it is more.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING

from offloadz.plan.alike import once, seats_alike
from offloadz.plan.errors import ConfigError
from offloadz.plan.kept import UNLIMITED, graph_token_bytes, kept_bytes, may_keep
from offloadz.plan.left import most_products, product_seats
from offloadz.plan.placement import Placement
from offloadz.plan.spec import ITEM_BYTES, ModelSpec, Unit
from offloadz.plan.unread import unread_elements
from offloadz.plan.words import human

if TYPE_CHECKING:
    from offloadz.plan.footprint import Batch, Footprint

AGAIN_PASSES = 2
"""Times that the bytes of a graph go through memory while what lies between the products is made again: each is read by
what makes the next, and written."""


def products_bytes(spec: ModelSpec, placement: Placement, batch: Batch) -> int:
    """Bytes of all results that a sweep keeps, when its forward has come to the end."""
    alike = _making(spec, placement.cheap, placement.kept)
    tokens = batch.rows_per_sweep * batch.length
    return sum(count * int(tokens * product_token_bytes(spec, seat, placement)) for seat, count in alike)


def micro_products_bytes(spec: ModelSpec, placement: Placement, batch: Batch) -> int:
    """Bytes of one micro-batch's results of the seat that keeps most of them."""
    alike = _making(spec, placement.cheap, placement.kept)
    most = max((product_token_bytes(spec, seat, placement) for seat, _ in alike), default=0.0)
    return int(batch.tokens_per_micro * most)


@once
def _making(spec: ModelSpec, cheap: int, kept: int) -> tuple[tuple[int, int], ...]:
    """Seats that keep results of their products: one of each kind, and how many are like it."""
    return tuple(seats_alike(spec, sorted(product_seats(spec, cheap, kept))))


def product_token_bytes(spec: ModelSpec, seat: int, placement: Placement) -> float:
    """Bytes of the results of one seat for one token."""
    item, found = ITEM_BYTES[placement.compute], _made(spec) if placement.opaque else _read(spec)
    blocks = spec.seats[seat].kind == "block" and len(spec.seats[seat].units)
    return float(sum(item * found[unit] for unit in spec.seats[seat].units) + 4 * spec.num_heads * blocks)


def again_bytes(spec: ModelSpec, seat: int, placement: Placement, batch: Batch) -> float:
    """Bytes through memory, for one token, of making again what lies between the products."""
    return AGAIN_PASSES * graph_token_bytes(spec, seat, placement, batch)


@once
def _made(spec: ModelSpec) -> tuple[int, ...]:
    """Per unit the elements per token that its products make."""
    return tuple(_made_by(spec, unit) for unit in spec.units)


@once
def _read(spec: ModelSpec) -> tuple[int, ...]:
    """Of these without a last product that leads back to the hidden state and that no backward reads."""
    unread = (spec.hidden_size * (found > 0) for found in unread_elements(spec))
    return tuple(made - left_out for made, left_out in zip(_made(spec), unread, strict=True))


def _made_by(spec: ModelSpec, unit: Unit) -> int:
    """What every product makes, and attention: as much as goes into the product behind it, which leads back to the
    hidden state and is not that of the feed-forward."""
    shapes = [m.shape for s in unit.sections for m in s.members if len(m.shape) > 1]
    behind = [shape[-1] for shape in shapes if shape[-2] == spec.hidden_size and shape[-1] != spec.intermediate_size]
    attended = max(behind, default=0) if spec.num_heads and unit.kind == "block" else 0
    return sum(shape[-2] * prod(shape[:-2]) for shape in shapes) + attended


def products_room(
    spec: ModelSpec,
    placement: Placement,
    batch: Batch,
    found: Footprint,
    limits: Mapping[str, int | None],
    recompute: str,
) -> int:
    """Bytes that results of products may take, as `graph_room` of graphs; the same where both lie in one memory."""
    if not placement.cheap:
        return -1
    if recompute != "auto":
        return UNLIMITED
    together = len(placement.products_route) == 1
    tier = "host" if placement.unified or not together else "device"
    held = products_bytes(spec, placement, batch) + (kept_bytes(spec, placement, batch) if together else 0)
    return (limits[tier] or 0) - found.bytes[tier]["step"] + held


def kept_reason(spec: ModelSpec, placement: Placement, batch: Batch, recompute: str) -> str:
    """Which seats recompute, and what of them, and why, in a line."""
    num, kept, cheap = len(spec.unfolding_seats), placement.kept, placement.cheap
    told = f"{kept} of {num} graphs are kept, {human(kept_bytes(spec, placement, batch))}"
    if cheap:
        told += f", and of {cheap} blocks the results of products, {human(products_bytes(spec, placement, batch))}"
    again = num - kept - cheap
    told += f" (gradient checkpointing in {again} of {num} blocks)"
    if recompute != "auto":
        return f"recompute {recompute}: as configured, {told}"
    every = cheap == most_products(spec, kept)
    why = "memory has room" if kept == num else "more do not fit"
    why = f"a step is sooner done than with these made again{'' if every else '; more do not fit'}" if cheap else why
    why = why if may_keep(placement, recompute) else "their inputs are to be on disk, not in memory"
    name = "none" if kept == num else "cheap" if cheap and every else str(again) if kept or cheap else "all"
    return f"recompute {name}: {told}; {why}"


def check_cheap(recompute: str, kernels: str) -> None:
    """Raise ConfigError for kernels whose products nobody sees."""
    if recompute == "cheap" and kernels == "compile":
        raise ConfigError(
            'offload.recompute = "cheap" beside model.kernels = "compile" is not built: compiled blocks do not show '
            'their products; set offload.recompute = "auto", or model.kernels = "eager"'
        )
