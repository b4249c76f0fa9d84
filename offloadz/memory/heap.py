"""What the C allocator holds: blocks of a computation, and what they leave behind when they are freed.

Left to others: buffers that live as long as a run (`host.py`), and how torch asks for its blocks (`csrc/heap.cpp`).
The trade-off: memory that a step has freed stays with the process, which has it back for the next step without a fault
for every page; it is given back only where it grows.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import os

_libc = ctypes.CDLL(None)


def give_back() -> None:
    """Return what the C allocator holds free to the system: 300 MB after a tokenizer of 33 MB."""
    gc.collect()
    trim()


SLACK_BYTES = 32 << 20
"""How far a process may grow before its allocator is asked to give back what is free."""


class Growth:
    """Keeps what the C allocator holds free from growing with the depth of a model.

    Between the large blocks of a computation on the heap stay small ones that live for a step, and each leaves a hole
    just too small for the next: 24 blocks over hidden states of 2.6 MB left 540 MiB of holes, 15 to 20 for a block.
    What one computation leaves is filled by the next, and is let be: to give it back takes 5 ms for 50 MiB and to page
    it in again as long, after each of the computations of a step.
    """

    def __init__(self) -> None:
        self._allowed = 0
        self._given_back = False
        self._statm = -1

    def check(self) -> None:
        """After a computation: give back what is free if the process is larger by `SLACK_BYTES` than after the first
        one since that was last done, then or ever."""
        if self._statm < 0:
            self._statm = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        resident = int(os.pread(self._statm, 256, 0).split()[1]) * mmap.PAGESIZE
        if self._given_back:
            self._allowed = max(self._allowed, resident + SLACK_BYTES)
        over = resident > self._allowed
        if over:
            trim()
        self._given_back = over

    def close(self) -> None:
        """Let go of the file that is asked; a later check opens it again."""
        fd, self._statm = self._statm, -1
        if fd >= 0:
            os.close(fd)


def trim() -> None:
    """Return what the C allocator holds free to the system."""
    found = getattr(_libc, "malloc_trim", None)  # glibc's
    if found is not None:
        found(0)


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
LARGE_BYTES = 32 << 20
"""The most that glibc can be told."""
TOP_BYTES = 256 << 20
"""What may be free at the end of the heap; as it is told nothing else, glibc gives back from 128 KiB on."""


def map_large_blocks(from_bytes: int = LARGE_BYTES) -> None:
    """Let the C allocator map every block of `from_bytes` or more by itself, and so return it when it is freed.

    What is mapped anew has a fault for every page, 2 us each: a Llama of 110M, 2 x 512 tokens, had 320,000 of them a
    step, a tenth of its time, with blocks mapped from 4 MiB on.  For the whole process: an allocator knows no less.
    """
    mallopt = getattr(_libc, "mallopt", None)  # glibc's
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, from_bytes)
        mallopt(_M_TRIM_THRESHOLD, TOP_BYTES)
