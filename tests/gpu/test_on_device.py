"""A run on a device: the plain loop on the same device is matched, and placement never changes a bit there.

Written where there was no GPU and rehearsed on the CPU; the tolerances are those of the tests of the CPU.
"""

from __future__ import annotations

import warnings
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import plain_run
from tiny_models import FAMILIES, Outcome, assert_close, assert_same_bits, batches, start_of, tiny, train

import offloadz
from offloadz.model.run import Run

KINDS = ("parameters", "gradients", "optimizer_state", "activations")
DISK, HOST, DEVICE = (dict.fromkeys(KINDS, tier) for tier in ("disk", "host", "device"))
SPREAD = [p for i, p in enumerate(product(("device", "host", "disk"), repeat=4)) if i % 7 == 3]
STEPS = batches(5)


def offloaded(family: str, device: Any, swap: Path, **how: Any) -> Run:
    how = {"micro_batch_size": 2, **how}
    return offloadz.offload(tiny(family), offloadz.AdamW(lr=1e-3), swap=swap, device=device, **how)


def ran(family: str, device: Any, swap: Path, steps: list[dict[str, torch.Tensor]] = STEPS, **how: Any) -> Outcome:
    with offloaded(family, device, swap, **how) as run:
        return train(run, steps)


def plain(family: str, device: Any, steps: list[dict[str, torch.Tensor]], **how: Any) -> Any:
    """The plain loop on the same device; its weights come home."""
    moved = [device.bring(step) for step in steps]
    trace = plain_run(tiny(family).to(device.torch), moved, micro_rows=2, **how)
    trace.weights = {name: weight.cpu() for name, weight in trace.weights.items()}
    return trace


@pytest.mark.parametrize("recompute", ["all", "none"])
@pytest.mark.parametrize("where", [HOST, DISK, DEVICE], ids=["host", "disk", "device"])
@pytest.mark.parametrize("family", FAMILIES)
def test_float32_matches_the_plain_loop(
    family: str, where: dict[str, str], recompute: str, device: Any, swap: Path
) -> None:
    found = ran(family, device, swap, poison=True, recompute=recompute, **where)
    assert_close(found, plain(family, device, STEPS), start_of(tiny(family)), str(where))


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_follows_the_plain_loop(family: str, device: Any, swap: Path) -> None:
    steps = batches(20)
    found = ran(family, device, swap, steps, dtype=torch.bfloat16, **HOST)
    wanted = plain(family, device, steps, bf16_weights=True)
    for step, (a, b) in enumerate(zip(found.losses, wanted.losses, strict=True)):
        assert abs(a - b) <= 5e-3 * abs(b), f"step {step}: {a}, wanted {b}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_placement_slots_and_poison_have_the_same_bits(dtype: torch.dtype, device: Any, swap: Path) -> None:
    wanted = ran("qwen3", device, swap, dtype=dtype, slots=1, recompute="all", **HOST)
    for index, placement in enumerate(SPREAD):
        where = dict(zip(KINDS, placement, strict=True))
        how = {"slots": 1 + index % 3, "poison": index % 2 == 0, "seed": index, "dtype": dtype, "recompute": "all"}
        assert_same_bits(ran("qwen3", device, swap, **how, **where), wanted, f"{where}, {how}")


def test_dropout_draws_the_same_masks_again(device: Any, swap: Path) -> None:
    outcomes = []
    for where in (HOST, DISK):
        torch.manual_seed(3)
        model = tiny("gpt2", resid_pdrop=0.2, attn_pdrop=0.1, embd_pdrop=0.0).train()
        how = {"swap": swap, "micro_batch_size": 2, "device": device, "seed": 11}
        with offloadz.offload(model, offloadz.AdamW(lr=1e-3), **how, **where) as run:
            outcomes.append(train(run, STEPS))
    assert_same_bits(outcomes[1], outcomes[0])


def test_state_goes_from_device_to_device(device: Any, swap: Path, tmp_path: Path) -> None:
    """Saved here, gone on from on the CPU and here: equal weights in front, close losses behind."""
    with offloaded("llama", device, swap, **DEVICE) as run:
        train(run, STEPS[:2])
        run.save(tmp_path / "checkpoint")
    outcomes = []
    for where in (device, "cpu"):
        with offloaded("llama", where, swap, **HOST) as run:
            run.load(tmp_path / "checkpoint")
            outcomes.append(train(run, STEPS[2:]))
    for a, b in zip(outcomes[0].losses, outcomes[1].losses, strict=True):
        assert abs(a - b) <= 1e-4 * abs(b)


def test_memory_stays_within_the_plan(device: Any, swap: Path) -> None:
    if device.torch.type != "cpu":
        torch.accelerator.reset_peak_memory_stats()
    with offloaded("llama", device, swap, batch_size=4, max_length=24, **HOST) as run:
        train(run, STEPS)
        assert 0 < run.report.bytes["device_peak"] <= 1.1 * run.plan.peak["device"]


def test_answers_and_own_losses_on_the_device(device: Any, swap: Path) -> None:
    """Batches may lie on the host; what comes back is where the model computes, generated ids where they were asked."""
    with offloaded("llama", device, swap, **DISK) as run:
        loss = run.step(STEPS[0], loss_fn=lambda model, batch: model(**batch).loss)
        assert torch.isfinite(loss)
        with torch.no_grad():
            assert run.model(**STEPS[0]).logits.device == device.torch
            asked = STEPS[0]["input_ids"][:1, :4]
            assert run.model.generate(asked, max_new_tokens=3, do_sample=False).shape == (1, 7)


def test_the_host_waits_as_often_for_two_blocks_as_for_four(device: Any, swap: Path) -> None:
    """What synchronises the host (a lookup, the loss) does not grow with the blocks."""
    if device.torch.type != "cuda":
        pytest.skip("only CUDA tells when the host waits")
    counts = []
    for layers in (2, 4):
        model = tiny("llama", num_hidden_layers=layers)
        with offloadz.offload(model, offloadz.AdamW(lr=1e-3), swap=swap, device=device, **HOST) as run:
            train(run, STEPS[:2])
            torch.cuda.set_sync_debug_mode("warn")
            with warnings.catch_warnings(record=True) as found:
                warnings.simplefilter("always")
                run.step(STEPS[2])
            torch.cuda.set_sync_debug_mode("default")
            counts.append(len(found))
    assert counts[0] == counts[1]


def test_the_pools_are_page_locked(device: Any, swap: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In their exact size, or one warning with numbers; all of it is given back."""
    if device.torch.type == "cpu":
        pytest.skip("nothing is locked for a rehearsal")
    run = offloaded("llama", device, swap, **HOST)
    capacities = sum(pool.capacity_bytes for pool in run.session.room.pools)
    told = [record for record in caplog.records if "page-locking" in record.message]
    assert sum(device._locked.values()) == capacities or len(told) == 1
    run.step(STEPS[0])
    run.close()
    assert not device._locked
