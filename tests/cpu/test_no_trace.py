"""Case G18, kind K18: forwards without gradient, in any number and order, leave no trace; nor does an exception.

Six layers, two slots, everything on disk: training mixed with evaluations and generation ends in the bits of the same
training without them, and holds the bytes it held before.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from odd_models import held
from tiny_models import Outcome, assert_same_bits, assert_same_weights, batches, tiny, train, weights, whole_tensors
from torch import Tensor, nn

import offloadz

STEPS = batches(6)
OTHERS = batches(3, rows=3, length=17, seed=9)
KINDS = ("parameters", "gradients", "optimizer_state", "activations")


def six_layers(
    swap: Path, where: str = "disk", micro: int = 2, family: str = "llama", recompute: str = "all"
) -> offloadz.Run:
    layers = {"n_layer": 6} if family == "gpt2" else {"num_hidden_layers": 6}
    return offloadz.offload(
        tiny(family, **layers),
        offloadz.AdamW(lr=1e-3),
        swap=swap,
        slots=2,
        micro_batch_size=micro,
        recompute=recompute,
        **dict.fromkeys(KINDS, where),
    )


def evaluate(run: offloadz.Run, which: int) -> Tensor:
    with torch.no_grad():
        return run.model(**OTHERS[which % 3]).loss


def generate(run: offloadz.Run, tokens: int = 5) -> Tensor:
    return run.model.generate(OTHERS[0]["input_ids"][:1], max_new_tokens=tokens, do_sample=False, pad_token_id=0)


def scored(run: offloadz.Run, which: int) -> Tensor:
    with torch.no_grad():
        return offloadz.token_logprobs(run.model, OTHERS[which % 3])


@cache
def undisturbed(family: str = "llama") -> Outcome:
    with six_layers(Path("unused"), "host", family=family) as run:
        return train(run, STEPS)


def test_train_evaluate_generate_as_in_the_case(swap: Path) -> None:
    wanted = undisturbed()
    found = Outcome()
    with six_layers(swap) as run:

        def step(batch: dict[str, Tensor]) -> None:
            found.losses.append(float(run.step(batch)))
            found.norms.append(run.report.grad_norm)

        step(STEPS[0])
        step(STEPS[1])
        before = held(run)
        for which in range(3):
            evaluate(run, which)
        assert held(run) == before
        step(STEPS[2])
        generate(run)
        evaluate(run, 0)
        step(STEPS[3])
        with pytest.raises(RuntimeError, match="size"), torch.no_grad():
            run.model(input_ids=OTHERS[0]["input_ids"], position_ids=torch.zeros(2, 9, dtype=torch.long))
        step(STEPS[4])
        with pytest.raises(offloadz.ConfigError, match="211"), torch.no_grad():
            run.model(input_ids=torch.full((1, 4), 211))
        step(STEPS[5])
        assert held(run) == before
        found.weights = weights(run)
    assert_same_bits(found, wanted)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
def test_mixed_at_random(family: str, swap: Path) -> None:
    wanted = undisturbed(family)
    source = random.Random(family)
    found = Outcome()
    with six_layers(swap, family=family, recompute="none") as run:
        for batch in STEPS:
            for _ in range(source.randrange(4)):
                source.choice(
                    [lambda: evaluate(run, source.randrange(3)), lambda: generate(run, 3), lambda: scored(run, 1)]
                )()
            found.losses.append(float(run.step(batch)))
            found.norms.append(run.report.grad_norm)
        found.weights = weights(run)
    assert_same_bits(found, wanted)


def test_what_an_evaluation_sees_is_the_state_after_the_last_step(swap: Path) -> None:
    """An evaluation right after a step, while its updates are under way, equals the materialised model's."""
    with six_layers(swap) as run:
        run.step(STEPS[0])
        seen, words = evaluate(run, 0), generate(run)
        model = run.model
        run.close(materialize=True)
    with torch.no_grad():
        torch.testing.assert_close(seen, model(**OTHERS[0]).loss, rtol=1e-6, atol=1e-6)
    assert torch.equal(
        words, model.generate(OTHERS[0]["input_ids"][:1], max_new_tokens=5, do_sample=False, pad_token_id=0)
    )


class Broken(RuntimeError):
    """Raised by a fuse."""


