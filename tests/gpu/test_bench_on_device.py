"""`offloadz bench` on a device: each figure is taken there, and a plan reads it."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

from offloadz.bench.command import bench_command
from offloadz.bench.rounds import Sizes
from offloadz.plan.catalogue import read_machine
from offloadz.plan.machine import probe_machine
from offloadz.runtime.rehearsal import Rehearsal

SMALL = Sizes(rounds=2, tokens=16, few_tokens=4, hidden=64, inner=128, product_s=0.02, elements=1 << 18,
              copy_bytes=8 << 20)  # fmt: skip


def test_a_device_is_measured_and_a_plan_reads_it(device: Any, tmp_path: Path) -> None:
    sizes = replace(SMALL, on_device=(16, 64, 128)) if isinstance(device, Rehearsal) else SMALL
    bench_command([], tmp_path / "box.toml", sizes, device)
    told = tomllib.loads((tmp_path / "box.toml").read_text())["gpu"]
    found = read_machine(str(tmp_path / "box.toml"), probe_machine())
    for key in ("float32", "eager", "bandwidth", "h2d", "d2h"):
        assert found.rates[key] == told[key] > 0, key
    assert found.device_bytes == told["memory"] and told["model"] == device.facts.gpu
