"""Ctrl-C and SIGTERM: finish what is under way, save, end; the second one ends at once.

While nothing is at stake (before the first step, after the last checkpoint) a signal raises `Interrupted` where it
arrives.  While steps are under way (`held`) it is only noted, and the loop looks for it at safe points.  After the
first one the system's own behaviour is back, so a second one ends the process whatever it is doing.  The trade-off: a
process that was ended so leaves its swap directory, which the next run of the same output takes over.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

WATCHED = (signal.SIGINT, signal.SIGTERM)


class Interrupted(KeyboardInterrupt):
    """A signal arrived while nothing had to be saved; `status` is what the process should end with."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.status = 128 + signum


class Signals:
    """A context manager that watches both signals; outside the main thread, where Python allows none, it sees none.

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
            self._before = {number: signal.signal(number, self._seen) for number in WATCHED}
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
        if self.status and time.monotonic() < self._seen_s + self._echo_s:
            return
        if self.status:
            signal.signal(signum, signal.SIG_DFL)
            signal.raise_signal(signum)
        self.status, self._seen_s = 128 + signum, time.monotonic()
        for number in WATCHED if not self._echo_s else ():
            signal.signal(number, signal.SIG_DFL)
        if not self._held:
            raise Interrupted(signum)
        self._tell(f"{signal.Signals(signum).name}: saving after this step, then ending; once more ends at once")
