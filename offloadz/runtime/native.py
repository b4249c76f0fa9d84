"""What the native library does, as functions of tensors: checks every argument, then hands over plain pointers.

The optimizer's update is in `native_adam.py`, the loading in `library.py`; their names are found here too.  It leaves
policy (what to update, where bytes lie, what a failed drive means) to its callers.  The price is about 10 us of checks
per call, so calls should carry at least some hundred kilobytes.

[Note: checks before the pointer] All functions take CPU tensors that are contiguous, of the right dtype and length, and
do not overlap one another; anything else is a `ValueError` that names the argument, what was found and what is needed.
The native code checks nothing and never ends the process.
"""

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor

from offloadz.memory.tier import NEVER_WRITTEN as NEVER_WRITTEN
from offloadz.memory.tier import PIECE_BYTES
from offloadz.runtime.checks import check_apart, check_tensor, check_threads
from offloadz.runtime.library import ISA_LEVELS as ISA_LEVELS
from offloadz.runtime.library import isa as isa
from offloadz.runtime.library import isa_supported as isa_supported
from offloadz.runtime.library import load_library
from offloadz.runtime.library import select_isa as select_isa
from offloadz.runtime.native_adam import BLOCK as BLOCK
from offloadz.runtime.native_adam import adamw_ as adamw_
from offloadz.runtime.native_adam import decode_moment_ as decode_moment_
from offloadz.runtime.native_adam import encode_moment_ as encode_moment_
from offloadz.runtime.native_adam import update_ as update_

_FLOATS = (torch.bfloat16, torch.float32)


class NativeIOError(OSError):
    """A transfer failed.  `operation` is "read", "write" or "checksum"; for "checksum" the drive answered, but piece
    `piece` of the extent is not what was written (its length `wanted_bytes` / `found_bytes` or its CRC32C differ)."""

    def __init__(self, error: int, operation: Literal["read", "write", "checksum"], fault: "_IoFault") -> None:
        self.operation = operation
        self.offset, self.piece = int(fault.offset), int(fault.piece)
        self.wanted_bytes, self.found_bytes = int(fault.wanted_bytes), int(fault.found_bytes)
        self.wanted_crc, self.found_crc = int(fault.wanted_crc), int(fault.found_crc)
        where = f"at offset {self.offset}: wanted {self.wanted_bytes} bytes, found {self.found_bytes}"
        if operation == "checksum":
            text = f"piece {self.piece} {where}, CRC32C wanted {self.wanted_crc:#010x}, found {self.found_crc:#010x}"
        else:
            text = f"{operation} {where}: {os.strerror(error)}"
        super().__init__(error, text)

    @property
    def damaged(self) -> bool:
        """Whether the bytes were moved but are wrong (else the drive did not move them)."""
        return self.operation == "checksum"


class _IoFault(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_int32),
        ("error", ctypes.c_int32),
        *((name, ctypes.c_int64) for name in ("offset", "wanted_bytes", "found_bytes", "piece")),
        *((name, ctypes.c_int64) for name in ("wanted_crc", "found_crc")),
    )


def split_master_(weight: Tensor, low: Tensor, master: Tensor) -> None:
    """Writes a float32 `master` as bfloat16 `weight` (rounded to nearest, ties away from zero) and its `low` 16 bits.

    The halves join to the same bits for every finite number and infinity; a NaN becomes the standard NaN.
    """
    count = master.numel()
    pointers = (
        check_tensor("weight", weight, (torch.bfloat16,), count),
        check_tensor("low", low, (torch.int16,), count),
        check_tensor("master", master, (torch.float32,)),
    )
    check_apart(weight=weight, low=low, master=master)
    load_library().oz_split_master(*pointers, count)


def join_master_(master: Tensor, weight: Tensor, low: Tensor) -> None:
    """Writes the float32 `master` whose halves are `weight` (bfloat16) and `low` (int16)."""
    count = master.numel()
    pointers = (
        check_tensor("master", master, (torch.float32,)),
        check_tensor("weight", weight, (torch.bfloat16,), count),
        check_tensor("low", low, (torch.int16,), count),
    )
    check_apart(weight=weight, low=low, master=master)
    load_library().oz_join_master(*pointers, count)


