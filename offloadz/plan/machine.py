"""A box as data: how many bytes each tier has, and how fast each lane is.

The limits are the true ones: the smallest of the machine's memory, every control group above this process (version 1
and 2) and the process's own limits, because whichever is smallest is the one that kills.  Left to others: machine files
(`catalogue.py`) and measuring (`bench/`).  The trade-off: `probe_machine` measures nothing, so its rates are typical
figures, marked unverified, and a time predicted from them can be off by a factor of two.
"""

from __future__ import annotations

import os
import platform
import resource
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

NO_LIMIT = 1 << 60  # version 1 writes 2^63 rounded to a page for "no limit"; no box has an exbibyte

# Typical for a two-core box without a GPU and with one virtual drive: flop/s, bytes/s, parameters/s.
TYPICAL_RATES: Mapping[str, float] = {
    "device": 1.0e11,
    "h2d": 2.0e10,
    "d2h": 2.0e10,
    "memory": 2.0e10,
    "cpu": 5.0e8,
    "disk_read": 1.5e9,
    "disk_write": 1.2e9,
}

COMPUTING = ("float32", "eager", "compile", "liger")
"""Rates of computation in float32, and in bfloat16 by kernels; they go before `device`, which tells neither."""


@dataclass(frozen=True)
class Limit:
    """How much host memory may be used: `available_bytes` of `total_bytes`, by the limit named `source`."""

    total_bytes: int
    available_bytes: int
    source: str


UNVERIFIED = "typical, unverified"
"""Source of a figure that nobody measured."""


@dataclass(frozen=True)
class Drive:
    """The drive of `offload.swap`, as far as it is known; its rates are among the machine's."""

    name: str
    size_bytes: int | None = None
    endurance_bytes: int | None = None
    """Bytes that may be written to it in its life."""
    endurance_source: str = ""


@dataclass(frozen=True)
class Machine:
    """What the plan needs to know of a box.

    `device_bytes` is the compute device's memory; on a box without a GPU the device *is* the host (`unified`) and both
    figures are one pool.  `rates` is by lane: flop/s for "device", parameters/s for "cpu", bytes/s for the others;
    `rates_source` says where they come from.  More may be known: rates of computation by dtype and kernels
    (`COMPUTING`; with `_few` for few tokens), of the update by format ("cpu_bf16", "cpu_int8", "cpu_int8_sr"), of the
    GPU's own memory ("bandwidth"), of short extents ("disk_read_parts", "disk_write_parts"), and of what lanes share
    ("memory_shared", "disk_both").
    """

    name: str
    host_bytes: int
    host_source: str
    device: str = "cpu"
    device_bytes: int = 0
    unified: bool = True
    cores: int = 1
    rates: Mapping[str, float] = field(default_factory=lambda: dict(TYPICAL_RATES))
    rates_source: str = UNVERIFIED
    drive: Drive | None = None
    gpu: str = ""
    """The GPU of the box, whether or not it is what computes."""

    @property
    def drive_bytes(self) -> int | None:
        """Size of the drive of `offload.swap`, as far as it is known."""
        return self.drive.size_bytes if self.drive is not None else None

    def computing(self, dtype: str, kernels: str) -> Machine:
        """The same box with the rate of its device for blocks in `dtype` by `kernels` (auto: eager)."""
        wanted = ("float32",) if dtype == "float32" else (kernels, "eager")
        known = [name for name in wanted if name in self.rates]
        if not known:
            return self
        few = {"device_few": self.rates[f"{known[0]}_few"]} if f"{known[0]}_few" in self.rates else {}
        return replace(self, rates={**self.rates, "device": self.rates[known[0]], **few})

    def update_rate(self, state: str) -> tuple[float, str]:
        """Parameters/s of an AdamW update, and the format of state they are known for: `state` if possible, or fp32."""
        own = f"cpu_{state.replace('-', '_')}"
        return (self.rates[own], state) if own in self.rates else (self.rates["cpu"], "fp32")


@dataclass(frozen=True)
class DeviceFacts:
    """A compute device with memory of its own, as its driver tells it."""

    name: str
    """As torch names it: cuda:0."""
    gpu: str
    free_bytes: int
    total_bytes: int
    bfloat16: bool = True
    """Whether it multiplies in bfloat16 by itself; else blocks are widened to float32 on it."""


