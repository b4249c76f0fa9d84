"""Packing: best fit, and samples of a row that never see each other.  Kind K16 (packs), trap 2 of packing.

What isolates is shown on whole runs: tokens of the first sample of a row are changed, and the loss, the norm and every
weight after a step keep their bits.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import FAMILIES as ALL_FAMILIES
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import plain_run
from tiny_models import VOCABULARY, assert_close, start_of, tiny, train, weights
from torch import nn

import offloadz
from offloadz.plan.errors import ConfigError
from offloadz.train.batches import Loader, collate, collate_packed, held_out, padding_shares
from offloadz.train.data import Audit, Dataset
from offloadz.train.files import Place
from offloadz.train.packing import compiled, pack, place, place_by_numpy

FAMILIES = ("llama", "qwen3", "gpt2", "gemma3")


def built(family: str, **changes: Any) -> nn.Module:
    """A tiny model of a family, with a window shorter than its samples where it has one."""
    return ALL_FAMILIES["gemma3"].build(**changes) if family == "gemma3" else tiny(family, **changes)


def samples(lengths: list[int], seed: int = 0) -> list[tuple[np.ndarray, np.ndarray]]:
    """Samples of these lengths with every second token a target."""
    source = np.random.default_rng(seed)
    made = []
    for length in lengths:
        targets = np.arange(length) % 2 == 1
        made.append((source.integers(3, VOCABULARY, length).astype(np.int32), targets))
    return made


def dataset(lengths: list[int], row_length: int) -> Dataset:
    return Dataset(samples(lengths), [Place("a", i + 1) for i in range(len(lengths))], Audit(), 0, row_length)


# --- which samples share a row ----------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 200).flatmap(lambda c: st.tuples(st.just(c), st.lists(st.integers(1, c), max_size=80))))
def test_every_sample_has_room_and_twins_agree(case: tuple[int, list[int]]) -> None:
    capacity, lengths = case
    told = np.array(lengths, dtype=np.int64)
    rows = pack(told, capacity)
    if len(lengths):
        filled = np.bincount(rows, weights=told)
        assert filled.max() <= capacity and filled.min() > 0
        # Best fit: no two rows could be one.
        assert len(filled) == 1 or np.sort(filled)[:2].sum() > capacity
    assert place(told, capacity).tolist() == place_by_numpy(told, capacity).tolist()


def test_compiled_kernel_equals_its_twin() -> None:
    told = np.random.default_rng(0).integers(1, 300, 3000)
    assert compiled()(told, 300).tolist() == place_by_numpy(told, 300).tolist()


def test_best_fit_by_hand() -> None:
    assert pack(np.array([3, 7, 5, 2, 3]), 10).tolist() == [0, 0, 1, 1, 1]
    assert pack(np.array([4, 6, 4, 6]), 10).tolist() == [0, 0, 1, 1] or pack(np.array([4, 6, 4, 6]), 10).max() == 1
    with pytest.raises(ValueError, match="11 tokens does not fit a row of 10"):
        pack(np.array([11]), 10)


# --- batches ----------------------------------------------------------------------------------------------------------


def test_packed_row_by_hand() -> None:
    ids = [np.array(row, dtype=np.int32) for row in ([5, 6, 7], [8, 9], [4])]
    masks = [np.array([False, True, True]), np.array([True, True]), np.array([True])]
    batch = collate_packed([[(ids[0], masks[0]), (ids[1], masks[1])], [(ids[2], masks[2])]], pad_id=2)
    assert sorted(batch) == ["input_ids", "labels", "position_ids", "use_cache"] and batch["use_cache"] is False
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 9], [4, 2, 2, 2, 2]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1], [0, 0, 1, 2, 3]]
    # The first token of a sample is no target, even where its mask says so.
    assert batch["labels"].tolist() == [[-100, 6, 7, -100, 9], [-100] * 5]


def test_every_epoch_serves_every_sample_once_in_as_many_rows() -> None:
    data = dataset([int(n) for n in np.random.default_rng(1).integers(2, 30, 50)], 32)
    loader = Loader(data, 4, seed=3)
    per_epoch, epochs = loader.num_batches_per_epoch, []
    for _ in range(4):
        ids: list[int] = []
        for _ in range(per_epoch):
            batch = loader.next_batch()
            assert batch["input_ids"].shape[1] <= 32 and batch["input_ids"].shape[0] <= 4
            assert loader.last_num_tokens == sum(len(data[i][0]) for i in loader.last_ids)
            ids += loader.last_ids
        assert sorted(ids) == list(range(50))
        epochs.append(tuple(ids))
    assert len(set(epochs)) == 4 and loader.epoch == 3
    ordered = Loader(data, 4, shuffle=False)
    firsts = [int(row[0]) for row in ordered.rows]
    assert firsts == sorted(firsts) and all(row.tolist() == sorted(row.tolist()) for row in ordered.rows)


@pytest.mark.parametrize("batch_size", [3, 64])
def test_resume_of_packed_rows_at_every_batch(batch_size: int) -> None:
    data = dataset([int(n) for n in np.random.default_rng(2).integers(2, 20, 40)], 24)
    straight = Loader(data, batch_size, seed=5)
    states, batches = [], []
    for _ in range(12):
        states.append(json.loads(json.dumps(straight.state_dict())))
        batches.append((straight.next_batch(), straight.last_ids))
    for k, state in enumerate(states):
        loader = Loader(data, batch_size, seed=5)
        loader.load_state_dict(state)
        for batch, ids in batches[k:]:
            again = loader.next_batch()
            assert loader.last_ids == ids
            assert all(torch.equal(again[n], batch[n]) for n in ("input_ids", "position_ids", "labels"))
    with pytest.raises(ConfigError, match=r"data\.packing or data\.max_length changed"):
        Loader(dataset([int(n) for n in np.random.default_rng(2).integers(2, 20, 40)], 0), 3, 5).load_state_dict(
            states[0]
        )


def test_padding_saved() -> None:
    lengths = [10, 2] * 8
    packed, padded = padding_shares(dataset(lengths, 12), 16, shuffle=False)
    assert packed == 0 and padded == pytest.approx(1 - 96 / 160)


def test_held_out_is_a_share_and_always_the_same() -> None:
    which = held_out(40, 0.2, seed=1)
    assert which.sum() == 8 and (which == held_out(40, 0.2, seed=1)).all() and (which != held_out(40, 0.2, 2)).any()
    assert held_out(5, 0.01, 0).sum() == 1
    with pytest.raises(ConfigError, match="leaves none to train on"):
        held_out(1, 0.5, 0)


# --- isolation --------------------------------------------------------------------------------------------------------


def pack_of(first: int, seed: int, rows: int = 3) -> dict[str, Any]:
    """Rows of two samples and a tail; the first sample (no targets) has `first` tokens drawn from `seed`."""
    others = samples([11, 9, 10], seed=7)
    made = []
    for row in range(rows):
        ids, _ = samples([first], seed=seed + row)[0]
        made.append([(ids, np.zeros(first, dtype=np.bool_)), others[row]])
    return collate_packed(made, pad_id=2)


def after_a_step(
    family: str, batch: dict[str, Any], swap: Path, micro: int
) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """Scores of the second samples, loss and norm of one step, and the weights behind it."""
    with offloadz.offload(
        built(family), offloadz.AdamW(lr=1e-2, eps=1e-6), swap=swap, parameters="disk", micro_batch_size=micro
    ) as run:
        with torch.no_grad():
            scores = offloadz.token_logprobs(run, batch)
        loss = float(run.step(batch))
        return [scores[batch["labels"] != -100].tolist(), loss, run.report.grad_norm], weights(run)


@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_changing_sample_1_leaves_sample_2_bit_equal(family: str, micro: int, swap: Path) -> None:
    """Loss and gradients of the second sample of each row, whatever stands in the first."""
    one, two = pack_of(8, seed=20), pack_of(8, seed=40)
    assert not torch.equal(one["input_ids"], two["input_ids"]) and torch.equal(one["labels"], two["labels"])
    found, wanted = after_a_step(family, two, swap, micro), after_a_step(family, one, swap, micro)
    assert found[0] == wanted[0]
    differing = [name for name, w in wanted[1].items() if not torch.equal(found[1][name], w)]
    assert not differing


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_equals_padded(family: str, swap: Path) -> None:
    """The same samples, each in a row of its own: loss, norm and weights agree within the tolerances of the design."""
    items = samples([9, 12, 5, 14, 3, 8], seed=3)
    packed = [collate_packed([items[:2], items[2:4], items[4:]], 2)] * 3
    padded = [collate(items, 2)] * 3
    model = built(family)
    start = start_of(model)
    out = []
    for batches, micro in ((packed, 2), (padded, 6)):
        with offloadz.offload(built(family), offloadz.AdamW(lr=1e-3), swap=swap, micro_batch_size=micro) as run:
            out.append(train(run, batches))
    assert_close(out[0], out[1], start, family)


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_and_steps_without_targets(family: str, swap: Path) -> None:
    """Case G17: a row without targets beside others, and a step of such rows, against the plain loop."""
    lengths = [[9, 12], [5, 14], [8, 3, 4]]
    mixed = [collate_packed([samples(row, seed=step) for row in lengths], 2) for step in range(3)]
    for batch in mixed:
        batch["labels"][1] = -100
    nothing = {**mixed[0], "labels": torch.full_like(mixed[0]["labels"], -100)}
    model = built(family)
    start = start_of(model)
    plain = [{key: value for key, value in batch.items() if key != "use_cache"} for batch in mixed]
    wanted = plain_run(model, plain, lr=1e-3)
    with offloadz.offload(built(family), offloadz.AdamW(lr=1e-3), swap=swap, micro_batch_size=1) as run:
        found = train(run, mixed[:1])
        run.step(nothing)
        assert run.report.skipped and run.report.reason == "no target tokens" and run.report.target_tokens == 0
        rest = train(run, mixed[1:])
    found.losses, found.norms, found.weights = found.losses + rest.losses, found.norms + rest.norms, rest.weights
    assert_close(found, wanted, start, family)


def test_rows_that_would_leak_are_refused(swap: Path) -> None:
    batch = pack_of(8, seed=20)
    with offloadz.offload(tiny("llama"), swap=swap) as run:
        with pytest.raises(ConfigError, match="leave the attention_mask out"):
            run.step({**batch, "attention_mask": torch.ones_like(batch["input_ids"])})
        with torch.no_grad(), pytest.raises(ConfigError, match="pass use_cache=False"):
            offloadz.token_logprobs(run, {**batch, "use_cache": True})
        before = weights(run)
        nothing = {**batch, "labels": torch.full_like(batch["labels"], -100)}
        run.step(nothing)
        assert run.report.skipped and run.report.reason == "no target tokens"
        assert all(torch.equal(w, before[name]) for name, w in weights(run).items())


def test_a_model_that_ignores_positions_is_refused_by_name(swap: Path) -> None:
    """Bloom takes position_ids and does nothing with them: its loss would fall all the same."""
    import transformers as hf

    torch.manual_seed(0)
    quiet = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    bloom = hf.BloomForCausalLM(hf.BloomConfig(vocab_size=VOCABULARY, hidden_size=48, n_layer=2, n_head=4, **quiet))
    with offloadz.offload(bloom, swap=swap) as run:
        batch = pack_of(8, seed=20)
        with pytest.raises(ConfigError, match=r"BloomModel: no mask .* reaches transformer\.h\.0, .*packing = false"):
            run.step(batch)
