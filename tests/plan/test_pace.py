"""Ranks exchange at the same points of the computation, whatever parts each of them has.

A walk that is given up leaves no exchange that only some ranks have begun: another one would be taken for it.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from offloadz.plan.errors import DoesNotFit
from offloadz.plan.footprint import Batch
from offloadz.plan.pace import exchanges
from offloadz.plan.placement import Placement
from offloadz.plan.predict import step_program
from offloadz.plan.shapes import ParamInfo, TableInfo, make_spec
from offloadz.plan.share import Share
from offloadz.plan.spec import ModelSpec

WIDTH = 48


def spec(dtype: str) -> ModelSpec:
    """Blocks, a table, and a norm that is so small that the first rank has all of it."""
    prefixes = [f"layers.{i}" for i in range(3)]
    blocks = [ParamInfo(f"{p}.{k}", shape) for p in prefixes for k, shape in (("a", (WIDTH, 192)), ("n", (WIDTH,)))]
    params = [ParamInfo("table.weight", (211, WIDTH)), *blocks, ParamInfo("norm.weight", (WIDTH,))]
    return make_spec(params, [*prefixes, "norm"], [TableInfo("table", "table.weight")], dtype=dtype)


@pytest.mark.parametrize("unified", (True, False))
@pytest.mark.parametrize("stage", (1, 2, 3))
def test_all_ranks_begin_an_exchange_behind_as_many_computations(stage: int, unified: bool) -> None:
    tiers = ("host", "disk", "device")
    compared = 0
    for where in product(tiers, tiers, ("host", "disk"), ("device", "disk"), (1, 2, 3), ("hold", "shadow")):
        told = []
        for rank in (0, 1):
            own = spec("bfloat16").shared_by(Share(rank, 2, stage))
            placement = Placement(*where[:4], slots=where[4], unified=unified, storage="bfloat16", share=own.share)
            placement = replace(placement, commit=where[5], copies=2)
            try:
                told.append(exchanges(step_program(own, placement, Batch(2, 8, 1))))
            except DoesNotFit:
                told.append(())
        assert told[0] == told[1], where
        compared += bool(told[0])
    assert compared > 100
