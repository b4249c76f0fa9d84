"""Batches of a data set, epoch after epoch, padded or packed, and the place among them.

What the samples are is `data.py`'s, which of them share a row `packing.py`'s.  How a batch is split and computed is the
session's.

[Note: samples that share a row] A packed batch has no attention mask: its `position_ids` begin at 0 with each sample,
from which transformers' own mask code keeps samples apart, but only without an attention mask and without a cache, so
`use_cache = False` goes with it.  The end of a row that holds no sample counts as one more, without targets.  The first
token of a sample is no target, so none is predicted from the sample before.

The trade-off: rows are drawn from all samples at once, so a place is two numbers and a resume reads no old epoch again;
in exchange all tokens are in memory (see `data.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from offloadz.plan.errors import ConfigError
from offloadz.train.packing import pack
from offloadz.train.tokens import Ids, Mask

if TYPE_CHECKING:
    from offloadz.config import Config
    from offloadz.train.data import Dataset

Sample = tuple[Ids, Mask]
_ROWS_STREAM, _HELD_OUT_STREAM = 1, 2
"""Draws for the order of packed rows, and for what is held out, are not those for the order of samples."""


def drawn_order(num: int, seed: int, epoch: int, stream: int = 0) -> npt.NDArray[np.int64]:
    """A permutation of `num` by raw draws of Philox: unlike `permutation`, these are the same in all numpy versions."""
    key = np.array([seed % 2**64, epoch], dtype=np.uint64)
    return np.argsort(np.random.Philox(key=key, counter=stream << 128).random_raw(num), kind="stable")


def held_out(num: int, share: float, seed: int) -> npt.NDArray[np.bool_]:
    """Which of `num` samples are held out: about `share` of them, at least one, the same for the same seed."""
    chosen = np.zeros(num, dtype=np.bool_)
    count = max(1, round(num * share))
    if count >= num:
        raise ConfigError(
            f"data.eval_share = {share} of {num} samples holds out {count} and leaves none to train on; lower it"
        )
    chosen[drawn_order(num, seed, 0, _HELD_OUT_STREAM)[:count]] = True
    return chosen


NUM_LENGTHS = 8
"""Lengths of rows where each costs a compilation."""


def row_lengths(config: Config) -> tuple[int, ...]:
    """Lengths that the rows of a batch are filled up to, each to the next that holds the longest; none: just to that.

    Compiled blocks are compiled for each length (`model/compiled.py`).
    """
    if config.model.kernels != "compile":
        return ()
    return tuple(-(-config.data.max_length * part // NUM_LENGTHS) for part in range(1, NUM_LENGTHS + 1))


class Loader:
    """Batches of a data set and its place among them.

    The sample order of epoch `e` is a permutation drawn from a counter-based generator on (seed, e), or the file order.
    Where the data set is packed (`row_length`), an epoch's rows are packed from that order and drawn in turn; in file
    order a row stands where its first sample does.  The last batch of an epoch holds what is left.
    """

    def __init__(
        self,
        dataset: Dataset,
        batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        num_batches: int | None = None,
        deal: tuple[int, int] = (0, 1),
        lengths: Sequence[int] = (),
    ):
        """Serve `batch_size` rows at a time; iteration ends after `num_batches` in all (None: never).

        `deal`: of each batch only the rows that fall to this rank of so many, dealt in turn; one for which none is left
        gets the first without targets.  The place is that of all ranks.  `lengths`: see `row_lengths`.
        """
        if batch_size < 1:
            raise ConfigError(f"train.batch_size = {batch_size}: at least 1 row is needed")
        if not len(dataset):
            raise ConfigError("data: the data set has no sample")
        self.dataset, self.batch_size, self.seed, self.shuffle = dataset, batch_size, seed, shuffle
        self.num_batches, self.deal, self.lengths = num_batches, deal, lengths
        self.epoch = self.position = self.num_served = 0
        self.last_ids: list[int] = []
        """The samples of the newest batch, row by row, of all ranks."""
        self.last_num_tokens = 0
        """Their tokens: what fills the rows up is not counted."""
        self.rows = self._rows_of(0)

    @property
    def num_batches_per_epoch(self) -> int:
        """Batches that serve every sample once; the same in all epochs, see [Note: the number of rows]."""
        return -(-len(self.rows) // self.batch_size)

    def _rows_of(self, epoch: int) -> Sequence[npt.NDArray[np.int64]]:
        """The samples of each row of an epoch, in the order in which they are served."""
        num = len(self.dataset)
        order = drawn_order(num, self.seed, epoch) if self.shuffle else np.arange(num)
        if not self.dataset.row_length:
            return order.reshape(-1, 1)  # type: ignore[return-value]
        row_of = pack(self.dataset.lengths[order], self.dataset.row_length)
        by_row = np.argsort(row_of, kind="stable")
        edges = np.flatnonzero(np.diff(row_of[by_row])) + 1
        rows = np.split(order[by_row], edges)
        if self.shuffle:
            return [rows[i] for i in drawn_order(len(rows), self.seed, epoch, _ROWS_STREAM)]
        return sorted(rows, key=lambda row: int(row[0]))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self

    def __next__(self) -> dict[str, Any]:
        if self.num_batches is not None and self.num_served >= self.num_batches:
            raise StopIteration
        return self.next_batch()

    def next_batch(self) -> dict[str, Any]:
        """The next rows: see `collate`, or `collate_packed` where the data set is packed.

        Labels are not shifted (a transformers model does that) and -100 where nothing is trained.  `last_ids` then
        names the samples.  `num_batches` does not bind here: it ends iteration only.
        """
        if self.position >= len(self.rows):
            self.epoch, self.position = self.epoch + 1, 0
            self.rows = self._rows_of(self.epoch)
        rows = self.rows[self.position : self.position + self.batch_size]
        self.position += len(rows)
        self.num_served += 1
        self.last_ids = [int(index) for row in rows for index in row]
        samples = [[self.dataset[int(index)] for index in row] for row in rows]
        self.last_num_tokens = sum(len(ids) for row in samples for ids, _ in row)
        rank, ranks = self.deal
        own = samples[rank::ranks] or [[(ids, np.zeros_like(targets)) for ids, targets in samples[0]]]
        if self.dataset.row_length:
            return collate_packed(own, self.dataset.pad_id, self.lengths)
        return collate([row[0] for row in own], self.dataset.pad_id, self.lengths)

    def state_dict(self) -> dict[str, Any]:
        """The place (plain JSON values), with what it depends on."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "num_served": self.num_served,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "row_length": self.dataset.row_length,
            "samples": self.dataset.fingerprint(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on at the place of `state`; `ConfigError` where seed, shuffle or the samples are not those it was in."""
        own = self.state_dict()
        names = {
            "seed": "train.seed",
            "shuffle": "data.shuffle",
            "row_length": "data.packing or data.max_length",
            "samples": "the samples of data.train",
        }
        for key, name in names.items():
            before = state.get(key, 0) if key == "row_length" else state[key]
            if before != own[key]:
                raise ConfigError(
                    f"resume: {name} changed since the checkpoint ({before} there, {own[key]} now); "
                    "put it back, or start a new run with another train.output"
                )
        self.epoch, self.position = int(state["epoch"]), int(state["position"])
        self.num_served = int(state["num_served"])
        self.last_ids = []
        self.rows = self._rows_of(self.epoch)


def _width(longest: int, lengths: Sequence[int]) -> int:
    return next((length for length in lengths if length >= longest), longest)


def collate(rows: Sequence[Sample], pad_id: int, lengths: Sequence[int] = ()) -> dict[str, Any]:
    """Stack samples into (rows, longest) int64 `input_ids`, `attention_mask`, `labels`, padded at the right.

    Padding is told by position alone.  `lengths`: see `row_lengths`.
    """
    shape = len(rows), _width(max(len(ids) for ids, _ in rows), lengths)
    input_ids = np.full(shape, pad_id, dtype=np.int64)
    attention_mask = np.zeros(shape, dtype=np.int64)
    labels = np.full(shape, -100, dtype=np.int64)
    for row, (ids, targets) in enumerate(rows):
        input_ids[row, : len(ids)] = ids
        attention_mask[row, : len(ids)] = 1
        labels[row, : len(ids)] = np.where(targets, ids, -100)
    arrays = {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def collate_packed(rows: Sequence[Sequence[Sample]], pad_id: int, lengths: Sequence[int] = ()) -> dict[str, Any]:
    """Lay samples behind each other into (rows, longest) int64 `input_ids`, `position_ids`, `labels`; no mask.

    See [Note: samples that share a row] for why `use_cache` is False, `row_lengths` for `lengths`.
    """
    shape = len(rows), _width(max(sum(len(ids) for ids, _ in row) for row in rows), lengths)
    input_ids = np.full(shape, pad_id, dtype=np.int64)
    position_ids = np.empty(shape, dtype=np.int64)
    labels = np.full(shape, -100, dtype=np.int64)
    for number, row in enumerate(rows):
        at = 0
        for ids, targets in row:
            part = slice(at, at + len(ids))
            input_ids[number, part] = ids
            position_ids[number, part] = np.arange(len(ids))
            labels[number, part] = np.where(targets, ids, -100)
            labels[number, at] = -100
            at += len(ids)
        position_ids[number, at:] = np.arange(shape[1] - at)
    arrays = {"input_ids": input_ids, "position_ids": position_ids, "labels": labels}
    return {"use_cache": False, **{name: torch.from_numpy(array) for name, array in arrays.items()}}


def padding_shares(dataset: Dataset, batch_size: int, seed: int = 0, shuffle: bool = True) -> tuple[float, float]:
    """The share of positions that hold no sample in an epoch: as served, and if rows were padded, one sample each."""
    served, padded = Loader(dataset, batch_size, seed, shuffle), dataset.lengths
    rows = [int(padded[row].sum()) for row in served.rows]
    order = drawn_order(len(dataset), seed, 0) if shuffle else np.arange(len(dataset))
    return _waste(np.asarray(rows), batch_size), _waste(padded[order], batch_size)


def _waste(lengths: npt.NDArray[np.int64], batch_size: int) -> float:
    starts = np.arange(0, len(lengths), batch_size)
    counts = np.diff(np.append(starts, len(lengths)))
    computed = int((np.maximum.reduceat(lengths, starts) * counts).sum())
    return 1 - int(lengths.sum()) / computed
