"""The optimizer's update by the native library: checks every argument, then hands over plain pointers.

It leaves what to update and where the bytes lie to its callers.  [Note: checks before the pointer] in `native.py` holds
here too, but not in every step: where things lie is checked when an `Update` is made, what a step does to them when its
`Numbers` are, and `Updates.step` joins the two, for all that is updated together in one call.  The trade-off: an
`Update` keeps addresses, so its caller answers for the memory.
"""

import copy
import ctypes
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from offloadz.runtime.checks import check_apart, check_extents, check_number, check_tensor, check_threads, extents_of
from offloadz.runtime.library import load_library

BLOCK = 256
"""Elements that share the scale of 8-bit moments, counted from the start of the span; csrc's kQuant."""

_FLOATS = (torch.bfloat16, torch.float32)
_HALVES = (torch.int16, torch.uint16)
_CODES = (torch.uint8, torch.int8)
_MOMENT_FORMATS = {torch.float32: 0, torch.bfloat16: 1, torch.uint8: 2, torch.int8: 2}
_MOMENT_NAMES = {"adam": ("exp_avg", "exp_avg_sq"), "lion": ("exp_avg",), "sgd": ("momentum_buffer",)}
_RULES = tuple(_MOMENT_NAMES)


class _Numbers(ctypes.Structure):
    _fields_ = (
        ("seed", ctypes.c_uint64),
        ("step", ctypes.c_int64),
        ("decoupled", ctypes.c_int32),
        *((name, ctypes.c_float) for name in ("grad_scale", "keep", "decay", "beta1", "one_minus_beta1", "beta2")),
        *((name, ctypes.c_float) for name in ("one_minus_beta2", "inverse_root2", "eps")),
        *((name, ctypes.c_float) for name in ("minus_step_size", "momentum")),
        *((name, ctypes.c_float) for name in ("into_first", "into_second", "root_eps", "root_step")),
    )


class _UpdateArgs(ctypes.Structure):
    _fields_ = (
        ("numbers", _Numbers),
        *((name, ctypes.c_void_p) for name in ("weight", "low")),
        ("moments", ctypes.c_void_p * 2),
        ("scales", ctypes.c_void_p * 2),
        ("grad", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("first_tile", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("rule", "weight_format", "moment_format", "num_moments", "grad_is_bf16")),
        ("first_element", ctypes.c_uint32),
        ("keys", ctypes.c_uint32 * 2),
    )


class Numbers:
    """What a step is taken with: checked once, for any number of updates of one parameter or, `seeded`, of others.

    `rule` as in `Update`; `step` counts from 1, the gradient is multiplied by `grad_scale` first.  Random bits depend
    on (`seed`, `step`, element within the parameter) and nothing else.  ValueError for a number that is none of these,
    naming it.  Equal where every result is.
    """

    __slots__ = ("kind", "told")

    def __init__(
        self,
        rule: str,
        *,
        step: int,
        lr: float,
        beta1: float = 0.0,
        beta2: float = 0.0,
        eps: float = 0.0,
        weight_decay: float = 0.0,
        momentum: float = 0.0,
        grad_scale: float = 1.0,
        seed: int = 0,
        decoupled: bool = True,
    ) -> None:
        check_rule(rule)
        self.told = told = _Numbers()
        lr, weight_decay = check_number("lr", lr, 0.0), check_number("weight_decay", weight_decay, 0.0)
        beta1, beta2 = check_number("beta1", beta1, 0.0, 1.0), check_number("beta2", beta2, 0.0, 1.0)
        check_whole("step", step, 1, 2**62)
        check_whole("seed", seed, -(2**63), 2**64 - 1)
        told.seed, told.step = seed % 2**64, step
        told.momentum = check_number("momentum", momentum, 0.0)
        self.kind = (rule, rule != "sgd" or momentum > 0)
        told.eps = check_number("eps", eps, 0.0)
        told.grad_scale = check_number("grad_scale", grad_scale, -sys.float_info.max)
        told.decoupled, told.keep, told.decay = decoupled, 1 - lr * weight_decay, weight_decay
        told.beta1, told.one_minus_beta1 = beta1, 1 - beta1
        told.beta2, told.one_minus_beta2 = beta2, 1 - beta2
        root2, size = (1 - beta2**step) ** 0.5, lr / (1 - beta1**step) if rule == "adam" else lr
        told.inverse_root2, told.minus_step_size = (1 - beta2**step) ** -0.5, -size
        later = grad_scale if decoupled else 1.0
        told.into_first, told.into_second = (1 - beta1) * later, (1 - beta2) ** 0.5 * later
        told.root_eps, told.root_step = eps * root2, -size * root2

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Numbers) and self.kind == other.kind and bytes(self.told) == bytes(other.told)

    __hash__ = None  # type: ignore[assignment]

    def seeded(self, seed: int) -> "Numbers":
        """The same for a parameter with another seed."""
        check_whole("seed", seed, -(2**63), 2**64 - 1)
        other = copy.copy(self)
        other.told = _Numbers.from_buffer_copy(self.told)
        other.told.seed = seed % 2**64
        return other

    @property
    def scales(self) -> bool:
        """Whether gradients are multiplied by anything but one."""
        return bool(self.told.grad_scale != 1.0)


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

    __slots__ = ("args", "extents", "kind")

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
        check_rule(rule)
        self.args = args = _UpdateArgs()
        self.kind = (rule, rule != "sgd" or bool(moments))
        args.weight = check_tensor("weight", weight, (torch.bfloat16,) if low is not None else _FLOATS)
        args.count = count = weight.numel()
        named = {"weight": weight, "grad": grad}
        if low is not None:
            args.low = check_tensor("low", low, _HALVES, count)
            named["low"] = low
        args.grad = check_tensor("grad", grad, _FLOATS, count)
        named |= _put_moments(args, rule, moments, scales)
        self.extents = extents_of(named)
        check_extents(self.extents)
        args.rule, args.num_moments, args.grad_is_bf16 = _RULES.index(rule), len(moments), grad.dtype == torch.bfloat16
        args.weight_format = 1 if low is not None else 0 if weight.dtype == torch.float32 else 2
        args.moment_format = _MOMENT_FORMATS[moments[0].dtype] if moments else 0
        check_whole("first_element", first_element, 0, 2**62)
        args.first_element = first_element % 2**32


