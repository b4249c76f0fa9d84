"""How many rows a model's table needs once its tokenizer has more tokens: ids from tokenizer.json, no tokenizer opened.

What becomes of the table is the model's room; here is only the count, for the plan and for the run alike.  The
trade-off: the rule by which a tokenizer numbers new tokens is written down a second time (behind the last id it has
given), so a plan needs no tokenizer in memory; who opens one compares.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from offloadz.plan.errors import ConfigError

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_FILES = (TOKENIZER_FILE, "*.model", "vocab.*", "tekken.json", "*.tiktoken")
"""A tokenizer has at least one of these, whatever its kind."""


def tokenizer_missing(directory: Path) -> str:
    """Words about a directory that holds no tokenizer; "" where it may hold one."""
    if any(path for pattern in TOKENIZER_FILES for path in directory.glob(pattern)):
        return ""
    return f"{directory} holds no tokenizer, which is one of {', '.join(TOKENIZER_FILES)}"


def table_rows(directory: Path, tokens: Sequence[str], vocab_size: int) -> int:
    """Rows of the table with `tokens` in it: `vocab_size` while there are spare ones, else as many as the ids need.

    Raises ConfigError where tokens are named twice, or there is no tokenizer.json to know their ids from.
    """
    if not tokens:
        return vocab_size
    twice = sorted({token for token in tokens if list(tokens).count(token) > 1})
    if twice:
        raise ConfigError(f"model.add_tokens names {twice[0]!r} twice; name it once")
    return max(vocab_size, *(number + 1 for number in token_ids(directory, tokens).values()))


def token_ids(directory: Path, tokens: Sequence[str]) -> dict[str, int]:
    """The id of each token: the one it has, or for a new one the first behind all that are given."""
    path = directory / TOKENIZER_FILE
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        words = told["model"]["vocab"]
        known = dict(words) if isinstance(words, Mapping) else {entry[0]: at for at, entry in enumerate(words)}
        added = {entry["content"]: int(entry["id"]) for entry in told.get("added_tokens", [])}
    except OSError as error:
        raise ConfigError(
            f"model.add_tokens needs {path} to know the ids of new tokens: {error.strerror or error}"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ConfigError(f"model.add_tokens: {path} is no tokenizer's file: {error!r}") from None
    following = max([len(known), *(number + 1 for number in added.values())])
    found: dict[str, int] = {}
    for token in tokens:
        number = added.get(token, known.get(token))
        if number is None:
            number, following = following, following + 1
        elif token not in added:  # a word that becomes a token of its own counts as given
            following = max(following, int(number) + 1)
        found[token] = int(number)
    return found


def vocab_size_of(config: Mapping[str, Any]) -> int:
    """Rows of the table by config.json (of the text model inside, where there is one); 0 where it names none."""
    text = config.get("text_config")
    facts = text if isinstance(text, Mapping) else config
    return int(facts.get("vocab_size") or 0)


def with_vocab_size(config: Mapping[str, Any], vocab_size: int) -> dict[str, Any]:
    """The configuration of a model whose table has so many rows."""
    text = config.get("text_config")
    if isinstance(text, Mapping):
        return {**config, "text_config": {**text, "vocab_size": vocab_size}}
    return {**config, "vocab_size": vocab_size}
