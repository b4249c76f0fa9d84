"""From records to samples: count what becomes of each record and keep its tokens.

The audit is here; files and bad records are in `records.py`; tokens and masks in `tokens.py`; the order of rows and the
place for a resume in `batches.py`.  Nothing is dropped without a count.

Its one trade-off: all tokens are kept in memory, five bytes each (four of the id, one of the mask), which buys a row
order that is any permutation and a resume that needs two numbers.  A billion tokens are 5 GB.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from offloadz.plan.errors import ConfigError
from offloadz.plan.words import counted
from offloadz.train.batches import Loader, collate, collate_packed, held_out, padding_shares
from offloadz.train.files import Place
from offloadz.train.forms import Completion, Dialogue, RecordError
from offloadz.train.records import (
    NUM_BAD_SHOWN,
    BadRecord,
    DataSettings,
    Record,
    Records,
    check_settings,
    find_files,
    listing,
    read_records,
    stop_on_bad,
)
from offloadz.train.templates import ChatTemplate, find_template
from offloadz.train.tokens import (
    Ids,
    Mask,
    Result,
    Words,
    template_notes,
    tokenise_completions,
    tokenise_dialogues,
    tokenise_texts,
)

__all__ = [
    "Audit",
    "BadRecord",
    "DataSettings",
    "Dataset",
    "Loader",
    "Record",
    "Records",
    "check_settings",
    "collate",
    "collate_packed",
    "find_files",
    "load_both",
    "load_dataset",
    "marked_pieces",
    "read_records",
    "tokenise",
]

_NUM_PER_CALL = 256  # records given to the tokenizer at once: it works on them in parallel


@dataclass
class Audit:
    """What became of every record; `num_samples` of them are trained on."""

    files: list[str] = field(default_factory=list)
    num_records: int = 0
    num_bad: int = 0
    bad: list[BadRecord] = field(default_factory=list)
    num_dropped_long: int = 0
    num_cut: int = 0
    num_cut_inside: int = 0
    """Of those cut at the right, how many lost the end of an answer."""
    num_no_target: int = 0
    num_samples: int = 0
    num_tokens: int = 0
    num_target_tokens: int = 0
    lengths: dict[int, int] = field(default_factory=dict)
    """Samples by length: key is the upper bound of the bin, a power of two, in tokens."""
    notes: list[str] = field(default_factory=list)
    num_held_out: int = 0
    packed: str = ""
    """How many rows the samples are packed into, and what that saves."""

    def lines(self, histogram: bool = True) -> list[str]:
        """The audit as text, one fact a line; `histogram`: with the lengths in a line."""
        inside = f" ({self.num_cut_inside} before the end of an answer)" if self.num_cut_inside else ""
        share = 100 * self.num_target_tokens / max(1, self.num_tokens)
        lines = [
            f"{self.num_samples:,} samples from {self.num_records:,} records in {counted(len(self.files), 'file')}",
            f"{self.num_tokens:,} tokens, {self.num_target_tokens:,} of them trained ({share:.1f} %)",
            f"{self.num_bad} bad records skipped, {self.num_dropped_long} too long and dropped, {self.num_cut} cut"
            f"{inside}, {self.num_no_target} dropped without a trained token",
        ]
        if histogram:
            lines.append(
                "lengths: " + ", ".join(f"{count} up to {bound}" for bound, count in sorted(self.lengths.items()))
            )
        lines += [self.packed] if self.packed else []
        lines += [f"{self.num_held_out} samples held out for evaluation"] if self.num_held_out else []
        lines += [f"skipped {bad.place}: {bad.reason}" for bad in self.bad[:NUM_BAD_SHOWN]]
        return lines + [f"note: {note}" for note in self.notes]


class Dataset:
    """Samples as two flat arrays; sample `i` is (ids: int32, targets: bool) of its length.

    `audit` counts what became of the records, `source(i)` names file and line, `pad_id` fills rows up (never read:
    padding is told by position).  Position 0 of a sample is never a target, since nothing stands before it.
    `row_length` is the room of a packed row in tokens, 0 where each sample has a row of its own; `template` is the
    one that dialogues were written with.
    """

    def __init__(
        self,
        rows: Sequence[tuple[Ids, Mask]],
        places: Sequence[Place],
        audit: Audit,
        pad_id: int,
        row_length: int = 0,
        template: ChatTemplate | None = None,
    ):
        """Take rows of ids and targets of equal lengths, and where each comes from."""
        self.audit, self.pad_id, self.places, self.row_length = audit, pad_id, list(places), row_length
        self.template = template
        self._edges = np.cumsum([0, *(len(ids) for ids, _ in rows)], dtype=np.int64)
        self._ids = np.concatenate([ids for ids, _ in rows]) if rows else np.zeros(0, dtype=np.int32)
        self._targets = np.concatenate([mask for _, mask in rows]) if rows else np.zeros(0, dtype=np.bool_)

    def __len__(self) -> int:
        return len(self._edges) - 1

    def __getitem__(self, index: int) -> tuple[Ids, Mask]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        part = slice(self._edges[index], self._edges[index + 1])
        return self._ids[part], self._targets[part]

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each sample."""
        return np.diff(self._edges)

    @property
    def max_length(self) -> int:
        """Tokens in the longest sample."""
        return int(self.lengths.max(initial=0))

    def source(self, index: int) -> str:
        """File and line of a sample, or what else tells where it stands."""
        return str(self.places[index])

    def chosen(self, which: npt.NDArray[np.bool_], audit: Audit) -> Dataset:
        """The samples that `which` marks, counted into `audit`."""
        indices = np.flatnonzero(which).tolist()
        rows = [self[i] for i in indices]
        _count(rows, audit)
        return Dataset(rows, [self.places[i] for i in indices], audit, self.pad_id, self.row_length, self.template)

    def fingerprint(self) -> str:
        """A short hash of all ids, targets and edges: equal when and only when the samples are."""
        digest = hashlib.blake2b(digest_size=16)
        for array in (self._edges, self._ids, self._targets):
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()


