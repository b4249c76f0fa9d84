"""Case G11, kind K11: parameters that are not used once per step.

Layers used in some steps or never, parameters and experts without a gradient, frozen parts, weights of two owners,
blocks with more than one input and output, groups of their own: all equal to the plain loop, nothing left behind, and
what has no gradient has no update and no state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from odd_models import Experts, Odd, Pair, held, mean_loss, odd_batches
from reference import plain_run
from tiny_models import (
    Outcome,
    assert_close,
    assert_same_weights,
    batches,
    start_of,
    tiny,
    train,
    weights,
    whole_tensors,
)
from torch import nn

import offloadz

DISK = {"parameters": "disk", "gradients": "disk", "optimizer_state": "disk", "activations": "disk", "slots": 2}
STEPS = odd_batches(5)


def offloaded(model: nn.Module, swap: Path, **how: Any) -> offloadz.Run:
    return offloadz.offload(model, how.pop("optimizer", offloadz.AdamW(lr=1e-3)), swap=swap, **{**DISK, **how})


def compare(make: Callable[[], nn.Module], swap: Path, micro: int = 4, **how: Any) -> tuple[Outcome, dict[str, int]]:
    """Five steps beside the plain loop; returns the outcome and the number of updates per parameter."""
    wanted = plain_run(make(), STEPS, micro_rows=micro)
    with offloaded(make(), swap, micro_batch_size=micro, **how) as run:
        found = train(run, STEPS, loss_fn=mean_loss)
        counts = dict(run.session.steps)
    assert_close(found, wanted, start_of(make()))
    return found, counts


def conditional() -> Odd:
    model = Odd()
    model.skipped = (1,)
    return model


def test_a_layer_that_runs_on_odd_steps_only(swap: Path) -> None:
    """Ten steps with evaluations of both forms in between; the guess about the next step is wrong every time."""
    steps = odd_batches(10)
    wanted = plain_run(conditional(), steps)
    with offloaded(conditional(), swap) as run:
        found, before = Outcome(), {}
        for index, batch in enumerate(steps):
            found.losses.append(float(run.step(batch, loss_fn=mean_loss)))
            found.norms.append(run.report.grad_norm)
            with torch.no_grad():
                for odd in (0, 1, 0)[: index % 4]:
                    run.model(input_ids=batch["input_ids"], odd=torch.full((4,), odd))
            if index in (1, 9):
                before = before or held(run)
                assert held(run) == before
        found.weights = weights(run)
        counts = run.session.steps
        assert {counts[n] for n in counts if n.startswith("layers.1.")} == {5}
        assert {counts[n] for n in counts if not n.startswith("layers.1.")} == {10}
    assert_close(found, wanted, start_of(conditional()), moved=1e-3)


@pytest.mark.parametrize("unused", [0, 2, 3])
def test_a_layer_that_never_runs_is_never_updated(unused: int, swap: Path) -> None:
    def make() -> Odd:
        model = Odd()
        model.unused = (unused,)
        return model

    found, counts = compare(make, swap)
    still = [n for n in found.weights if n.startswith(f"layers.{unused}.")]
    assert still and not set(still) & set(counts)
    start = start_of(make())
    assert_same_weights({n: found.weights[n] for n in still}, {n: start[n] for n in still})


def test_the_last_layer_of_a_real_family_is_never_used(swap: Path) -> None:
    def make() -> nn.Module:
        model = tiny("llama", num_hidden_layers=3)
        model.config.num_hidden_layers = 2
        return model

    steps = batches(5)
    wanted = plain_run(make(), steps)
    with offloaded(make(), swap) as run:
        found = train(run, steps)
        assert not [n for n in run.session.steps if ".layers.2." in n]
    assert_close(found, wanted, start_of(make()))


@pytest.mark.parametrize("micro", [4, 2])
def test_a_parameter_that_its_block_never_uses(micro: int, swap: Path) -> None:
    """No gradient: no update, no decay, no state; as torch has it."""
    with offloaded(Odd(spare=True), swap, micro_batch_size=micro) as run:
        train(run, STEPS, loss_fn=mean_loss)
        names = [n for n in run.session.steps if n.endswith("spare")]
        state = {n: float(t.abs().sum()) for n, t in whole_tensors(run, "exp_avg").items()}
    assert not names
    assert {n: s for n, s in state.items() if n.endswith("spare")} == {f"layers.{i}.spare": 0.0 for i in range(4)}
    assert all(s > 0 for n, s in state.items() if not n.endswith("spare"))
    found, _ = compare(lambda: Odd(spare=True), swap, micro)
    assert torch.equal(found.weights["layers.2.spare"], Odd(spare=True).get_parameter("layers.2.spare"))


FROZEN = {
    "a block": ["layers.1.*"],
    "the embedding": ["embed.*"],
    "all below": ["embed.*", "first_norm.*", "layers.0.*", "layers.1.*"],
    "norms in blocks": ["layers.*.norm.*"],
    "the head": ["head.*"],
    "all but the norm": ["embed.*", "first_norm.*", "layers.*", "head.*"],
}


@pytest.mark.parametrize("what", FROZEN)
def test_frozen_parts(what: str, swap: Path) -> None:
    """Equal to the plain loop with the same parts frozen; frozen weights are never written again and keep no state."""
    from fnmatch import fnmatchcase

    def frozen(name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in FROZEN[what])

    plain = Odd()
    for name, param in plain.named_parameters():
        param.requires_grad_(not frozen(name))
    start = start_of(plain)
    wanted = plain_run(plain, STEPS)
    with offloaded(Odd(), swap, freeze=FROZEN[what]) as run:
        written = counted_writes(run)
        found = train(run, STEPS, loss_fn=mean_loss)
        spec, places = run.session.spec, {e: p for p, e in run.session.room.extents.items()}
        for extent, times in written.items():
            place = places[extent]
            unit, part = map(int, place[1:].partition("@")[0].split(".")) if place[0] in "wgs" else (-1, -1)
            section = spec.units[unit].sections[spec.units[unit].parts[part].section] if unit >= 0 else None
            assert section is None or section.trainable, f"{place} written {times} times"
        assert not [n for n in whole_tensors(run, "exp_avg") if frozen(n)]
        assert not [n for n in run.session.steps if frozen(n)]
    assert_close(found, wanted, start)
    still = {n: w for n, w in found.weights.items() if frozen(n)}
    assert still
    assert_same_weights(still, {n: start[n] for n in still})


def counted_writes(run: offloadz.Run) -> Counter[Any]:
    """Writes of a run's drive from now on, by extent."""
    drive, seen = run.session.room.drive, Counter()
    write = drive.write

    def counting(extent: Any, *rest: Any) -> None:
        seen[extent] += 1
        write(extent, *rest)

    drive.write = counting  # type: ignore[method-assign]
    return seen


