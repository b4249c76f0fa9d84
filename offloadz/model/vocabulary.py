"""Special tokens that a model did not have: its tokenizer gets them, its table and head the rows for them.

How many rows there must be is `plan/vocabulary.py`'s.  [Note: the mean row] A new row is the mean of the old ones
(Hewitt, "Initializing New Word Embeddings for Pretrained Language Models", 2021).  As an input it lies where inputs
lie; as an output its score is the mean of all scores, so it takes next to no probability from the words a trained model
knows, where a random row may take any.  And it is the same in every run.  Rows that a table has to spare are used
first, with the values they have.

The trade-off: the old rows are read once more to take their mean (0.7 s for 262k words of 640), and new tokens begin as
equals, told apart from the first step on by where they stand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from offloadz.model.files import PIECE_ELEMENTS
from offloadz.model.sources import Source, shapes_of
from offloadz.plan.errors import ConfigError
from offloadz.plan.vocabulary import table_rows


@dataclass(frozen=True)
class Added:
    """Tokens that were added to a model, and whether its tokenizer may run code of its own."""

    tokens: tuple[str, ...]
    trust_remote_code: bool = False


def add_tokens(tokenizer: Any, tokens: Sequence[str]) -> None:
    """Make each of `tokens` a special token; one that the tokenizer has as a token of its own stays as it is."""
    from tokenizers import AddedToken

    there = {str(token) for token in tokenizer.added_tokens_decoder.values()}
    new = [AddedToken(token, special=True, normalized=False) for token in tokens if token not in there]
    if new:
        tokenizer.add_tokens(new, special_tokens=True)


def open_tokenizer(directory: str | Path, added: Added) -> Any:
    """The tokenizer of a model with its new tokens."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=added.trust_remote_code)
    add_tokens(tokenizer, added.tokens)
    return tokenizer


def write_tokenizer(source: Path, added: Added, target: Path) -> None:
    """Write the tokenizer of `source` with its new tokens over the copies of its files in `target`."""
    open_tokenizer(source, added).save_pretrained(target)


def grow(model: Any, directory: Path, tokens: Sequence[str]) -> bool:
    """Give a model on meta the rows that `tokens` need; whether it got any.  Its configuration then counts them."""
    config = model.config.get_text_config()
    rows = table_rows(directory, tokens, int(config.vocab_size))
    if rows == config.vocab_size:
        return False
    before = shapes_of(model)
    try:
        model.resize_token_embeddings(rows, mean_resizing=False)
    except (NotImplementedError, AttributeError, ValueError) as error:
        raise ConfigError(f"model.add_tokens: the table of {type(model).__name__} cannot grow: {error}") from error
    after = shapes_of(model)
    odd = [n for n, shape in after.items() if shape not in (before.get(n), (rows, *before.get(n, ())[1:]))]
    if odd or after.keys() != before.keys() or config.vocab_size != rows:
        raise ConfigError(f"model.add_tokens: how {type(model).__name__} grows is not built ({', '.join(odd)})")
    return True


class GrownSource:
    """A source whose tables were given more rows: the new ones are the mean of the old, see [Note: the mean row]."""

    def __init__(self, inner: Source, model: nn.Module) -> None:
        self._inner, self._shapes = inner, shapes_of(model)
        old = inner.names()
        self._grown = {name for name, shape in self._shapes.items() if shape != old[name]}
        self._old = {name: prod(old[name]) for name in self._grown}
        self._means: dict[str, Tensor] = {}

    def names(self) -> dict[str, tuple[int, ...]]:
        return dict(self._shapes)

    def read(self, name: str, start_element: int, count: int) -> Tensor:
        old = self._old.get(name, start_element + count)
        if start_element + count <= old:
            return self._inner.read(name, start_element, count)
        mean = self._mean(name)
        new = mean[torch.arange(max(start_element, old), start_element + count).remainder(mean.numel())]
        if start_element >= old:
            return new
        return torch.cat([self._inner.read(name, start_element, old - start_element).float(), new])

    def release(self, name: str) -> None:
        self._means.pop(name, None)
        self._inner.release(name)

    def _mean(self, name: str) -> Tensor:
        """The mean row in fp32, summed in double in the order of the rows."""
        if name not in self._means:
            rows = self._shapes[name][0]
            width = prod(self._shapes[name]) // rows
            total = torch.zeros(width, dtype=torch.float64)
            step = max(1, PIECE_ELEMENTS // width) * width
            for start in range(0, self._old[name], step):
                piece = self._inner.read(name, start, min(step, self._old[name] - start))
                total += piece.view(-1, width).sum(0, dtype=torch.float64)
            self._means[name] = (total / (self._old[name] // width)).float()
        return self._means[name]
