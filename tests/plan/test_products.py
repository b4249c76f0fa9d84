"""Kept results of products in the plan: their bytes against what is recorded, where they go, and what their time is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from test_kept import BATCH, BLOCKS, llama

from offloadz.plan.estimate import estimate
from offloadz.plan.footprint import Batch, footprint, num_saved
from offloadz.plan.kept import UNLIMITED, graph_kept_bytes
from offloadz.plan.left import product_seats
from offloadz.plan.machine import probe_machine
from offloadz.plan.placement import Placement
from offloadz.plan.predict import predict, step_program
from offloadz.plan.products import product_token_bytes, products_bytes
from offloadz.plan.search import decide
from offloadz.plan.shapes import ParamInfo, make_spec
from offloadz.plan.spec import ModelSpec
from offloadz.plan.wishes import Wishes


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(("family", "config", "off"), BLOCKS, ids=lambda v: v if isinstance(v, str) else "")
def test_bytes_are_what_is_recorded(family: str, config: dict[str, Any], off: float, attention: str) -> None:
    """Of one block, all of them products with weights and attention, without what no backward reads; nothing of these
    is twice in memory."""
    import torch
    from first_block import first_block

    from offloadz.model.products import Products
    from offloadz.model.unread import Watched

    block, args, kwargs = first_block(family, config, attention)
    hidden = torch.randn(2, 256, 256, requires_grad=True)
    saved = Watched("", list(block.parameters()), hidden)
    saved.products = kept = Products("", [])
    with saved.hooks(), kept.recording():
        out = block(hidden, *args, **kwargs)
    kept.leave_out()
    params = [ParamInfo(f"h.0.{name}", tuple(p.shape)) for name, p in block.named_parameters()]
    spec = make_spec(params, ["h.0"], [], dtype="float32", config=config)
    planned = product_token_bytes(spec, 0, Placement()) * 2 * 256
    assert out is not None and abs(planned / kept.nbytes - 1) <= 0.02
    batch = Batch(2, 256, 2)
    assert 0.3 < planned / graph_kept_bytes(spec, 0, Placement(), batch) < 0.75


def test_the_footprint_counts_results_where_they_lie() -> None:
    spec = llama()
    count = len(product_seats(spec, 99))
    assert count == 6 and num_saved(spec) == 7
    for more, tier in (
        ({"activations": "device"}, "host"),
        ({"unified": False}, "host"),
        ({"unified": False, "activations": "device"}, "device"),
    ):
        place = Placement(**more)
        before, after = (footprint(spec, replace(place, cheap=n), BATCH).terms["step"] for n in (0, 4))
        expected = products_bytes(spec, replace(place, cheap=4), BATCH)
        assert after[tier]["results of products"] == expected > 0
        assert all("results of products" not in terms for terms in before.values())
        assert after["host"]["saved inputs" if tier == "host" else "interpreter"]
        passing = after["device"].get("slots compute.y", 0)
        away = more == {"unified": False}
        assert (passing > 0) == away and passing == (2 * expected // 4 // BATCH.num_micros) * away


def test_results_leave_at_once_and_come_back_before_their_turn() -> None:
    spec = llama()
    away = Placement(unified=False, cheap=4)
    ops = step_program(spec, away, BATCH).ops
    seats = product_seats(spec, 4)
    made = [op for op in ops if op.verb == "forward" and any(w.startswith("compute.y#") for w in op.writes)]
    saved, fetched = ([op for op in ops if op.verb == verb] for verb in ("save.y", "fetch.y"))
    assert {op.seat for op in made} == seats == {op.seat for op in saved} == {op.seat for op in fetched}
    assert len(made) == len(saved) == len(fetched) == 4 * BATCH.num_micros
    assert {op.lane for op in saved} == {"d2h"} and {op.lane for op in fetched} == {"h2d"}
    for op in ops:
        if op.verb == "backward" and op.seat in seats:
            earlier = [o for o in fetched if (o.seat, o.micro) == (op.seat, op.micro)]
            assert set(earlier[0].writes) <= set(op.reads)
            begun = ops.index(earlier[0])
            assert any(o.lane == "device" for o in ops[begun : ops.index(op)]), "fetched when the one before is done"
    here = step_program(spec, replace(away, unified=True), BATCH).ops
    assert not [op for op in here if op.verb.endswith(".y")]
    assert sum(any(r.startswith("y") for r in op.reads) for op in here) == 4 * BATCH.num_micros


def test_a_backward_of_which_only_what_is_cheap_runs_again_takes_little_more_than_one_through_a_graph() -> None:
    spec, machine = llama(), probe_machine()
    busy = {}
    for name, how in {"all": {}, "cheap": {"cheap": 6}, "none": {"kept": 8}}.items():
        busy[name] = predict(spec, replace(Placement(), **how), BATCH, machine).busy_s["device"]
    heads = predict(spec, replace(Placement(), kept=1), BATCH, machine).busy_s["device"] - busy["all"]
    assert busy["none"] < busy["cheap"] + heads < busy["none"] + 0.4 * (busy["all"] - busy["none"])


def test_a_deep_model_in_which_some_keep_theirs_is_estimated_as_it_is_walked() -> None:
    spec, machine = llama(24), probe_machine()
    for kept, cheap in ((0, 9), (1, 24), (9, 10), (10, 24)):
        place = replace(Placement(), kept=kept, cheap=len(product_seats(spec, cheap, kept)))
        whole, found = predict(spec, place, BATCH, machine), estimate(spec, place, BATCH, machine)
        assert found.step_s == pytest.approx(whole.step_s, rel=0.02), (kept, cheap)


def wished(spec: ModelSpec, host_memory: int, recompute: str, **more: Any) -> Any:
    machine = replace(probe_machine(), host_bytes=1 << 40, device_bytes=1 << 40, host_source="a test")
    asked = Wishes(8, 512, micro_batch_size=2, host_memory=host_memory, recompute=recompute, baseline_bytes=0, **more)
    return decide(spec, machine, asked)


def test_what_was_asked_for_is_done_or_refused_with_what_would_help() -> None:
    spec = llama()
    plan = wished(spec, 1 << 40, "cheap")
    assert (plan.placement.kept, plan.placement.cheap) == (0, 6)
    assert plan.products_room_bytes == UNLIMITED and plan.graph_room_bytes == -1
    assert plan.to_json()["kept_products"] == 6
    assert any(line.startswith("recompute cheap: as configured") and "of 6 blocks the results" in line
               for line in plan.reasons)  # fmt: skip
    assert wished(spec, 1 << 40, "all").peak["host"] < plan.peak["host"] < wished(spec, 1 << 40, "none").peak["host"]
    tight = wished(spec, wished(spec, 1 << 40, "all").peak["host"], "cheap", sweeps=1)
    assert not tight.fits and 'offload.recompute = "auto"' in tight.smallest_change
