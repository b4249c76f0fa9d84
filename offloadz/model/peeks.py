"""Where Python is told values of tensors: what a block goes on to do with them saves nothing for a backward.

So whoever leaves out what no backward reads has to know of it.  Operations that answer by values (`item`,
`if x.max() > 1`) are seen where torch dispatches them (`tells`).  Others hand out a tensor's memory and are no
operation (`tolist`, `numpy`, a pointer for a kernel, what is pickled): they are seen where they are called (`Peeks`).
The trade-off: a call into Python more for each function of torch that a block calls.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode

HAND_OUT = frozenset({
    Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__, Tensor.__cuda_array_interface__.__get__,
    Tensor.data_ptr, Tensor.storage, Tensor.untyped_storage, Tensor.__reduce_ex__, Tensor.__deepcopy__,
    Tensor.apply_, Tensor.map_,
})  # fmt: skip
"""What gives memory of a tensor to somebody who is not torch."""


@cache
def tells(func: OpOverload) -> bool:
    """Whether an operation gives a number or a shape by the values of its inputs."""
    return any(tag in func.tags for tag in (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape))


class Peeks(TorchFunctionMode):
    """While it lasts, calls `seen` before memory of a tensor is handed out."""

    def __init__(self, seen: Callable[[], None]) -> None:
        super().__init__()
        self._seen = seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in HAND_OUT:
            self._seen()
        return func(*args, **(kwargs or {}))
