"""What the search decides, what it refuses, and how the time of a step follows from its program.

Case G01, kind K01: counted against the smallest limit, refused with numbers and the smallest change that would fit.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offloadz.plan.answer import Plan
from offloadz.plan.candidates import MEMORY_SHARE
from offloadz.plan.change import TO_DISK
from offloadz.plan.errors import ConfigError
from offloadz.plan.footprint import Batch, footprint
from offloadz.plan.machine import TYPICAL_RATES, Machine, probe_machine
from offloadz.plan.ops import LANES
from offloadz.plan.placement import KINDS, Placement
from offloadz.plan.predict import predict, step_program, training_phases
from offloadz.plan.search import decide
from offloadz.plan.shapes import ParamInfo, TableInfo, make_spec
from offloadz.plan.spec import ModelSpec, aligned
from offloadz.plan.steps import Backward, Finish, Forward
from offloadz.plan.timeline import Span, Timeline, write_trace
from offloadz.plan.wishes import Wishes
from offloadz.plan.words import counted, human, lasting

GIB = 1 << 30


def model(blocks: int = 16, width: int = 1024, words: int = 8192, **more: Any) -> ModelSpec:
    """Blocks of 12 width^2 elements, a tied table, a norm."""
    params = [ParamInfo("emb.weight", (words, width))]
    for i in range(blocks):
        params += [ParamInfo(f"layers.{i}.{n}.weight", (3 * width, width)) for n in "abcd"]
    params += [ParamInfo("norm.weight", (width,))]
    sizes = {"hidden_size": width, "vocab_size": words, "num_attention_heads": 8}
    tables, heads = [TableInfo("emb", "emb.weight")], [TableInfo("head", "emb.weight")]
    names = [f"layers.{i}" for i in range(blocks)]
    return make_spec(params, names, tables, heads, **{"dtype": "bfloat16", "config": sizes, **more})


SPEC = model()
WISHES = Wishes(batch_size=8, max_length=256, swap=True, disk_free=1 << 40, checkpoint_free=1 << 40)


def box(host_bytes: int, **rates: float) -> Machine:
    return Machine("box", host_bytes, "a test", rates={**TYPICAL_RATES, **rates})


def tiers(plan: Plan) -> dict[str, str]:
    return {kind: getattr(plan.placement, kind) for kind in KINDS}


def test_a_spare_that_does_not_fit_is_refused_with_numbers() -> None:
    """What hold has room for, with all kinds where they are asked to be."""
    asked = replace(WISHES, swap=False, parameters="host", gradients="host", optimizer="host")
    asked = replace(asked, slots=1, sweeps=1, micro_batch_size=1, recompute="all")
    needed = {c: decide(SPEC, box(1 << 40), replace(asked, commit=c)).peak["host"] for c in ("hold", "shadow")}
    trained = SPEC.num_elements * (2 + 10)  # weights; low bits and two moments
    assert trained < needed["shadow"] - needed["hold"] < trained * 1.01
    small = box(int(needed["hold"] / MEMORY_SHARE) + (1 << 20))
    assert decide(SPEC, small, replace(asked, commit="hold")).fits
    plan = decide(SPEC, small, replace(asked, commit="shadow"))
    assert not plan.fits and human(needed["shadow"], up=True) in plan.refusal()
    assert plan.smallest_change == 'offload.commit = "hold"'


def test_less_memory_moves_more_kinds_to_disk_in_order() -> None:
    """From a large box to a small one the disk takes optimizer, gradients, parameters, saved inputs, in this order."""
    seen = []
    for mib in range(8192, 600, -128):
        plan = decide(SPEC, box(mib << 20), WISHES)
        if not plan.fits:
            break
        assert plan.peak["host"] <= (mib << 20) * MEMORY_SHARE
        on_disk = [kind for kind in TO_DISK if tiers(plan)[kind] == "disk"]
        assert on_disk == list(TO_DISK[: len(on_disk)]), f"{on_disk} at {mib} MiB"
        seen.append(len(on_disk))
    assert seen[0] == 0 and {1, 3, 4} <= set(seen) and all(a <= b for a, b in pairwise(seen))


@settings(max_examples=30, deadline=None)
@given(
    fixed=st.fixed_dictionaries({}, optional={k: st.sampled_from(["device", "host", "disk"]) for k in KINDS}),
    slots=st.integers(0, 3),
    sweeps=st.sampled_from([0, 1, 4]),
    micro=st.sampled_from([0, 1, 2]),
    gib=st.integers(1, 9),
)
def test_what_the_user_fixed_stays(fixed: dict[str, str], slots: int, sweeps: int, micro: int, gib: int) -> None:
    wishes = replace(WISHES, slots=slots, sweeps=sweeps, micro_batch_size=micro, **fixed)  # type: ignore[arg-type]
    plan = decide(SPEC, box(gib * GIB), wishes)
    assert {k: v for k, v in tiers(plan).items() if k in fixed} == fixed
    assert slots in (0, plan.slots) and sweeps in (0, plan.sweeps) and micro in (0, plan.micro_batch_size)
    assert plan.placement.accumulate == (plan.sweeps > 1)
    assert plan.fits == (not plan.smallest_change) == (not plan.shortage)
    if plan.fits:
        found = footprint(SPEC, plan.placement, plan.batch)
        assert found.peak == plan.peak and plan.step_s > 0


def apply(wishes: Wishes, machine: Machine, change: str) -> tuple[Wishes, Machine]:
    """Do what a `smallest_change` says."""
    for key, value in re.findall(r'(\w+) = "?([\w.]+)"?', change):
        if key == "host_memory":
            number = int(float(value[:-3]) * {"MiB": 1 << 20, "GiB": GIB}[value[-3:]])
            wishes = replace(wishes, host_memory=number)
        else:
            names = {"micro_batch_size", "slots", "sweeps", "max_length", "keep"}
            wishes = replace(wishes, **{key: int(value) if key in names else value})  # type: ignore[arg-type]
    return (replace(wishes, swap=True) if "offload.swap" in change else wishes), machine


@pytest.mark.parametrize(
    ("wishes", "gib", "change"),
    [
        (replace(WISHES, swap=False), 2, "offload.swap"),
        (replace(WISHES, optimizer="host"), 2, 'offload.optimizer = "disk"'),
        (replace(WISHES, micro_batch_size=8, max_length=4096, activations="disk"), 2, "train.micro_batch_size = 1"),
        (replace(WISHES, slots=12), 2, "offload.slots = 1"),
        (replace(WISHES, sweeps=1, max_length=8192), 2, "offload.sweeps = 8"),
        (replace(WISHES, host_memory=256 << 20), 8, "offload.host_memory"),
        (replace(WISHES, batch_size=1, max_length=1 << 20), 4, "data.max_length"),
        (replace(WISHES, checkpoint_free=6 * GIB, keep=3), 8, "train.keep = 1"),
        (replace(WISHES, optimizer="host", parameters="host"), 1, "offload.optimizer"),
    ],
)
def test_the_smallest_change_named_makes_it_fit(wishes: Wishes, gib: int, change: str) -> None:
    machine = box(gib * GIB)
    plan = decide(SPEC, machine, wishes)
    assert not plan.fits and change in plan.smallest_change, plan.refusal()
    assert re.search(r"has [\d.]+[GM]iB to use and \w+ needs [\d.]+[GM]iB", plan.refusal())
    again = decide(SPEC, *reversed(apply(wishes, machine, plan.smallest_change)))
    assert again.fits, f"{plan.smallest_change}: {again.shortage}"


def test_where_no_change_helps_the_machine_needed_is_named() -> None:
    plan = decide(SPEC, box(256 << 20), WISHES)
    found = re.search(r"a machine with ([\d.]+)MiB of free host memory, ([\d.]+)GiB under offload.swap", plan.refusal())
    assert found, plan.refusal()
    assert decide(SPEC, box(int(float(found[1]) * (1 << 20))), WISHES).fits


def test_a_drive_is_counted_for_swap_and_checkpoints_together() -> None:
    """Each fits alone; on one file system both do not."""
    need = decide(SPEC, box(GIB), WISHES).peak
    room = need["disk"] + need["checkpoint"] - (10 << 20)
    apart = replace(WISHES, disk_free=room, checkpoint_free=room)
    assert decide(SPEC, box(GIB), apart).fits
    shared = decide(SPEC, box(GIB), replace(apart, same_drive=True))
    assert not shared.fits and "the drive of offload.swap and train.output" in shared.shortage


def test_the_disk_is_refused_without_a_swap_path_and_contradictions_by_name() -> None:
    with pytest.raises(ConfigError, match=r'offload\.gradients = "disk", and offload\.swap is empty'):
        decide(SPEC, box(GIB), replace(WISHES, swap=False, gradients="disk"))
    with pytest.raises(ConfigError, match=r"data\.max_length = 0"):
        decide(SPEC, box(GIB), replace(WISHES, max_length=0))
    with pytest.raises(ConfigError, match=r"micro_batch_size = 9 is above train\.batch_size = 8"):
        decide(SPEC, box(GIB), replace(WISHES, micro_batch_size=9))


def test_a_containers_limit_counts_not_the_hosts_memory(tmp_path: Path) -> None:
    """A made-up tree: 24 GiB of host memory and a group that may use 2 GiB; the plan keeps to the 2."""
    for name, text in {
        "proc/meminfo": f"MemTotal: {24 << 20} kB\nMemAvailable: {23 << 20} kB\n",
        "proc/self/cgroup": "0::/job\n",
        "proc/self/mountinfo": "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
        "sys/fs/cgroup/job/memory.max": str(2 * GIB),
        "sys/fs/cgroup/job/memory.current": "0",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    plan = decide(SPEC, probe_machine(tmp_path), WISHES)
    assert plan.fits and plan.peak["host"] <= 2 * GIB and plan.placement.optimizer == "disk"
    assert "memory.max" in plan.limit_source


def test_json_has_the_keys_of_the_contract() -> None:
    plan = decide(SPEC, box(GIB), WISHES)
    found = json.loads(json.dumps(plan.to_json()))
    keys = (
        "fits smallest_change step_s tokens_per_s bottleneck busy_s bytes peak placement recipe slots sweeps "
        "micro_batch_size commit disk_written_per_step drive_life_steps smallest_tokens_per_step"
    )
    assert set(keys.split()) <= set(found)
    assert found["drive_life_steps"] is None and (found["commit"], found["recipe"]) == ("hold", "fp32")
    assert set(found["bytes"]["host"]) == {"data", "load", "step", "save", "export"}
    assert found["placement"] == tiers(plan)
    assert found["tokens_per_s"] == pytest.approx(8 * 256 / found["step_s"])


DISK = Placement("disk", "host", "host", "device", slots=2)
"""fp32: a block computes from the buffer it was read into (bf16 has a second one, the widened)."""


def balanced(slots: int) -> Any:
    """A forward in which reading each of 16 blocks takes 0.8 of computing it."""
    spec = model(words=8, freeze=["layers.*", "emb.*"], dtype="float32")
    place = replace(DISK, slots=slots)
    batch = Batch(1, 256, 1)
    compute_s = 2 * 256 * (12 * 1024**2 + 2 * 256 * 1024) / TYPICAL_RATES["device"]
    machine = box(GIB, disk_read=48 * 1024**2 / (0.8 * compute_s), h2d=1e15)
    return predict(spec, place, batch, machine)


def test_two_slots_hide_the_reads_and_one_slot_does_not() -> None:
    """16 blocks, 40 ms read under 50 ms computed: two slots are within 15 % of the slowest lane, one is the sum."""
    two, one = balanced(2), balanced(1)
    slowest, total = max(two.busy_s.values()), sum(two.busy_s.values())
    assert slowest <= two.step_s < 1.15 * slowest
    assert one.step_s > 0.95 * total and one.busy_s == two.busy_s


@pytest.mark.parametrize("sweeps", [1, 2, 4])
def test_the_program_does_each_computation_once(sweeps: int) -> None:
    batch = Batch(8, 64, 1, sweeps)
    phases = training_phases(SPEC, sweeps, batch.num_micros)
    assert [type(p) for p in phases] == [Forward, Backward] * sweeps + [Finish]
    assert [p.last for p in phases if isinstance(p, Backward)] == [False] * (sweeps - 1) + [True]
    place = Placement("disk", "disk", "disk", "disk", storage="bfloat16", accumulate=sweeps > 1)
    program = step_program(SPEC, place, batch)
    computed = [(o.verb, o.seat, o.unit, o.call, o.micro) for o in program.ops if o.lane == "device" and o.unit >= 0]
    assert len(set(computed)) == len(computed)
    blocks = [c for c in computed if SPEC.seats[c[1]].kind == "block"]
    assert len(blocks) == 2 * 16 * 8  # forward and backward of every block and row, however they are cut
    updated = sum(o.nbytes for o in program.ops if o.lane == "cpu")
    assert updated == SPEC.num_elements


def test_written_bytes_are_what_goes_home_once_a_step() -> None:
    """Everything on disk: bf16 weights and state each once, gradients in their stored dtypes, saved inputs.

    The rounded gradient of the table's first units, one for each slot, stays in memory."""
    place = Placement("disk", "disk", "disk", "disk", storage="bfloat16")
    batch = Batch(2, 64, 1)
    found = predict(SPEC, place, batch, box(GIB))
    table = sum(SPEC.units[u].num_elements for u in SPEC.seats[0].units)
    stays = sum(SPEC.units[u].num_elements for u in SPEC.seats[0].units[: place.slots])
    gradients = (SPEC.num_elements - stays) * 2 + table * 4  # the tied table's open sum, then its rounded one
    saved = 17 * 2 * 64 * 1024 * 4
    state = sum(aligned(u.parts[k].state_bytes) for u in SPEC.units for k in u.trained_parts)
    pages = 2 * 2048  # of the norm: its weight and gradient end in the middle of a page
    assert found.disk_written_bytes == SPEC.num_elements * 2 + state + gradients + saved + pages


