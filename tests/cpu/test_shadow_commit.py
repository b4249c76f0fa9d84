"""`commit = "shadow"`: updates as gradients come, into a spare; the same bits as updates that wait.

Kinds K10 (limits that never, always and sometimes fire; bad gradients) and K18 (evaluation in between); the bits of
every placement as in `test_parity.py`.
"""

from __future__ import annotations

import logging
import random
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import FAMILIES, Outcome, assert_same_bits, batches, tiny, train

import offloadz
from offloadz.model import arrivals
from offloadz.plan import spec as plan_spec
from offloadz.plan.answer import Plan
from offloadz.plan.errors import ConfigError

STEPS = batches(4)
KINDS = ("parameters", "gradients", "optimizer_state", "activations")


def ran(family: str, placement: tuple[str, ...], commit: str, swap: Path, **more: Any) -> Outcome:
    where = dict(zip(KINDS, placement, strict=True))
    told = {"swap": swap, "commit": commit, "micro_batch_size": 2} | where | more
    with offloadz.offload(tiny(family), offloadz.AdamW(lr=1e-3), **told) as run:
        return train(run, STEPS)


def drawn(index: int) -> tuple[tuple[str, ...], dict[str, Any]]:
    source = random.Random(index)
    placement = source.choice(list(product(("device", "host", "disk"), repeat=4)))
    return placement, {"slots": source.choice((1, 2, 3)), "sweeps": source.choice((1, 2)), "poison": index % 3 == 0}


def limit_of(which: str, family: str) -> float:
    """`sometimes` lies in the middle of the norms that are met."""
    if which != "sometimes":
        return {"off": 0.0, "never": 1e6, "always": 1e-2}[which]
    return sorted(ran(family, ("host",) * 4, "hold", Path(), max_grad_norm=0.0).norms)[2] * 0.999


@pytest.mark.parametrize("index", range(8))
@pytest.mark.parametrize("family", FAMILIES)
def test_shadow_has_the_bits_of_hold(family: str, index: int, swap: Path) -> None:
    which = ("off", "never", "always", "sometimes")[index % 4]
    placement, more = (("disk",) * 4, {"slots": 2}) if index == 0 else drawn(index)
    limit = limit_of(which, family)
    held = ran(family, ("host",) * 4, "hold", swap, max_grad_norm=limit)
    found = ran(family, placement, "shadow", swap, max_grad_norm=limit, **more)
    assert_same_bits(found, held, f"{which} {placement} {more}")


RECIPES = {
    "bf16": offloadz.AdamW(lr=1e-3, state="bf16"),
    "int8-sr": offloadz.AdamW(lr=1e-3, state="int8-sr"),
    "lion": offloadz.Lion(lr=1e-4, state="int8"),
    "sgd": offloadz.SGD(lr=1e-2),
}


