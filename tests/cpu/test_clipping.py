"""Exact clipping and whole-or-nothing steps (kind K10): limits that never, always and sometimes fire; bad gradients.

A non-finite gradient anywhere leaves every weight, moment and counter as it was, and training goes on as if that step
had not been.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from reference import backward, plain_run
from tiny_models import (
    Outcome,
    assert_close,
    assert_same_bits,
    assert_same_weights,
    batches,
    start_of,
    tiny,
    train,
    weights,
    whole_tensors,
)
from torch import Tensor, nn

import offloadz

STEPS = batches(5)
MIXED = {"parameters": "disk", "gradients": "host", "optimizer_state": "disk", "activations": "host", "slots": 2}
KINDS = ("parameters", "gradients", "optimizer_state", "activations")


def offloaded(swap: Path, limit: float = 1.0, family: str = "llama", **how: object) -> offloadz.Run:
    return offloadz.offload(
        tiny(family), offloadz.AdamW(lr=1e-3), swap=swap, max_grad_norm=limit, **{**MIXED, "micro_batch_size": 2, **how}
    )


def norms_of(family: str) -> list[float]:
    return plain_run(tiny(family), STEPS, micro_rows=2, max_grad_norm=0).norms


COMMITS = ("hold", "shadow")


@pytest.mark.parametrize(("family", "commit"), [("llama", "hold"), ("qwen3", "hold"), ("qwen3", "shadow")])
@pytest.mark.parametrize("which", ["off", "never", "always", "sometimes"])
def test_limits(family: str, commit: str, which: str, swap: Path) -> None:
    """`sometimes` lies in the middle of the norms that are met."""
    limit = {"off": 0.0, "never": 1e6, "always": 1e-2, "sometimes": sorted(norms_of(family))[2]}[which]
    wanted = plain_run(tiny(family), STEPS, micro_rows=2, max_grad_norm=limit)
    clipped = []
    found = Outcome()
    with offloaded(swap, limit, family, commit=commit) as run:
        for batch in STEPS:
            found.losses.append(float(run.step(batch)))
            found.norms.append(run.report.grad_norm)
            clipped.append(run.report.clipped)
        found.weights = weights(run)
    assert clipped == [0 < limit < norm for norm in found.norms]
    assert {"off": not any(clipped), "never": not any(clipped), "always": all(clipped)}.get(
        which, len(set(clipped)) == 2
    )
    assert_close(found, wanted, start_of(tiny(family)))


def test_a_limit_that_never_fires_is_no_limit(swap: Path) -> None:
    with offloaded(swap, 1e6) as run:
        high = train(run, STEPS)
    with offloaded(swap, 0.0) as run:
        assert_same_bits(train(run, STEPS), high)


def test_the_norm_counts_a_tied_weight_once(swap: Path) -> None:
    """Against the norm of the plain model's own gradients, summed here in double."""
    model = tiny("qwen3")
    backward(model, STEPS[0], 2)
    wanted = math.sqrt(
        math.fsum(float(p.grad.double().square().sum()) for p in model.parameters() if p.grad is not None)
    )
    with offloaded(swap, family="qwen3") as run:
        run.step(STEPS[0])
        assert run.report.grad_norm == pytest.approx(wanted, rel=1e-6)