def tokenise(records: Records, tokenizer: Any, cfg: DataSettings, vocab_size: int) -> Dataset:
    """Turn records into samples of at most `cfg.max_length` tokens with ids below `vocab_size`.

    Raises `ConfigError` with file and line for ids outside the table, a doubled start token, records that the template
    refuses (unless skipped), samples too long under `on_long = "error"`, and when no sample has anything to train on.
    """
    check_settings(cfg)
    audit = Audit(records.files, len(records.items) + len(records.bad), bad=list(records.bad))
    rows: list[tuple[Ids, Mask]] = []
    places: list[Place] = []
    wrong: list[BadRecord] = []
    template: ChatTemplate | None = None
    if any(isinstance(record.value, Dialogue) for record in records.items):
        template = find_template(tokenizer, cfg.chat_template)
        audit.notes += template_notes(template, tokenizer)
    words = Words(tokenizer)
    audit.notes += _special_inside(records.items, words)
    for record, result in _tokenised(records.items, tokenizer, template, cfg.train_on, words):
        if isinstance(result, RecordError):
            audit.bad.append(BadRecord(record.place, str(result)))
            continue
        reason = _wrong_ids(result[0], tokenizer, vocab_size)
        if reason:
            wrong.append(BadRecord(record.place, reason))
            continue
        sample = _fit(*result, record, cfg, audit, wrong)
        if sample is not None:
            rows.append(sample)
            places.append(record.place)
    stop_on_bad(audit.bad, cfg)
    audit.num_bad = len(audit.bad)
    if wrong:
        raise ConfigError(f"data: {len(wrong)} record(s) cannot be trained on" + listing(wrong))
    if not rows:
        raise ConfigError(_nothing_left(audit, cfg))
    _count(rows, audit)
    pad = next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None and i < vocab_size), 0)
    return Dataset(rows, places, audit, pad, cfg.max_length if cfg.packing else 0, template)


def _tokenised(
    items: Sequence[Record], tokenizer: Any, template: ChatTemplate | None, train_on: str, words: Words
) -> Iterator[tuple[Record, Result]]:
    """Each record with its tokens, or with the reason why it has none."""
    for start in range(0, len(items), _NUM_PER_CALL):
        part = items[start : start + _NUM_PER_CALL]
        values = [record.value for record in part]
        texts = [value for value in values if isinstance(value, str)]
        completions = [value for value in values if isinstance(value, Completion)]
        chats = [value for value in values if isinstance(value, Dialogue)]
        plain = iter(tokenise_texts(texts, tokenizer) if texts else [])
        answers = iter(tokenise_completions(completions, tokenizer, train_on) if completions else [])
        dialogues = iter(tokenise_dialogues(chats, tokenizer, template, train_on, words) if template else [])
        for record in part:
            if isinstance(record.value, str):
                ids = next(plain)
                yield record, (ids, np.ones(len(ids), dtype=np.bool_))
            else:
                yield record, next(answers if isinstance(record.value, Completion) else dialogues)


def _special_inside(items: Sequence[Record], words: Words) -> list[str]:
    """Notes when records hold special tokens written out: what becomes of them is not the same in all forms."""
    plain, inside = [], []
    for record in items:
        value = record.value
        if isinstance(value, Dialogue):
            if any(words.within(message["content"]) for message in value.messages):
                inside.append(record)
        elif words.within(value if isinstance(value, str) else value.prompt + value.completion):
            plain.append(record)
    notes = []
    if plain:
        notes.append(
            f"{len(plain)} text(s) hold special tokens written out, which the tokenizer takes as such; "
            f"the first is {plain[0].place}"
        )
    if inside:
        notes.append(
            f"{len(inside)} dialogue(s) hold special tokens of the tokenizer in a message: they are trained as plain "
            f"text, special tokens come from the template alone; the first is {inside[0].place}"
        )
    return notes


