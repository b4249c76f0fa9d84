"""The bytes of every recipe, from the elements up: layouts, scales at the borders of members and parts, what a plan
says and which cheaper recipe it names.  Kind K08 where a recipe has no meaning."""

from __future__ import annotations

from dataclasses import replace

import pytest

import offloadz.plan.spec as spec_module
from offloadz.memory.flat import spans, state_views, typed
from offloadz.plan.answer import Plan
from offloadz.plan.errors import ConfigError
from offloadz.plan.footprint import Batch, checkpoint_bytes
from offloadz.plan.machine import Machine
from offloadz.plan.placement import Placement, home_bytes
from offloadz.plan.predict import predict
from offloadz.plan.recipes import BLOCK_ELEMENTS, EXACT, STATES, Recipe, cheaper, num_blocks, recipe_of
from offloadz.plan.search import decide
from offloadz.plan.shapes import ParamInfo, TableInfo, make_spec
from offloadz.plan.spec import LINE_BYTES, PAGE_BYTES, STAGGER_BYTES, ModelSpec, Part, staggered
from offloadz.plan.wishes import Wishes

GIB = 1 << 30


def spec_of(dtype: str = "bfloat16", layers: int = 4, width: int = 512) -> ModelSpec:
    params = [ParamInfo("emb.weight", (1000, width))]
    for i in range(layers):
        params += [ParamInfo(f"layers.{i}.w", (4 * width, width)), ParamInfo(f"layers.{i}.norm", (width + 3,))]
    names = [f"layers.{i}" for i in range(layers)]
    return make_spec(params, names, [TableInfo("emb", "emb.weight")], [TableInfo("head", "emb.weight")], dtype=dtype)


@pytest.mark.parametrize(
    ("recipe", "bf16", "fp32"),
    [
        (Recipe(), 12, 12), (Recipe("bf16"), 8, 8), (Recipe("int8"), 6, 6), (Recipe("int8-sr"), 4, None),
        (Recipe("fp32", "lion"), 8, 8), (Recipe("int8", "lion"), 5, 5), (Recipe("int8-sr", "lion"), 3, None),
        (Recipe("fp32", "sgd"), 8, 8), (Recipe("fp32", "sgd", False), 4, 4), (Recipe("int8-sr", "sgd", False), 2, None),
    ],
)  # fmt: skip
def test_bytes_a_parameter(recipe: Recipe, bf16: int, fp32: int | None) -> None:
    scales = recipe.num_moments * 4 / BLOCK_ELEMENTS if recipe.scaled else 0
    for dtype, wanted in (("bfloat16", bf16), ("float32", fp32)):
        if wanted is None:
            with pytest.raises(ConfigError, match="int8"):
                spec_of(dtype).with_recipe(recipe)
            continue
        spec = spec_of(dtype).with_recipe(recipe)
        found = sum(u.weight_bytes + u.state_bytes for u in spec.units) / spec.num_elements
        assert recipe.resting_bytes(dtype) == wanted + scales
        assert wanted + scales <= found < (wanted + scales) * 1.01 + 0.02
        assert checkpoint_bytes(spec) == spec.num_elements * (4 + 4 * recipe.num_moments)


def test_the_exact_recipe_lies_as_it_always_did() -> None:
    """Low bits, first moment, second moment, each from a line of 64 bytes on."""
    part = spec_of().units[1].parts[0]
    n = part.num_elements
    assert part.low_bytes == staggered(2 * n) and part.moment_bytes == staggered(4 * n) and part.scale_bytes == 0
    assert part.state_bytes == staggered(2 * n) + 2 * staggered(4 * n)


