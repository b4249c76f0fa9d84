"""One tiny causal model per family of transformers: odd sizes, a window shorter than a row, caps and scales that bite.

The table is data; the package has no line that names a family.  The checks are run by tests/cpu/test_families.py, and
by docs/make_models.py for the table in docs/models.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from reference import plain_run
from safetensors.torch import load_file
from tiny_models import (
    SHAPE,
    VOCABULARY,
    WIDTH,
    Outcome,
    assert_close,
    assert_same_weights,
    batches,
    start_of,
    train,
)
from torch import Tensor, nn

import offloadz
from offloadz.model.weights import load


@dataclass(frozen=True)
class Family:
    """Names of the classes in transformers, and the configuration's fields besides `SHAPE`."""

    config: str
    model: str
    fields: dict[str, Any] = field(default_factory=dict)
    shape: dict[str, Any] = field(default_factory=lambda: dict(SHAPE))
    sorts_tokens: bool = False
    """Whether products are over tokens sorted by expert."""
    special: str = ""
    """What is unusual about it, for the table of docs/models.md."""

    def build(self, seed: int = 0, **changes: Any) -> nn.Module:
        """The tiny model, drawn from a fixed seed."""
        import transformers as hf

        torch.manual_seed(seed)
        config = getattr(hf, self.config)(**{**self.shape, **self.fields, **changes})
        model: nn.Module = getattr(hf, self.model)(config)
        return model


WINDOW = 7
"""Sliding window in tokens, shorter than every row of the tests."""
ENDS: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
"""Special tokens inside the tiny vocabulary."""
GPT2 = {"n_embd": WIDTH, "n_layer": 2, "n_head": 4, "n_inner": 130, "vocab_size": VOCABULARY, "n_positions": 64}
QUIET = {"attention_dropout": 0.0, "hidden_dropout": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
GEMMA = {"head_dim": 12, "query_pre_attn_scalar": 12, "sliding_window": WINDOW, **ENDS}
MIXED = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "head_dim": 12}

FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaConfig", "LlamaForCausalLM", {"tie_word_embeddings": False}),
    "qwen2": Family(
        "Qwen2Config", "Qwen2ForCausalLM", {"tie_word_embeddings": True}, special="tied; bias on queries, keys, values"
    ),
    "qwen3": Family(
        "Qwen3Config",
        "Qwen3ForCausalLM",
        {"head_dim": 12, "tie_word_embeddings": True},
        special="tied; norms on queries and keys",
    ),
    "gemma2": Family(
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {**GEMMA, "attn_logit_softcapping": 1.0, "final_logit_softcapping": 0.7, "attn_implementation": "eager"},
        special="tied; soft caps on scores and logits, scaled embedding, every other layer with a window",
    ),
    "gemma3": Family(
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {**GEMMA, "layer_types": ["sliding_attention", "full_attention"], "final_logit_softcapping": 0.7},
        special="tied; two rotary tables, scaled embedding, windows",
    ),
    "mistral": Family("MistralConfig", "MistralForCausalLM", {"sliding_window": WINDOW}, special="window"),
    "phi": Family(
        # Rotated whole: the bias of a key that is not rotated has no gradient but rounding, which Adam makes large.
        "PhiConfig",
        "PhiForCausalLM",
        {**QUIET, "partial_rotary_factor": 1.0},
        special="head with a bias; attention beside feed-forward",
    ),
    "phi3": Family(
        "Phi3Config",
        "Phi3ForCausalLM",
        {**ENDS, **QUIET, "sliding_window": WINDOW},
        special="fused projections, window",
    ),
    "gpt2": Family(
        "GPT2Config", "GPT2LMHeadModel", {**QUIET, "attn_pdrop": 0.0, **ENDS}, GPT2, "tied; learned positions"
    ),
    "gpt_neox": Family("GPTNeoXConfig", "GPTNeoXForCausalLM", QUIET, special="attention beside feed-forward"),
    "granite": Family(
        "GraniteConfig",
        "GraniteForCausalLM",
        {"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.6, "logits_scaling": 2.5},
        special="scales on embedding, scores, residuals and logits",
    ),
    "cohere": Family(
        "CohereConfig",
        "CohereForCausalLM",
        {"logit_scale": 0.3, "use_qk_norm": True, **ENDS},
        special="tied; scaled logits",
    ),
    "cohere2": Family(
        "Cohere2Config",
        "Cohere2ForCausalLM",
        {"logit_scale": 0.3, "sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"], **ENDS},
        special="tied; scaled logits, windows",
    ),
    "olmo2": Family("Olmo2Config", "Olmo2ForCausalLM", ENDS, special="norms after attention and feed-forward"),
    "qwen3_moe": Family(
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {**MIXED, "norm_topk_prob": True},
        sorts_tokens=True,
        special="mixture of experts",
    ),
    "mixtral": Family(
        "MixtralConfig",
        "MixtralForCausalLM",
        {"num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 72},
        sorts_tokens=True,
        special="mixture of experts",
    ),
}


