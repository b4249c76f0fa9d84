"""Ranks on devices of their own: what one process computes on one of them, and ranks among each other the same.

Written where there was no GPU; with OFFLOADZ_REHEARSE=1 each rank has a rehearsed one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from group import Nursery, merged
from tiny_models import Outcome, assert_close, batches, start_of, tiny, train

import offloadz

REHEARSED = bool(os.environ.get("OFFLOADZ_REHEARSE"))
DISK = dict.fromkeys(("parameters", "gradients", "optimizer_state", "activations"), "disk")
DEVICE = dict.fromkeys(DISK, "device")


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    if not REHEARSED and torch.accelerator.device_count() < 2:
        pytest.skip("torch finds no two accelerators here; OFFLOADZ_REHEARSE=1 rehearses these tests on the CPU")
    made = Nursery(devices=True)
    yield made
    made.close()


@pytest.mark.parametrize("where", ({}, DISK, DEVICE), ids=("host", "disk", "device"))
@pytest.mark.parametrize("stage", (0, 1, 2, 3))
def test_two_ranks_agree_with_one_process(
    nursery: Nursery, tmp_path: Path, swap: Path, device: Any, stage: int, where: dict[str, str]
) -> None:
    how = {"micro_batch_size": 1, "swap": str(swap), **where}
    outs = nursery.run(2, "train", tmp_path, rows=4, zero_stage=stage, rehearsed=REHEARSED, poison=True, **how)
    assert outs[0]["losses"] == outs[1]["losses"] and outs[0]["norms"] == outs[1]["norms"]
    with offloadz.offload(tiny("llama"), offloadz.AdamW(lr=1e-3), device=device, **how) as run:
        wanted = train(run, batches(5, 4))
    assert_close(
        Outcome(outs[0]["losses"], outs[0]["norms"], merged(outs, "weights")),
        wanted,
        start_of(tiny("llama")),
        f"stage {stage}",
    )