class Updates:
    """Several updates that are taken together: one call and one team at work, whatever the sizes of the spans.

    ValueError where two of them share memory: they are taken in any order, and at the same time.
    """

    __slots__ = ("_addresses", "_updates")

    def __init__(self, updates: Sequence[Update]) -> None:
        check_extents(extent for update in updates for extent in update.extents)
        self._updates = tuple(updates)
        self._addresses = [ctypes.addressof(update.args) for update in updates]

    def step(self, numbers: Sequence[Numbers | None], threads: int) -> None:
        """Takes a step of each update in place, in one pass, with its own of `numbers` (None: it stays as it is).

        Results depend neither on `threads` nor on the instruction set.  ValueError for numbers of another rule.
        """
        if len(numbers) != len(self._updates):
            raise ValueError(f"{len(numbers)} numbers for {len(self._updates)} updates; each needs its own, or None")
        due = []
        for update, address, with_these in zip(self._updates, self._addresses, numbers, strict=True):
            if with_these is None:
                continue
            if update.kind != with_these.kind:
                raise ValueError(_unlike(update, with_these))
            update.args.numbers = with_these.told
            due.append(address)
        spans = (ctypes.c_void_p * len(due))(*due)
        load_library().oz_update(spans, len(due), check_threads(threads))


def _unlike(update: Update, numbers: Numbers) -> str:
    """Why these numbers are none for this update."""
    (rule, _), (other, _) = update.kind, numbers.kind
    if rule != other:
        return f"the numbers are those of {other}; an update by {rule} needs its own"
    return (
        f"momentum is {round(numbers.told.momentum, 6)} with {update.args.num_moments} moments; "
        "sgd needs a buffer just when it is above 0"
    )


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
    threads: int,
    first_element: int = 0,
    **numbers: Any,
) -> None:
    """One step of an `Update` of these tensors, with these `Numbers`."""
    update = Update(rule, weight, low, moments, scales, grad, first_element=first_element)
    Updates([update]).step([Numbers(rule, **numbers)], threads)


def check_rule(rule: str) -> None:
    """ValueError unless the rule is one of those built."""
    if rule not in _RULES:
        raise ValueError(f"rule is {rule!r}; it must be one of {', '.join(_RULES)}")


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
