"""The Python surface of the contract, line by line, against plain torch and transformers."""

from __future__ import annotations

import gc
import subprocess
import sys
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from odd_models import Odd, mean_loss, odd_batches
from reference import plain_run
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
from torch.nn import functional as F

import offloadz

STEPS = batches(5)
DISK = {"parameters": "disk", "gradients": "disk", "optimizer_state": "disk", "activations": "disk", "slots": 2}
HOST = {"parameters": "host", "gradients": "host", "optimizer_state": "host", "activations": "host", "slots": 2}


def offloaded(swap: Path, family: str = "llama", model: nn.Module | None = None, **how: Any) -> offloadz.Run:
    optimizer = how.pop("optimizer", offloadz.AdamW(lr=1e-3))
    return offloadz.offload(model or tiny(family), optimizer, swap=swap, **{**DISK, **how})


def plain_loop(model: nn.Module, losses: Callable[[nn.Module, int], list[Tensor]], steps: int = 5) -> Outcome:
    """torch's own loop: any number of backward passes, clipping at 1, AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    out = Outcome()
    for step in range(steps):
        optimizer.zero_grad()
        total = 0.0
        for loss in losses(model, step):
            loss.backward()
            total += float(loss.detach())
        out.losses.append(total)
        out.norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)))
        optimizer.step()
    out.weights = start_of(model)
    return out


# ---- import, load, step ------------------------------------------------------------------------------------------


def test_import_starts_nothing() -> None:
    code = "import sys, threading, offloadz\n"
    code += "print('torch' in sys.modules, 'transformers' in sys.modules, threading.active_count())"
    root = Path(offloadz.__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=True)
    assert done.stdout.split() == ["False", "False", "1"]


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
def test_load_gives_a_module_on_meta_that_trains(family: str, swap: Path, tmp_path: Path) -> None:
    """The same five steps as a module that came with its weights."""
    tiny(family).save_pretrained(tmp_path / "model")
    model = offloadz.load(tmp_path / "model", dtype=torch.float32)
    assert all(p.is_meta for p in model.parameters())
    with offloaded(swap, model=model) as run:
        found = train(run, STEPS)
    with offloaded(swap, family) as run:
        assert_same_bits(found, train(run, STEPS))


def test_step_returns_the_mean_over_the_target_tokens(swap: Path) -> None:
    model = tiny("llama")
    with torch.no_grad():
        wanted = float(model(**STEPS[0]).loss.detach())
    with offloaded(swap, micro_batch_size=1) as run:
        loss = run.step(STEPS[0])
    assert loss.shape == () and float(loss) == pytest.approx(wanted, rel=1e-6)
    assert run.report.target_tokens == int((STEPS[0]["labels"][:, 1:] != -100).sum())


def test_step_with_a_loss_of_ones_own(swap: Path) -> None:
    def smoothed(model: nn.Module, batch: Any) -> Tensor:
        out = model(**{k: v for k, v in batch.items() if k != "labels"}).logits[:, :-1]
        return F.cross_entropy(out.flatten(0, 1), batch["labels"][:, 1:].flatten(), label_smoothing=0.1)

    wanted = plain_loop(tiny("qwen3"), lambda m, step: [smoothed(m, STEPS[step])])
    with offloaded(swap, "qwen3", micro_batch_size=2) as run:
        assert_close(train(run, STEPS, loss_fn=smoothed), wanted, start_of(tiny("qwen3")))


def test_a_plain_module_trains_with_a_loss_of_ones_own(swap: Path) -> None:
    steps = odd_batches(5)
    wanted = plain_run(Odd(), steps)
    with offloaded(swap, model=Odd()) as run:
        assert_close(train(run, steps, loss_fn=mean_loss), wanted, start_of(Odd()))


def test_a_sequential_without_tables_trains(swap: Path) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Sequential(nn.Linear(37, 53), nn.Tanh(), nn.Linear(53, 37)) for _ in range(3)))

    xs = [torch.randn(8, 37, generator=torch.Generator().manual_seed(i)) for i in range(5)]
    loss_fn = lambda model, batch: (model(batch["x"]) - batch["x"].flip(0)).square().mean()  # noqa: E731
    wanted = plain_loop(make(), lambda m, step: [loss_fn(m, {"x": xs[step]})])
    with offloaded(swap, model=make(), micro_batch_size=3) as run:
        found = train(run, [{"x": x} for x in xs], loss_fn=loss_fn)
    assert_close(found, wanted, start_of(make()))


# ---- loops of one's own ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
def test_two_backward_passes_and_one_update_equal_their_sum(family: str, swap: Path) -> None:
    wanted = plain_loop(tiny(family), lambda m, s: [m(**STEPS[s]).loss, 0.5 * m(**STEPS[(s + 1) % 5]).loss])
    found = Outcome()
    with offloaded(swap, family, micro_batch_size=2) as run:
        for step in range(5):
            run.backward(run.model(**STEPS[step]).loss)
            run.backward(0.5 * run.model(**STEPS[(step + 1) % 5]).loss)
            run.update()
            found.losses.append(run.report.loss)
            found.norms.append(run.report.grad_norm)
        found.weights = weights(run)
    assert_close(found, wanted, start_of(tiny(family)))


def test_steps_and_loops_of_ones_own_in_any_order(swap: Path) -> None:
    """A plan made for whole gradients meets several passes, and the reverse."""

    def losses(model: nn.Module, step: int) -> list[Tensor]:
        parts = [model(**STEPS[step]).loss]
        return parts if step % 2 == 0 else [*parts, model(**STEPS[0]).loss]

    wanted = plain_loop(tiny("llama"), losses)
    found = Outcome()
    with offloaded(swap) as run:
        for step in range(5):
            if step % 2 == 0:
                run.step(STEPS[step])
            else:
                for batch in (STEPS[step], STEPS[0]):
                    run.backward(run.model(**batch).loss)
                run.update()
            found.losses.append(run.report.loss)
            found.norms.append(run.report.grad_norm)
        found.weights = weights(run)
    assert_close(found, wanted, start_of(tiny("llama")))


def plain_logprobs(model: nn.Module, batch: Any) -> Tensor:
    inputs = {k: v for k, v in batch.items() if k != "labels"}
    scores = model(**inputs, use_cache=False).logits[:, :-1].log_softmax(-1)
    labels = batch["labels"][:, 1:]
    picked = scores.gather(-1, labels.clamp_min(0)[..., None]).squeeze(-1)
    return F.pad(picked * (labels != -100), (1, 0))


def preference(logprobs: Callable[[Any, Any], Tensor], model: Any, step: int) -> Tensor:
    """The loss of DPO without its reference model: two forwards of one batch each before one backward."""
    chosen, rejected = (logprobs(model, STEPS[i % 5]).sum(-1) for i in (step, step + 1))
    return -F.logsigmoid(0.1 * (chosen - rejected)).mean()


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
def test_token_logprobs_are_the_models(family: str, swap: Path) -> None:
    plain = tiny(family)
    with offloaded(swap, family, micro_batch_size=2) as run, torch.no_grad():
        found = offloadz.token_logprobs(run.model, STEPS[0])
        assert found.shape == STEPS[0]["labels"].shape
        torch.testing.assert_close(found, plain_logprobs(plain, STEPS[0]), rtol=1e-5, atol=1e-5)
        assert torch.equal(offloadz.token_logprobs(run, STEPS[0]), found)


@pytest.mark.parametrize("how", ["backward", "loss_fn"])
@pytest.mark.parametrize("activations", ["disk", "device"])
def test_two_forwards_before_one_backward(how: str, activations: str, swap: Path) -> None:
    wanted = plain_loop(tiny("llama"), lambda m, step: [preference(plain_logprobs, m, step)])
    found = Outcome()
    with offloaded(swap, micro_batch_size=2, activations=activations) as run:
        for step in range(5):
            if how == "backward":
                run.backward(preference(offloadz.token_logprobs, run.model, step))
                run.update()
            else:
                run.step(STEPS[step], loss_fn=lambda m, b, step=step: preference(offloadz.token_logprobs, m, step))
            found.losses.append(run.report.loss)
            found.norms.append(run.report.grad_norm)
        found.weights = weights(run)
    assert_close(found, wanted, start_of(tiny("llama")), norm=1e-4, loss=1e-5, moved=5e-3)


def test_hidden_states_are_differentiable_or_refused(swap: Path) -> None:
    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        out = model(**batch, output_hidden_states=True)
        return out.loss + out.hidden_states[1].square().mean()

    wanted = plain_loop(tiny("llama"), lambda m, step: [loss_fn(m, STEPS[step])])
    with offloaded(swap) as run:
        assert_close(train(run, STEPS, loss_fn=loss_fn), wanted, start_of(tiny("llama")))


def test_update_without_backward_is_an_error(swap: Path) -> None:
    with offloaded(swap) as run, pytest.raises(RuntimeError, match=r"run.backward"):
        run.update()


# ---- forwards without gradients ----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
def test_calls_and_generation_are_the_models(family: str, swap: Path) -> None:
    plain = tiny(family).eval()
    prompt = STEPS[0]["input_ids"][:2, :7]
    how = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        wanted = plain(**STEPS[0])
        words = plain.generate(prompt, **how)
    with offloaded(swap, family, micro_batch_size=2) as run, torch.no_grad():
        run.model.eval()
        found = run.model(**STEPS[0])
        torch.testing.assert_close(found.logits, wanted.logits, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found.loss, wanted.loss, rtol=1e-5, atol=1e-5)
        assert torch.equal(run.model.generate(prompt, **how), words)
        assert torch.equal(run.model.generate(prompt, **how, use_cache=False), words)


# ---- optimizer and schedulers ------------------------------------------------------------------------------------


def test_schedulers_of_torch_work_without_warnings(swap: Path) -> None:
    """The rate of a step is the one that was set when the step was decided, though its update runs later."""
    rate = lambda step: 1.0 / (1 + step)  # noqa: E731
    plain = tiny("llama")
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, foreach=False)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    for batch in STEPS:
        optimizer.zero_grad()
        mean_loss_of(plain, batch).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0, foreach=False)
        optimizer.step()
        schedule.step()
    with warnings.catch_warnings(), offloaded(swap) as run:
        warnings.simplefilter("error")
        schedule = torch.optim.lr_scheduler.LambdaLR(run.optimizer, rate)
        out = Outcome()
        for index, batch in enumerate(STEPS):
            run.step(batch)
            assert run.report.lr == pytest.approx(1e-3 * rate(index))
            schedule.step()
        out.weights = weights(run)
    assert_close(out, Outcome(weights=start_of(plain)), start_of(tiny("llama")))


def mean_loss_of(model: nn.Module, batch: Any) -> Tensor:
    return model(**batch, use_cache=False).loss


def test_stepping_the_optimizer_by_hand_is_an_error(swap: Path) -> None:
    with offloaded(swap) as run:
        with pytest.raises(RuntimeError, match=r"run.update"):
            run.optimizer.step()
        run.optimizer.zero_grad()
        assert {name for group in run.optimizer.param_groups for name in group["names"]} == set(weights(run))


# ---- save, load, close -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("before", "after"), [(DISK, HOST), (HOST, DISK)], ids=["disk-host", "host-disk"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_save_and_load_under_another_placement(before: Any, after: Any, dtype: Any, swap: Path, tmp_path: Path) -> None:
    """Three steps, saved, loaded into a run with other weights and settings, two more: the bits of five in a row."""
    with offloaded(swap, "qwen3", dtype=dtype, **before) as run:
        wanted = train(run, STEPS)
    with offloaded(swap, "qwen3", dtype=dtype, **before) as run:
        train(run, STEPS[:3])
        run.save(tmp_path / "saved")
    other = tiny("qwen3", seed=5)
    with offloaded(swap, model=other, optimizer=offloadz.AdamW(lr=0.5, betas=(0.1, 0.2)), dtype=dtype, **after) as run:
        run.step(STEPS[4])
        run.load(tmp_path / "saved")
        found = train(run, STEPS[3:])
        assert run.report.step == 5
    assert found.losses == wanted.losses[3:] and found.norms == wanted.norms[3:]
    assert_same_weights(found.weights, wanted.weights)


def test_a_checkpoint_of_another_cut_is_told_of(swap: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with offloaded(swap, micro_batch_size=2) as run:
        run.step(STEPS[0])
        saved = run.save(tmp_path / "saved")
        run.load(saved)
    assert "run.load" not in caplog.text
    with offloaded(swap) as run:
        run.load(saved)
    cut = "1 sweep of micro-batches of 2 rows, this run computes in 1 sweep of micro-batches of all their rows"
    assert caplog.text.count(f"run.load: {saved} was made in {cut}: sums come in another order") == 1
    assert "micro_batch_size = 2 and sweeps = 1 keep them" in caplog.text


def test_loading_in_a_step_is_refused(swap: Path, tmp_path: Path) -> None:
    """Gradients of the weights before would be applied to those that were loaded."""
    with offloaded(swap) as run:
        saved = run.save(tmp_path / "saved")

        def loading(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
            run.load(saved)
            return model(**batch).loss

        with pytest.raises(RuntimeError, match=r"run\.load in a step"):
            run.step(STEPS[0], loss_fn=loading)
        run.backward(run.model(**STEPS[0]).loss)
        with pytest.raises(RuntimeError, match=r"run\.load in a step.*run\.update\(\) first"):
            run.load(saved)
        run.update()
        run.load(saved)


def test_saving_in_the_middle_changes_nothing(swap: Path, tmp_path: Path) -> None:
    with offloaded(swap) as run:
        wanted = train(run, STEPS)
    found = Outcome()
    with offloaded(swap) as run:
        for index, batch in enumerate(STEPS):
            found.losses.append(float(run.step(batch)))
            found.norms.append(run.report.grad_norm)
            run.save(tmp_path / f"saved-{index}")
            run.flush()
        found.weights = weights(run)
    assert_same_bits(found, wanted)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
def test_closing_with_materialize_leaves_an_ordinary_module(family: str, swap: Path) -> None:
    run = offloaded(swap, family)
    train(run, STEPS[:2])
    held, model = weights(run), run.model
    run.close(materialize=True)
    assert {n: p.shape for n, p in model.named_parameters()} == {n: w.shape for n, w in held.items()}
    assert all(torch.equal(p, held[n]) and p.requires_grad for n, p in model.named_parameters())
    assert not [m for m in model.modules() if "forward" in m.__dict__]
    before = float(model(**STEPS[0]).loss.detach())
    plain_loop(model, lambda m, step: [m(**STEPS[0]).loss], steps=2)
    assert float(model(**STEPS[0]).loss.detach()) < before
    run.close()
    with pytest.raises(RuntimeError, match="closed"):
        run.step(STEPS[0])


def test_a_materialised_model_can_be_offloaded_again(swap: Path) -> None:
    with offloaded(swap, optimizer=offloadz.AdamW(lr=1e-3)) as run:
        train(run, STEPS[:2])
        model, held = run.model, weights(run)
        run.close(materialize=True)
    with offloaded(swap, model=model) as run:
        assert_same_weights(weights(run), held)
        run.step(STEPS[2])


def test_materialize_is_refused_where_memory_is_too_small(swap: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from offloadz.model import materialize as module
    from offloadz.plan.machine import host_limit

    class Small:
        available_bytes = 1000

    assert host_limit().available_bytes > 1000
    monkeypatch.setattr(module, "host_limit", Small)
    run = offloaded(swap)
    with pytest.raises(offloadz.DoesNotFit, match="1000"):
        run.close(materialize=True)


def test_nothing_of_a_closed_run_stays(swap: Path) -> None:
    run = offloaded(swap)
    run.step(STEPS[0])
    gone = weakref.ref(run)
    run.close()
    del run
    gc.collect()
    assert gone() is None


# ---- what is refused by name -------------------------------------------------------------------------------------


def test_caches_and_recorded_outputs_with_gradients_are_refused(swap: Path) -> None:
    with offloaded(swap) as run:
        for name in ("use_cache", "output_attentions"):
            with pytest.raises(offloadz.ConfigError, match=name):
                run.step(STEPS[0], loss_fn=lambda m, b, name=name: m(**b, **{name: True}).loss)
        from transformers import DynamicCache

        with pytest.raises(offloadz.ConfigError, match="cache"):
            run.step(STEPS[0], loss_fn=lambda m, b: m(**b, past_key_values=DynamicCache(config=m.config)).loss)
        assert not run.session.steps
        run.step(STEPS[0])


def test_router_logits_with_gradients_are_refused(swap: Path) -> None:
    """Trap 3: recorded inside the blocks, they have no graph: the loss would be right and the router's gradient not."""
    import transformers as hf

    torch.manual_seed(0)
    config = hf.MixtralConfig(
        hidden_size=48, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=211, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True, sliding_window=None,
    )  # fmt: skip
    with (
        offloaded(swap, model=hf.MixtralForCausalLM(config)) as run,
        pytest.raises(offloadz.ConfigError, match="router"),
    ):
        run.step(STEPS[0])


