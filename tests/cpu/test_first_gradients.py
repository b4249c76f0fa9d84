"""The first term of a gradient is written where it is to be, whatever lay there: as if it had been added to zeros."""

from __future__ import annotations

import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offloadz
from offloadz.model.body import Body
from offloadz.plan.shapes import ParamInfo, make_spec

WHERE = [dict.fromkeys(("parameters", "gradients", "optimizer_state"), tier) for tier in ("host", "disk")]


def body(module: nn.Module) -> tuple[Body, list[Tensor], list[Tensor]]:
    """A module as a block's, its weights, and a gradient slot full of something."""
    params = [ParamInfo(f"b.{name}", tuple(p.shape)) for name, p in module.named_parameters()]
    unit = make_spec(params, ["b"], [], [], dtype="float32").units[0]
    names = {(id(m), a): f"b.{n + '.' if n else ''}{a}" for n, m in module.named_modules() for a in m._parameters}
    sections = [torch.linspace(-1, 1, s.num_elements) for s in unit.sections]
    return Body(module, unit, names), sections, [torch.full_like(s, float("nan")) for s in sections]


def test_what_lay_there_does_not_count_and_zeros_are_positive() -> None:
    held, sections, slopes = body(nn.Linear(3, 2))
    touched: set[str] = set()
    leaves = held.leaves(sections, touched)
    with held.taking(leaves, slopes, adds=False):
        (leaves["b.weight"] * torch.tensor([[1.0, -2.0, -0.0]])).sum().backward()
    weight, bias = (held.views(slopes)[f"b.{name}"] for name in ("weight", "bias"))
    assert torch.equal(weight, torch.tensor([[1.0, -2.0, 0.0]] * 2)) and not weight.signbit()[:, 2].any()
    assert torch.equal(bias, torch.zeros(2)) and touched == {"b.weight"}
    again = held.leaves(sections, touched)
    with held.taking(again, slopes, adds=True):
        (again["b.weight"].sum() + again["b.bias"].sum()).backward()
    assert torch.equal(weight, torch.tensor([[2.0, -1.0, 1.0]] * 2)) and torch.equal(bias, torch.ones(2))


def test_a_table_inside_a_block_may_give_its_gradient_as_rows() -> None:
    rows = torch.tensor([[2, 0], [2, 2]])
    held, sections, slopes = body(nn.Embedding(4, 3, sparse=True))
    leaves = held.leaves(sections, set())
    with held.taking(leaves, slopes, adds=False):
        nn.functional.embedding(rows, leaves["b.weight"], sparse=True).sum().backward()
    assert torch.equal(held.views(slopes)["b.weight"], torch.tensor([1.0, 0.0, 3.0, 0.0])[:, None].expand(4, 3))


class Silent(torch.autograd.Function):
    """A product by a weight that answers with no gradient for it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad * ctx.saved_tensors[0], None


@pytest.mark.parametrize("adds", [False, True])
def test_an_answer_without_a_gradient_is_none(adds: bool) -> None:
    held, sections, slopes = body(nn.Embedding(3, 2))
    for slope in slopes:
        slope.fill_(4.0 if adds else float("nan"))
    touched: set[str] = set()
    leaves = held.leaves(sections, touched)
    with held.taking(leaves, slopes, adds=adds):
        Silent.apply(torch.ones(3, 2, requires_grad=True), leaves["b.weight"]).sum().backward()
    assert not touched and torch.equal(slopes[0], torch.full((6,), 4.0 * adds))


@pytest.mark.parametrize("fails", [False, True])
def test_a_slot_is_let_go_behind_a_backward(fails: bool) -> None:
    held, sections, slopes = body(nn.Linear(3, 2))
    leaves, slot = held.leaves(sections, set()), weakref.ref(slopes[0].untyped_storage())
    with suppress(InterruptedError), held.taking(leaves, slopes, adds=False):
        if fails:
            raise InterruptedError
    slopes.clear()
    assert slot() is None


class Turning(nn.Module):
    """A block of which every step uses one of two weights."""

    def __init__(self, turns: list[int]) -> None:
        super().__init__()
        self.one, self.two, self.turns = nn.Linear(8, 8), nn.Linear(8, 8), turns

    def forward(self, x: Tensor) -> Tensor:
        return x + (self.one, self.two)[self.turns[0]](x).tanh()


class Stack(nn.Module):
    def __init__(self, turns: list[int]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Turning(turns) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["x"]).square().mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize("micro", [1, 4])
@pytest.mark.parametrize("where", WHERE, ids=["host", "disk"])
def test_a_gradient_of_the_step_before_is_not_met_again(where: dict[str, str], micro: int, swap: Path) -> None:
    """A weight that a step does not use keeps none of its last gradient in the norm, and is not updated."""
    turns = [0]
    torch.manual_seed(0)
    model, plain = Stack(turns), Stack(turns)
    plain.load_state_dict(model.state_dict())
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, foreach=False)
    found, wanted = [], []
    with offloadz.offload(
        model, offloadz.AdamW(lr=1e-2), swap=swap, micro_batch_size=micro, batch_size=4, **where
    ) as r:
        for step in range(5):
            turns[0] = step % 2
            batch = {"x": torch.randn(4, 8, generator=torch.Generator().manual_seed(step))}
            r.step(batch, loss_fn=loss_of)
            found.append(r.report.grad_norm)
            optimizer.zero_grad(set_to_none=True)
            loss_of(plain, batch).backward()
            wanted.append(float(nn.utils.clip_grad_norm_(plain.parameters(), 1.0, foreach=False)))
            optimizer.step()
    assert found == pytest.approx(wanted, rel=1e-5)