def tiers_of(placement: Placement) -> dict[str, Any]:
    return {kind: getattr(placement, kind) for kind in KINDS}


def test_a_timeline_adds_up_and_can_be_opened(tmp_path: Path) -> None:
    spans = (Span("device", "a", 1.0, 3.0), Span("device", "b", 2.0, 4.0), Span("disk_read", "c", 2.0, 5.0))
    line = Timeline(spans)
    assert line.length_s == 4.0 and line.busy_s()["device"] == 3.0  # what overlaps counts once
    loads = {load.lane: (load.num_ops, load.busy_s, load.idle_s, load.share) for load in line.loads()}
    assert loads == {"device": (2, 3.0, 1.0, 0.75), "disk_read": (1, 3.0, 1.0, 0.75)}
    assert line.gantt(4).splitlines() == ["device     ###.", "disk_read  .###"]
    assert "75%" in line.table()
    write_trace(tmp_path / "t.json", [line, Timeline(spans[:1], "measured")])
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    drawn = [e for e in events if e["ph"] == "X"]
    assert [(e["pid"], e["name"], e["ts"], e["dur"]) for e in drawn] == [
        (0, "a", 0.0, 2e6), (0, "b", 1e6, 2e6), (0, "c", 1e6, 3e6), (1, "a", 0.0, 2e6),
    ]  # fmt: skip
    assert {e["args"]["name"] for e in events if e["name"] == "thread_name"} == set(LANES)
    assert Timeline(()).table() and not Timeline(()).gantt()


@pytest.mark.parametrize("nbytes", [1, 1023, 1025, 745_472, 1 << 20, 1_500_000_000, 90 * GIB])
def test_sizes_for_people_go_back_into_the_configuration(nbytes: int) -> None:
    from offloadz.config import parse_bytes

    assert parse_bytes(human(nbytes, up=True)) >= nbytes
    assert abs(parse_bytes(human(nbytes)) - nbytes) <= 0.05 * nbytes + 1


def test_figures_are_told_as_people_read_them() -> None:
    assert human(745_472) == "728.0KiB" and human(1023) == "1023B"
    assert [lasting(s) for s in (0.25, 999.4, 999.6, 1.65e4)] == ["0.25 s", "999 s", "17 min", "4 h 35 min"]
    assert [counted(n, "sweep") for n in (1, 2, 1000)] == ["1 sweep", "2 sweeps", "1,000 sweeps"]
