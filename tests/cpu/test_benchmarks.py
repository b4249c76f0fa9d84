"""Benchmarks of the drive and of its lanes on tiny sizes: they run to their end and print the names that are promised.

No figure is looked at; what they measure on sizes like these says nothing.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tiny import ON_DISK, tables, write_config

ROOT = Path(__file__).parents[2]
DISK = {"read_vs_fio", "write_vs_fio", "mixed_vs_fio", "read_vs_deepspeed", "write_vs_deepspeed", "checksum_cost"}


def ran(name: str, *arguments: object, status: int = 0) -> tuple[dict[str, Any], str]:
    """The JSON object that a benchmark prints, and what it says besides."""
    command = [sys.executable, str(ROOT / "benchmarks" / name), *map(str, arguments), "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == status, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found, done.stderr


def imported(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is not None, reason="it would be built first, for minutes")
def test_disk(tmp_path: Path) -> None:
    found, _ = ran("disk.py", "--path", tmp_path, "--size", 1 / 64, "--extent", 4, "--rounds", 1, "--quick")
    assert found["ratios"].keys() >= DISK
    absent = {name for name, value in found["ratios"].items() if value is None}
    assert {"read_vs_deepspeed", "write_vs_deepspeed"} <= absent <= DISK - {"checksum_cost"}  # fio may be there or not
    assert all(rate > 0 for rate in found["gb_per_s"].values()) and found["auto"] in ("io_uring", "threads")
    assert not list(tmp_path.iterdir())


def test_overlap() -> None:
    paces = ("--compute-ms", 1, "--disk-ms", 1, "--update-ms", 1)
    found, _ = ran("overlap.py", "--blocks", 3, *paces, "--times", 1)
    assert found["ratios"].keys() >= {"step_vs_slowest_lane", "one_slot_vs_sum", "reported_vs_wall"}
    assert all(value > 0 for value in found["ratios"].values())


def test_a_model_larger_than_memory_and_a_limit_that_is_overstepped(tmp_path: Path) -> None:
    shape = imported("thirteen_b").LLAMA_2_13B | {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    (tmp_path / "small.json").write_text(json.dumps(shape | {"num_attention_heads": 4, "num_key_value_heads": 4}))
    size = ("--tokens", 8, "--steps", 1, "--swap", tmp_path / "swap", "--disk", "1MB")
    found, said = ran("thirteen_b.py", "--config", tmp_path / "small.json", *size, status=1)
    assert found["ratios"].keys() == {"rss_vs_plan", "disk_vs_plan", "step_vs_plan"}
    assert f"overstepped: disk_bytes is {found['disk_bytes']:,}, --disk 1MB allows 1,000,000" in said
    assert "peak_rss_bytes is" not in said and len(found["steps"]) == 1


def test_limits_of_a_run_larger_than_memory(tmp_path: Path) -> None:
    module = imported("thirteen_b")
    shown = {"peak_rss_bytes": 3 << 30, "disk_bytes": 10**9}
    kept = Namespace(host_memory="3GiB", limit="", disk="")
    assert module.overstepped(shown, kept) == []
    both = Namespace(host_memory="2GiB", limit="1GiB", disk="1GB")
    assert [line.split(", ")[-1].split(" allows")[0] for line in module.overstepped(shown, both)] == [
        "--host-memory 2GiB", "--limit 1GiB",
    ]  # fmt: skip
    assert module.memory_groups(tmp_path) == (tmp_path / "memory", "memory.limit_in_bytes")
    (tmp_path / "cgroup.controllers").write_text("cpu memory\n")
    assert module.memory_groups(tmp_path) == (tmp_path, "memory.max")
    assert (tmp_path / "cgroup.subtree_control").read_text() == "+memory"


@pytest.mark.full
def test_kills(tmp_path: Path) -> None:
    """A process of its own for every start: some ten seconds."""
    config = write_config(tmp_path / "run.toml", tables(tmp_path, train__steps=20, train__save_every=3, **ON_DISK))
    found, _ = ran("kills.py", config, "--kills", 2)
    assert found["kills"] == 2 and found["most_steps_lost"] <= 1 and found["leftovers"] == []
    assert found["checkpoints_equal"] and found["files_equal"] and found["metrics_equal"]
