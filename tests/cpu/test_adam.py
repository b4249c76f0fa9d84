"""The native update and its small relatives: sizes, starts, dtypes, threads, instruction sets, all with equal bits.

Case G07, kind K07 (numerics of the CPU optimizer), and what concerns the loops of kind K06 (instruction sets).
"""

import itertools
import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from spans import at

from offloadz.runtime import native
from offloadz.runtime.adam import update_reference

TILE = 32768  # csrc/adam.cpp
PIECE = 65536  # csrc/kernels.h
SIZES = [*range(258), *range(1000, 1031), 4095, 4096, 4097, TILE - 1, TILE, TILE + 1, 3 * TILE + 7]
HYPER = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}


@pytest.fixture(autouse=True)
def widest():
    yield
    native.select_isa(native.isa_supported()[-1])


class State:
    def __init__(self, count: int, split: bool, start: int = 0) -> None:
        generator = torch.Generator().manual_seed(count)
        master = torch.randn(count, generator=generator) * 0.05
        self.split = split
        self.low = at(start, torch.zeros(count, dtype=torch.int16)) if split else None
        if self.low is not None:
            self.weight = at(start, torch.zeros(count, dtype=torch.bfloat16))
            native.split_master_(self.weight, self.low, master)
        else:
            self.weight = at(start, master)
        self.moments = at(start, torch.zeros(count)), at(start, torch.zeros(count))

    def master(self) -> torch.Tensor:
        if self.low is None:
            return self.weight.clone()
        out = torch.empty(self.weight.numel())
        native.join_master_(out, self.weight, self.low)
        return out

    def update(self, grad: torch.Tensor, step: int, threads: int, **hyper) -> None:
        both = {"step": step, **HYPER, **hyper}
        native.update_("adam", self.weight, self.low, self.moments, (None, None), grad, threads=threads, **both)


def adam_reference(master: torch.Tensor, moments: tuple[torch.Tensor, ...], grad: torch.Tensor, **hyper) -> None:
    update_reference("adam", master, None, moments, (None, None), grad, **hyper)


def bits(tensor: torch.Tensor) -> np.ndarray:
    return tensor.numpy().view(np.uint32)


def same(state: State, master: torch.Tensor, moments: tuple[torch.Tensor, torch.Tensor]) -> bool:
    pairs = zip((state.master(), *state.moments), (master, *moments), strict=True)
    return all(np.array_equal(bits(a), bits(b)) for a, b in pairs)


@pytest.mark.parametrize("grad_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("split", [True, False])
def test_every_size_start_thread_count_and_isa_has_the_bits_of_the_twin(split, grad_dtype):
    for count in SIZES:
        generator = torch.Generator().manual_seed(7 + count)
        grads = [(torch.randn(count, generator=generator) * 3).to(grad_dtype) for _ in range(2)]
        first = State(count, split)
        master, moments = first.master(), (torch.zeros(count), torch.zeros(count))
        for step, grad in enumerate(grads, 1):
            adam_reference(master, moments, grad, step=step, grad_scale=0.37, **HYPER)
        for isa, threads in itertools.product(native.isa_supported(), (1, 2)):
            native.select_isa(isa)
            start = random.Random(count).randrange(4)
            state = State(count, split, start)
            for step, grad in enumerate(grads, 1):
                state.update(at(start, grad), step, threads, grad_scale=0.37)
            assert same(state, master, moments), (count, isa, threads, start)


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.3, 0.5), (0.0, 0.0), (0.5, 0.999)])
def test_fifty_steps_with_both_decays_and_every_way_of_the_moments(decoupled, betas):
    count = 3 * TILE + 7
    for isa in native.isa_supported():
        native.select_isa(isa)
        state = State(count, True)
        master, moments = state.master(), (torch.zeros(count), torch.zeros(count))
        hyper = {**HYPER, "beta1": betas[0], "beta2": betas[1]}
        for step in range(1, 51 if isa == native.isa_supported()[-1] else 4):
            grad = torch.randn(count, generator=torch.Generator().manual_seed(step)).to(torch.bfloat16)
            adam_reference(master, moments, grad, step=step, decoupled=decoupled, **hyper)
            state.update(grad, step, threads=1 + step % 3, decoupled=decoupled, **hyper)
        assert same(state, master, moments), isa