TYPICAL_DEVICE_RATES: Mapping[str, float] = {
    "device": 2.0e13,
    "float32": 1.0e13,
    "bandwidth": 4.0e11,
    "h2d": 2.0e10,
    "d2h": 2.0e10,
}
"""Of a GPU of which nothing but its name is known."""


def compute_dtype(facts: DeviceFacts | None, dtype: str) -> str:
    """Dtype of the computation for weights of `dtype`: theirs, or float32 on the host, whose bfloat16 products are
    unusably slow without special instructions, and on a device that only emulates them."""
    return dtype if facts is not None and facts.bfloat16 else "float32"


def with_device(machine: Machine, facts: DeviceFacts | None) -> Machine:
    """The box computing on a device with memory of its own, of which what is free may be used; None: on its host."""
    if facts is None:
        return machine
    return replace(
        machine, device=facts.name, device_bytes=facts.free_bytes, unified=False, gpu=facts.gpu,
        rates={**machine.rates, **TYPICAL_DEVICE_RATES},
    )  # fmt: skip


MOST_SOURCE = 160
"""Characters of sources that a line for people holds."""


def rates_told(rates_source: str) -> str:
    """In words where the rates of a prediction come from; long lists of sources are cut (`rates_source` has all)."""
    if len(rates_source) > MOST_SOURCE:
        some = rates_source[:MOST_SOURCE].rpartition(" ")[0].rstrip(";,") + " ..."
        rates_source = some + ")" * (some.count("(") - some.count(")")) + " (all with plan --json)"
    if rates_source.startswith(UNVERIFIED):
        return f"from {rates_source} rates; nothing was measured on this machine"
    return f"from the rates of {rates_source}; nothing was measured by this command"


def probe_machine(root: str | Path = "/") -> Machine:
    """This box, from facts that cost nothing to read; rates are typical ones (no benchmark runs)."""
    limit = host_limit(root)
    return Machine(
        name=platform.node() or "this machine",
        host_bytes=limit.available_bytes,
        host_source=limit.source,
        device_bytes=limit.available_bytes,
        cores=allowed_cores(root),
    )


def host_limit(root: str | Path = "/") -> Limit:
    """The limit that leaves the least memory.  `root` is where proc/ and sys/ are found (a test gives a made-up tree).

    Of a group's usage, page cache that can be dropped (inactive_file) counts as available, as the kernel drops it
    before it kills.  Raises `ValueError` if proc/meminfo cannot be read.
    """
    root = Path(root)
    limits = [_machine_limit(root)]
    for directory in group_chain("memory", root):
        limits += [limit for limit in (_group_limit_v2(directory), _group_limit_v1(directory)) if limit]
    limits += _process_limits(root)
    return min(limits, key=lambda limit: limit.available_bytes)


def disk_free(path: str | Path) -> int:
    """Bytes an ordinary user may still write on the file system of `path` (or of its nearest ancestor that exists)."""
    place = Path(path).absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    found = os.statvfs(place)
    return found.f_bavail * found.f_frsize


