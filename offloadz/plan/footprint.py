"""Bytes of every phase of a run, per tier, each as a named entry: what a plan prints and what a run is held to.

Storage is exact: it comes from the functions that size the buffers (`placement.slot_bytes`, `placement.home_bytes`).
Computation is a formula over the shapes of the largest block, so it knows no model family: torch keeps what goes in and
out of every product for the backward.  Measured with torch 2.13 on one block of Llama, Qwen3, Gemma 3 and GPT-2
(`tests/plan/test_footprint.py` measures it again), it is within 20 % of what torch allocates.

Tiers: `device`, `host`, `disk` (the swap path) and `checkpoint` (the disk of `train.output`).  On a box without a GPU
the device's memory *is* the host's, so everything stands under `host` and `device` is empty.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

from offloadz.plan.alike import once, part_kinds, seats_alike, unit_kinds
from offloadz.plan.kept import graph_kept_bytes, kept_bytes
from offloadz.plan.placement import COMPUTED, Placement, home_bytes, passing_bytes, slot_bytes
from offloadz.plan.products import micro_products_bytes, products_bytes
from offloadz.plan.spec import ITEM_BYTES, ModelSpec, Unit, aligned

PHASES = ("data", "load", "step", "save", "export")
TIERS = ("device", "host", "disk", "checkpoint")

BASELINE_BYTES = 440 << 20
"""Resident bytes of the interpreter with what a run imports: torch 2.13 218 MiB, transformers 5.24 with a model family
118, first use of autograd 18, numba, pyarrow and tensorboard 81 (VmRSS after each import, CPU build, 2 cores)."""

COMPILER_BYTES = 106 << 20
"""Torch's compiler beside them, once it has compiled a block (2.13, measured so); g++, a process of its own, takes 410
MiB more for some seconds."""

STAGING_BYTES = 16 << 20
"""Aligned buffers for rows of tables and for pieces on their way to or from files."""

DRIVER_BYTES = 512 << 20
"""What CUDA, its libraries and the allocator's rounding take of a GPU's memory: typical, unverified."""

EXTRA_ROOM_BYTES = 64 << 20
"""Asked for beyond a checkpoint's tensors: tokenizer, manifest, file system."""

TOKENIZER_FACTOR = 14
"""Bytes at the height of loading a tokenizer per byte of tokenizer.json (460 MiB for Gemma 3's 33 MB, measured)."""

RECORDS_FACTOR = 14
"""Bytes while samples are read and tokenised per byte of their files (99 MiB for 7.4 MB of dialogues, measured)."""

HEAD_CHUNK_TOKENS = 512
"""Most tokens whose logits against one tile exist at a time."""

HEAD_COPIES = 4
"""Arrays of a chunk's logits at the worst moment: logits, their exponentials, the gradient, one temporary."""

HIDDEN_COPIES = 4
"""Whole hidden states between two blocks: input and output, and in the backward their gradients."""

GRAPH_PER_PRODUCT = 2.35
GRAPH_PER_NORM = 1.4
"""Elements per token alive at the worst moment of a block's backward, per element of the wide side of its products and
of its norms' weights: fitted to the four families above, feed-forwards one to six times as wide as the hidden state."""


def baseline(kernels: str) -> int:
    """Resident bytes of a run before it has a buffer."""
    return BASELINE_BYTES + COMPILER_BYTES * (kernels == "compile")


