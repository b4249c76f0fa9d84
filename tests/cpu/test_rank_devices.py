"""Ranks whose device has memory of its own, rehearsed on the CPU: the same bits as where host and device are one.

What crosses between ranks then stands in a stream of its own, from slots of the device.  The way through the host, for
GPUs that cannot copy to one another, is compared with the other one, and so is what tells which of them is taken.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from group import Nursery

from offloadz.plan.errors import ConfigError
from offloadz.runtime import chosen

DISK = dict.fromkeys(("parameters", "gradients", "optimizer_state", "activations"), "disk")
DEVICE = dict.fromkeys(DISK, "device")
MIXED = {"parameters": "disk", "gradients": "device", "optimizer_state": "host", "activations": "host"}


CASES = [
    (2, 3, "llama", {}), (2, 3, "qwen3", DISK), (2, 3, "llama", DEVICE | {"sweeps": 2}), (3, 2, "llama", DISK),
    (2, 1, "qwen3", MIXED | {"sweeps": 2}), (2, 1, "llama", DEVICE), (2, 0, "gpt2", DISK),
    (2, 3, "llama", MIXED | {"commit": "shadow"}), (2, 2, "llama", DEVICE | {"commit": "shadow"}),
]  # fmt: skip
"""Ranks, stage, family, and what else is asked for."""


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.full), "bfloat16"])
@pytest.mark.parametrize(("ranks", "stage", "family", "how"), CASES, ids=str)
def test_ranks_on_devices_have_the_bits_of_ranks_on_the_host(
    nursery: Nursery, tmp_path: Path, swap: Path, ranks: int, stage: int, family: str, how: dict[str, Any], dtype: str
) -> None:
    told = {"family": family, "rows": 5, "steps": 3, "zero_stage": stage, "dtype": dtype, "micro_batch_size": 1}
    told |= {"recompute": "all", "swap": str(swap), "sweeps": how.get("sweeps", 1)}
    plain = nursery.run(ranks, "train", tmp_path / "host", **told)
    found = nursery.run(ranks, "train", tmp_path / "device", rehearsed=True, poison=True, **told | how)
    for one, other in zip(found, plain, strict=True):
        assert (one["losses"], one["norms"]) == (other["losses"], other["norms"])
        apart = [
            n for n, w in other["weights"].items() if not torch.equal(w.nan_to_num(7), one["weights"][n].nan_to_num(7))
        ]
        assert not apart


def test_the_way_through_the_host_brings_the_same_and_is_taken_where_the_other_is_broken(
    nursery: Nursery, tmp_path: Path
) -> None:
    for rank, out in enumerate(nursery.run(2, "rank_trials.crossing", tmp_path)):
        for direct, hosted in zip(out["plain"], out["hosted"], strict=True):
            assert torch.equal(direct, hosted)
        assert out["asked"] == [2000, 1000], "the way through the host was not taken"
        host, unknown, shared, mixed = out["met"]
        assert host == "" and "meta" in unknown, "there is no way between such devices"
        needed = "needed: all on the CPU, or one device for each"
        assert f"2 ranks compute on meta:1, meta:1; {needed}" in shared
        assert f"2 ranks compute on cpu, meta:1; {needed}" in mixed
        well, broken, late = out["tried"]
        assert well == ""
        assert broken == f"a pattern arrived at rank {rank} otherwise than it was sent"
        assert late == f"a pattern that rank {rank} waits for did not arrive within 0 s"


def test_each_rank_takes_the_device_of_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert chosen._own_index(2) == 1
    with pytest.raises(ConfigError, match=r"2 ranks here and 1 devices; needed: one for each rank, or .* \"cpu\""):
        chosen._own_index(1)