def _wrong_ids(ids: Ids, tokenizer: Any, vocab_size: int) -> str:
    """Why these ids cannot be trained on, or nothing."""
    outside = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if len(outside):
        worst = int(ids[outside[0]])
        return (
            f"token {int(outside[0])} has the id {worst}, the model's table has {vocab_size} rows; "
            "tokenizer and model do not belong together (see model.path)"
        )
    start = tokenizer.bos_token_id
    if start is not None and len(ids) > 1 and ids[0] == start and ids[1] == start:
        return f"starts with {tokenizer.bos_token!r} twice; take it out of the text or of the chat template"
    return ""


def _fit(
    ids: Ids, mask: Mask, record: Record, cfg: DataSettings, audit: Audit, wrong: list[BadRecord]
) -> tuple[Ids, Mask] | None:
    """Apply `on_long`, then drop what has no target; None and a count where nothing is left of the sample."""
    if len(ids) > cfg.max_length:
        if cfg.on_long == "error":
            reason = f"{len(ids)} tokens, data.max_length is {cfg.max_length}; raise it or set data.on_long"
            wrong.append(BadRecord(record.place, reason))
            return None
        if cfg.on_long == "drop":
            audit.num_dropped_long += 1
            return None
        audit.num_cut += 1
        at_right = cfg.on_long == "cut_right"
        audit.num_cut_inside += int(at_right and mask[cfg.max_length - 1] and mask[cfg.max_length])
        part = slice(-cfg.max_length, None) if cfg.on_long == "cut_left" else slice(cfg.max_length)
        ids, mask = ids[part], mask[part]
    targets = mask.copy()
    targets[:1] = False
    if not targets.any():
        audit.num_no_target += 1
        return None
    return ids, targets


def _nothing_left(audit: Audit, cfg: DataSettings) -> str:
    return (
        f"data: no sample is left to train on: of {audit.num_records} records {audit.num_bad} are bad, "
        f"{audit.num_dropped_long} are longer than data.max_length = {cfg.max_length} "
        f"(data.on_long = {cfg.on_long!r}), {audit.num_no_target} have no trained token "
        f"(data.train_on = {cfg.train_on!r})" + listing(audit.bad)
    )


def _count(rows: Sequence[tuple[Ids, Mask]], audit: Audit) -> None:
    audit.num_samples = len(rows)
    audit.num_tokens = sum(len(ids) for ids, _ in rows)
    audit.num_target_tokens = sum(int(mask.sum()) for _, mask in rows)
    audit.lengths = {}
    for ids, _ in rows:
        bound = 1 << (len(ids) - 1).bit_length()
        audit.lengths[bound] = audit.lengths.get(bound, 0) + 1


def load_dataset(patterns: Sequence[str], tokenizer: Any, cfg: DataSettings, vocab_size: int) -> Dataset:
    """`read_records`, then `tokenise`."""
    return tokenise(read_records(patterns, cfg), tokenizer, cfg, vocab_size)


def load_both(
    train: Sequence[str],
    evaluation: Sequence[str],
    tokenizer: Any,
    cfg: DataSettings,
    vocab_size: int,
    batch_size: int,
    seed: int,
) -> tuple[Dataset, Dataset | None]:
    """The samples to train on and those to evaluate on: of files of their own, or held out by `cfg.eval_share`.

    What is held out depends on `seed` and on the samples alone.  The audit of packed samples tells what packing saves
    in batches of `batch_size` rows.
    """
    samples = load_dataset(train, tokenizer, cfg, vocab_size)
    other = load_dataset(evaluation, tokenizer, cfg, vocab_size) if evaluation else None
    if other is not None and set(other.audit.files) & set(samples.audit.files):
        other.audit.notes.append("data.eval names files that are trained on: the loss on them says nothing of new text")
    if cfg.eval_share:
        which = held_out(len(samples), cfg.eval_share, seed)
        other = samples.chosen(which, Audit(samples.audit.files, int(which.sum())))
        samples = samples.chosen(~which, replace(samples.audit, num_held_out=int(which.sum())))
    if samples.row_length:
        samples.audit.packed = _packed(samples, batch_size, seed)
    return samples, other


def _packed(samples: Dataset, batch_size: int, seed: int) -> str:
    served, padded = padding_shares(samples, batch_size, seed)
    num_rows = len(Loader(samples, batch_size, seed).rows)
    return (
        f"packed into {num_rows} rows of up to {samples.row_length} tokens, {100 * served:.1f} % of them empty; one "
        f"sample a row, padded, would be {100 * padded:.1f} % padding in batches of {batch_size}"
    )


def marked_pieces(dataset: Dataset, index: int, tokenizer: Any) -> list[tuple[str, bool]]:
    """A sample as text in runs of (text, trained), for the eyes of a user."""
    ids, targets = dataset[index]
    edges = [0, *(np.flatnonzero(targets[1:] != targets[:-1]) + 1).tolist(), len(ids)]
    pairs = pairwise(edges)
    return [(tokenizer.decode(ids[a:b].tolist(), skip_special_tokens=False), bool(targets[a])) for a, b in pairs]
