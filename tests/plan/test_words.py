"""Figures as people read them."""

from __future__ import annotations

import pytest

from offloadz.config import parse_every
from offloadz.plan.catalogue import FLOPS, RATE, number
from offloadz.plan.words import difference, human, parse_bytes


@pytest.mark.parametrize(
    ("ratio", "unit", "words"),
    [
        (46.33, "s", "46 times as long"),
        (4.5, "bytes", "4.5 times as much"),
        (1.2, "s", "+20%"),
        (0.7, "s", "-30%"),
        (0.4, "s", "0.40 of it"),
    ],
)
def test_a_difference_is_told_as_a_factor_where_a_percentage_would_say_little(
    ratio: float, unit: str, words: str
) -> None:
    assert difference(ratio, unit) == words


@pytest.mark.parametrize("gap", ["", " "])
def test_a_space_before_a_unit_is_as_good_as_none(gap: str) -> None:
    """Wherever figures are read; they are written without one."""
    assert parse_bytes(f"1.5{gap}GiB") == 3 << 29 and parse_bytes(f"2{gap}TB") == 2 * 10**12
    assert number(f"60{gap}GB/s", RATE) == 6e10 and number(f"165{gap}TFLOPS", FLOPS) == 1.65e14
    assert parse_every(f"30{gap}min").wait_s == 1800


@pytest.mark.parametrize(
    ("nbytes", "told"), [(3 << 39, "1.5TiB"), (16 << 30, "16.0GiB"), (1 << 20, "1.0MiB"), (7, "7B")]
)
def test_bytes_are_written_one_way_that_is_read_again(nbytes: int, told: str) -> None:
    assert human(nbytes) == told and parse_bytes(told) == nbytes
