"""Adam, Lion and SGD against plain loops, and state that goes between a run and torch's own optimizers.

Cases G15 (counters and groups) and kind K07: equal to a stated reference, whatever the recipe it is stored by.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import reference
import torch
from tiny_models import Outcome, assert_close, assert_same_weights, batches, tiny, train, weights, whole_tensors
from torch import Tensor, nn

import offloadz
from offloadz.model import torch_state
from offloadz.plan.errors import ConfigError, DoesNotFit

STEPS = batches(6)
DISK = {"parameters": "disk", "gradients": "host", "optimizer_state": "disk", "activations": "host"}


def start_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


class PlainLion(torch.optim.Optimizer):
    """Lion as its paper's algorithm 2, in plain torch."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                m = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                direction = (beta1 * m + (1 - beta1) * p.grad).sign()
                p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * direction)
                m.mul_(beta2).add_((1 - beta2) * p.grad)


def plain_steps(model: nn.Module, optimizer: torch.optim.Optimizer, steps: list[dict[str, Tensor]]) -> Outcome:
    """torch's own loop on a module: the mean over the targets, clipped at 1."""
    out = Outcome()
    for batch in steps:
        optimizer.zero_grad()
        out.losses.append(reference.backward(model, batch))
        out.norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)))
        optimizer.step()
    out.weights = start_of(model)
    return out


Pair = tuple[Any, Callable[[Any], torch.optim.Optimizer]]
RULES: dict[str, Pair] = {
    "adamw": (
        offloadz.AdamW(lr=1e-3, weight_decay=0.1),
        lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.1, foreach=False),
    ),
    "adam": (
        offloadz.Adam(lr=1e-3, weight_decay=0.1),
        lambda p: torch.optim.Adam(p, lr=1e-3, weight_decay=0.1, foreach=False),
    ),
    "lion": (
        offloadz.Lion(lr=3e-4, weight_decay=0.1),
        lambda p: PlainLion(p, lr=3e-4, betas=(0.9, 0.99), weight_decay=0.1),
    ),
    "sgd": (
        offloadz.SGD(lr=0.05, momentum=0.9, weight_decay=0.1),
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.1, foreach=False),
    ),
    "sgd-bare": (
        offloadz.SGD(lr=0.05, weight_decay=0.1),
        lambda p: torch.optim.SGD(p, lr=0.05, weight_decay=0.1, foreach=False),
    ),
}


def begun(swap: Path, settings: Any, model: nn.Module | None = None, **how: Any) -> offloadz.Run:
    return offloadz.offload(model or tiny("llama"), settings, swap=swap, micro_batch_size=2, **{**DISK, **how})


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "adamw"])  # that one is test_parity's
def test_every_rule_is_the_plain_loops(rule: str, swap: Path) -> None:
    settings, plain = RULES[rule]
    model = tiny("llama")
    start = start_of(model)
    wanted = plain_steps(model, plain(model.parameters()), STEPS[:5])
    with begun(swap, settings) as run:
        found = train(run, STEPS[:5])
    if rule == "lion":  # a sign jumps where a sum is near zero: few weights are apart, and by a step
        assert found.losses == pytest.approx(wanted.losses, rel=1e-4)
        moved = torch.cat([(found.weights[n] - w).abs().flatten() for n, w in wanted.weights.items()])
        assert float((moved > 1e-6).float().mean()) < 2e-3
    else:
        assert_close(found, wanted, start)


@pytest.mark.parametrize("rule", ["adamw", "adam", "sgd"])
def test_the_state_of_torchs_own_is_gone_on_with(rule: str, swap: Path) -> None:
    """Three steps of torch, its weights and state into a run, three more: as six of torch's."""
    settings, plain = RULES[rule]
    model = tiny("llama")
    start, optimizer = start_of(model), plain(model.parameters())
    plain_steps(model, optimizer, STEPS[:3])
    half = tiny("llama")
    half.load_state_dict(model.state_dict())
    told = copy.deepcopy(optimizer.state_dict())  # the tensors are the optimizer's own, which goes on
    wanted = plain_steps(model, optimizer, STEPS[3:])
    with begun(swap, type(settings)(lr=0.5, **({"momentum": 0.5} if rule == "sgd" else {})), half) as run:
        run.optimizer.load_state_dict(told)
        assert set(run.session.steps.values()) == {1 if rule == "sgd" else 3}
        assert run.optimizer.param_groups[0]["lr"] == settings.lr
        assert run.optimizer.param_groups[0]["weight_decay"] == 0.1
        assert_close(train(run, STEPS[3:]), wanted, start)


