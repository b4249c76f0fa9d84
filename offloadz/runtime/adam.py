"""The plain twin of the native update, array by array, for tests; training never calls it.

It leaves speed to `native.update_` (a pass per operation costs about ten times the memory traffic) and has its bits:
both use only correctly rounded operations, numpy's square root among them (torch's, from MKL, is off by one unit in the
last place for about 0.7 % of arguments).  The formats are told a second time here, from their description alone.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

BLOCK = 256
FIRST, SECOND = 0x37900090, 0x2F900000
"""Bits of the offset c of first moments, and of the smallest code of second moments."""
SMALLEST = np.float32(2.0**-90)
ABOVE = np.float32(1 + 2.0**-23)
"""Over the scale: the largest number is never below its code."""

Floats = NDArray[np.float32]
Words = NDArray[np.uint32]


def update_reference(
    rule: str,
    weight: Tensor,
    low: Tensor | None,
    moments: tuple[Tensor, ...],
    scales: tuple[Tensor | None, ...],
    grad: Tensor,
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
    first_element: int = 0,
    decoupled: bool = True,
) -> None:
    """One step in place; arguments as in `native.update_`."""
    one = np.float32
    rounded = (weight.dtype == torch.bfloat16 and low is None) or any(m.dtype != torch.float32 for m in moments)
    random, for_weight = random_words(seed, step, first_element, weight.numel() if rounded else 0)
    rounds = rule == "adam" and moments[0].dtype != torch.float32
    p, g = _weights(weight, low), _wide(grad) * one(1 if rounds and decoupled else grad_scale)
    fades = (one(beta1), one(beta2)) if rule == "adam" else (one(1), one(1))
    kept = [_moment(moments[k], scales[k], fades[k], k == 1) for k in range(len(moments))]
    if decoupled:
        p = p * one(1 - lr * weight_decay)
    else:
        g = g + one(weight_decay) * p
    if rounds:
        p = _rounded(p, g, kept, step, lr, beta1, beta2, eps, grad_scale if decoupled else 1.0)
    elif rule == "adam":
        p = _adam(p, g, kept, step, lr, beta1, beta2, eps)
    elif rule == "lion":
        c = kept[0] * one(beta1) + one(1 - beta1) * g
        p = p + np.sign(c) * one(-lr)
        kept[0] = kept[0] * one(beta2) + one(1 - beta2) * g
    else:
        kept = [m * one(momentum) + g for m in kept]
        p = p + one(-lr) * (kept[0] if kept else g)
    for k, (moment, scale) in enumerate(zip(moments, scales, strict=True)):
        _store_moment(moment, scale, kept[k], random, k == 1)
    _store_weights(weight, low, p, for_weight)


def _adam(
    p: Floats, g: Floats, kept: list[Floats], step: int, lr: float, beta1: float, beta2: float, eps: float
) -> Floats:
    """torch's order of operations, with a product in place of the division by the second correction."""
    one, (m, v) = np.float32, kept
    w1 = one(1 - beta1)
    m = g - (g - m) * (one(1) - w1) if w1 >= 0.5 else m + w1 * (g - m)  # torch's lerp starts from the nearer end
    v = v * one(beta2) + (one(1 - beta2) * g) * g
    denom = np.sqrt(v) * one((1 - beta2**step) ** -0.5) + one(eps)
    kept[:] = [m, v]
    return p + (one(-(lr / (1 - beta1**step))) * m) / denom


def _rounded(
    p: Floats, g: Floats, kept: list[Floats], step: int, lr: float, beta1: float, beta2: float, eps: float, scale: float
) -> Floats:
    """Over moments that are faded already: constants that meet are one, the second correction is in eps and step."""
    one, (m, v) = np.float32, kept
    root, correction = one((1 - beta2) ** 0.5 * scale) * g, (1 - beta2**step) ** 0.5
    m, v = m + one((1 - beta1) * scale) * g, v + root * root
    kept[:] = [m, v]
    return p + (one(-(lr / (1 - beta1**step)) * correction) * m) / (np.sqrt(v) + one(eps * correction))


