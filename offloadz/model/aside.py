"""Room on a drive, directories that appear whole or not at all, and the checksum of pieces put together.

What a writer of files needs besides the files: errors with numbers, a look at the free space, a scratch directory that
takes its place by a rename, the leftovers of dead writers.  The files' contents are left to `files.py`.  The trade-off:
a replaced directory exists twice until the new one is flushed, which costs its size in room and never the last copy.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from offloadz.memory.record import make_directories
from offloadz.plan.errors import DiskFailed
from offloadz.plan.words import human


def disk_failed(error: OSError, operation: str, path: Path, wanted_bytes: int) -> DiskFailed:
    """An OSError with what was asked of the drive and what it has left."""
    free = free_bytes(path.parent)
    return DiskFailed(
        error.errno,
        f"{operation} of {wanted_bytes} bytes in {path}: {os.strerror(error.errno or errno.EIO)} ({human(free)} free); "
        "make room or choose another directory",
    )


def free_bytes(directory: Path) -> int:
    """Bytes that this user may still write in the file system of `directory` (or its nearest existing parent)."""
    while not directory.exists():
        directory = directory.parent
    stat = os.statvfs(directory)
    return stat.f_bavail * stat.f_frsize


def require_room(directory: Path, needed_bytes: int, purpose: str) -> None:
    """DiskFailed with numbers where `directory` has not enough room for `purpose`; nothing has been touched yet."""
    free = free_bytes(directory)
    if free < needed_bytes:
        raise DiskFailed(
            errno.ENOSPC,
            f"{purpose} in {directory} needs {human(needed_bytes, up=True)}, {human(free)} are free, "
            f"{human(needed_bytes - free, up=True)} are missing; "
            "make room or choose another directory",
        )


# [Note: directories appear whole]  A directory is filled beside its place under a name with `.tmp-`, flushed, and
# renamed.  While it is being filled its descriptor holds a lock, so that `clean_leftovers` can tell a live writer from
# a dead one without trusting process numbers, which repeat in containers.


@contextmanager
def appearing(target: Path) -> Iterator[Path]:
    """A scratch directory beside `target` that becomes `target` when the block ends well and vanishes when it does not.

    An existing target is moved aside and removed only after the new one is in place and flushed.
    """
    make_directories(target.parent)
    scratch = target.with_name(f"{target.name}.tmp-{os.getpid()}")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(mode=0o700)
    lock = os.open(scratch, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):  # some network file systems lock no directories
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield scratch
        for path in [*scratch.rglob("*"), scratch]:
            flush(path)
        _put_in_place(scratch, target)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    finally:
        os.close(lock)


def clean_leftovers(parent: Path, name: str) -> list[Path]:
    """Remove what dead writers of directories called `name` (a pattern) left in `parent`; returns what was removed.

    A directory that had been moved aside and whose replacement never came is put back.
    """
    removed = []
    for path in sorted(parent.glob(f"{name}.old-*")):
        target = path.with_name(path.name.rsplit(".old-", 1)[0])
        if not target.exists():
            path.rename(target)
        else:
            shutil.rmtree(path, ignore_errors=True)
            removed.append(path)
    for path in sorted(parent.glob(f"{name}.tmp-*")):
        if path.is_dir() and not _is_being_written(path):
            shutil.rmtree(path, ignore_errors=True)
            removed.append(path)
    return removed


def remove_directory(path: Path) -> None:
    """Remove a directory so that a kill in between leaves a `.tmp-` leftover, never half of it under its name."""
    doomed = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    shutil.rmtree(doomed, ignore_errors=True)
    path.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    """A small private file, 0600."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with open(fd, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise disk_failed(error, "write", path, len(text)) from error


def flush(path: Path) -> None:
    """Make a file's bytes, or the names in a directory, durable."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        raise disk_failed(error, "flush", path, os.fstat(fd).st_size) from error
    finally:
        os.close(fd)


def _put_in_place(scratch: Path, target: Path) -> None:
    old = target.with_name(f"{target.name}.old-{os.getpid()}")
    replaces = target.exists()
    if replaces:
        shutil.rmtree(old, ignore_errors=True)
        target.rename(old)
    try:
        scratch.rename(target)
    except BaseException:
        if replaces:
            with suppress(OSError):  # then `clean_leftovers` does it
                old.rename(target)
        raise
    flush(target.parent)
    if replaces:
        shutil.rmtree(old, ignore_errors=True)


def _is_being_written(path: Path) -> bool:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(fd)
    return False


# The checksum of a tensor written in pieces of any order is joined from theirs: CRC-32 is linear, so following a piece
# by n bytes multiplies its remainder by x^(8n) modulo the polynomial (zlib's crc32_combine, bits reflected).

_POLYNOMIAL = 0xEDB88320


def join_crc(first: int, second: int, second_bytes: int) -> int:
    """CRC-32 of A followed by B from those of A and B and the length of B in bytes."""
    return second if first == 0 else _times(first, _power(second_bytes)) ^ second


def _times(a: int, b: int) -> int:
    """Product of two remainders; bit 31 is the coefficient of x^0."""
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product


def _power(num_bytes: int) -> int:
    """x^(8 num_bytes) modulo the polynomial, by squaring."""
    result, square = 1 << 31, 1 << 23
    while num_bytes:
        if num_bytes & 1:
            result = _times(result, square)
        square = _times(square, square)
        num_bytes >>= 1
    return result
