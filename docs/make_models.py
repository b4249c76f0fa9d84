"""Write the table of docs/models.md: every family of tests/families.py, and what was found when it ran tiny.

    python docs/make_models.py

It runs the checks of tests/cpu/test_families.py (a minute or two); a check that fails leaves its reason in the table.
tests/cpu/test_families.py fails when the table does not say what those tests hold.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]

import families  # noqa: E402

PAGE = ROOT / "docs" / "models.md"
BEGIN, END = "<!-- table: begin (python docs/make_models.py) -->", "<!-- table: end -->"
HELD = "yes"


def found(family: families.Family) -> dict[str, str]:
    """What each check says of a family: `yes`, or the first line of its error."""
    said = {}
    for check, run in families.CHECKS.items():
        with tempfile.TemporaryDirectory() as scratch:
            swap = Path(scratch) / "swap"
            swap.mkdir()
            try:
                run(family, swap)
                said[check] = HELD
            except Exception as error:
                said[check] = f"no: {str(error).splitlines()[0]}"
    return said


def table(results: Mapping[str, Mapping[str, str]]) -> str:
    """A row per family, a column per check."""
    heads = ["class in transformers", "what is unusual", *families.CHECKS]
    rows = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for name, said in results.items():
        family = families.FAMILIES[name]
        rows.append(f"| `{family.model}` | {family.special} | {' | '.join(said[check] for check in families.CHECKS)} |")
    return "\n".join(rows)


def page(results: Mapping[str, Mapping[str, str]]) -> str:
    """docs/models.md with this table."""
    text = PAGE.read_text(encoding="utf-8")
    before, after = text.partition(BEGIN)[0], text.partition(END)[2]
    return f"{before}{BEGIN}\n{table(results)}\n{END}{after}"


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    PAGE.write_text(page({name: found(family) for name, family in families.FAMILIES.items()}), encoding="utf-8")