@pytest.mark.parametrize(("told", "limit_bytes"), [("1GiB", 1 << 30), ("1.5 GB", 1_500_000_000), (1 << 30, 1 << 30)])
def test_limits_of_memory_are_told_as_in_a_configuration(told: str | int, limit_bytes: int) -> None:
    with offloadz.offload(tiny("llama"), host_memory=told, device_memory="auto") as run:
        assert run.plan.limits["host"] == limit_bytes


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing")
def test_a_model_that_recomputes_by_itself_is_refused_until_it_does_not(swap: Path) -> None:
    """As scripts for other trainers leave it: within a block that runs backward its weights are gone."""
    model, wanted = tiny("llama").train(), tiny("llama").train()
    model.gradient_checkpointing_enable()
    with pytest.raises(
        offloadz.ConfigError, match=r"^model: gradient checkpointing is on.*_disable\(\).*recompute = 'all'"
    ):
        offloadz.offload(model, swap=swap)
    model.gradient_checkpointing_disable()
    with offloaded(swap, model=model) as run, offloaded(swap, model=wanted) as other:
        assert float(run.step(STEPS[0])) == float(other.step(STEPS[0]))


def test_wrong_calls_are_refused_with_what_to_change(swap: Path) -> None:
    model = tiny("llama")
    with offloaded(swap, model=model) as run:
        for wrong, words in [
            ({k: v for k, v in STEPS[0].items() if k != "labels"}, "labels"),
            ({**STEPS[0], "input_ids": STEPS[0]["input_ids"] + 300}, "211"),
            ({**STEPS[0], "labels": STEPS[0]["labels"].clamp_min(0) + 300}, "211"),
        ]:
            with pytest.raises(offloadz.ConfigError, match=words):
                run.step(wrong)
        with pytest.raises(offloadz.ConfigError, match="one element"):
            run.step(STEPS[0], loss_fn=lambda m, b: m(**b).logits)
        with pytest.raises(offloadz.ConfigError, match="already offloaded"):
            offloadz.offload(model, swap=swap)
        assert not whole_tensors(run, "exp_avg_sq")["lm_head.weight"].any()
        with pytest.raises(offloadz.ConfigError, match="with groups="):
            run.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
        run.step(STEPS[0])
    for wrong in ({"freeze": "*embed*"}, {"keep_float32": "*norm*"}, {"blocks": "model.layers"}):
        with pytest.raises(offloadz.ConfigError, match="needed: a list"):
            offloadz.offload(tiny("llama"), swap=swap, **wrong)
    for copies in (0, -1, 2.5):
        with pytest.raises(offloadz.ConfigError, match=r"copies = .*; needed: a whole number"):
            offloadz.offload(tiny("llama"), swap=swap, copies=copies)
    for key in ("host_memory", "device_memory"):
        with pytest.raises(offloadz.ConfigError, match=f'^{key} = .*such as "22GiB", or a whole number'):
            offloadz.offload(tiny("llama"), swap=swap, **{key: "1 parsec"})
    with pytest.raises(offloadz.ConfigError, match="swap"):
        offloadz.offload(tiny("llama"), parameters="disk")
    with pytest.raises(offloadz.ConfigError, match="name each once"):
        offloadz.offload(tiny("llama"), swap=[swap, swap / "other" / ".."])
    with pytest.raises(offloadz.ConfigError, match="nothing to train"):
        offloadz.offload(tiny("llama"), swap=swap, freeze=["*"])
    with pytest.raises(offloadz.ConfigError, match="blocks"):
        offloadz.offload(nn.Linear(3, 5), swap=swap)
    with pytest.raises(offloadz.ConfigError, match="token_logprobs"):
        offloadz.token_logprobs(tiny("llama"), STEPS[0])