def widen_(out: Tensor, source: Tensor) -> None:
    """float32 `out` = bfloat16 `source`, on the calling thread alone."""
    at, of = check_tensor("out", out, (torch.float32,)), check_tensor("source", source, (torch.bfloat16,), out.numel())
    check_apart(out=out, source=source)
    load_library().oz_widen(at, of, out.numel())


def narrow_(out: Tensor, source: Tensor) -> None:
    """bfloat16 `out` = float32 `source` rounded to nearest, ties to even, as torch does; on the calling thread."""
    at, of = check_tensor("out", out, (torch.bfloat16,)), check_tensor("source", source, (torch.float32,), out.numel())
    check_apart(out=out, source=source)
    load_library().oz_narrow(at, of, out.numel())


def drain_(out: Tensor, grad: Tensor) -> float:
    """Writes float32 `grad` to `out` (bfloat16: rounded as `narrow_`; float32: copied) and returns the sum of squares
    of the written values in double: 65,536 elements at a time in 16 fixed lanes, these sums added in order.  The bits
    depend on nothing but the values; an infinity or NaN makes the result non-finite.  Runs on the calling thread."""
    at, of = check_tensor("out", out, _FLOATS), check_tensor("grad", grad, (torch.float32,), out.numel())
    check_apart(out=out, grad=grad)
    library = load_library()
    drain = library.oz_drain_bf16 if out.dtype == torch.bfloat16 else library.oz_drain_fp32
    return float(drain(at, of, out.numel()))


def sum_squares(x: Tensor) -> float:
    """The sum of squares of a bfloat16 or float32 tensor, by the rule of `drain_`."""
    at, library = check_tensor("x", x, _FLOATS), load_library()
    add = library.oz_sum_squares_bf16 if x.dtype == torch.bfloat16 else library.oz_sum_squares_fp32
    return float(add(at, x.numel()))


def _all_dtypes(tensor: Tensor) -> tuple[torch.dtype, ...]:
    return (tensor.dtype,) if isinstance(tensor, Tensor) else ()


def copy_(dst: Tensor, src: Tensor) -> None:
    """Copies the bytes of `src` to `dst` (equal sizes in bytes, any dtypes), on the calling thread alone."""
    to, of = check_tensor("dst", dst, _all_dtypes(dst)), check_tensor("src", src, _all_dtypes(src))
    if dst.nbytes != src.nbytes:
        raise ValueError(f"src has {src.nbytes} bytes; dst needs {dst.nbytes}")
    check_apart(dst=dst, src=src)
    load_library().oz_copy(to, of, dst.nbytes)


def fill_nan_(x: Tensor) -> None:
    """Sets every byte to 0xff, which every float type reads as NaN: for freed memory, whatever dtype it had."""
    load_library().oz_fill(check_tensor("x", x, _all_dtypes(x)), 0xFF, x.nbytes)


def crc32c(data: Tensor, nbytes: int | None = None) -> int:
    """The CRC32C (RFC 3720) of the first `nbytes` bytes (default: all) of a uint8 tensor."""
    at = check_tensor("data", data, (torch.uint8,))
    nbytes = data.nbytes if nbytes is None else nbytes
    if not 0 <= nbytes <= data.nbytes:
        raise ValueError(f"nbytes is {nbytes}; data has {data.nbytes}")
    return int(load_library().oz_crc32c(at, nbytes))


