"""Loading without the weights: parameters on meta, buffers real, sources by name.  Case G08, kinds K08 and K13."""

from __future__ import annotations

import gc
import json
import os
import random
import shutil
import weakref
from pathlib import Path

import numpy
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from offloadz.model.sources import ModuleSource
from offloadz.model.weights import load, names_of, source_of
from offloadz.plan.errors import ConfigError, DamagedState

SMALL = {"hidden_size": 24, "intermediate_size": 56, "num_hidden_layers": 2, "vocab_size": 103}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6}
GPT2 = {"n_embd": 24, "n_layer": 2, "n_head": 4, "vocab_size": 103, "n_positions": 64, "bos_token_id": 0}
CONFIGS = {
    "llama": lambda: LlamaConfig(**SMALL, **HEADS, max_position_embeddings=4096),
    "qwen3": lambda: Qwen3Config(**SMALL, **HEADS, tie_word_embeddings=True),
    "gpt2": lambda: GPT2Config(**GPT2, eos_token_id=0),
    "gemma3": lambda: Gemma3TextConfig(**SMALL, **HEADS, tie_word_embeddings=True),
}


def saved(kind: str, path: Path, shard: str = "5GB") -> nn.Module:
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind]())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.generation_config.eos_token_id = [5, 9]
    model.save_pretrained(path, max_shard_size=shard)
    return model


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    """All weights of a loaded model from its source, read from the back in pieces of 1000."""
    source, found = source_of(model), {}
    assert source is not None
    for name, shape in reversed(source.names().items()):
        total = torch.Size(shape).numel()
        cuts = [source.read(name, s, min(1000, total - s)).clone() for s in range(0, total, 1000)]
        found[name] = torch.cat(cuts).view(shape)
    return found


