"""Ops of one kind cost the same: whatever is asked of one of each is what every op would say."""

from __future__ import annotations

import gc
from dataclasses import replace
from itertools import product

import pytest
from test_fastest import desktop, llama, processor
from test_search import SPEC

from offloadz.plan.bounds import least_s
from offloadz.plan.command import _no_collector
from offloadz.plan.footprint import Batch
from offloadz.plan.left import most_products
from offloadz.plan.machine import Machine
from offloadz.plan.placement import Placement
from offloadz.plan.predict import Costs, walked_step
from offloadz.plan.recipes import Recipe
from offloadz.plan.shapes import ParamInfo, TableInfo, make_spec
from offloadz.plan.share import Share
from offloadz.plan.shared import _memory_bytes
from offloadz.plan.shorter import shorter
from offloadz.plan.spec import ModelSpec

GIB = 1 << 30
SHARED = SPEC.shared_by(Share(1, 2, 3))
ODD = replace(SPEC, units=tuple(replace(u, recipe=Recipe("int8")) for u in SPEC.units), recipe=Recipe("int8"))


def uneven() -> ModelSpec:
    """Two parts of as many elements in each block, one of a tensor and one of 300, which have more scales."""
    blocks = [f"layers.{i}" for i in range(3)]
    params = [ParamInfo("emb.weight", (512, 2048))]
    for block in blocks:
        params += [
            ParamInfo(f"{block}.whole", (2048, 2048)),
            *(ParamInfo(f"{block}.n{n}", (100, 140)) for n in range(300)),
        ]
    sizes = {"hidden_size": 2048, "vocab_size": 512, "num_attention_heads": 8}
    spec = make_spec(params, blocks, [TableInfo("emb", "emb.weight")], dtype="bfloat16", config=sizes)
    return spec.with_recipe(Recipe("int8"))


@pytest.mark.parametrize(
    ("spec", "machine"),
    [(SPEC, processor(64 * GIB)), (SHARED, desktop(64, 1)), (ODD, desktop(64, 1)), (uneven(), desktop(64, 1)),
     *((shorter(llama("13B").with_recipe(Recipe(state)))[0], desktop(64, 2)) for state in ("fp32", "int8"))],
)  # fmt: skip
def test_one_op_of_each_kind_tells_of_all(spec: ModelSpec, machine: Machine) -> None:
    """Seconds, bytes, bytes in memory and on the drive, in every placement, by two micro-batches and by two sweeps."""
    for tier, saved, commit, (kept, cheap), sweeps in product(
        ("host", "disk"), ("host", "disk"), ("hold", "shadow"), ((0, 0), (1, 1), (0, 99)), (1, 2)
    ):
        place = Placement(
            tier, tier, tier, saved, unified=machine.unified, storage="bfloat16", commit=commit, copies=2, kept=kept,
            cheap=min(cheap, most_products(spec)), accumulate=sweeps > 1, share=spec.share,
        )  # fmt: skip
        batch = Batch(8, 256, 4 // sweeps, sweeps)
        step, costs = walked_step(spec, place, batch), Costs(spec, place, batch, machine)
        for ask in (costs, costs.nbytes, lambda op, costs=costs: _memory_bytes(op, costs)):
            assert list(step.each(ask)) == [ask(op) for op in step.program.ops], place
        stores = [(op, costs.written_bytes(op)) for op in step.program.ops if op.lane == "disk_write"]
        told = list(step.each(lambda op, costs=costs: op.lane == "disk_write" and costs.written_bytes(op)))
        assert [size for size in told if size is not False] == [size for _, size in stores]


def test_a_step_of_a_large_model_has_few_kinds_of_ops() -> None:
    part = shorter(llama("13B"))[-1]
    place = Placement("disk", "host", "disk", "host", storage="bfloat16", unified=False)
    step = walked_step(part, place, Batch(32, 1024, 4))
    assert len(step.firsts) < 0.15 * len(step.program)


def test_a_bound_with_fewer_slots_is_no_lower() -> None:
    """So where more slots are too slow fewer are not asked about."""
    spec, machine, lower = llama("13B"), desktop(64, 1), 0
    for tiers, commit, sweeps in product(product(("host", "disk"), repeat=4), ("hold", "shadow"), (1, 2)):
        place = Placement(*tiers, unified=False, storage="bfloat16", commit=commit, copies=2, accumulate=sweeps > 1)
        three, two, one = (
            least_s(spec, replace(place, slots=slots), Batch(32, 1024, 4, sweeps), machine) for slots in (3, 2, 1)
        )
        assert three <= two <= one
        lower += two < one
    assert lower > 8


@pytest.mark.parametrize("on", [True, False])
def test_the_collector_is_left_as_it_was(on: bool) -> None:
    was_on = gc.isenabled()
    try:
        (gc.enable if on else gc.disable)()
        with pytest.raises(KeyError), _no_collector():
            assert not gc.isenabled()
            raise KeyError
        assert gc.isenabled() == on
        with _no_collector():
            assert gc.get_freeze_count() == 0, "what the plan before left is looked at again"
    finally:
        gc.unfreeze()
        (gc.enable if was_on else gc.disable)()