@pytest.mark.parametrize("rule", ["adamw", "sgd"])
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_torchs_own_goes_on_with_ours(rule: str, tier: str, swap: Path) -> None:
    settings, plain = RULES[rule]
    with begun(swap, settings, optimizer_state=tier) as run:
        train(run, STEPS[:3])
        told, half = run.optimizer.state_dict(), weights(run)
        wanted = train(run, STEPS[3:])
    model = tiny("llama")
    start = start_of(model)
    model.load_state_dict(half)
    optimizer = plain(model.parameters())
    optimizer.load_state_dict(told)
    assert_close(plain_steps(model, optimizer, STEPS[3:]), wanted, start)


@pytest.mark.parametrize("state", ["bf16", "int8", "int8-sr"])
def test_state_there_and_back_changes_no_bit(state: str, swap: Path) -> None:
    """Fp32 tensors of every recipe: loaded into a run of the same weights, it goes on bit by bit."""
    settings = offloadz.AdamW(lr=1e-3, state=state)
    with begun(swap, settings, dtype=torch.bfloat16) as run:
        train(run, STEPS[:3])
        told = run.optimizer.state_dict()
        assert all(t.dtype == torch.float32 for s in told["state"].values() for t in s.values())
        before = {kind: whole_tensors(run, kind) for kind in ("exp_avg", "exp_avg_sq")}
        names = told["param_groups"][0]["param_names"]
        for i, name in enumerate(names):
            assert torch.equal(told["state"][i]["exp_avg_sq"], before["exp_avg_sq"][name])
            assert int(told["state"][i]["step"]) == 3
        blank = {"state": {}, "param_groups": told["param_groups"]}
        run.optimizer.load_state_dict(blank)
        assert not run.session.steps and not any(t.any() for t in whole_tensors(run, "exp_avg").values())
        run.optimizer.load_state_dict(told)
        assert set(run.session.steps.values()) == {3}
        for kind, wanted in before.items():
            assert_same_weights(whole_tensors(run, kind), wanted, kind)


def test_parameters_without_an_update_have_no_state(swap: Path) -> None:
    with begun(swap, offloadz.AdamW(lr=1e-3)) as run:
        assert run.optimizer.state_dict()["state"] == {}


def test_names_win_over_the_order_where_both_sides_have_them(swap: Path) -> None:
    """torch's own optimizer over named parameters in another order, and in other groups of the same names."""
    model = tiny("llama")
    named = list(reversed(list(model.named_parameters())))
    optimizer = torch.optim.AdamW(named, lr=1e-3, foreach=False)
    plain_steps(model, optimizer, STEPS[:1])
    with begun(swap, offloadz.AdamW()) as run:
        run.optimizer.load_state_dict(optimizer.state_dict())
        for name, moment in whole_tensors(run, "exp_avg").items():
            assert torch.equal(moment, optimizer.state[dict(named)[name]]["exp_avg"]), name