def fuse(module: nn.Module, when: Callable[[int], bool], backward: bool = False) -> Callable[[], None]:
    """Let the n-th call of a module from now on raise, `backward` ones too; returns how to take the fuse out."""
    calls = [0]

    def burn(*_: Any) -> None:
        calls[0] += 1
        if when(calls[0]):
            raise Broken(f"call {calls[0]}")

    hooks = [module.register_forward_pre_hook(burn)]
    if backward:
        hooks.append(module.register_full_backward_pre_hook(burn))
    return lambda: [hook.remove() for hook in hooks] and None


@pytest.mark.parametrize("recompute", ["all", "none"])
@pytest.mark.parametrize(
    ("where", "layer", "call"),
    [("disk", 3, 1), ("host", 3, 2), ("disk", 3, 3), ("host", 3, 4), ("disk", 0, 4), ("disk", 5, 3)],
)
def test_an_exception_inside_a_block(where: str, layer: int, call: int, recompute: str, swap: Path) -> None:
    """Two micro-batches: calls 1 and 2 are forward, 3 and 4 the recomputation, or the backward through what was kept.
    Nothing of the step is applied."""
    wanted = undisturbed()
    found = Outcome()
    with six_layers(swap, where=where, recompute=recompute) as run:
        for index, batch in enumerate(STEPS):
            if index in (0, 3):
                before = weights(run), whole_tensors(run, "exp_avg")
                out = fuse(run.model.model.layers[layer].mlp, lambda n: n == call, backward=recompute == "none")
                with pytest.raises(Broken):
                    run.step(STEPS[5])
                out()
                assert_same_weights(weights(run), before[0])
                assert_same_weights(whole_tensors(run, "exp_avg"), before[1])
                assert held(run)["live"] == held(run)["shapes"] == len(run.session.room.graphs) == 0
            found.losses.append(float(run.step(batch)))
            found.norms.append(run.report.grad_norm)
        assert run.report.step == len(STEPS)
        found.weights = weights(run)
    assert_same_bits(found, wanted)


def test_an_exception_inside_an_evaluation_right_after_a_step(swap: Path) -> None:
    """The updates of the step before are under way in the very walk that the exception ends."""
    wanted = undisturbed()
    found = Outcome()
    with six_layers(swap) as run:
        for batch in STEPS:
            found.losses.append(float(run.step(batch)))
            found.norms.append(run.report.grad_norm)
            out = fuse(run.model.model.layers[2].mlp, lambda n: True)
            with pytest.raises(Broken):
                evaluate(run, 0)
            out()
        found.weights = weights(run)
    assert_same_bits(found, wanted)


@pytest.mark.parametrize("recompute", ["all", "none"])
def test_an_exception_in_a_loop_of_ones_own(recompute: str, swap: Path) -> None:
    """After a failed backward of two, the next step begins afresh."""
    with six_layers(swap) as run:
        wanted = Outcome()
        for batch in STEPS[:2]:
            run.backward(run.model(**batch).loss)
            run.update()
            wanted.norms.append(run.report.grad_norm)
        wanted.weights = weights(run)
    with six_layers(swap, recompute=recompute) as run:
        norms = []
        for batch in STEPS[:2]:
            run.backward(run.model(**STEPS[4]).loss)
            out = fuse(run.model.model.layers[3].mlp, lambda n: n > 2, backward=recompute == "none")
            loss = run.model(**STEPS[5]).loss  # calls 1 and 2: a micro-batch each
            with pytest.raises(Broken):
                run.backward(loss)
            out()
            run.backward(run.model(**batch).loss)
            run.update()
            norms.append(run.report.grad_norm)
        assert norms == wanted.norms
        assert_same_weights(weights(run), wanted.weights)


def test_a_forward_with_gradients_that_nobody_uses(swap: Path) -> None:
    """A caller evaluates without no_grad and drops the loss; the next step does not suffer."""
    wanted = undisturbed()
    found = Outcome()
    with six_layers(swap, recompute="none") as run:
        for batch in STEPS:
            run.model(**OTHERS[0])
            found.losses.append(float(run.step(batch)))
            found.norms.append(run.report.grad_norm)
        found.weights = weights(run)
    assert_same_bits(found, wanted)


def test_two_runs_do_not_know_of_each_other(swap: Path) -> None:
    wanted = undisturbed()
    first, second = Outcome(), Outcome()
    with six_layers(swap) as one, six_layers(swap) as two:
        for batch in STEPS:
            for run, out in ((one, first), (two, second)):
                out.losses.append(float(run.step(batch)))
                out.norms.append(run.report.grad_norm)
        first.weights, second.weights = weights(one), weights(two)
    assert_same_bits(first, wanted)
    assert_same_bits(second, wanted)
