"""`commit = "in_place"`: updates as gradients come, nothing kept; the same bits as updates that wait, without clipping.

What it gives up is said and held: it cannot clip, and a step that fails half-way ends the run (promise 2's exception).
Kinds K03 (a failed write), K18 (evaluation in between); the bits of every placement as in `test_parity.py`.
"""

from __future__ import annotations

import random
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import FAMILIES, Outcome, assert_close, assert_same_bits, batches, start_of, tiny, train

import offloadz
from offloadz.plan.errors import ConfigError, UpdateFailed

STEPS = batches(4)
KINDS = ("parameters", "gradients", "optimizer_state", "activations")


def ran(family: str, placement: tuple[str, ...], commit: str, swap: Path, **more: Any) -> Outcome:
    where = dict(zip(KINDS, placement, strict=True))
    told = {"swap": swap, "commit": commit, "max_grad_norm": 0.0, "micro_batch_size": 2} | where | more
    with offloadz.offload(tiny(family), offloadz.AdamW(lr=1e-3), **told) as run:
        return train(run, STEPS)


def drawn(index: int) -> tuple[tuple[str, ...], dict[str, Any]]:
    source = random.Random(index)
    placement = source.choice(list(product(("device", "host", "disk"), repeat=4)))
    return placement, {"slots": source.choice((1, 2, 3)), "sweeps": source.choice((1, 2)), "poison": index % 3 == 0}


@pytest.mark.parametrize("index", range(9))
@pytest.mark.parametrize("family", FAMILIES)
def test_in_place_has_the_bits_of_hold(family: str, index: int, swap: Path) -> None:
    placement, more = (("disk",) * 4, {"slots": 2}) if index == 0 else drawn(index)
    held = ran(family, ("host",) * 4, "hold", swap)
    assert_same_bits(ran(family, placement, "in_place", swap, **more), held, f"{placement} {more}")


def test_nothing_is_kept_of_a_gradient(swap: Path) -> None:
    told = {"swap": swap, "max_grad_norm": 0.0} | dict.fromkeys(KINDS, "disk")
    with offloadz.offload(tiny("llama"), offloadz.AdamW(), commit="in_place", **told) as run:
        assert not [p for p in run.session.room.extents if p.startswith("g")]
        assert run.plan.commit == "in_place"
        train(run, STEPS[:1])
        arrivals = {
            op.unit for program in run.session._programs.values() for op in program.ops if op.verb == "update.g"
        }
        assert arrivals == {i for i, unit in enumerate(run.session.spec.units) if unit.trainable}


def test_several_backward_passes_add_up(swap: Path) -> None:
    def loop(commit: str) -> Outcome:
        told = dict.fromkeys(KINDS, "disk")
        with offloadz.offload(
            tiny("llama"), offloadz.AdamW(lr=1e-3), swap=swap, commit=commit, max_grad_norm=0.0, **told
        ) as run:
            norms = []
            for batch in STEPS:
                for rows in (slice(0, 2), slice(2, 4)):
                    run.backward(run.model(**{k: v[rows] for k, v in batch.items()}).loss)
                run.update()
                norms.append(run.report.grad_norm)
            run.close(materialize=True)
            weights = {n: p.detach().clone() for n, p in run.model.named_parameters()}
        return Outcome([], norms, weights)

    assert_same_bits(loop("in_place"), loop("hold"), "two backward passes an update")


def test_an_evaluation_between_steps_changes_nothing(swap: Path) -> None:
    plain = ran("qwen3", ("disk",) * 4, "in_place", swap)
    told = dict.fromkeys(KINDS, "disk")
    with offloadz.offload(
        tiny("qwen3"),
        offloadz.AdamW(lr=1e-3),
        swap=swap,
        commit="in_place",
        max_grad_norm=0.0,
        micro_batch_size=2,
        **told,
    ) as run:
        losses, norms = [], []
        for batch in STEPS:
            losses.append(float(run.step(batch)))
            norms.append(run.report.grad_norm)
            with torch.no_grad():
                run.model(**batch)
        run.close(materialize=True)
        weights = {n: p.detach().clone() for n, p in run.model.named_parameters()}
    assert_same_bits(Outcome(losses, norms, weights), plain, "evaluation in between")


def test_a_schedule_is_followed_and_steps_are_counted(swap: Path) -> None:
    def loop(commit: str) -> tuple[Outcome, dict[str, int]]:
        model = tiny("llama")
        with offloadz.offload(model, offloadz.AdamW(lr=1e-3), swap=swap, commit=commit, max_grad_norm=0.0) as run:
            schedule = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda step: 1.0 / (1 + step))
            losses = []
            for batch in STEPS:
                losses.append(float(run.step(batch)))
                schedule.step()
            steps = dict(run.session.steps)
            run.close(materialize=True)
            weights = {n: p.detach().clone() for n, p in run.model.named_parameters()}
        return Outcome(losses, [], weights), steps

    (found, steps), (held, held_steps) = loop("in_place"), loop("hold")
    assert_same_bits(found, held, "with a schedule")
    assert steps == held_steps


def test_a_gradient_that_is_not_finite_ends_the_run(swap: Path) -> None:
    with offloadz.offload(tiny("llama"), offloadz.AdamW(), swap=swap, commit="in_place", max_grad_norm=0.0) as run:
        run.step(STEPS[0])

        def nowhere(model: Any, batch: Any) -> torch.Tensor:
            return model(**batch).loss * float("inf")

        with pytest.raises(UpdateFailed, match="half-way"):
            run.step(STEPS[1], loss_fn=nowhere)
        with pytest.raises(UpdateFailed, match="last checkpoint"):
            run.step(STEPS[2])
        with pytest.raises(UpdateFailed, match="last checkpoint"):
            run.save(swap / "never")


def test_an_error_before_anything_was_applied_leaves_the_run_whole(swap: Path) -> None:
    def failing(model: Any, batch: Any) -> torch.Tensor:
        raise KeyError("a mistake in a loss function")

    with offloadz.offload(
        tiny("llama"), offloadz.AdamW(lr=1e-3), swap=swap, commit="in_place", max_grad_norm=0.0, micro_batch_size=2
    ) as run:
        with pytest.raises(KeyError):
            run.step(STEPS[0], loss_fn=failing)
        found = train(run, STEPS)
    assert_same_bits(found, ran("llama", ("host",) * 4, "hold", swap), "after a mistake")


def test_it_cannot_clip_and_says_so(swap: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot clip; found max_grad_norm = 1\.0"):
        offloadz.offload(tiny("llama"), offloadz.AdamW(), swap=swap, commit="in_place")
    with pytest.raises(ConfigError, match="commit = 'late'"):
        offloadz.offload(tiny("llama"), offloadz.AdamW(), swap=swap, commit="late")


def test_the_plain_loop_agrees(swap: Path) -> None:
    from reference import plain_run

    start = start_of(tiny("llama"))
    found = ran("llama", ("disk",) * 4, "in_place", swap)
    assert_close(found, plain_run(tiny("llama"), STEPS, max_grad_norm=0.0, weight_decay=1e-2, micro_rows=2), start)