def spoil(module: nn.Module, attribute: str, value: float) -> Callable[[], None]:
    """Make one element of a weight's gradient `value` in the module's next backward passes; returns the cure."""

    def bad(grad: Tensor) -> Tensor:
        grad = grad.clone()
        grad.view(-1)[grad.numel() // 2] = value
        return grad

    def before(module: nn.Module, _: object) -> None:
        weight = getattr(module, attribute)
        if weight.requires_grad and torch.is_grad_enabled():
            weight.register_hook(bad)

    return module.register_forward_pre_hook(before).remove


PLACES = [
    ("model.layers.0.self_attn.k_proj", "weight"),
    ("model.layers.0.input_layernorm", "weight"),
    ("model.layers.1.mlp.down_proj", "weight"),
]


def everything(run: offloadz.Run) -> list[dict[str, Tensor]]:
    return [whole_tensors(run, what) for what in ("weight", "exp_avg", "exp_avg_sq")]


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan], ids=str)
@pytest.mark.parametrize("commit", COMMITS)
@pytest.mark.parametrize("where", ["disk", "host"])
def test_one_bad_element_skips_the_whole_step(value: float, where: str, commit: str, swap: Path) -> None:
    """Each block in turn, between good steps; what follows has the bits of a run that never saw those steps."""
    with offloaded(swap, **dict.fromkeys(KINDS, "host")) as run:
        wanted = train(run, STEPS)
    found = Outcome()
    with offloaded(swap, **dict.fromkeys(KINDS, where), commit=commit) as run:
        for index, batch in enumerate(STEPS):
            if 0 < index <= len(PLACES):
                before, counts = everything(run), dict(run.session.steps)
                path, attribute = PLACES[index - 1]
                cure = spoil(run.model.get_submodule(path), attribute, value)
                run.step(STEPS[(index + 2) % 5])
                cure()
                assert run.report.skipped and not run.report.clipped
                assert "finite" in run.report.reason
                assert not math.isfinite(run.report.grad_norm)
                for now, then in zip(everything(run), before, strict=True):
                    assert_same_weights(now, then)
                assert run.session.steps == counts
            found.losses.append(float(run.step(batch)))
            found.norms.append(run.report.grad_norm)
            assert not run.report.skipped
        found.weights = weights(run)
    assert_same_bits(found, wanted)


class Spoiling(torch.autograd.Function):
    """The identity; its gradient is not finite in the first element."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        grad = grad.clone()
        grad.view(-1)[0] = math.nan
        return grad


@pytest.mark.parametrize("commit", COMMITS)
@pytest.mark.parametrize("path", ["model.embed_tokens", "model.norm"])
def test_a_bad_gradient_of_a_table_or_a_norm(path: str, commit: str, swap: Path) -> None:
    with offloaded(swap, commit=commit) as run:
        run.step(STEPS[0])
        before = everything(run)
        hook = run.model.get_submodule(path).register_forward_hook(lambda m, a, out: Spoiling.apply(out))
        run.step(STEPS[1])
        hook.remove()
        assert run.report.skipped and "finite" in run.report.reason
        for now, then in zip(everything(run), before, strict=True):
            assert_same_weights(now, then)
        run.step(STEPS[2])
        assert not run.report.skipped


@pytest.mark.parametrize("commit", COMMITS)
def test_a_bad_loss_skips_the_step(commit: str, swap: Path) -> None:
    """Also with the gradients finite: a caller's loss may be NaN where its derivative is not."""
    with offloaded(swap, commit=commit) as run:
        run.step(STEPS[0])
        before = everything(run)
        run.step(STEPS[1], loss_fn=lambda m, b: m(**b).loss + math.nan)
        assert run.report.skipped and "loss" in run.report.reason
        for now, then in zip(everything(run), before, strict=True):
            assert_same_weights(now, then)


def test_a_step_without_targets_is_skipped_by_name(swap: Path) -> None:
    """No update, no NaN in the weights, never a bare 0.0 (kind K17)."""
    with offloaded(swap, **dict.fromkeys(KINDS, "host")) as run:
        wanted = train(run, STEPS)
    found = Outcome()
    with offloaded(swap) as run:
        for batch in STEPS:
            found.losses.append(float(run.step(batch)))
            found.norms.append(run.report.grad_norm)
            empty = {**batch, "labels": torch.full_like(batch["labels"], -100)}
            loss = float(run.step(empty))
            assert math.isnan(loss) and run.report.skipped and run.report.reason == "no target tokens"
        found.weights = weights(run)
    assert_same_bits(found, wanted)


def test_a_row_without_targets_among_others_counts_nothing(swap: Path) -> None:
    steps = [{k: v.clone() for k, v in batch.items()} for batch in STEPS]
    for batch in steps:
        batch["labels"][1] = -100
        batch["labels"][3, :-1] = -100
    wanted = plain_run(tiny("llama"), steps, micro_rows=2)
    with offloaded(swap) as run:
        assert_close(train(run, steps), wanted, start_of(tiny("llama")))
