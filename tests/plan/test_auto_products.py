"""`recompute = "auto"` keeps results of products where that makes a step shorter, and nowhere else.

Held against what could have been had instead: recomputing, graphs alone, results asked for by name, another cut.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from test_commit_choice import box as card
from test_fastest import GIB, Counting, desktop, processor, work  # noqa: F401
from test_fastest import llama as known
from test_kept import llama

from offloadz.plan.answer import Plan
from offloadz.plan.candidates import Space
from offloadz.plan.estimate import estimate
from offloadz.plan.fastest import MOST, MOST_CUTS, TIE
from offloadz.plan.left import most_products, product_seats
from offloadz.plan.machine import Machine
from offloadz.plan.products import products_bytes
from offloadz.plan.recipes import Recipe
from offloadz.plan.search import decide
from offloadz.plan.wishes import Wishes

SPEC = llama(12)
WISHES = Wishes(8, 512, micro_batch_size=2, sweeps=1, baseline_bytes=0, clipping=False, commit="hold")
SLOW = processor(1 << 40, device=2e11)
"""A processor whose products take longer than what lies between them."""
CARD = card(1 << 40, device=1e12, bandwidth=1e11)


def wished(machine: Machine, recompute: str = "auto", **more: Any) -> Plan:
    return decide(SPEC, machine, replace(WISHES, recompute=recompute, **more))


def peak_of(machine: Machine, recompute: str) -> int:
    return wished(machine, recompute).peak["host"]


@pytest.mark.parametrize("machine", [SLOW, replace(CARD, device_bytes=GIB * 7 // 8)], ids=["cpu", "gpu"])
def test_as_much_as_there_is_room_for_and_never_slower_than_without(machine: Machine) -> None:
    least, most = peak_of(machine, "all"), peak_of(machine, "cheap")
    seen, steps = [], []
    for share in (0.0, 0.2, 0.5, 0.8, 1.0):
        host_memory = int(least + share * (most - least)) + (1 << 20)
        plan = wished(machine, host_memory=host_memory)
        assert plan.fits and plan.peak["host"] <= host_memory
        assert plan.peak["device"] <= (plan.limits.get("device") or 0)
        space = Space(SPEC, machine, replace(WISHES, host_memory=host_memory))
        graphs = [space.keeping(one) for one in space.others(plan.batch)]
        ways = [one.placement for one in graphs]
        ways += [p.placement for how in ("all", "cheap") if (p := wished(machine, how, host_memory=host_memory)).fits]
        times = [estimate(SPEC, place, plan.batch, machine).step_s for place in ways]
        assert plan.step_s <= min(times) * (1 + TIE), (share, times)
        seen.append(plan.placement.cheap)
        steps.append(plan.step_s)
        if 0 < plan.placement.cheap < most_products(SPEC, plan.placement.kept):
            more = replace(plan.placement, cheap=plan.placement.cheap + 1)
            assert space.lacking(space.candidate(more, plan.batch).footprint), "there was room for more"
    assert seen[0] == 0 and seen == sorted(seen) and len(set(seen)) >= 4 and seen[-1] == 12
    assert steps == sorted(steps, reverse=True) and steps[-1] < 0.87 * steps[0]


def test_graphs_go_before_where_all_fit() -> None:
    plan = wished(SLOW, host_memory=1 << 39)
    assert (plan.placement.kept, plan.placement.cheap) == (len(SPEC.unfolding_seats), 0)


def test_a_little_room_more_than_results_take_is_for_graphs() -> None:
    host_memory = peak_of(SLOW, "cheap") + (peak_of(SLOW, "none") - peak_of(SLOW, "cheap")) // 2
    plan = wished(SLOW, host_memory=host_memory)
    kept, cheap = plan.placement.kept, plan.placement.cheap
    assert 0 < kept < len(SPEC.unfolding_seats) and cheap == len(product_seats(SPEC, 99, kept))
    assert plan.peak["host"] <= host_memory
    assert plan.graph_room_bytes == plan.products_room_bytes > products_bytes(SPEC, plan.placement, plan.batch)
    (line,) = (line for line in plan.reasons if line.startswith("recompute"))
    assert line.startswith(f"recompute cheap: {kept} of 14 graphs are kept, ")
    assert line.endswith("a step is sooner done than with these made again")


@pytest.mark.parametrize(
    "more",
    [{"opaque": True}, {"activations": "disk", "swap": True}, {"recompute": "all"}],
    ids=["kernels of their own", "inputs on disk", "asked for"],
)
def test_none_where_nobody_sees_them_or_wants_them(more: dict[str, Any]) -> None:
    host_memory = peak_of(SLOW, "cheap")
    assert wished(SLOW, host_memory=host_memory).placement.cheap > 0
    plan = decide(SPEC, SLOW, replace(WISHES, host_memory=host_memory, **more))
    assert plan.fits and plan.placement.cheap == 0 and plan.products_room_bytes == -1


def test_none_where_the_bus_takes_longer_than_the_products() -> None:
    here = replace(CARD, device_bytes=GIB * 7 // 8)
    assert wished(here).placement.cheap == 12
    slow = wished(replace(here, rates={**here.rates, "h2d": 1e9, "d2h": 1e9}))
    assert slow.fits and slow.placement.cheap == 0


def test_none_where_products_are_sooner_done_again() -> None:
    fast = processor(1 << 40, device=1e14)
    assert wished(fast, host_memory=peak_of(fast, "cheap")).placement.cheap == 0


MEMORIES = {"192 GiB": (192 * GIB, 5 * GIB), "192 GB": (192 * 10**9, 5 * 10**9)}
"""Of a box, and what is left to the system."""


def fourteen(memory: str, recompute: str) -> Plan:
    """A Qwen3-14B over 65,536 tokens a step with all in memory, on the catalogue's box with an RTX 4090."""
    nbytes, left = MEMORIES[memory]
    asked = Wishes(64, 1024, compute="bfloat16", recompute=recompute, host_memory=nbytes - left)
    machine = replace(desktop(192, 1), host_bytes=nbytes)
    return decide(known("14B").with_recipe(Recipe("int8-sr")), machine, asked)


@pytest.mark.parametrize("memory", MEMORIES)
def test_a_14b_is_a_seventh_faster_by_it(memory: str, work: tuple[Counting, Counting]) -> None:  # noqa: F811
    plan, again = fourteen(memory, "auto"), fourteen(memory, "all")
    nbytes, left = MEMORIES[memory]
    assert plan.fits and plan.placement.cheap >= 30 and plan.placement.kept < 42
    assert plan.peak["host"] <= nbytes - left and plan.peak["device"] <= (plan.limits["device"] or 0)
    assert plan.tokens_per_s >= 1.15 * again.tokens_per_s
    assert work[0].count <= 8 * (MOST + 2 * MOST_CUTS) and work[1].count < 3000
