"""The search: the fastest of all placements by brute force, never slower with more memory or another drive.

What a user fixed stays; how the batch is cut stays where nothing is won; the milder of two that are equally fast is
taken.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
from test_commit_choice import box as card
from test_search import SPEC, WISHES

import offloadz.plan.candidates as candidates
import offloadz.plan.estimate as estimating
from offloadz.plan.answer import Plan
from offloadz.plan.bounds import least_s
from offloadz.plan.candidates import Space
from offloadz.plan.catalogue import read_machine
from offloadz.plan.cut import Cut, cut_told
from offloadz.plan.estimate import estimate
from offloadz.plan.fastest import CUT_GAIN, MOST, MOST_CUTS, TIE
from offloadz.plan.headers import spec_from_formula
from offloadz.plan.left import product_seats
from offloadz.plan.machine import TYPICAL_RATES, UNVERIFIED, Machine
from offloadz.plan.placement import KINDS, Placement
from offloadz.plan.search import decide
from offloadz.plan.spec import ModelSpec
from offloadz.plan.wishes import Wishes

GIB = 1 << 30
SHAPES = {"7B": (4096, 11008, 32, 32, 32000), "13B": (5120, 13824, 40, 40, 32000),
          "32B": (5120, 27648, 64, 8, 152064), "70B": (8192, 28672, 80, 8, 32000)}  # fmt: skip
FOURTEEN = {"14B": (5120, 17408, 40, 8, 151936)}


def processor(host_bytes: int, **rates: float) -> Machine:
    """A fast CPU beside a fast drive, so that what is on disk matters."""
    told = {**TYPICAL_RATES, "device": 4e12, "cpu": 2e9, "memory": 6e10, "h2d": 6e10, "d2h": 6e10, **rates}
    return Machine("box", host_bytes, "a test", "cpu", host_bytes, cores=16, rates=told, rates_source="a bench")


@cache
def llama(name: str) -> ModelSpec:
    """Of its config.json alone."""
    import json
    from tempfile import TemporaryDirectory

    hidden, inner, layers, groups, words = {**SHAPES, **FOURTEEN}[name]
    config = {
        "model_type": "llama", "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": hidden // 128, "num_key_value_heads": groups, "vocab_size": words,
        "tie_word_embeddings": False,
    }  # fmt: skip
    with TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        return spec_from_formula(Path(directory), "bfloat16")


def desktop(memory_gib: int, drives: int) -> Machine:
    base = Machine("any", GIB, "a test", device_bytes=GIB)
    found = read_machine("rtx4090", base, [Path(f"/{n}") for n in range(drives)])
    return replace(found, host_bytes=memory_gib * GIB).computing("bfloat16", "eager")


def asked(machine: Machine, **more: Any) -> Wishes:
    size = machine.drive.size_bytes if machine.drive else None
    common = {"swap": True, "keep": 1, "copies": 0, "linkable": True, "compute": "bfloat16", "disk_free": size}
    return Wishes(32, 1024, **{**common, **more})


def steady(plan: Plan) -> float:
    """Seconds of a step, the mean where clipping decides between two."""
    return (plan.step_s + (plan.seldom_s or plan.step_s)) / 2


@pytest.mark.parametrize("clipping", [True, False])
@pytest.mark.parametrize("machine", [card(2 * GIB), card(4 * GIB), processor(2 * GIB), processor(4 * GIB)])
def test_no_placement_that_is_fixed_is_faster(machine: Machine, clipping: bool) -> None:
    wishes = replace(WISHES, clipping=clipping)
    plan = decide(SPEC, machine, wishes)
    same = {"sweeps": plan.sweeps, "micro_batch_size": plan.micro_batch_size}
    memory = "device" if machine.unified else "host"
    tiers = product(*(("disk", memory if kind == "activations" else "host") for kind in KINDS))
    here = [*tiers, *([("host", "device", "host", "host"), ("host", "host", "host", "device")] * (not machine.unified))]
    commits = ("auto",) if clipping else ("hold", "shadow")
    found = []
    for each, commit, slots in product(here, commits, (1, 2)):
        fixed = dict(zip(KINDS, each, strict=True), commit=commit, slots=slots, **same)
        found.append(decide(SPEC, machine, replace(wishes, **fixed)))
    times = [steady(other) for other in found if other.fits]
    assert plan.fits and len(times) > 10 and max(times) > 1.2 * min(times)
    assert steady(plan) <= min(times) * (1 + TIE)
    assert any(line.startswith("placement: the fastest of") for line in plan.reasons)


@pytest.mark.parametrize(
    ("spec", "machine"), [(SPEC, card()), (SPEC, processor(64 * GIB)), (llama("13B"), desktop(64, 1))]
)
def test_a_bound_is_one(spec: ModelSpec, machine: Machine) -> None:
    """Whatever the placement: so none is left out that is faster."""
    from offloadz.plan.footprint import Batch

    batch = Batch(8, 256, 2)
    left = ((0, 0), (99, 0), (2, 5), (0, 99))
    for tiers, commit, (kept, cheap) in product(product(("host", "disk"), repeat=4), ("hold", "shadow"), left):
        place = Placement(
            *tiers, unified=machine.unified, storage="bfloat16", commit=commit, copies=2,
            kept=min(kept, len(spec.unfolding_seats)), cheap=len(product_seats(spec, cheap, kept)),
        )  # fmt: skip
        found_s = estimate(spec, place, batch, machine).step_s  # of unlike blocks, each as their mean, a hundredth off
        assert least_s(spec, place, batch, machine) <= found_s * (1.01 if 0 < cheap < 99 else 1), place


@pytest.mark.parametrize(
    ("spec", "machine"), [(SPEC, card()), (SPEC, processor(64 * GIB)), (llama("13B"), desktop(64, 1))]
)
@pytest.mark.parametrize(("sweeps", "slots"), [(1, 1), (2, 1), (2, 2), (4, 2)])
def test_a_bound_is_one_over_several_sweeps_and_with_one_slot(
    spec: ModelSpec, machine: Machine, sweeps: int, slots: int
) -> None:
    """And where sums go to the drive it tells of most of the step."""
    from offloadz.plan.footprint import Batch

    batch, shares = Batch(8, 256, 2, sweeps), []
    for tiers, commit in product([("host",) * 4, ("host", "disk", "disk", "host"), ("disk",) * 4], ("hold", "shadow")):
        place = Placement(
            *tiers, unified=machine.unified, storage="bfloat16", commit=commit, copies=2, slots=slots,
            accumulate=sweeps > 1,
        )  # fmt: skip
        found_s = estimate(spec, place, batch, machine).step_s
        shares.append(least_s(spec, place, batch, machine) / found_s)
    assert 0.7 < max(shares) <= 1, shares


@pytest.mark.parametrize(("name", "clipping"), [*((name, False) for name in SHAPES), ("13B", True)])
def test_more_memory_or_another_drive_is_never_slower(name: str, clipping: bool) -> None:
    """Beyond what counts as equally fast."""
    boxes = {(gib, drives): desktop(gib, drives) for drives in (1, 2) for gib in (64, 96, 128, 192)}
    step_s = {}
    for key, machine in boxes.items():
        plan = decide(llama(name), machine, asked(machine, clipping=clipping))
        step_s[key] = steady(plan) if plan.fits else float("inf")
    pairs = [*pairwise(key for key in boxes if key[1] == 1), *pairwise(key for key in boxes if key[1] == 2)]
    pairs += [((gib, 1), (gib, 2)) for gib, drives in boxes if drives == 1]
    assert all(step_s[more] <= step_s[less] * (1 + TIE) for less, more in pairs), step_s
    assert step_s[192, 2] < step_s[64, 1]


def test_of_equally_fast_ones_the_drive_is_spared() -> None:
    machine = card(64 * GIB, device=1e11)
    plan = decide(SPEC, machine, WISHES)
    assert {kind: getattr(plan.placement, kind) for kind in KINDS} == dict.fromkeys(KINDS, "host")
    assert plan.wear.written_bytes == 0 and plan.bottleneck == "device"


def test_rates_that_nobody_measured_keep_the_order_of_the_ladder() -> None:
    machine = replace(card(2 * GIB), rates_source=UNVERIFIED)
    plan = decide(SPEC, machine, WISHES)
    assert plan.placement.optimizer == "disk" and not any(line.startswith("placement:") for line in plan.reasons)
    space = Space(SPEC, machine, WISHES)
    assert space.keeping(space.first()[0]).placement == plan.placement


@pytest.mark.parametrize(
    "fixed",
    [{"optimizer": "disk"}, {"parameters": "disk", "activations": "disk"}, {"slots": 1}, {"slots": 3}, {"sweeps": 2},
     {"micro_batch_size": 3}, {"commit": "shadow"}, {"recompute": "all"}, {"recompute": "none"}],
)  # fmt: skip
@pytest.mark.parametrize("clipping", [True, False])
def test_what_is_fixed_stays_fixed(fixed: dict[str, Any], clipping: bool) -> None:
    plan = decide(SPEC, card(64 * GIB), replace(WISHES, clipping=clipping, **fixed))
    told = {kind: getattr(plan.placement, kind) for kind in KINDS}
    told |= {"slots": plan.slots, "sweeps": plan.sweeps, "micro_batch_size": plan.micro_batch_size}
    kept = {SPEC.seats[seat].kind for seat in SPEC.keeping_seats(plan.placement.kept)}
    told |= {"commit": plan.commit, "recompute": "all" if "block" not in kept else "none"}
    assert plan.fits and {key: told[key] for key in fixed} == fixed


@pytest.mark.parametrize("gib", [2, 64])
def test_a_batch_is_cut_by_the_rule_where_another_cut_wins_nothing(gib: int) -> None:
    """How it is cut changes the order of sums, and with it bits."""
    machine = card(gib * GIB)
    plan, first = decide(SPEC, machine, WISHES), Space(SPEC, machine, WISHES).first()[0]
    assert plan.batch == first.batch
    slow = replace(processor(3 * GIB // 2, device=2e10), rates_source=UNVERIFIED)
    assert decide(SPEC, slow, WISHES).batch == Space(SPEC, slow, WISHES).first()[0].batch, "by rates nobody measured"


def test_no_cut_that_is_fixed_is_faster() -> None:
    """A slow processor with little memory: in several sweeps most graphs are kept, and nothing is computed twice."""
    machine, wishes = processor(5 * GIB, device=2e10), replace(WISHES, swap=False, clipping=False, commit="hold")
    plan, first = decide(SPEC, machine, wishes), Space(SPEC, machine, wishes).first()[0]
    cuts = [first.batch, *Space(SPEC, machine, wishes).cuts(first.batch)]
    assert len(cuts) == 10 and {cut.sweeps for cut in cuts} == {1, 2, 4, 8}
    found = {}
    for cut in cuts:
        other = decide(SPEC, machine, replace(wishes, sweeps=cut.sweeps, micro_batch_size=cut.micro_rows))
        assert other.batch == cut
        found[cut] = other.step_s if other.fits else float("inf")
    assert plan.fits and plan.batch != first.batch and plan.sweeps > 1
    assert plan.step_s <= min(found.values()) * (1 + TIE) and plan.step_s < found[first.batch] * (1 - CUT_GAIN)
    told = {line.split()[0]: line for line in plan.reasons}
    assert told["sweeps"] == f"sweeps {plan.sweeps}: a step is sooner done than with 1"
    assert told["micro_batch_size"] == "micro_batch_size 2: a step is sooner done than with 8 in 1 sweep"


def test_a_cut_that_is_held_is_said_with_its_source() -> None:
    asked = Cut(4, 2, {"optimizer": "disk"}, "a checkpoint").held(replace(WISHES, sweeps=4))
    plan = decide(SPEC, processor(64 * GIB), replace(asked, micro_batch_size=1))
    assert (asked.micro_batch_size, asked.sweeps, plan.sweeps) == (4, 4, 4), "what the user fixed goes before it"
    assert "sweeps 4: as configured, or as a checkpoint has it" in plan.reasons
    assert Cut.read(cut_told(plan), "x") == Cut(1, 4, {k: getattr(plan.placement, k) for k in KINDS}, "x")
    assert Cut.read({"sweeps": 1}, "x") is None and Cut.read(None, "x") is None
    moved = Cut(1, 4, {**cut_told(plan)["placement"], "optimizer": "disk"}, "x").moved(plan)
    assert moved.startswith("optimizer on host (before: disk): ")
    assert Cut.read(cut_told(plan), "x").moved(plan) == ""  # type: ignore[union-attr]


def test_what_fits_beside_the_computation_stays_on_a_gpu() -> None:
    """Where memory is short, sooner than it goes to a slow drive; without a drive a plan fits that else would not."""
    short = replace(card(5 * GIB // 4), rates={**card().rates, "disk_read": 2e8, "disk_write": 2e8})
    plan = decide(SPEC, short, WISHES)
    placed = {kind: getattr(plan.placement, kind) for kind in KINDS}
    resident = [kind for kind in KINDS if placed[kind] == "device"]
    assert plan.fits and placed["optimizer"] == "disk" and list(placed.values()).count("disk") == 1 and resident
    same = {"sweeps": plan.sweeps, "micro_batch_size": plan.micro_batch_size}
    assert not decide(SPEC, short, replace(WISHES, **{**placed, **same, **dict.fromkeys(resident, "host")})).fits
    down = decide(SPEC, short, replace(WISHES, **{**placed, **same, **dict.fromkeys(resident, "disk")}))
    assert down.fits and steady(down) > steady(plan)
    assert any(line.startswith(f"{resident[0]} on device: ") for line in plan.reasons)
    whole = replace(WISHES, swap=False, commit="hold")
    less = decide(SPEC, card(), whole).peak["host"] - (64 << 20)
    tight = decide(SPEC, card(), replace(whole, host_memory=less))
    assert tight.fits and "device" in (getattr(tight.placement, kind) for kind in KINDS)
    assert not decide(SPEC, card(), replace(whole, host_memory=less, **dict.fromkeys(KINDS, "host"))).fits


class Counting:
    """How often a function was called."""

    def __init__(self, ask: Any) -> None:
        self.ask, self.count = ask, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        return self.ask(*args, **kwargs)


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> tuple[Counting, Counting]:
    """Walks and footprints of what follows."""
    walks, footprints = Counting(estimating.predict), Counting(candidates.footprint)
    monkeypatch.setattr(estimating, "predict", walks)
    monkeypatch.setattr(candidates, "footprint", footprints)
    return walks, footprints


def fresh(name: str) -> ModelSpec:
    """One of which nothing is known yet."""
    return replace(llama(name))


def test_a_large_model_is_decided_by_few_short_walks(work: tuple[Counting, Counting]) -> None:
    """That is a second of one core; what was walked once is known when the same is asked under other limits."""
    spec, machine = fresh("70B"), desktop(192, 1)
    plan = decide(spec, machine, asked(machine))
    assert plan.fits and len(estimate(spec, plan.placement, plan.batch, machine).program) < 3000
    walks = work[0].count
    assert 2 <= walks <= 4 * (MOST + MOST_CUTS) and work[1].count < 1500
    decide(spec, machine, asked(machine))
    assert work[0].count == walks


@pytest.mark.parametrize("recompute", ["auto", "all", "none", "cheap"])
def test_a_bound_counts_no_graph_as_made_again_that_is_kept(recompute: str) -> None:
    """Where every block recomputes the head may keep its own."""
    space = Space(SPEC, card(4 * GIB), replace(WISHES, recompute=recompute))
    batch = space.first()[0].batch
    kept = [(space.keeping(one).placement, space.graphs_of(one.placement, space.most_graphs(batch)))
            for one in space.others(batch)]  # fmt: skip
    assert kept and all(place.kept <= most for place, most in kept)
    assert recompute != "all" or any(place.kept for place, _ in kept)


def test_a_refusal_walks_nothing(work: tuple[Counting, Counting]) -> None:
    machine = desktop(8, 1)
    wishes = asked(machine, disk_free=256 * GIB)
    plan = decide(fresh("70B"), machine, wishes)
    assert not plan.fits and plan.smallest_change
    assert work[0].count == 0 and work[1].count < 1500
