"""Samples longer than the positions of a model: refused where positions are a table, told where they are computed.

A model that looks its positions up has no row for what is behind them and would end in the middle of a step; one that
turns them (rotary) goes on, with angles it was never trained with.  Told apart by the tables of the spec, no family is
named.  The trade-off: a table of as many rows as there are words is taken for the words.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from offloadz.plan.errors import ConfigError
from offloadz.plan.spec import ModelSpec

OFFSET = 8
"""Rows that a table of positions may have beyond them (OPT has two)."""


def positions_note(spec: ModelSpec, config: Mapping[str, Any], length: int, told: str) -> str:
    """What to say of samples of `length` tokens, which are called `told`: "" where the model has so many positions.

    Raises ConfigError naming both numbers where it looks positions up.
    """
    text = config.get("text_config")
    facts = text if isinstance(text, Mapping) else config
    most = int(facts.get("max_position_embeddings") or facts.get("n_positions") or 0)
    if not most or length <= most:
        return ""
    if any(most <= rows <= most + OFFSET and rows != spec.vocab_size for rows in _table_rows(spec)):
        raise ConfigError(
            f"{told}: {length} tokens, the model has a table of {most} positions (max_position_embeddings) and nothing "
            f"for longer samples; needed: at most {most}"
        )
    return (
        f"{told}: {length} tokens are more than the {most} positions the model is made for (max_position_embeddings); "
        "it computes positions, so it runs, but how well it does beyond them is not known"
    )


def _table_rows(spec: ModelSpec) -> list[int]:
    """Rows of each table that is looked up."""
    tables = [seat for seat in spec.seats if seat.kind == "table"]
    return [sum(spec.units[u].sections[0].members[0].shape[0] for u in seat.units) for seat in tables]
