"""Mixtures of experts: fused in the module, one by one in files (trap 4).  Kinds K08, K11 and K13.

Two families whose files name experts differently go through `save_pretrained`, our loading, a step, a checkpoint and
our export; transformers must find its own keys and bytes.  Routers learn as in the plain loop, experts that got no
token stay as they were.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import families
import pytest
import torch
from reference import backward
from safetensors.torch import load_file, save_file
from tiny_models import Outcome, assert_close, assert_same_weights, batches, start_of, train, whole_tensors
from torch import nn

import offloadz
from offloadz.model import conversion
from offloadz.model.export import export
from offloadz.model.weights import load, source_of
from offloadz.plan import spec as plan_spec
from offloadz.plan.errors import ConfigError

MIXED = ("qwen3_moe", "mixtral")
DISK = {"parameters": "disk", "gradients": "disk", "optimizer_state": "disk", "activations": "disk", "slots": 2}


def saved(family: str, path: Path, dtype: torch.dtype = torch.bfloat16, shard: str = "5GB") -> nn.Module:
    """A tiny model with every weight of its own, as transformers writes it."""
    model = families.FAMILIES[family].build().to(dtype)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param) * 0.05)
    model.save_pretrained(path, max_shard_size=shard)
    return model


def tensors(path: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in sorted(path.glob("*.safetensors")) for name, t in load_file(file).items()}


@pytest.mark.parametrize("family", MIXED)
def test_experts_load_export_and_come_back_with_equal_keys_and_bytes(
    family: str, swap: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_spec, "PART_ELEMENTS", 2048)  # an expert's matrix lies in several parts
    plain = saved(family, tmp_path / "in", shard="150KB")
    model = load(tmp_path / "in")
    source = source_of(model)
    assert source is not None
    for name, param in plain.named_parameters():
        total, at = param.numel(), max(0, param.numel() // 3 - 5)
        assert torch.equal(source.read(name, 0, total), param.detach().reshape(-1)), name
        assert torch.equal(source.read(name, at, 1000), param.detach().reshape(-1)[at : at + 1000]), name
    wanted = tensors(tmp_path / "in")
    with offloadz.offload(model, offloadz.AdamW(lr=1e-3), swap=swap, **DISK) as run:
        found = tensors(run.export(tmp_path / "out"))
        assert_same_weights(found, wanted, family)
        run.step(batches(1)[0])
        run.save(tmp_path / "state")
        run.export(tmp_path / "live", dtype="float32")
    export(tmp_path / "state", tmp_path / "later", "float32")
    live = tensors(tmp_path / "live")
    assert live.keys() == wanted.keys() and any(not torch.equal(live[n], wanted[n].float()) for n in live)
    assert_same_weights(tensors(tmp_path / "later"), live, "from the checkpoint")
    again = type(plain).from_pretrained(tmp_path / "live")
    again.save_pretrained(tmp_path / "again")
    assert_same_weights(tensors(tmp_path / "again"), live, "through transformers")


def test_files_that_hold_experts_as_the_module_does_load_too(tmp_path: Path) -> None:
    plain = saved("mixtral", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    save_file({n: p.detach().clone() for n, p in plain.named_parameters()}, tmp_path / "model.safetensors")
    source = source_of(load(tmp_path))
    assert source is not None
    for name, param in plain.named_parameters():
        assert torch.equal(source.read(name, 0, param.numel()), param.detach().reshape(-1)), name


@pytest.mark.parametrize("family", MIXED)
def test_routers_get_the_plain_gradients_and_idle_experts_none(family: str, swap: Path) -> None:
    """Fused experts are one parameter: an expert without tokens has a zero gradient there, as in the plain loop."""
    batch = {k: v[:, :3] for k, v in batches(1, rows=1, padded=False)[0].items()}
    batch["labels"] = batch["input_ids"].clone()
    model = families.FAMILIES[family].build()
    backward(model, batch)
    fused = model.model.layers[0].mlp.experts.gate_up_proj.grad
    idle = [e for e in range(fused.shape[0]) if not fused[e].any()]
    assert idle, "every expert got a token; the test shows nothing"
    router = next(n for n in dict(model.named_parameters()) if n.endswith("mlp.gate.weight"))
    with offloadz.offload(
        families.FAMILIES[family].build(), offloadz.AdamW(lr=1e-3), swap=swap, max_grad_norm=0.0, **DISK
    ) as run:
        run.step(batch)
        first = whole_tensors(run, "exp_avg")  # after one step (1 - beta1) of the gradient
        for name, param in model.named_parameters():
            assert torch.allclose(first[name] * 10, param.grad, rtol=1e-4, atol=1e-7), name
        assert float(first[router].abs().max()) > 0


def routed(family: str) -> nn.Module:
    """With a router loss that weighs as much as the other."""
    return families.FAMILIES[family].build(output_router_logits=True, router_aux_loss_coef=0.5)


def own_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(**batch, use_cache=False).loss  # type: ignore[no-any-return]


@pytest.mark.parametrize("family", MIXED)
def test_a_router_loss_reaches_the_routers(family: str, swap: Path) -> None:
    """Trap 3: recorded by hooks inside the blocks, its value was right and its gradient missing."""
    steps, plain, wanted = batches(3), routed(family), Outcome()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, foreach=False)
    without = families.FAMILIES[family].build()
    for batch in steps:
        optimizer.zero_grad()
        loss = own_loss(plain, batch)
        loss.backward()
        wanted.losses.append(float(loss.detach()))
        wanted.norms.append(float(nn.utils.clip_grad_norm_(plain.parameters(), 1.0, foreach=False)))
        optimizer.step()
    wanted.weights = start_of(plain)
    own_loss(without, steps[0]).backward()
    norm = float(nn.utils.clip_grad_norm_(without.parameters(), 1.0, foreach=False))
    assert abs(norm - wanted.norms[0]) > 1e-3 * norm, "the router loss has no gradient to speak of"
    with offloadz.offload(routed(family), offloadz.AdamW(lr=1e-3), swap=swap, **DISK) as run:
        found = train(run, steps, loss_fn=own_loss)
    assert_close(found, wanted, start_of(routed(family)), family)


def test_where_a_router_loss_would_be_wrong_it_is_refused_by_name(swap: Path) -> None:
    model, batch = routed("mixtral"), batches(1)[0]
    with offloadz.offload(model, offloadz.AdamW(), swap=swap, micro_batch_size=2, **DISK) as run:
        with pytest.raises(ConfigError, match="output_router_logits=True and a loss by tokens"):
            run.step(batch)
        with pytest.raises(ConfigError, match="router_logits with micro-batches is not built"):
            run.step(batch, loss_fn=own_loss)
        with torch.no_grad():
            logits = model(**batch).router_logits
        plain = routed("mixtral")
        with torch.no_grad():
            wanted = plain(**batch).router_logits
        assert len(logits) == len(wanted) == 2
        for a, b in zip(logits, wanted, strict=True):
            torch.testing.assert_close(a, b)


class Turned(nn.Module):
    """Stands for a family whose files hold a matrix turned around, and one whose files join two parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(12.0).view(3, 4))
        self.other = nn.Parameter(torch.ones(3, 4))


