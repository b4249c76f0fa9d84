"""What a plan that does not fit says: each tier that lacks room, and another drive where the drive does.  Kind K01."""

from __future__ import annotations

import re
from dataclasses import replace

from test_search import SPEC, WISHES, box

from offloadz.plan.answer import Plan
from offloadz.plan.search import decide

GIB = 1 << 30
TIGHT = replace(WISHES, disk_free=GIB // 4, keep=1, slots=1, micro_batch_size=1, sweeps=8)
DISK = dict.fromkeys(("parameters", "gradients", "optimizer"), "disk")


def test_another_drive_is_named_where_the_drive_is_what_lacks() -> None:
    """Where cheaper formats are still too large; with so much more room it fits."""
    asked = replace(TIGHT, max_length=64, **DISK)  # type: ignore[arg-type]
    peak = decide(SPEC, box(4 * GIB), replace(asked, disk_free=1 << 40)).peak
    both = peak["disk"] // 4 + peak["checkpoint"]  # each has room alone
    for wishes in (asked, replace(asked, same_drive=True, disk_free=both, checkpoint_free=both)):
        plan = decide(SPEC, box(4 * GIB), wishes)
        found = re.fullmatch(r"name another drive in offload.swap, with ([\d.]+)GiB free", plan.smallest_change)
        assert not plan.fits and found, plan.refusal()
        room = (wishes.disk_free or 0) + int(float(found[1]) * GIB)
        assert decide(SPEC, box(4 * GIB), replace(wishes, disk_free=room, linkable=False)).fits
    roomy = decide(SPEC, box(100 << 20), replace(asked, disk_free=1 << 40))
    assert not roomy.fits and "another drive" not in roomy.refusal(), "where memory lacks, a drive is no help"


def test_each_tier_that_lacks_room_is_named() -> None:
    asked = replace(WISHES, swap=False, disk_free=None, checkpoint_free=GIB, keep=1)
    found = decide(SPEC, box(GIB), asked).refusal()
    words = r"host memory \(90% of a test\) has 921\.6MiB .*; train\.output has 1\.0GiB to use and save needs"
    assert re.search(words, found)


def test_nothing_has_room_where_nothing_fits() -> None:
    lines = decide(SPEC, box(100 << 20), replace(WISHES, swap=False, disk_free=None, keep=1)).reasons
    assert "parameters on host: nothing fits, and this lacks least" in lines and "has room" not in "".join(lines)
    told = replace(WISHES, disk_free=1 << 20, checkpoint_free=1 << 20, activations="disk", **DISK)  # type: ignore[arg-type]
    lines = decide(SPEC, box(400 << 20), told).reasons
    assert "slots 1: nothing fits, and this lacks least" in lines and "two do not fit" not in "".join(lines)


def test_the_memory_of_a_card_that_is_asked_for_is_enough() -> None:
    """Of which a run uses nine tenths, as of the host's."""
    asked = replace(WISHES, keep=1, max_length=64, slots=1, micro_batch_size=1, sweeps=8)

    def card(device_bytes: int) -> Plan:
        return decide(SPEC, replace(box(64 * GIB), device="cuda:0", unified=False, device_bytes=device_bytes), asked)

    found = re.search(r"([\d.]+)([MG])iB of GPU memory", card(GIB // 4).smallest_change)
    assert found and card(int(float(found[1]) * {"M": 1 << 20, "G": GIB}[found[2]])).fits


SHORT = replace(WISHES, checkpoint_free=1 << 40, disk_free=1 << 20, max_length=64, keep=1)


def test_what_is_short_is_what_costs_less() -> None:
    """A fifth of the memory lacks, or all the room on the drive, which is more bytes and less money."""
    plan = decide(SPEC, box(3 * GIB), SHORT)
    lacking = decide(SPEC, box(1 << 40), SHORT).peak["host"] - (plan.limits["host"] or 0)
    assert 0 < lacking < plan.peak["disk"] - (1 << 20), "the drive lacks more bytes"
    assert not plan.fits and "offload.swap has" in plan.shortage and "host memory" not in plan.shortage


def test_settings_are_changed_before_anything_is_bought() -> None:
    """Two of them too, and a limit that was set, where what lacks least lacks a drive."""
    asked = replace(SHORT, host_memory=2 * GIB, slots=4)
    plan = decide(SPEC, box(8 * GIB), asked)
    assert plan.smallest_change.startswith("offload.host_memory = ") and "offload.swap" in plan.shortage
    asked = replace(SHORT, slots=4)
    assert decide(SPEC, box(2200 << 20), replace(asked, disk_free=1 << 40)).fits, "a drive would do alone"
    told = 'offload.slots = 1 and optimizer.state = "int8-sr"'
    assert decide(SPEC, box(2200 << 20), asked).smallest_change == told
