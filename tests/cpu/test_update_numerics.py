"""What the numbers of the update are worth: against torch and double precision, and over many steps of nothing.

Case G07, kind K07 (numerics of the CPU optimizer).
"""

import numpy as np
import pytest
import torch

from offloadz.runtime import native

COUNT = 8009


def split(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    weight, low = torch.empty(master.numel(), dtype=torch.bfloat16), torch.empty(master.numel(), dtype=torch.int16)
    native.split_master_(weight, low, master)
    return weight, low


def join(weight: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    master = torch.empty(weight.numel())
    native.join_master_(master, weight, low)
    return master


def moments_of(kind: str, count: int) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor | None, ...]]:
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.uint8}[kind]
    scales = tuple(torch.zeros(-(-count // native.BLOCK)) if kind == "int8" else None for _ in range(2))
    return tuple(torch.zeros(count, dtype=dtype) for _ in range(2)), scales


def grad_of(step: int, count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    size = 10 ** (3 * torch.rand(count, generator=torch.Generator().manual_seed(0)) - 4)
    return (torch.randn(count, generator=generator) * size).bfloat16()


def in_double(start: torch.Tensor, num_steps: int, lr: float, betas: tuple[float, float], eps: float, decay: float):
    """AdamW in double precision, with constants as the formulas write them."""
    p, m, v = start.double(), torch.zeros(len(start)).double(), torch.zeros(len(start)).double()
    for step in range(1, num_steps + 1):
        g = grad_of(step, len(start)).double()
        p = p * (1 - lr * decay)
        m, v = betas[0] * m + (1 - betas[0]) * g, betas[1] * v + (1 - betas[1]) * g * g
        p = p - lr / (1 - betas[0] ** step) * m / ((v / (1 - betas[1] ** step)).sqrt() + eps)
    return p, m, v


@pytest.mark.parametrize("decay", [0.0, 2.0**-4])
def test_two_hundred_steps_are_as_exact_as_torchs(decay):
    """lr 1e-4 on weights of size 0.05.  The distance to torch is single roundings, below 1e-7 (found: 2.2e-8 relative);
    the distance of both to double precision is that of rounding a weight 200 times.  With decay it is 1.3e-6 for both:
    w x (1 - 2^-17) rounds a weight the same way for hundreds of steps.  The second moment is as exact as float32 lets
    it be: 1 - beta2 is formed in double (formed in float it would be off by 1.3e-5)."""
    lr, betas, eps = 2.0**-13, (0.9, 0.999), 1e-8
    start = torch.randn(COUNT, generator=torch.Generator().manual_seed(3)) * 0.05
    weight, low = split(start)
    moments, scales = moments_of("fp32", COUNT)
    parameter = torch.nn.Parameter(start.clone())
    theirs = torch.optim.AdamW([parameter], lr=lr, betas=betas, eps=eps, weight_decay=decay, foreach=False)
    settings = {"lr": lr, "beta1": betas[0], "beta2": betas[1], "eps": eps, "weight_decay": decay, "threads": 2}
    for step in range(1, 201):
        grad = grad_of(step, COUNT)
        parameter.grad = grad.float()
        theirs.step()
        native.update_("adam", weight, low, moments, scales, grad, step=step, **settings)
    p, m, v = in_double(start, 200, lr, betas, eps, decay)
    master, torchs = join(weight, low).double(), parameter.detach().double()
    ours_off, torch_off = (master - p).norm() / p.norm(), (torchs - p).norm() / p.norm()
    assert (master - torchs).norm() / torchs.norm() < 1e-7
    assert ours_off < (2e-6 if decay else 5e-7)
    assert ours_off <= 1.01 * torch_off
    assert ((moments[1] - v) / v).abs().max() < 4e-6
    assert ((moments[0] - m).norm() / m.norm()) < 1e-6
    assert torch.equal(weight, ties_away(master.float()))


def ties_away(master: torch.Tensor) -> torch.Tensor:
    bits = master.numpy().view(np.uint32).astype(np.uint64)
    return torch.from_numpy(((bits + 0x8000) >> 16).astype(np.uint16).view(np.int16)).view(torch.bfloat16)


@pytest.mark.parametrize("kind", ["fp32", "bf16", "int8"])
def test_the_weight_is_its_master_rounded_to_nearest(kind):
    start = torch.randn(COUNT, generator=torch.Generator().manual_seed(4))
    weight, low = split(start)
    moments, scales = moments_of(kind, COUNT)
    settings = {"lr": 3e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "threads": 2}
    for step in range(1, 21):
        native.update_("adam", weight, low, moments, scales, grad_of(step, COUNT), step=step, **settings)
        assert torch.equal(weight, ties_away(join(weight, low)))
    assert ((join(weight, low) - start).abs() > 1e-3).float().mean() > 0.9


@pytest.mark.parametrize("kind", ["fp32", "bf16", "int8"])
def test_twenty_thousand_steps_of_decay_follow_their_formula(kind):
    """Element by element: each of 20,000 products rounds by half a unit at most, at random."""
    count, num_steps, lr, decay = 512, 20_000, 2.0**-10, 2.0**-4
    start = torch.randn(count, generator=torch.Generator().manual_seed(5))
    weight, low = split(start)
    moments, scales = moments_of(kind, count)
    grad = torch.zeros(count, dtype=torch.bfloat16)
    settings = {"lr": lr, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": decay, "threads": 1}
    for step in range(1, num_steps + 1):
        native.update_("adam", weight, low, moments, scales, grad, step=step, **settings)
    wanted = start.double() * (1 - lr * decay) ** num_steps
    off = ((join(weight, low).double() - wanted) / wanted).abs()
    assert off.max() < num_steps * 2.0**-24  # all roundings one way; found: a fiftieth of it
    assert off.mean() < 20 * 2.0**-24 * num_steps**0.5
    assert wanted.abs().mean() < 0.4 * start.abs().mean()


@pytest.mark.parametrize(("kind", "most"), [("bf16", 0.02), ("int8", 0.15)])
def test_rounded_moments_stay_near_exact_ones(kind, most):
    """The distance moved in 200 steps, against float32 moments, for gradients over three decades and tails."""
    ends = []
    start = torch.zeros(COUNT)
    for format_ in ("fp32", kind):
        weight, (moments, scales) = start.clone(), moments_of(format_, COUNT)
        settings = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "threads": 2}
        for step in range(1, 201):
            native.update_("adam", weight, None, moments, scales, grad_of(step, COUNT), step=step, **settings)
        ends.append(weight)
    assert (ends[1] - ends[0]).norm() < most * ends[0].norm()
    assert abs(float(ends[1].norm() / ends[0].norm()) - 1) < 0.02


@pytest.mark.parametrize(("rule", "maker"), [
    ("adam", lambda p: torch.optim.Adam([p], lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, foreach=False)),
    ("sgd", lambda p: torch.optim.SGD([p], lr=1e-3, momentum=0.9, weight_decay=0.1, foreach=False)),
])  # fmt: skip
def test_other_rules_are_torchs(rule, maker):
    start = torch.randn(COUNT, generator=torch.Generator().manual_seed(6))
    parameter, weight = torch.nn.Parameter(start.clone()), start.clone()
    theirs, (moments, scales) = maker(parameter), moments_of("fp32", COUNT)
    kept = 1 if rule == "sgd" else 2
    settings = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "threads": 2}
    settings |= {"momentum": 0.9 if rule == "sgd" else 0.0, "decoupled": False}
    for step in range(1, 51):
        grad = grad_of(step, COUNT).float()
        parameter.grad = grad
        theirs.step()
        native.update_(rule, weight, None, moments[:kept], scales[:kept], grad, step=step, **settings)
    moved = (parameter.detach() - start).norm()
    assert (weight - parameter.detach()).norm() < 1e-4 * moved


def test_lion_is_its_paper():
    """Algorithm 2 of Chen et al. 2023, written out in double precision."""
    start = torch.randn(COUNT, generator=torch.Generator().manual_seed(7))
    weight, moment = start.clone(), torch.zeros(COUNT)
    p, m, lr, b1, b2, decay = start.double(), torch.zeros(COUNT).double(), 2.0**-10, 0.9, 0.99, 0.125
    for step in range(1, 51):
        grad = grad_of(step, COUNT).float()
        c = b1 * m + (1 - b1) * grad.double()
        p = p - lr * (c.sign() + decay * p)
        m = b2 * m + (1 - b2) * grad.double()
        settings = {"lr": lr, "beta1": b1, "beta2": b2, "weight_decay": decay, "threads": 2}
        native.update_("lion", weight, None, (moment,), (None,), grad, step=step, **settings)
    assert (weight - p).abs().max() < 1e-4, "no sign differs"
    assert (weight - p).norm() < 1e-5 * (p - start).norm()
