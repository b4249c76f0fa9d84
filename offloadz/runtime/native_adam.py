"""The optimizer's update by the native library: checks every argument, then hands over plain pointers.

It leaves what to update and where the bytes lie to its callers.  [Note: checks before the pointer] in `native.py` holds
here too: the price is about 20 us a call, so a call should carry at least some hundred thousand elements.
"""

import ctypes
import sys
from typing import Any

import torch
from torch import Tensor

from offloadz.runtime.checks import check_apart, check_number, check_tensor, check_threads
from offloadz.runtime.library import load_library

BLOCK = 256
"""Elements that share the scale of 8-bit moments, counted from the start of the span; csrc's kQuant."""

_FLOATS = (torch.bfloat16, torch.float32)
_HALVES = (torch.int16, torch.uint16)
_CODES = (torch.uint8, torch.int8)
_MOMENT_FORMATS = {torch.float32: 0, torch.bfloat16: 1, torch.uint8: 2, torch.int8: 2}
_MOMENT_NAMES = {"adam": ("exp_avg", "exp_avg_sq"), "lion": ("exp_avg",), "sgd": ("momentum_buffer",)}
_RULES = tuple(_MOMENT_NAMES)


class _UpdateArgs(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "low")),
        ("moments", ctypes.c_void_p * 2),
        ("scales", ctypes.c_void_p * 2),
        ("grad", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("rule", "weight_format", "moment_format", "num_moments")),
        *((name, ctypes.c_int32) for name in ("grad_is_bf16", "decoupled")),
        *((name, ctypes.c_float) for name in ("grad_scale", "keep", "decay", "beta1", "one_minus_beta1", "beta2")),
        *((name, ctypes.c_float) for name in ("one_minus_beta2", "inverse_root2", "eps")),
        *((name, ctypes.c_float) for name in ("minus_step_size", "momentum")),
        ("keys", ctypes.c_uint32 * 3),
        ("first_element", ctypes.c_uint32),
    )


class Update:
    """An optimizer step over one span of flat tensors of equal length: checked once, taken any number of times.

    `rule` is "adam" (AdamW, Loshchilov and Hutter 2019, algorithm 2; with `decoupled=False` Adam), "lion" (Chen et al.
    2023, algorithm 2) or "sgd" (torch's, with `momentum`).  `weight` is float32 with `low` None, bfloat16 with the
    `low` half of its master (see `split_master_`), or bfloat16 with `low` None: its new value is rounded at random so
    that the mean is kept.  `moments` are (exp_avg, exp_avg_sq), (exp_avg,), (momentum_buffer,) or, for sgd without
    momentum, (): all float32, or bfloat16 rounded at random, or codes of 8 bits with `scales[i]` float32, one for each
    `BLOCK` elements counted from the start.  `grad` is bfloat16 or float32.  ValueError for what does not fit together,
    naming it.

    Only addresses are kept: the memory must be there, and mean the same, whenever a step is taken.
    """

    __slots__ = ("_args", "_rule")

    def __init__(
        self,
        rule: str,
        weight: Tensor,
        low: Tensor | None,
        moments: tuple[Tensor, ...],
        scales: tuple[Tensor | None, ...],
        grad: Tensor,
        *,
        first_element: int = 0,
    ) -> None:
        self._rule = rule
        self._args = args = _UpdateArgs()
        if rule not in _RULES:
            raise ValueError(f"rule is {rule!r}; it must be one of {', '.join(_RULES)}")
        args.weight = check_tensor("weight", weight, (torch.bfloat16,) if low is not None else _FLOATS)
        args.count = count = weight.numel()
        named = {"weight": weight, "grad": grad}
        if low is not None:
            args.low = check_tensor("low", low, _HALVES, count)
            named["low"] = low
        args.grad = check_tensor("grad", grad, _FLOATS, count)
        named |= _put_moments(args, rule, moments, scales)
        check_apart(**named)
        args.rule, args.num_moments, args.grad_is_bf16 = _RULES.index(rule), len(moments), grad.dtype == torch.bfloat16
        args.weight_format = 1 if low is not None else 0 if weight.dtype == torch.float32 else 2
        args.moment_format = _MOMENT_FORMATS[moments[0].dtype] if moments else 0
        check_whole("first_element", first_element, 0, 2**62)
        args.first_element = first_element % 2**32

    def step(
        self,
        *,
        step: int,
        lr: float,
        beta1: float = 0.0,
        beta2: float = 0.0,
        eps: float = 0.0,
        weight_decay: float = 0.0,
        momentum: float = 0.0,
        grad_scale: float = 1.0,
        threads: int,
        seed: int = 0,
        decoupled: bool = True,
    ) -> None:
        """Takes the step in place, in one pass; `step` counts from 1, the gradient is multiplied by `grad_scale` first.

        Random bits depend on (`seed`, `step`, `first_element` + i) and nothing else, results neither on `threads` nor
        on the instruction set.  ValueError for a number that is none of these, naming it.
        """
        args = self._args
        lr, weight_decay = check_number("lr", lr, 0.0), check_number("weight_decay", weight_decay, 0.0)
        beta1, beta2 = check_number("beta1", beta1, 0.0, 1.0), check_number("beta2", beta2, 0.0, 1.0)
        check_whole("step", step, 1, 2**62)
        check_whole("seed", seed, -(2**63), 2**64 - 1)
        args.momentum = check_number("momentum", momentum, 0.0)
        if self._rule == "sgd" and (momentum > 0) != bool(args.num_moments):
            raise ValueError(
                f"momentum is {momentum} with {args.num_moments} moments; sgd needs a buffer just when it is above 0"
            )
        args.eps = check_number("eps", eps, 0.0)
        args.grad_scale = check_number("grad_scale", grad_scale, -sys.float_info.max)
        args.decoupled, args.keep, args.decay = decoupled, 1 - lr * weight_decay, weight_decay
        args.beta1, args.one_minus_beta1 = beta1, 1 - beta1
        args.beta2, args.one_minus_beta2 = beta2, 1 - beta2
        args.inverse_root2 = (1 - beta2**step) ** -0.5
        args.minus_step_size = -(lr / (1 - beta1**step)) if self._rule == "adam" else -lr
        load_library().oz_update(ctypes.byref(args), seed % 2**64, step, check_threads(threads))