@pytest.mark.parametrize(("optimizer", "decoupled"), [(torch.optim.AdamW, True), (torch.optim.Adam, False)])
def test_two_hundred_steps_stay_with_torch(optimizer, decoupled):
    """torch's own loop differs by roundings: its lerp and addcmul are fused multiply-adds, its square root (MKL's) is
    not correctly rounded.  That is one unit in the last place of a moment per step; the moments forget them, and the
    weights, rounded once a step, drift apart by about a unit in 200 steps (Adam's distance moved is far larger)."""
    count = 20011
    state = State(count, True)
    before = state.master()
    parameter = torch.nn.Parameter(state.master())
    torch_loop = optimizer([parameter], lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, foreach=False)
    for step in range(1, 201):
        grad = torch.randn(count, generator=torch.Generator().manual_seed(step)).to(torch.bfloat16)
        parameter.grad = grad.float()
        torch_loop.step()
        state.update(grad, step, threads=2, decoupled=decoupled)
    wanted, found = parameter.detach(), state.master()
    assert (found - wanted).norm() <= 1e-6 * (wanted - before).norm()
    assert (found - wanted).abs().max() <= 8 * 2**-24 * wanted.abs().max()


def test_threads_do_not_inherit_a_callers_flushing_of_tiny_numbers():
    count = 4 * TILE
    results = []
    for flush, threads in ((False, 1), (True, 1), (True, 2)):
        state = State(count, False)
        state.moments[1].fill_(1e-40)
        torch.set_flush_denormal(flush)
        try:
            state.update(torch.full((count,), 1e-20), 1, threads, lr=1e-38)
        finally:
            torch.set_flush_denormal(False)
        results.append([bits(t).copy() for t in (state.weight, *state.moments)])
    assert results[0][2].any(), "the second moment must not have been flushed"
    for other in results[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(results[0], other, strict=True))


def wrong_arguments():
    good = State(64, True)
    grad = torch.zeros(64, dtype=torch.bfloat16)
    base = {"rule": "adam", "weight": good.weight, "low": good.low, "moments": good.moments, "scales": (None, None)}
    base |= {"grad": grad, "step": 1, "threads": 1, **HYPER}
    first, second = good.moments
    codes, scale = torch.zeros(64, dtype=torch.uint8), torch.zeros(1)
    changes = {
        "grad": [grad.to(torch.float16), grad[:63], grad.double(), torch.zeros(128)[::2], grad.to("meta"), None, 3.0],
        "weight": [good.weight.float(), good.weight.half(), torch.zeros(65, dtype=torch.bfloat16)],
        "low": [good.low.int(), good.low[1:]],
        "rule": ["adamw", "", None],
        "moments": [
            (),
            (first,),
            (first, second, first),
            *(
                (m, second)
                for m in (
                    torch.zeros(8, 8).t()[:, :4],
                    torch.zeros(64).to_sparse(),
                    first.bfloat16(),
                    first.double(),
                    codes,
                )
            ),
        ],
        "exp_avg_sq": [first, second.view(torch.int32)],
        "scales": [(), (None,), (scale, None), (None, scale)],
        "seed": [1.5, 2**64],
        "first_element": [-1, 0.5],
        "momentum": [-1.0, float("nan")],
        "step": [0, -1, 1.5],
        "threads": [0, -1, 257, 2.0],
        "lr": [float("nan"), -1.0, float("inf")],
        "beta1": [1.0, -0.1],
        "beta2": [1.0],
        "eps": [-1.0],
        "weight_decay": [-0.1],
        "grad_scale": [float("nan"), float("inf")],
    }
    return [(base, name, value) for name, values in changes.items() for value in values]


@pytest.mark.parametrize("number", range(len(wrong_arguments())))
def test_what_is_not_supported_is_an_error_that_names_the_argument(number):
    base, name, value = wrong_arguments()[number]
    first = base["moments"][0]
    before = first.clone()
    if name == "exp_avg_sq":
        name, value = "moments", (first, value)
    # A longer weight makes every other length wrong.
    shown = {"weight": "weight|65 are needed", "moments": "exp_avg"}.get(name, name)
    with pytest.raises(ValueError, match=shown):
        native.update_(**{**base, name: value})
    assert torch.equal(first, before)