class TransferPool:
    """Threads that read and write; made by `io_start`.  Any number of Python threads may use it at once."""

    def __init__(self, num_threads: int) -> None:
        pointer = load_library().oz_io_start(check_threads(num_threads, "num_threads"))
        if not pointer:
            raise OSError(ctypes.get_errno(), "the system refused to start a single thread for transfers")
        self._pointer: int | None = pointer
        self._num_calls = 0
        self._changed = threading.Condition()

    @contextmanager
    def _in_use(self) -> Iterator[int]:
        """The pool's address, kept alive until the block ends."""
        with self._changed:
            if self._pointer is None:
                raise ValueError("the transfer pool was stopped; io_start makes a new one")
            pointer = self._pointer
            self._num_calls += 1
        try:
            yield pointer
        finally:
            with self._changed:
                self._num_calls -= 1
                self._changed.notify_all()

    def stop(self) -> None:
        """Lets calls in progress end, then ends the threads; a second call does nothing."""
        with self._changed:
            pointer, self._pointer = self._pointer, None
            self._changed.wait_for(lambda: self._num_calls == 0)
        if pointer is not None:
            load_library().oz_io_stop(pointer)


def io_start(num_threads: int) -> TransferPool:
    """Starts a pool of threads for transfers (more threads keep more requests of 4 MiB under way at once)."""
    return TransferPool(num_threads)


def io_stop(pool: TransferPool) -> None:
    """Ends the pool's threads once the calls in progress have returned."""
    pool.stop()


def read_at(
    pool: TransferPool,
    fd: int,
    buffer: Tensor,
    nbytes: int,
    offset: int,
    crcs: Tensor | None = None,
    origin: int = 0,
) -> None:
    """Reads `nbytes` at file offset `offset` into the start of `buffer` (uint8); returns when all of it is there.

    `crcs` is the extent's table: int64, one entry per 1 MiB piece counted from `origin`, the file offset at which the
    extent starts.  An entry is `length << 32 | CRC32C` as `write_at` stored it, or `NEVER_WRITTEN` (-1): that piece is
    zeros and is not read.  With a table, `offset - origin` is a multiple of 1 MiB and every piece must have the length
    it was written with, so a transfer ends with a whole piece or with the extent.  Raises `NativeIOError`; the buffer's
    content is then undefined, and no request is left running.
    """
    _transfer(pool, fd, buffer, nbytes, offset, crcs, origin, False)


def write_at(
    pool: TransferPool,
    fd: int,
    buffer: Tensor,
    nbytes: int,
    offset: int,
    crcs: Tensor | None = None,
    origin: int = 0,
) -> None:
    """Writes the first `nbytes` of `buffer`, and each piece's entry to `crcs` once it is written; see `read_at`.

    After a failure the file holds parts of the new bytes, and `crcs` speaks of the new bytes only for some pieces.
    """
    _transfer(pool, fd, buffer, nbytes, offset, crcs, origin, True)


def _transfer(
    pool: TransferPool, fd: int, buffer: Tensor, nbytes: int, offset: int, crcs: Tensor | None, origin: int, write: bool
) -> None:
    at = check_tensor("buffer", buffer, (torch.uint8,))
    if not 0 <= nbytes <= buffer.nbytes:
        raise ValueError(f"nbytes is {nbytes}; the buffer has {buffer.nbytes}")
    if not 0 <= origin <= offset <= 2**62:
        raise ValueError(f"offset is {offset}; it must be at least the extent's origin, {origin}, and that at least 0")
    table = _check_table(crcs, nbytes, offset - origin) if crcs is not None else None
    fault = _IoFault()
    with pool._in_use() as pointer:
        kind = load_library().oz_io_run(pointer, fd, write, at, nbytes, offset, origin, table, ctypes.byref(fault))
    if kind == 2:
        raise NativeIOError(0, "checksum", fault)
    if kind:
        raise NativeIOError(fault.error, "write" if write else "read", fault)


def _check_table(crcs: Tensor, nbytes: int, start: int) -> int:
    table = check_tensor("crcs", crcs, (torch.int64,))
    if start % PIECE_BYTES:
        raise ValueError(f"the transfer starts {start} bytes into its extent; with crcs, a multiple of 1 MiB is needed")
    needed = -(-(start + nbytes) // PIECE_BYTES)
    if crcs.numel() < needed:
        raise ValueError(f"crcs has {crcs.numel()} entries; {needed} are needed")
    return table
