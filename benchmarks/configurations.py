"""A configuration as a TOML file, for the benchmarks that run `offloadz train` as a user does."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from offloadz.config.values import to_toml


def write_tables(path: Path, sections: Mapping[str, Mapping[str, Any]]) -> Path:
    """Write section -> key -> value to `path`; returns it."""
    lines = []
    for section, keys in sections.items():
        lines += [f"[{section}]", *(f"{key} = {to_toml(value)}" for key, value in keys.items())]
    path.write_text("\n".join(lines) + "\n")
    return path
