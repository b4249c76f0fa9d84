"""From one record to token ids and a mask of what is trained.

This room knows tokenizers; templates are in `templates.py`, files and lines in `records.py`, counts in `data.py`.

[Note: one tokenisation] A dialogue is rendered to text once by its template, that text is tokenised once, and the
mask comes from the character offsets of the tokens.  Tokenising turn by turn and gluing the pieces is what makes
masks drift elsewhere: a token that spans an edge of two pieces exists in one way and not in the other.  Special tokens
come from the template alone (`add_special_tokens=False`).

[Note: shielded words] A user who writes `<|im_end|>` must not end a turn.  Such words in a message are replaced, before
rendering, by as many private-use letters; so what the tokenizer then finds are the template's own special tokens.  The
piece between two of them that holds a shielded word is tokenised again with its own letters as plain text.  The
trade-off: a second look at those few records buys that all others are tokenised as they are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from offloadz.plan.errors import ConfigError
from offloadz.train.forms import Completion, Dialogue, Message, RecordError
from offloadz.train.templates import ChatTemplate, Span, assistant_spans, fixed_date_note, turn_end

Ids = npt.NDArray[np.int32]
Mask = npt.NDArray[np.bool_]
Offsets = npt.NDArray[np.int64]
Result = tuple[Ids, Mask] | RecordError
_SHIELD = 0xF0000
_SHIELDS = re.compile(f"[{chr(_SHIELD)}-{chr(_SHIELD + 0xFFFD)}]")


class Words:
    """The special tokens of a tokenizer as words that may stand in a text by accident."""

    def __init__(self, tokenizer: Any) -> None:
        added = tokenizer.added_tokens_decoder
        self.words = sorted(
            {str(t) for t in added.values() if t.special and str(t)} | set(tokenizer.all_special_tokens)
        )
        # The unknown token is what any letter may become: it says nothing of who wrote it.
        self.ids = {i for i, token in added.items() if token.special} | set(tokenizer.all_special_ids)
        self.ids.discard(tokenizer.unk_token_id)
        by_length = sorted(self.words, key=len, reverse=True)
        self._any = re.compile("|".join(map(re.escape, by_length))) if by_length else None
        self._number = {word: number for number, word in enumerate(self.words)}

    def within(self, text: str) -> bool:
        """Whether one stands in `text`."""
        return self._any is not None and self._any.search(text) is not None

    def shielded(self, text: str) -> str:
        """`text` with private-use letters, as many, in place of each; see [Note: shielded words]."""
        if self._any is None:
            return text
        return self._any.sub(lambda m: chr(_SHIELD + self._number[m[0]]) * len(m[0]), text)

    def bare(self, text: str) -> str:
        """The text that was shielded."""
        return re.sub(
            f"({_SHIELDS.pattern})\\1*",
            lambda m: self.words[ord(m[0][0]) - _SHIELD] * (len(m[0]) // len(self.words[ord(m[0][0]) - _SHIELD])),
            text,
        )


def mask_from_offsets(offsets: npt.NDArray[np.int64], spans: Sequence[Span]) -> Mask:
    """Which tokens touch a span.  `offsets` is (tokens, 2) characters; returns (tokens,) bool.

    A token over the edge of a span is in: the answer's first letters are in it.  A token without width is white space
    that the tokenizer trimmed from the front of its offsets: it stands before its position, not behind it.
    """
    starts, ends = offsets[:, 0], offsets[:, 1]
    mask = np.zeros(len(offsets), dtype=np.bool_)
    for first, last in spans:
        mask |= np.where(ends > starts, (starts < last) & (ends > first), (starts > first) & (starts <= last))
    return mask


def tokenise_texts(texts: Sequence[str], tokenizer: Any) -> list[Ids]:
    """Ids of plain texts by the tokenizer's own rule, each ending with the end token exactly once."""
    end = _end_id(tokenizer)
    rows = tokenizer(list(texts), return_attention_mask=False, return_token_type_ids=False, verbose=False)["input_ids"]
    return [np.asarray([*row[: _without_end(row, end)], end], dtype=np.int32) for row in rows]


