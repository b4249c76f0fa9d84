"""Results of products kept from forward to backward, the rest made again: the bits of recomputing all, and of none.

On one memory they stay where they are; on a device with memory of its own they go to the host and come back, where the
rehearsed device finds an edge too few.  What draws random numbers, changes a result in place, keeps tensors in ways of
its own or sorts tokens by expert is not to be noticed either.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from tiny_models import FAMILIES, Outcome, assert_same_bits, batches, tiny, train
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import offloadz
from offloadz.model import products
from offloadz.model.graphs import Keeping
from offloadz.model.products import Products
from offloadz.plan.errors import ConfigError
from offloadz.plan.left import GRAPH, PRODUCTS, multiplying_seats
from offloadz.plan.products import product_token_bytes
from offloadz.runtime.rehearsal import Rehearsal

KINDS = ("parameters", "gradients", "optimizer_state", "activations")
DISK, HOST = dict.fromkeys(KINDS, "disk"), dict.fromkeys(KINDS, "host")
STEPS = batches(2)


def ran(model: nn.Module, swap: Path, recompute: str, **how: Any) -> Outcome:
    """Two steps; where only what is cheap runs again, every block has to have left the results of its products."""
    how = {"slots": 2, "micro_batch_size": 2, **HOST, **how}
    with offloadz.offload(model, offloadz.AdamW(lr=1e-3), swap=swap, recompute=recompute, **how) as run:
        out = train(run, STEPS)
        assert not run.session.room.graphs
        if recompute == "cheap":
            seats = multiplying_seats(run.session.spec)
            assert seats and all(run.session.kept[seat] == PRODUCTS for seat in seats if seat in run.session.kept)
            assert all(run.stage.keeping._products[seat] > 0 for seat in seats)
    return out


@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_results_of_products_give_the_bits_of_recomputing(family: str, slots: int, swap: Path) -> None:
    dtype = torch.bfloat16 if slots == 3 else torch.float32
    wanted = ran(tiny(family), swap, "all", dtype=dtype)
    for where in (DISK, {"activations": "device", "sweeps": 2, "poison": True}):
        assert_same_bits(ran(tiny(family), swap, "cheap", slots=slots, dtype=dtype, **where), wanted, f"{where}")


@pytest.mark.parametrize("family", sorted(families.FAMILIES))
def test_every_family_has_the_same_bits(family: str, swap: Path) -> None:
    build = families.FAMILIES[family].build
    assert_same_bits(ran(build(), swap, "cheap"), ran(build(), swap, "all"), family)


@pytest.mark.parametrize("activations", ["host", "device", "disk"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_on_a_device_with_memory_of_its_own(family: str, activations: str, swap: Path) -> None:
    """There they go to the host, unless inputs stay on the device too."""
    build = families.FAMILIES[family].build
    wanted = ran(build(), swap, "all")
    for slots in (1, 2):
        how = {"activations": activations, "slots": slots, "poison": True, "sweeps": slots}
        found = ran(build(), swap, "cheap", device=Rehearsal(), **how)
        assert_same_bits(found, wanted if slots == 1 else ran(build(), swap, "all", sweeps=2), f"{how}")


@pytest.mark.parametrize("device", ["cpu", "rehearsal"])
def test_dropout_draws_the_same_masks(device: str, swap: Path) -> None:
    dropping = {"resid_pdrop": 0.2, "attn_pdrop": 0.2}
    how = {"seed": 3, "device": Rehearsal() if device == "rehearsal" else "cpu"}
    cheap, again = (ran(tiny("gpt2", **dropping).train(), swap, each, **how) for each in ("cheap", "all"))
    assert_same_bits(cheap, again)
    assert cheap.losses != ran(tiny("gpt2"), swap, "cheap").losses


@pytest.mark.parametrize("freeze", [["model.layers.1.*"], ["model.embed*", "model.layers.0.*"]])
def test_frozen_blocks(freeze: list[str], swap: Path) -> None:
    with offloadz.offload(tiny("llama"), swap=swap, freeze=freeze, recompute="cheap", device=Rehearsal()) as run:
        found = train(run, STEPS)
    with offloadz.offload(tiny("llama"), swap=swap, freeze=freeze, recompute="all") as run:
        assert_same_bits(found, train(run, STEPS), str(freeze))


class Hoards(torch.autograd.Function):
    """A product that keeps what it was given in ways of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.held, ctx.noise = (x, weight), torch.rand_like(x)
        return x @ weight.t() + (x * ctx.noise) @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.held
        return grad @ weight * (1 + ctx.noise), grad.t() @ (x * (1 + ctx.noise))


