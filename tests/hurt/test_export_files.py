"""Exported directories load elsewhere as they are: every tensor, its dtype, its ties.  Case G13, kind K13."""

from __future__ import annotations

import json
import os
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_run import FakeRun, files_of, small_parts, tiny
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from offloadz.model.export import export, export_command
from offloadz.model.files import StreamReader
from offloadz.model.sources import ModuleSource
from offloadz.model.weights import load, source_of
from offloadz.plan.errors import ConfigError, DamagedState, DiskFailed
from offloadz.train.checkpoint import save_checkpoint

KINDS = [("llama", False), ("llama", True), ("qwen3", True), ("gpt2", True)]


def made(model: nn.Module, **how: Any) -> FakeRun:
    with small_parts():
        return FakeRun(model, **how)


def read_all(directory: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        found |= load_file(path)
    return found


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(40)[None] * 7 % 103).logits


def load_strictly(directory: Path) -> nn.Module:
    """With transformers, nothing missing, extra or misshapen, no warning about ties."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, told = AutoModelForCausalLM.from_pretrained(directory, dtype="auto", output_loading_info=True)
    assert not any(told[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), told
    return model


@pytest.mark.parametrize("through", ["run", "checkpoint"])
@pytest.mark.parametrize("shard_bytes", [5e9, 6_000])
@pytest.mark.parametrize(("kind", "tied"), KINDS)
def test_loads_with_transformers(tmp_path: Path, kind: str, tied: bool, shard_bytes: float, through: str) -> None:
    model = tiny(kind, tied)
    run = made(model)
    subject: Any = run
    if through == "checkpoint":
        subject = save_checkpoint(tmp_path / "checkpoints", run, {"step": 1})
    plain = tmp_path / "plain"
    model.save_pretrained(plain)
    working, masters = run.working(), run.master()
    for dtype, wanted in (("bfloat16", working), ("float32", masters)):
        out = export(subject, tmp_path / dtype, dtype, shard_bytes)
        found = read_all(out)
        assert found.keys() == read_all(plain).keys()
        for name, tensor in found.items():
            assert tensor.dtype == getattr(torch, dtype) and torch.equal(tensor.reshape(-1), wanted[name]), name
        assert json.loads((out / "config.json").read_text())["dtype"] == dtype
        num_shards = len(list(out.glob("model-*-of-*.safetensors")))
        if shard_bytes > 1e9:
            assert num_shards == 0 and (out / "model.safetensors").exists()
        else:
            assert num_shards >= 5 and (out / "model.safetensors.index.json").exists()
        again = load_strictly(out)
        for name, parameter in again.named_parameters():
            assert torch.equal(parameter.reshape(-1), wanted[name]), name
    assert torch.equal(logits(load_strictly(tmp_path / "float32")), logits(model))
    assert [p.name for p in tmp_path.iterdir() if "tmp" in p.name] == []


def test_a_run_and_its_checkpoint_export_alike(tmp_path: Path) -> None:
    run = made(tiny("llama"), freeze=("model.layers.0.*",), keep=("*norm*",))
    checkpoint = save_checkpoint(tmp_path / "checkpoints", run, {"step": 1})
    for dtype in ("bfloat16", "float32"):
        one, other = export(run, tmp_path / f"a{dtype}", dtype), export(checkpoint, tmp_path / f"b{dtype}", dtype)
        assert files_of(one) == files_of(other)
        for name in files_of(one):
            assert (one / name).read_bytes() == (other / name).read_bytes(), name
        kept = read_all(one)["model.layers.1.input_layernorm.weight"]
        assert kept.dtype == torch.float32  # keep_float32 is for the export too
    assert read_all(tmp_path / "abfloat16")["model.layers.0.mlp.up_proj.weight"].dtype == torch.bfloat16


def test_rounding_is_the_working_weight_not_the_master_rounded_anew(tmp_path: Path) -> None:
    """Masters half-way between two bf16 values: rounding to even would give the other one."""
    model = tiny("llama")
    with torch.no_grad():
        for parameter in model.parameters():
            bits = parameter.view(torch.int32)
            bits.copy_((bits & ~0x1FFFF) | 0x8000)
    run = made(model)
    even = {name: master.to(torch.bfloat16) for name, master in run.master().items()}
    checkpoint = save_checkpoint(tmp_path / "checkpoints", run, {"step": 1})
    for subject, name in ((run, "a"), (checkpoint, "b")):
        for key, tensor in read_all(export(subject, tmp_path / name, "bfloat16")).items():
            assert torch.equal(tensor.reshape(-1), run.working()[key]), key
            assert not torch.equal(tensor.reshape(-1), even[key]), key


def test_fp32_runs_can_be_exported_in_bf16(tmp_path: Path) -> None:
    run = made(tiny("llama"), dtype="float32")
    checkpoint = save_checkpoint(tmp_path / "checkpoints", run, {"step": 1})
    for subject, name in ((run, "a"), (checkpoint, "b")):
        found = read_all(export(subject, tmp_path / name, "bfloat16"))
        assert all(torch.equal(t.reshape(-1), run.working()[n].bfloat16()) for n, t in found.items())
    assert read_all(export(run, tmp_path / "c"))["model.norm.weight"].dtype == torch.float32


def test_two_tied_pairs(tmp_path: Path) -> None:
    """G13: a tie that no configuration declares is written under both names, so it cannot be lost."""
    model = tiny("qwen3", True)
    shared = model.model.layers[0].input_layernorm.weight
    model.model.layers[1].input_layernorm.weight = shared
    run = made(model)
    found = read_all(export(run, tmp_path / "out", "float32"))
    assert "lm_head.weight" not in found
    assert torch.equal(found["model.layers.1.input_layernorm.weight"], found["model.layers.0.input_layernorm.weight"])
    assert torch.equal(logits(load_strictly(tmp_path / "out")), logits(model))
    checkpoint = save_checkpoint(tmp_path / "checkpoints", run, {"step": 1})
    assert read_all(export(checkpoint, tmp_path / "more", "float32")).keys() == found.keys()


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_declared_tied_but_two_tensors(tmp_path: Path, kind: str) -> None:
    model = tiny(kind, True)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone() + 1)
    run = made(model)
    found = read_all(export(run, tmp_path / "out", "float32"))
    assert "lm_head.weight" in found
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False
    again = load_strictly(tmp_path / "out")
    assert again.lm_head.weight is not again.get_input_embeddings().weight
    assert torch.equal(logits(again), logits(model))
    assert model.config.tie_word_embeddings is True  # the live model's own configuration is not touched


def test_declared_apart_but_one_tensor(tmp_path: Path) -> None:
    model = tiny("llama", False)
    model.lm_head.weight = model.model.embed_tokens.weight
    found = read_all(export(made(model), tmp_path / "out", "float32"))
    assert torch.equal(found["lm_head.weight"], found["model.embed_tokens.weight"])
    assert torch.equal(logits(load_strictly(tmp_path / "out")), logits(model))


def test_small_files_come_along(tmp_path: Path) -> None:
    """Tokenizer and stop token of the directory that was trained from; buffers as they are now."""
    source = tmp_path / "source"
    plain = tiny("llama")
    plain.generation_config.eos_token_id = [5, 9]
    plain.save_pretrained(source)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "vocab.json", "merges.txt"):
        (source / name).write_text(name)
    (source / "optimizer.pt").write_text("not a part of a model")
    model = load(source, torch.float32)
    for name, shape in (opened := source_of(model)).names().items():  # as a run would: weights from the source
        path, _, own = name.rpartition(".")
        value = opened.read(name, 0, torch.Size(shape).numel()).view(shape)
        model.get_submodule(path)._parameters[own] = nn.Parameter(value)
    model.model.register_buffer("bias_of_experts", torch.arange(3.0))
    model.generation_config.eos_token_id = [5, 9, 11]
    from offloadz.model import weights

    weights._names[model] = weights._describe(model, source)
    run = made(model)
    checkpoint = save_checkpoint(tmp_path / "checkpoints", run, {"step": 1})
    for subject, name in ((run, "a"), (checkpoint, "b")):
        out = export(subject, tmp_path / name, "bfloat16")
        assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "vocab.json"} <= files_of(out)
        assert "optimizer.pt" not in files_of(out)
        assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == [5, 9, 11]
        buffer = read_all(out)["model.bias_of_experts"]
        assert buffer.dtype == torch.float32 and torch.equal(buffer, torch.arange(3.0))
    assert isinstance(source_of(model), object) and ModuleSource(model).names().keys() == opened.names().keys()


def test_what_is_there_is_not_overwritten(tmp_path: Path) -> None:
    run = made(tiny("llama"))
    run.model.save_pretrained(tmp_path / "original")
    before = (tmp_path / "original" / "model.safetensors").read_bytes()
    with pytest.raises(ConfigError, match=r"original exists and is no earlier export"):
        export(run, tmp_path / "original", "bfloat16")
    assert (tmp_path / "original" / "model.safetensors").read_bytes() == before
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="exists"):
        export(run, tmp_path / "file")
    (tmp_path / "empty").mkdir()
    for _ in range(2):  # into an empty directory, then over an earlier export
        export(run, tmp_path / "empty", "bfloat16")
    with pytest.raises(ConfigError, match=r"dtype is float16"):
        export(run, tmp_path / "half", "float16")


def test_a_damaged_checkpoint_is_not_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = save_checkpoint(tmp_path / "checkpoints", made(tiny("llama")), {"step": 1})
    assert export_command(checkpoint, tmp_path / "good", "bfloat16") == 0
    assert re.search(r": \d+\.\d[KM]iB in \w+, read back and compared", capsys.readouterr().out)
    with open(checkpoint / "weights.safetensors", "r+b") as file:
        file.seek(-9, os.SEEK_END)
        file.write(b"\xff")
    with pytest.raises(DamagedState, match=r"CRC-32"):
        export_command(checkpoint, tmp_path / "bad", "bfloat16")
    assert not (tmp_path / "bad").exists()
    with pytest.raises(DamagedState, match="no finished checkpoint"):
        export_command(tmp_path, tmp_path / "bad", "bfloat16")


def test_a_session_that_gives_other_tensors_is_refused(tmp_path: Path) -> None:
    run = made(tiny("llama"))
    other = made(tiny("llama", layers=1))
    run.session = other.session
    with pytest.raises(ConfigError, match=r"names of the model and of its stored weights differ: model\.layers\.1"):
        export(run, tmp_path / "out")


def test_a_tensor_given_twice_or_never_is_refused(tmp_path: Path) -> None:
    for change, message in (
        (lambda views: views.pop(3), "never written"),
        (lambda views: views.append(views[3]), "twice"),
    ):
        run = made(tiny("llama"))
        change(run.session.views)
        with pytest.raises(ValueError, match=message):
            export(run, tmp_path / "out", "bfloat16")
        assert list(tmp_path.iterdir()) == []


def test_no_room_is_said_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offloadz.model.aside.free_bytes", lambda directory: 1000)
    with pytest.raises(
        DiskFailed, match=r"an export in .* needs [\d.]+[KMG]iB, 1000B are free, [\d.]+[KMG]iB are missing"
    ):
        export(made(tiny("llama")), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_files_are_as_the_library_would_write_them(tmp_path: Path) -> None:
    export(made(tiny("llama")), tmp_path / "out", "bfloat16")
    with StreamReader(tmp_path / "out" / "model.safetensors") as reader:
        assert reader.metadata["format"] == "pt"