def tokenise_completions(items: Sequence[Completion], tokenizer: Any, train_on: str) -> list[Result]:
    """Ids and mask of prompts with their completions: one text by the tokenizer's own rule, ending with the end token.

    Trained are the completion and the end token; with `train_on = "all"` everything.
    """
    end = _end_id(tokenizer)
    _require_offsets(tokenizer)
    texts = [item.prompt + item.completion for item in items]
    results: list[Result] = []
    for item, (ids, offsets) in zip(items, _encode(texts, tokenizer, specials=True), strict=True):
        mask = mask_from_offsets(offsets, [(len(item.prompt), len(item.prompt) + len(item.completion))])
        last = _without_end(ids.tolist(), end)
        ids, mask = np.append(ids[:last], np.int32(end)), np.append(mask[:last], True)
        results.append((ids, np.ones(len(ids), dtype=np.bool_) if train_on == "all" else mask))
    return results


def _end_id(tokenizer: Any) -> int:
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            "data: records that are plain text end with the tokenizer's end token and it has none; "
            "set eos_token in tokenizer_config.json"
        )
    return int(tokenizer.eos_token_id)


def _without_end(row: Sequence[int], end: int) -> int:
    """How many ids there are before the end tokens at the end."""
    last = len(row)
    while last and row[last - 1] == end:
        last -= 1
    return last


def _require_offsets(tokenizer: Any) -> None:
    if not getattr(tokenizer, "is_fast", False):
        raise ConfigError(
            f"data: {type(tokenizer).__name__} gives no character offsets, which masks of answers need; "
            "use a model with a tokenizer.json"
        )


def tokenise_dialogues(
    dialogues: Sequence[Dialogue], tokenizer: Any, template: ChatTemplate, train_on: str, words: Words
) -> list[Result]:
    """Ids and mask of each dialogue, or the reason why it has none; `train_on` is assistant, last or all."""
    _require_offsets(tokenizer)
    rendered: list[tuple[str, list[Span]] | RecordError] = []
    for dialogue in dialogues:
        try:
            rendered.append(_rendered(dialogue, template, train_on == "all", words))
        except RecordError as error:
            rendered.append(error)
    encoded = _encode([item[0] for item in rendered if not isinstance(item, RecordError)], tokenizer)
    return [item if isinstance(item, RecordError) else _masked(item, next(encoded), tokenizer, train_on, words)
            for item in rendered]  # fmt: skip


def _rendered(dialogue: Dialogue, template: ChatTemplate, whole: bool, words: Words) -> tuple[str, list[Span]]:
    """The text of a dialogue, special words of its messages shielded, and where its answers stand."""
    messages = [_shielded(message, words) for message in dialogue.messages]
    if dialogue.tools and words.within(json.dumps(dialogue.tools, ensure_ascii=False)):
        raise RecordError("'tools' hold a special token of the tokenizer written out; take it out")
    bound = template.with_tools(dialogue.tools)
    return (bound.render(messages, False), []) if whole else assistant_spans(bound, messages)


def _shielded(message: Message, words: Words) -> Message:
    if "tool_calls" in message and words.within(json.dumps(message["tool_calls"], ensure_ascii=False)):
        raise RecordError("'tool_calls' hold a special token of the tokenizer written out; take it out")
    content = message["content"]
    if not words.within(content):
        return message
    if _SHIELDS.search(content):
        raise RecordError("holds a special token written out beside letters of the private plane 15; take one out")
    return {**message, "content": words.shielded(content)}


def _masked(
    item: tuple[str, list[Span]], encoded: tuple[Ids, Offsets], tokenizer: Any, train_on: str, words: Words
) -> Result:
    text, spans = item
    ids, offsets = encoded
    if _SHIELDS.search(text):
        try:
            ids, offsets = _unshielded(text, ids, offsets, tokenizer, words)
        except RecordError as error:
            return error
    if train_on == "all":
        return ids, np.ones(len(ids), dtype=np.bool_)
    return ids, mask_from_offsets(offsets, spans[-1:] if train_on == "last" else spans)