def edit_file(directory: Path, change: object) -> None:
    """Rewrite model.safetensors after `change(tensors)`."""
    tensors = load_file(directory / "model.safetensors")
    change(tensors)  # type: ignore[operator]
    save_file({k: v.clone() for k, v in tensors.items()}, directory / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", CONFIGS)
def test_equal_to_from_pretrained(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    saved(kind, tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    model = load(tmp_path, dtype)
    assert all(p.is_meta and p.dtype == dtype for p in model.parameters())
    assert not model.training and model.config.dtype == dtype
    assert model.generation_config.eos_token_id == [5, 9]
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]
    for name, value in values(model).items():
        assert torch.equal(value.to(dtype), plain.get_parameter(name)), name
    precise = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert [n for n, _ in model.named_buffers()] == [n for n, _ in precise.named_buffers()]
    for name, buffer in precise.named_buffers():
        ours = model.get_buffer(name)
        assert not ours.is_meta and ours.dtype == buffer.dtype and torch.equal(ours, buffer), name


def test_neighbouring_positions_stay_apart(tmp_path: Path) -> None:
    """G08: in bf16 the angles of positions beyond 256 would fall together."""
    saved("llama", tmp_path)
    rotary = load(tmp_path, torch.bfloat16).model.rotary_emb
    assert rotary.inv_freq.dtype == torch.float32
    angles = torch.arange(4000, 4011).float()[:, None] * rotary.inv_freq
    assert (angles.diff(dim=0) > 0).all()


def test_ties_are_redone(tmp_path: Path) -> None:
    saved("qwen3", tmp_path)
    model = load(tmp_path)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    source = source_of(model)
    assert source is not None and "lm_head.weight" not in source.names()
    assert "lm_head.weight" not in names_of(model).written and names_of(model).ties_hold


@pytest.mark.parametrize("under", ["model.embed_tokens.weight", "lm_head.weight", "both"])
def test_a_tied_table_under_either_name(tmp_path: Path, under: str) -> None:
    plain = saved("qwen3", tmp_path)
    table = plain.model.embed_tokens.weight.detach()

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors.pop("model.embed_tokens.weight")
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            if under in (name, "both"):
                tensors[name] = table

    edit_file(tmp_path, change)
    model = load(tmp_path, torch.float32)
    assert torch.equal(values(model)["model.embed_tokens.weight"], table)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_said_to_be_tied_but_two_tensors(tmp_path: Path) -> None:
    """G13: the files are believed, loudly, as transformers does; nothing is dropped."""
    plain = saved("qwen3", tmp_path)
    other = plain.model.embed_tokens.weight.detach() + 1
    edit_file(tmp_path, lambda tensors: tensors.update({"lm_head.weight": other}))
    with pytest.warns(UserWarning, match=r"ties lm_head\.weight to model\.embed_tokens\.weight.*different"):
        model = load(tmp_path, torch.float32)
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    assert model.config.tie_word_embeddings is False
    assert torch.equal(values(model)["lm_head.weight"], other)
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= names_of(model).written.keys()


def test_said_to_be_apart_but_one_is_missing(tmp_path: Path) -> None:
    saved("llama", tmp_path)
    edit_file(tmp_path, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(ConfigError, match=r"missing: lm_head\.weight"):
        load(tmp_path)


def test_all_that_does_not_match_is_listed(tmp_path: Path) -> None:
    saved("llama", tmp_path)

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.9.odd.weight"] = torch.zeros(3)
        tensors.pop("model.norm.weight")
        tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(24, 56)
        tensors["model.layers.0.self_attn.q_proj.weight"] = torch.zeros(24, 24, dtype=torch.int8)
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(3)  # of old files: to be ignored

    edit_file(tmp_path, change)
    with pytest.raises(ConfigError) as caught:
        load(tmp_path)
    told = str(caught.value)
    assert "missing: model.norm.weight;" in told and "extra: model.layers.9.odd.weight;" in told
    assert "up_proj.weight is (24, 56) in the file, (56, 24) in the model" in told
    assert "q_proj.weight is torch.int8" in told and "inv_freq" not in told


def test_base_model_names(tmp_path: Path) -> None:
    """The original GPT-2 files carry no `transformer.` and an old mask buffer."""
    plain = saved("gpt2", tmp_path)

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        tensors["h.0.attn.bias"] = torch.ones(1, 1, 8, 8)

    edit_file(tmp_path, change)
    found = values(load(tmp_path, torch.float32))
    assert torch.equal(found["transformer.h.1.attn.c_proj.weight"], plain.transformer.h[1].attn.c_proj.weight)


def test_a_missing_expert_is_refused_by_the_name_it_has_in_files(tmp_path: Path) -> None:
    config = Qwen3MoeConfig(**SMALL, **HEADS, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.experts.2.up_proj.weight"]
    save_file(tensors, file)
    with pytest.raises(ConfigError, match=r"missing: model\.layers\.1\.mlp\.experts\.2\.up_proj\.weight$"):
        load(tmp_path)


def test_shards(tmp_path: Path) -> None:
    plain = saved("llama", tmp_path / "good", shard="20KB")
    assert len(list((tmp_path / "good").glob("model-*.safetensors"))) >= 3
    for name, value in values(load(tmp_path / "good", torch.float32)).items():
        assert torch.equal(value, plain.get_parameter(name)), name

    def damaged(change: object) -> Path:
        bad = tmp_path / "bad"
        shutil.rmtree(bad, ignore_errors=True)
        shutil.copytree(tmp_path / "good", bad)
        change(bad)  # type: ignore[operator]
        return bad

    def edit_index(bad: Path, name: str, file: str | None) -> None:
        index = json.loads((bad / "model.safetensors.index.json").read_text())
        index["weight_map"].pop(name) if file is None else index["weight_map"].update({name: file})
        (bad / "model.safetensors.index.json").write_text(json.dumps(index))

    shards = sorted(p.name for p in (tmp_path / "good").glob("model-*.safetensors"))
    with pytest.raises(DamagedState, match=rf"names files that are not in .*{shards[1]}"):
        load(damaged(lambda bad: (bad / shards[1]).unlink()))
    with pytest.raises(DamagedState, match=rf"{shards[0]} is cut off"):
        load(damaged(lambda bad: (bad / shards[0]).write_bytes((bad / shards[0]).read_bytes()[:-7])))
    with pytest.raises(DamagedState, match=r"model\.norm\.weight is not in|model\.norm\.weight of .* is not listed"):
        load(damaged(lambda bad: edit_index(bad, "model.norm.weight", shards[0])))
    with pytest.raises(DamagedState, match=r"model\.norm\.weight of .* is not listed"):
        load(damaged(lambda bad: edit_index(bad, "model.norm.weight", None)))
    with pytest.raises(DamagedState, match=r"ghost is not in"):
        load(damaged(lambda bad: edit_index(bad, "ghost", shards[0])))
    with pytest.raises(DamagedState, match=r"names files that are not in"):
        load(damaged(lambda bad: edit_index(bad, "model.norm.weight", "../good/" + shards[0])))
    with pytest.raises(DamagedState, match=r"index\.json is not readable"):
        load(damaged(lambda bad: (bad / "model.safetensors.index.json").write_text('{"weight_map": 3}')))


def test_what_is_not_read(tmp_path: Path) -> None:
    saved("llama", tmp_path)
    with pytest.raises(ConfigError, match=r"model\.dtype is torch\.float16"):
        load(tmp_path, torch.float16)
    with pytest.raises(ConfigError, match=r'model\.init is "other"'):
        load(tmp_path, init="other")
    with pytest.raises(ConfigError, match="is not a directory"):
        load(tmp_path / "absent")
    with pytest.raises(ConfigError, match=r"model\.attention"):
        load(tmp_path, attention="no_such_attention")
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"neither .*pytorch_model\.bin is not read \(no pickle\)"):
        load(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        load(tmp_path)


@pytest.mark.parametrize("kind", CONFIGS)
def test_random_start(tmp_path: Path, kind: str) -> None:
    CONFIGS[kind]().save_pretrained(tmp_path)
    torch.manual_seed(1)
    before = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
    model = load(tmp_path, torch.float32, init="random", seed=5)
    source = source_of(model)
    assert source is not None
    backwards, forwards = values(model), {}
    for name, shape in source.names().items():
        forwards[name] = source.read(name, 0, torch.Size(shape).numel()).view(shape).clone()
    assert torch.equal(before[0], torch.get_rng_state()) and before[1] == random.getstate()
    assert before[2] == numpy.random.get_state()[1].tolist()
    plain = AutoModelForCausalLM.from_config(CONFIGS[kind](), dtype=torch.float32)
    for name, value in forwards.items():
        assert torch.equal(value, backwards[name]) and value.isfinite().all(), name
        other = plain.get_parameter(name).detach()
        # the spread of some hundred draws: 3 % to 10 %, and GPT-2's smaller projections are a factor of two off
        assert value.numel() < 100 or abs(value.std() - other.std()) <= 0.2 * other.std(), name
    drawn = [name for name, value in forwards.items() if value.std() > 0]
    again, other_seed = (values(load(tmp_path, init="random", seed=seed)) for seed in (5, 6))
    assert all(torch.equal(again[n], forwards[n]) for n in forwards)
    assert not any(torch.equal(other_seed[n], forwards[n]) for n in drawn)
    alike = [n for n in drawn if n.endswith(("q_proj.weight", "c_attn.weight"))]
    assert len(alike) == 2 and not torch.equal(forwards[alike[0]], forwards[alike[1]])
    assert all(p.is_meta for p in model.parameters())


def test_a_model_and_its_source_can_go(tmp_path: Path) -> None:
    CONFIGS["llama"]().save_pretrained(tmp_path)
    random_one = load(tmp_path, init="random")
    saved("llama", tmp_path)
    gc.collect()  # what other tests left would close its files while these are counted
    before = len(os.listdir("/proc/self/fd"))
    read_one = load(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before + 1
    gone = weakref.ref(random_one), weakref.ref(read_one)
    del random_one, read_one
    gc.collect()
    assert [ref() for ref in gone] == [None, None]
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_random_table_is_let_go_of_when_it_was_read(tmp_path: Path) -> None:
    CONFIGS["llama"]().save_pretrained(tmp_path)
    model = load(tmp_path, init="random")
    source = source_of(model)
    assert source is not None
    first, last = (source.read("lm_head.weight", start, 1236) for start in (0, 1236))
    assert not source._values  # type: ignore[attr-defined]
    assert torch.equal(torch.cat([first, last]), source.read("lm_head.weight", 0, 2472))


def test_a_live_module_is_a_source() -> None:
    model = AutoModelForCausalLM.from_config(CONFIGS["qwen3"]())
    source = ModuleSource(model)
    table = model.model.embed_tokens.weight.detach().clone()
    assert source_of(model) is None
    assert torch.equal(source.read("model.embed_tokens.weight", 50, 7), table.reshape(-1)[50:57])
    source.release("model.embed_tokens.weight")
    assert model.lm_head.weight is model.model.embed_tokens.weight and model.lm_head.weight.is_meta
    with pytest.raises(ValueError, match=r"model\.embed_tokens\.weight: these parameters are on meta"):
        ModuleSource(model)
