"""Products that no backward reads are left out of a forward that runs again, and nobody notices.

The bits are those of kept graphs.  A block that at last saves something behind such a product, one with a backward of
its own or hooks that keep tensors where nobody sees them, and one that does other things from call to call are done
whole.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import families
import pytest
import torch
from tiny_models import Outcome, assert_same_bits, batches, tiny, train
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import offloadz
from offloadz.model import unread
from offloadz.model.blocks import BlockSeat
from offloadz.model.unread import ALL
from offloadz.plan.unread import unread_elements
from offloadz.runtime.rehearsal import Rehearsal

STEPS, BLOCKS = batches(3), 2


class Products(TorchDispatchMode):
    """Counts products that are done."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        done = all(x.device.type != "meta" for x in args if isinstance(x, Tensor))
        self.count += done and func.overloadpacket.__name__ in ("mm", "addmm", "bmm", "baddbmm")
        return func(*args, **(kwargs or {}))


def ran(model: nn.Module, swap: Path, recompute: str, **how: Any) -> tuple[Outcome, int, list[int]]:
    """What a few steps give, the products of the last one, and how many of each block's are read."""
    how = {"micro_batch_size": 2, "recompute": recompute, **how}
    with offloadz.offload(model, offloadz.AdamW(lr=1e-3), swap=swap, **how) as run:
        out = train(run, STEPS[:-1])
        with Products() as counted:
            out.losses.append(float(run.step(STEPS[-1])))
        out.weights = train(run, []).weights
        read = [seat.unread.num_read for seat in run.seats if isinstance(seat, BlockSeat)]
    return out, counted.count, read


@pytest.mark.parametrize("family", sorted(families.FAMILIES))
def test_every_family_has_the_bits_of_kept_graphs(family: str, swap: Path) -> None:
    build = families.FAMILIES[family].build
    assert_same_bits(ran(build(), swap, "all")[0], ran(build(), swap, "none")[0], family)


@pytest.mark.parametrize("family", sorted(families.FAMILIES))
def test_a_plan_knows_what_is_left_out(family: str, swap: Path) -> None:
    with offloadz.offload(families.FAMILIES[family].build(), swap=swap, recompute="all") as run:
        run.step(STEPS[0])
        blocks = [seat for seat in run.seats if isinstance(seat, BlockSeat) and seat.kind == "block"]
        left_out = [len(seat.unread.ops) - seat.unread.num_read for seat in blocks]
        told = [unread_elements(run.session.spec)[seat.unit] > 0 for seat in blocks]
    assert left_out == [int(each) for each in told] and len(blocks) == BLOCKS


def test_the_last_product_of_a_llama_is_not_done_again(swap: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, fewer, read = ran(tiny("llama"), swap, "all")
    monkeypatch.setattr(unread, "PRODUCTS", ())
    whole, every, _ = ran(tiny("llama"), swap, "all")
    assert_same_bits(found, whole)
    assert read[:BLOCKS] == [6] * BLOCKS
    assert every - fewer == BLOCKS * 2  # one for each micro-batch


def test_on_a_device_with_memory_of_its_own(swap: Path) -> None:
    found, _, read = ran(tiny("llama"), swap, "all", device=Rehearsal(), poison=True)
    assert_same_bits(found, ran(tiny("llama"), swap, "none", device=Rehearsal())[0])
    assert read[:BLOCKS] == [6] * BLOCKS


class Doubled(torch.autograd.Function):
    """Keeps its input where autograd does not see it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.x = x
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * ctx.x * grad


class Block(nn.Module):
    """A product, and what `kind` says behind it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.calls = kind, 0
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = self.linear(x)
        if self.kind == "own":
            return x + Doubled.apply(y)
        if self.kind == "hooked":
            with torch.autograd.graph.save_on_cpu():
                return x + y * y
        if self.kind == "later" and self.calls > 6:
            return x + y * y
        if self.kind == "more" and self.calls > 6:
            return x + self.linear(y)
        return x + y


class Stack(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(kind) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize(("kind", "read"), [("own", ALL), ("hooked", ALL), ("later", ALL), ("more", ALL), ("plain", 0)])
def test_a_block_that_reads_it_after_all_is_done_whole(kind: str, read: int, swap: Path) -> None:
    def steps(recompute: str) -> tuple[list[float], list[int]]:
        """Every forward of a step counts its calls anew, so that both ways of running see the same."""
        losses = []
        with offloadz.offload(Stack(kind), offloadz.AdamW(lr=1e-2), swap=swap, recompute=recompute) as run:
            for step in range(4):
                for block in run.model.blocks:
                    block.calls = 100 * (step > 1)
                batch = {"x": torch.linspace(-1, 1, 32).view(2, 16)}
                losses.append(float(run.step(batch, loss_fn=lambda m, b: m(b["x"]).square().mean())))
            found = [seat.unread.num_read for seat in run.seats if isinstance(seat, BlockSeat)]
        return losses, found

    (found, numbers), (kept, _) = steps("all"), steps("none")
    assert found == kept
    assert numbers == [read] * 3
