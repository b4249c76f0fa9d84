"""How files in one directory can be read and written: the probe, and the page cache where it cannot be avoided.

Direct I/O is decided by trying it in that very directory (open, write, read back, compare), never by the name of a file
system.  Left to others: the files and the transfers.  The trade-off of the fallback: buffered writes are forced to the
drive as they go and dropped from the page cache, so that RAM stays free; that costs one fdatasync per 32 MiB.
"""

from __future__ import annotations

import errno
import mmap
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from offloadz.memory.tier import HUGE_BYTES, PAGE_BYTES
from offloadz.plan.spec import aligned

CACHE_STEP_BYTES = 32 << 20  # how much page cache a buffered transfer may hold at a time


@dataclass(frozen=True)
class Probe:
    """Whether direct I/O works in a directory; if not, `errno` and `reason` say why.  `file_system` by its type."""

    direct: bool
    errno: int
    reason: str
    file_system: str

    @property
    def ram_backed(self) -> bool:
        """Whether "disk" here is memory under another name."""
        return self.file_system in ("tmpfs", "ramfs")

    def lines(self, directory: Path) -> list[str]:
        """What a user should know of this path at the start of a run: nothing where all is well."""
        found = []
        if not self.direct:
            number = f"{errno.errorcode.get(self.errno, '?')} {self.errno}: " if self.errno else ""
            found.append(
                f"swap path {directory}: direct I/O refused by {self.file_system} ({number}{self.reason});"
                " buffered I/O is used and the page cache dropped as it goes"
            )
        if self.ram_backed:
            found.append(f"swap path {directory} lies on {self.file_system}, in RAM: offloading to it saves no memory")
        return found


def probe_direct(directory: Path) -> Probe:
    """Try direct I/O in `directory` with a small file, removed afterwards.

    Raises `OSError` where not even an ordinary file can be written there (full, read-only, not allowed).
    """
    path = probe_path(directory)
    kind = file_system(directory)
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    try:
        problem = _try_direct(path)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO):
            raise
        return Probe(False, error.errno or 0, error.strerror or str(error), kind)
    finally:
        path.unlink(missing_ok=True)
    return Probe(not problem, 0, problem, kind)


def probe_path(directory: Path) -> Path:
    """A name for a file of a probe that nobody else in `directory` has: it may be the user's own directory."""
    return directory / f".offloadz-probe-{secrets.token_hex(8)}"


def _try_direct(path: Path) -> str:
    fd = os.open(path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
    try:
        with mmap.mmap(-1, 2 * PAGE_BYTES) as area, memoryview(area) as view:
            view[:PAGE_BYTES] = os.urandom(PAGE_BYTES)
            if os.pwritev(fd, [view[:PAGE_BYTES]], 0) != PAGE_BYTES:
                return "a direct write of 4096 bytes ended short"
            if os.preadv(fd, [view[PAGE_BYTES:]], 0) != PAGE_BYTES:
                return "a direct read of 4096 bytes ended short"
            return "" if view[:PAGE_BYTES] == view[PAGE_BYTES:] else "direct I/O read back other bytes than written"
    finally:
        os.close(fd)


def file_system(path: Path) -> str:
    """The type of the file system of `path` ("ext4", "tmpfs"), by the longest mount point above it; "" if unknown."""
    place = os.path.realpath(path)
    best, kind = "", ""
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as mounts:
            lines = mounts.readlines()
    except OSError:
        return ""
    for line in lines:
        before, _, after = line.partition(" - ")
        point = before.split()[4].replace("\\040", " ")
        inside = place == point or place.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):  # >=: a later mount on the same point hides the earlier one
            best, kind = point, after.split()[0]
    return kind


def drop_cache(fd: int, offset: int, nbytes: int, written: bool) -> None:
    """Take `[offset, offset + nbytes)` of `fd` out of the page cache; after a write it goes to the drive first.

    fdatasync and not sync_file_range, because it also reports a failed write-back.  The range is widened to huge pages:
    the kernel caches in folios of up to 2 MiB and keeps one that lies only partly in the range.
    """
    if written:
        os.fdatasync(fd)
    start = offset - offset % HUGE_BYTES
    os.posix_fadvise(fd, start, aligned(offset + nbytes - start, HUGE_BYTES), os.POSIX_FADV_DONTNEED)
