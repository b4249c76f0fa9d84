"""bf16 working weights over an exact fp32 master: the split, parity over placements, and the plain loop's losses."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch
from reference import plain_run
from tiny_models import FAMILIES, assert_same_bits, batches, tiny, train, whole_tensors

import offloadz

STEPS = batches(20)
KINDS = ("parameters", "gradients", "optimizer_state", "activations")


def offloaded(family: str, swap: Path, placement: tuple[str, ...] = ("disk",) * 4, **how: object) -> offloadz.Run:
    how = {"slots": 2, "micro_batch_size": 2, **how}
    where = dict(zip(KINDS, placement, strict=True))
    return offloadz.offload(tiny(family), offloadz.AdamW(lr=1e-3), swap=swap, dtype=torch.bfloat16, **where, **how)


@pytest.mark.parametrize("family", FAMILIES)
def test_twenty_losses_follow_the_plain_loop(family: str, swap: Path) -> None:
    wanted = plain_run(tiny(family), STEPS, micro_rows=2, bf16_weights=True)
    with offloaded(family, swap) as run:
        found = train(run, STEPS)
    for step, (a, b) in enumerate(zip(found.losses, wanted.losses, strict=True)):
        assert abs(a - b) <= 5e-3 * abs(b), f"step {step}: {a}, wanted {b}"
    for step, (a, b) in enumerate(zip(found.norms, wanted.norms, strict=True)):
        assert abs(a - b) <= 2e-2 * abs(b), f"norm of step {step}: {a}, wanted {b}"


@pytest.mark.parametrize("family", FAMILIES)
def test_placement_slots_and_sweeps_have_the_same_bits(family: str, swap: Path) -> None:
    """Low master bits too; a spread of placements, as `test_parity.py` has it for fp32."""
    spread = [p for i, p in enumerate(product(("device", "host", "disk"), repeat=4)) if i % 16 == 4]
    wanted = None
    for index, placement in enumerate(spread):
        with offloaded(family, swap, placement, slots=1 + index % 3, sweeps=1 + index % 2) as run:
            found = train(run, STEPS[:3])
            found.weights |= {f"{n}, low": t for n, t in whole_tensors(run, "low").items()}
            found.weights |= {f"{n}, second": t for n, t in whole_tensors(run, "exp_avg_sq").items()}
        wanted = wanted or found
        assert_same_bits(found, wanted, str(placement))


def test_the_working_weight_is_the_master_rounded_to_nearest(swap: Path) -> None:
    """master = ((weight - (low >> 15)) << 16) | low, in integers; the weight is its nearest bf16, ties away."""
    with offloaded("llama", swap) as run:
        train(run, STEPS[:3])
        moved = 0
        for view in run.session.parts():
            assert view.low is not None
            low = view.low.view(torch.int16).to(torch.int64) & 0xFFFF
            word = view.weight.view(torch.int16).to(torch.int64) & 0xFFFF
            bits = ((word - (low >> 15)) << 16) | low
            master = torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32).view(torch.float32)
            nearest = master.bfloat16()
            tie = low == 0x8000
            assert torch.equal(nearest[~tie], view.weight[~tie])
            assert bool((view.weight[tie].float().abs() >= master[tie].abs()).all())
            moved += int((low != 0).sum())
    assert moved > 10_000


def test_steps_below_the_rounding_unit_add_up(swap: Path) -> None:
    """K08: at a rate far below a bf16 step the masters move, and after enough steps the working weights do."""
    with offloadz.offload(
        tiny("llama"),
        offloadz.AdamW(lr=1e-6, weight_decay=0.0),
        swap=swap,
        dtype=torch.bfloat16,
        optimizer_state="disk",
    ) as run:
        first = whole_tensors(run)
        train(run, STEPS[:1])
        early = whole_tensors(run)
        train(run, STEPS * 2)
        late = whole_tensors(run)
    share = lambda now: sum(int((now[n] != first[n]).sum()) for n in now) / sum(w.numel() for w in now.values())  # noqa: E731
    assert share(early) < 0.1
    assert share(late) > 3 * share(early)
