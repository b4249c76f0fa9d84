"""The host pool: one anonymous mapping, exactly as large as the plan says, cut into named buffers.

Left to others: what the buffers mean, and when.  The mapping lies on huge pages (contiguity decides the speed of direct
I/O: 3.2 against 1.5 GB/s) and is not inherited by forks; a device with memory of its own page-locks it itself.  The
trade-off: buffers are never given back one by one.  A pool is laid out before the first step and closed after the last,
so there is no fragmentation to think about and every byte has a name in `ledger`; a buffer of 2 MiB or more starts on a
2 MiB border, and the gap before it (under 2 MiB) is used by later small buffers.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import logging
import mmap
import os
import weakref
from collections.abc import Iterable

import torch

from offloadz.memory.tier import HUGE_BYTES, PAGE_BYTES
from offloadz.plan.errors import DoesNotFit
from offloadz.plan.spec import aligned

log = logging.getLogger("offloadz")


def _place(gaps: list[tuple[int, int]], nbytes: int) -> int | None:
    """First fit of `nbytes` in the free ranges `gaps` (start, end), which are updated; None where nothing is left."""
    align_bytes = HUGE_BYTES if nbytes >= HUGE_BYTES else PAGE_BYTES
    for i, (start, end) in enumerate(gaps):
        at = aligned(start, align_bytes)
        stop = at + aligned(nbytes)
        if stop <= end:
            gaps[i : i + 1] = [gap for gap in ((start, at), (stop, end)) if gap[0] < gap[1]]
            return at
    return None


def needed_bytes(sizes: Iterable[int]) -> int:
    """The capacity that buffers of these sizes, taken in this order, need: their bytes and the borders between them."""
    gaps = [(0, 1 << 62)]
    top = 0
    for nbytes in sizes:
        at = _place(gaps, nbytes) if nbytes else 0
        assert at is not None  # 2^62 bytes are never full
        top = max(top, at + aligned(nbytes))
    return top


def anonymous(nbytes: int) -> tuple[mmap.mmap, int]:
    """A private mapping for `nbytes` on huge pages, and the first 2 MiB border in it.

    The mapping is 2 MiB longer than asked so that the border exists; that part is address space, never memory.  Raises
    `DoesNotFit`.
    """
    try:
        area = mmap.mmap(-1, aligned(nbytes) + HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise DoesNotFit(
            f"host memory: the system refused {nbytes} bytes ({os.strerror(error.errno or errno.ENOMEM)}); end what"
            " else uses memory, or lower offload.host_memory so that the plan fits what is left"
        ) from error
    pin = ctypes.c_char.from_buffer(area)
    start = -ctypes.addressof(pin) % HUGE_BYTES
    del pin
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
        try:
            area.madvise(getattr(mmap, advice))
        except (AttributeError, OSError) as error:  # a kernel without it: slower, or more to copy on a fork, not wrong
            log.debug("host memory: %s refused: %s", advice, error)
    return area, start


class HostPool:
    """`capacity_bytes` of host memory (rounded up to 4096), handed out once by name.

    Pages nobody has written cost no memory.  `ledger` maps each name to the bytes it took.
    """

    def __init__(self, capacity_bytes: int) -> None:
        if capacity_bytes < 0:
            raise ValueError(f"host pool: capacity_bytes is {capacity_bytes}, needs 0 or more")
        self.capacity_bytes = aligned(capacity_bytes)
        self.ledger: dict[str, int] = {}
        self._gaps = [(0, self.capacity_bytes)] if self.capacity_bytes else []
        self._area: mmap.mmap | None
        self._area, self._start = anonymous(self.capacity_bytes)

    def take(self, name: str, nbytes: int) -> torch.Tensor:
        """A uint8 tensor of `nbytes`, its address a multiple of 4096 (of 2 MiB from 2 MiB on).

        Room is taken in whole pages, so up to `aligned(nbytes)` bytes behind the address belong to `name` alone; ask
        for the rounded length where the padding of a disk transfer is to be seen.  Raises `DoesNotFit`.
        """
        if self._area is None:
            raise ValueError(f"host pool: {name!r} was asked of a pool that is closed")
        if name in self.ledger:
            raise ValueError(f"host pool: {name!r} was taken before, with {self.ledger[name]} bytes")
        if nbytes < 0:
            raise ValueError(f"host pool: {name!r} asks for {nbytes} bytes, needs 0 or more")
        if nbytes == 0:
            self.ledger[name] = 0
            return torch.empty(0, dtype=torch.uint8)
        at = _place(self._gaps, nbytes)
        if at is None:
            raise DoesNotFit(
                f"host pool: {name!r} needs {nbytes} bytes, {self.free_bytes} of {self.capacity_bytes} are left"
                f" (largest piece {max((end - start for start, end in self._gaps), default=0)});"
                " raise offload.host_memory"
            )
        self.ledger[name] = aligned(nbytes)
        # One storage per buffer (not slices of one tensor): a storage tells which buffer a tensor lies in.
        return torch.frombuffer(self._area, dtype=torch.uint8, count=nbytes, offset=self._start + at)

    @property
    def address(self) -> int:
        """Where the pool begins; 0 once it is closed."""
        if self._area is None:
            return 0
        pin = ctypes.c_char.from_buffer(self._area, self._start)
        return ctypes.addressof(pin)

    @property
    def free_bytes(self) -> int:
        """Bytes not taken, in all gaps together."""
        return sum(end - start for start, end in self._gaps)

    def close(self) -> None:
        """Give the memory back.  A tensor that still lies in the pool keeps it alive until that tensor dies.

        [Note: never unmap by hand] `torch.frombuffer` holds the mapping by reference only and does not pin its buffer,
        so `mmap.close` would succeed under a living tensor, and the next use of it would end the process.
        """
        if self._area is None:
            return
        area = weakref.ref(self._area)
        self._area, self._gaps = None, []
        if area() is not None:
            gc.collect()  # an exception's traceback often holds the last view
        if area() is not None:
            log.warning(
                "host pool closed while tensors still lie in it: its %d bytes stay until the last of them dies",
                self.capacity_bytes,
            )
