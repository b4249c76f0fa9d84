"""Case G08, kind K08, and trap 8: what stays in fp32 in a bf16 run, and which way working weights are rounded.

Buffers are never cast; parameters named in `keep_float32` stay fp32 in compute, storage and export; the working weight
is the nearest bf16 of its master, so that no bias creeps into what the model computes with.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tiny_models import VOCABULARY, batches, tiny, train, weights, whole_tensors
from torch import Tensor, nn

import offloadz

LONG = {"max_position_embeddings": 4096, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
STEPS = batches(3)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    tiny("llama", **LONG).to(torch.bfloat16).save_pretrained(path)
    return path


def angles(model: nn.Module) -> Tensor:
    return model.get_submodule("model.rotary_emb").inv_freq


def far(first: int) -> dict[str, Tensor]:
    """Eleven tokens at positions from `first` on."""
    ids = torch.randint(0, VOCABULARY, (1, 11), generator=torch.Generator().manual_seed(first))
    return {"input_ids": ids, "position_ids": torch.arange(first, first + 11)[None]}


def test_rotary_tables_stay_fp32_through_load_step_export_and_load(directory: Path, swap: Path, tmp_path: Path) -> None:
    wanted = angles(tiny("llama", **LONG)).clone()
    model = offloadz.load(directory, dtype=torch.bfloat16)
    assert angles(model).dtype == torch.float32 and torch.equal(angles(model), wanted)
    with offloadz.offload(model, offloadz.AdamW(lr=1e-3), swap=swap, parameters="disk", optimizer_state="disk") as run:
        run.step(STEPS[0])
        assert angles(model).dtype == torch.float32 and torch.equal(angles(model), wanted)
        seen = logits_of(model)
        run.export(tmp_path / "out")
    again = offloadz.load(tmp_path / "out", dtype=torch.bfloat16)
    assert angles(again).dtype == torch.float32 and torch.equal(angles(again), wanted)
    with offloadz.offload(again, swap=swap, parameters="disk") as run:
        for a, b in zip(logits_of(again), seen, strict=True):
            assert torch.equal(a, b)
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert torch.equal(angles(plain), wanted)
    for a, b in zip(logits_of(plain), seen, strict=True):
        torch.testing.assert_close(b.float(), a, rtol=2e-2, atol=2e-2)


def logits_of(model: nn.Module) -> list[Tensor]:
    """Logits at positions 250-260 and 4000-4010, where a table in bf16 can no longer tell neighbours apart."""
    with torch.no_grad():
        return [model(**far(first), use_cache=False).logits for first in (250, 4000)]


def test_a_table_in_bf16_would_be_seen(directory: Path) -> None:
    """The angles of neighbouring positions differ in fp32 and not in bf16: what the test above looks for exists."""
    table = angles(offloadz.load(directory))
    for positions in (torch.arange(250, 261), torch.arange(4000, 4011)):
        exact = positions[:, None].float() * table[None]
        assert bool((exact[1:] != exact[:-1]).all())
        coarse = positions.bfloat16()[:, None] * table.bfloat16()[None]
        assert bool((coarse[1:] == coarse[:-1]).any())


def test_names_kept_in_float32(directory: Path, swap: Path, tmp_path: Path) -> None:
    """Stored, computed, updated and exported as fp32; the others are bf16."""
    kept = ["*norm*", "*q_proj*"]
    model = offloadz.load(directory, dtype=torch.bfloat16)
    with offloadz.offload(
        model, offloadz.AdamW(lr=1e-5), swap=swap, parameters="disk", optimizer_state="disk", keep_float32=kept
    ) as run:
        before = weights(run)
        train(run, STEPS)
        after, low = weights(run), whole_tensors(run, "low")
        run.export(tmp_path / "out")
    fine = {n for n in after if "norm" in n or "q_proj" in n}
    assert fine and set(low) == set(after) - fine
    assert all(not torch.equal(after[n], after[n].bfloat16().float()) for n in fine)
    assert all(torch.equal(after[n], after[n].bfloat16().float()) for n in set(after) - fine)
    # Around 1 a step of 1e-5 is far below the bf16 unit of 8e-3: only an fp32 weight moves.
    assert bool((after["model.norm.weight"] != before["model.norm.weight"]).any())
    files = load_file(tmp_path / "out" / "model.safetensors")
    assert {n for n, t in files.items() if t.dtype == torch.float32} == fine
    assert all(torch.equal(files[n].float(), after[n]) for n in files)


def test_working_weights_have_no_bias(swap: Path) -> None:
    """Trap 8: cutting the low half off instead would make every weight smaller by half a unit on average."""
    with offloadz.offload(tiny("llama"), offloadz.AdamW(lr=1e-3), swap=swap, dtype=torch.bfloat16) as run:
        train(run, STEPS)
        rounded = cut = unit = 0.0
        for view in run.session.parts():
            low = view.low.view(torch.int16).to(torch.int64) & 0xFFFF  # type: ignore[union-attr]
            word = view.weight.view(torch.int16).to(torch.int64) & 0xFFFF
            bits = ((word - (low >> 15)) << 16) | low
            # Magnitudes in units of the master's last place: sign bit off, order of fp32 bit patterns.
            size = bits & 0x7FFFFFFF
            rounded += float((((word & 0x7FFF) << 16) - size).double().sum())
            cut += float((((size >> 16) << 16) - size).double().sum())
            unit += float(low.numel()) * (1 << 16)
    assert abs(rounded / unit) < 0.02
    assert cut / unit < -0.4


def test_float16_is_refused_by_name(directory: Path, swap: Path) -> None:
    with pytest.raises(offloadz.ConfigError, match="float16"):
        offloadz.load(directory, dtype=torch.float16)
    with pytest.raises(offloadz.ConfigError, match="float16"):
        offloadz.offload(tiny("llama"), swap=swap, dtype=torch.float16)


def test_fp32_compute_keeps_plain_weights(swap: Path) -> None:
    with offloadz.offload(tiny("llama"), swap=swap) as run:
        run.step(STEPS[0])
        assert {view.part.dtype for view in run.session.parts()} == {"float32"}
        assert all(view.low is None for view in run.session.parts())