def test_views_of_any_conversion_are_read_by_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A turned matrix is single elements in order; what computes or joins is refused by name."""
    core = pytest.importorskip("transformers.core_model_loading")
    model = Turned()
    model.save_pretrained, model.config = None, None  # type: ignore[assignment]
    monkeypatch.setattr(core, "revert_weight_conversion", lambda m, d: {"w": d["weight"].t().contiguous()})
    names, cuts = conversion.file_names(model, {"weight": (3, 4)})
    assert names == {"w": "weight"} and cuts["w"].shape == (4, 3)
    layout = conversion.Layout(names, cuts, {"weight": 12})
    file = torch.full((12,), -1.0)
    for start in (0, 5, 7):
        stop = {0: 5, 5: 7, 7: 12}[start]
        for _, at, piece in layout.spread("weight", start, model.weight.detach().reshape(-1)[start:stop]):
            file[at : at + piece.numel()] = piece
    assert torch.equal(file.view(4, 3), model.weight.detach().t())
    monkeypatch.setattr(core, "revert_weight_conversion", lambda m, d: {"w": torch.cat([d["weight"], d["other"]])})
    with pytest.raises(ConfigError, match="w: files of Turned compute this tensor from several"):
        conversion.file_names(model, {"weight": (3, 4), "other": (3, 4)})
    monkeypatch.setattr(core, "revert_weight_conversion", lambda m, d: {"w": d["weight"][:2]})
    with pytest.raises(ConfigError, match="weight: its files would not hold each element once"):
        conversion.file_names(model, {"weight": (3, 4)})
