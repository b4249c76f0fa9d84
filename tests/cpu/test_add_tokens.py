"""`model.add_tokens`: tokenizer, table and head grow together, from the plan to `final/`.  Kinds K13, K17."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES
from reference import plain_run
from tiny import ON_DISK, make_model, make_tokenizer, tables
from tiny_models import assert_close, batches, start_of, train
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

import offloadz
import offloadz.train.loop as loop
from offloadz.config import config_from_tables
from offloadz.model.export import export
from offloadz.model.outline import outline
from offloadz.model.vocabulary import Added, open_tokenizer
from offloadz.model.weights import load, source_of
from offloadz.plan.errors import ConfigError
from offloadz.plan.headers import model_spec
from offloadz.plan.question import question
from offloadz.plan.spec import ModelSpec
from offloadz.plan.vocabulary import token_ids
from offloadz.train.planning import read_task, read_tokenizer
from offloadz.train.templates import find_template
from offloadz.train.tokens import template_notes

NEW = ("<turn>", "<end>", "<third>")
TEMPLATE = (
    "{% for m in messages %}<turn> {{ m['role'] }} {{ m['content'] }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<turn> assistant {% endif %}"
)


def made(folder: Path, family: str, **changes: Any) -> Path:
    """A model of 99 rows, as many as the tokenizer has tokens, with a head of its own where `family` is phi."""
    if family == "phi":
        torch.manual_seed(1)
        model = FAMILIES["phi"].build(vocab_size=99, **changes)
        with torch.no_grad():
            model.lm_head.bias.normal_()
        model.save_pretrained(folder)
        make_tokenizer(folder)
        return folder
    return make_model(folder, family, vocab_size=99, **changes)


def grown_by_hand(path: Path, rows: int) -> nn.Module:
    """Plain transformers' way, then the mean of the old rows."""
    model = AutoModelForCausalLM.from_pretrained(path)
    old = {name: p.detach().clone() for name, p in model.named_parameters()}
    model.resize_token_embeddings(rows, mean_resizing=False)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if param.shape != old[name].shape:
                param[old[name].shape[0] :] = old[name].double().mean(0).float()
    return model


def values(model: nn.Module, step: int = 37) -> dict[str, torch.Tensor]:
    source = source_of(model)
    assert source is not None
    found = {}
    for name, shape in source.names().items():
        total = torch.Size(shape).numel()
        cuts = [source.read(name, at, min(step, total - at)).clone() for at in range(0, total, step)]
        found[name] = torch.cat([cut.float() for cut in cuts]).view(shape)
    return found


def told(spec: ModelSpec) -> list[Any]:
    """Everything of a spec that bytes depend on; files name a block's parameters in an order of their own."""
    cut = [(u.name, u.kind, sorted((m.name, m.shape) for s in u.sections for m in s.members)) for u in spec.units]
    return [sorted(cut), spec.vocab_size, sorted((s.name, s.kind) for s in spec.seats)]


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "phi"])
def test_table_and_head_grow_by_the_mean_row(tmp_path: Path, family: str) -> None:
    path = made(tmp_path / "m", family)
    model, wanted = load(path, torch.float32, add_tokens=NEW), dict(grown_by_hand(path, 102).named_parameters())
    found = values(model)
    assert found.keys() == wanted.keys() and model.config.vocab_size == 102
    for name, value in wanted.items():
        assert value.shape == found[name].shape
        torch.testing.assert_close(found[name], value.detach(), rtol=0, atol=1e-7)
        assert torch.equal(found[name][:99], value.detach()[:99])  # no bit of an old row has changed
    assert sum(value.shape[0] == 102 for value in found.values()) == {"llama": 2, "phi": 3}.get(family, 1)
    assert all(parameter.is_meta for parameter in model.parameters())
    planned = model_spec(str(path), "float32", add_tokens=NEW)
    assert told(planned) == told(outline(model, "float32").spec)
    assert told(planned) != told(model_spec(str(path), "float32"))
    drawn = load(path, torch.float32, init="random", add_tokens=NEW)
    assert told(model_spec(str(path), "float32", init="random", add_tokens=NEW)) == told(outline(drawn, "float32").spec)
    assert {name: tuple(v.shape) for name, v in values(drawn).items()} == {n: tuple(v.shape) for n, v in found.items()}


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi"])
def test_training_is_that_of_the_plain_loop_on_the_grown_model(tmp_path: Path, family: str, swap: Path) -> None:
    """New tokens in every batch; everything on disk, the head's new bias among it."""
    path = made(tmp_path / "m", family)
    steps = batches(5)
    for batch in steps:
        batch["input_ids"] %= 102
        batch["input_ids"][:, 5], batch["input_ids"][:, 9] = 99, 101
        batch["labels"] = torch.where(batch["labels"] == -100, -100, batch["input_ids"])
    start = start_of(grown_by_hand(path, 102))
    wanted = plain_run(grown_by_hand(path, 102), steps)
    where = dict.fromkeys(("parameters", "gradients", "optimizer_state", "activations"), "disk")
    model = load(path, torch.float32, add_tokens=NEW).train()
    with offloadz.offload(model, offloadz.AdamW(lr=1e-3), swap=swap, micro_batch_size=2, **where) as run:
        assert_close(train(run, steps), wanted, start, family)


def test_rows_to_spare_are_used_first(tmp_path: Path) -> None:
    """A table of 101 rows for 99 tokens: two find a place with no row added, the third needs one."""
    path = make_model(tmp_path / "m", "qwen3")
    plain = values(load(path, torch.float32))
    two = load(path, torch.float32, add_tokens=NEW[:2])
    assert two.config.vocab_size == 101 and token_ids(path, NEW) == {"<turn>": 99, "<end>": 100, "<third>": 101}
    assert all(torch.equal(value, plain[name]) for name, value in values(two).items())
    assert load(path, torch.float32, add_tokens=NEW).config.vocab_size == 102
    assert told(model_spec(str(path), "float32", add_tokens=NEW[:2])) == told(model_spec(str(path), "float32"))


