"""Threads of the update come from the cores really allowed, and the reason is told.

Case G19, kind K19 (slow, and nobody says why), in part: the choice of the number; its effect is tests/cpu/test_adam.py.
"""

import os
from pathlib import Path

import pytest

from offloadz.runtime.threads import cores_allowed, update_threads


def system(root: Path, groups: str, files: dict[str, str]) -> Path:
    """A /proc and /sys of their own."""
    for name, text in {"proc/self/cgroup": groups, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.fixture
def affinity():
    before = os.sched_getaffinity(0)
    yield before
    os.sched_setaffinity(0, before)


def test_affinity_counts(affinity, tmp_path):
    assert cores_allowed(tmp_path) == (len(affinity), f"the process's affinity allows {len(affinity)}")
    os.sched_setaffinity(0, {min(affinity)})
    assert cores_allowed(tmp_path)[0] == 1
    assert update_threads(0)[0] == 1


V1 = {"sys/fs/cgroup/cpu/a/b/cpu.cfs_period_us": "100000\n", "sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "100000\n"}


@pytest.mark.parametrize(
    ("groups", "files", "wanted"),
    [
        ("0::/a/b\n", {"sys/fs/cgroup/a/b/cpu.max": "max 100000\n"}, None),
        ("0::/a/b\n", {"sys/fs/cgroup/a/b/cpu.max": "100000 100000\n"}, 1),
        ("0::/a/b\n", {"sys/fs/cgroup/a/cpu.max": "50000 100000\n"}, 1),  # an ancestor; half a core is one thread
        ("0::/\n", {"sys/fs/cgroup/cpu.max": "190000 100000\n"}, 1),
        ("0::/gone\n", {"sys/fs/cgroup/cpu.max": "100000 100000\n"}, 1),  # a container sees its own group as the root
        ("4:cpu:/a/b\n0::/\n", {**V1, "sys/fs/cgroup/cpu/a/b/cpu.cfs_quota_us": "-1\n"}, None),
        ("4:cpu:/a/b\n0::/\n", {**V1, "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "100000\n"}, 1),
        ("4:memory:/a\n", {"sys/fs/cgroup/a/cpu.max": "100000 100000\n"}, None),
        ("0::/a/b\n", {"sys/fs/cgroup/a/b/cpu.max": "nonsense\n"}, None),
    ],
)
def test_the_quota_of_the_group_and_those_above_it_counts(tmp_path, affinity, groups, files, wanted):
    if wanted and len(affinity) == 1:
        pytest.skip("on one core no quota can be told from the affinity")
    cores, reason = cores_allowed(system(tmp_path, groups, files))
    assert cores == (wanted or len(affinity))
    assert ("quota" in reason) == (wanted is not None)


def test_what_a_launcher_set_is_ignored_and_named(monkeypatch, affinity):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    threads, reason = update_threads(0)
    assert threads == cores_allowed()[0]
    assert "OMP_NUM_THREADS=1 holds for computation, offload.threads for updates" in reason


def test_a_number_given_wins_and_ranks_share():
    cores, _ = cores_allowed()
    assert update_threads(5)[0] == 5
    assert "offload.threads = 5" in update_threads(5)[1]
    assert update_threads(0, cores)[0] == 1
    assert update_threads(0, 10 * cores)[0] == 1
    assert "shared by 2 ranks" in update_threads(0, 2)[1]
    for requested, ranks, words in ((-1, 1, "threads is -1"), (257, 1, "threads is 257"), (0, 0, "machine is 0")):
        with pytest.raises(ValueError, match=words):
            update_threads(requested, ranks)