def test_codes_need_their_scales():
    good, grad = State(257, True), torch.zeros(257)
    codes, scales = torch.zeros(257, dtype=torch.uint8), torch.zeros(2)
    for wrong in (None, torch.zeros(1), torch.zeros(3), torch.zeros(2, dtype=torch.float64)):
        with pytest.raises(ValueError, match="the scales of exp_avg_sq"):
            arguments = (good.weight, good.low, (codes, codes.clone()), (scales, wrong), grad)
            native.update_("adam", *arguments, step=1, threads=1, **HYPER)
    with pytest.raises(ValueError, match=r"momentum is 0\.0 with 1 moments"):
        native.update_("sgd", good.weight, good.low, (torch.zeros(257),), (None,), grad, step=1, threads=1, lr=1.0)
    with pytest.raises(ValueError, match=r"(the scales of )?exp_avg and (the scales of )?exp_avg share"):
        room = torch.zeros(264)
        arguments = (good.weight, good.low, (room.view(torch.uint8)[:257],), (room[:2],), grad)
        native.update_("lion", *arguments, step=1, threads=1, lr=1.0)


def test_split_and_join_keep_every_bit():
    """All 2^16 low halves under a spread of high ones: zeros, tiny, ones, the carry at 0xffff, the largest."""
    highs = [0x0000, 0x8000, 0x0001, 0x007F, 0x0080, 0x3F7F, 0x3F80, 0x3FFF, 0xBF80, 0x7F7E, 0x7F7F, 0xFF7F, 0x4049]
    low_bits = torch.arange(65536, dtype=torch.int64)
    for isa, high in itertools.product(native.isa_supported(), highs):
        native.select_isa(isa)
        raw = (high << 16) + low_bits
        master = torch.from_numpy(raw.numpy().astype(np.uint32).view(np.float32))
        weight, low, back = torch.empty(65536, dtype=torch.bfloat16), torch.empty(65536, dtype=torch.int16), master * 0
        native.split_master_(weight, low, master)
        native.join_master_(back, weight, low)
        assert np.array_equal(bits(back), bits(master)), hex(high)
        rounded = weight.view(torch.int16).long() & 0xFFFF
        assert torch.equal(rounded, (raw + 0x8000) >> 16), hex(high)  # nearest, ties away, in sign and magnitude


def test_split_keeps_infinities_and_shows_every_nan():
    raw = [0x7F800000, 0xFF800000, 0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF, 0xFFFF8000, 0x7FC00000, 0x7F808000]
    master = torch.from_numpy(np.array(raw, dtype=np.uint32).view(np.float32))
    weight, low, back = torch.empty(8, dtype=torch.bfloat16), torch.empty(8, dtype=torch.int16), torch.empty(8)
    native.split_master_(weight, low, master)
    native.join_master_(back, weight, low)
    for seen in (weight.float(), back):
        assert seen[:2].tolist() == [float("inf"), float("-inf")]
        assert seen[2:].isnan().all()


def hard_floats(count: int) -> torch.Tensor:
    """Random bit patterns (NaN, infinities, tiny numbers among them), every third a tie between two bfloat16."""
    raw = np.random.default_rng(count).integers(0, 2**32, count, dtype=np.uint32)
    raw[::3] = raw[::3] & 0xFFFF0000 | 0x8000
    return torch.from_numpy(raw.view(np.float32))


@pytest.mark.parametrize("count", [0, 1, 7, 8, 15, 16, 17, 31, 100, 4097, PIECE + 5])
def test_widen_and_narrow_are_torchs(count):
    source = hard_floats(count)
    wanted = source.to(torch.bfloat16)
    for isa, start in itertools.product(native.isa_supported(), (0, 1, 3)):
        native.select_isa(isa)
        out, wide = at(start, torch.zeros(count, dtype=torch.bfloat16)), at(start, torch.zeros(count))
        native.narrow_(out, at(start, source))
        assert torch.equal(out.isnan(), wanted.isnan())
        assert torch.equal(out.nan_to_num(0.0).view(torch.int16), wanted.nan_to_num(0.0).view(torch.int16))
        native.widen_(wide, out)
        assert np.array_equal(bits(wide), bits(out.float()))