@pytest.mark.parametrize("own_first", [True, False])
def test_positions_for_each_row_and_for_all_in_turn(own_first: bool) -> None:
    """`step` gives a model with a table of positions those of each row; other losses need not."""

    def losses(micro: int) -> list[float]:
        def own(model: nn.Module, batch: Any) -> Tensor:
            return model(**batch, use_cache=False).loss  # type: ignore[no-any-return]

        with offloadz.offload(tiny("gpt2"), offloadz.AdamW(lr=1e-3), micro_batch_size=micro) as run:
            turns = [own, None, own] if own_first else [None, own, None]
            return [float(run.step(batch, loss_fn=turn)) for turn, batch in zip(turns, batches(3), strict=True)]

    assert losses(2) == pytest.approx(losses(4), rel=1e-5)


def test_a_batch_larger_than_planned_is_told_of_once(swap: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows, length = STEPS[0]["labels"].shape
    with offloaded(swap, batch_size=rows, max_length=length) as run:
        run.step(STEPS[0])
        assert "planned for" not in caplog.text
        for _ in range(2):
            run.step({key: torch.cat([value, value]) for key, value in STEPS[0].items()})
    told = f"run.step: {2 * rows} rows of {length} positions, planned for {rows * length} positions in all"
    assert caplog.text.count(told) == 1


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: offloadz.offload(nn.Linear(1, 1), swop="x"), "offload has no swop; nearest is swap"),
        (lambda: offloadz.AdamW(learning_rate=1e-3), "AdamW has no learning_rate; it takes lr, betas, eps"),
        (lambda: offloadz.SGD(momentums=0.5), "SGD has no momentums; nearest is momentum"),
    ],
)
def test_misspelt_keywords_are_answered(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(TypeError, match=words):
        call()
