"""The random bits of the update, and what rounding by them does to a mean: nothing.

Kind K08 (precision policy): weights without a master must move by updates far below their own rounding unit.
"""

import itertools
import math

import numpy as np
import pytest
import torch

from offloadz.runtime import native
from offloadz.runtime.adam import random_words

COUNT = 1 << 18


def streams(seed: int, step: int, first: int = 0, count: int = COUNT) -> dict[str, np.ndarray]:
    words, weight = random_words(seed, step, first, count)
    of_codes = {"first code": (words >> 4) & 0xFFFF, "second code": words >> 16}  # the upper 16 of their 20 bits
    return {"first": words & 0xFFFF, **of_codes, "weight": weight}


def off_uniform(values: np.ndarray, num_bins: int) -> float:
    """Chi square over equal bins, in standard deviations."""
    expected = len(values) / num_bins
    found = (((np.bincount(values, minlength=num_bins) - expected) ** 2) / expected).sum()
    return float((found - (num_bins - 1)) / math.sqrt(2 * (num_bins - 1)))


def correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Of two series of 16-bit numbers, in standard deviations."""
    a, b = a / 65536 - 0.5, b / 65536 - 0.5
    return float((a * b).mean() * 12 * math.sqrt(len(a)))


@pytest.mark.parametrize(("seed", "step"), [(0, 1), (0, 2), (1, 1), (123456789, 20000), (2**64 - 1, 3), (2**32, 2**33)])
def test_the_bits_are_uniform_and_follow_from_no_neighbour(seed, step):
    found = streams(seed, step)
    for name, values in found.items():
        for bins, bits in ((256, values >> 8), (256, values & 255), (65536, values)):
            assert abs(off_uniform(bits, bins)) < 6, (name, bins)
        for lag in (1, 2, 3, 4, 7, 8, 16, 255, 256, 4096):
            assert abs(correlation(values[lag:], values[:-lag])) < 5, (name, lag)
            pairs = (values[lag:] >> 12) * 16 + (values[:-lag] >> 12)
            assert abs(off_uniform(pairs, 256)) < 6, (name, lag)
    for a, b in itertools.combinations(found, 2):
        if (a, b) == ("first", "first code"):
            continue  # of different formats
        assert abs(correlation(found[a], found[b])) < 5, (a, b)
        assert abs(off_uniform((found[a] >> 12) * 16 + (found[b] >> 12), 256)) < 6, (a, b)


@pytest.mark.parametrize("other", [(5, 8), (6, 7), (7, 5), (5 + 2**32, 7)])
def test_other_steps_and_seeds_have_other_bits(other):
    ours, theirs = streams(5, 7), streams(*other)
    for name in ours:
        assert abs(correlation(ours[name], theirs[name])) < 5
        assert abs(correlation(ours[name][1:], theirs[name][:-1])) < 5


def test_one_element_over_many_steps():
    """What a single weight sees: a series over steps, uniform and without memory."""
    series = np.array([random_words(3, step, 41, 1)[0][0] for step in range(1, 4097)])
    for values in (series & 0xFFFF, (series >> 4) & 0xFFFF, series >> 16):
        assert abs(off_uniform(values >> 8, 256)) < 5
        for lag in (1, 2, 3):
            assert abs(correlation(values[lag:], values[:-lag])) < 5


def lone(values: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    count = values.numel()
    codes = tuple(torch.zeros(count, dtype=torch.uint8) for _ in range(2))
    return values.to(torch.bfloat16, copy=True), codes, tuple(torch.zeros(-(-count // native.BLOCK)) for _ in range(2))


def steps_of_decay(count: int, num_steps: int, rate: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The drift of `count` weights of int8-sr over steps of decay alone, and their start."""
    start = (0.5 + torch.rand(count, generator=torch.Generator().manual_seed(1))).bfloat16()
    weight, codes, scales = lone(start)
    grad = torch.zeros(count, dtype=torch.bfloat16)
    for step in range(1, num_steps + 1):
        settings = {"lr": rate, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 1.0, "threads": 2}
        native.update_("adam", weight, None, codes, scales, grad, step=step, seed=9, **settings)
    return weight.double(), start.double()


def check_decay(count: int, num_steps: int, rate: float) -> None:
    end, start = steps_of_decay(count, num_steps, rate)
    expected = start * float(np.float32(1 - rate)) ** num_steps
    error = end - expected
    assert abs(error.mean()) <= 4 * error.std() / math.sqrt(count), (error.mean(), error.std())
    assert error.std() > 0


def test_decay_of_weights_without_a_master_keeps_the_mean():
    check_decay(1 << 16, 400, 2.0**-14)  # a step is 1/64 to 1/32 of the rounding unit


@pytest.mark.full
def test_twenty_thousand_steps_of_decay_keep_the_mean():
    check_decay(1_000_000, 20_000, 2.0**-18)


def drift(low: bool, num_steps: int, count: int) -> float:
    """Mean distance moved by weights near 1 under a constant gradient and a rate of 1e-6."""
    start = 1 + 0.2 * torch.rand(count, generator=torch.Generator().manual_seed(2)).bfloat16().float()
    weight, codes, scales = lone(start)
    before = weight.double()
    half = torch.zeros(count, dtype=torch.int16) if low else None
    grad = torch.full((count,), 1e-3, dtype=torch.bfloat16)
    settings = {"lr": 1e-6, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.0, "threads": 2}
    for step in range(1, num_steps + 1):
        native.update_("adam", weight, half, codes, scales, grad, step=step, seed=4, **settings)
    if half is None:
        return float((before - weight.double()).mean())
    master = torch.empty(count)
    native.join_master_(master, weight, half)
    assert torch.equal(master.bfloat16(), weight), "the weight is its master rounded to nearest"
    return float((before - master.double()).mean())


@pytest.mark.parametrize("low", [True, False])
def test_updates_far_below_the_rounding_unit_do_not_vanish(low):
    """1e-6 a step on weights of unit 0.0078: without a master a step moves one weight in 8,000, in the mean exactly."""
    num_steps, count = 300, 1 << 17
    unit, wanted = 2.0**-7, 1e-6 * num_steps
    error = 0.05 * wanted if low else 0.05 * wanted + 4 * unit * math.sqrt(wanted / unit / count)
    assert abs(drift(low, num_steps, count) - wanted) < error


def test_moments_rounded_at_random_keep_their_mean():
    """A first moment fades by a tenth a step; a second one by 1/1000, a hundredth of its rounding unit."""
    count = 1 << 16
    for dtype, scaled in ((torch.bfloat16, False), (torch.uint8, True)):
        moments = tuple(torch.zeros(count, dtype=dtype) for _ in range(2))
        scales = tuple(torch.zeros(count // native.BLOCK) if scaled else None for _ in range(2))
        weight, grad = torch.zeros(count), 1 + torch.rand(count, generator=torch.Generator().manual_seed(5))
        first, second = torch.zeros(count), torch.zeros(count)
        for step in range(1, 201):
            gradient = grad if step < 3 else torch.zeros(count)
            first, second = first * 0.99 + 0.01 * gradient, second * 0.999 + 0.001 * gradient**2
            settings = {"lr": 1e-3, "beta1": 0.99, "beta2": 0.999, "eps": 1e-8, "threads": 1}
            native.update_("adam", weight, None, moments, scales, gradient, step=step, seed=6, **settings)
        for k, wanted in enumerate((first, second)):
            out = moments[k].float()
            if scaled:
                native.decode_moment_(out, moments[k], scales[k], k == 1)
            assert abs(float((out / wanted).mean()) - 1) < 0.01, (dtype, k)