def _unshielded(text: str, ids: Ids, offsets: Offsets, tokenizer: Any, words: Words) -> tuple[Ids, Offsets]:
    """The tokens of a shielded text with its own letters, none of them special that the template did not write."""
    special = np.isin(ids, list(words.ids)) & (offsets[:, 1] > offsets[:, 0])
    edges = [-1, *np.flatnonzero(special).tolist(), len(ids)]
    pieces: list[tuple[Ids, Offsets]] = []
    for before, after in pairwise(edges):
        inside = slice(before + 1, after)
        first = int(offsets[before, 1]) if before >= 0 else 0
        last = int(offsets[after, 0]) if after < len(ids) else len(text)
        part = text[first:last]
        pieces.append(
            _as_plain(part, first, ids[inside], offsets[inside], tokenizer, words)
            if _SHIELDS.search(part)
            else (ids[inside], offsets[inside])
        )
        if after < len(ids):
            pieces.append((ids[after : after + 1], offsets[after : after + 1]))
    return np.concatenate([a for a, _ in pieces]), np.concatenate([b for _, b in pieces])


def _as_plain(part: str, first: int, ids: Ids, offsets: Offsets, tokenizer: Any, words: Words) -> tuple[Ids, Offsets]:
    """A piece between two special tokens, `first` letters into the text, with every word in it as plain text."""
    alone, again = _encode([part, words.bare(part)], tokenizer, plain=True)
    if not np.array_equal(alone[0], ids):
        raise RecordError(
            "holds a special token written out, and this tokenizer cuts a text differently at its start than behind a "
            "special token, so that it cannot be made plain text; take it out"
        )
    if np.isin(again[0], list(words.ids)).any():
        raise RecordError(
            "holds a special token written out, for which this tokenizer knows no other tokens; take it out"
        )
    # Tokens before the first such word are those of the whole text, and so are their offsets: how white space is
    # trimmed from them is not the same at the start of a text.
    most = min(len(ids), len(again[0]))
    differ = np.append(again[0][:most] != ids[:most], True)
    same = int(differ.argmax())
    return again[0], np.concatenate([offsets[:same], again[1][same:] + first])


def _encode(
    texts: Sequence[str], tokenizer: Any, specials: bool = False, plain: bool = False
) -> Iterator[tuple[Ids, Offsets]]:
    """Ids and (tokens, 2) character offsets of each text, by one call of the tokenizer.

    `specials`: the tokenizer adds its own, as it does to a plain text.  `plain`: words that spell one are no special.
    """
    if not texts:
        return
    rows = tokenizer(
        list(texts),
        add_special_tokens=specials,
        split_special_tokens=plain,
        return_offsets_mapping=True,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,
    )
    for row, pairs in zip(rows["input_ids"], rows["offset_mapping"], strict=True):
        yield np.asarray(row, dtype=np.int32), np.asarray(pairs, dtype=np.int64).reshape(-1, 2)


def template_notes(template: ChatTemplate, tokenizer: Any) -> list[str]:
    """What a user should know about this template with this tokenizer; nothing here stops a run."""
    notes: list[str] = []
    try:
        end = turn_end(template)
    except RecordError:
        return notes
    pieces = tokenizer(end, add_special_tokens=False)["input_ids"]
    if not end.strip():
        notes.append(f"{template.name} ends a turn with white space only ({end!r}): generation must stop on that text")
    elif len(pieces) != 1:
        notes.append(
            f"{template.name} ends a turn with {end!r}, which is {len(pieces)} tokens of this tokenizer: all are "
            "trained, but generation must stop on that text, not on a token"
        )
    known = tokenizer.get_vocab()
    missing = [token for token in template.tokens if token not in known]
    if missing:
        notes.append(
            f"{template.name} writes {', '.join(missing)}, which the tokenizer takes apart; to make each one token "
            f"write add_tokens = {json.dumps(missing)} under [model]"
        )
    return notes + fixed_date_note(template)


def end_ids(tokenizer: Any, template: ChatTemplate | None) -> set[int]:
    """The end token, and what the template ends an answer with where that is one token."""
    ends = set(listed(tokenizer.eos_token_id))
    if template is not None:
        try:
            piece = tokenizer(turn_end(template), add_special_tokens=False)["input_ids"]
        except RecordError:
            return ends
        ends |= set(piece) if len(piece) == 1 else set()
    return ends


def listed(ids: Any) -> list[int]:
    """Ids as configurations write them: none, one, or a list."""
    if ids is None:
        return []
    return [int(i) for i in ids] if isinstance(ids, list | tuple) else [int(ids)]
