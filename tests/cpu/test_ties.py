"""Case G13, kind K13, at the level of a run: what is tied is trained once and written so that it loads strictly.

Tied embedding and head; two norms of a block that share a weight; a configuration that says tied over tensors that are
not, and the reverse.  After training and export a plain transformers model gives the in-memory model's logits.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from reference import plain_run
from safetensors.torch import load_file
from tiny_models import assert_close, batches, start_of, tiny, train, weights
from torch import Tensor, nn

import offloadz

STEPS = batches(5)
DISK = {"parameters": "disk", "gradients": "disk", "optimizer_state": "disk", "activations": "disk", "slots": 2}


def loaded(directory: Path) -> nn.Module:
    """The exported model by plain transformers, with nothing missing, left over or made up."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    return model.eval()


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(**{k: v for k, v in STEPS[0].items() if k != "labels"}, use_cache=False).logits


def trained(model: nn.Module, swap: Path, out: Path, **how: Any) -> tuple[dict[str, Tensor], Tensor]:
    """Weights and logits after five steps, and an export."""
    with offloadz.offload(model, offloadz.AdamW(lr=1e-3), swap=swap, **{**DISK, **how}) as run:
        train(run, STEPS)
        run.export(out)
        return weights(run), logits(run.model)


@pytest.mark.parametrize("family", ["qwen3", "gpt2", "llama"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_exported_logits_are_the_runs(family: str, dtype: torch.dtype, swap: Path, tmp_path: Path) -> None:
    held, seen = trained(tiny(family), swap, tmp_path / "out", dtype=dtype)
    model = loaded(tmp_path / "out")
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == (family != "llama")
    for name, param in model.named_parameters():
        assert torch.equal(param, held[name]), name
    torch.testing.assert_close(logits(model), seen.float(), rtol=1e-5, atol=1e-5)


def test_a_tied_table_in_several_tiles_is_one_weight(
    swap: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles of 64 rows: the head's share and the looked-up rows meet in every tile."""
    from offloadz.plan import shapes

    wanted = plain_run(tiny("qwen3"), STEPS)
    monkeypatch.setattr(shapes, "MAX_TILE_ELEMENTS", 64 * 48)
    with offloadz.offload(tiny("qwen3"), offloadz.AdamW(lr=1e-3), swap=swap, **DISK) as run:
        assert len([u for u in run.session.spec.units if u.kind == "tile"]) == 4
        found = train(run, STEPS)
        run.export(tmp_path / "out")
    assert_close(found, wanted, start_of(tiny("qwen3")))
    assert torch.equal(
        loaded(tmp_path / "out").get_input_embeddings().weight, found.weights["model.embed_tokens.weight"]
    )


def shared_norms(family: str = "qwen3") -> nn.Module:
    """Two norms of the second block are one parameter, and embedding and head are another."""
    model = tiny(family)
    model.model.layers[1].post_attention_layernorm.weight = model.model.layers[1].input_layernorm.weight
    return model


def test_two_tied_pairs(swap: Path, tmp_path: Path) -> None:
    """No configuration declares the norms' tie: the plain loop agrees, and both names are in the files."""
    wanted = plain_run(shared_norms(), STEPS)
    with offloadz.offload(shared_norms(), offloadz.AdamW(lr=1e-3), swap=swap, **DISK) as run:
        found = train(run, STEPS)
        seen = logits(run.model)
        run.export(tmp_path / "out")
    assert_close(found, wanted, start_of(shared_norms()))
    files = load_file(tmp_path / "out" / "model.safetensors")
    one, two = (files[f"model.layers.1.{n}_layernorm.weight"] for n in ("input", "post_attention"))
    assert torch.equal(one, two) and torch.equal(one, found.weights["model.layers.1.input_layernorm.weight"])
    torch.testing.assert_close(logits(loaded(tmp_path / "out")), seen, rtol=1e-5, atol=1e-5)


def test_untied_tensors_under_a_configuration_that_says_tied(swap: Path, tmp_path: Path) -> None:
    """Never a silent drop: both are written, and the configuration is corrected."""
    model = tiny("llama")
    model.config.tie_word_embeddings = True
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    held, seen = trained(model, swap, tmp_path / "out")
    assert not torch.equal(held["lm_head.weight"], held["model.embed_tokens.weight"])
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False
    again = loaded(tmp_path / "out")
    assert torch.equal(again.lm_head.weight, held["lm_head.weight"])
    torch.testing.assert_close(logits(again), seen, rtol=1e-5, atol=1e-5)


def test_tied_tensors_under_a_configuration_that_says_untied(swap: Path, tmp_path: Path) -> None:
    model = tiny("llama")
    model.lm_head.weight = model.model.embed_tokens.weight
    held, seen = trained(model, swap, tmp_path / "out")
    assert "lm_head.weight" not in held
    again = loaded(tmp_path / "out")
    assert torch.equal(again.lm_head.weight, held["model.embed_tokens.weight"])
    torch.testing.assert_close(logits(again), seen, rtol=1e-5, atol=1e-5)


def test_frozen_weights_are_exported_too(swap: Path, tmp_path: Path) -> None:
    held, seen = trained(tiny("qwen3"), swap, tmp_path / "out", freeze=["*layers.0*", "*embed*"])
    start = start_of(tiny("qwen3"))
    again = loaded(tmp_path / "out")
    for name, param in again.named_parameters():
        assert torch.equal(param, held[name]), name
        assert torch.equal(param, start[name]) == ("layers.0" in name or "embed" in name), name
    torch.testing.assert_close(logits(again), seen, rtol=1e-5, atol=1e-5)


def test_blocks_that_share_a_weight_are_refused_by_name(swap: Path) -> None:
    model = tiny("llama")
    model.model.layers[1].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight
    with pytest.raises(offloadz.ConfigError, match=r"layers.0.mlp.up_proj.weight.*not built"):
        offloadz.offload(model, swap=swap)