def _mixed(x: int) -> int:
    """The finaliser of SplitMix64."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % 2**64
    return x ^ (x >> 31)


def random_words(seed: int, step: int, first_element: int, count: int) -> tuple[Words, Words]:
    """For each element a word whose low and high 20 (or 16) bits round the moments, and 16 bits for the weight."""
    golden = 0x9E3779B97F4A7C15
    a = _mixed((_mixed((seed + golden) % 2**64) + step * golden) % 2**64)
    keys = [np.uint32(a % 2**32), np.uint32(a >> 32)]
    place = np.arange(count, dtype=np.uint64)
    element = (((place & ~np.uint64(4)) + np.uint64(first_element)) % 2**32).astype(np.uint32)
    x = element * np.uint32(0x9E3779B1) + keys[0]
    x = (x ^ (x >> 16)) * np.uint32(0x7FEB352D) + keys[1]
    x = (x ^ (x >> 15)) * np.uint32(0x846CA68B)
    x = np.where(place & np.uint64(4), x * np.uint32(0xADB4A92D), x)
    return x, (x * np.uint32(0x9E3779B1)) >> 16


def _bits(x: Floats) -> Words:
    return np.ascontiguousarray(x).view(np.uint32)


def _float(x: Words) -> Floats:
    return x.astype(np.uint32).view(np.float32)


def _halves(x: Tensor) -> Words:
    return x.view(torch.int16).numpy().view(np.uint16).astype(np.uint32)


def _put_halves(out: Tensor, x: Words) -> None:
    out.view(torch.int16).numpy().view(np.uint16)[:] = x


def _wide(x: Tensor) -> Floats:
    return _float(_halves(x) << 16) if x.dtype == torch.bfloat16 else x.numpy().copy()


def _weights(weight: Tensor, low: Tensor | None) -> Floats:
    if low is None:
        return _wide(weight)
    below = _halves(low)
    return _float(((_halves(weight) - (below >> 15)) << 16) | below)


def _store_weights(weight: Tensor, low: Tensor | None, p: Floats, random: Words) -> None:
    if weight.dtype == torch.float32:
        weight.numpy()[:] = p
        return
    bits = np.where(np.isnan(p), np.uint32(0x7FC00000), _bits(p))
    _put_halves(weight, (bits + (random if low is None else np.uint32(0x8000))) >> 16)
    if low is not None:
        _put_halves(low, bits & 0xFFFF)


def _moment(moment: Tensor, scale: Tensor | None, fade: np.float32, second: bool) -> Floats:
    """Rounded moments come multiplied by `fade`, within the scale if they have one."""
    if scale is not None:
        return decode(moment.numpy().view(np.uint8), scale.numpy() * fade, second)
    return _wide(moment) * (fade if moment.dtype == torch.bfloat16 else np.float32(1))


def _store_moment(moment: Tensor, scale: Tensor | None, x: Floats, random: Words, second: bool) -> None:
    if scale is not None:
        up = random >> 12 if second else random & 0xFFFFF
        moment.numpy().view(np.uint8)[:], scale.numpy()[:] = encode(x, up, second)
    elif moment.dtype == torch.bfloat16:
        bits = np.where(np.isnan(x), np.uint32(0x7FC00000), _bits(x))
        _put_halves(moment, (bits + (random >> 16 if second else random & 0xFFFF)) >> 16)
    else:
        moment.numpy()[:] = x


def encode(x: Floats, up: Words, second: bool) -> tuple[NDArray[np.uint8], Floats]:
    """Codes and scales of `x`; `up` in [0, 2^20) says from where on a step is rounded up, 2^19 is to nearest."""
    largest = np.maximum.reduceat(np.abs(x), np.arange(0, len(x), BLOCK)) if len(x) else np.abs(x)
    scales = np.where(largest >= SMALLEST, largest, np.where(second & (largest > 0), SMALLEST, 0)).astype(np.float32)
    with np.errstate(divide="ignore", invalid="ignore"):
        u = np.abs(x) * np.repeat(ABOVE / scales, BLOCK)[: len(x)]
    if second:
        steps = ((_bits(u) + up) >> 20).astype(np.int64) - (SECOND >> 20)
        code = np.clip(steps, 0, 255)
    else:
        steps = (_bits(u + _float(np.uint32([FIRST]))) + up - np.uint32(FIRST)) >> 20
        code = np.minimum(steps, 127) | np.where(steps > 0, _bits(x) >> 31 << 7, 0)
    return np.where(np.repeat(scales, BLOCK)[: len(x)] == 0, 0, code).astype(np.uint8), scales


def decode(codes: NDArray[np.uint8], scales: Floats, second: bool) -> Floats:
    """The float32 numbers that codes and scales stand for."""
    k = codes.astype(np.uint32)
    u = _float(((k if second else k & 127) << 20) + np.uint32(SECOND if second else FIRST))
    u = u if second else u - _float(np.uint32([FIRST]))
    x = u * np.repeat(scales, BLOCK)[: len(codes)]
    return x if second else np.where(k > 127, -x, x)