class Odd(nn.Module):
    """Changes results in place, some of them through a view, draws between products, and hoards."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width, bias=False)
        self.own = nn.Parameter(torch.randn(width, width) / width)
        self.mix = nn.Conv1d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        wide = self.up(x)
        wide[..., :5].mul_(2.0)
        wide = torch.relu_(wide)
        narrow = nn.functional.dropout(self.down(wide), 0.3, self.training)
        narrow.add_(x)
        own = Hoards.apply(narrow.flatten(0, 1), self.own).view_as(x)
        return x + self.mix(own.transpose(1, 2)).transpose(1, 2) / 4


def odd_losses(recompute: str, swap: Path, device: Any = "cpu") -> tuple[list[float], list[Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Odd() for _ in range(3)))
    inputs = torch.randn(2, 4, 7, 24)
    with offloadz.offload(
        model, offloadz.AdamW(lr=1e-2), swap=swap, recompute=recompute, micro_batch_size=2, device=device, poison=True
    ) as run:
        losses = [float(run.step({"x": x}, loss_fn=lambda m, b: m(b["x"]).square().mean())) for x in inputs]
        held = {view.unit.name: view.weight.clone() for view in run.session.parts()}
    return losses, list(held.values())


def test_a_block_of_ones_own_with_every_oddity(swap: Path) -> None:
    wanted = odd_losses("all", swap)
    for device in ("cpu", Rehearsal()):
        losses, held = odd_losses("cheap", swap, device)
        assert losses == wanted[0] and all(map(torch.equal, held, wanted[1])), device


class Counted(TorchDispatchMode):
    """Names of the operations that are really done."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.done.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))

    @property
    def dear(self) -> list[str]:
        return [name for name in self.done if name in products.DEAR]


def twice(block: nn.Module, x: Tensor, slot: Tensor | None = None) -> tuple[Products, Counted, Tensor, Tensor]:
    """A forward that is recorded, and the same again with its results at hand."""
    kept, count = Products("a block", [torch.default_generator], slot), Counted()
    with torch.random.fork_rng(devices=[]), kept.recording():
        first = block(x)
    with torch.random.fork_rng(devices=[]), count, kept.answering(slot):
        again = block(x)
    return kept, count, first, again


def test_no_product_is_done_again() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 7, 24, requires_grad=True)
    kept, count, first, again = twice(Odd(), x)
    assert count.dear == [] and "relu_" in count.done
    assert torch.equal(first, again)
    assert kept.nbytes >= 4 * 14 * (72 + 24 + 24 + 24 + 24)


def test_what_finds_no_room_is_done_again() -> None:
    torch.manual_seed(0)
    block, x = Odd(), torch.randn(2, 7, 24, requires_grad=True)
    whole = twice(block, x)[0].nbytes
    numbers = []
    for nbytes in (whole + 256, whole - 256, 14 * 72 * 4, 100):
        kept, count, first, again = twice(block, x, torch.zeros(nbytes, dtype=torch.uint8))
        assert torch.equal(first, again) and kept.nbytes == whole
        numbers.append(len(count.dear))
    assert numbers == [0, 1, 4, 5]


def test_what_draws_random_numbers_is_done_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else what is drawn behind it would be something else."""
    monkeypatch.setattr(products, "DEAR", (*products.DEAR, "rand_like"))
    torch.manual_seed(0)
    _, count, first, again = twice(nn.Sequential(Odd(), Odd()), torch.randn(2, 7, 24, requires_grad=True))
    assert torch.equal(first, again) and count.dear == ["rand_like"] * 2


def test_scores_of_attention_are_not_kept() -> None:
    query, key = torch.randn(2, 3, 40, 8), torch.randn(2, 3, 40, 8)
    scores: Any = lambda x: (x @ key.mT).softmax(-1) @ key  # noqa: E731
    kept, count, first, again = twice(scores, query)
    assert torch.equal(first, again) and count.dear == ["bmm"] and kept.nbytes == query.nbytes


class Fickle(nn.Module):
    """Does something else every time it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(8, 8), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        for _ in range(self.calls):
            x = self.linear(x)
        return x


@pytest.mark.parametrize("fewer", [False, True])
def test_a_block_that_does_other_things_the_second_time_is_an_error(fewer: bool) -> None:
    block = Fickle()
    block.calls = 2 * fewer
    kept = Products("blocks.1", [])
    with kept.recording():
        block(torch.ones(2, 8))
    block.calls = 0 if fewer else 1
    with (
        pytest.raises(RuntimeError, match=r"blocks\.1: its forward came to .*recompute = \"none\""),
        kept.answering(None),
    ):
        block(torch.ones(2, 8))


