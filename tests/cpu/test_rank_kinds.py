"""Case G09 and kinds K09, K11 and K15 over several ranks: windows, layers that are left out, counters and groups.

What one process is tested for, with the same samples and models.  K18 (evaluations) is in `test_ranks.py` too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from group import Nursery, merged
from odd_models import odd_batches
from reference import plain_run
from test_odd_models import conditional
from test_windows import LIMITS, plain
from tiny_models import Outcome, assert_close, start_of, tiny

DISK = dict.fromkeys(("parameters", "gradients", "optimizer_state", "activations"), "disk")


def outcome(outs: list[dict[str, Any]]) -> Outcome:
    return Outcome(outs[0]["losses"], outs[0]["norms"], merged(outs, "weights"))


@pytest.mark.parametrize("clipping", LIMITS)
@pytest.mark.parametrize(("stage", "gradients"), ((0, "disk"), (1, "host"), (2, "disk"), (3, "host"), (3, "disk")))
def test_every_window_is_one_step(
    nursery: Nursery, tmp_path: Path, swap: Path, stage: int, gradients: str, clipping: str
) -> None:
    """G09: four rows a rank, as one micro-batch, as four in one sweep, and in sweeps."""
    family = ("llama", "qwen3")[stage % 2]
    wanted, start = plain(family, clipping), start_of(tiny(family))
    for rows, sweeps in ((4, 1), (1, 1), (2, 2)):
        how = {"gradients": gradients, "swap": str(swap), "max_grad_norm": LIMITS[clipping], "zero_stage": stage}
        folder = tmp_path / f"{rows}-{sweeps}"
        outs = nursery.run(2, "rank_trials.windows", folder, family=family, micro_batch_size=rows, sweeps=sweeps, **how)
        assert_close(outcome(outs), wanted, start, f"{rows} rows, {sweeps} sweeps")


@pytest.mark.parametrize(("stage", "how"), ((1, {}), (3, DISK)), ids=str)
def test_a_layer_that_all_ranks_leave_out(
    nursery: Nursery, tmp_path: Path, swap: Path, stage: int, how: dict[str, str]
) -> None:
    """K11: out of turn on all ranks alike, so they agree; the layer has half of the updates."""
    outs = nursery.run(2, "rank_trials.skips", tmp_path, steps=6, zero_stage=stage, swap=str(swap), **how)
    wanted = plain_run(conditional(), odd_batches(6))
    for out in outs:
        assert {out["steps"][n] for n in out["steps"] if n.startswith("layers.1.")} == {3}
        assert {out["steps"][n] for n in out["steps"] if not n.startswith("layers.1.")} == {6}
    assert_close(outcome(outs), wanted, start_of(conditional()), moved=1e-3)


@pytest.mark.parametrize("stage", (0, 3))
def test_counters_and_groups_outlive_a_resume(nursery: Nursery, tmp_path: Path, stage: int) -> None:
    """K15: begun with other settings, the next step is the one that was not interrupted, bit by bit."""
    before = nursery.run(2, "rank_trials.counts", tmp_path, zero_stage=stage)
    told = {"saved": str(tmp_path / "saved"), "zero_stage": stage}
    after = nursery.run(2, "rank_trials.counts", tmp_path / "after", **told)
    for one, other in zip(before, after, strict=True):
        assert set(other["begun"].values()) == {3} and set(other["steps"].values()) == {4}
        assert (one["loss"], one["rates"], one["steps"]) == (other["loss"], other["rates"], other["steps"])
    for kind in ("weight", "exp_avg", "exp_avg_sq"):
        found, wanted = merged(after, kind), merged(before, kind)
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
