"""PyTorch's own checkpointing inside a block runs again with the block's weights, and to the same bits; around blocks
it would be a second call of them, and is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import offloadz

Call = Callable[..., Tensor]


def plainly(run: Call, x: Tensor) -> Tensor:
    return run(x)


def without_reentry(run: Call, x: Tensor) -> Tensor:
    return checkpoint(run, x, use_reentrant=False)  # type: ignore[no-any-return]


def with_reentry(run: Call, x: Tensor) -> Tensor:
    return checkpoint(run, x, use_reentrant=True)  # type: ignore[no-any-return]


class Block(nn.Module):
    """Its inner part, with dropout, is called as `inside` says."""

    def __init__(self, inside: Any) -> None:
        super().__init__()
        self.inside = inside
        self.up, self.down, self.last = nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(16, 16)

    def inner(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.dropout(torch.tanh(self.up(x)), 0.1))  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        return x + self.last(torch.sin(self.inside(self.inner, x)))  # type: ignore[no-any-return]


class Stack(nn.Module):
    def __init__(self, inside: Call, around: Call) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.around = around
        self.first = nn.Linear(8, 16)
        self.blocks = nn.ModuleList(Block(inside) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = self.around(block, x)
        return x


def steps(swap: Path, inside: Call = plainly, around: Call = plainly, **how: Any) -> list[Tensor]:
    """Losses and weights."""
    inputs, found = torch.linspace(-1, 1, 480).view(3, 4, 5, 8), []
    with offloadz.offload(Stack(inside, around).train(), offloadz.AdamW(lr=1e-2), swap=swap, **how) as run:
        for x in inputs:
            found.append(run.step({"x": x}, loss_fn=lambda m, b: m(b["x"]).square().mean()))
        run.flush()
        return found + [view.weight.clone() for view in run.session.parts()]


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("recompute", ["none", "all", "cheap"])
@pytest.mark.parametrize("inside", [without_reentry, with_reentry])
def test_inside_a_block_it_changes_no_bit(inside: Call, recompute: str, swap: Path) -> None:
    """Also where the slot of the forward went to other blocks before the backward came."""
    wanted = steps(swap, recompute="none")
    found = steps(swap, inside, recompute=recompute, poison=True, slots=1, parameters="disk")
    assert len(found) == len(wanted) and all(map(torch.equal, found, wanted))


def test_around_blocks_it_is_refused_where_it_runs_them_again(swap: Path) -> None:
    with pytest.raises(offloadz.ConfigError, match=r"^blocks\.2: called again in the middle of a backward"):
        steps(swap, around=with_reentry)
    assert all(map(torch.equal, steps(swap, around=without_reentry), steps(swap))), "it has nothing to run again"
