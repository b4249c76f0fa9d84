"""What a run says, to a reader who may go away: a pipe into `tee` that Ctrl-C ended too, a terminal that was closed.

What cannot be written is dropped, and the run goes on to where it saves.  Where the reader is gone for good the
descriptor leads nowhere from then on, so that what is still buffered is no error at the end.  The trade-off: lines that
a full drive has no room for are dropped or late without a word; `metrics.jsonl`, which a resume needs, drops nothing.
"""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any

from rich.console import Console

GONE = select.POLLERR | select.POLLHUP | select.POLLNVAL


def console() -> Console:
    """Standard output for lines and the bar; writing to it raises no OSError."""
    return Console(highlight=False, soft_wrap=True, file=Heard(sys.stdout))  # type: ignore[arg-type]


def let_go(fd: int) -> None:
    """What is written there from now on goes nowhere."""
    with open(os.devnull, "w") as nowhere, suppress(OSError):  # closed
        os.dup2(nowhere.fileno(), fd)


@contextmanager
def dropped() -> Iterator[None]:
    """What cannot be written in here is dropped, and standard output and error are let go of where nobody reads."""
    try:
        yield
    except OSError:
        asked = select.poll()
        for fd in (1, 2):
            asked.register(fd, 0)
        for fd, state in asked.poll(0):
            if state & GONE:
                let_go(fd)


class Heard:
    """A text file to which all is written that can be; in all else it is that file."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def write(self, text: str) -> int:
        with dropped():
            self._file.write(text)
        return len(text)

    def flush(self) -> None:
        with dropped():
            self._file.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)
