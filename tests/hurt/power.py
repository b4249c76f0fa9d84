"""Power cuts, replayed: what a drive may hold after one, from a record of a real run on a real file system.

While a `Recorder` watches a directory, every call that changes names or flushes (`os.fsync`, `os.fdatasync`, renames,
links, removals) and every transfer to a file notes down names and contents as the system shows them then.  A cut at
some moment may then leave any mixture of what was flushed and what came later: per page of 4 KiB of each file, per
length of each file, and per directory its names as they were at its last flush or at any moment since.
"""

from __future__ import annotations

import os
import random
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

PAGE = 4096
WATCHED = ("fsync", "fdatasync", "rename", "replace", "link", "unlink", "remove", "mkdir", "rmdir")


class Recorder:
    """A context manager that watches `root` (`skip`: names of directories whose contents do not matter)."""

    def __init__(self, root: Path, skip: tuple[str, ...] = ()) -> None:
        self.root, self.skip = root, skip
        self.now = 0
        self.contents: dict[int, list[tuple[int, bytes]]] = {}
        self.names: dict[int, list[tuple[int, dict[str, int]]]] = {}
        self.synced: dict[int, list[int]] = {}
        """Inode to the moments at which it was flushed."""
        self.marks: list[tuple[int, str, int]] = []
        """(moment, what was done by then, step)."""
        self._real: dict[str, Any] = {}
        self._lock = threading.RLock()
        self._held: dict[int, int] = {}  # inode to a descriptor, so that its number is not given to another file

    def __enter__(self) -> Recorder:
        for name in WATCHED:
            self._real[name] = getattr(os, name)
            setattr(os, name, self._watched(name))
        self.look()
        for inode in list(self.names):
            self.synced[inode] = [self.now]
        return self

    def __exit__(self, *_: object) -> None:
        for name, real in self._real.items():
            setattr(os, name, real)
        self.look()
        for fd in self._held.values():
            os.close(fd)

    def _watched(self, name: str) -> Callable[..., Any]:
        real = self._real[name]

        def call(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                inode = None
                if name in ("fsync", "fdatasync"):
                    self.look()
                    inode = os.fstat(args[0]).st_ino
                found = real(*args, **kwargs)
                if inode is not None:
                    self.synced.setdefault(inode, []).append(self.now)
                self.look()
            return found

        return call

    def mark(self, what: str, step: int) -> None:
        """From this moment on `what` is promised."""
        with self._lock:
            self.look()
            self.marks.append((self.now, what, step))

    def look(self) -> None:
        """Note names and contents as they are."""
        with self._lock:
            self.now += 1
            self._look_into(self.root)

    def _look_into(self, directory: Path) -> None:
        entries = {}
        for name in sorted(os.listdir(directory)):
            try:
                told = os.lstat(directory / name)
                if stat.S_ISDIR(told.st_mode):
                    if name in self.skip:
                        continue
                    self._look_into(directory / name)
                else:
                    self._note(told.st_ino, (directory / name).read_bytes())
            except FileNotFoundError:
                continue
            entries[name] = told.st_ino
            if told.st_ino not in self._held:
                self._held[told.st_ino] = os.open(directory / name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
        history = self.names.setdefault(os.stat(directory).st_ino, [])
        if not history or history[-1][1] != entries:
            history.append((self.now, entries))

    def _note(self, inode: int, data: bytes) -> None:
        history = self.contents.setdefault(inode, [])
        if not history or history[-1][1] != data:
            history.append((self.now, data))

    def cut(self, moment: int, draw: random.Random, target: Path) -> Path:
        """One thing a power cut right after `moment` may leave, as real files in `target`."""
        made: dict[int, Path] = {}
        # Flat odds would mostly lose half of everything: sometimes nearly all is lost, sometimes nearly nothing.
        share = draw.choice((0.0, 0.05, 0.5, 0.95, 1.0))
        self._restore(os.stat(self.root).st_ino, moment, draw, share, target, made)
        return target

    def _restore(
        self, inode: int, moment: int, draw: random.Random, share: float, path: Path, made: dict[int, Path]
    ) -> None:
        path.mkdir()
        for name, child in self._one_of(self.names[inode], inode, moment, draw, share, {}).items():
            if child in self.names:
                self._restore(child, moment, draw, share, path / name, made)
            elif child in made:
                os.link(made[child], path / name)
            else:
                (path / name).write_bytes(self._mixed(child, moment, draw, share))
                made[child] = path / name

    def _one_of(self, history: list[Any], inode: int, moment: int, draw: random.Random, share: float, none: Any) -> Any:
        versions = self._possible(history, inode, moment, none)
        return versions[-1] if draw.random() < share else draw.choice(versions)

    def _possible(self, history: list[Any], inode: int, moment: int, none: Any) -> list[Any]:
        """What was flushed last, and all that came after it up to `moment`."""
        flushed = max((at for at in self.synced.get(inode, ()) if at <= moment), default=0)
        before = [value for at, value in history if at <= flushed]
        return [before[-1] if before else none, *(value for at, value in history if flushed < at <= moment)]

    def _mixed(self, inode: int, moment: int, draw: random.Random, share: float) -> bytes:
        versions = self._possible(self.contents[inode], inode, moment, b"")
        if len(versions) == 1:
            return versions[0]
        length = len(versions[-1] if draw.random() < share else draw.choice(versions))
        out = bytearray()
        for start in range(0, length, PAGE):
            version = versions[-1] if draw.random() < share else draw.choice(versions)
            end = min(start + PAGE, length)
            out += version[start:end].ljust(end - start, b"\0")
        return bytes(out)
