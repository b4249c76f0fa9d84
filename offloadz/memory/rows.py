"""Single rows of a table on disk: read the pieces that hold them, check those whole, copy the rows out.

Left to others: reading pieces (a function handed in).  The trade-off: a lookup of one row reads a whole piece of 1 MiB,
because that is what a checksum covers; neighbouring wanted pieces are read together, up to 4 MiB at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import torch

from offloadz.memory.host import HostPool
from offloadz.memory.tier import PIECE_BYTES, Extent

STAGING_BYTES = 4 * PIECE_BYTES

Read = Callable[[Extent, torch.Tensor, int, int], None]


class RowReader:
    """Reads rows through a staging buffer of its own, made at the first use; one call at a time."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._pool: HostPool | None = None
        self._staging = torch.empty(0, dtype=torch.uint8)

    def read_rows(
        self, read: Read, extent: Extent, row_bytes: int, first_byte: int, rows: torch.Tensor, out: torch.Tensor
    ) -> None:
        """See `DiskTier.read_rows`; `read` is `DiskTier.read`."""
        num_rows = rows.numel()
        _check(extent, row_bytes, first_byte, rows, out)
        if not num_rows or not row_bytes:
            return
        starts = rows * row_bytes + first_byte  # in the extent
        with self._turn:
            if self._pool is None:
                self._pool = HostPool(STAGING_BYTES)
                self._staging = self._pool.take("staging of table rows", STAGING_BYTES)
            for low, high in _runs(starts, row_bytes):
                stop = min(high, extent.nbytes)
                read(extent, self._staging, stop - low, low)
                _copy(self._staging, low, stop, starts, row_bytes, out)

    def close(self) -> None:
        """Give the staging buffer back."""
        with self._turn:
            self._staging = torch.empty(0, dtype=torch.uint8)
            if self._pool is not None:
                self._pool.close()
                self._pool = None


def _check(extent: Extent, row_bytes: int, first_byte: int, rows: torch.Tensor, out: torch.Tensor) -> None:
    where = f"disk tier: rows of {extent.label!r}"
    if row_bytes < 0 or first_byte < 0:
        raise ValueError(f"{where}: row_bytes is {row_bytes}, first_byte {first_byte}; both need 0 or more")
    if rows.dtype != torch.int64 or rows.dim() != 1 or rows.device.type != "cpu":
        raise ValueError(f"{where}: rows must be a one-dimensional int64 tensor on the CPU, they are {rows.dtype}")
    if out.dtype != torch.uint8 or tuple(out.shape) != (rows.numel(), row_bytes) or out.device.type != "cpu":
        raise ValueError(f"{where}: out is {out.dtype} {tuple(out.shape)}, needs uint8 {(rows.numel(), row_bytes)}")
    if rows.numel() > 1 and not bool((rows[1:] > rows[:-1]).all()):
        raise ValueError(f"{where}: rows must be sorted and each there once")
    if rows.numel() and (int(rows[0]) < 0 or first_byte + (int(rows[-1]) + 1) * row_bytes > extent.nbytes):
        raise ValueError(
            f"{where}: rows {int(rows[0])} to {int(rows[-1])} of {row_bytes} bytes from byte {first_byte} on do not lie"
            f" in its {extent.nbytes} bytes"
        )


def _runs(starts: torch.Tensor, row_bytes: int) -> Iterator[tuple[int, int]]:
    """Ranges of the extent (whole pieces, at most a staging buffer long) that together hold every wanted row."""
    firsts = (starts // PIECE_BYTES).tolist()
    lasts = ((starts + row_bytes - 1) // PIECE_BYTES).tolist()
    low, high = firsts[0], firsts[0]  # pieces low .. high-1 are wanted and not yet given out
    for first, last in zip(firsts, lasts, strict=True):
        if first > high:  # a gap: pieces in between are not read
            if high > low:
                yield low * PIECE_BYTES, high * PIECE_BYTES
            low = high = first
        for piece in range(max(first, high), last + 1):
            if (piece + 1 - low) * PIECE_BYTES > STAGING_BYTES:
                yield low * PIECE_BYTES, piece * PIECE_BYTES
                low = piece
            high = piece + 1
    yield low * PIECE_BYTES, high * PIECE_BYTES


def _copy(staging: torch.Tensor, low: int, stop: int, starts: torch.Tensor, row_bytes: int, out: torch.Tensor) -> None:
    """Copy what of the wanted rows lies in extent bytes [low, stop), staged at the start of `staging`."""
    # Rows wholly inside lie on one stride in the staging buffer: one gather.  At most a few lie across its ends.
    inside = torch.nonzero((starts >= low) & (starts + row_bytes <= stop)).flatten()
    if inside.numel():
        a, b = int(inside[0]), int(inside[-1]) + 1
        phase = (int(starts[a]) - low) % row_bytes
        num = (stop - low - phase) // row_bytes
        table = staging[phase : phase + num * row_bytes].view(num, row_bytes)
        torch.index_select(table, 0, (starts[a:b] - low - phase) // row_bytes, out=out[a:b])
    across = torch.nonzero(
        (starts < stop) & (starts + row_bytes > low) & ((starts < low) | (starts + row_bytes > stop))
    )
    for i in across.flatten().tolist():
        start = int(starts[i])
        begin, end = max(start, low), min(start + row_bytes, stop)
        out[i, begin - start : end - start] = staging[begin - low : end - low]