def test_what_does_not_fit_together_is_refused_and_changes_nothing(swap: Path, monkeypatch: Any) -> None:
    model = tiny("llama")
    plain = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    plain_steps(model, plain, STEPS[:1])
    told = plain.state_dict()
    first = told["state"][0]

    def changed(**by: Any) -> dict[str, Any]:
        return {"state": told["state"], "param_groups": [{**told["param_groups"][0], **by}]}

    def of_first(**by: Any) -> dict[str, Any]:
        return {**told, "state": {**told["state"], 0: {**first, **by}}}

    with begun(swap, offloadz.AdamW(lr=1e-3)) as run:
        train(run, STEPS[:2])
        before = {kind: whole_tensors(run, kind) for kind in ("weight", "exp_avg", "exp_avg_sq")}
        for wrong, words in (
            (changed(amsgrad=True), "amsgrad = True is not built"),
            (changed(maximize=True), "maximize = True is not built"),
            (changed(decoupled_weight_decay=False), "the state of Adam, whose decay is another"),
            (changed(params=told["param_groups"][0]["params"][:-1]), "its groups hold"),
            ({**told, "state": {**told["state"], 0: {**first, "exp_avg": torch.zeros(3)}}}, "another order"),
            (
                {**told, "state": {**told["state"], 0: {"step": 1.0, "momentum_buffer": first["exp_avg"]}}},
                "keeps exp_avg",
            ),
            ({"state": told["state"]}, "state and param_groups"),
            ({**told, "state": {str(number): s for number, s in told["state"].items()}}, "which no group names"),
            (of_first(step=-1.0), "step of .* is -1.0"),
            (of_first(step=torch.tensor(float("nan"))), "step of .* is nan"),
            ({**told, "state": {**told["state"], 0: {"exp_avg": first["exp_avg"], "exp_avg_sq": first["exp_avg_sq"]}}},
             "has no step"),
            (of_first(exp_avg=first["exp_avg"].tolist()), "is list; needed: a tensor"),
            (of_first(exp_avg=torch.full_like(first["exp_avg"], float("nan"))), "not finite"),
            (of_first(exp_avg_sq=first["exp_avg_sq"].to("meta")), "or on meta"),
            (changed(lr=-1.0), "lr = -1.0"),
            (changed(betas=(0.9, 1.0)), "betas = "),
        ):  # fmt: skip
            with pytest.raises(ConfigError, match=words):
                run.optimizer.load_state_dict(wrong)
        monkeypatch.setattr(torch_state, "host_limit", lambda: type("Limit", (), {"available_bytes": 1000}))
        with pytest.raises(DoesNotFit, match=r"takes \d+ bytes, 1000 are available; run\.save\(\)"):
            run.optimizer.state_dict()
        assert set(run.session.steps.values()) == {2}
        for kind, wanted in before.items():
            assert_same_weights(whole_tensors(run, kind), wanted, kind)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: offloadz.AdamW(state="int4"), "one of fp32, bf16, int8, int8-sr"),
        (lambda: offloadz.Lion(betas=(0.9, 1.0)), "Lion: betas"),
        (lambda: offloadz.SGD(momentum=1.0), "SGD: momentum = 1.0"),
        (lambda: offloadz.SGD(groups=[{"match": ["*"], "betas": (0, 0)}]), "any of lr, weight_decay"),
        (lambda: offloadz.SGD(groups=[{"match": ["*"], "momentum": 0.5}]), "any of lr, weight_decay"),
        (lambda: offloadz.AdamW(lr="1e-3"), "AdamW: lr = '1e-3'"),
        (lambda: offloadz.AdamW(betas=0.9), "AdamW: betas = 0.9"),
        # a text taken letter by letter would have matched every parameter by its "*"
        (lambda: offloadz.AdamW(no_decay="*norm*"), r"no_decay = '\*norm\*'; needed: a list"),
        (lambda: offloadz.AdamW(groups=[{"match": "*embed*", "lr": 1e-6}]), r"match of a group = '\*embed\*'"),
        (lambda: offloadz.AdamW(groups=[{"match": None, "lr": 1e-6}]), "match of a group = None"),
        (lambda: offloadz.AdamW(groups=[{"match": ["*"], "lr": -1.0}]), r"group of \['\*'\]: lr = -1.0"),
        (lambda: offloadz.AdamW(groups=[{"match": ["*"], "betas": (0.9, 1.0)}]), r"group of .*: betas = \(0.9, 1.0\)"),
    ],
)
def test_settings_are_checked_by_name(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()


def test_a_pattern_of_a_group_matches_something(swap: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As those of model.freeze do; a group that has nothing for another reason is allowed, and said."""
    wrong = {"match": ["*embed*", "*nonesuch*"], "lr": 1e-6}
    with pytest.raises(ConfigError, match=r"optimizer.groups: '[*]nonesuch[*]' matches none of the .* nearest: "):
        begun(swap, offloadz.AdamW(groups=[wrong]))
    frozen = {"match": ["*embed*"], "lr": 1e-6}
    with begun(swap, offloadz.AdamW(groups=[frozen]), freeze=["*embed*"]) as run:
        assert [group["lr"] for group in run.optimizer.param_groups] == [1e-3]
    assert "optimizer.groups: ['*embed*'] has nothing" in caplog.text


def test_a_checkpoint_without_moments_is_refused_by_its_rule(swap: Path, tmp_path: Path) -> None:
    with begun(swap, offloadz.SGD()) as run:
        run.step(STEPS[0])
        run.save(tmp_path / "checkpoint")
    with (
        begun(swap, offloadz.AdamW()) as run,
        pytest.raises(ConfigError, match="holds no moments, this optimizer keeps"),
    ):
        run.load(tmp_path / "checkpoint")


def test_betas_of_a_group_are_looked_at_before_a_step_is_decided(swap: Path) -> None:
    with begun(swap, offloadz.AdamW()) as run:
        run.step(STEPS[0])
        run.flush()
        before = weights(run)
        for betas in ((0.9, 1.0), (1.5, 0.9), (0.9,), None):
            run.optimizer.param_groups[0]["betas"] = betas
            with pytest.raises(ConfigError, match=r"betas = .* in a parameter group"):
                run.step(STEPS[1])
        assert_same_weights(weights(run), before)
        run.optimizer.param_groups[0]["betas"] = (0.8, 0.9)
        run.step(STEPS[1])


def test_a_group_may_change_its_momentum_but_not_lose_it(swap: Path) -> None:
    """torch's OneCycleLR moves momentum; to zero would leave moments behind that nobody keeps."""
    with begun(swap, offloadz.SGD(lr=0.1, momentum=0.9)) as run:
        schedule = torch.optim.lr_scheduler.OneCycleLR(run.optimizer, max_lr=0.1, total_steps=6)
        run.step(STEPS[0])
        schedule.step()
        assert run.optimizer.param_groups[0]["momentum"] != 0.9
        run.step(STEPS[1])
        run.optimizer.param_groups[0]["momentum"] = 0.0
        with pytest.raises(ConfigError, match="begun with momentum stays so"):
            run.step(STEPS[2])


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    torch.manual_seed(0)
    yield
