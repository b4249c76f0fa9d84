"""How tensors of the model cross between ranks: memory of the host by gloo, that of a device by what torch has for it.

Between GPUs that is NCCL.  On some consumer cards and drivers copies from one to another arrive wrong, or never, so the
way is tried once at the start: a known pattern crosses and is compared on every rank, within a time.  Where it is not
what was sent, or does not come, all ranks take the way through the host, which is slower and gives the same bits.

Left to others: what is summed and in which order (`ranks.py`), streams (`streams.py`: whatever is put in here stands in
the stream of the lane that calls).  The trade-off: a start takes the meeting of a second group, some seconds for NCCL.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

TRIED_ELEMENTS = 1 << 20
"""Of each rank's part of the pattern: some MB, in several messages."""

TRIED_S = 60.0
"""How long the pattern may take, the meeting of its group included."""

NEAR_S = 600.0
"""How long a collective between devices may take; who waits at a turn is told by gloo long before."""


class Ways:
    """Two collectives for tensors of the host, by the gloo group `host`, and of a device, once `meet` was called."""

    def __init__(self, host: Any, rank: int, size: int) -> None:
        self._host, self._near, self._rank, self._size = host, None, rank, size

    def gather(self, whole: Tensor, own: Tensor) -> None:
        """Fill `whole` with the equal pieces `own` of all ranks, in their order; `own` may be its place in `whole`."""
        self._collect(dist.all_gather_single, whole, own)

    def swap(self, out: Tensor, given: Tensor) -> None:
        """Piece q of `given` to rank q, for piece r of `out` from rank r; all pieces are equal."""
        self._collect(dist.all_to_all_single, out, given)

    def _collect(self, collective: Callable[..., Any], out: Tensor, given: Tensor) -> None:
        """Fill `out` by the group for memory like this; through the host where there is none."""
        group = self._group(out)
        if group is not None:
            collective(out, given, group=group)
            return
        there = torch.empty(out.shape, dtype=out.dtype)
        collective(there, given.cpu(), group=self._host)
        out.copy_(there)

    def _group(self, held: Tensor) -> Any:
        """The group for memory like this; None where it goes through the host."""
        return self._host if held.is_cpu else self._near

    def meet(self, device: torch.device, agree: Callable[[str], str]) -> str:
        """Make ready for tensors of `device`; returns why they go through the host, nothing where they need not.

        `agree`: what any rank found wrong, from what this one did.
        """
        if device.type == "cpu":  # a rehearsed device
            return ""
        near: Any = None
        try:
            backend = dist.get_default_backend_for_device(device)
            near = dist.new_group(backend=backend, timeout=timedelta(seconds=NEAR_S))
            found = self.tried(near, device)
        except (RuntimeError, ValueError) as error:
            found = str(error).splitlines()[0] if str(error) else type(error).__name__
        wrong = agree(found)
        self._near = None if wrong else near
        if wrong and near is not None:
            with suppress(Exception):  # what hangs is left behind
                near._get_backend(device).abort()
        return wrong

    def tried(self, group: Any, device: torch.device) -> str:
        """What is wrong with a group's collectives of memory of `device`; nothing where a pattern arrives as sent."""
        own = _pattern(self._rank, self._size).to(device)
        whole, swapped = (torch.zeros(self._size * len(own), dtype=own.dtype, device=device) for _ in range(2))
        works = [
            dist.all_gather_single(whole, own, group=group, async_op=True),
            dist.all_to_all_single(swapped[: len(own)], own, group=group, async_op=True),
        ]
        until_s = time.monotonic() + TRIED_S
        while not all(work.is_completed() for work in works):
            if time.monotonic() > until_s:
                return f"a pattern that rank {self._rank} waits for did not arrive within {TRIED_S:.0f} s"
            time.sleep(0.001)
        for work in works:
            work.wait()
        sent = [_pattern(rank, self._size) for rank in range(self._size)]
        pieces = [pattern.view(self._size, -1)[self._rank] for pattern in sent]
        right = torch.equal(whole.cpu(), torch.cat(sent)) and torch.equal(swapped[: len(own)].cpu(), torch.cat(pieces))
        return "" if right else f"a pattern arrived at rank {self._rank} otherwise than it was sent"


def _pattern(rank: int, size: int) -> Tensor:
    """Numbers that say where they are from, each exact in float32."""
    return torch.arange(TRIED_ELEMENTS // size * size, dtype=torch.float32) + 4099.0 * rank
