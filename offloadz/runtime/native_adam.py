"""The optimizer's update by the native library: checks every argument, then hands over plain pointers.

It leaves what to update and where the bytes lie to its callers.  [Note: checks before the pointer] in `native.py` holds
here too: the price is about 20 us a call, so a call should carry at least some hundred thousand elements.
"""

import ctypes
import sys

import torch
from torch import Tensor

from offloadz.runtime.checks import check_apart, check_number, check_tensor, check_threads
from offloadz.runtime.library import load_library

_FLOATS = (torch.bfloat16, torch.float32)


class _AdamArgs(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "low", "exp_avg", "exp_avg_sq", "grad")),
        ("count", ctypes.c_int64),
        ("grad_is_bf16", ctypes.c_int32),
        ("decoupled", ctypes.c_int32),
        *((name, ctypes.c_float) for name in ("grad_scale", "keep", "decay", "one_minus_beta1", "beta2")),
        *((name, ctypes.c_float) for name in ("one_minus_beta2", "root_correction2", "eps", "minus_step_size")),
    )


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
    load_library().oz_adam(ctypes.byref(args), check_threads(threads))
