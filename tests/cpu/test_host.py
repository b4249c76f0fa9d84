"""The host pool: exact size, alignment, names and giving the memory back."""

from __future__ import annotations

import logging
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offloadz.memory.host import HostPool, needed_bytes
from offloadz.memory.tier import HUGE_BYTES, PAGE_BYTES
from offloadz.plan.errors import DoesNotFit
from offloadz.plan.spec import aligned

MIB = 1 << 20


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES


@given(st.lists(st.integers(0, 5 * MIB), max_size=20))
@settings(deadline=None)
def test_what_needed_bytes_says_is_enough_and_nothing_overlaps(sizes: list[int]) -> None:
    pool = HostPool(needed_bytes(sizes))
    taken = [pool.take(f"b{i}", size) for i, size in enumerate(sizes)]
    ranges = sorted((t.data_ptr(), t.data_ptr() + aligned(t.numel())) for t in taken if t.numel())
    assert all(before[1] <= after[0] for before, after in pairwise(ranges))
    assert [(t.numel(), t.dtype) for t in taken] == [(size, torch.uint8) for size in sizes]
    assert not any(t.data_ptr() % (HUGE_BYTES if t.numel() >= HUGE_BYTES else PAGE_BYTES) for t in taken if t.numel())
    assert sum(pool.ledger.values()) == sum(aligned(size) for size in sizes) <= pool.capacity_bytes
    del taken
    pool.close()


def test_buffers_of_odd_sizes_are_not_rounded_to_powers_of_two() -> None:
    """Case G02's figures: 10 blocks of 18 MiB and 3 of 9 MiB within 5 % of their bytes."""
    sizes = [18 * MIB] * 10 + [9 * MIB] * 3
    assert needed_bytes(sizes) <= 1.05 * sum(sizes)


def test_gaps_before_aligned_buffers_are_used() -> None:
    sizes = [4096, 2 * MIB, MIB, 512 * 1024]
    assert needed_bytes(sizes) == 4 * MIB


def test_memory_is_used_when_written_and_given_back_at_close() -> None:
    before = _resident_bytes()
    pool = HostPool(128 * MIB)
    tensor = pool.take("big", 128 * MIB)
    assert _resident_bytes() - before < 8 * MIB
    tensor.fill_(1)
    assert _resident_bytes() - before > 120 * MIB
    del tensor
    pool.close()
    pool.close()
    assert _resident_bytes() - before < 8 * MIB


def test_views_alive_at_close_keep_their_bytes_and_are_told_of(caplog: pytest.LogCaptureFixture) -> None:
    before = _resident_bytes()
    pool = HostPool(64 * MIB)
    view = pool.take("big", 64 * MIB).fill_(3)[MIB:].view(torch.int32)
    with caplog.at_level(logging.WARNING, "offloadz"):
        pool.close()
    assert "still lie in it" in caplog.text
    assert int(view[-1]) == 0x03030303
    del view
    assert _resident_bytes() - before < 8 * MIB


def test_too_much_names_buffer_room_and_field() -> None:
    pool = HostPool(3 * PAGE_BYTES)
    pool.take("first", PAGE_BYTES + 1)
    with pytest.raises(DoesNotFit, match=r"'second' needs 4097 bytes, 4096 of 12288 are left.*offload\.host_memory"):
        pool.take("second", PAGE_BYTES + 1)
    pool.take("third", PAGE_BYTES)
    assert pool.ledger == {"first": 2 * PAGE_BYTES, "third": PAGE_BYTES} and pool.free_bytes == 0
    with pytest.raises(ValueError, match="'first' was taken before"):
        pool.take("first", 1)
    with pytest.raises(ValueError, match="-1 bytes"):
        pool.take("none", -1)
    pool.close()
    with pytest.raises(ValueError, match="closed"):
        pool.take("late", 1)
    with pytest.raises(ValueError, match="-5"):
        HostPool(-5)


def test_memory_that_the_system_refuses_is_told_with_numbers() -> None:
    told = r"host memory: the system refused 1125899906842624 bytes .*lower offload\.host_memory"
    with pytest.raises(DoesNotFit, match=told):
        HostPool(1 << 50)


def test_each_buffer_is_a_storage_of_its_own() -> None:
    pool = HostPool(4 * PAGE_BYTES)
    first, second = pool.take("first", PAGE_BYTES), pool.take("second", 100)
    assert first.untyped_storage().data_ptr() == first.data_ptr() and second.untyped_storage().nbytes() == 100
    first.fill_(1)
    assert not second.any()


def test_the_mapping_asks_for_huge_pages_and_is_not_forked() -> None:
    pool = HostPool(4 * MIB)
    tensor = pool.take("b", 4 * MIB)
    flags = ""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            low, high = (int(part, 16) for part in first.split("-"))
            inside = low <= tensor.data_ptr() < high
        elif inside and first == "VmFlags:":
            flags = line
    assert " dc" in flags
    if Path("/sys/kernel/mm/transparent_hugepage").exists():
        assert " hg" in flags
