"""Graphs kept from forward to backward: the same bits as recomputing, wherever weights and inputs lie.  Trap 18.

A kept graph must read its weights from wherever the backward's fetch brought them, never from the slot of the forward,
which another block has by then (poisoned slots show it), and must be gone with its step.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import families
import pytest
import torch
from tiny_models import FAMILIES, Outcome, assert_same_bits, batches, start_of, tiny, train, weights
from torch import Tensor, nn

import offloadz
from offloadz.model.graphs import Graph, Keeping, Saved
from offloadz.plan.errors import ConfigError

KINDS = ("parameters", "gradients", "optimizer_state", "activations")
DISK: dict[str, Any] = dict.fromkeys(KINDS, "disk")
STEPS = batches(3)


def ran(model: nn.Module, swap: Path, recompute: str, room_bytes: int | None = None, **how: Any) -> Outcome:
    """Three steps; `room_bytes`: what graphs may take instead of what the plan says."""
    how = {"slots": 2, "micro_batch_size": 2, **DISK, **how}
    with offloadz.offload(model, offloadz.AdamW(lr=1e-3), swap=swap, recompute=recompute, **how) as run:
        if room_bytes is not None:
            run.stage.keeping.room_bytes = room_bytes
        out = train(run, STEPS)
        assert not run.session.room.graphs
    return out


@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_kept_graphs_have_the_bits_of_recomputed_ones(family: str, slots: int, swap: Path) -> None:
    dtype = torch.bfloat16 if slots == 3 else torch.float32
    wanted = ran(tiny(family), swap, "all", **dict.fromkeys(KINDS, "host"), dtype=dtype)
    for where in ({}, {"parameters": "host"}, {"activations": "device", "sweeps": 2}):
        found = ran(tiny(family), swap, "none", slots=slots, dtype=dtype, poison=True, **where)
        assert_same_bits(found, wanted, f"slots {slots}, {where}")


@pytest.mark.parametrize("family", sorted(families.FAMILIES))
def test_every_family_has_the_same_bits(family: str, swap: Path) -> None:
    """On this machine; kernels that differ with and without gradients would keep them within rounding only."""
    build = families.FAMILIES[family].build
    assert_same_bits(ran(build(), swap, "none"), ran(build(), swap, "all"), family)


def test_dropout_draws_the_same_masks(swap: Path) -> None:
    dropping = {"resid_pdrop": 0.2, "attn_pdrop": 0.2}
    kept, again = (ran(tiny("gpt2", **dropping).train(), swap, how, seed=3) for how in ("none", "all"))
    assert_same_bits(kept, again)
    assert kept.losses != ran(tiny("gpt2"), swap, "none").losses


@pytest.mark.parametrize("freeze", [["model.layers.1.*"], ["model.embed*", "model.layers.0.*"], ["*norm*"]])
def test_frozen_blocks(freeze: list[str], swap: Path) -> None:
    kept, again = (ran(tiny("llama"), swap, how, freeze=freeze, poison=True) for how in ("none", "all"))
    assert_same_bits(kept, again, str(freeze))


def test_outputs_beside_the_hidden_state(swap: Path) -> None:
    """Router logits, recorded inside the blocks, with a gradient of their own."""
    outcomes = []
    for how in ("none", "all"):
        model = families.FAMILIES["mixtral"].build(output_router_logits=True, router_aux_loss_coef=0.5)
        with offloadz.offload(model, offloadz.AdamW(lr=1e-3), swap=swap, recompute=how, **DISK) as run:
            outcomes.append(train(run, STEPS, loss_fn=lambda m, b: m(**b).loss))
    assert_same_bits(*outcomes)


def test_where_there_is_room_for_some_the_last_keep_theirs(swap: Path) -> None:
    wanted = ran(tiny("llama", num_hidden_layers=4), swap, "all")
    seen: set[int] = set()
    for room_bytes in (0, 150_000, 500_000, 900_000, 1 << 40):
        model = tiny("llama", num_hidden_layers=4)
        with offloadz.offload(model, offloadz.AdamW(lr=1e-3), swap=swap, micro_batch_size=2, **DISK) as run:
            run.stage.keeping.room_bytes = room_bytes
            found = train(run, STEPS)
            kept = sorted(seat for seat, keeps in run.session.kept.items() if keeps)
        assert kept == list(range(len(run.session.spec.seats)))[len(run.session.spec.seats) - len(kept) :]
        seen.add(len(kept))
        assert_same_bits(found, wanted, f"{room_bytes} bytes, {len(kept)} graphs")
    assert len(seen) >= 4, f"numbers of kept graphs {seen}; the test shows little"


def test_graphs_never_take_more_than_their_room(swap: Path) -> None:
    """Even where the plan is wrong about them: the first true size takes its place."""
    model, room_bytes, most = tiny("llama", num_hidden_layers=6), 250_000, [0]
    with offloadz.offload(model, offloadz.AdamW(lr=1e-3), swap=swap, **DISK) as run:
        run.stage.keeping = Keeping(room_bytes, [each / 50 for each in run.stage.keeping._each])
        learn = run.stage.learn

        def watched(*how: Any) -> None:
            most[0] = max(most[0], sum(graph.nbytes for graph in run.session.room.graphs.values()))
            learn(*how)

        run.stage.learn = watched  # type: ignore[method-assign]
        run.step(STEPS[0])
        first, most[0] = most[0], 0
        run.step(STEPS[1])
        second = most[0]
        run.stage.keeping.room_bytes = 1 << 40
        run.step(STEPS[2])
    assert first < 400_000 < most[0], "there was room for all; the test shows nothing"
    assert 0 < second <= room_bytes


@pytest.mark.parametrize("recompute", ["none", "all"])
def test_two_forwards_before_one_backward(recompute: str, swap: Path) -> None:
    """And an evaluation in between, and a second step after them."""
    model = tiny("llama")
    plain = tiny("llama")
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=1e-2)

    def preference(model: nn.Module, one: Tensor, other: Tensor) -> Tensor:
        first = model(**one, use_cache=False).logits.log_softmax(-1)[..., 0].sum()  # type: ignore[arg-type]
        with torch.no_grad():
            model(**STEPS[2], use_cache=False)
        second = model(**other, use_cache=False).logits.log_softmax(-1)[..., 0].sum()  # type: ignore[arg-type]
        return -nn.functional.logsigmoid((first - second) / 100)

    with offloadz.offload(
        model, offloadz.AdamW(lr=1e-3), swap=swap, recompute=recompute, max_grad_norm=0.0, slots=2, **DISK
    ) as run:
        for _ in range(2):
            run.backward(preference(run.model, *STEPS[:2]))  # type: ignore[arg-type]
            run.update()
            optimizer.zero_grad()
            preference(plain, *STEPS[:2]).backward()  # type: ignore[arg-type]
            optimizer.step()
        found = weights(run)
    for name, wanted in start_of(plain).items():
        torch.testing.assert_close(found[name], wanted, rtol=0, atol=2e-6, msg=name)


@pytest.mark.parametrize("recompute", ["none", "all"])
def test_a_second_backward_and_gradients_of_gradients_are_refused_by_name(recompute: str, swap: Path) -> None:
    batch = STEPS[0]
    with offloadz.offload(tiny("llama"), offloadz.AdamW(lr=1e-3), swap=swap, recompute=recompute) as run:

        def twice(model: nn.Module, batch: Any) -> Tensor:
            loss = model(**batch).loss
            loss.backward(retain_graph=True)
            return loss  # type: ignore[no-any-return]

        def slope(model: nn.Module, batch: Any) -> Tensor:
            embedded = torch.randn(4, 24, 48, requires_grad=True)
            loss = model(inputs_embeds=embedded, labels=batch["labels"]).loss
            return torch.autograd.grad(loss, embedded, create_graph=True)[0].square().sum()

        def by_tokens(model: nn.Module, batch: Any) -> Tensor:
            logp = offloadz.token_logprobs(model, batch)
            logp.sum().backward(retain_graph=True)
            return -logp.sum()

        for loss_fn, said in ((twice, "retain_graph=True"), (slope, "create_graph=True"), (by_tokens, "retain_graph")):
            with pytest.raises(RuntimeError, match=said):
                run.step(batch, loss_fn=loss_fn)
            assert not run.session.room.graphs
        wanted = ran(tiny("llama"), swap, recompute, **dict.fromkeys(KINDS, "host"), micro_batch_size=0)
        assert_same_bits(train(run, STEPS), wanted, "steps that failed left a trace")


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("again", ["retain_graph", "create_graph"])
def test_whole_logits_and_a_lookup_alone_serve_one_backward_and_say_whose(again: str, swap: Path) -> None:
    ids = STEPS[0]["input_ids"]
    with offloadz.offload(tiny("llama"), offloadz.AdamW(lr=1e-3), swap=swap) as run:

        def twice(out: Tensor) -> Tensor:
            out.sum().backward(**{again: True})
            return out.sum()

        asked = {
            "lm_head": lambda model, _: twice(model(input_ids=ids, use_cache=False).logits),
            "model.embed_tokens": lambda model, _: twice(model.get_input_embeddings()(ids)),
        }
        for name, loss_fn in asked.items():
            with pytest.raises(RuntimeError, match=f"^{name}: .*{again}=True"):
                run.step(STEPS[0], loss_fn=loss_fn)
        wanted = ran(tiny("llama"), swap, "auto", **dict.fromkeys(KINDS, "host"), micro_batch_size=0)
        assert_same_bits(train(run, STEPS), wanted, "steps that failed left a trace")


@pytest.mark.parametrize("recompute", ["none", "all"])
def test_what_a_given_up_step_left_is_gone_and_says_so(recompute: str, swap: Path) -> None:
    with offloadz.offload(tiny("llama"), offloadz.AdamW(lr=1e-3), swap=swap, recompute=recompute) as run:
        loss = run.model(**STEPS[0]).loss
        kept = {run.session.spec.seats[seat].kind for seat, left in run.session.kept.items() if left}
        assert run.session.room.graphs and ("block" in kept) == (recompute == "none")
        run.step(STEPS[1])
        assert not run.session.room.graphs
        with pytest.raises(RuntimeError, match="went with its step"):
            run.backward(loss)
        run.step(STEPS[2])


def test_an_exception_in_a_block_lets_all_graphs_go(swap: Path) -> None:
    wanted = ran(tiny("llama"), swap, "all", **dict.fromkeys(KINDS, "host"), micro_batch_size=0)
    with offloadz.offload(tiny("llama"), offloadz.AdamW(lr=1e-3), swap=swap, recompute="none", **DISK) as run:
        hook = run.model.model.layers[1].mlp.register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run.step(STEPS[0])
        assert not run.session.room.graphs
        hook.remove()
        assert_same_bits(train(run, STEPS), wanted)


class Rewrites(nn.Module):
    """Changes what autograd has saved: an error in plain PyTorch too."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).exp()
        return y.mul_(2.0) + x


