"""Hold or shadow where it is left to the plan: by simulation, by room, and by rates that somebody measured."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from test_search import SPEC, WISHES

from offloadz.plan.answer import Plan
from offloadz.plan.candidates import MEMORY_SHARE
from offloadz.plan.machine import TYPICAL_RATES, UNVERIFIED, Machine
from offloadz.plan.search import decide
from offloadz.plan.words import lasting

GIB = 1 << 30
ASKED = replace(WISHES, parameters="host", gradients="host", optimizer="host")


def box(host_bytes: int = 64 * GIB, source: str = "a bench", **rates: float) -> Machine:
    """A GPU beside memory, whose updates take as long as forward and backward."""
    told = {**TYPICAL_RATES, "device": 5e13, "h2d": 5e10, "d2h": 5e10, "cpu": 4e9, "memory": 1e12, **rates}
    return Machine("box", host_bytes, "a test", "cuda:0", 24 * GIB, False, 8, told, source)


def planned(machine: Machine, **wishes: Any) -> Plan:
    return decide(SPEC, machine, replace(ASKED, **wishes))


def why(plan: Plan) -> str:
    return next(reason for reason in plan.reasons if reason.startswith("commit"))


def test_shadow_where_it_is_sooner_and_has_room() -> None:
    plan, held = planned(box()), planned(box(), commit="hold")
    assert (plan.commit, plan.placement.commit) == ("hold", "shadow") and "goes over" in why(plan)
    assert plan.step_s == plan.step_s_by("hold") == held.step_s and plan.wear == held.wear
    by = {"hold": plan.step_s, "shadow": plan.seldom_s}
    assert plan.to_json()["step_s_by_commit"] == by and held.to_json()["step_s_by_commit"] == {"hold": held.step_s}
    assert f"(hold {lasting(by['hold'])}, shadow {lasting(by['shadow'])} a step)" in why(plan)
    free = planned(box(), clipping=False)
    assert (free.commit, free.seldom_s) == ("shadow", 0.0) and free.step_s == plan.step_s_by("shadow") < plan.step_s
    assert free.step_s < 0.95 * held.step_s
    assert plan.placement == replace(held.placement, commit="shadow")
    assert plan.peak["host"] > held.peak["host"]
    assert not planned(box(), commit="shadow").seldom_s  # asked for: it stays


def test_hold_where_there_is_no_room_beside() -> None:
    held = planned(box(), commit="hold")
    plan = planned(box(int(held.peak["host"] / MEMORY_SHARE) + GIB))
    assert plan.fits and plan.commit == "hold" and "no room for shadow: host memory" in why(plan)


def test_hold_where_little_is_won() -> None:
    plan = planned(box(cpu=1e11))
    assert plan.commit == "hold" and not plan.seldom_s and "shadow would win" in why(plan)


@pytest.mark.parametrize("commit", ["hold", "in_place"])
def test_what_is_asked_for_is_taken(commit: str) -> None:
    assert planned(box(), commit=commit).commit == commit


def test_rates_that_nobody_measured_decide_nothing() -> None:
    assert planned(box(source=UNVERIFIED)).commit == "hold"
