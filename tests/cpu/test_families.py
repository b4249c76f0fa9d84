"""Every family trains as in the plain loop, padded and packed, and its files come back.  Cases G08, G09 and G16,
kinds K08, K11, K13 and K17.

One tiny model per family (tests/families.py) goes through four checks; docs/models.md says what this test holds.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import families
import pytest


@pytest.mark.parametrize("check", families.CHECKS)
@pytest.mark.parametrize("family", families.FAMILIES)
def test_family(family: str, check: str, swap: Path) -> None:
    families.CHECKS[check](families.FAMILIES[family], swap)


def test_the_page_says_what_is_held_here() -> None:
    """Mend with `python docs/make_models.py`."""
    root = Path(__file__).parent.parent.parent
    spec = importlib.util.spec_from_file_location("make_models", root / "docs" / "make_models.py")
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    held = {name: dict.fromkeys(families.CHECKS, made.HELD) for name in families.FAMILIES}
    assert (root / "docs" / "models.md").read_text(encoding="utf-8") == made.page(held)
