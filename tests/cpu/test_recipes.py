"""Every recipe in a whole run: the same bits in every placement, a stop that leaves no trace, and checkpoints that any
recipe can load.  Case G15, kinds K08 and K15.

A recipe rounds, and most round at random; what it rounds to may depend on the run's seed, the parameter, the step and
the element, and on nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import assert_same_bits, assert_same_weights, batches, tiny, train, weights, whole_tensors
from torch import Tensor

import offloadz
import offloadz.plan.spec as spec_module
from offloadz.model.state import load_state
from offloadz.plan.errors import ConfigError

STEPS = batches(5)
HOST = dict.fromkeys(("parameters", "gradients", "optimizer_state", "activations"), "host")
DISK = dict.fromkeys(HOST, "disk")
MIXED = {"parameters": "host", "gradients": "disk", "optimizer_state": "disk", "activations": "device"}

Made = Callable[..., Any]
RECIPES: dict[str, Made] = {
    "fp32": lambda **how: offloadz.AdamW(**{"lr": 1e-3, **how}),
    "bf16": lambda **how: offloadz.AdamW(**{"lr": 1e-3, "state": "bf16", **how}),
    "int8": lambda **how: offloadz.AdamW(**{"lr": 1e-3, "state": "int8", **how}),
    "int8-sr": lambda **how: offloadz.AdamW(**{"lr": 1e-3, "state": "int8-sr", **how}),
    "adam": lambda **how: offloadz.Adam(**{"lr": 1e-3, "weight_decay": 0.1, "state": "int8", **how}),
    "lion": lambda **how: offloadz.Lion(**{"lr": 1e-4, "weight_decay": 0.1, "state": "int8-sr", **how}),
    "sgd": lambda **how: offloadz.SGD(**{"lr": 1e-2, "momentum": 0.9, "state": "bf16", **how}),
    "sgd-bare": lambda **how: offloadz.SGD(**{"lr": 1e-2, "state": "int8-sr", **how}),
}


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Parts that end inside a parameter and inside a block of 256, so that every border is met."""
    monkeypatch.setattr(spec_module, "PART_ELEMENTS", 4096 + 2048)
    yield


def begun(
    swap: Path, recipe: str, family: str = "llama", places: Any = HOST, seed: int = 0, **how: Any
) -> offloadz.Run:
    settings = RECIPES[recipe](**how.pop("settings", {}))
    how = {"dtype": torch.bfloat16, "micro_batch_size": 2, **places, **how}
    return offloadz.offload(tiny(family, seed), settings, swap=swap, **how)


def state_of(run: offloadz.Run) -> dict[str, Tensor]:
    """Every moment and working weight by name, in fp32, and the low halves."""
    kinds = ("weight", "low", *run.session.spec.recipe.moments)
    return {f"{name} {kind}": t for kind in kinds for name, t in whole_tensors(run, kind).items()}


SPREAD = [(DISK, {"threads": 2, "slots": 3, "poison": True}), (MIXED, {"slots": 1})]


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_placement_has_the_same_bits(recipe: str, swap: Path) -> None:
    with begun(swap, recipe) as run:
        wanted, held = train(run, STEPS[:3]), state_of(run)
    for places, how in SPREAD if recipe in ("int8", "int8-sr") else SPREAD[:1]:
        with begun(swap, recipe, places=places, **how) as run:
            assert_same_bits(train(run, STEPS[:3]), wanted, f"{recipe} {places} {how}")
            assert_same_weights(state_of(run), held, f"{recipe} {places} {how}")


def test_what_is_rounded_at_random_depends_on_the_seed_of_the_run(swap: Path) -> None:
    found = []
    for seed in (0, 1):
        with offloadz.offload(
            tiny("llama"), RECIPES["int8-sr"](), swap=swap, dtype=torch.bfloat16, seed=seed, **HOST
        ) as run:
            found.append(train(run, STEPS[:1]).weights)
    assert all(not torch.equal(found[0][name], found[1][name]) for name in found[0] if "proj" in name)


@pytest.mark.parametrize("recipe", RECIPES)
def test_saved_loaded_and_gone_on(recipe: str, swap: Path, tmp_path: Path) -> None:
    """G15: counters, groups and moments of every recipe; the new run begins with other weights and settings."""
    before, after = (DISK, HOST) if list(RECIPES).index(recipe) % 2 else (HOST, DISK)
    groups = {"groups": [{"match": ["*layers.0*"], "lr": 3e-4, "weight_decay": 0.2}]}
    with begun(swap, recipe, "qwen3", before, settings=groups) as run:
        schedule(run, 0.9)
        train(run, STEPS[:3])
        run.save(tmp_path / "saved")
        wanted, held = train(run, STEPS[3:]), state_of(run)
        rates = [group["lr"] for group in run.optimizer.param_groups]
    other = {"groups": [{"match": ["*layers.0*"], "lr": 0.5, "weight_decay": 0.0}], "lr": 0.25}
    with begun(swap, recipe, "qwen3", after, seed=5, settings=other) as run:
        run.step(STEPS[4])
        run.load(tmp_path / "saved")
        assert set(run.session.steps.values()) == {3}
        found = train(run, STEPS[3:])
        assert set(run.session.steps.values()) == {5}
        assert [group["lr"] for group in run.optimizer.param_groups] == rates
        assert_same_bits(found, wanted)
        assert_same_weights(state_of(run), held)


def schedule(run: offloadz.Run, factor: float) -> None:
    """As a schedule would have changed the rates by now."""
    for group in run.optimizer.param_groups:
        group["lr"] *= factor


