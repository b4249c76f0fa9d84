"""How many threads the update may use: the cores this process really has, shared by the ranks of this machine.

It leaves the measuring of what a core is worth to the bench.  The trade-off: what a launcher set for other libraries
(OMP_NUM_THREADS) is ignored here and said so, because the usual value, 1, would make the update several times slower.
"""

import math
import os
from collections.abc import Iterator
from pathlib import Path

MAX_THREADS = 256  # what the native library's team holds; more threads than this no memory could feed


def cores_allowed(root: Path = Path("/")) -> tuple[int, str]:
    """The cores this process may use, at least 1, and why: the smallest of its affinity and the CPU quota (cgroup v1 or
    v2) of its group and all groups above it.  `root` is where /proc and /sys are looked for."""
    found = [(float(len(os.sched_getaffinity(0))), "the process's affinity"), *_quotas(root)]
    cores, reason = min(found, key=lambda item: item[0])
    # Half a core more is no second thread: two threads would spend half of each period stopped.
    return max(1, math.floor(cores)), f"{reason} allows {cores:g}"


def _quotas(root: Path) -> Iterator[tuple[float, str]]:
    """(cores, reason) for each group at or above this process's that has a quota."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            mounts, read = ("sys/fs/cgroup", "sys/fs/cgroup/unified"), _quota_v2
        elif "cpu" in controllers.split(","):
            mounts, read = (f"sys/fs/cgroup/{controllers}", "sys/fs/cgroup/cpu"), _quota_v1
        else:
            continue
        for mount in mounts:
            # Inside a container the path is often not visible, and the mount itself is the group: it ends every chain.
            group = root / mount / path.lstrip("/")
            for at in (group, *group.parents):
                cores = read(at)
                if cores is not None:
                    yield cores, f"the CPU quota in {at}"
                if at == root / mount:
                    break


def _quota_v2(group: Path) -> float | None:
    try:
        quota, period = (group / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def _quota_v1(group: Path) -> float | None:
    try:
        quota = int((group / "cpu.cfs_quota_us").read_text())
        period = int((group / "cpu.cfs_period_us").read_text())
        return None if quota <= 0 or period <= 0 else quota / period
    except (OSError, ValueError):
        return None


def ranks_here() -> int:
    """Ranks that a launcher started on this machine (torchrun's LOCAL_WORLD_SIZE), 1 where none did."""
    found = os.environ.get("LOCAL_WORLD_SIZE", "").strip()
    return int(found) if found.isdigit() and int(found) else 1


def update_threads(requested: int, local_ranks: int | None = None) -> tuple[int, str]:
    """Threads for the update of this rank and why: `requested` (offload.threads) if above 0, else the cores allowed
    divided by the ranks on this machine (None: as many as a launcher says), at least 1."""
    local_ranks = ranks_here() if local_ranks is None else local_ranks
    if not 0 <= requested <= MAX_THREADS:
        raise ValueError(f"offload.threads is {requested}; 0 (all cores allowed) or 1 to {MAX_THREADS} is needed")
    if local_ranks < 1:
        raise ValueError(f"the number of ranks on this machine is {local_ranks}; at least 1 is needed")
    cores, reason = cores_allowed()
    if requested:
        return requested, f"offload.threads = {requested} ({cores} cores: {reason})"
    shared = f", shared by {local_ranks} ranks" if local_ranks > 1 else ""
    ignored = os.environ.get("OMP_NUM_THREADS", "")
    note = f"; OMP_NUM_THREADS={ignored} holds for computation, offload.threads for updates" if ignored else ""
    return min(MAX_THREADS, max(1, cores // local_ranks)), f"{reason}{shared}{note}"
