"""What is seen of a block's inside, beside its outputs, is what was computed there: values it asks for, hooks, buffers.

A forward that runs again for its graph leaves out products that no backward reads; memory that holds anything stands
for them, here what no sum gets rid of.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import offloadz
from offloadz.model.blocks import BlockSeat
from offloadz.model.unread import ALL

SMALL = 0.9
ASKING = ("number", "branch", "shape", "list", "array", "address")


class Block(nn.Module):
    """A last product, and who looks at what it gives; `late`: only from some step on."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.late = kind, False
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        if kind == "buffer":
            self.register_buffer("most", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(torch.tanh(self.up(x)))
        size = y.detach().abs().max()
        if self.kind == "number":
            return x + y * float(1 / (1 + size))
        if self.kind == "branch":
            return x + y * 0.5 if size < SMALL else x + y * 2
        if self.kind == "list" or (self.kind == "late" and self.late):
            return x + y * float(1 / (1 + y.detach().abs().flatten().tolist()[3]))
        if self.kind == "array":
            return x + y * float(1 / (1 + np.asarray(y.detach()).max()))
        if self.kind == "address":
            return x + y * float(1 / (1 + abs(ctypes.c_float.from_address(y.data_ptr()).value)))
        if self.kind == "shape":
            return x + y * (1 + len((y.detach() > 0).nonzero()))
        if self.kind == "buffer":
            self.most.copy_(torch.maximum(self.most, size))
        return x + y


def steps(kind: str, swap: Path, recompute: str) -> tuple[list[Any], list[int]]:
    """Losses, weights and what a hook and a buffer have seen; how many products of each block are read."""
    torch.manual_seed(0)
    model, seen, found = nn.Sequential(*(Block(kind) for _ in range(3))), {}, []

    def look(module: nn.Module, args: Any, out: Tensor) -> None:
        seen[id(module)] = out.detach().abs().max()

    for block in model if kind == "hook" else ():
        block.down.register_forward_hook(look)
    inputs = torch.randn(3, 4, 8)
    with offloadz.offload(model, offloadz.AdamW(lr=1e-2), swap=swap, recompute=recompute) as run:
        for number, x in enumerate(inputs):
            for block in model:
                block.late = number > 0
            found.append(run.step({"x": x}, loss_fn=lambda m, b: m(b["x"]).square().mean()))
            found += [value.clone() for value in (*seen.values(), *model.buffers())]
        run.flush()
        found += [view.weight.clone() for view in run.session.parts()]
        read = [seat.unread.num_read for seat in run.seats if isinstance(seat, BlockSeat)]
    return found, read


@pytest.mark.parametrize("recompute", ["all", "cheap"])
@pytest.mark.parametrize("kind", [*ASKING, "late", "hook", "buffer"])
def test_it_is_what_was_computed(kind: str, recompute: str, swap: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, _ = steps(kind, swap, "none")
    blank = torch.empty_strided
    monkeypatch.setattr(torch, "empty_strided", lambda *how, **more: blank(*how, **more).fill_(float("inf")))
    found, read = steps(kind, swap, recompute)
    assert len(found) == len(wanted) and all(map(torch.equal, found, wanted))
    asked = {**dict.fromkeys(ASKING, 2), "late": ALL} if recompute == "all" else {}
    assert read == [asked.get(kind, 0)] * 3