@pytest.mark.parametrize("where", ["disk", "host"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes_and_updates_that_come_again(recipe: str, where: str, swap: Path) -> None:
    """Rounding at random is drawn for a step and an element, so an update that comes again gives the same bits."""
    clipped = []

    def loop(commit: str, tier: str) -> Outcome:
        told = {"dtype": torch.bfloat16, "max_grad_norm": limit, "commit": commit} | dict.fromkeys(KINDS, tier)
        freeze = ["model.layers.0.input_layernorm.weight"]  # the unit has a part that is never updated
        with offloadz.offload(tiny("llama"), RECIPES[recipe], swap=swap, freeze=freeze, poison=True, **told) as run:
            found = train(run, STEPS)
            clipped.extend(limit < norm for norm in found.norms)
            return found

    limit = 0.0
    limit = sorted(loop("hold", "host").norms)[2] * 0.999
    clipped.clear()
    assert_same_bits(loop("shadow", where), loop("hold", "host"), recipe)
    assert len(set(clipped)) == 2


@pytest.mark.parametrize("placement", [("disk",) * 4, ("host",) * 4, ("disk", "host", "host", "host")])
def test_updates_come_with_their_gradients_and_stay(placement: tuple[str, ...], swap: Path) -> None:
    """Nothing is updated a second time where nothing is clipped."""
    told = dict(zip(KINDS, placement, strict=True))
    with offloadz.offload(tiny("qwen3"), offloadz.AdamW(), swap=swap, commit="shadow", **told) as run:
        run.max_grad_norm = 1e6
        train(run, STEPS)
        phases = {op.phase for p in run.session._programs.values() for op in p.ops if op.verb.startswith("update")}
        assert phases == {"arrival"} and run.plan.commit == "shadow"


@pytest.mark.parametrize("where", ["disk", "host"])
def test_what_a_step_does_not_train_stays_as_a_clipped_one_left_it(where: str, swap: Path) -> None:
    """Settings that were laid ready for the clipped step, whose updates came late, are not for the next one."""
    outcomes = []
    for commit in ("hold", "shadow"):
        told = {"swap": swap, "commit": commit, "poison": True} | dict.fromkeys(KINDS, where)
        with offloadz.offload(tiny("llama"), offloadz.AdamW(lr=1e-3), **told) as run:
            found = Outcome()
            for step, batch in enumerate(STEPS):
                run.max_grad_norm = 1e6 if step % 2 else 1e-2
                for name, param in run.model.named_parameters():
                    param.requires_grad_(step % 2 == 0 or "layers.1.mlp" not in name)
                one = train(run, [batch])
                found = Outcome(found.losses + one.losses, found.norms + one.norms, one.weights)
            outcomes.append(found)
    assert_same_bits(*outcomes)


@pytest.mark.parametrize("most", [0.0, 1e-2], ids=["not clipped", "clipped"])
def test_units_of_several_parts(most: float, swap: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Updated in the slot they are computed from (hold), or copied from it (shadow), part by part."""
    monkeypatch.setattr(plan_spec, "PART_ELEMENTS", 4096)
    held = ran("llama", ("host",) * 4, "hold", swap, max_grad_norm=most)
    for commit in ("hold", "shadow", *(["in_place"] if not most else [])):
        for placement, slots in ((("disk",) * 4, 1), (("disk",) * 4, 2), (("disk", "host", "host", "host"), 3)):
            found = ran("llama", placement, commit, swap, max_grad_norm=most, slots=slots, poison=True)
            assert_same_bits(found, held, f"{commit} {placement} {slots}")


def half_way(run: offloadz.Run, act: Any) -> Any:
    """Have `act` called in the middle of each backward pass; returns the cure."""

    class Acting(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            act()
            return grad

    return run.model.get_submodule("model.embed_tokens").register_forward_hook(lambda m, a, out: Acting.apply(out))


@pytest.mark.parametrize("where", ["disk", "host"])
def test_an_error_half_way_leaves_the_step_before(where: str, swap: Path) -> None:
    """All blocks have been updated by then; none of it is there afterwards."""

    def fail() -> None:
        raise KeyError("a mistake in a hook")

    told = {"micro_batch_size": 2, "max_grad_norm": 1e6} | dict.fromkeys(KINDS, where)
    with offloadz.offload(tiny("llama"), offloadz.AdamW(lr=1e-3), swap=swap, commit="shadow", **told) as run:
        found = Outcome()
        for batch in STEPS:
            cure, counts = half_way(run, fail), dict(run.session.steps)
            with pytest.raises(KeyError):
                run.step(STEPS[0])
            cure.remove()
            assert run.session.steps == counts
            found.losses.append(float(run.step(batch)))
            found.norms.append(run.report.grad_norm)
        found.weights = train(run, []).weights
    assert_same_bits(found, ran("llama", ("host",) * 4, "hold", swap, max_grad_norm=1e6), where)


@pytest.mark.parametrize("where", ["disk", "host"])
def test_settings_are_those_of_the_decision(where: str, swap: Path) -> None:
    """A rate that is changed when blocks have been updated is in force for all of the step, as with hold."""

    def loop(commit: str, tier: str) -> Outcome:
        told = {"micro_batch_size": 2, "max_grad_norm": 1e6} | dict.fromkeys(KINDS, tier)
        with offloadz.offload(tiny("llama"), offloadz.AdamW(lr=1e-3), swap=swap, commit=commit, **told) as run:

            def slower() -> None:
                run.optimizer.param_groups[0]["lr"] *= 0.5

            half_way(run, slower)
            return train(run, STEPS)

    assert_same_bits(loop("shadow", where), loop("hold", "host"), where)


def test_several_backward_passes_and_evaluations(swap: Path) -> None:
    def loop(commit: str, tier: str) -> Outcome:
        told = {"max_grad_norm": 0.9} | dict.fromkeys(KINDS, tier)
        out = Outcome()
        with offloadz.offload(tiny("qwen3"), offloadz.AdamW(lr=1e-3), swap=swap, commit=commit, **told) as run:
            schedule = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda step: 1.0 / (1 + step))
            for batch in STEPS:
                for rows in (slice(0, 2), slice(2, 4)):
                    run.backward(run.model(**{k: v[rows] for k, v in batch.items()}).loss)
                    with torch.no_grad():
                        out.losses.append(float(run.model(**batch).loss))
                run.update()
                schedule.step()
                out.norms.append(run.report.grad_norm)
                out.losses.append(float(run.step(batch)))
            out.weights = train(run, []).weights
        return out

    held = loop("hold", "host")
    assert_same_bits(loop("shadow", "disk"), held, "two backward passes an update")
    assert_same_bits(loop("shadow", "host"), held, "two backward passes an update")


@pytest.mark.parametrize("where", ["disk", "host"])
def test_a_checkpoint_has_the_step_and_can_be_loaded_between(where: str, swap: Path, tmp_path: Path) -> None:
    """What is loaded over a decided state is kept before anything is proposed beside it."""
    told = {"swap": swap, "micro_batch_size": 2, "max_grad_norm": 1e6} | dict.fromkeys(KINDS, where)
    with offloadz.offload(tiny("llama"), offloadz.AdamW(lr=1e-3), commit="shadow", **told) as run:
        train(run, STEPS[:2])
        saved = run.save(tmp_path / "saved", portable=True)
        train(run, STEPS[2:])
        run.load(saved)
        run.max_grad_norm = 1e-2  # the first step after it is clipped: its updates come again, from what was loaded
        found = train(run, STEPS[2:])
    with offloadz.offload(tiny("llama"), offloadz.AdamW(lr=1e-3), commit="hold", **told) as run:
        train(run, STEPS[:2])
        run.max_grad_norm = 1e-2
        assert_same_bits(found, train(run, STEPS[2:]), where)


@pytest.mark.parametrize("where", ["disk", "host"])
def test_whoever_looks_half_way_sees_the_step_before(where: str, swap: Path) -> None:
    def loop(commit: str, tier: str) -> Outcome:
        seen: list[float] = []

        def look() -> None:
            with torch.no_grad():
                seen.append(float(run.model(**STEPS[3]).loss))

        told = {"micro_batch_size": 2, "max_grad_norm": 1e6} | dict.fromkeys(KINDS, tier)
        with offloadz.offload(tiny("llama"), offloadz.AdamW(lr=1e-2), swap=swap, commit=commit, **told) as run:
            for batch in STEPS:
                cure = half_way(run, look)
                run.step(batch)
                cure.remove()
            return Outcome(seen, [], train(run, []).weights)

    assert_same_bits(loop("shadow", where), loop("hold", "host"), where)


def may_go_over(swap: Path) -> Plan:
    """A plan with room for shadow that begins with hold, as with clipping and measured rates."""
    with offloadz.offload(tiny("llama"), swap=swap, commit="shadow", **OVER) as run:
        return replace(run.plan, seldom_s=1.0)


OVER: dict[str, Any] = {"micro_batch_size": 2} | dict.fromkeys(KINDS, "disk")


def test_a_plan_s_own_choice_begins_with_hold_goes_over_and_back(
    swap: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Clipping fires at first, then not, then again; the bits are those of hold, and each change is one line."""
    monkeypatch.setattr(arrivals, "WINDOW", 8)
    steps = STEPS * 4
    commits = []

    def loop(**told: Any) -> Outcome:
        out = Outcome()
        with offloadz.offload(tiny("llama"), offloadz.AdamW(lr=1e-3), swap=swap, **OVER, **told) as run:
            assert run.session.placement.commit == "hold"
            for index, batch in enumerate(steps):
                run.max_grad_norm = 1e-2 if index < 4 or index > 12 else 1e6
                out.losses.append(float(run.step(batch)))
                commits.append(run.session.placement.commit)
            out.weights = train(run, []).weights
        return out

    with caplog.at_level(logging.WARNING, "offloadz"):
        found = loop(plan=may_go_over(swap))
    assert commits == ["hold"] * 11 + ["shadow"] * 3 + ["hold"] * 2
    lines = [record.getMessage() for record in caplog.records if "clipping fired" in record.getMessage()]
    assert ["0 of the last 8 steps" in lines[0], "2 of the last 8 steps" in lines[1]] == [True, True]
    assert len(lines) == 2
    assert_same_bits(found, loop(commit="hold"), "over to hold and back")


def test_what_is_asked_for_beside_such_a_plan_is_what_it_says_and_stays(
    swap: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrivals, "WINDOW", 2)
    plan = may_go_over(swap)
    assert plan.commit == "hold"
    with pytest.raises(ConfigError, match="commit = 'shadow' beside a plan that says 'hold'"):
        offloadz.offload(tiny("llama"), swap=swap, plan=plan, commit="shadow", **OVER)
    with offloadz.offload(tiny("llama"), swap=swap, plan=plan, commit="hold", **OVER) as run:
        run.max_grad_norm = 1e6  # with the choice left to the run it would go over
        train(run, STEPS)
        assert run.session.placement.commit == run.plan.commit == run.plan.placement.commit == "hold"