def _put_moments(
    args: _UpdateArgs, rule: str, moments: tuple[Tensor, ...], scales: tuple[Tensor | None, ...]
) -> dict[str, Tensor]:
    """Checks the moments and their scales and puts their addresses into `args`; returns them by name."""
    named: dict[str, Tensor] = {}
    names = _MOMENT_NAMES[rule] if moments or rule != "sgd" else ()
    if len(moments) != len(names) or len(scales) != len(moments):
        raise ValueError(
            f"{len(moments)} moments with {len(scales)} scales; {rule} needs {len(names)} of each ({', '.join(names)})"
        )
    for k, (name, moment, scale) in enumerate(zip(names, moments, scales, strict=True)):
        args.moments[k] = check_tensor(name, moment, tuple(_MOMENT_FORMATS), args.count)
        if _MOMENT_FORMATS[moment.dtype] != _MOMENT_FORMATS[moments[0].dtype]:
            raise ValueError(
                f"{name} has dtype {moment.dtype}, but {names[0]} {moments[0].dtype}; one format is needed"
            )
        named[name] = moment
        if moment.dtype not in _CODES:
            if scale is not None:
                raise ValueError(f"the scales of {name} must be None: it has dtype {moment.dtype}, not codes of 8 bits")
            continue
        args.scales[k] = check_tensor(f"the scales of {name}", scale, (torch.float32,), num_scales(args.count))  # type: ignore[arg-type]
        named[f"the scales of {name}"] = scale  # type: ignore[assignment]
    return named


def update_(
    rule: str,
    weight: Tensor,
    low: Tensor | None,
    moments: tuple[Tensor, ...],
    scales: tuple[Tensor | None, ...],
    grad: Tensor,
    *,
    first_element: int = 0,
    **numbers: Any,
) -> None:
    """One step of an `Update` of these tensors, with the numbers of `Update.step`."""
    Update(rule, weight, low, moments, scales, grad, first_element=first_element).step(**numbers)


def check_whole(name: str, value: int, least: int, most: int) -> None:
    """ValueError unless `value` is a whole number in [least, most]."""
    if not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"{name} is {value!r}; a whole number from {least} to {most} is needed")


def num_scales(count: int) -> int:
    """Scales of a span of `count` elements."""
    return -(-count // BLOCK)


def encode_moment_(codes: Tensor, scales: Tensor, values: Tensor, second: bool) -> None:
    """Writes float32 `values` as `codes` of 8 bits (uint8 or int8) with `scales`, rounded to nearest; `second` says
    that they are a second moment, never negative.  What `decode_moment_` gave comes back bit by bit."""
    count = values.numel() if isinstance(values, Tensor) else None
    to, of = check_tensor("codes", codes, _CODES, count), check_tensor("values", values, (torch.float32,))
    at = check_tensor("scales", scales, (torch.float32,), num_scales(values.numel()))
    check_apart(codes=codes, scales=scales, values=values)
    load_library().oz_encode_moment(to, at, of, values.numel(), second)


def decode_moment_(out: Tensor, codes: Tensor, scales: Tensor, second: bool) -> None:
    """float32 `out` = what `codes` of 8 bits with `scales` mean, as a first moment or a `second`."""
    count = out.numel() if isinstance(out, Tensor) else None
    to, of = check_tensor("out", out, (torch.float32,)), check_tensor("codes", codes, _CODES, count)
    at = check_tensor("scales", scales, (torch.float32,), num_scales(out.numel()))
    check_apart(codes=codes, scales=scales, out=out)
    load_library().oz_decode_moment(to, of, at, out.numel(), second)