def test_parameters_that_came_frozen_stay_frozen(swap: Path) -> None:
    def make() -> Odd:
        model = Odd()
        model.layers[2].requires_grad_(False)
        return model

    found, counts = compare(make, swap)
    assert not [n for n in counts if n.startswith("layers.2.")]
    assert torch.equal(found.weights["layers.2.up.weight"], make().get_parameter("layers.2.up.weight"))


@pytest.mark.parametrize("micro", [4, 2])
def test_a_weight_of_two_norms_is_one_weight(micro: int, swap: Path) -> None:
    found, counts = compare(lambda: Odd(twice_normed=True), swap, micro)
    assert "last_norm.weight" not in found.weights and counts["first_norm.weight"] == 5


@pytest.mark.parametrize("micro", [4, 2, 1])
def test_blocks_with_two_inputs_and_three_outputs(micro: int, swap: Path) -> None:
    compare(lambda: Odd(kind=Pair), swap, micro)


def test_an_expert_without_tokens(swap: Path) -> None:
    found, counts = compare(lambda: Odd(kind=Experts), swap)
    assert counts["layers.1.experts.0.weight"] == counts["layers.1.experts.1.weight"] == 5
    assert "layers.1.experts.2.weight" not in counts
    assert torch.equal(
        found.weights["layers.0.experts.2.bias"], Odd(kind=Experts).get_parameter("layers.0.experts.2.bias")
    )


def test_groups_keep_their_settings(swap: Path) -> None:
    """Rates, decay and betas per group, one group's taken before it, against torch's AdamW with the same."""
    groups: list[dict[str, Any]] = [
        {"match": ["embed.*"], "lr": 1e-4, "weight_decay": 0.3},
        {"match": ["layers.1.*"], "lr": 5e-3, "betas": (0.5, 0.9), "eps": 1e-6},
        {"match": ["embed.*"], "lr": 1.0},
    ]
    settings = offloadz.AdamW(lr=1e-3, weight_decay=0.1, no_decay=["*norm*", "*bias*"], groups=groups)
    with offloaded(Odd(), swap, optimizer=settings) as run:
        found = train(run, STEPS, loss_fn=mean_loss)
    plain = Odd()
    start = start_of(plain)
    named = dict(plain.named_parameters())
    parts: dict[str, list[nn.Parameter]] = {"embed": [], "one": [], "bare": [], "one_bare": [], "rest": []}
    for name, param in named.items():
        bare = "norm" in name or "bias" in name
        if name.startswith("layers.1."):
            parts["one_bare" if bare else "one"].append(param)
        else:
            parts["embed" if name.startswith("embed.") else "bare" if bare else "rest"].append(param)
    fast: dict[str, Any] = {"lr": 5e-3, "betas": (0.5, 0.9), "eps": 1e-6}
    optimizer = torch.optim.AdamW(
        [
            {"params": parts["embed"], "lr": 1e-4, "weight_decay": 0.3},
            {"params": parts["one"], **fast},
            {"params": parts["one_bare"], **fast, "weight_decay": 0.0},
            {"params": parts["bare"], "weight_decay": 0.0},
            {"params": parts["rest"]},
        ],
        lr=1e-3, weight_decay=0.1, foreach=False,
    )  # fmt: skip
    for batch in STEPS:
        optimizer.zero_grad()
        mean_loss(plain, batch).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0, foreach=False)
        optimizer.step()
    wanted = Outcome(found.losses, found.norms, start_of(plain))
    assert_close(found, wanted, start)


class Twice(Odd):
    """The second layer runs once more after the last."""

    def forward(self, input_ids: torch.Tensor, odd: Any = None, use_cache: bool = False) -> SimpleNamespace:
        x = self.first_norm(self.embed(input_ids))
        for layer in [*self.layers, self.layers[1]]:
            x = layer(x)
        return SimpleNamespace(logits=self.head(self.last_norm(x)))


@pytest.mark.parametrize("micro", [4, 1])
def test_a_layer_that_runs_twice_in_a_step(micro: int, swap: Path) -> None:
    _, counts = compare(Twice, swap, micro)
    assert set(counts.values()) == {5}


def test_a_weight_used_outside_its_module_is_an_error_not_a_number(swap: Path) -> None:
    """A placeholder holds nothing and never broadcasts."""
    with offloaded(Odd(), swap) as run:
        run.step(STEPS[0], loss_fn=mean_loss)
        with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
            float((run.model.get_parameter("layers.0.up.weight") * torch.ones(48)).sum())