def lanes(values: torch.Tensor) -> float:
    """The rule of the sum, by hand: squares in double, 16 lanes a piece, lanes added pairwise, pieces in order."""
    total = 0.0
    for piece in values.double().split(PIECE):
        padded = torch.cat([piece, piece.new_zeros(-piece.numel() % 16)]).view(-1, 16)
        lane = [0.0] * 16
        for row in (padded * padded).tolist():
            lane = [a + b for a, b in zip(lane, row, strict=True)]
        s = [(lane[k] + lane[k + 8]) + (lane[k + 4] + lane[k + 12]) for k in range(4)]
        total += (s[0] + s[1]) + (s[2] + s[3])
    return total


@pytest.mark.parametrize("count", [0, 1, 8, 15, 16, 17, 257, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE + 33])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_drain_writes_torchs_rounding_and_sums_what_it_wrote(count, dtype):
    generator = torch.Generator().manual_seed(count)
    grad = torch.randn(count, generator=generator) * torch.logspace(-6, 6, max(count, 1))[:count]
    wanted = grad.to(dtype)
    total = lanes(wanted)
    for isa, start in itertools.product(native.isa_supported(), (0, 1, 5)):
        native.select_isa(isa)
        room = torch.full((start + count + 9,), 3.0, dtype=dtype)
        out = room[start : start + count]
        assert native.drain_(out, at(start, grad)) == total
        assert torch.equal(out, wanted)
        assert (room[start + count :] == 3.0).all(), "wrote past the end"
        assert native.sum_squares(out) == total


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan"), 3.4e38])
@pytest.mark.parametrize("where", [0, 15, 16, 70000])
def test_a_number_that_is_not_finite_shows_in_the_sum(bad, where):
    grad = torch.ones(70001)
    grad[where] = bad
    for isa in native.isa_supported():
        native.select_isa(isa)
        total = native.drain_(torch.empty(70001, dtype=torch.bfloat16), grad)
        assert not np.isfinite(total)  # 3.4e38 is finite, but rounds to infinity in bfloat16
        assert np.isfinite(native.drain_(torch.empty(70001), grad)) == (bad == 3.4e38)


def test_small_helpers_check_lengths_and_overlap():
    room = torch.zeros(100)
    with pytest.raises(ValueError, match="share 80 bytes"):
        native.copy_(room[:60], room[40:])
    with pytest.raises(ValueError, match="src has 40 bytes; dst needs 36"):
        native.copy_(room[:9], room[20:30])
    with pytest.raises(ValueError, match="grad has 5 elements; 4 are needed"):
        native.drain_(torch.zeros(4), torch.zeros(5))
    with pytest.raises(ValueError, match="overlap"):
        native.drain_(room.view(torch.bfloat16)[:100], room)
    native.copy_(room[:4], torch.arange(8, dtype=torch.int16))
    assert room[:4].view(torch.int16).tolist() == list(range(8))
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        x = torch.zeros(9, dtype=dtype)
        native.fill_nan_(x)
        assert x.isnan().all()


CHILD = """
import os, torch
from offloadz.runtime import native
os.environ["OFFLOADZ_ISA"] = "sse9"
try:
    native.isa()
except ValueError as error:
    print(error)
os.environ["OFFLOADZ_ISA"] = "baseline"
print(native.isa())
"""


def test_the_environment_forces_an_instruction_set_down():
    done = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, timeout=120)
    wanted = ["OFFLOADZ_ISA is 'sse9'; it must be one of baseline, avx2, avx512", "baseline"]
    assert done.stdout.splitlines() == wanted, done.stderr


@pytest.mark.skipif(len(native.isa_supported()) == 3, reason="this processor has every level")
def test_asking_for_more_than_the_processor_has_is_an_error():
    with pytest.raises(ValueError, match="but this processor has baseline"):
        native.select_isa(native.ISA_LEVELS[len(native.isa_supported())])
