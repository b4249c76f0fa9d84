"""From records to batches: count what becomes of each record, keep its tokens, serve them in order.

The audit, the row order and its place for a resume are here; files and bad lines are in `records.py`; tokens, masks and
templates in `tokens.py`; how a batch is split and computed is the session's.  Nothing is dropped without a count.

Its one trade-off: all tokens are kept in memory, five bytes each (four of the id, one of the mask), which buys a row
order that is any permutation and a resume that needs two numbers.  A billion tokens are 5 GB.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from offloadz.plan.errors import ConfigError
from offloadz.train.records import (
    NUM_BAD_SHOWN,
    BadLine,
    DataSettings,
    Record,
    Records,
    check_settings,
    find_files,
    listing,
    read_records,
    stop_on_bad,
)
from offloadz.train.tokens import (
    ChatTemplate,
    Ids,
    Mask,
    RecordError,
    find_template,
    template_notes,
    tokenise_dialogues,
    tokenise_texts,
)

__all__ = [
    "Audit",
    "BadLine",
    "DataSettings",
    "Dataset",
    "Loader",
    "Record",
    "Records",
    "check_settings",
    "collate",
    "find_files",
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
    bad: list[BadLine] = field(default_factory=list)
    num_dropped_long: int = 0
    num_cut: int = 0
    num_no_target: int = 0
    num_samples: int = 0
    num_tokens: int = 0
    num_target_tokens: int = 0
    lengths: dict[int, int] = field(default_factory=dict)
    """Samples by length: key is the upper bound of the bin, a power of two, in tokens."""
    notes: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """The audit as text, one fact a line."""
        share = 100 * self.num_target_tokens / max(1, self.num_tokens)
        lines = [
            f"{self.num_samples} samples from {self.num_records} records in {len(self.files)} file(s)",
            f"{self.num_tokens} tokens, {self.num_target_tokens} of them trained ({share:.1f} %)",
            f"{self.num_bad} bad lines skipped, {self.num_dropped_long} too long and dropped, {self.num_cut} cut, "
            f"{self.num_no_target} dropped without a trained token",
            "lengths: " + ", ".join(f"{count} up to {bound}" for bound, count in sorted(self.lengths.items())),
        ]
        lines += [f"skipped {bad.file}:{bad.line}: {bad.reason}" for bad in self.bad[:NUM_BAD_SHOWN]]
        return lines + [f"note: {note}" for note in self.notes]


class Dataset:
    """Samples as two flat arrays; sample `i` is (ids: int32, targets: bool) of its length.

    `audit` counts what became of the records, `source(i)` names file and line, `pad_id` fills short rows (never read:
    padding is told by position).  Position 0 of a sample is never a target, since nothing stands before it.
    """

    def __init__(self, rows: Sequence[tuple[Ids, Mask]], lines: Sequence[tuple[str, int]], audit: Audit, pad_id: int):
        """Take rows of ids and targets of equal lengths; `lines` are their (file, line)."""
        self.audit, self.pad_id, self._lines = audit, pad_id, list(lines)
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
    def max_length(self) -> int:
        """Tokens in the longest sample."""
        return int(np.diff(self._edges).max(initial=0))

    def source(self, index: int) -> str:
        """`file:line` of a sample."""
        file, line = self._lines[index]
        return f"{file}:{line}"

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
    audit = Audit(records.files, len(records.items), len(records.bad), list(records.bad))
    rows: list[tuple[Ids, Mask]] = []
    lines: list[tuple[str, int]] = []
    wrong: list[BadLine] = []
    template: ChatTemplate | None = None
    if any(not isinstance(record.value, str) for record in records.items):
        template = find_template(tokenizer, cfg.chat_template)
        audit.notes += template_notes(template, tokenizer)
    audit.notes += _special_inside(records.items, tokenizer, template)
    for record, result in _tokenised(records.items, tokenizer, template, cfg.train_on):
        if isinstance(result, RecordError):
            audit.bad.append(BadLine(record.file, record.line, str(result)))
            continue
        reason = _wrong_ids(result[0], tokenizer, vocab_size)
        if reason:
            wrong.append(BadLine(record.file, record.line, reason))
            continue
        sample = _fit(*result, record, cfg, audit, wrong)
        if sample is not None:
            rows.append(sample)
            lines.append((record.file, record.line))
    stop_on_bad(audit.bad, cfg)
    audit.num_bad = len(audit.bad)
    if wrong:
        raise ConfigError(f"data: {len(wrong)} record(s) cannot be trained on" + listing(wrong))
    if not rows:
        raise ConfigError(_nothing_left(audit, cfg))
    _count(rows, audit)
    pad = next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None and i < vocab_size), 0)
    return Dataset(rows, lines, audit, pad)


def _tokenised(
    items: Sequence[Record], tokenizer: Any, template: ChatTemplate | None, train_on: str
) -> Iterator[tuple[Record, tuple[Ids, Mask] | RecordError]]:
    """Each record with its tokens, or with the reason why it has none."""
    for start in range(0, len(items), _NUM_PER_CALL):
        part = items[start : start + _NUM_PER_CALL]
        texts = [record.value for record in part if isinstance(record.value, str)]
        chats = [record.value for record in part if not isinstance(record.value, str)]
        plain = iter(tokenise_texts(texts, tokenizer) if texts else [])
        dialogues = iter(tokenise_dialogues(chats, tokenizer, template, train_on) if template else [])
        for record in part:
            if isinstance(record.value, str):
                ids = next(plain)
                yield record, (ids, np.ones(len(ids), dtype=np.bool_))
            else:
                yield record, next(dialogues)


def _special_inside(items: Sequence[Record], tokenizer: Any, template: ChatTemplate | None) -> list[str]:
    """A note when records hold the text of special tokens: the tokenizer makes those tokens of it, wherever it is.

    Looked for are the named ones and those of the template; a tokenizer may reserve thousands more.
    """
    special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special and template}
    tokens = {token for token in special if template and token in template.text} | set(tokenizer.all_special_tokens)
    found = []
    for record in items:
        texts = [record.value] if isinstance(record.value, str) else [message["content"] for message in record.value]
        if any(token in text for token in tokens for text in texts):
            found.append(record)
    if not found:
        return []
    first = found[0]
    return [f"{len(found)} record(s) hold special tokens written out as text, the first is {first.file}:{first.line}"]


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
    ids: Ids, mask: Mask, record: Record, cfg: DataSettings, audit: Audit, wrong: list[BadLine]
) -> tuple[Ids, Mask] | None:
    """Apply `on_long`, then drop what has no target; None and a count where nothing is left of the sample."""
    if len(ids) > cfg.max_length:
        if cfg.on_long == "error":
            reason = f"{len(ids)} tokens, data.max_length is {cfg.max_length}; raise it or set data.on_long"
            wrong.append(BadLine(record.file, record.line, reason))
            return None
        if cfg.on_long == "drop":
            audit.num_dropped_long += 1
            return None
        audit.num_cut += 1
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
    for ids, _ in rows:
        bound = 1 << (len(ids) - 1).bit_length()
        audit.lengths[bound] = audit.lengths.get(bound, 0) + 1


def load_dataset(patterns: Sequence[str], tokenizer: Any, cfg: DataSettings, vocab_size: int) -> Dataset:
    """`read_records`, then `tokenise`."""
    return tokenise(read_records(patterns, cfg), tokenizer, cfg, vocab_size)


def marked_pieces(dataset: Dataset, index: int, tokenizer: Any) -> list[tuple[str, bool]]:
    """A sample as text in runs of (text, trained), for the eyes of a user."""
    ids, targets = dataset[index]
    edges = [0, *(np.flatnonzero(targets[1:] != targets[:-1]) + 1).tolist(), len(ids)]
    pairs = pairwise(edges)
    return [(tokenizer.decode(ids[a:b].tolist(), skip_special_tokens=False), bool(targets[a])) for a, b in pairs]


class Loader:
    """Batches of a data set, epoch after epoch, and its place among them.

    The row order of epoch `e` is a permutation drawn from a counter-based generator on (seed, e), or the file order; so
    a place is two numbers, and a resume reads no old epoch again.  The last batch of an epoch holds what is left.
    """

    def __init__(
        self, dataset: Dataset, batch_size: int, seed: int = 0, shuffle: bool = True, num_batches: int | None = None
    ):
        """Serve `batch_size` rows at a time; iteration ends after `num_batches` in all (None: never)."""
        if batch_size < 1:
            raise ConfigError(f"train.batch_size = {batch_size}: at least 1 row is needed")
        if not len(dataset):
            raise ConfigError("data: the data set has no sample")
        self.dataset, self.batch_size, self.seed, self.shuffle = dataset, batch_size, seed, shuffle
        self.num_batches = num_batches
        self.epoch = self.position = self.num_served = 0
        self.last_ids: list[int] = []
        self._order = self._order_of(0)

    @property
    def num_batches_per_epoch(self) -> int:
        """Batches that serve every sample once."""
        return -(-len(self.dataset) // self.batch_size)

    def _order_of(self, epoch: int) -> npt.NDArray[np.int64]:
        """Sort positions by raw draws of Philox: unlike `permutation`, numpy keeps these the same in all versions."""
        if not self.shuffle:
            return np.arange(len(self.dataset))
        key = np.array([self.seed % 2**64, epoch], dtype=np.uint64)
        return np.argsort(np.random.Philox(key=key).random_raw(len(self.dataset)), kind="stable")

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return self

    def __next__(self) -> dict[str, torch.Tensor]:
        if self.num_batches is not None and self.num_served >= self.num_batches:
            raise StopIteration
        return self.next_batch()

    def next_batch(self) -> dict[str, torch.Tensor]:
        """The next (rows, longest) int64 `input_ids`, `attention_mask`, `labels`, padded at the right end.

        Labels are not shifted (a transformers model does that) and -100 where nothing is trained.  `last_ids` then
        names the samples.  `num_batches` does not bind here: it ends iteration only.
        """
        if self.position >= len(self.dataset):
            self.epoch, self.position = self.epoch + 1, 0
            self._order = self._order_of(self.epoch)
        chosen = self._order[self.position : self.position + self.batch_size].tolist()
        self.position += len(chosen)
        self.num_served += 1
        self.last_ids = chosen
        return collate([self.dataset[index] for index in chosen], self.dataset.pad_id)

    def state_dict(self) -> dict[str, Any]:
        """The place (plain JSON values), with what it depends on."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "num_served": self.num_served,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "samples": self.dataset.fingerprint(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on at the place of `state`; `ConfigError` where seed, shuffle or the samples are not those it was in."""
        own = self.state_dict()
        names = {"seed": "train.seed", "shuffle": "data.shuffle", "samples": "the samples of data.train"}
        for key, name in names.items():
            if state[key] != own[key]:
                raise ConfigError(
                    f"resume: {name} changed since the checkpoint ({state[key]} there, {own[key]} now); "
                    "put it back, or start a new run with another train.output"
                )
        self.epoch, self.position = int(state["epoch"]), int(state["position"])
        self.num_served = int(state["num_served"])
        self.last_ids = []
        self._order = self._order_of(self.epoch)


def collate(rows: Sequence[tuple[Ids, Mask]], pad_id: int) -> dict[str, torch.Tensor]:
    """Stack samples into (rows, longest) int64 tensors, padded at the right; padding is told by position alone."""
    shape = len(rows), max(len(ids) for ids, _ in rows)
    input_ids = np.full(shape, pad_id, dtype=np.int64)
    attention_mask = np.zeros(shape, dtype=np.int64)
    labels = np.full(shape, -100, dtype=np.int64)
    for row, (ids, targets) in enumerate(rows):
        input_ids[row, : len(ids)] = ids
        attention_mask[row, : len(ids)] = 1
        labels[row, : len(ids)] = np.where(targets, ids, -100)
    arrays = {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}
    return {name: torch.from_numpy(array) for name, array in arrays.items()}
