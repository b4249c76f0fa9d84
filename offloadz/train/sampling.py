"""Answers to a few prompts between steps: what the model says by now, for the eyes of a user.

The run's own model answers, so its weights stay where they are; always the likeliest token, so equal weights give equal
texts.  Nothing is left behind: no gradient, no drawn random number, no changed mode.  When to ask and where the answers
go is the loop's.  The trade-off: prompts are answered together, the shorter ones padded at the left, so the weights are
fetched once a token and not once a token and prompt; only as many together as keep their keys and values below what a
training step takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from offloadz.memory.heap import give_back
from offloadz.model.told import random_states, set_random_states
from offloadz.plan.errors import ConfigError
from offloadz.train.forms import RecordError
from offloadz.train.templates import ChatTemplate
from offloadz.train.tokens import end_ids, listed

if TYPE_CHECKING:
    from offloadz.model.run import Run


@dataclass(frozen=True)
class Sample:
    """One answer; `ended`: the model stopped by itself."""

    prompt: str
    text: str
    num_tokens: int
    ended: bool


class Prompts:
    """Prompts as tokens.

    With a `template` (the data are dialogues) each is a user's turn, and what ends a turn ends an answer; without one
    it is a text to go on with, by the tokenizer's own rule.  The tokenizer is not kept: a large one takes more memory
    than a small model's blocks, and is read anew (in a second or so) when there is something to decode.
    """

    def __init__(
        self,
        texts: Sequence[str],
        num_tokens: int,
        open_tokenizer: Callable[[], Any],
        template: ChatTemplate | None,
        vocab_size: int,
    ) -> None:
        """Raise ConfigError for a prompt that the template refuses, or with ids outside the table."""
        self.texts, self.num_tokens, self._open = tuple(texts), num_tokens, open_tokenizer
        tokenizer = open_tokenizer()
        self.rows = [_ids_of(text, tokenizer, template) for text in texts]
        for text, row in zip(self.texts, self.rows, strict=True):
            if not row or max(row) >= vocab_size:
                most = f"an id of {max(row)}" if row else "no token"
                raise ConfigError(f"train.sample_prompts: {text!r} has {most}; needed: ids below {vocab_size}")
        self._ends = end_ids(tokenizer, template)

    @property
    def num_positions(self) -> int:
        """Positions that the longest prompt and its answer take."""
        return max(map(len, self.rows), default=0) + self.num_tokens

    def ask(self, run: Run, most_tokens: int = 0, stop: Callable[[], bool] = lambda: False) -> list[Sample] | None:
        """The answers of a run's model as it is now; None where `stop` said so before all were there.

        `most_tokens`: of prompts and answers that are under way at once (a prompt alone may be longer); 0: any number.
        """
        states, training = random_states(), run.model.training
        run.model.eval()
        found: list[tuple[list[int], bool]] = []
        try:
            for first, last in self._groups(most_tokens):
                found += self._answers(run.model, first, last, stop)
                if stop():
                    return None
        finally:
            run.model.train(training)
            run.flush()
            set_random_states(states)
        tokenizer = self._open()
        texts = [str(tokenizer.decode(row, skip_special_tokens=False)) for row, _ in found]
        del tokenizer
        give_back()
        told = zip(self.texts, texts, found, strict=True)
        return [Sample(prompt, text, len(row), ended) for prompt, text, (row, ended) in told]

    def _groups(self, most_tokens: int) -> Iterator[tuple[int, int]]:
        """(first, last) of neighbours that are asked together."""
        first, longest = 0, 0
        for at, row in enumerate(self.rows):
            longest = max(longest, len(row))
            if most_tokens and at > first and (at + 1 - first) * (longest + self.num_tokens) > most_tokens:
                yield first, at
                first, longest = at, len(row)
        yield first, len(self.rows)

    @torch.no_grad()
    def _answers(self, model: Any, first: int, last: int, stop: Callable[[], bool]) -> list[tuple[list[int], bool]]:
        """Ids of each answer without what ends it, and whether it ended."""
        from transformers import GenerationConfig

        ends = sorted(self._ends | set(listed(getattr(model.generation_config, "eos_token_id", None))))
        pad = ends[0] if ends else 0
        ids, mask = _padded(self.rows[first:last], pad)
        how = GenerationConfig(
            do_sample=False, num_beams=1, max_new_tokens=self.num_tokens, use_cache=True, pad_token_id=pad,
            eos_token_id=ends or None,
        )  # fmt: skip

        def stopping(so_far: Tensor, scores: Any, **_: Any) -> Tensor:
            return torch.full((so_far.shape[0],), stop(), dtype=torch.bool)

        out = model.generate(ids, attention_mask=mask, generation_config=how, stopping_criteria=[stopping])
        rows = out[:, ids.shape[1] :].tolist()
        lengths = [next((at for at, token in enumerate(row) if token in ends), len(row)) for row in rows]
        return [(row[:length], length < len(row)) for row, length in zip(rows, lengths, strict=True)]


def _ids_of(text: str, tokenizer: Any, template: ChatTemplate | None) -> list[int]:
    if template is None:
        row = tokenizer(text, verbose=False)["input_ids"]
        end = tokenizer.eos_token_id
        return [int(i) for i in (row[:-1] if len(row) > 1 and row[-1] == end else row)]
    try:
        asked = template.render([{"role": "user", "content": text}], True)
    except RecordError as error:
        raise ConfigError(f"train.sample_prompts: {text!r}: {error}") from error
    return [int(i) for i in tokenizer(asked, add_special_tokens=False, verbose=False)["input_ids"]]


def _padded(rows: Sequence[Sequence[int]], pad: int) -> tuple[Tensor, Tensor]:
    """(rows, length) ids padded at the left, and the mask of what is there."""
    length = max(map(len, rows))
    ids = torch.full((len(rows), length), pad, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for at, row in enumerate(rows):
        ids[at, length - len(row) :] = torch.tensor(row)
        mask[at, length - len(row) :] = 1
    return ids, mask
