"""The life of a run's directory in a swap path: private, locked, found again, and gone at the end.

A run's directory is `<swap>/offloadz-<12 hex of the owner>`, so its name depends on who owns it (the run's output
directory) and never on an address, a time or a process id: the next run of the same owner takes it over instead of
adding a second one.  A lock (flock on `owner.json`) says that the owner is alive; it dies with the process, whatever
kills it.  Left to others: what lies in the directory.  The trade-off: a dead run of *another* owner is only reported,
never removed, so its bytes stay until somebody says so (`remove`).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import socket
import stat
import time
from dataclasses import dataclass
from pathlib import Path

from offloadz.memory.record import make_directories
from offloadz.plan.errors import ConfigError
from offloadz.plan.paths import PREFIX, directory_of, held_bytes, owner_name
from offloadz.plan.words import lasting

__all__ = ["STATE", "Leftover", "SwapDir", "is_locked", "leftovers", "owner_name", "remove"]

OWNER_FILE = "owner.json"
STATE = "state"
"""What outlives a run where it is worth keeping."""
_LOCK_TRIES = 5  # somebody who only looks for leftovers holds a lock for microseconds
_LOCK_WAIT_S = 0.05


@dataclass(frozen=True)
class Leftover:
    """A dead run's directory: `size_bytes` on disk, started `age_s` seconds ago by `owner` as process `pid`."""

    path: Path
    owner: str
    size_bytes: int
    pid: int
    age_s: float

    def __str__(self) -> str:
        return f"{self.path}: {self.size_bytes} bytes of {self.owner} (process {self.pid}, {lasting(self.age_s)} ago)"


class SwapDir:
    """A run's directory in `swap`, made (or taken over from a dead run of the same owner), emptied and locked.

    Raises `ConfigError` where a live run holds it or the path cannot be used; `path` is mode 0700.  `keep`: an entry
    that is not to be emptied (`state/` that a run goes on from).
    """

    def __init__(self, swap: str | Path, owner: str, keep: Path | None = None) -> None:
        self.swap = Path(swap).absolute()
        self.owner = owner
        self.path = directory_of(swap, owner)
        self._pid = os.getpid()
        try:
            make_directories(self.swap)
            self._lock = self._take()
            self.taken_over_bytes = _clear(self.path, keep)
            note = {"owner": owner, "pid": self._pid, "host": socket.gethostname(), "started": time.time()}
            os.ftruncate(self._lock, 0)
            os.pwrite(self._lock, json.dumps(note).encode(), 0)
        except OSError as error:
            raise ConfigError(
                f"swap path {self.swap}: {error.strerror} ({error.filename or self.path}); name a directory you may"
                " write in offload.swap"
            ) from error

    def _take(self) -> int:
        """The locked descriptor of the owner file."""
        for tries_left in range(_LOCK_TRIES, 0, -1):
            self.path.mkdir(mode=0o700, exist_ok=True)
            found = self.path.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
                raise ConfigError(
                    f"swap path: {self.path} is no directory of this user; remove it or move offload.swap"
                )
            try:
                lock = _try_lock(self.path)
            except FileNotFoundError:  # the run before us is just removing it
                lock = None
            if lock is not None:
                self.path.chmod(0o700)
                return lock
            if tries_left > 1:
                time.sleep(_LOCK_WAIT_S)
        note = _owner_note(self.path)
        raise ConfigError(
            f"swap directory {self.path} is in use by process {note['pid']} of host {note['host']}"
            f" (owner {note['owner']}); wait for it, end it, or set another train.output or offload.swap"
        )

    def remove(self, keep: bool = False) -> None:
        """Let go of the directory; all of it is removed, or all but `state/` if `keep`.  Nothing in a forked child."""
        if self._lock < 0 or os.getpid() != self._pid:
            return
        if keep:
            _clear(self.path, self.path / STATE)
        else:
            _remove_locked(self.path)
        lock, self._lock = self._lock, -1
        fcntl.flock(lock, fcntl.LOCK_UN)  # said aloud: a forked child may hold the same open file
        os.close(lock)


def leftovers(swap: str | Path) -> list[Leftover]:
    """The directories in `swap` whose runs are dead, largest first.  Live runs and other people's files are no part."""
    found = []
    for path in sorted(Path(swap).absolute().glob(PREFIX + "*")):
        try:
            if path.is_symlink() or not path.is_dir() or _is_live(path):
                continue
            note = _owner_note(path)
            age_s = max(0.0, time.time() - float(note["started"]))
            found.append(Leftover(path, str(note["owner"]), held_bytes(path), int(note["pid"]), age_s))
        except OSError:  # gone while we looked, or not ours to read
            continue
    return sorted(found, key=lambda leftover: -leftover.size_bytes)


def remove(leftover: Leftover) -> bool:
    """Remove a dead run's directory; False (and nothing is touched) if a run has come to life in it meanwhile."""
    try:
        lock = _try_lock(leftover.path)
    except FileNotFoundError:
        return False
    if lock is None:
        return False
    try:
        _remove_locked(leftover.path)
    finally:
        os.close(lock)
    return True


def _try_lock(path: Path) -> int | None:
    """An exclusive lock on the owner file of `path`, made if need be; None while somebody else holds one."""
    lock = os.open(path / OWNER_FILE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        same = os.stat(path / OWNER_FILE).st_ino == os.fstat(lock).st_ino
    except (BlockingIOError, FileNotFoundError):
        same = False  # held, or removed between our open and our lock
    except OSError:
        os.close(lock)
        raise
    if not same:
        os.close(lock)
        return None
    return lock


def _is_live(path: Path) -> bool:
    try:
        return is_locked(path / OWNER_FILE, os.O_NOFOLLOW)
    except FileNotFoundError:
        return False


def is_locked(path: Path, flags: int = 0) -> bool:
    """Whether a process holds the lock of what these further flags open; OSError where none can be asked for."""
    asked = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
    try:
        fcntl.flock(asked, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(asked)
    return False


def _owner_note(path: Path) -> dict[str, str | int | float]:
    """What the owner file says, with "unknown" and 0 where a kill left it cut or empty."""
    note: dict[str, str | int | float] = {
        "owner": "unknown",
        "pid": 0,
        "host": "unknown",
        "started": path.stat().st_mtime,
    }
    try:
        read = json.loads((path / OWNER_FILE).read_text())
    except (OSError, ValueError):
        return note
    if isinstance(read, dict):
        note |= {key: value for key, value in read.items() if key in note and isinstance(value, (str, int, float))}
    return note


def _clear(path: Path, keep: Path | None = None) -> int:
    """Remove everything but the owner file and `keep`; how many bytes that was."""
    removed_bytes = 0
    if not path.exists():  # somebody has removed it under the run
        return 0
    for entry in path.iterdir():
        if entry.name == OWNER_FILE or entry == keep:
            continue
        if entry.is_dir() and not entry.is_symlink():
            removed_bytes += held_bytes(entry)
            shutil.rmtree(entry)
        else:
            removed_bytes += entry.lstat().st_blocks * 512
            entry.unlink()
    return removed_bytes


def _remove_locked(path: Path) -> None:
    """Remove a directory whose lock we hold; its owner file goes last, so that a kill in here leaves a known owner."""
    _clear(path)
    (path / OWNER_FILE).unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # another run of this owner may just have begun in it
        path.rmdir()
