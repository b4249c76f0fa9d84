"""Figures as people read them."""

from __future__ import annotations

import pytest

from offloadz.plan.words import difference


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
