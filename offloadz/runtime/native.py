"""What the native library does, as functions of tensors: checks every argument, then hands over plain pointers.

The optimizer's update is in `native_adam.py`, the loading in `library.py`; their names are found here too.  It leaves
policy (what to update, where bytes lie, what a failed drive means) to its callers.  The price is about 10 us of checks
per call, so calls should carry at least some hundred kilobytes.

[Note: checks before the pointer] All functions take CPU tensors that are contiguous, of the right dtype and length, and
do not overlap one another; anything else is a `ValueError` that names the argument, what was found and what is needed.
The native code checks nothing and never ends the process.
"""

import torch
from torch import Tensor

from offloadz.memory.heap import map_large_blocks
from offloadz.memory.tier import NEVER_WRITTEN as NEVER_WRITTEN
from offloadz.runtime.checks import check_apart, check_tensor
from offloadz.runtime.library import ISA_LEVELS as ISA_LEVELS
from offloadz.runtime.library import isa as isa
from offloadz.runtime.library import isa_supported as isa_supported
from offloadz.runtime.library import load_library
from offloadz.runtime.library import select_isa as select_isa
from offloadz.runtime.native_adam import BLOCK as BLOCK
from offloadz.runtime.native_adam import Numbers as Numbers
from offloadz.runtime.native_adam import Update as Update
from offloadz.runtime.native_adam import Updates as Updates
from offloadz.runtime.native_adam import decode_moment_ as decode_moment_
from offloadz.runtime.native_adam import encode_moment_ as encode_moment_
from offloadz.runtime.native_adam import update_ as update_
from offloadz.runtime.native_io import NUM_THREADS as NUM_THREADS
from offloadz.runtime.native_io import RING_DEPTH as RING_DEPTH
from offloadz.runtime.native_io import NativeIOError as NativeIOError
from offloadz.runtime.native_io import TransferPool as TransferPool
from offloadz.runtime.native_io import io_start as io_start
from offloadz.runtime.native_io import io_stop as io_stop
from offloadz.runtime.native_io import read_at as read_at
from offloadz.runtime.native_io import ring_start as ring_start
from offloadz.runtime.native_io import write_at as write_at

_FLOATS = (torch.bfloat16, torch.float32)


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


def shape_heap() -> bool:
    """The C allocator as a run has it, from now on and for the whole process: large blocks are mapped
    (`memory/heap.py`), and torch's go where one of their size was before (`csrc/heap.cpp`); whether the latter could
    be had."""
    map_large_blocks()
    return bool(load_library().oz_fill_holes())


def crc32c(data: Tensor, nbytes: int | None = None) -> int:
    """The CRC32C (RFC 3720) of the first `nbytes` bytes (default: all) of a uint8 tensor."""
    at = check_tensor("data", data, (torch.uint8,))
    nbytes = data.nbytes if nbytes is None else nbytes
    if not 0 <= nbytes <= data.nbytes:
        raise ValueError(f"nbytes is {nbytes}; data has {data.nbytes}")
    return int(load_library().oz_crc32c(at, nbytes))