@pytest.mark.parametrize("recipe", ["bf16", "int8", "int8-sr", "lion"])
def test_looking_and_putting_back_changes_no_bit(recipe: str, swap: Path) -> None:
    """What is stored survives being shown in fp32 and stored again, after many steps on one batch too."""
    with begun(swap, recipe) as run:
        train(run, [STEPS[0]] * 6 + STEPS)
        stored = [home.clone() for home in run.session.room.homes.values()]
        for _ in run.session.parts(write=True):
            pass
        assert all(torch.equal(a, b) for a, b in zip(stored, run.session.room.homes.values(), strict=True))


@pytest.mark.parametrize(("saver", "loader"), [("fp32", "int8-sr"), ("int8-sr", "fp32"), ("bf16", "int8")])
def test_a_checkpoint_of_another_recipe_is_rounded(saver: str, loader: str, swap: Path, tmp_path: Path) -> None:
    with begun(swap, saver, places=DISK) as run:
        train(run, STEPS[:3])
        run.save(tmp_path / "saved", portable=True)
    masters = load_file(tmp_path / "saved/weights.safetensors")
    moments = load_file(tmp_path / "saved/optimizer.safetensors")
    assert all(t.dtype == torch.float32 for t in (*masters.values(), *moments.values()))
    with begun(swap, loader, seed=3) as run:
        run.load(tmp_path / "saved")
        for name, weight in weights(run).items():
            torch.testing.assert_close(weight, masters[name], rtol=2**-8, atol=0)
            if loader == "int8-sr":
                assert torch.equal(weight, masters[name].bfloat16().float())
        for kind, worst in (("exp_avg", 0.04), ("exp_avg_sq", 0.04)):
            for name, moment in whole_tensors(run, kind).items():
                wanted = moments[f"{name}.{kind}"]
                assert (moment - wanted).norm() <= worst * wanted.norm(), name
        run.step(STEPS[3])
        assert set(run.session.steps.values()) == {4}


def test_moments_of_another_rule_are_refused(swap: Path, tmp_path: Path) -> None:
    with begun(swap, "fp32") as run:
        run.step(STEPS[0])
        run.save(tmp_path / "saved")
    with begun(swap, "lion") as run:
        before = state_of(run)
        with pytest.raises(ConfigError, match=r"holds exp_avg and exp_avg_sq, this optimizer keeps exp_avg"):
            load_state(tmp_path / "saved", run)
        assert_same_weights(state_of(run), before)


@pytest.mark.parametrize("recipe", ["fp32", "int8", "int8-sr"])
def test_exports_hold_working_weights_or_masters(recipe: str, swap: Path, tmp_path: Path) -> None:
    with begun(swap, recipe, places=DISK) as run:
        train(run, STEPS[:3])
        run.export(tmp_path / "bf16")
        run.export(tmp_path / "fp32", "float32")
        run.save(tmp_path / "saved", portable=True)
        working = weights(run)
    rounded, wide = (load_file(tmp_path / kind / "model.safetensors") for kind in ("bf16", "fp32"))
    masters = load_file(tmp_path / "saved/weights.safetensors")
    for name, weight in working.items():
        assert rounded[name].dtype == torch.bfloat16 and torch.equal(rounded[name].float(), weight)
        assert torch.equal(wide[name], masters[name])
    assert (recipe == "int8-sr") == all(torch.equal(wide[name], working[name]) for name in working)


def test_sections_in_fp32_stay_fp32_without_a_master(swap: Path) -> None:
    """K08: `int8-sr` rounds bf16 weights; norms that are kept in fp32 are their own masters."""
    settings = {"lr": 1e-6, "weight_decay": 0.0}
    with begun(swap, "int8-sr", keep_float32=["*norm*"], settings=settings) as run:
        before = {name: w for name, w in weights(run).items() if "norm" in name}
        train(run, STEPS[:2])
        after = weights(run)
        assert all(0 < float((after[n] - w).abs().max()) < 1e-5 for n, w in before.items())
    with pytest.raises(ConfigError, match=r'write optimizer\.state = "int8", or model\.dtype = "bfloat16"'):
        begun(swap, "int8-sr", dtype=torch.float32)


@pytest.mark.parametrize("recipe", ["int8-sr"])
def test_evaluating_in_between_leaves_no_trace(recipe: str, swap: Path) -> None:
    with begun(swap, recipe) as run:
        wanted = train(run, STEPS[:3])
    with begun(swap, recipe) as run:
        found = []
        for batch in STEPS[:3]:
            found.append(float(run.step(batch)))
            with torch.no_grad():
                offloadz.token_logprobs(run, STEPS[4])
        assert found == wanted.losses
        assert_same_weights(weights(run), wanted.weights)


def test_bytes_at_rest_are_what_the_recipe_says(swap: Path) -> None:
    """Homes of weights and state, per parameter, within what pages and lines of memory cost a tiny model."""
    said = {"fp32": 12, "bf16": 8, "int8": 6, "int8-sr": 4, "lion": 3, "sgd": 6, "sgd-bare": 2}
    for recipe, per_parameter in said.items():
        with begun(swap, recipe) as run:
            homes = run.session.room.homes
            exact = sum(p.weight_bytes + p.state_bytes for u in run.session.spec.units for p in u.parts)
            count = run.session.spec.num_elements
            assert per_parameter <= exact / count <= per_parameter * 1.05, recipe
            held = sum(home.numel() for (kind, _), home in homes.items() if kind in "ws")
            assert exact <= held <= exact + 2 * 4096 * len(homes), recipe
            assert json.loads(json.dumps(run.plan.to_json()))["recipe"] == RECIPES[recipe]().state
