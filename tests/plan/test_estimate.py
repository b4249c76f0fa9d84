"""A plan for many equal blocks, from a few of them: the same numbers as a walk over all; and lanes that share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import offloadz.plan.spec as spec_module
from offloadz.plan import shorter
from offloadz.plan.alike import unit_kinds
from offloadz.plan.beside import Queues, settled
from offloadz.plan.estimate import estimate
from offloadz.plan.footprint import Batch
from offloadz.plan.machine import Machine
from offloadz.plan.ops import Op, Program
from offloadz.plan.placement import Placement, home_bytes
from offloadz.plan.predict import Costs, predict, step_program
from offloadz.plan.shapes import ParamInfo, TableInfo, make_spec
from offloadz.plan.shared import Sharing
from offloadz.plan.shorter import equal_blocks, without
from offloadz.plan.spec import ModelSpec
from offloadz.plan.walk import Frontier, simulate

GIB = 1 << 30
BOX = Machine("box", 64 * GIB, "a test", device_bytes=64 * GIB, cores=2)


def model(blocks: int, odd: int = -1, words: int = 2048) -> ModelSpec:
    """Blocks of four matrices, the block `odd` with a wider one; a tied table; bfloat16."""
    params = [ParamInfo("emb.weight", (words, 512))]
    for i in range(blocks):
        params += [ParamInfo(f"layers.{i}.{n}.weight", (512 * (1 + (i == odd)), 512)) for n in "abcd"]
    sizes = {"hidden_size": 512, "vocab_size": words, "num_attention_heads": 8}
    tables, heads = [TableInfo("emb", "emb.weight")], [TableInfo("head", "emb.weight")]
    return make_spec(params, [f"layers.{i}" for i in range(blocks)], tables, heads, dtype="bfloat16", config=sizes)


@pytest.mark.parametrize("commit", ["hold", "in_place"])
@pytest.mark.parametrize("tiers", [("host", "host", "host", "device"), ("disk", "disk", "disk", "disk")])
def test_a_few_blocks_tell_of_many(tiers: tuple[str, ...], commit: str) -> None:
    spec, batch = model(26), Batch(2, 64, 1)
    place = Placement(*tiers, storage="bfloat16", commit=commit)
    machine = replace(BOX, rates={**BOX.rates, "disk_both": 1.6e9, "memory_shared": 1.5e10})
    whole, found = predict(spec, place, batch, machine), estimate(spec, place, batch, machine)
    assert len(found.program) < 0.6 * len(whole.program)
    assert (found.disk_read_bytes, found.disk_written_bytes) == (whole.disk_read_bytes, whole.disk_written_bytes)
    assert found.step_s == pytest.approx(whole.step_s, rel=0.01)
    for name in ("busy_s", "shared_s"):
        assert getattr(found, name) == pytest.approx(getattr(whole, name), rel=1e-6)
    assert found.taken_s == pytest.approx(whole.taken_s, rel=0.02)


@pytest.mark.parametrize("commit", ["hold", "shadow"])
def test_few_long_parts_and_tiles_tell_of_many(monkeypatch: pytest.MonkeyPatch, commit: str) -> None:
    """Blocks of 32 parts and a table of 16 tiles: walked are 16, and 4."""
    monkeypatch.setattr(spec_module, "PART_ELEMENTS", 1 << 15)
    monkeypatch.setattr(shorter, "WALKED_PARTS", 16)
    spec, batch = model(12, words=32768), Batch(2, 64, 1)
    assert (len(spec.units[20].parts), len(spec.seats[0].units)) == (32, 4 * shorter.WALKED_TILES)
    place = Placement("disk", "host", "disk", "device", storage="bfloat16", commit=commit, copies=2)
    machine = replace(BOX, rates={**BOX.rates, "disk_read_parts": 1e9, "disk_write_parts": 1e9})
    whole, found = predict(spec, place, batch, machine), estimate(spec, place, batch, machine)
    assert len(found.program) < 0.25 * len(whole.program)
    assert found.disk_written_bytes == pytest.approx(whole.disk_written_bytes, rel=0.02)  # small parts: lines and pages
    assert found.step_s == pytest.approx(whole.step_s, rel=0.02)
    assert found.busy_s == pytest.approx(whole.busy_s, rel=0.02)


def test_sums_over_kinds_are_sums_over_units() -> None:
    spec = model(9, odd=4)
    assert [(k.unit.kind, k.count) for k in unit_kinds(spec)] == [("tile", 1), ("block", 8), ("block", 1)]
    for accumulate in (False, True):
        held = home_bytes(spec, Placement(storage="bfloat16", accumulate=accumulate))["host"]
        assert held["parameters"] == sum(u.weight_bytes for u in spec.units)
        assert held["optimizer"] == sum(u.state_bytes for u in spec.units)
        sums = (u.grad_bytes(accumulate or i in spec.shared_units) for i, u in enumerate(spec.units))
        assert held["gradients"] == sum(sums)


def test_only_blocks_that_are_alike_stand_for_each_other() -> None:
    spec = model(26, odd=4)
    first, count = equal_blocks(spec)
    assert (spec.seats[first].name, count) == ("layers.5", 21)
    left = without(spec, first + 6, count - 6)
    assert [s.name for s in left.seats if s.kind == "block"] == [f"layers.{i}" for i in range(11)]
    assert left.shared_units and left.units[left.seats[-1].units[0]] == spec.units[spec.seats[-1].units[0]]
    batch, place = Batch(1, 64, 1), Placement(storage="bfloat16")
    whole, found = predict(spec, place, batch, BOX), estimate(spec, place, batch, BOX)
    assert found.busy_s == pytest.approx(whole.busy_s, rel=1e-6)


def lanes_of(*ops: Op, speeds: Any) -> dict[str, Any]:
    queues = Queues({op.lane for op in ops})
    simulate(Program(ops), queues.by_name, Frontier())
    lanes = settled(queues, ops, [float(op.nbytes) for op in ops], speeds)
    return {name: [(op.verb, start, end) for op, start, end in lane.spans] for name, lane in lanes.items()}


def test_ops_that_share_slow_each_other_while_both_run() -> None:
    ops = (Op("cpu", "a", "update", nbytes=4), Op("disk_read", "b", "update", nbytes=1),
           Op("disk_read", "c", "update", nbytes=2, after=(0,)))  # fmt: skip
    found = lanes_of(*ops, speeds=lambda active: [0.5 if len(active) > 1 else 1.0 for _ in active])
    assert found == {"cpu": [("a", 0.0, 5.0)], "disk_read": [("b", 0.0, 2.0), ("c", 5.0, 7.0)]}


def speeds(machine: Machine, *active: tuple[str, str]) -> list[float]:
    place = Placement("disk", "disk", "disk", "disk", storage="bfloat16")
    return list(Sharing(Costs(model(2), place, Batch(1, 64, 1), machine)).speeds(active))


def test_cores_are_shared_between_computation_updates_and_copies() -> None:
    assert speeds(BOX, ("device", "forward")) == speeds(BOX, ("cpu", "update")) == [1.0]
    assert speeds(BOX, ("device", "forward"), ("cpu", "update")) == [0.5, 0.5]
    assert speeds(BOX, ("device", "forward"), ("d2h", "drain.g")) == pytest.approx([2 / 3, 2 / 3])
    assert all(0.85 < speed < 1 for speed in speeds(BOX, ("device", "forward"), ("disk_read", "load.w")))


def test_a_drive_that_reads_and_writes_does_both_slower_where_that_was_measured() -> None:
    both = ("disk_read", "load.s"), ("disk_write", "store.s")
    assert speeds(BOX, *both) == [1.0, 1.0]
    rates = {**BOX.rates, "disk_read": 3e9, "disk_write": 6e9, "disk_both": 4e9}
    found = speeds(replace(BOX, rates=rates), *both)
    assert found[0] == found[1]
    faster = 1 / (6e9 * found[0])  # then the slower one goes on alone
    assert 2 / (faster + (1 - faster * 3e9 * found[0]) / 3e9) == pytest.approx(4e9)


def test_memory_is_shared_where_it_was_measured_and_never_slows_one_alone() -> None:
    rates = {**BOX.rates, "memory_shared": 1e9}
    machine = replace(BOX, cores=64, rates=rates)
    assert speeds(machine, ("cpu", "update")) == [1.0]
    found = speeds(machine, ("cpu", "update"), ("h2d", "fetch.w"))
    assert found[0] == found[1] < 1.0
    assert speeds(machine, ("device", "forward"), ("h2d", "fetch.w"))[0] > 0.9


def test_few_tokens_and_short_extents_have_rates_of_their_own() -> None:
    place = Placement("disk", "disk", "disk", "disk", storage="bfloat16")
    rates = {**BOX.rates, "device": 2e11, "device_few": 1e11}
    for tokens, rate in ((1024, 2e11), (128, 1e11)):
        even = {**BOX.rates, "device_few": BOX.rates["device"]}
        costs = [Costs(model(2), place, Batch(1, tokens, 1), replace(BOX, rates=r)) for r in (even, rates)]
        op = next(
            o for o in step_program(model(2), place, Batch(1, tokens, 1)).ops if o.verb == "backward" and o.unit > 0
        )
        assert costs[1](op) == pytest.approx(costs[0](op) * BOX.rates["device"] / rate)
    slow = Costs(model(2), place, Batch(1, 64, 1), replace(BOX, rates={**BOX.rates, "disk_read_parts": 1e8}))
    plain = Costs(model(2), place, Batch(1, 64, 1), BOX)
    loads = [o for o in step_program(model(2), place, Batch(1, 64, 1)).ops if o.verb == "load.w"]
    start = (8 << 20) / 1e8 - (8 << 20) / BOX.rates["disk_read"]
    for op in loads:
        assert slow(op) == pytest.approx(plain(op) + len(op.reads) * start)


def test_products_of_a_step_are_those_that_autograd_does() -> None:
    """Counted by torch over a block's forward without a graph and a backward that recomputes: 8 flop a weight and
    token; through a kept graph 6, and 4 of a frozen block between trained ones."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    weights = [torch.nn.Parameter(torch.ones(64, 64)) for _ in range(4)]

    def counted(kept: bool, frozen: bool) -> float:
        def block(hidden: torch.Tensor) -> torch.Tensor:
            for weight in weights:
                hidden = hidden @ weight
            return hidden

        for weight in weights:
            weight.requires_grad_(not frozen)
        hidden = torch.ones(8, 64, requires_grad=True)
        with FlopCounterMode(display=False) as counter:
            if not kept:
                with torch.no_grad():
                    block(hidden)
            block(hidden).sum().backward()
        return counter.get_total_flops() / (4 * 64 * 64 * 8)

    for kept, frozen in ((False, False), (True, False), (False, True)):
        spec = replace(model(3), num_heads=0, hidden_size=0)  # no attention
        if frozen:
            middle = spec.seats[2].units[0]
            units = [
                replace(u, sections=tuple(replace(s, trainable=i != middle) for s in u.sections))
                for i, u in enumerate(spec.units)
            ]
            spec = replace(spec, units=tuple(units))
        batch, place = Batch(1, 1024, 1), Placement(storage="bfloat16", kept=len(spec.unfolding_seats) * kept)
        costs = Costs(spec, place, batch, BOX)
        ops = [o for o in step_program(spec, place, batch).ops if o.lane == "device" and o.seat == 2 and o.unit >= 0]
        flop = sum(costs(op) for op in ops) * BOX.rates["device"]
        assert flop / (spec.units[ops[0].unit].num_elements * 1024) == pytest.approx(counted(kept, frozen))


def test_updates_run_under_the_forward_before_their_own_also_with_inputs_on_disk() -> None:
    """A saved input that waits for its computation must not stand before the stores of the next block's update."""
    place = Placement("disk", "disk", "disk", "disk", storage="bfloat16")
    program = step_program(model(4), place, Batch(1, 64, 1))
    stores = [
        i for i, op in enumerate(program.ops) if op.lane == "disk_write" and op.phase == "update" and op.unit == 2
    ]
    kept = next(i for i, op in enumerate(program.ops) if op.verb == "store.x" and op.unit == 1)
    computed = next(i for i, op in enumerate(program.ops) if op.verb == "forward" and op.unit == 1)
    assert max(stores) < computed < kept


def test_lanes_stand_in_the_order_of_the_program() -> None:
    """Not in that of a set, which is another one in each process, and with it sums of seconds, and plans."""
    found = predict(model(4), Placement("disk", "disk", "disk", "disk", storage="bfloat16"), Batch(2, 64, 1), BOX)
    assert list(found.lanes) == list(dict.fromkeys(op.lane for op in found.program.ops))
