"""The only file that knows csrc: checks every argument, then hands plain pointers to the native library.

It leaves policy (what to update, where bytes lie, what a failed drive means) to its callers.  The library is loaded by
ctypes, which lets go of the interpreter lock for the length of a call; the price is about 10 us of checks per call, so
calls should carry at least some hundred kilobytes.

[Note: checks before the pointer] All functions take CPU tensors that are contiguous, of the right dtype and length, and
do not overlap one another; anything else is a `ValueError` that names the argument, what was found and what is needed.
The native code checks nothing and never ends the process.
"""

import ctypes
import importlib.util
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from offloadz.memory.tier import NEVER_WRITTEN as NEVER_WRITTEN
from offloadz.memory.tier import PIECE_BYTES
from offloadz.runtime.checks import check_apart, check_number, check_tensor, check_threads

ISA_LEVELS = ("baseline", "avx2", "avx512")
_ABI_VERSION = 1
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


class _AdamArgs(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "low", "exp_avg", "exp_avg_sq", "grad")),
        ("count", ctypes.c_int64),
        ("grad_is_bf16", ctypes.c_int32),
        ("decoupled", ctypes.c_int32),
        *((name, ctypes.c_float) for name in ("grad_scale", "keep", "decay", "one_minus_beta1", "beta2")),
        *((name, ctypes.c_float) for name in ("one_minus_beta2", "root_correction2", "eps", "minus_step_size")),
    )


class _IoFault(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_int32),
        ("error", ctypes.c_int32),
        *((name, ctypes.c_int64) for name in ("offset", "wanted_bytes", "found_bytes", "piece")),
        *((name, ctypes.c_int64) for name in ("wanted_crc", "found_crc")),
    )


_KINDS = {"p": ctypes.c_void_p, "i": ctypes.c_int, "l": ctypes.c_int64, "s": ctypes.c_char_p}
_SIGNATURES: dict[type | None, str] = {  # result: functions with their arguments
    ctypes.c_int: "oz_abi_version: oz_select_isa:s oz_isa_supported:i oz_io_run:piiplllpp",
    ctypes.c_char_p: "oz_isa:",
    ctypes.c_uint32: "oz_crc32c:pl",
    ctypes.c_double: "oz_drain_bf16:ppl oz_drain_fp32:ppl oz_sum_squares_bf16:pl oz_sum_squares_fp32:pl",
    ctypes.c_void_p: "oz_io_start:i",
    None: "oz_io_stop:p oz_adam:pi oz_split_master:pppl oz_join_master:pppl oz_widen:ppl oz_narrow:ppl "
    "oz_copy:ppl oz_fill:pil",
}


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    """The native library, loaded once; `OFFLOADZ_ISA` (baseline | avx2 | avx512) forces its instruction set down."""
    found = importlib.util.find_spec("offloadz._native")
    if found is None or not found.origin:
        raise ImportError(
            f"offloadz's native library is not in {Path(__file__).parent.parent}; in a source tree run"
            " `pip install -e .`, or start Python elsewhere so that the installed offloadz is found"
        )
    library = ctypes.CDLL(found.origin, use_errno=True)
    for result, functions in _SIGNATURES.items():
        for name, kinds in (item.split(":") for item in functions.split()):
            function = getattr(library, name, None)
            if function is None:
                raise ImportError(f"{found.origin} lacks {name}: it is out of date; run `pip install -e .` again")
            function.restype, function.argtypes = result, [_KINDS[kind] for kind in kinds]
    if library.oz_abi_version() != _ABI_VERSION:
        raise ImportError(f"{found.origin} is out of date; run `pip install -e .` again")
    wanted = os.environ.get("OFFLOADZ_ISA", "")
    if wanted:
        _select(library, wanted, "OFFLOADZ_ISA")
    return library


def _select(library: ctypes.CDLL, level: str, source: str) -> None:
    answer = library.oz_select_isa(level.encode())
    if answer == 1:
        raise ValueError(f"{source} is {level!r}; it must be one of {', '.join(ISA_LEVELS)}")
    if answer == 2:
        raise ValueError(f"{source} is {level!r}, but this processor has {', '.join(_supported(library))}; unset it")


def _supported(library: ctypes.CDLL) -> tuple[str, ...]:
    return tuple(name for level, name in enumerate(ISA_LEVELS) if library.oz_isa_supported(level))


def isa() -> str:
    """The instruction set in use: the widest this processor has, or what `OFFLOADZ_ISA` forces."""
    return str(_library().oz_isa(), "ascii")


def isa_supported() -> tuple[str, ...]:
    """The instruction sets this processor has, of `ISA_LEVELS`."""
    return _supported(_library())


def select_isa(level: str) -> None:
    """Switches the instruction set of the whole process (for tests; results have the same bits at every level)."""
    _select(_library(), level, "the level")


