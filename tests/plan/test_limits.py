"""Case G01, kind K01: host memory is the smallest of the machine's, every control group's and the process's own limit.

Made-up proc/ and sys/ trees for every shape of container, and one real group where this process may make one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offloadz.plan.machine import allowed_cores, disk_free, group_chain, host_limit, probe_machine

GIB = 1 << 30
NO_LIMIT_V1 = "9223372036854771712"
REPO = Path(__file__).resolve().parents[2]


def tree(root: Path, groups: str, files: dict[str, object], mounts: str = "", host_gib: float = 24) -> Path:
    """A root with a 24 GiB host, `groups` as proc/self/cgroup and `files` (path: content) below sys/fs/cgroup."""
    kib = int(host_gib * (1 << 20))
    found = {
        "proc/meminfo": f"MemTotal: {kib} kB\nMemFree: 1024 kB\nMemAvailable: {kib - 1024} kB\n",
        "proc/self/cgroup": groups,
        "proc/self/mountinfo": mounts,
    } | {f"sys/fs/cgroup/{path}": str(content) for path, content in files.items()}
    for path, content in found.items():
        place = root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(content + "\n")
    return root


def test_host_alone_is_the_limit(tmp_path: Path) -> None:
    limit = host_limit(tree(tmp_path, "0::/user", {}))
    assert (limit.total_bytes, limit.available_bytes) == (24 * GIB, 24 * GIB - (1 << 20))
    assert "meminfo" in limit.source


def test_version_2_limit_less_usage(tmp_path: Path) -> None:
    files = {"job/memory.max": 4 * GIB, "job/memory.current": GIB, "job/memory.high": "max"}
    limit = host_limit(tree(tmp_path, "0::/job", files))
    assert (limit.total_bytes, limit.available_bytes) == (4 * GIB, 3 * GIB)
    assert "cgroup v2" in limit.source and limit.source.endswith("job/memory.max")


def test_version_1_limit_less_usage(tmp_path: Path) -> None:
    files = {"memory/job/memory.limit_in_bytes": 4 * GIB, "memory/job/memory.usage_in_bytes": GIB}
    limit = host_limit(tree(tmp_path, "5:cpu,cpuacct:/x\n4:memory:/job\n0::/", files))
    assert (limit.total_bytes, limit.available_bytes) == (4 * GIB, 3 * GIB)
    assert "cgroup v1" in limit.source and "job/memory.limit_in_bytes" in limit.source


@pytest.mark.parametrize("version", [1, 2])
def test_an_ancestor_with_the_lower_limit_decides(tmp_path: Path, version: int) -> None:
    top, names, groups = {
        1: ("memory/", ("memory.limit_in_bytes", "memory.usage_in_bytes"), "4:memory:/a/b/c"),
        2: ("", ("memory.max", "memory.current"), "0::/a/b/c"),
    }[version]
    files: dict[str, object] = {}
    for path, limit_gib, used_gib in (("a/b/c", 20, 1), ("a/b", 4, 1), ("a", 12, 2)):
        files[f"{top}{path}/{names[0]}"], files[f"{top}{path}/{names[1]}"] = limit_gib * GIB, used_gib * GIB
    limit = host_limit(tree(tmp_path, groups, files))
    assert (limit.total_bytes, limit.available_bytes) == (4 * GIB, 3 * GIB)
    assert f"a/b/{names[0]}" in limit.source


def test_a_full_ancestor_decides_even_with_the_higher_limit(tmp_path: Path) -> None:
    files = {"a/b/memory.max": 8 * GIB, "a/b/memory.current": 0, "a/memory.max": 16 * GIB, "a/memory.current": 15 * GIB}
    limit = host_limit(tree(tmp_path, "0::/a/b", files))
    assert (limit.total_bytes, limit.available_bytes) == (16 * GIB, GIB)


@pytest.mark.parametrize(
    ("groups", "files"),
    [
        ("0::/job", {"job/memory.max": "max", "job/memory.high": "max", "job/memory.current": GIB}),
        ("4:memory:/job", {"memory/job/memory.limit_in_bytes": NO_LIMIT_V1, "memory/job/memory.usage_in_bytes": GIB}),
        ("4:memory:/job", {"memory/job/memory.limit_in_bytes": 2**63 - 1, "memory/job/memory.usage_in_bytes": GIB}),
    ],
)
def test_max_and_the_huge_value_are_no_limit(tmp_path: Path, groups: str, files: dict[str, object]) -> None:
    assert "meminfo" in host_limit(tree(tmp_path, groups, files)).source


def test_a_limit_above_the_host_is_not_the_limit(tmp_path: Path) -> None:
    assert "meminfo" in host_limit(tree(tmp_path, "0::/job", {"job/memory.max": 64 * GIB})).source


def test_memory_high_counts(tmp_path: Path) -> None:
    files = {"job/memory.max": 8 * GIB, "job/memory.high": 4 * GIB, "job/memory.current": GIB}
    limit = host_limit(tree(tmp_path, "0::/job", files))
    assert limit.available_bytes == 3 * GIB and "memory.high" in limit.source


@pytest.mark.parametrize(
    ("groups", "files"),
    [
        (
            "0::/job",
            {
                "job/memory.max": 4 * GIB,
                "job/memory.current": 3 * GIB,
                "job/memory.stat": f"anon 5\ninactive_file {2 * GIB}\nactive_file 7",
            },
        ),
        (
            "4:memory:/job",
            {
                "memory/job/memory.limit_in_bytes": 4 * GIB,
                "memory/job/memory.usage_in_bytes": 3 * GIB,
                "memory/job/memory.stat": f"inactive_file 0\ntotal_inactive_file {2 * GIB}",
            },
        ),
    ],
)
def test_page_cache_that_can_be_dropped_is_available(tmp_path: Path, groups: str, files: dict[str, object]) -> None:
    assert host_limit(tree(tmp_path, groups, files)).available_bytes == 3 * GIB


def test_usage_above_the_limit_leaves_nothing(tmp_path: Path) -> None:
    files = {"job/memory.max": GIB, "job/memory.current": 2 * GIB}
    assert host_limit(tree(tmp_path, "0::/job", files)).available_bytes == 0


def test_container_that_sees_only_its_own_group(tmp_path: Path) -> None:
    """proc/self/cgroup names the host's path, but the mount shows the container's group at its top."""
    mounts = "31 20 0:28 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory"
    files = {
        "memory/memory.limit_in_bytes": 4 * GIB,
        "memory/memory.usage_in_bytes": GIB,
        "memory/sub/memory.limit_in_bytes": 3 * GIB,
        "memory/sub/memory.usage_in_bytes": GIB,
    }
    assert host_limit(tree(tmp_path / "1", "4:memory:/docker/abc", files, mounts)).available_bytes == 3 * GIB
    assert host_limit(tree(tmp_path / "2", "4:memory:/docker/abc/sub", files, mounts)).available_bytes == 2 * GIB
    assert host_limit(tree(tmp_path / "3", "4:memory:/elsewhere", files, mounts)).available_bytes == 3 * GIB


def test_container_with_a_group_namespace(tmp_path: Path) -> None:
    files = {"memory.max": 4 * GIB, "memory.current": GIB}
    for number, path in enumerate(("/", "/../other")):
        assert host_limit(tree(tmp_path / str(number), f"0::{path}", files)).available_bytes == 3 * GIB


def test_hidden_ancestors_of_version_1_count(tmp_path: Path) -> None:
    files = {
        "memory/job/memory.limit_in_bytes": NO_LIMIT_V1,
        "memory/job/memory.usage_in_bytes": GIB,
        "memory/job/memory.stat": f"hierarchical_memory_limit {4 * GIB}",
    }
    assert host_limit(tree(tmp_path, "4:memory:/job", files)).available_bytes == 3 * GIB


def test_mount_point_elsewhere_and_both_versions_at_once(tmp_path: Path) -> None:
    mounts = "\n".join(
        [
            "41 31 0:38 / /sys/fs/cgroup/unified rw shared:7 - cgroup2 cgroup2 rw",
            "35 31 0:32 / /sys/fs/cgroup/mem rw - cgroup cgroup rw,memory",
        ]
    )
    files = {
        "unified/job/memory.max": 6 * GIB,
        "unified/job/memory.current": 0,
        "mem/job/memory.limit_in_bytes": 5 * GIB,
        "mem/job/memory.usage_in_bytes": 0,
    }
    assert host_limit(tree(tmp_path, "4:memory:/job\n0::/job", files, mounts)).available_bytes == 5 * GIB


def test_a_tree_without_meminfo_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="MemTotal"):
        host_limit(tmp_path)


@given(
    version=st.sampled_from([1, 2]),
    levels=st.lists(st.tuples(st.none() | st.integers(0, 1 << 36), st.integers(0, 1 << 36)), min_size=1, max_size=5),
)
def test_any_chain_gives_its_smallest_room(
    tmp_path_factory: pytest.TempPathFactory, version: int, levels: list[tuple[int | None, int]]
) -> None:
    top = "memory/" if version == 1 else ""
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if version == 1 else ("memory.max", "memory.current")
    files: dict[str, object] = {}
    for depth, (limit, used) in enumerate(levels):
        path = top + "/".join(["g"] * (depth + 1))
        files[f"{path}/{names[0]}"] = (NO_LIMIT_V1 if version == 1 else "max") if limit is None else limit
        files[f"{path}/{names[1]}"] = used
    group = "/" + "/".join(["g"] * len(levels))
    root = tree(tmp_path_factory.mktemp("t"), f"4:memory:{group}" if version == 1 else f"0::{group}", files)
    rooms = [max(0, limit - used) for limit, used in levels if limit is not None]
    assert host_limit(root).available_bytes == min([*rooms, 24 * GIB - (1 << 20)])


_CHILD = """
import json, os, resource, sys
kind, value = sys.argv[1], sys.argv[2]
if kind == "group":
    open(value + "/cgroup.procs", "w").write(str(os.getpid()))
