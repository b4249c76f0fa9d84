"""Compiled blocks and Liger's kernels on a device: the plain loop there is matched, placement never changes a bit.

Written where there was no GPU.  `compile` is rehearsed on the CPU where a C++ compiler is, Liger's kernels are not.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from reference import plain_run
from tiny_models import Outcome, assert_close, assert_same_bits, batches, start_of, tiny, train

import offloadz
from offloadz.plan.errors import ConfigError

KINDS = ("parameters", "gradients", "optimizer_state", "activations")
DISK, HOST, DEVICE = (dict.fromkeys(KINDS, tier) for tier in ("disk", "host", "device"))
STEPS = batches(5)


def ran(kernels: str, device: Any, swap: Path, steps: list[dict[str, torch.Tensor]] = STEPS, **how: Any) -> Outcome:
    """A tiny Llama by these kernels; skipped where they do not run at all."""
    how = {"swap": swap, "device": device, "micro_batch_size": 2, **how}
    try:
        run = offloadz.offload(tiny("llama"), offloadz.AdamW(lr=1e-3), kernels=kernels, **how)
    except ConfigError as error:
        if 'write "eager"' not in str(error):
            raise
        pytest.skip(str(error))
    with run:
        return train(run, steps)


def plain(device: Any, steps: list[dict[str, torch.Tensor]], **how: Any) -> Any:
    trace = plain_run(tiny("llama").to(device.torch), [device.bring(step) for step in steps], micro_rows=2, **how)
    trace.weights = {name: weight.cpu() for name, weight in trace.weights.items()}
    return trace


@pytest.mark.parametrize("kernels", ["compile", "liger"])
def test_float32_matches_the_plain_loop(kernels: str, device: Any, swap: Path) -> None:
    found = ran(kernels, device, swap, poison=True, **DISK)
    assert_close(found, plain(device, STEPS), start_of(tiny("llama")), kernels)


@pytest.mark.parametrize("kernels", ["compile", "liger"])
def test_bfloat16_follows_the_plain_loop(kernels: str, device: Any, swap: Path) -> None:
    steps = batches(20)
    found = ran(kernels, device, swap, steps, dtype=torch.bfloat16, **HOST)
    wanted = plain(device, steps, bf16_weights=True)
    for step, (a, b) in enumerate(zip(found.losses, wanted.losses, strict=True)):
        assert abs(a - b) <= 5e-3 * abs(b), f"step {step}: {a}, wanted {b}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kernels", ["compile", "liger"])
def test_placement_slots_and_what_is_kept_have_the_same_bits(
    kernels: str, dtype: torch.dtype, device: Any, swap: Path
) -> None:
    wanted = ran(kernels, device, swap, dtype=dtype, recompute="all", **HOST)
    ways = [(DISK, "none", 2), (DEVICE, "all", 1), ({**HOST, "parameters": "disk"}, "none", 3)]
    ways += [(DEVICE, "cheap", 2), (HOST, "cheap", 1)] * (kernels == "liger")
    for where, recompute, slots in ways:
        found = ran(kernels, device, swap, dtype=dtype, recompute=recompute, slots=slots, poison=True, **where)
        assert_same_bits(found, wanted, f"{where}, recompute {recompute}, {slots} slots")