DISK: dict[str, Any] = {
    "parameters": "disk", "gradients": "disk", "optimizer_state": "disk", "activations": "disk", "slots": 2,
}  # fmt: skip


def packed(count: int, rows: int = 2, seed: int = 5) -> list[dict[str, Tensor]]:
    """Batches of rows of three samples each: positions that begin again, no mask, no target across an edge."""
    lengths = torch.tensor([9, 8, 7])
    positions = torch.cat([torch.arange(int(n)) for n in lengths]).expand(rows, -1)
    source = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        ids = torch.randint(3, VOCABULARY, positions.shape, generator=source)
        labels = torch.where(positions == 0, -100, ids)
        made.append({"input_ids": ids, "position_ids": positions.clone(), "labels": labels})
    return made


EPS = 1e-6
"""Of AdamW, against noise: softmax ignores a shift of all scores, so much of a key's bias has no gradient but
roundings, which differ by processor; with 1e-8 these would move it by whole steps."""


def trained(family: Family, steps: list[dict[str, Tensor]], swap: Path, micro: int, **how: Any) -> Outcome:
    """Steps with everything on disk; `use_cache` as the family has it by default."""
    settings = offloadz.AdamW(lr=1e-3, eps=EPS)
    with offloadz.offload(family.build(), settings, swap=swap, micro_batch_size=micro, **DISK, **how) as run:
        assert getattr(run.model.config, "use_cache", True) is True
        return train(run, steps)


def check_padded(family: Family, swap: Path) -> None:
    """Five steps as in the plain loop, with all rows at once and row by row."""
    steps, start = batches(5, rows=3), start_of(family.build())
    wanted = plain_run(family.build(), steps, eps=EPS)
    for micro in (3, 1):
        assert_close(trained(family, steps, swap, micro), wanted, start, f"micro-batches of {micro}")


def check_packed(family: Family, swap: Path) -> None:
    """Five steps of packed rows as in the plain loop."""
    steps = packed(5)
    wanted = plain_run(family.build(), steps, eps=EPS)
    assert_close(trained(family, steps, swap, 1), wanted, start_of(family.build()), "packed")


def check_isolated(family: Family, swap: Path) -> None:
    """Another first sample in each row leaves loss and gradient of the second as they were, to the bit.

    Where tokens are sorted by expert, sums run in another order: there the gradient's norm is held to 1e-9.
    """
    batch = packed(1)[0]
    batch["labels"][:, :9] = -100
    batch["labels"][:, 17:] = -100
    other = {**batch, "input_ids": batch["input_ids"].clone()}
    other["input_ids"][:, :9] = other["input_ids"][:, :9].flip(0)
    found = []
    with offloadz.offload(family.build(), offloadz.AdamW(lr=0.0, weight_decay=0.0), swap=swap, **DISK) as run:
        for changed in (batch, other):
            logp = offloadz.token_logprobs(run, changed)
            found.append((logp.detach().clone(), float(run.step(changed)), run.report.grad_norm))
    assert torch.equal(found[0][0], found[1][0]) and found[0][1] == found[1][1]
    apart = abs(found[0][2] - found[1][2]) / found[0][2]
    assert apart <= (1e-9 if family.sorts_tokens else 0.0), f"gradients {found[0][2]} and {found[1][2]}"


def check_files(family: Family, swap: Path) -> None:
    """What `save_pretrained` wrote loads, and is exported with the same keys and bytes."""
    plain = family.build().bfloat16()
    plain.save_pretrained(swap.parent / "in")
    wanted = load_file(swap.parent / "in" / "model.safetensors")
    with offloadz.offload(load(swap.parent / "in"), swap=swap, **DISK) as run:
        run.export(swap.parent / "out")
    assert_same_weights(load_file(swap.parent / "out" / "model.safetensors"), wanted)


CHECKS = {"padded": check_padded, "packed": check_packed, "isolated": check_isolated, "files": check_files}
