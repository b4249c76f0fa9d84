"""Tiny models and batches for the tests: odd sizes on purpose, so that no border is a multiple of anything.

Vocabulary 211, width 48, four heads (two for keys and values), feed-forward 130, context 64, dropout off.  Everything
is drawn from fixed seeds, so two calls give equal bits.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from reference import Trace
from torch import Tensor, nn

from offloadz.memory.flat import spans
from offloadz.model.run import Batch, Run

VOCABULARY = 211
WIDTH = 48
LENGTH = 24
FAMILIES = ("llama", "qwen3", "gpt2")
SHAPE = {
    "hidden_size": WIDTH, "intermediate_size": 130, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": 64,
}  # fmt: skip


def tiny(family: str, seed: int = 0, **changes: Any) -> nn.Module:
    """A tiny causal model of a family: `llama` (untied), `qwen3` (tied), `gpt2` (tied, learned positions)."""
    import transformers as hf

    torch.manual_seed(seed)
    if family == "llama":
        return hf.LlamaForCausalLM(hf.LlamaConfig(**{**SHAPE, "tie_word_embeddings": False, **changes}))
    if family == "qwen3":
        return hf.Qwen3ForCausalLM(hf.Qwen3Config(**{**SHAPE, "head_dim": 12, "tie_word_embeddings": True, **changes}))
    if family == "gpt2":
        quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 1}
        sizes = {
            "n_embd": WIDTH,
            "n_layer": 2,
            "n_head": 4,
            "n_inner": 130,
            "vocab_size": VOCABULARY,
            "n_positions": 64,
        }
        return hf.GPT2LMHeadModel(hf.GPT2Config(**{**sizes, **quiet, **changes}))
    raise ValueError(f"no tiny model of family {family!r}; there are {', '.join(FAMILIES)}")


def batches(
    count: int, rows: int = 4, length: int = LENGTH, seed: int = 1, padded: bool = True
) -> list[dict[str, Tensor]]:
    """Batches as for a transformers model: right padding of different lengths, the first three labels left out."""
    source = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        ids = torch.randint(0, VOCABULARY, (rows, length), generator=source)
        mask = torch.ones_like(ids)
        if padded:
            for row in range(1, rows):
                mask[row, length - int(torch.randint(0, length // 2, (1,), generator=source)) :] = 0
        labels = ids.clone()
        labels[mask == 0] = -100
        labels[:, :3] = -100
        made.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    return made


def whole_tensors(run: Run, what: str = "weight") -> dict[str, Tensor]:
    """Logical tensors of a run by name; `what`: weight (the working weight in fp32), low, or a moment (exp_avg)."""
    shapes = {name: param.shape for name, param in run.model.named_parameters()}
    out: dict[str, Tensor] = {}
    for view in run.session.parts():
        flat = getattr(view, what) if what in ("weight", "low") else view.moments.get(what)
        if flat is None:
            continue
        for span in spans(view.unit, view.part):
            name, at = span.member.name, span.first_element
            whole = out.setdefault(name, torch.full((shapes[name].numel(),), float("nan")))
            whole[at : at + span.stop - span.start] = flat[span.part_slice].float()
    return {name: whole.view(shapes[name]) for name, whole in out.items()}


def weights(run: Run) -> dict[str, Tensor]:
    """The working weights by name, in fp32."""
    return whole_tensors(run)


@dataclass
class Outcome:
    """What a run left: per step loss and norm before clipping, and the final weights by name."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)


def train(run: Run, steps: list[dict[str, Tensor]], **how: Any) -> Outcome:
    """One optimizer step per batch, then the weights."""
    out = Outcome()
    for batch in steps:
        out.losses.append(float(run.step(batch, **how)))
        out.norms.append(run.report.grad_norm)
    out.weights = weights(run)
    return out


def assert_same_bits(found: Outcome, wanted: Outcome | Trace, note: str = "") -> None:
    """Equal losses, norms and weights, bit for bit."""
    assert found.losses == wanted.losses, f"{note}: losses {found.losses} != {wanted.losses}"
    assert found.norms == wanted.norms, f"{note}: norms {found.norms} != {wanted.norms}"
    assert_same_weights(found.weights, wanted.weights, note)


def assert_same_weights(found: dict[str, Tensor], wanted: dict[str, Tensor], note: str = "") -> None:
    """Equal names and equal bits."""
    assert found.keys() == wanted.keys(), f"{note}: {found.keys() ^ wanted.keys()}"
    differing = [name for name in found if not torch.equal(found[name], wanted[name])]
    assert not differing, f"{note}: {differing}"


def assert_close(
    found: Outcome,
    wanted: Outcome | Trace,
    start: dict[str, Tensor],
    note: str = "",
    norm: float = 1e-5,
    loss: float = 5e-6,
    moved: float = 5e-4,
) -> None:
    """Within the tolerances of the design for float32 over five steps, relative to how far each tensor moved."""
    for step, (a, b) in enumerate(zip(found.losses, wanted.losses, strict=True)):
        assert abs(a - b) <= loss * abs(b), f"{note}: loss of step {step} is {a}, wanted {b}"
    for step, (a, b) in enumerate(zip(found.norms, wanted.norms, strict=True)):
        assert abs(a - b) <= norm * abs(b), f"{note}: norm of step {step} is {a}, wanted {b}"
    for name, w in wanted.weights.items():
        apart, way = float((found.weights[name] - w).norm()), float((w - start[name]).norm())
        assert apart <= moved * way, f"{note}: {name} is {apart:.2e} off after moving {way:.2e}"


def start_of(model: nn.Module) -> dict[str, Tensor]:
    """A copy of a model's weights by name."""
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def sliced(batch: Batch, first: int, last: int) -> dict[str, Tensor]:
    """Rows `first` to `last` of a batch."""
    return {key: value[first:last] for key, value in batch.items()}
