"""What the tiers share: alignments, the extent, and the two small agreements with whoever moves the bytes.

Left to others: `host.py` and `disk.py` own memory and files; `offloadz/runtime` owns the threads that move bytes and
hands them in as a `Transfer`, so that this room never imports the one above it.  The trade-off: every extent starts on
a 4 KiB border and is checked per piece of 1 MiB, which costs at most 4 KiB of disk an extent and one checksum word a
piece (8 bytes a MiB), and means that nothing smaller than a piece can be rewritten alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from offloadz.plan.spec import PAGE_BYTES as PAGE_BYTES
from offloadz.plan.spec import PIECE_BYTES as PIECE_BYTES
from offloadz.plan.spec import aligned

HUGE_BYTES = 2 << 20  # a huge page: contiguity decides the speed of direct I/O (3.2 against 1.5 GB/s, measured)

# Entries of a checksum table that are no checksum (those are 0 or more; what is in them is the transfer's business).
NEVER_WRITTEN = -1  # reads as zeros: fresh moments are this flag, not bytes on a drive
NOT_WHOLE = -2  # a write of this piece began and has not ended well: its bytes mean nothing
NOT_CHECKED = -3  # written while checksums are off


@dataclass(frozen=True)
class Extent:
    """A reserved range of one file: `nbytes` at `offset` (both in bytes, offset a multiple of 4096).

    `file` is relative to the tier's directory ("state/weights.bin"); `label` is what an error calls it: the name of
    the parameter or unit whose bytes these are.
    """

    file: str
    offset: int
    nbytes: int
    label: str

    @property
    def num_pieces(self) -> int:
        """How many checksums cover it."""
        return -(-self.nbytes // PIECE_BYTES)

    @property
    def room_bytes(self) -> int:
        """Bytes it takes in its file: whole pages."""
        return aligned(self.nbytes)


class TransferFailed(OSError):
    """A transfer ended short or with an error number; `DiskTier` turns it into `DiskFailed` with names and path.

    `errno` is 0 where the system gave none (a transfer that makes no progress).
    """

    def __init__(self, errno: int, operation: str, offset: int, wanted_bytes: int, found_bytes: int) -> None:
        super().__init__(errno, f"{operation} of {wanted_bytes} bytes at {offset} moved {found_bytes}")
        self.operation = operation
        self.offset = offset
        self.wanted_bytes = wanted_bytes
        self.found_bytes = found_bytes


class TransferDamaged(RuntimeError):
    """A piece read back has another CRC32C than was stored; `offset` is the piece's place in the file, in bytes."""

    def __init__(self, offset: int, expected: int, found: int) -> None:
        super().__init__(f"piece at {offset}: CRC32C {found:#010x}, stored {expected:#010x}")
        self.offset = offset
        self.expected = expected
        self.found = found


class Transfer(Protocol):
    """Moves bytes between an open file and a CPU buffer; blocking, without the GIL, callable from several threads.

    `buffer` is contiguous uint8, its address and `offset` and `nbytes` multiples of 4096.  `crcs` is None (not checked)
    or a contiguous int64 tensor with one entry per started MiB of `nbytes`: a write fills it with values of 0 or more,
    a read compares with it.  Short transfers are resumed; raises `TransferFailed` or, from a read, `TransferDamaged`.
    When a call has returned or raised, nothing of it is still under way.  `name` says how bytes are moved.
    """

    name: str

    def read(self, fd: int, buffer: torch.Tensor, nbytes: int, offset: int, crcs: torch.Tensor | None) -> None:
        """Read `nbytes` at `offset` of `fd` into the start of `buffer`."""

    def write(self, fd: int, buffer: torch.Tensor, nbytes: int, offset: int, crcs: torch.Tensor | None) -> None:
        """Write the first `nbytes` of `buffer` at `offset` of `fd`."""

    def fix(self, buffer: torch.Tensor) -> bool:
        """Say that transfers will use this memory again and again and that it stays until `close`; False: no gain."""

    def close(self) -> None:
        """End the threads."""
