"""The update in every rule and format against its plain twin, bit by bit; codes and scales; memory of zeros.

Case G07, kind K07 (numerics of the CPU optimizer): every size, start, dtype, thread count and instruction set.
"""

import itertools

import numpy as np
import pytest
import torch
from spans import at

from offloadz.plan.recipes import BLOCK_ELEMENTS
from offloadz.runtime import adam, native
from offloadz.runtime.adam import update_reference
from offloadz.runtime.library import load_library

TILE = 32768  # csrc/adam.cpp
BLOCK = native.BLOCK
HYPER = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "grad_scale": 0.37}
MOMENTS = {"fp32": torch.float32, "bf16": torch.bfloat16, "codes": torch.uint8}
RECIPES = [("split", "fp32"), ("split", "bf16"), ("split", "codes"), ("alone", "codes")]  # fp32, bf16, int8, int8-sr
EDGES = [1, 7, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 3]


@pytest.fixture(autouse=True)
def widest():
    yield
    native.select_isa(native.isa_supported()[-1])


class State:
    """A span of `count` elements: weights "whole", "split" or "alone", moments in one of `MOMENTS`."""

    def __init__(self, count: int, weight: str, moments: str, rule: str = "adam", start: int = 0, spread: float = 0.05):
        master = torch.randn(count, generator=torch.Generator().manual_seed(count)) * spread
        self.rule, self.low = rule, None
        self.weight = at(start, master if weight == "whole" else torch.zeros(count, dtype=torch.bfloat16))
        if weight != "whole":
            low = at(start, torch.zeros(count, dtype=torch.int16))
            native.split_master_(self.weight, low, master)
            self.low = low if weight == "split" else None
        kept = range({"adam": 2, "lion": 1, "sgd": 1, "plain": 0}[rule])
        self.moments = tuple(at(start, torch.zeros(count, dtype=MOMENTS[moments])) for _ in kept)
        coded = moments == "codes"
        self.scales = tuple(at(start, torch.zeros(-(-count // BLOCK))) if coded else None for _ in kept)

    def update(self, grad: torch.Tensor, step: int, apply=native.update_, **hyper) -> None:
        every = {"step": step, "seed": 11, **HYPER, **({"momentum": 0.9} if self.rule == "sgd" else {}), **hyper}
        rule = "sgd" if self.rule == "plain" else self.rule
        apply(rule, self.weight, self.low, self.moments, self.scales, grad, **every)

    def bits(self) -> list[np.ndarray]:
        tensors = (self.weight, self.low, *self.moments, *self.scales)
        return [t.view(torch.uint8).numpy().copy() for t in tensors if t is not None]

    def second(self) -> torch.Tensor:
        out = torch.empty(self.weight.numel())
        native.decode_moment_(out, self.moments[1], self.scales[1], True)
        return out


def grads(count: int, dtype: torch.dtype, steps: int = 2) -> list[torch.Tensor]:
    """Heavy tails, and a tenth of them zero."""
    generator = torch.Generator().manual_seed(7 + count)
    made = []
    for _ in range(steps):
        g = torch.randn(count, generator=generator) * torch.randn(count, generator=generator).mul(2).exp()
        made.append((g * (torch.rand(count, generator=generator) > 0.1)).to(dtype))
    return made


def check(count: int, make, dtype: torch.dtype, threads: tuple[int, ...] = (1,), **hyper) -> None:
    """The native update on every instruction set has the bits of the twin."""
    steps = grads(count, dtype)
    twin = make(0)
    for step, grad in enumerate(steps, 1):
        twin.update(grad, step, update_reference, first_element=count, **hyper)
    wanted = twin.bits()
    for isa, number in itertools.product(native.isa_supported(), threads):
        native.select_isa(isa)
        start = count % 4
        state = make(start)
        for step, grad in enumerate(steps, 1):
            state.update(at(start, grad), step, first_element=count, threads=number, **hyper)
        for a, b in zip(wanted, state.bits(), strict=True):
            assert np.array_equal(a, b), (count, isa, number)


@pytest.mark.parametrize(("weight", "moments"), RECIPES)
def test_every_size_of_a_recipe_has_the_bits_of_the_twin(weight, moments):
    for count in (*range(258), *range(1000, 1031, 5), 4095, 4096, 4097):
        check(count, lambda start, n=count: State(n, weight, moments, start=start), torch.bfloat16)


@pytest.mark.parametrize(("weight", "moments"), RECIPES)
def test_tiles_and_threads_change_no_bit(weight, moments):
    for count in (TILE - 1, TILE, TILE + 1, 3 * TILE + 7):
        check(count, lambda start, n=count: State(n, weight, moments, start=start), torch.bfloat16, (1, 2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("moments", MOMENTS)
@pytest.mark.parametrize("weight", ["whole", "split", "alone"])
@pytest.mark.parametrize("rule", ["adam", "lion", "sgd", "plain"])
def test_every_rule_takes_every_format(rule, weight, moments, dtype):
    for count, decoupled in itertools.product(EDGES, (True, False)):
        check(count, lambda s, n=count: State(n, weight, moments, rule, s), dtype, decoupled=decoupled)


@pytest.mark.parametrize("betas", [(0.0, 0.0), (0.3, 0.5), (0.9, 0.999), (0.95, 0.9999)])
@pytest.mark.parametrize(("weight", "moments"), RECIPES)
def test_other_betas(weight, moments, betas):
    hyper = {"beta1": betas[0], "beta2": betas[1]}
    check(3 * BLOCK + 5, lambda start: State(3 * BLOCK + 5, weight, moments, start=start), torch.bfloat16, **hyper)


def test_the_element_and_not_the_place_decides_the_random_bits():
    """A span updated in two calls, cut at a block, is the span updated in one."""
    grad = grads(6 * BLOCK, torch.bfloat16, 1)[0]
    for weight, moments in RECIPES[1:]:
        whole, parts = State(6 * BLOCK, weight, moments), State(6 * BLOCK, weight, moments)
        whole.update(grad, 3, threads=1, first_element=2**32 - 5)
        for begin, end in ((0, 4 * BLOCK), (4 * BLOCK, 6 * BLOCK)):
            low = None if parts.low is None else parts.low[begin:end]
            scales = tuple(None if s is None else s[begin // BLOCK : end // BLOCK] for s in parts.scales)
            piece = parts.weight[begin:end], low, tuple(m[begin:end] for m in parts.moments), scales, grad[begin:end]
            native.update_("adam", *piece, step=3, seed=11, threads=1, first_element=2**32 - 5 + begin, **HYPER)
        assert all(map(np.array_equal, whole.bits(), parts.bits()))
        other = State(6 * BLOCK, weight, moments)
        other.update(grad, 3, threads=1, first_element=2**32 - 5, seed=12)
        assert not all(map(np.array_equal, whole.bits(), other.bits()))


def numbers(count: int, second: bool) -> torch.Tensor:
    """Magnitudes over 40 decades from block to block and over six inside one; some zeros, a block of zeros."""
    generator = torch.Generator().manual_seed(count)
    block = torch.linspace(-38, 5, -(-count // BLOCK)).repeat_interleave(BLOCK)[:count]
    x = 10 ** (block - 6 * torch.rand(count, generator=generator)) * torch.randn(count, generator=generator)
    x[torch.rand(count, generator=generator) < 0.1] = 0
    x[2 * BLOCK : 3 * BLOCK] = 0
    return x.abs() if second else x


@pytest.mark.parametrize("second", [False, True])
@pytest.mark.parametrize("count", [0, 1, 255, 256, 257, 40 * BLOCK + 3])
def test_codes_are_the_twins_and_come_back(count, second):
    values = numbers(count, second)
    nearest = np.full(count, 1 << 19, np.uint32)
    codes, scales = adam.encode(values.numpy(), nearest, second)
    wanted = adam.decode(codes, scales, second)
    for isa, dtype in itertools.product(native.isa_supported(), (torch.uint8, torch.int8)):
        native.select_isa(isa)
        held, scale, out = torch.full((count,), 77, dtype=dtype), torch.full((len(scales),), 7.0), torch.ones(count)
        native.encode_moment_(held, scale, values, second)
        native.decode_moment_(out, held, scale, second)
        assert np.array_equal(held.numpy().view(np.uint8), codes)
        assert np.array_equal(scale.numpy(), scales)
        assert np.array_equal(out.numpy(), wanted)
        again, scale_again = torch.zeros(count, dtype=dtype), torch.zeros(len(scales))
        native.encode_moment_(again, scale_again, out, second)
        assert torch.equal(again, held)
        assert torch.equal(scale_again, scale)
    largest = values.abs().view(-1, count).amax(1) if 0 < count <= BLOCK else None
    if largest is not None and largest >= 2.0**-90:
        assert out.abs().max() == largest, "the largest number of a block comes back exactly"


@pytest.mark.parametrize("second", [False, True])
def test_codes_are_within_a_sixteenth(second):
    """8 steps to each doubling: half a step is 1/16 of a number, or the equal steps near zero where that is more."""
    values = numbers(40 * BLOCK, second)
    codes, scales, out = torch.zeros(len(values), dtype=torch.uint8), torch.zeros(40), torch.zeros(len(values))
    native.encode_moment_(codes, scales, values, second)
    native.decode_moment_(out, codes, scales, second)
    least = scales.repeat_interleave(BLOCK) * (2.0**-32 * 1.2 if second else 2.0**-19)
    wide = scales.repeat_interleave(BLOCK) > 2.0**-89
    assert ((out - values).abs() <= values.abs() / 16 + least)[wide].all()


@pytest.mark.parametrize("second", [False, True])
@pytest.mark.parametrize("up", [0, (1 << 20) - 1])
def test_the_largest_number_keeps_its_code_however_it_is_rounded(second, up):
    """Else a block's scale would be lost now and then: x times 1 / x is not always 1."""
    x = np.zeros(1000 * BLOCK, np.float32)
    x[::BLOCK] = 10 ** np.random.default_rng(8).uniform(-20, 20, 1000)
    codes, _ = adam.encode(x, np.full(len(x), up, np.uint32), second)
    assert (codes[::BLOCK] == (255 if second else 127)).all()
    if not second:
        codes, _ = adam.encode(-x, np.full(len(x), up, np.uint32), second)
        assert (codes[::BLOCK] == 255).all(), "the same code with the sign"
        assert not codes.reshape(-1, BLOCK)[:, 1:].any(), "a zero has no sign"


@pytest.mark.parametrize(("weight", "moments"), [("split", "codes"), ("alone", "codes")])
def test_what_an_update_left_comes_back_from_fp32(weight, moments):
    """encode(decode(x)) is x for codes and scales, whatever the steps were: a checkpoint holds fp32 numbers."""
    count = 37 * BLOCK + 11
    state = State(count, weight, moments)
    for step in range(1, 60):
        sharp = 10 ** -((step * torch.arange(count)) % 23 / 2.0)
        grad = (grads(count, torch.float32, 1)[0] * sharp * (step % 7 != 0)).bfloat16()
        state.update(grad, step, threads=1)
        for k in range(2):
            out, codes, scales = torch.empty(count), torch.zeros(count, dtype=torch.uint8), torch.zeros(38)
            native.decode_moment_(out, state.moments[k], state.scales[k], k == 1)
            native.encode_moment_(codes, scales, out, k == 1)
            assert torch.equal(codes, state.moments[k])
            assert torch.equal(scales, state.scales[k])


def test_a_second_moment_beside_large_ones_does_not_vanish():
    """m / sqrt(v) must not run away: a small gradient beside a huge one moves its weight by about lr, not by more."""
    count = 8 * BLOCK
    for size in (1e-2, 1e-4, 1e-6):
        state = State(count, "split", "codes", spread=0.0)
        grad = torch.full((count,), size)
        grad[::BLOCK] = 1.0
        for step in range(1, 40):
            before = state.weight.float()
            state.update(grad.bfloat16(), step, threads=1, lr=1e-3, weight_decay=0.0)
            moved = (state.weight.float() - before).abs()
            assert moved.max() <= 1.6e-3
        assert (state.second() > 0).all()


def test_zero_bytes_are_zero_moments():
    zeros, out = torch.zeros(300, dtype=torch.uint8), torch.ones(300)
    for second in (False, True):
        native.decode_moment_(out, zeros, torch.zeros(2), second)
        assert not out.any()
    for weight, moments in RECIPES:  # no gradient, no decay: nothing moves and nothing becomes a number
        state = State(600, weight, moments)
        before = state.bits()
        state.update(torch.zeros(600, dtype=torch.bfloat16), 1, threads=1, weight_decay=0.0)
        assert all(map(np.array_equal, before, state.bits()))


def test_a_gradient_that_is_not_a_number_shows():
    for (weight, moments), isa in itertools.product(RECIPES, native.isa_supported()):
        native.select_isa(isa)
        state = State(600, weight, moments)
        grad = torch.ones(600, dtype=torch.bfloat16)
        grad.view(torch.int16)[300] = -1  # the NaN of memory that was freed
        state.update(grad, 1, threads=1)
        assert state.weight[300].isnan()
        assert torch.isfinite(state.weight[:BLOCK]).all()


def test_one_block_size_everywhere():
    assert BLOCK_ELEMENTS == BLOCK == adam.BLOCK == load_library().oz_quant_block()