@pytest.mark.parametrize("state", STATES)
def test_no_two_arrays_of_a_part_begin_at_the_same_place_of_their_pages(state: str) -> None:
    recipe = Recipe(state)
    for n in (1 << 22, 1 << 16, 4096 * 1021):
        part = Part(0, 0, n, "bfloat16", recipe, num_blocks(n))
        arrays = [part.low_bytes] if part.low_bytes else []
        arrays += [part.moment_bytes] * recipe.num_moments
        starts = [sum(arrays[:k]) % PAGE_BYTES for k in range(len(arrays))]
        assert len(set(starts)) == len(starts) and all(start % LINE_BYTES == 0 for start in starts)
        assert (
            part.state_bytes
            < (part.low_bytes and 2 * n) + recipe.num_moments * (n * recipe.code_bytes + part.scale_bytes) + PAGE_BYTES
        )
    assert staggered(0) == 0


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("part_elements", [4096, 4096 + 2048, 1 << 22])
def test_regions_and_scales_cover_each_span_and_nothing_twice(
    state: str, part_elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks are counted from each span's start: a part has the sum over its spans, and regions do not overlap."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(spec_module, "PART_ELEMENTS", part_elements)
    spec = spec_of(width=48).with_recipe(Recipe(state))
    for unit in spec.units:
        for part in unit.parts:
            buffer = torch.zeros(part.state_bytes, dtype=torch.uint8)
            views = state_views(part, buffer)
            found = list(spans(unit, part))
            assert part.num_blocks == sum(-(-(s.stop - s.start) // BLOCK_ELEMENTS) for s in found)
            counts = torch.zeros(part.state_bytes, dtype=torch.int32)
            for span in found:
                held = views.of(span)
                for view in (held.low, *held.moments, *held.scales):
                    if view is not None:
                        at = view.data_ptr() - buffer.data_ptr()
                        counts[at : at + view.nbytes] += 1
                assert [m.numel() for m in held.moments] == [span.stop - span.start] * 2
            assert int(counts.max()) == 1
            regions = [r for r in (part.low_bytes, part.moment_bytes, part.scale_bytes) if r]
            assert all(region % 64 == 0 for region in regions)
            # what no span has is padding between regions: less than a line for each, and the stagger of whole pages
            assert int((counts == 0).sum()) < LINE_BYTES * (1 + 4) + STAGGER_BYTES * (1 + 2)
    assert typed(buffer, 0, 0, torch.float32).numel() == 0


def test_names_that_are_not_there_are_refused_with_the_list() -> None:
    with pytest.raises(ConfigError, match="one of adamw, adam, lion, sgd"):
        recipe_of("adafactor", "fp32")
    with pytest.raises(ConfigError, match="one of fp32, bf16, int8, int8-sr"):
        recipe_of("adamw", "int4")
    assert recipe_of("sgd", "fp32", 0.0).num_moments == 0 and recipe_of("adam", "fp32", 0.9) == EXACT


def test_cheaper_recipes_are_those_with_fewer_bytes_that_have_a_meaning() -> None:
    assert [r.state for r in cheaper(EXACT, "bfloat16")] == ["bf16", "int8", "int8-sr"]
    assert [r.state for r in cheaper(EXACT, "float32")] == ["bf16", "int8"]
    assert [r.state for r in cheaper(Recipe("fp32", "sgd", False), "bfloat16")] == ["int8-sr"]
    assert not list(cheaper(Recipe("int8-sr", "lion"), "bfloat16"))


def planned(disk_free: int) -> Plan:
    """A plan with everything on a drive with this much room."""
    machine = Machine("any", 4 * GIB, "the test", device_bytes=4 * GIB, cores=2)
    places = dict.fromkeys(("parameters", "gradients", "optimizer"), "disk")
    wishes = Wishes(4, 64, swap=True, keep=1, slots=1, disk_free=disk_free, **places)  # type: ignore[arg-type]
    return decide(spec_of(layers=8), machine, wishes)


def test_a_plan_that_does_not_fit_names_the_mildest_cheaper_recipe() -> None:
    """Where the drive does not hold the state, its format is what is left to change."""
    need = planned(100 * GIB).peak["disk"]
    assert planned(need).fits
    found = planned(need - (4 << 20))
    assert not found.fits and found.smallest_change == 'optimizer.state = "bf16"'
    found = planned(need * 9 // 14)  # bf16 would need 10 of the 14 bytes of weights, gradients and state
    assert not found.fits and found.smallest_change == 'optimizer.state = "int8"'


def test_time_and_traffic_follow_the_bytes() -> None:
    """Disk bytes a step and seconds of the update fall with the recipe; the plan names it."""
    placement = Placement("disk", "disk", "disk", "disk", storage="bfloat16")
    machine = Machine("any", 64 * GIB, "the test", cores=2)
    written, cpu_s = [], []
    for state in STATES:
        spec = spec_of().with_recipe(Recipe(state))
        found = predict(spec, placement, Batch(4, 64, 4), machine)
        written.append(found.disk_written_bytes)
        cpu_s.append(found.busy_s["cpu"])
        at_rest = home_bytes(spec, placement)["disk"]
        assert found.disk_written_bytes > at_rest["parameters"] + at_rest["optimizer"]
        plan = decide(spec, machine, Wishes(4, 64))
        assert plan.to_json()["recipe"] == state and replace(plan).recipe_told.endswith("at rest")
    assert written == sorted(written, reverse=True) and len(set(written)) == 4
    assert cpu_s == sorted(cpu_s, reverse=True)
    assert cpu_s[0] / cpu_s[-1] == pytest.approx(26 / (10 + 16 / BLOCK_ELEMENTS), rel=1e-6)
