"""The plan beside what was measured: what counts as off, which lane is named, which steps are left out."""

from __future__ import annotations

from typing import Any

import pytest

from offloadz.plan.ops import LANES
from offloadz.plan.verdict import LEAST_STEPS, Compared, steady, verdict

PHASES = {"data": 50, "load": 60, "step": 100, "save": 70, "export": 500}
PLAN: dict[str, Any] = {
    "step_s": 10.0, "tokens_per_s": 100.0, "disk_written_per_step": 0,
    "busy_s": {"device": 8.0, "cpu": 1.0, "disk_read": 4.0, "disk_write": 0.01, "net": 0},
    "bytes": {"device": dict.fromkeys(PHASES, 0), "host": PHASES, "disk": PHASES},
}  # fmt: skip


def line(step: int, step_s: float = 10.0, host_peak: int = 100, skipped: bool = False, **busy: float) -> dict[str, Any]:
    told = {**dict.fromkeys(LANES, 0.0), "device": 8.0, "cpu": 1.0, "disk_read": 4.0, "disk_write": 0.01, **busy}
    moved = {"device_peak": 0, "host_peak": host_peak, "disk_written": 0}
    return {"step": step, "step_s": step_s, "tokens": 1000, "tokens_per_s": 1000 / step_s, "busy_s": told,
            "bytes": moved, "skipped": skipped}  # fmt: skip


def test_a_right_plan_is_called_right() -> None:
    found = verdict(PLAN, [line(step) for step in range(1, 6)])
    assert found is not None and found.num_steps == 4
    assert not found.step.off and found.misrated is None and not any(one.off for one in found.figures)
    assert [lane.name for lane in found.lanes] == ["device", "cpu", "disk_read", "disk_write"]  # the others do nothing
    assert {one.name for one in found.figures} == {"tokens per second", "host memory"} and not found.tokens.off


def test_what_ranks_write_together_is_held_to_one_of_them() -> None:
    lines = [line(step) for step in range(1, 6)]
    for told in lines:
        told["bytes"]["disk_written"] = 100
    found = verdict({**PLAN, "disk_written_per_step": 400, "ranks": 4}, lines)
    assert found is not None
    (written,) = (one for one in found.figures if one.name == "written to disk per step")
    assert (written.predicted, written.measured) == (100.0, 100)


@pytest.mark.parametrize(("measured", "off"), [(11.4, False), (11.6, True), (8.6, False), (8.4, True)])
def test_more_than_15_percent_is_off(measured: float, off: bool) -> None:
    assert Compared("step time", 10.0, measured, "s").off is off
    found = verdict(PLAN, [line(step, measured) for step in range(1, 6)])
    assert found is not None and found.step.off is off


def test_the_lane_that_is_wrong_by_the_most_seconds_is_named() -> None:
    lines = [line(step, 14.0, disk_read=12.0, cpu=2.0, disk_write=0.1) for step in range(1, 6)]
    found = verdict(PLAN, lines)
    assert found is not None and found.misrated is not None
    assert (found.misrated.name, found.misrated.ratio) == ("disk_read", 3.0)
    small = next(lane for lane in found.lanes if lane.name == "disk_write")
    assert small.off and not found.matters(small)  # ten times too long, and a hundredth of the step


@pytest.mark.parametrize(("tokens", "named"), [(1000, "device"), (400, "disk_read"), (2000, "device")])
def test_a_lighter_step_excuses_a_lane_that_did_less(tokens: int, named: str) -> None:
    """4 s less of computation and 2 s more of reading: with 400 tokens of 1000 only the reading was mis-rated."""
    lines = [{**line(step, 6.0, device=4.0, disk_read=6.0), "tokens": tokens} for step in range(1, 6)]
    found = verdict(PLAN, lines)
    assert found is not None and found.misrated is not None and found.misrated.name == named


def test_a_lane_nobody_foresaw_is_named() -> None:
    found = verdict(PLAN, [line(step, net=3.0) for step in range(1, 6)])
    assert found is not None and found.misrated is not None
    assert found.misrated.name == "net" and found.misrated.ratio is None


def test_a_peak_is_held_to_the_phases_that_have_been() -> None:
    """11 % more than the largest of them shows; the export's peak is no excuse."""
    found = verdict(PLAN, [line(step, host_peak=111) for step in range(1, 6)])
    assert found is not None
    host = next(one for one in found.figures if one.name == "host memory")
    assert (host.predicted, host.measured) == (100, 111) and host.ratio == pytest.approx(1.11)


def test_only_steady_steps_count() -> None:
    lines = [line(1, 99.0), line(2), line(3, 99.0, skipped=True), line(4), line(5, 99.0), line(6)]
    evaluation = {"step": 6, "eval_loss": 1.0, "eval_tokens": 5}
    assert [found["step"] for found in steady([*lines, evaluation], firsts=[1, 5])] == [2, 4, 6]
    found = verdict(PLAN, [*lines, evaluation], firsts=[1, 5])
    assert found is not None and found.step.measured == 10.0
    assert verdict(PLAN, lines[:LEAST_STEPS], firsts=[]) is None


def test_steps_that_come_another_way_are_held_to_what_was_predicted_for_them() -> None:
    """A run that went over to shadow: 6 s were predicted for its steps, and the plan's lanes are those of hold."""
    held = [line(step, disk_read=8.0) | {"predicted_step_s": 10.0} for step in range(1, 5)]
    over = [line(step, 6.0, cpu=5.0) | {"predicted_step_s": 6.0} for step in range(5, 15)]
    found = verdict(PLAN, held + over)
    assert found is not None and (found.step.predicted, found.step.measured) == (6.0, 6.0) and not found.step.off
    assert not any(one.off for one in found.figures) and not found.tokens.off
    assert (found.num_steps, found.num_own) == (13, 3)
    assert found.misrated is not None and found.misrated.name == "disk_read"
    few = verdict(PLAN, held[:3] + over)
    assert few is not None and (few.num_own, few.lanes, few.misrated) == (2, (), None)
