"""What a plan says of a drive's life: figures that follow from bytes, and advice that keeps its word.  Kind K19."""

from __future__ import annotations

import json
from typing import Any

import pytest
from programs import stagger_bytes

from offloadz.plan.answer import Plan
from offloadz.plan.machine import Drive, Machine
from offloadz.plan.search import decide
from offloadz.plan.shapes import ParamInfo, TableInfo, make_spec
from offloadz.plan.spec import ModelSpec
from offloadz.plan.wishes import Wishes

GIB = 1 << 30
DRIVE = Drive("a drive", endurance_bytes=600 * 10**12, endurance_source="its maker")


def model(dtype: str = "bfloat16") -> ModelSpec:
    """Four blocks of 4 Mi elements, an untied table."""
    params = [ParamInfo("emb.weight", (4096, 1024))]
    params += [ParamInfo(f"layers.{i}.{n}.weight", (1024, 1024)) for i in range(4) for n in "abcd"]
    sizes = {"hidden_size": 1024, "vocab_size": 4096, "num_attention_heads": 8}
    tables, heads = [TableInfo("emb", "emb.weight")], [TableInfo("head", "emb.weight")]
    return make_spec(params, [f"layers.{i}" for i in range(4)], tables, heads, dtype=dtype, config=sizes)


def planned(spec: ModelSpec | None = None, drive: Drive | None = DRIVE, **wishes: Any) -> Plan:
    machine = Machine("any", 64 * GIB, "the test", device_bytes=64 * GIB, cores=2, drive=drive)
    told = {"optimizer": "disk", "parameters": "disk", **wishes}
    return decide(
        spec or model(), machine, Wishes(4, 64, swap=True, disk_free=1 << 40, checkpoint_free=1 << 40, **told)
    )


def test_life_follows_from_bytes_and_speed() -> None:
    plan = planned()
    found = json.loads(json.dumps(plan.to_json()))
    written = found["disk_written_per_step"]
    spec = model()
    assert written == spec.num_elements * 12 + stagger_bytes(spec), "low bits, two moments, the weight: 12 bytes each"
    assert found["disk_written_per_1000_steps"] == 1000 * written
    assert found["disk_written_per_day"] == int(written * 86400 / plan.step_s)
    assert found["drive_life_steps"] == 600 * 10**12 // written
    assert found["drive_life_days"] == pytest.approx(found["drive_life_steps"] * plan.step_s / 86400)
    assert found["drive"] == {"name": "a drive", "endurance": 600 * 10**12, "source": "its maker"}
    lines = "\n".join(plan.wear.lines())
    for words in (
        f"{found['drive_life_steps']:,} steps",
        "600TB (its maker)",
        " a step, ",
        " in 1,000 steps, ",
        " a day",
    ):
        assert words in lines, words


@pytest.mark.parametrize("drive", [None, Drive("a drive of which little is known", 10**12)])
def test_an_endurance_that_nobody_told_is_asked_for(drive: Drive | None) -> None:
    plan = planned(drive=drive)
    found = plan.to_json()
    assert found["drive_life_steps"] is None and found["drive_life_days"] is None
    assert all(less["drive_life_steps"] is None for less in found["writes_less"].values())
    lines = "\n".join(plan.wear.lines())
    assert "not known" in lines and "--set endurance=600TB" in lines and "[[drive]]" in lines


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("parameters", ["disk", "host"])
def test_what_is_advised_writes_what_was_said(dtype: str, parameters: str) -> None:
    """The plan of each advised recipe writes exactly as many bytes as the advice said."""
    from offloadz.plan.recipes import Recipe

    spec = model(dtype)
    plan = planned(spec, parameters=parameters)
    less = plan.to_json()["writes_less"]
    assert list(less) == (["bf16", "int8", "int8-sr"] if dtype == "bfloat16" else ["bf16", "int8"])
    seen = [plan.wear.written_bytes]
    for state, told in less.items():
        other = planned(spec.with_recipe(Recipe(state)), parameters=parameters).to_json()
        assert other["disk_written_per_step"] == told["disk_written_per_step"] < seen[-1]
        assert other["drive_life_steps"] == told["drive_life_steps"]
        seen.append(told["disk_written_per_step"])


def test_advice_names_bytes_a_parameter() -> None:
    lines = list(planned().wear.lines())
    assert 'optimizer.state = "int8" would write 6.03 bytes a trained parameter instead of 12' in "\n".join(lines)


def test_no_advice_where_state_is_in_memory() -> None:
    plan = planned(optimizer="host")
    assert plan.wear.written_bytes == model().num_elements * 2 and plan.to_json()["writes_less"] == {}
    plan = planned(optimizer="host", parameters="host")
    assert list(plan.wear.lines()) == ["written to swap: nothing"] and plan.to_json()["drive_life_steps"] is None


def test_frozen_parameters_wear_nothing() -> None:
    from dataclasses import replace

    spec = model()
    frozen = replace(
        spec,
        units=tuple(
            replace(u, sections=tuple(replace(s, trainable=False) for s in u.sections)) if "layers" in u.name else u
            for u in spec.units
        ),
    )
    plan = planned(frozen)
    assert plan.wear.num_trained == 4096 * 1024
    assert plan.wear.written_bytes == 4096 * 1024 * 12 + stagger_bytes(frozen)