def test_a_saved_tensor_changed_in_place_is_an_error(swap: Path) -> None:
    model = nn.Sequential(Rewrites(), Rewrites())
    with (
        offloadz.offload(model, offloadz.AdamW(), swap=swap, recompute="none") as run,
        pytest.raises(RuntimeError, match="changed in place"),
    ):
        run.step({"x": torch.ones(2, 8)}, loss_fn=lambda m, b: m(b["x"]).sum())


def test_weights_are_told_by_their_storage() -> None:
    """A place is kept of any view of a weight, and nothing of it counts; what only looks alike is kept as it is."""
    slot, other = torch.zeros(64, dtype=torch.uint8), torch.arange(64, dtype=torch.uint8)
    section, hidden = slot.view(torch.float32), torch.ones(4)
    saved = Saved("a block", [section[4:]], hidden)
    weight = section[4:12].view(2, 4).t()
    place = saved.pack(weight)
    assert saved.nbytes == hidden.nbytes
    same, mine = saved.pack(hidden), saved.pack(torch.ones(2, 4))
    assert saved.unpack(same).data_ptr() == hidden.data_ptr() and saved.nbytes == hidden.nbytes + 32
    saved.sections = [other.view(torch.float32)[2:14]]
    moved = saved.unpack(place)
    assert torch.equal(moved, other.view(torch.float32)[2:10].view(2, 4).t()) and moved.stride() == weight.stride()
    assert torch.equal(saved.unpack(mine), torch.ones(2, 4))


def test_a_graph_that_nobody_runs_backward_is_freed() -> None:
    import gc
    import weakref

    x = torch.ones(3, requires_grad=True)
    saved = Saved("a block", [], x)
    with saved.hooks():
        y = x.exp().sin()
    graph = Graph(x, {}, saved)
    (out,) = graph.close([y])
    gone = weakref.ref(saved)  # the nodes hold on to it
    assert out.grad_fn is None
    gc.disable()
    try:
        del saved, graph, y
        assert gone() is None
    finally:
        gc.enable()


def test_what_recompute_may_say(swap: Path) -> None:
    with pytest.raises(ConfigError, match="recompute = 'some'; needed: one of auto, all, none"):
        offloadz.offload(tiny("llama"), swap=swap, recompute="some")
