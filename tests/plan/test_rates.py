"""Which rates a prediction takes: of a GPU and its link, of each format's update, of what lanes share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from offloadz.plan.answer import Plan
from offloadz.plan.footprint import DRIVER_BYTES
from offloadz.plan.machine import Machine, rates_told
from offloadz.plan.recipes import Recipe
from offloadz.plan.search import decide
from offloadz.plan.shapes import ParamInfo, TableInfo, make_spec
from offloadz.plan.spec import ModelSpec
from offloadz.plan.wishes import Wishes

GIB = 1 << 30
BOX = Machine("box", 64 * GIB, "a test", device_bytes=64 * GIB, cores=2)
CARD = replace(BOX, device="cuda", unified=False, device_bytes=8 * GIB, gpu="a card")


def model() -> ModelSpec:
    """Four blocks of 4 Mi elements, an untied table; bfloat16."""
    params = [ParamInfo("emb.weight", (4096, 1024))]
    params += [ParamInfo(f"layers.{i}.{n}.weight", (1024, 1024)) for i in range(4) for n in "abcd"]
    sizes = {"hidden_size": 1024, "vocab_size": 4096, "num_attention_heads": 8}
    tables, heads = [TableInfo("emb", "emb.weight")], [TableInfo("head", "emb.weight")]
    return make_spec(params, [f"layers.{i}" for i in range(4)], tables, heads, dtype="bfloat16", config=sizes)


def planned(machine: Machine, spec: ModelSpec | None = None, **wishes: Any) -> Plan:
    if not machine.unified:
        wishes = {"compute": "bfloat16", **wishes}
    return decide(spec or model(), machine, Wishes(4, 64, swap=True, disk_free=1 << 40, **wishes))


def rated(machine: Machine, **rates: float) -> Machine:
    return replace(machine, rates={**machine.rates, **rates})


def test_a_gpus_plan_has_a_tier_of_its_own() -> None:
    plan, cpu = planned(CARD), planned(BOX)
    assert plan.fits and plan.device == "cuda" and plan.placement.compute == plan.placement.storage == "bfloat16"
    assert plan.limits["device"] == int(0.9 * 8 * GIB) and "device" not in cpu.limits and not cpu.peak["device"]
    step = plan.footprint.terms["step"]["device"]
    assert step["driver and libraries"] == DRIVER_BYTES and step["slots compute.w"] and step["slots compute.g"]
    assert not any("compute" in name for name in plan.footprint.terms["step"]["host"])
    assert sum(step.values()) == plan.peak["device"] and plan.placement.activations == "host"


def test_a_gpu_that_is_too_small_is_refused_by_name() -> None:
    plan = planned(replace(CARD, device_bytes=600 << 20))
    assert not plan.fits and plan.shortage.startswith("the memory of a card has 540.0MiB to use and step needs")
    assert planned(CARD, device_memory=540 << 20).shortage.startswith("offload.device_memory has") is False
    assert not planned(CARD, device_memory=540 << 20).fits


def test_a_gpus_copies_go_over_its_link_and_zeros_do_not() -> None:
    slow = rated(CARD, bandwidth=1e12, h2d=1e8)
    fast = rated(slow, h2d=2e8)
    found, half = planned(slow), planned(fast)
    assert found.busy_s and half.busy_s
    weights = 2 * sum(unit.weight_bytes for unit in model().units)  # once forward, once backward; the table at home
    zeros = found.busy_s["h2d"] - 2 * (found.busy_s["h2d"] - half.busy_s["h2d"])
    slopes = sum(unit.slope_bytes for unit in model().units if unit.kind == "tile")  # others are written
    assert zeros == pytest.approx(slopes / 1e12, rel=0.1), "made on the GPU, at the rate of its own memory"
    moved = 2 * (found.busy_s["h2d"] - half.busy_s["h2d"]) * 1e8
    assert moved >= weights


@pytest.mark.parametrize("state", ["bf16", "int8", "int8-sr"])
def test_each_formats_update_has_its_own_rate_where_it_is_known(state: str) -> None:
    spec = model().with_recipe(Recipe(state))
    by_bytes = planned(BOX, spec)
    known = planned(rated(BOX, **{f"cpu_{state.replace('-', '_')}": 1e9}), spec)
    assert by_bytes.busy_s and known.busy_s
    assert known.busy_s["cpu"] == pytest.approx(spec.num_elements / 1e9)
    ratio = Recipe(state).moved_bytes("bfloat16") / Recipe("fp32").moved_bytes("bfloat16")
    assert by_bytes.busy_s["cpu"] == pytest.approx(spec.num_elements * ratio / BOX.rates["cpu"])
    other = planned(rated(BOX, **{f"cpu_{state.replace('-', '_')}": 1e9}))
    assert other.busy_s and other.busy_s["cpu"] == pytest.approx(spec.num_elements / BOX.rates["cpu"])


def test_a_step_is_not_shorter_than_what_its_lanes_share_takes() -> None:
    wishes = {"optimizer": "disk", "parameters": "disk"}
    free = planned(BOX, **wishes)
    for name, rate in (("disk_both", 1e7), ("memory_shared", 1e7)):
        bound = planned(rated(BOX, **{name: rate}), **wishes)
        assert bound.step_s > 2 * free.step_s and bound.bottleneck == ("drive" if name == "disk_both" else "memory")
        assert bound.busy_s == free.busy_s
        assert planned(rated(BOX, **{name: 1e15}), **wishes).step_s == free.step_s
    written = free.wear.written_bytes
    bound = planned(rated(BOX, disk_both=1e7), **wishes)
    assert 2 * written / 1e7 <= bound.step_s < 3.5 * written / 1e7, (
        "what is written is read too, and weights more often"
    )


def test_long_lists_of_sources_are_cut_for_people() -> None:
    told = rates_told("machine file a.toml (" + "disk_read: measured on a drive; " * 40 + ")")
    assert len(told) < 300 and "...) (all with plan --json)" in told
    assert told.endswith("nothing was measured by this command")
    assert "..." not in rates_told("machine file a.toml")
