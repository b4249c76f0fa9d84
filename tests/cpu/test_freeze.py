"""Freezing and unfreezing between steps, and what `freeze` and `keep_float32` refuse.  Case G11, kind K11.

A parameter that takes no gradient in a step has no update, no decay and no count in that step, and none in the norm, as
in the plain loop; `freeze` from the start is held in test_odd_models.py, `keep_float32` in test_precision.py.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import torch
from families import FAMILIES
from reference import backward, plain_run
from tiny_models import Outcome, assert_close, assert_same_weights, batches, start_of, tiny, train, weights
from torch import nn

import offloadz
from offloadz.plan.errors import ConfigError

DISK = {"parameters": "disk", "gradients": "disk", "optimizer_state": "disk", "activations": "disk", "slots": 2}
STEPS = batches(6)
PLAN: list[list[str]] = [
    [],
    ["*embed_tokens*", "model.layers.0.*"],
    ["*norm*", "model.layers.1.mlp.up_proj.weight"],
    ["lm_head.weight", "model.norm.weight"],
    ["*self_attn*"],
    [],
]
"""What is frozen in each step."""


def freeze(model: nn.Module, patterns: list[str]) -> None:
    for name, param in model.named_parameters():
        param.requires_grad_(not any(fnmatchcase(name, pattern) for pattern in patterns))


def plain(family: str) -> Outcome:
    model, out = tiny(family), Outcome()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    for batch, patterns in zip(STEPS, PLAN, strict=True):
        freeze(model, patterns)
        optimizer.zero_grad(set_to_none=True)
        out.losses.append(backward(model, batch))
        out.norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)))
        optimizer.step()
    out.weights = start_of(model)
    return out


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_freezing_and_unfreezing_between_steps(family: str, swap: Path) -> None:
    """Untied and tied: a table frozen as the head is frozen as both, by the one parameter they are."""
    out = Outcome()
    with offloadz.offload(tiny(family), offloadz.AdamW(lr=1e-3), swap=swap, micro_batch_size=2, **DISK) as run:
        for batch, patterns in zip(STEPS, PLAN, strict=True):
            before = weights(run)
            freeze(run.model, patterns)
            out.losses.append(float(run.step(batch)))
            out.norms.append(run.report.grad_norm)
            out.weights = weights(run)
            still = [n for n in before if any(fnmatchcase(n, p) for p in patterns)]
            assert_same_weights({n: out.weights[n] for n in still}, {n: before[n] for n in still}, str(patterns))
            assert len(still) < len(before) and all(
                not torch.equal(out.weights[n], before[n]) for n in set(before) - set(still)
            )
        counts = dict(run.session.steps)
    assert counts["model.layers.0.input_layernorm.weight"] == 4 and counts["model.layers.1.mlp.gate_proj.weight"] == 6
    assert_close(out, plain(family), start_of(tiny(family)), family, norm=2e-5)


def test_what_had_no_state_at_the_start_cannot_be_unfrozen(swap: Path) -> None:
    with offloadz.offload(
        tiny("llama"), offloadz.AdamW(lr=1e-3), swap=swap, freeze=["model.layers.0.*"], **DISK
    ) as run:
        run.step(STEPS[0])
        before = weights(run)
        run.model.requires_grad_(True)
        with pytest.raises(ConfigError, match=r"model\.layers\.0\..*was frozen when the run began"):
            run.step(STEPS[1])
        assert_same_weights(weights(run), before)
        freeze(run.model, ["model.layers.0.*"])
        run.step(STEPS[1])
        assert run.report.step == 2


@pytest.mark.parametrize("key", ["freeze", "keep_float32"])
def test_a_pattern_that_matches_nothing_is_refused(key: str, swap: Path) -> None:
    with pytest.raises(ConfigError, match=rf"model\.{key}: 'model\.layer\.0\.\*' matches none"):
        offloadz.offload(tiny("llama"), swap=swap, **{key: ["model.layer.0.*"]})


def test_freezing_everything_is_refused(swap: Path) -> None:
    with pytest.raises(ConfigError, match="nothing to train"):
        offloadz.offload(tiny("llama"), swap=swap, freeze=["*"])


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("frozen", [["lm_head.bias"], ["lm_head.weight", "*embed_tokens*"]])
def test_a_head_whose_weight_and_bias_are_not_both_trained(frozen: list[str], tied: bool, swap: Path) -> None:
    """They lie in one tile, in two sections; a tied weight is the table's too."""
    patterns = [p for p in frozen if not (tied and p == "lm_head.weight")]  # one parameter, by the table's name

    def make() -> nn.Module:
        return FAMILIES["phi"].build(tie_word_embeddings=tied)

    model = make()
    freeze(model, patterns)
    wanted = plain_run(model, STEPS[:3])
    with offloadz.offload(make(), offloadz.AdamW(lr=1e-3), swap=swap, freeze=patterns, **DISK) as run:
        found = train(run, STEPS[:3])
    assert_close(found, wanted, start_of(make()), str(patterns))
    start = start_of(make())
    still = {n for n in found.weights if torch.equal(found.weights[n], start[n])}
    assert still == {n for n in found.weights if any(fnmatchcase(n, p) for p in patterns)}


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("copies", [1, 2])
def test_updates_around_frozen_blocks_when_the_next_step_is_given_up(slots: int, copies: int, swap: Path) -> None:
    """A flush ends the updates without the forward whose fetches of frozen weights stood between them in the slots."""
    how = {"micro_batch_size": 2, "freeze": ["model.layers.1.*", "model.layers.2.*"]}

    def loop(**placed: object) -> Outcome:
        model = tiny("llama", num_hidden_layers=4)
        with offloadz.offload(model, offloadz.AdamW(lr=1e-2), swap=swap, **how, **placed) as run:  # type: ignore[arg-type]
            out = Outcome()
            for batch in STEPS[:3]:
                out.losses.append(float(run.step(batch)))
                run.flush()
            return Outcome(out.losses, [], weights(run))

    wanted = loop(**dict.fromkeys(("parameters", "gradients", "optimizer_state", "activations"), "host"))
    found = loop(**{**DISK, "slots": slots}, copies=copies, poison=True)
    assert found.losses == wanted.losses
    assert_same_weights(found.weights, wanted.weights)