@dataclass(frozen=True)
class Batch:
    """The rows of an optimizer step and how they are cut."""

    rows: int
    length: int
    """Tokens per row."""
    micro_rows: int
    sweeps: int = 1
    score_copies: int = 0
    """Arrays of (heads, length, length) per row that attention keeps; see `score_copies`."""

    @property
    def tokens(self) -> int:
        return self.rows * self.length

    @property
    def rows_per_sweep(self) -> int:
        return -(-self.rows // self.sweeps)

    @property
    def num_micros(self) -> int:
        """Micro-batches of a sweep."""
        return -(-self.rows_per_sweep // self.micro_rows)

    @property
    def tokens_per_micro(self) -> int:
        return min(self.micro_rows, self.rows_per_sweep) * self.length


@dataclass(frozen=True)
class Footprint:
    """`terms[phase][tier][name]` in bytes."""

    terms: Mapping[str, Mapping[str, Mapping[str, int]]]

    @cached_property
    def bytes(self) -> dict[str, dict[str, int]]:
        """Bytes per tier and phase."""
        return {t: {p: sum(self.terms[p].get(t, {}).values()) for p in self.terms} for t in TIERS}

    @cached_property
    def peak(self) -> dict[str, int]:
        """The largest phase of each tier."""
        return {tier: max(phases.values()) for tier, phases in self.bytes.items()}


def footprint(
    spec: ModelSpec,
    placement: Placement,
    batch: Batch,
    *,
    baseline_bytes: int = BASELINE_BYTES,
    keep: int = 2,
    export_item_bytes: int = 2,
    reading_bytes: int = 0,
    random: bool = False,
    linked: bool = False,
) -> Footprint:
    """Bytes of data, load, step, save and export.

    `keep`: checkpoints that stay (one more exists while a new one is written).  `export_item_bytes`: per element of the
    exported directory.  `reading_bytes`: beside the interpreter while data are read (`reading`); they are given back
    before the weights come.  `random`: the weights are drawn, one module at a time.  `linked`: checkpoints are hard
    links to the state on disk, whose copies for them are counted there.
    """
    rest = _at_rest(spec, placement)
    base = {"interpreter": baseline_bytes, "staging": STAGING_BYTES}
    slots = {
        f"slots {pool}": n * placement.slots
        for pool, n in slot_bytes(
            spec, placement, saved_bytes(spec, placement, batch), micro_products_bytes(spec, placement, batch)
        ).items()
    }
    passing = {"one part on its way": _largest_part(spec)}
    drawn = {"one module drawn at random": _largest_tensor(spec) * 4} if random else {}
    kept_tier, kept = _kept(spec, placement, batch)
    main = "host" if placement.unified else "device"
    working = computation(spec, placement, batch)
    step: dict[str, dict[str, int]] = {"host": {**base, **rest["host"]}, "device": dict(rest["device"])}
    if not placement.unified:
        step["device"]["driver and libraries"] = DRIVER_BYTES
        step["device"]["rounding and widening"] = rounding_bytes(spec, placement)
    for name, nbytes in slots.items():
        step[main if name.split()[1].startswith(COMPUTED) else "host"][name] = nbytes
    step[main] |= working
    if (results := products_bytes(spec, placement, batch)) and len(placement.products_route) > 1:
        step["host"]["results of products"] = results
    step["disk"] = dict(rest["disk"])
    step.setdefault(kept_tier, {})["saved inputs"] = kept
    still = {"host": {**base, **rest["host"], **passing}, "device": rest["device"], "disk": rest["disk"]}
    # Slots are one allocation whose pages stay once they were written, so they count while a checkpoint is saved.
    resting = {"host": still["host"] | {k: v for k, v in step["host"].items() if k.startswith("slots")}}
    written = 0 if linked else (keep + 1) * checkpoint_bytes(spec)
    kept_checkpoints = {"checkpoints": written, "room beside them": EXTRA_ROOM_BYTES}
    save = {**still, **resting, "checkpoint": kept_checkpoints}
    export = {**still, **resting, "checkpoint": {"final": spec.num_elements * export_item_bytes}}
    data = {"host": {"interpreter": baseline_bytes, "tokenizer and records": reading_bytes}}
    # Slots that a drive fills are locked for it where the limit allows, and with that resident from the start.
    fixed = {k: v for k, v in resting["host"].items() if k.startswith("slots host")}
    load = {**still, "host": still["host"] | drawn | fixed}
    return Footprint({"data": data, "load": load, "step": step, "save": save, "export": export})


def rounding_bytes(spec: ModelSpec, placement: Placement) -> int:
    """Bytes on the device for gradients that are rounded and weights that are widened on their way: a buffer for each
    stream, and one part in double, of which the sum of squares is taken."""
    largest = max((p.num_elements for p, trained in part_kinds(spec) if trained), default=0)
    return 2 * aligned(passing_bytes(spec, placement)) + 8 * largest


def computation(spec: ModelSpec, placement: Placement, batch: Batch) -> dict[str, int]:
    """Bytes beside the planned buffers while a block, or the head, computes: named entries."""
    item = ITEM_BYTES[placement.compute]
    hidden = HIDDEN_COPIES * batch.rows_per_sweep * batch.length * spec.hidden_size * item
    graph = _largest_graph(spec, batch, item)
    widest = _widest(spec)
    chunk = HEAD_COPIES * min(batch.tokens_per_micro, HEAD_CHUNK_TOKENS) * _tile_rows(spec) * 4
    block = graph + widest * 4
    found = {"hidden states": hidden}
    if (results := products_bytes(spec, placement, batch)) and len(placement.products_route) == 1:
        found["results of products"] = results
        graph -= min(graph, micro_products_bytes(spec, placement, batch))  # a graph made of them has them already
        block = graph + widest * 4
    if kept := kept_bytes(spec, placement, batch):
        seats = [seat for seat, _ in seats_alike(spec, spec.unfolding_seats) if spec.seats[seat].kind != "head"]
        own = max((graph_kept_bytes(spec, s, placement, batch) for s in seats), default=0) // batch.num_micros
        beside = max(chunk, block - own)
        if kept + beside >= block or placement.kept == len(spec.unfolding_seats):
            return found | {"kept graphs": kept, "beside a kept graph": beside}
    if block >= chunk:
        return found | {"one block's graph": graph, "largest weight gradient": widest * 4}
    return found | {"logits of a chunk": chunk}


@once
def _widest(spec: ModelSpec) -> int:
    """Elements of the largest tensor of a block."""
    blocks = (k.unit for k in unit_kinds(spec) if k.unit.kind == "block")
    return max((m.num_elements for u in blocks for s in u.sections for m in s.members), default=0)


@once
def _tile_rows(spec: ModelSpec) -> int:
    """Rows of the largest tile of a head."""
    tiles = (spec.units[u] for seat in spec.seats if seat.kind == "head" for u in seat.units)
    return max((m.shape[0] for u in tiles for s in u.sections for m in s.members), default=0)


@once
def _largest_graph(spec: ModelSpec, batch: Batch, item_bytes: int) -> int:
    """Bytes of the largest graph of a unit that is computed whole."""
    whole = (kind.unit for kind in unit_kinds(spec) if kind.unit.kind != "tile")
    return max((graph_bytes(spec, unit, batch, item_bytes) for unit in whole), default=0)


def graph_bytes(spec: ModelSpec, unit: Unit, batch: Batch, item_bytes: int) -> int:
    """Bytes of one micro-batch's forward and backward through a unit, its weights and their gradients left out."""
    members = [m for s in unit.sections for m in s.members]
    products = sum(max(m.shape[-2:]) * prod(m.shape[:-2]) for m in members if len(m.shape) > 1)
    norms = sum(m.num_elements for m in members if len(m.shape) == 1 and ("norm" in m.name or ".ln" in m.name))
    per_token = GRAPH_PER_PRODUCT * products + GRAPH_PER_NORM * norms
    scores = batch.score_copies * spec.num_heads * batch.length if unit.kind == "block" else 0
    return int(batch.tokens_per_micro * item_bytes * (per_token + scores))


def score_copies(attention: str, config: Mapping[str, Any]) -> int:
    """Arrays of attention scores alive in a block's backward: 0 with sdpa, which makes none; 2 with eager attention;
    4 with dropout in the attention, which needs the scores whole under every implementation on a CPU."""
    dropout = max(float(config.get(key) or 0.0) for key in ("attention_dropout", "attn_pdrop"))
    if config.get("model_type") == "gpt2" and "attn_pdrop" not in config:
        dropout = 0.1  # the family's default, which its config.json leaves out
    if dropout > 0:
        return 4
    return 2 if attention == "eager" else 0


def saved_bytes(spec: ModelSpec, placement: Placement, batch: Batch) -> int:
    """Bytes of the saved input of one micro-batch."""
    return batch.tokens_per_micro * spec.hidden_size * ITEM_BYTES[placement.compute]


@once
def num_saved(spec: ModelSpec, kept: int = 0) -> int:
    """Seats whose input is saved for the backward of a sweep; `kept`: the last ones, whose graph is."""
    return sum(spec.seats[seat].kind != "head" for seat in spec.other_seats(kept))


@once
def checkpoint_bytes(spec: ModelSpec) -> int:
    """Bytes of a portable checkpoint: master and moments in fp32 under every recipe, frozen weights as they are."""
    trained = sum(k.count * k.unit.num_trainable for k in unit_kinds(spec))
    still = ((k.count, s) for k in unit_kinds(spec) for s in k.unit.sections if not s.trainable)
    frozen = sum(count * s.num_elements * ITEM_BYTES[s.dtype] for count, s in still)
    return trained * (4 + 4 * spec.recipe.num_moments) + frozen


def _at_rest(spec: ModelSpec, placement: Placement) -> dict[str, dict[str, int]]:
    """Homes by tier, empty ones left out; on a CPU what is kept on the device is host memory."""
    rest: dict[str, dict[str, int]] = {"device": {}, "host": {}, "disk": {}}
    for tier, kinds in home_bytes(spec, placement).items():
        where = "host" if tier == "device" and placement.unified else tier
        rest[where] |= {kind: nbytes for kind, nbytes in kinds.items() if nbytes}
    return rest


def _kept(spec: ModelSpec, placement: Placement, batch: Batch) -> tuple[str, int]:
    """Tier and bytes of the inputs kept during a sweep."""
    tier = placement.activations
    nbytes = saved_bytes(spec, placement, batch)
    each = aligned(nbytes) if tier == "disk" else nbytes
    where = "host" if tier == "device" and placement.unified else tier
    return where, num_saved(spec, placement.kept) * batch.num_micros * each


def _largest_part(spec: ModelSpec) -> int:
    """Bytes to hold one part while it goes to or from a file: weights, state, and what is made of them in fp32 (the
    master, and moments that are stored in fewer bytes)."""
    made = 4 + (4 * spec.recipe.num_moments if spec.recipe.code_bytes < 4 else 0)
    return max((p.weight_bytes + p.state_bytes + made * p.num_elements for p, _ in part_kinds(spec)), default=0)


@once
def _largest_tensor(spec: ModelSpec) -> int:
    """Elements of the largest logical tensor, its tiles together."""
    sizes: dict[str, int] = {}
    for unit in spec.units:
        for member in (m for s in unit.sections for m in s.members):
            sizes[member.name] = sizes.get(member.name, 0) + member.num_elements
    return max(sizes.values(), default=0)


def reading(tokenizer_bytes: int, records_bytes: int) -> int:
    """Bytes beside the interpreter while a tokenizer of this file size reads records of this size."""
    return TOKENIZER_FACTOR * tokenizer_bytes + RECORDS_FACTOR * records_bytes
