"""What all tests share: a swap directory that must be left clean, one thread for torch, and the marker `full`.

Tests marked `full` are whole products of settings (thousands of runs) and are left out unless asked for by name:
`pytest -m full tests/cpu/test_parity.py`.  The usual run holds a fixed spread of the same products.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from group import Nursery

GPU_FOLDER = "gpu"
if not (any(GPU_FOLDER in Path(argument).parts for argument in sys.argv) or "PYTEST_XDIST_WORKER" in os.environ):
    # Tests of the CPU compare with the CPU's bits; those of a GPU are asked for by name, `pytest tests/gpu`.
    os.environ.update(dict.fromkeys(("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"), ""))
# A user who never measured this box, also where a process is started for a whole module.
os.environ["XDG_STATE_HOME"] = str(Path(tempfile.gettempdir(), f"offloadz-no-bench-{os.getpid()}"))
os.environ.setdefault("OMP_NUM_THREADS", "1")  # runs that tests start: they share the machine, and products are tiny


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "full: whole products of settings, left out unless asked for with -m full")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "full" in str(config.getoption("markexpr")):
        return
    left_out = [item for item in items if item.get_closest_marker("full")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("full")]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Tiny products are fastest on one thread, and tests share the machine."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


@pytest.fixture(autouse=True)
def _no_bench(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user who never measured this box: plans rest on typical rates, and benches of tests stay with them."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path_factory.getbasetemp() / "state" / str(id(monkeypatch))))


@pytest.fixture(autouse=True, scope="session")
def _no_bench_of_the_user(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The same for what runs of a whole module are made under."""
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.getbasetemp() / "state" / "shared")


@pytest.fixture
def swap(tmp_path: Path) -> Iterator[Path]:
    """A swap directory; afterwards no lane of a run may be alive and no file may be left in it."""
    path = tmp_path / "swap"
    path.mkdir()
    yield path
    lanes = [t.name for t in threading.enumerate() if t.name.startswith("offloadz-")]
    assert not lanes, f"lanes left alive: {lanes}"
    left = [str(p.relative_to(path)) for p in path.rglob("*") if p.is_file() and p.stat().st_size]
    assert not left, f"files left in the swap directory: {left}"


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    """The parent of ranks on the CPU, one for all tests of a module."""
    from group import Nursery

    made = Nursery()
    yield made
    made.close()
