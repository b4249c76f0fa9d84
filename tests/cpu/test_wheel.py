"""Case G06, kind K06: what is installed updates weights where no compiler is, and one file holds all instruction sets.

The usual run takes the package as it is built; with `-m full` a wheel is built from a copy of the sources, installed
from nothing but itself, and asked the same.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ASK = """
import json, os, shutil
import torch
import offloadz
from offloadz.runtime import native
assert not any(shutil.which(name) for name in ("cc", "gcc", "g++", "clang", "c++", "nvcc", "ninja", "make"))
found = {}
for level in native.isa_supported():
    native.select_isa(level)
    weight, low = torch.full((300,), 1.0, dtype=torch.bfloat16), torch.zeros(300, dtype=torch.int16)
    moments = tuple(torch.zeros(300, dtype=torch.uint8) for _ in range(2))
    scales = tuple(torch.zeros(2) for _ in range(2))
    how = {"step": 1, "lr": 0.01, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "threads": 2, "seed": 1}
    native.update_("adam", weight, low, moments, scales, torch.linspace(-1, 1, 300).bfloat16(), **how)
    found[level] = [weight.float().sum().item(), int(low.long().sum()), int(moments[1].long().sum())]
print(json.dumps([offloadz.__file__, found]))
"""


def asked(site: Path, tmp_path: Path) -> None:
    """Run an update of each instruction set with the package in `site`, on a PATH with nothing on it."""
    nothing = tmp_path / "nothing"
    nothing.mkdir()
    env = {k: v for k, v in os.environ.items() if k not in ("CC", "CXX", "OFFLOADZ_ISA")}
    env |= {"PATH": str(nothing), "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    answer = subprocess.run(
        [sys.executable, "-c", ASK], cwd=nothing, env=env, capture_output=True, text=True, timeout=120
    )
    assert answer.returncode == 0, answer.stderr
    where, found = json.loads(answer.stdout)
    assert Path(where).is_relative_to(site)
    assert "baseline" in found and len({json.dumps(values) for values in found.values()}) == 1


def test_the_package_updates_where_no_compiler_is(tmp_path: Path) -> None:
    spec = importlib.util.find_spec("offloadz")
    assert spec is not None and spec.origin
    shutil.copytree(Path(spec.origin).parent, tmp_path / "site/offloadz", ignore=shutil.ignore_patterns("__pycache__"))
    asked(tmp_path / "site", tmp_path)


@pytest.mark.full
def test_a_wheel_holds_everything_and_needs_no_compiler(tmp_path: Path) -> None:
    copy = tmp_path / "source"
    copy.mkdir()
    for name in ("offloadz", "csrc"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    apart = ["--no-deps", "--no-index"]
    out, site = str(tmp_path / "wheels"), str(tmp_path / "site")
    subprocess.run([*pip, "wheel", str(copy), *apart, "--no-build-isolation", "-w", out], check=True, timeout=280)
    (wheel,) = (tmp_path / "wheels").glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert sum(name.endswith(".so") for name in names) == 1 and "offloadz/py.typed" in names
    assert not [name for name in names if name.startswith(("csrc", "tests")) or name.endswith((".cpp", ".inl"))]
    subprocess.run([*pip, "install", str(wheel), *apart, "--target", site], check=True, timeout=100)
    asked(tmp_path / "site", tmp_path)
