"""A run comes to results of products by itself where a machine file says that they pay, with the bits of recomputing.

Real parts all the way: a configuration, its plan on this box with the rates of a made-up one, and a run under it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import make_model, tables
from tiny_models import Outcome, assert_same_bits, batches, train

import offloadz
from offloadz.config import config_from_tables
from offloadz.plan.answer import Plan
from offloadz.plan.errors import ConfigError
from offloadz.plan.left import GRAPH, PRODUCTS
from offloadz.plan.question import question

MACHINE = """
source = "a test"
[host]
memory = "64TiB"
cores = 1
[rates]
device = 1e8
memory = 1e11
"""
"""A processor that multiplies slowly beside fast memory."""
ROWS, LENGTH, LAYERS = 32, 64, 6
STEPS = batches(3, rows=ROWS, length=LENGTH)


def planned(folder: Path, recompute: str, **more: Any) -> Plan:
    if not (folder / "model").exists():
        make_model(folder / "model", vocab_size=211, hidden_size=64, intermediate_size=192, num_hidden_layers=LAYERS)
        (folder / "slow.toml").write_text(MACHINE)
    told = {
        "data__max_length": LENGTH, "train__batch_size": ROWS, "train__micro_batch_size": 8,
        "offload__machine": str(folder / "slow.toml"), "offload__sweeps": 1, "offload__recompute": recompute,
        "model__dtype": "float32", **more,
    }  # fmt: skip
    return question(config_from_tables(tables(folder, **told))).answer()


def ran(folder: Path, plan: Plan, swap: Path) -> tuple[Outcome, dict[int, str]]:
    """Three steps under a plan, and what each seat left of its last forward."""
    model = offloadz.load(folder / "model", dtype=torch.float32)
    with offloadz.offload(
        model, offloadz.AdamW(lr=1e-3), plan=plan, swap=swap, micro_batch_size=8, sweeps=1, batch_size=ROWS,
        max_length=LENGTH,
    ) as run:  # fmt: skip
        out = train(run, STEPS)
        return out, dict(run.session.kept)


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_auto_keeps_results_where_they_have_room_and_changes_no_bit(tmp_path: Path, swap: Path, share: float) -> None:
    again, every = planned(tmp_path, "all"), planned(tmp_path, "cheap")
    room = int(again.peak["host"] + share * (every.peak["host"] - again.peak["host"])) + (1 << 18)
    plan = planned(tmp_path, "auto", offload__host_memory=f"{room // 1024}KiB")
    assert plan.fits and plan.placement.cheap == (LAYERS if share == 1.0 else LAYERS // 2), plan.reasons
    wanted, left = ran(tmp_path, again, swap)
    assert [*left.values()].count(GRAPH) == again.placement.kept < LAYERS and PRODUCTS not in left.values()
    found, left = ran(tmp_path, plan, swap)
    assert_same_bits(found, wanted)
    assert list(left.values()).count(PRODUCTS) == plan.placement.cheap


def test_a_plan_with_results_is_refused_beside_compiled_blocks(tmp_path: Path, swap: Path) -> None:
    peak = planned(tmp_path, "cheap").peak["host"]
    plan = planned(tmp_path, "auto", offload__host_memory=f"{peak // 1024 + 256}KiB")
    assert plan.recompute == "auto" and plan.placement.cheap
    model = offloadz.load(tmp_path / "model", dtype=torch.float32)
    with pytest.raises(ConfigError, match=r'recompute = "cheap" beside model\.kernels = "compile" is not built'):
        offloadz.offload(model, plan=plan, swap=swap, kernels="compile")
