"""Every family trains as in the plain loop, padded and packed, and its files come back.  Cases G08, G09 and G16,
kinds K08, K11, K13 and K17.

One tiny model per family (tests/families.py) goes through four checks; docs/models.md says what this test holds.
"""

from __future__ import annotations

from pathlib import Path

import families
import pytest


@pytest.mark.parametrize("check", families.CHECKS)
@pytest.mark.parametrize("family", families.FAMILIES)
def test_family(family: str, check: str, swap: Path) -> None:
    families.CHECKS[check](families.FAMILIES[family], swap)
