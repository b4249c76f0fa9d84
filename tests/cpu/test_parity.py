"""Same numbers everywhere: placement, slots and sweeps never change a bit; splits and the plain loop agree
within the tolerances of the design.  Clipping is on and fires.  (Main check of all kinds in which values move.)

The usual run holds every one of the 81 placements once, with family, slots and split drawn by a fixed seed, and every
slots x split on everything on disk.  `pytest -m full` holds the whole product, 4,374 runs, and a hundred poisoned runs
of every placement.
"""

from __future__ import annotations

import random
from functools import cache
from itertools import product
from pathlib import Path

import pytest
import torch
from reference import Trace, plain_run
from tiny_models import FAMILIES, Outcome, assert_close, assert_same_bits, batches, start_of, tiny, train

import offloadz

KINDS = ("parameters", "gradients", "optimizer_state", "activations")
PLACEMENTS = list(product(("device", "host", "disk"), repeat=4))
CUTS = [(4, 1), (2, 1), (2, 2), (1, 1), (1, 2), (1, 4)]
"""(rows of a micro-batch, sweeps) of a batch of four rows."""
MICROS = (4, 2, 1)
STEPS = batches(5)


def ran(
    family: str, placement: tuple[str, ...], slots: int, cut: tuple[int, int], swap: Path, **more: object
) -> Outcome:
    """Five steps under these settings."""
    where = dict(zip(KINDS, placement, strict=True))
    with offloadz.offload(
        tiny(family),
        offloadz.AdamW(lr=1e-3),
        swap=swap,
        slots=slots,
        micro_batch_size=cut[0],
        sweeps=cut[1],
        **where,
        **more,
    ) as run:
        out = train(run, STEPS)
        assert run.session.placement.slots == slots
        assert tuple(getattr(run.session.placement, k.removesuffix("_state")) for k in KINDS) == placement
    return out


@cache
def simplest(family: str, micro: int) -> Outcome:
    """All in host memory, one slot, one sweep, every block recomputed: what every other setting must equal."""
    return ran(family, ("host",) * 4, 1, (micro, 1), Path("unused"), recompute="all")


@cache
def plain(family: str, micro: int) -> Trace:
    return plain_run(tiny(family), STEPS, micro_rows=micro)


def drawn(index: int) -> tuple[str, int, tuple[int, int]]:
    source = random.Random(index)
    return source.choice(FAMILIES), source.choice((1, 2, 3)), source.choice(CUTS)


HUNDRED = pytest.param(100, marks=[pytest.mark.full, pytest.mark.timeout(1800)])


@pytest.mark.parametrize("runs", [1, HUNDRED])
@pytest.mark.parametrize("index", range(len(PLACEMENTS)), ids=["-".join(p) for p in PLACEMENTS])
def test_every_placement_has_the_same_bits(index: int, runs: int, swap: Path) -> None:
    for seed in range(index, index + runs * len(PLACEMENTS), len(PLACEMENTS)):
        family, slots, cut = drawn(seed)
        how = {"recompute": ("all", "none")[seed % 2], "poison": runs > 1, "seed": seed}
        found = ran(family, PLACEMENTS[index], slots, cut, swap, **how)
        assert_same_bits(found, simplest(family, cut[0]), f"{family}, slots {slots}, rows and sweeps {cut}, {how}")


GRID = {"llama": ("disk",) * 4, "qwen3": ("disk", "host", "disk", "host"), "gpt2": ("host", "disk", "device", "disk")}


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_slots_and_sweeps_have_the_same_bits(family: str, cut: tuple[int, int], swap: Path) -> None:
    for slots in (1, 2, 3) if family == "llama" else (1 + (CUTS.index(cut) + FAMILIES.index(family)) % 3,):
        found = ran(family, GRID[family], slots, cut, swap)
        assert_same_bits(found, simplest(family, cut[0]), f"slots {slots}")


@pytest.mark.full
@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("slots", (1, 2, 3))
@pytest.mark.parametrize("family", FAMILIES)
def test_the_whole_product_has_the_same_bits(family: str, slots: int, cut: tuple[int, int], swap: Path) -> None:
    for placement in PLACEMENTS:
        assert_same_bits(ran(family, placement, slots, cut, swap), simplest(family, cut[0]), str(placement))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_plain_loop_agrees_at_every_split(family: str) -> None:
    start = start_of(tiny(family))
    for micro in MICROS:
        found = simplest(family, micro)
        assert_close(found, plain(family, micro), start, f"micro-batches of {micro}")
        assert_close(found, simplest(family, 4), start, f"micro-batches of {micro} against one")


@pytest.mark.parametrize("family", FAMILIES)
def test_clipping_fires_in_these_runs(family: str) -> None:
    assert any(norm > 1.0 for norm in simplest(family, 4).norms)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_that_caches_by_default_trains_without_its_cache(family: str, swap: Path) -> None:
    """Trap 1: with a live cache the loss is right and every block's gradient is wrong."""
    model = tiny(family)
    assert model.config.use_cache
    start = start_of(model)
    with offloadz.offload(model, offloadz.AdamW(lr=1e-3), swap=swap, parameters="disk", optimizer_state="disk") as run:
        found = train(run, STEPS, loss_fn=lambda m, b: m(**b).loss)
    assert_close(found, plain(family, 4), start)


def test_the_check_would_see_a_wrong_gradient() -> None:
    """Halved gradients move Adam's weights very little: the norm must tell (trap 26)."""
    found, start = simplest("llama", 4), start_of(tiny("llama"))
    halved = Outcome(found.losses, [norm / 2 for norm in found.norms], found.weights)
    with pytest.raises(AssertionError, match="norm of step 0"):
        assert_close(halved, plain("llama", 4), start)
    nudged = {name: w.clone() for name, w in found.weights.items()}
    nudged["model.layers.1.mlp.up_proj.weight"] += 1e-3 * (
        nudged["model.layers.1.mlp.up_proj.weight"] - start["model.layers.1.mlp.up_proj.weight"]
    )
    with pytest.raises(AssertionError, match="up_proj"):
        assert_close(Outcome(found.losses, found.norms, nudged), plain("llama", 4), start)
    flipped = {name: w.clone() for name, w in found.weights.items()}
    flipped["lm_head.weight"].view(torch.int32)[0, 0] ^= 1
    with pytest.raises(AssertionError, match=r"lm_head.weight"):
        assert_same_bits(Outcome(found.losses, found.norms, flipped), found)
