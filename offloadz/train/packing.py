"""Packing: which samples share a row, so that hardly any of it is padding.

Best fit decreasing (Johnson, Near-optimal bin packing algorithms, 1973): the longest sample first, each into the
fullest row that still has room.  Which samples are left apart by a model, and how, is told in `batches.py`; this room
knows lengths only.  The trade-off: all lengths are packed at once and anew in each epoch (1 s for a million), which
needs no carry from one batch to the next, so that a place in the data is two numbers with packing too.

[Note: the number of rows] Equal lengths may change places from epoch to epoch, lengths may not: the sequence of lengths
that is packed is the same, and so is the number of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]

NUM_FOR_NUMBA = 100_000
"""From so many samples on the compiled kernel is worth its import (1.2 s, 60 MiB); numpy takes 4 us a sample."""
_CHUNK = 64


def pack(lengths: Numbers, capacity: int) -> Numbers:
    """The row of each sample, from 0, for rows of at most `capacity` tokens.

    `lengths`: (samples,) int64 of 1 to `capacity`.  Ties go by position: earlier samples first, and into the row that
    last came to its filling.  Raises ValueError for a length that fits no row.
    """
    if len(lengths) and not 1 <= int(lengths.min()) <= int(lengths.max()) <= capacity:
        raise ValueError(f"a sample of {int(lengths.max())} tokens does not fit a row of {capacity} (data.max_length)")
    order = np.argsort(-lengths, kind="stable")
    place = compiled() if len(lengths) >= NUM_FOR_NUMBA else place_by_numpy
    rows = np.empty(len(lengths), dtype=np.int64)
    rows[order] = place(lengths[order], capacity)
    return rows


def place_by_numpy(lengths: Numbers, capacity: int) -> Numbers:
    """Rows of samples in the order given; the meaning of `place`, in plain Python and numpy."""
    stacks: list[list[int]] = [[] for _ in range(capacity + 1)]
    filled = np.zeros(capacity + 1, dtype=np.bool_)
    rows = np.empty(len(lengths), dtype=np.int64)
    num_rows = 0
    for sample, length in enumerate(lengths.tolist()):
        step = int(filled[length:].argmax())
        room = length + step
        if filled[room]:
            row = stacks[room].pop()
            filled[room] = bool(stacks[room])
        else:
            room, row, num_rows = capacity, num_rows, num_rows + 1
        rows[sample] = row
        stacks[room - length].append(row)
        filled[room - length] = True
    filled[0] = False
    return rows


def place(lengths: Numbers, capacity: int) -> Numbers:
    """Rows of samples in the order given, each in the fullest row with room; compiled by numba.

    Rows with the same room left form a stack: `top[room]` is its newest row, `below[row]` the next.  `counts` tells how
    many stacks of each 64 hold a row, so that a search skips the empty ones.
    """
    top = np.full(capacity + 1, -1, dtype=np.int64)
    below = np.full(len(lengths), -1, dtype=np.int64)
    counts = np.zeros(capacity // _CHUNK + 1, dtype=np.int64)
    rows = np.empty(len(lengths), dtype=np.int64)
    num_rows = 0
    for sample in range(len(lengths)):
        length = lengths[sample]
        room = length
        while room <= capacity and top[room] < 0:
            if room % _CHUNK == 0 and counts[room // _CHUNK] == 0:
                room += _CHUNK
            else:
                room += 1
        if room <= capacity:
            row = top[room]
            top[room] = below[row]
            if top[room] < 0:
                counts[room // _CHUNK] -= 1
        else:
            room, row, num_rows = capacity, num_rows, num_rows + 1
        rows[sample] = row
        left = room - length
        if top[left] < 0:
            counts[left // _CHUNK] += 1
        below[row] = top[left]
        top[left] = row
    return rows


@cache
def compiled() -> Callable[[Numbers, int], Any]:
    """`place` as machine code, kept on disk between runs where a place for it can be written."""
    import numba

    njit: Any = numba.njit
    try:
        return njit(cache=True)(place)  # type: ignore[no-any-return]
    except RuntimeError:  # neither beside the source nor in the home directory: compiled anew in each process
        return njit(place)  # type: ignore[no-any-return]