def test_a_token_that_is_there_is_not_added_again(tmp_path: Path) -> None:
    path = make_model(tmp_path / "m", "qwen3", vocab_size=99)
    tokens = ("<|im_end|>", "<turn>", "user")
    tokenizer = open_tokenizer(path, Added(tokens))
    ids = dict(zip(tokens, tokenizer.convert_tokens_to_ids(list(tokens)), strict=True))
    assert ids == token_ids(path, tokens) == {"<|im_end|>": 4, "<turn>": 99, "user": 5} and len(tokenizer) == 100
    assert tokenizer("w1<turn>w2user")["input_ids"] == tokenizer("w1 <turn> w2 user")["input_ids"]
    config = config_from_tables({"model": {"path": str(path), "add_tokens": list(tokens)}})
    assert read_tokenizer(config)[1] == question(config).spec.vocab_size == 100
    assert question(config_from_tables({"model": {"path": str(path)}})).spec.vocab_size == 99


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_run_with_new_tokens_from_data_to_final(tmp_path: Path, family: str) -> None:
    """Dialogues in a template of new tokens; a resume and an export from a checkpoint end in the same bytes."""
    made(tmp_path / "model", family)
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    turns = [(f"w{n} w{n + 1}", f"w{n + 2} w{n + 3} w{n + 4}") for n in range(24)]
    with (tmp_path / "chat.jsonl").open("w") as file:
        for question_, answer in turns:
            chat = [{"role": "user", "content": question_}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": chat}) + "\n")
    changes = {
        "model__add_tokens": list(NEW[:2]), "data__format": "messages", "data__train": [str(tmp_path / "chat.jsonl")],
        "data__chat_template": str(tmp_path / "template.jinja"), "train__keep": 9, "train__keep_weights": 1,
        "train__sample_prompts": ["w1 w2"], "train__sample_tokens": 4, "optimizer__lr": 1e-2, **ON_DISK,
    }  # fmt: skip
    config = config_from_tables(tables(tmp_path, **changes), training=True)
    task = read_task(config)
    ids, targets = task.samples[0]
    assert ids.tolist() == [99, 5, 9, 10, 100, 99, 6, 11, 12, 13, 100]
    assert targets.tolist() == [False] * 7 + [True] * 4
    assert loop.train(config) == 0
    output = tmp_path / "run"
    again = tmp_path / "again"
    shutil.copytree(output, again)
    shutil.rmtree(again / "final")
    for name in ("step-000010", "step-000012"):
        shutil.rmtree(again / "checkpoints" / name)
    other = tables(tmp_path, train__output=str(again), **changes)
    assert loop.train(config_from_tables(other, training=True)) == 0
    exported = export(output / "checkpoints/step-000012", tmp_path / "exported")
    finals = [output / "final", again / "final", exported, output / "weights/step-000012"]
    assert len({(path / "model.safetensors").read_bytes() for path in finals}) == 1
    for path in finals:
        model, missing = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
        tokenizer = AutoTokenizer.from_pretrained(path)
        assert (
            not any(missing.values()) and model.config.vocab_size == 101 == model.get_input_embeddings().num_embeddings
        )
        assert model.get_output_embeddings().weight.shape[0] == 101
        assert tokenizer.convert_tokens_to_ids(list(NEW[:2])) == [99, 100]
        assert tokenizer("w1<end>")["input_ids"] == [10, 100] and tokenizer.eos_token == "</s>"
        assert tokenizer.chat_template == TEMPLATE  # it has to be asked as it was trained, and stops where a turn ends
        assert json.loads((path / "generation_config.json").read_text())["eos_token_id"] == [2, 100]
    with pytest.raises(ConfigError, match=r"model\.add_tokens: the checkpoint has \[\"<turn>\", \"<end>\"\]"):
        loop.train(config_from_tables(tables(tmp_path, **{**changes, "model__add_tokens": list(NEW)}), training=True))
    table = AutoModelForCausalLM.from_pretrained(finals[0]).get_input_embeddings().weight
    assert not torch.equal(table[99], table[100])  # equals at the start, told apart by what was learnt


def test_what_is_refused_and_what_is_proposed(tmp_path: Path) -> None:
    path = make_model(tmp_path / "m", "qwen3", vocab_size=99)
    with pytest.raises(ConfigError, match=r"model\.add_tokens names '<a>' twice"):
        load(path, add_tokens=["<a>", "<b>", "<a>"])
    tokenizer = AutoTokenizer.from_pretrained(path)
    notes = template_notes(find_template(tokenizer, "gemma"), tokenizer)
    assert any('write add_tokens = ["<start_of_turn>", "<end_of_turn>"] under [model]' in note for note in notes)
    assert not any("add_tokens" in n for n in template_notes(find_template(tokenizer, "chatml"), tokenizer))
    grown = open_tokenizer(path, Added(("<start_of_turn>", "<end_of_turn>")))
    assert template_notes(find_template(grown, "gemma"), grown) == []
    with pytest.raises(ConfigError, match=r"built-in ones: .*model\.add_tokens"):
        find_template(tokenizer, "")
    (path / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(ConfigError, match="is no tokenizer's file"):
        model_spec(str(path), "float32", add_tokens=["<a>"])
    (path / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"model\.add_tokens needs .*tokenizer\.json"):
        load(path, add_tokens=["<a>"])