def allowed_cores(root: str | Path = "/") -> int:
    """Cores this process may use: its affinity, or the smallest CPU quota of its groups (rounded down); at least 1."""
    cores = len(os.sched_getaffinity(0))
    for directory in group_chain("cpu", Path(root)):
        quota, period = [*_text(directory / "cpu.max").split(), "", ""][:2]
        if not quota:
            quota, period = _text(directory / "cpu.cfs_quota_us"), _text(directory / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit() and int(quota) > 0 and int(period) > 0:
            cores = min(cores, int(quota) // int(period))  # half a core more is no second thread
    return max(1, cores)


def group_chain(controller: str, root: str | Path = "/") -> list[Path]:
    """The control groups this process is in, each followed by its ancestors, as directories under `root`.

    Both versions are looked at: of version 1 the hierarchy of `controller`, of version 2 the only one.  In a container
    the path in proc/self/cgroup may name a place outside of what is mounted; the mounted top is then the group.
    """
    root = Path(root)
    chain: list[Path] = []
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            mounts = _mounts(root, "cgroup2", "") or [("/", "/sys/fs/cgroup")]
        elif controller in controllers.split(","):
            mounts = _mounts(root, "cgroup", controller) or [("/", f"/sys/fs/cgroup/{controller}")]
        else:
            continue
        for mount_root, mount_point in mounts:
            chain += _ancestors(root / mount_point.lstrip("/"), mount_root, path)
    return chain


def _ancestors(top: Path, mount_root: str, path: str) -> list[Path]:
    """From the group `path` up to `top`, where the group tree below `mount_root` is mounted."""
    inside = path[len(mount_root.rstrip("/")) :] if path.startswith(mount_root.rstrip("/") + "/") else path
    if path == mount_root:
        inside = ""
    parts = [part for part in inside.split("/") if part]
    if ".." in parts or not top.joinpath(*parts).is_dir():
        parts = []
    return [top.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]


def _mounts(root: Path, kind: str, option: str) -> list[tuple[str, str]]:
    """(root inside the hierarchy, mount point) of every mount of this kind that carries `option`."""
    found = []
    for line in _text(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        fields, rest = before.split(), after.split()
        if len(fields) >= 5 and len(rest) >= 3 and rest[0] == kind and (not option or option in rest[2].split(",")):
            found.append((fields[3], fields[4].replace("\\040", " ")))
    return found


def _machine_limit(root: Path) -> Limit:
    facts = {}
    for line in _text(root / "proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        words = value.split()
        if words and words[0].isdigit():
            facts[name] = int(words[0]) * 1024
    if "MemTotal" not in facts:
        raise ValueError(f"{root / 'proc/meminfo'}: no MemTotal found, needed to know the size of host memory")
    spare = facts.get("MemFree", 0) + facts.get("Buffers", 0) + facts.get("Cached", 0)  # before Linux 3.14
    return Limit(facts["MemTotal"], facts.get("MemAvailable", spare), "MemAvailable in /proc/meminfo")


def _group_limit_v2(directory: Path) -> Limit | None:
    ceilings = [(_number(directory / name), name) for name in ("memory.max", "memory.high")]
    known = [(value, name) for value, name in ceilings if value is not None and value < NO_LIMIT]
    if not known:
        return None
    total, name = min(known)
    used = (_number(directory / "memory.current") or 0) - _stat(directory, "inactive_file")
    return Limit(total, max(0, total - max(0, used)), f"cgroup v2 {directory / name}")


def _group_limit_v1(directory: Path) -> Limit | None:
    own = _number(directory / "memory.limit_in_bytes")
    if own is None:
        return None
    # The second figure is the smallest limit of the ancestors too, even those a container does not show.
    total = min(own, _stat(directory, "hierarchical_memory_limit") or own)
    if total >= NO_LIMIT:
        return None
    cache = _stat(directory, "total_inactive_file") or _stat(directory, "inactive_file")
    used = (_number(directory / "memory.usage_in_bytes") or 0) - cache
    return Limit(total, max(0, total - max(0, used)), f"cgroup v1 {directory / 'memory.limit_in_bytes'}")


def _process_limits(root: Path) -> list[Limit]:
    """Address space (RLIMIT_AS) and data (RLIMIT_DATA) of this process, less what it holds already."""
    words = _text(root / "proc/self/statm").split()
    pages = [int(word) for word in words] if all(word.isdigit() for word in words) else []
    held = {"RLIMIT_AS": pages[0] if pages else 0, "RLIMIT_DATA": pages[5] if len(pages) > 5 else 0}
    found = []
    for name, num_pages in held.items():
        limit = resource.getrlimit(getattr(resource, name))[0]
        if limit != resource.RLIM_INFINITY:
            used = num_pages * resource.getpagesize()
            found.append(Limit(limit, max(0, limit - used), f"{name} of this process (ulimit)"))
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""  # a file that is not there says nothing; what must be there is checked by who asks


def _number(path: Path) -> int | None:
    """The number in a file; None where there is no file, or "max"."""
    text = _text(path)
    return int(text) if text.isdigit() else None


def _stat(directory: Path, name: str) -> int:
    for line in _text(directory / "memory.stat").splitlines():
        words = line.split()
        if len(words) == 2 and words[0] == name and words[1].isdigit():
            return int(words[1])
    return 0
