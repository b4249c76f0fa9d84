"""How often state on disk exists where there is room for less than was asked for, and what is said of it.  Case G04."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_search import SPEC, WISHES, box

from offloadz.plan.answer import Plan
from offloadz.plan.copies import kept_reason
from offloadz.plan.search import decide
from offloadz.plan.wishes import Wishes

ON_DISK = dict.fromkeys(("parameters", "gradients", "optimizer"), "disk")
ASKED = replace(WISHES, **ON_DISK, keep=3, copies=0, linkable=True, commit="hold")  # type: ignore[arg-type]


def planned(wishes: Wishes) -> Plan:
    plan = decide(SPEC, box(64 << 30), wishes)
    assert plan.fits, plan.refusal()
    return plan


def with_room_for(copies: int, wishes: Wishes = ASKED) -> Plan:
    """The plan on a drive that holds so many copies and not one more."""
    room = planned(replace(wishes, copies=copies)).peak["disk"]
    return planned(replace(wishes, disk_free=room))


def line(plan: Plan) -> str:
    (told,) = [reason for reason in plan.reasons if reason.startswith("state on disk in")]
    return told


@pytest.mark.parametrize(
    ("copies", "kept", "told"),
    [
        (5, 3, ""),
        (4, 2, "; train.keep = 3 needs 5 copies, there is room for 4: 2 checkpoints are kept"),
        (3, 1, "; train.keep = 3 needs 5 copies, there is room for 3: 1 checkpoint is kept"),
    ],
)
def test_checkpoints_there_is_no_room_for_are_told(copies: int, kept: int, told: str) -> None:
    plan = with_room_for(copies)
    assert (plan.placement.copies, plan.keep, plan.linked) == (copies, kept, True)
    assert line(plan) == (
        f"state on disk in {copies} copies: live, shadow, and one for each checkpoint, which is hard links; a kill "
        f"costs a step at most{told}"
    )


def test_with_room_for_two_copies_or_one_checkpoints_are_written_out_as_many_as_asked() -> None:
    plan = with_room_for(2)
    assert (plan.placement.copies, plan.keep, plan.linked) == (2, 3, False)
    assert line(plan) == (
        "state on disk in 2 copies: live and shadow; a kill costs a step at most, checkpoints are written out; there "
        "is no room for more"
    )
    plan = with_room_for(1)
    assert (plan.placement.copies, plan.keep, plan.linked) == (1, 3, False)
    assert line(plan) == (
        "state on disk in 1 copy: there is no room for more; checkpoints are written out, and a kill costs what was "
        "done since the last"
    )


def test_where_checkpoints_cannot_be_links_two_copies_are_all_that_is_wanted() -> None:
    plan = planned(replace(ASKED, linkable=False))
    assert plan.placement.copies == 2 and line(plan).endswith("checkpoints are written out")
    assert line(with_room_for(1, replace(ASKED, linkable=False))).startswith("state on disk in 1 copy: there is no ")


def test_who_leaves_it_to_the_plan_is_not_told_of_checkpoints_nobody_asked_for() -> None:
    plan = planned(replace(ASKED, keep=0))
    assert (plan.placement.copies, plan.keep) == (3, 1) and "train.keep" not in line(plan)
    assert kept_reason(plan.placement, 0) == "1 checkpoint is kept, as many as is usual with links"
    assert kept_reason(plan.placement, 1) == "1 checkpoint is kept, train.keep = 1 asks for no more"
