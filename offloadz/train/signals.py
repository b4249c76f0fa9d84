"""Ctrl-C, SIGTERM and a closed terminal: finish what is under way, save, end; the second one ends at once.

While nothing is at stake (before the first step, after the last checkpoint) a signal raises `Interrupted` where it
arrives.  While steps are under way (`held`) it is only noted, and the loop looks for it at safe points.  After the
first one the system's own behaviour is back, so a second one ends the process whatever it is doing.  The trade-off: a
process that was ended so leaves its swap directory, which the next run of the same output takes over.

[Note: a closed terminal]  The kernel and the shell both tell of it by SIGHUP, so that one never counts as a second.
Nobody reads what is said to the terminal, or into a pipe of the same shell, from then on: it goes nowhere (`said.py`).
Under nohup SIGHUP is ignored, and stays so.
"""

from __future__ import annotations

import os
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from offloadz.train.said import dropped, let_go

ENDING = (signal.SIGINT, signal.SIGTERM)
"""Those of which a second one ends at once."""


class Interrupted(KeyboardInterrupt):
    """A signal arrived while nothing had to be saved; `status` is what the process should end with."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.status = 128 + signum


class Signals:
    """A context manager that watches signals; outside the main thread, where Python allows none, it sees none.

    `echo_s`: so long after the first one another is taken for the same: a launcher passes on what its ranks got too.
    """

    def __init__(self, tell: Callable[[str], None] | None = None, echo_s: float = 0.0) -> None:
        self._echo_s, self._seen_s = echo_s, 0.0
        self.status = 0
        """0, or the exit status that the signal seen asks for."""
        self._tell = tell or (lambda text: print(text, file=sys.stderr, flush=True))
        self._held = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            watched = ENDING if ignored else (*ENDING, signal.SIGHUP)
            self._before = {number: signal.signal(number, self._seen) for number in watched}
        return self

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
        self._before = {}

    @contextmanager
    def held(self) -> Iterator[None]:
        """While this lasts a signal is noted in `status` and raises nothing."""
        self._held = True
        try:
            yield
        finally:
            self._held = False

    def _seen(self, signum: int, frame: FrameType | None) -> None:
        first = not self.status
        if first:
            self._note(signum)
        elif signum in ENDING and time.monotonic() >= self._seen_s + self._echo_s:
            signal.signal(signum, signal.SIG_DFL)
            signal.raise_signal(signum)
        if signum == signal.SIGHUP:
            _let_go_of_terminal()
        if first and not self._held:
            raise Interrupted(signum)

    def _note(self, signum: int) -> None:
        self.status, self._seen_s = 128 + signum, time.monotonic()
        for number in ENDING if not self._echo_s else ():
            signal.signal(number, signal.SIG_DFL)
        name = signal.Signals(signum).name
        with dropped():  # the terminal that it is said to may be the one that was closed
            if self._held:
                self._tell(f"{name}: saving after this step, then ending; once more ends at once")


def _let_go_of_terminal() -> None:
    """What is written to no file from now on goes nowhere; see [Note: a closed terminal]."""
    for fd in (1, 2):
        with suppress(OSError):  # closed
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                let_go(fd)
