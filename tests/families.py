"""One tiny causal model per family of transformers: odd sizes, a window shorter than a row, caps and scales that bite.

The table is data; the package has no line that names a family.  docs/make_models.py runs it for docs/models.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from tiny_models import SHAPE, VOCABULARY, WIDTH
from torch import nn


@dataclass(frozen=True)
class Family:
    """Names of the classes in transformers, and the configuration's fields besides `SHAPE`."""

    config: str
    model: str
    fields: dict[str, Any] = field(default_factory=dict)
    shape: dict[str, Any] = field(default_factory=lambda: dict(SHAPE))
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
        "Qwen3MoeConfig", "Qwen3MoeForCausalLM", {**MIXED, "norm_topk_prob": True}, special="mixture of experts"
    ),
    "mixtral": Family(
        "MixtralConfig",
        "MixtralForCausalLM",
        {"num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 72},
        special="mixture of experts",
    ),
}
