"""Finds and loads the native library, and says which instruction set it uses.

It leaves the functions to their callers (`native.py`, `native_adam.py`); it only knows their names and argument types,
so that a library of another version is an error when it is loaded and not a crash later.  The library is loaded by
ctypes, which lets go of the interpreter lock for the length of a call; that costs some microseconds a call.
"""

import ctypes
import importlib.util
import os
from functools import lru_cache
from pathlib import Path

ISA_LEVELS = ("baseline", "avx2", "avx512")
_ABI_VERSION = 2

_KINDS = {"p": ctypes.c_void_p, "i": ctypes.c_int, "l": ctypes.c_int64, "L": ctypes.c_uint64, "s": ctypes.c_char_p}
_SIGNATURES: dict[type | None, str] = {  # result: functions with their arguments
    ctypes.c_int: "oz_abi_version: oz_select_isa:s oz_isa_supported:i oz_io_run:piiplllpp oz_io_fix:ppl oz_io_fallen:p "
    "oz_fill_holes:",
    ctypes.c_char_p: "oz_isa:",
    ctypes.c_int64: "oz_quant_block:",
    ctypes.c_uint32: "oz_crc32c:pl",
    ctypes.c_double: "oz_drain_bf16:ppl oz_drain_fp32:ppl oz_sum_squares_bf16:pl oz_sum_squares_fp32:pl",
    ctypes.c_void_p: "oz_io_start:il oz_ring_start:iil",
    None: "oz_io_stop:p oz_update:pli oz_encode_moment:pppli oz_decode_moment:pppli oz_split_master:pppl "
    "oz_join_master:pppl oz_widen:ppl oz_narrow:ppl oz_copy:ppl oz_fill:pil",
}


@lru_cache(maxsize=1)
def load_library() -> ctypes.CDLL:
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
    return str(load_library().oz_isa(), "ascii")


def isa_supported() -> tuple[str, ...]:
    """The instruction sets this processor has, of `ISA_LEVELS`."""
    return _supported(load_library())


def select_isa(level: str) -> None:
    """Switches the instruction set of the whole process (for tests; results have the same bits at every level)."""
    _select(load_library(), level, "the level")
