"""The least tokens a step that hide all else, held to what a step of so many takes; what a plan says it waits for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from offloadz.plan.answer import Plan
from offloadz.plan.estimate import estimate
from offloadz.plan.footprint import Batch
from offloadz.plan.hiding import HIDDEN, Hiding
from offloadz.plan.machine import Machine
from offloadz.plan.predict import Prediction
from offloadz.plan.search import decide
from offloadz.plan.shapes import ParamInfo, TableInfo, make_spec
from offloadz.plan.spec import ModelSpec
from offloadz.plan.timeline import Span, Timeline
from offloadz.plan.waits import bottleneck_told, idle_spans
from offloadz.plan.wishes import Wishes

GIB = 1 << 30
BOX = Machine("box", 64 * GIB, "a test", device_bytes=64 * GIB, cores=2)
CARD = replace(
    BOX, device="cuda", unified=False, device_bytes=24 * GIB, gpu="a card",
    rates={**BOX.rates, "device": 2e12, "bandwidth": 1e12, "cpu": 8.6e7},
)  # fmt: skip


def model(blocks: int = 16) -> ModelSpec:
    """Blocks of 4 Mi elements, a tied table; bfloat16."""
    params = [ParamInfo("emb.weight", (2048, 1024))]
    params += [ParamInfo(f"layers.{i}.{n}.weight", (1024, 1024)) for i in range(blocks) for n in "abcd"]
    sizes = {"hidden_size": 1024, "vocab_size": 2048, "num_attention_heads": 8}
    tables, heads = [TableInfo("emb", "emb.weight")], [TableInfo("head", "emb.weight")]
    return make_spec(params, [f"layers.{i}" for i in range(blocks)], tables, heads, dtype="bfloat16", config=sizes)


def planned(machine: Machine, rows: int, **wishes: Any) -> Plan:
    asked = Wishes(
        rows, 64 if machine.unified else 256, swap=True, disk_free=1 << 40, compute="bfloat16", recompute="all", keep=1
    )
    return decide(model(), machine, replace(asked, **wishes))


def tokens(plan: Plan) -> int | None:
    found: int | None = plan.to_json()["smallest_tokens_per_step"]
    return found


def ratio(machine: Machine, plan: Plan, rows: int) -> float:
    """Seconds of a step of so many rows by those of its computation, simulated as it would run."""
    found = estimate(model(), plan.placement, replace(plan.batch, rows=rows), machine)
    return found.step_s / found.busy_s["device"]


@pytest.mark.parametrize("commit", ["hold", "in_place"])
@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("machine", [BOX, CARD], ids=["cpu", "gpu"])
def test_a_step_of_so_many_tokens_is_hardly_longer_than_its_computation(
    machine: Machine, tier: str, commit: str
) -> None:
    """And one of a sixteenth fewer is longer, whatever waits there are between lanes."""
    told = {"parameters": tier, "gradients": tier, "optimizer": tier, "commit": commit, "micro_batch_size": 1}
    plan = planned(machine, 8, **told)
    need = tokens(plan)
    assert need is not None and need % plan.batch.length == 0
    rows = need // plan.batch.length
    assert ratio(machine, plan, rows) <= HIDDEN * 1.005
    fewer = rows - max(1, rows // 16)
    assert fewer == 0 or ratio(machine, plan, fewer) > HIDDEN, "fewer would do"
    again = planned(machine, 3 * rows, **told)
    assert tokens(again) == pytest.approx(need, rel=0.04, abs=plan.batch.length), "however many rows were planned"


def test_none_hides_what_is_slower_for_each_token() -> None:
    """Saved inputs over a slow bus: more tokens are more of them."""
    slow = replace(CARD, rates={**CARD.rates, "h2d": 1e8, "d2h": 1e8})
    plan = planned(slow, 8)
    assert plan.placement.activations == "host" and tokens(plan) is None and plan.hiding is not None
    assert plan.hiding.line.startswith("no number of tokens a step hides transfers: what each token moves takes longer")
    assert ratio(slow, plan, 1 << 10) > HIDDEN
    assert tokens(planned(CARD, 8)) is not None


def test_a_bottleneck_that_is_not_busy_is_said_with_what_it_waits_for() -> None:
    """Updates that wait for the norm leave a GPU idle under the forward; with many rows nothing does."""
    few, many = planned(CARD, 16, commit="hold"), planned(CARD, 16 * 16, commit="hold")
    told = [bottleneck_told(estimate(model(), p.placement, p.batch, CARD), p.commit) for p in (few, many)]
    assert few.bottleneck == many.bottleneck == "device" and few.busy_s is not None
    share = few.busy_s["device"] / few.step_s
    assert share < 0.9 and told == [
        f"device ({share:.0%} busy; it waits for updates, which wait for the norm)", "device",
    ]  # fmt: skip


def test_what_is_waited_for_runs_while_the_busiest_does_nothing() -> None:
    line = Timeline((Span("device", "a", 1.0, 4.0), Span("disk_read", "b", 0.0, 1.5), Span("d2h", "c", 4.0, 6.0)))
    assert idle_spans(line, "device") == [(0.0, 1.0), (4.0, 6.0)]
    empty = planned(CARD, 8)
    program = estimate(model(), empty.placement, empty.batch, CARD).program
    found = Prediction(program, {}, 6.0, {"device": 3.0}, 0, 0, taken_s={"device": 3.0, "d2h": 2.0})
    found.__dict__["timeline"] = line
    assert bottleneck_told(found, "shadow") == "device (50% busy; it waits for d2h)"
    found.shared_s["memory"] = 4.0
    assert bottleneck_told(found, "hold") == "memory (67% busy; lanes wait for each other)"


@pytest.mark.parametrize(
    ("won_s", "words"),
    [(1e-2, "hidden behind the computation from "), (1e-8, "up to 16,777,216 tokens a step do not hide"),
     (-1e-2, "no number of tokens a step hides")],
)  # fmt: skip
def test_rows_that_are_hidden_in_part_are_looked_for_as_far_as_anybody_looks(
    monkeypatch: pytest.MonkeyPatch, won_s: float, words: str
) -> None:
    """Each row more wins some of what its computation would: many more are needed, and then found."""

    class Slow:
        def __init__(self, *told: object) -> None:
            pass

        def lack_s(self, rows: int) -> float:
            return 5.0 - won_s * (rows - 8)

    monkeypatch.setattr("offloadz.plan.hiding._Step", Slow)
    plan = planned(CARD, 8)
    found = Hiding(model(), plan.placement, Batch(8, 256, 1), CARD, 5.0 + HIDDEN * 8.0, 8.0)
    assert words in found.line and (found.tokens is None) == (won_s < 1e-4)
    if found.tokens:
        assert found.tokens == pytest.approx(508 * 256, rel=0.04)
