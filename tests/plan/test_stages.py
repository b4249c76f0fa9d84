"""Plans for several ranks: the lowest stage that fits, what each rank keeps, and what all of them wear a drive by."""

from __future__ import annotations

from dataclasses import replace

import pytest

from offloadz.plan.footprint import Batch
from offloadz.plan.machine import TYPICAL_DEVICE_RATES, TYPICAL_RATES, Drive, Machine
from offloadz.plan.ops import Program
from offloadz.plan.placement import Placement
from offloadz.plan.predict import NET_RATE, Costs, step_program
from offloadz.plan.search import decide
from offloadz.plan.shapes import ParamInfo, TableInfo, make_spec
from offloadz.plan.share import Share
from offloadz.plan.shared import Sharing, shared_s
from offloadz.plan.spec import PAGE_BYTES, ModelSpec, aligned
from offloadz.plan.stages import decide_for, for_each
from offloadz.plan.wishes import Wishes
from offloadz.plan.words import human

WIDTH, LAYERS = 1024, 8
GIB = 1 << 30


def spec() -> ModelSpec:
    blocks = [ParamInfo(f"layers.{i}.{k}", (WIDTH, 4 * WIDTH)) for i in range(LAYERS) for k in "ab"]
    prefixes = [f"layers.{i}" for i in range(LAYERS)]
    table = ParamInfo("table.weight", (4000, WIDTH))
    return make_spec([table, *blocks], prefixes, [TableInfo("table", "table.weight")], dtype="bfloat16")


def machine(gib: float) -> Machine:
    drive = Drive("any", endurance_bytes=10**15)
    return Machine("any", int(gib * GIB), "test", device_bytes=int(gib * GIB), cores=4, drive=drive)