def test_graphs_for_the_last_results_for_those_before_and_nothing_else() -> None:
    """By what each takes: a room that is filled leaves less for those behind."""
    hidden, each, results = torch.zeros(10, 4), [20.0] * 6, dict.fromkeys(range(5), 8.0)

    def left(room: int, results_room: int, shared: bool) -> list[str]:
        keeping, held, found = Keeping(room, each, results_room, results, shared), [], []
        for seat in range(6):
            found.append(keeping.leaves(seat, hidden, held))
            one: Any = Products("", []) if found[-1] == PRODUCTS else type("", (), {})()
            one.nbytes = {GRAPH: 200, PRODUCTS: 80, "": 0}[found[-1]]
            held.append(one)
        return found

    assert left(1200, 1200, True) == [GRAPH] * 6
    assert left(600, 600, True) == [PRODUCTS] * 5 + [GRAPH]
    assert left(800, 800, True) == [PRODUCTS] * 4 + [GRAPH] * 2
    assert left(240, 240, True) == ["", "", PRODUCTS, PRODUCTS, PRODUCTS, ""]
    assert left(400, 240, False) == ["", "", PRODUCTS, PRODUCTS, GRAPH, GRAPH]
    assert left(-1, 1 << 62, False) == [PRODUCTS] * 5 + [""]


def test_beside_compiled_blocks_it_is_refused_by_name(swap: Path) -> None:
    with pytest.raises(ConfigError, match=r'recompute = "cheap" beside model\.kernels = "compile" is not built'):
        offloadz.offload(tiny("llama"), swap=swap, recompute="cheap", kernels="compile")


@pytest.fixture
def spoiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that holds anything holds what no sum gets rid of."""
    blank = torch.empty_strided
    monkeypatch.setattr(torch, "empty_strided", lambda *how, **more: blank(*how, **more).fill_(float("nan")))


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3", "mixtral"])
def test_what_nobody_reads_is_not_kept(family: str, swap: Path, spoiled: None) -> None:
    """And may come back as anything."""
    build = families.FAMILIES[family].build
    for device in ("cpu", Rehearsal()):
        assert_same_bits(ran(build(), swap, "cheap", device=device), ran(build(), swap, "all", device=device), family)


@pytest.mark.parametrize("device", ["cpu", "rehearsal"])
def test_a_plan_knows_what_is_not_kept(device: str, swap: Path) -> None:
    where = Rehearsal() if device == "rehearsal" else "cpu"
    with offloadz.offload(tiny("llama"), swap=swap, recompute="cheap", micro_batch_size=4, device=where) as run:
        run.step(STEPS[0])
        spec, placement = run.session.spec, run.session.placement
        for seat in multiplying_seats(spec):
            told, width = product_token_bytes(spec, seat, placement), spec.hidden_size * 4
            assert run.stage.keeping._products[seat] == pytest.approx(told, rel=0.02)
            assert product_token_bytes(spec, seat, replace(placement, opaque=True)) == told + width


class Later(nn.Module):
    """Saves what its last product gives, from its second call on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(8, 8), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = self.linear(x)
        return x + (y * y if self.calls > 1 else y)


def test_what_is_read_after_all_is_done_again(swap: Path, spoiled: None) -> None:
    found = []
    for recompute in ("all", "cheap"):
        torch.manual_seed(0)
        model = nn.Sequential(Later(), Later(), Later())
        with offloadz.offload(model, offloadz.AdamW(lr=1e-2), swap=swap, recompute=recompute) as run:
            loss = run.step({"x": torch.ones(2, 8)}, loss_fn=lambda m, b: m(b["x"]).square().mean())
            run.flush()
            found.append([loss, *(view.weight.clone() for view in run.session.parts())])
    assert all(map(torch.equal, *found)) and not any(each.isnan().any() for each in found[0])


class Hooked(nn.Module):
    """Puts what autograd saves away itself: nobody else sees what its backward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda y: y.clone(), lambda y: y):
            return x + self.linear(x).sigmoid()


def test_what_a_blocks_own_hooks_read_is_kept(swap: Path, spoiled: None) -> None:
    found = []
    for recompute in ("none", "cheap"):
        torch.manual_seed(0)
        with offloadz.offload(
            nn.Sequential(*(Hooked() for _ in range(3))), offloadz.AdamW(lr=1e-2), swap=swap, recompute=recompute
        ) as run:
            losses = [
                run.step({"x": torch.ones(2, 8)}, loss_fn=lambda m, b: m(b["x"]).square().mean()) for _ in range(2)
            ]
            run.flush()
            found.append([*losses, *(view.weight.clone() for view in run.session.parts())])
    assert all(map(torch.equal, *found)) and not any(each.isnan().any() for each in found[0])
