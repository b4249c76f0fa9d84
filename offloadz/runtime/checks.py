"""What must hold before the native library is given a pointer: it checks nothing itself.

Each check answers with a `ValueError` that names the argument, what was found and what is needed.  What a caller does
about it is his; the price is about a microsecond per tensor, so no check looks at the values.
"""

import itertools
import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from offloadz.runtime.threads import MAX_THREADS


def check_tensor(name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...], count: int | None = None) -> int:
    """The address of a dense, contiguous CPU tensor with one of `dtypes` and `count` elements (None: any)."""
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name} is a {type(tensor).__name__}; a torch tensor is needed")
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        raise ValueError(f"{name} is on {tensor.device} with layout {tensor.layout}; a dense CPU tensor is needed")
    if tensor.dtype not in dtypes:
        needed = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(f"{name} has dtype {str(tensor.dtype).removeprefix('torch.')}; {needed} is needed")
    if not tensor.is_contiguous() or tensor.is_neg():
        raise ValueError(f"{name} has strides {tensor.stride()} for shape {tuple(tensor.shape)}; it must be contiguous")
    if count is not None and tensor.numel() != count:
        raise ValueError(f"{name} has {tensor.numel()} elements; {count} are needed")
    return tensor.data_ptr()


def check_apart(**tensors: Tensor) -> None:
    """No two of the tensors may share bytes: the loops read and write them in any order."""
    check_extents(extents_of(tensors))


def extents_of(tensors: Mapping[str, Tensor]) -> list[tuple[int, int, str]]:
    """First address, address behind the last, and name of each tensor that has bytes."""
    return [(t.data_ptr(), t.data_ptr() + t.nbytes, name) for name, t in tensors.items() if t.nbytes]


def check_extents(extents: Iterable[tuple[int, int, str]]) -> None:
    """The same of what `extents_of` told."""
    for (_, end, first), (start, _, second) in itertools.pairwise(sorted(extents)):
        if start < end:
            raise ValueError(f"{first} and {second} share {end - start} bytes of memory; they must not overlap")


def check_threads(threads: int, name: str = "threads") -> int:
    """`threads` if it is a count the native team can hold."""
    if not isinstance(threads, int) or not 1 <= threads <= MAX_THREADS:
        raise ValueError(f"{name} is {threads!r}; a whole number from 1 to {MAX_THREADS} is needed")
    return threads


def check_number(name: str, value: float, low: float, below: float = math.inf) -> float:
    """`value` if low <= value < below (a NaN is not)."""
    if not low <= value < below:
        raise ValueError(f"{name} is {value!r}; a number of at least {low:g} and below {below:g} is needed")
    return float(value)