@pytest.mark.parametrize("ranks", (2, 3, 8))
def test_shards_are_equal_on_pages_and_cover_every_element(ranks: int) -> None:
    for unit in spec().units:
        shared = [replace(unit, share=Share(rank, ranks, 3)) for rank in range(ranks)]
        for one in shared:
            assert all(n * 2 % PAGE_BYTES == 0 for n in one.shard_elements)
            assert one.parts == shared[0].parts
        owned = sorted(k for one in shared for k in one.own_parts)
        assert owned == list(range(len(shared[0].parts)))
        assert sum(p.num_elements for p in shared[0].parts) == unit.num_elements
        assert len({one.weight_bytes for one in shared}) == 1
        assert shared[0].weight_bytes <= -(-unit.weight_bytes // ranks) + len(unit.sections) * PAGE_BYTES * WIDTH


def test_auto_takes_the_lowest_stage_that_fits() -> None:
    needed = {}
    for stage in (0, 1, 3):
        plan = decide_for(spec(), machine(64), Wishes(4, 128, ranks=4, zero_stage=stage, slots=2, recompute="all"))
        needed[stage] = 4 * plan.peak["host"] / GIB / 0.9
    assert needed[0] > needed[1] > needed[3]
    for stage, most in needed.items():
        plan = decide_for(spec(), machine(most * 1.001), Wishes(4, 128, ranks=4, slots=2, recompute="all"))
        assert plan.fits and plan.placement.share.stage == stage


def test_what_is_too_small_is_told_for_each_and_what_is_needed_for_all() -> None:
    asked = Wishes(4, 128, ranks=4, zero_stage=3, slots=1, recompute="all")
    plan = decide_for(spec(), machine(2), asked)
    assert not plan.fits and "for each of 4 ranks" in plan.refusal()
    whole = 4 * plan.peak["host"] / 0.9
    assert f"a machine with {human(int(whole), up=True)} of free host memory" in plan.refusal()
    assert decide_for(spec(), machine(whole * 1.01 / GIB), asked).fits


def test_what_would_help_is_told_as_a_user_writes_it() -> None:
    """A limit of all ranks, not that of one."""
    asked = Wishes(4, 128, ranks=4, zero_stage=3, slots=1, recompute="all", keep=1, host_memory=4 * (100 << 20))
    plan = decide_for(spec(), machine(64), asked)
    whole = 4 * plan.peak["host"]
    assert not plan.fits and plan.smallest_change == f'offload.host_memory = "{human(whole, up=True)}"'
    assert decide_for(spec(), machine(64), replace(asked, host_memory=whole)).fits


@pytest.mark.parametrize("key", ("host_memory", "device_memory"))
def test_limits_of_one_memory_are_of_all_ranks(key: str) -> None:
    """Ranks on a processor share its memory, by whichever name it is limited."""
    for unified, shared in ((True, True), (False, key == "host_memory")):
        box = replace(machine(64), unified=unified, rates={**TYPICAL_RATES, **TYPICAL_DEVICE_RATES})
        plan = decide_for(spec(), box, Wishes(4, 128, ranks=4, **{key: 8 * GIB}))
        tier = "host" if unified or key == "host_memory" else "device"
        assert plan.limits[tier] == (2 if shared else 8) * GIB


def test_all_ranks_wear_the_drive() -> None:
    disk = Wishes(4, 128, swap=True, optimizer="disk", gradients="host", parameters="host", commit="hold", copies=1)
    alone = decide(spec(), machine(64), disk)
    four = decide_for(spec(), machine(64), replace(disk, ranks=4, zero_stage=3))
    assert four.wear.written_bytes == pytest.approx(alone.wear.written_bytes, rel=0.02)
    assert four.batch.rows == 1 and four.placement.share == Share(0, 4, 3)


@pytest.mark.parametrize("stage", (1, 2))
def test_each_rank_writes_the_weights_it_keeps_once(stage: int) -> None:
    """Its own shards and those it was given: together the whole, and no more."""
    asked = Wishes(4, 128, swap=True, parameters="disk", optimizer="host", gradients="host", ranks=4, zero_stage=stage)
    plan = decide_for(spec(), machine(64), asked)
    units = spec().shared_by(plan.placement.share).units
    whole = sum(aligned(part.weight_bytes) for unit in units for part in unit.parts)
    assert plan.wear.written_bytes == pytest.approx(4 * whole, rel=1e-3)


@pytest.mark.parametrize("unified", (True, False))
def test_what_comes_from_other_ranks_passes_memory_over_the_loopback_device_alone(unified: bool) -> None:
    """By one rule, for an op beside others and for the least time of a step."""
    rates = {**TYPICAL_RATES, **TYPICAL_DEVICE_RATES, "memory_shared": 1e10}
    box = replace(machine(64), unified=unified, rates=rates)
    found = {}
    for ranks in (1, 2):
        own = spec().shared_by(Share(0, ranks, 3 if ranks > 1 else 0))
        placement = Placement(storage="bfloat16", share=own.share, unified=unified)
        batch = Batch(4, 128, 4)
        costs, program = Costs(own, placement, batch, box), step_program(own, placement, batch)
        net = [op for op in program.ops if op.lane == "net"]
        others = Program(tuple(op for op in program.ops if op.lane != "net"))
        found[ranks] = (
            [shared_s(lambda ask, told=told: map(ask, told.ops), costs) for told in (program, others)],
            sum(map(costs, net)),
            costs,
        )
    assert found[1][0][0] == found[1][0][1] and not found[1][1]
    (with_net, without), net_s, costs = found[2]
    demand = Sharing(costs).demand("net", "gather.w")
    assert net_s > 0 and (demand["memory"] > 0) == unified
    assert with_net["memory"] - without["memory"] == pytest.approx(net_s * demand["memory"] / 1e10)
    if unified:
        assert with_net["cores"] - without["cores"] == pytest.approx(net_s * demand["cores"] / costs.cores)


def test_more_ranks_than_cores_exchange_slower() -> None:
    """Over the loopback device a core moves the bytes; between GPUs none does."""
    box = replace(machine(64), cores=2)
    assert for_each(box, 2).rates["net"] == NET_RATE and for_each(box, 4).rates["net"] == NET_RATE / 2
    assert "net" not in for_each(replace(box, unified=False), 4).rates


def test_copies_of_all_ranks_have_to_fit_beside_one_set_of_checkpoints() -> None:
    """Three where checkpoints can be links, else two and checkpoints that are written out, else one."""
    disk = dict.fromkeys(("parameters", "gradients", "optimizer"), "disk")
    asked = Wishes(4, 128, **disk, swap=True, ranks=2, zero_stage=3, copies=0, keep=0, linkable=True, same_drive=True)
    roomy = decide_for(spec(), machine(64), replace(asked, disk_free=1 << 50))
    assert roomy.linked and roomy.placement.copies == 3
    for copies, linked in ((3, True), (2, False), (1, False)):
        asked = replace(asked, linkable=linked)
        like = decide_for(spec(), machine(64), replace(asked, copies=copies, disk_free=1 << 50))
        both = 2 * like.peak["disk"] + like.peak["checkpoint"]
        found = decide_for(spec(), machine(64), replace(asked, disk_free=int(both * 1.001)))
        assert found.fits and (found.placement.copies, found.linked) == (copies, linked), copies
        assert not decide_for(spec(), machine(64), replace(asked, copies=copies, disk_free=int(both * 0.999))).fits