else:
    resource.setrlimit(getattr(resource, kind), (int(value), int(value)))
from offloadz.plan.machine import host_limit
assert "torch" not in sys.modules
limit = host_limit()
print(json.dumps([limit.total_bytes, limit.available_bytes, limit.source]))
"""


def _limit_in_child(kind: str, value: object) -> tuple[int, int, str]:
    answer = subprocess.run(
        [sys.executable, "-c", _CHILD, kind, str(value)],
        env=os.environ | {"PYTHONPATH": str(REPO)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    total, available, source = json.loads(answer.stdout)
    return total, available, source


@pytest.mark.parametrize("name", ["RLIMIT_AS", "RLIMIT_DATA"])
def test_the_process_limit_counts_for_real(name: str) -> None:
    total, available, source = _limit_in_child(name, GIB)
    assert total == GIB and GIB // 2 < available < GIB and name in source


@pytest.fixture
def real_group() -> Iterator[Path]:
    """A group of our own with a limit of 300 MiB, version 1 or 2, below the one this process is in."""
    for parent in group_chain("memory"):
        group = parent / f"offloadz-test-{os.getpid()}"
        name = "memory.limit_in_bytes" if (parent / "memory.limit_in_bytes").exists() else "memory.max"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / name).write_text(str(300 << 20))
        except OSError:
            group.rmdir()
            continue
        yield group
        group.rmdir()
        return
    pytest.skip("no memory group can be made here")


def test_a_real_control_group_counts(real_group: Path) -> None:
    total, available, source = _limit_in_child("group", real_group)
    assert total == 300 << 20 and 200 << 20 < available < 300 << 20 and str(real_group) in source


def test_machine_follows_the_limit(tmp_path: Path) -> None:
    files = {"job/memory.max": 4 * GIB, "job/memory.current": GIB, "job/cpu.max": "100000 100000"}
    machine = probe_machine(tree(tmp_path, "0::/job", files))
    assert machine.host_bytes == machine.device_bytes == 3 * GIB and machine.unified
    assert "memory.max" in machine.host_source and machine.cores == 1
    assert machine.rates_source == "typical, unverified" and set(machine.rates) >= {"device", "cpu", "disk_read"}


@pytest.mark.parametrize(
    ("groups", "files", "cores"),
    [
        ("0::/job", {"job/cpu.max": "max 100000"}, 64),
        ("0::/job", {"job/cpu.max": "250000 100000"}, 2),
        ("0::/a/b", {"a/b/cpu.max": "max 100000", "a/cpu.max": "300000 100000"}, 3),
        ("3:cpu:/job", {"cpu/job/cpu.cfs_quota_us": -1, "cpu/job/cpu.cfs_period_us": 100000}, 64),
        ("3:cpu:/job", {"cpu/job/cpu.cfs_quota_us": 20000, "cpu/job/cpu.cfs_period_us": 100000}, 1),
    ],
)
def test_cores_by_affinity_and_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, groups: str, files: dict[str, object], cores: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(64)))
    assert allowed_cores(tree(tmp_path, groups, files)) == cores


def test_free_room_of_a_path_that_is_not_there_yet(tmp_path: Path) -> None:
    assert abs(disk_free(tmp_path / "a/b/c") - disk_free(tmp_path)) < 1 << 30
    assert disk_free(tmp_path) > 0