def adamw_(
    weight: Tensor,
    low: Tensor | None,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    grad_scale: float = 1.0,
    decoupled: bool = True,
    threads: int,
) -> None:
    """One AdamW step (Loshchilov and Hutter 2019, algorithm 2) in place over flat tensors of equal length, in one pass.

    `weight` is bfloat16 with its `low` half (int16, see `split_master_`), or float32 with `low` None.  `grad` is
    bfloat16 or float32 and is multiplied by `grad_scale` first; moments are float32.  `step` counts from 1.
    `decoupled=False` is Adam with the decay added to the gradient.  Bits depend neither on `threads` nor on the
    instruction set.  Against torch.optim.AdamW see tests/cpu/test_adam.py: equal but for single roundings.
    """
    count = weight.numel() if isinstance(weight, Tensor) else None
    split = low is not None
    args = _AdamArgs(
        weight=check_tensor("weight", weight, (torch.bfloat16,) if split else (torch.float32,)),
        low=check_tensor("low", low, (torch.int16,), count) if low is not None else None,
        exp_avg=check_tensor("exp_avg", exp_avg, (torch.float32,), count),
        exp_avg_sq=check_tensor("exp_avg_sq", exp_avg_sq, (torch.float32,), count),
        grad=check_tensor("grad", grad, _FLOATS, count),
        count=count,
        grad_is_bf16=grad.dtype == torch.bfloat16,
        decoupled=decoupled,
    )
    halves = {"low": low} if low is not None else {}
    check_apart(weight=weight, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq, grad=grad, **halves)
    lr, weight_decay = check_number("lr", lr, 0.0), check_number("weight_decay", weight_decay, 0.0)
    beta1, beta2 = check_number("beta1", beta1, 0.0, 1.0), check_number("beta2", beta2, 0.0, 1.0)
    if not isinstance(step, int) or step < 1:
        raise ValueError(f"step is {step!r}; a whole number from 1 is needed")
    args.eps = check_number("eps", eps, 0.0)
    args.grad_scale = check_number("grad_scale", grad_scale, -sys.float_info.max)
    args.keep, args.decay = 1 - lr * weight_decay, weight_decay
    args.one_minus_beta1 = 1 - beta1
    args.beta2, args.one_minus_beta2 = beta2, 1 - beta2
    args.root_correction2 = (1 - beta2**step) ** 0.5
    args.minus_step_size = -(lr / (1 - beta1**step))
    _library().oz_adam(ctypes.byref(args), check_threads(threads))


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
    _library().oz_split_master(*pointers, count)


def join_master_(master: Tensor, weight: Tensor, low: Tensor) -> None:
    """Writes the float32 `master` whose halves are `weight` (bfloat16) and `low` (int16)."""
    count = master.numel()
    pointers = (
        check_tensor("master", master, (torch.float32,)),
        check_tensor("weight", weight, (torch.bfloat16,), count),
        check_tensor("low", low, (torch.int16,), count),
    )
    check_apart(weight=weight, low=low, master=master)
    _library().oz_join_master(*pointers, count)


def widen_(out: Tensor, source: Tensor) -> None:
    """float32 `out` = bfloat16 `source`, on the calling thread alone."""
    at, of = check_tensor("out", out, (torch.float32,)), check_tensor("source", source, (torch.bfloat16,), out.numel())
    check_apart(out=out, source=source)
    _library().oz_widen(at, of, out.numel())


def narrow_(out: Tensor, source: Tensor) -> None:
    """bfloat16 `out` = float32 `source` rounded to nearest, ties to even, as torch does; on the calling thread."""
    at, of = check_tensor("out", out, (torch.bfloat16,)), check_tensor("source", source, (torch.float32,), out.numel())
    check_apart(out=out, source=source)
    _library().oz_narrow(at, of, out.numel())


def drain_(out: Tensor, grad: Tensor) -> float:
    """Writes float32 `grad` to `out` (bfloat16: rounded as `narrow_`; float32: copied) and returns the sum of squares
    of the written values in double: 65,536 elements at a time in 16 fixed lanes, these sums added in order.  The bits
    depend on nothing but the values; an infinity or NaN makes the result non-finite.  Runs on the calling thread."""
    at, of = check_tensor("out", out, _FLOATS), check_tensor("grad", grad, (torch.float32,), out.numel())
    check_apart(out=out, grad=grad)
    library = _library()
    drain = library.oz_drain_bf16 if out.dtype == torch.bfloat16 else library.oz_drain_fp32
    return float(drain(at, of, out.numel()))


def sum_squares(x: Tensor) -> float:
    """The sum of squares of a bfloat16 or float32 tensor, by the rule of `drain_`."""
    at, library = check_tensor("x", x, _FLOATS), _library()
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
    _library().oz_copy(to, of, dst.nbytes)


def fill_nan_(x: Tensor) -> None:
    """Sets every byte to 0xff, which every float type reads as NaN: for freed memory, whatever dtype it had."""
    _library().oz_fill(check_tensor("x", x, _all_dtypes(x)), 0xFF, x.nbytes)


def crc32c(data: Tensor, nbytes: int | None = None) -> int:
    """The CRC32C (RFC 3720) of the first `nbytes` bytes (default: all) of a uint8 tensor."""
    at = check_tensor("data", data, (torch.uint8,))
    nbytes = data.nbytes if nbytes is None else nbytes
    if not 0 <= nbytes <= data.nbytes:
        raise ValueError(f"nbytes is {nbytes}; data has {data.nbytes}")
    return int(_library().oz_crc32c(at, nbytes))


class TransferPool:
    """Threads that read and write; made by `io_start`.  Any number of Python threads may use it at once."""

    def __init__(self, num_threads: int) -> None:
        pointer = _library().oz_io_start(check_threads(num_threads, "num_threads"))
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
            _library().oz_io_stop(pointer)


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
        kind = _library().oz_io_run(pointer, fd, write, at, nbytes, offset, origin, table, ctypes.byref(fault))
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
