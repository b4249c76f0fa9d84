"""Names and shapes of a model from its config.json alone, for plans of models whose weights are not there.

Six families are written down; any other is built by transformers on the meta device, which imports torch (2 to 4 s) and
is done only when asked for.  What a family computes is none of this file's business.  The trade-off: forty lines of
shapes that tests compare with the real modules, so that a plan of a 70B model takes milliseconds.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from offloadz.plan.errors import ConfigError
from offloadz.plan.shapes import ParamInfo

DECODERS = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text")
FAMILIES = (*DECODERS, "gpt2")
TIED_BY_DEFAULT = ("gemma", "gemma2", "gemma3_text", "gemma3", "gpt2")
"""Families whose config.json leaves `tie_word_embeddings` out when it is true."""

Shapes = dict[str, tuple[int, ...]]


def is_tied(config: Mapping[str, Any]) -> bool:
    """Whether the head is the input embedding, by the configuration and the default of its family."""
    return bool(config.get("tie_word_embeddings", config.get("model_type") in TIED_BY_DEFAULT))


def params_from_config(config: Mapping[str, Any]) -> list[ParamInfo]:
    """Every parameter of a causal language model in model order, a tied head left out.

    Raises ConfigError naming a key that config.json lacks, or a family nobody knows.
    """
    family = config.get("model_type", "")
    try:
        if family in DECODERS:
            shapes = _decoder(config, family)
        elif family == "gpt2":
            shapes = _gpt2(config)
        else:
            return _on_meta(config)
    except KeyError as error:
        raise ConfigError(f"config.json of a {family} model lacks {error.args[0]}, needed to know its shapes") from None
    return [ParamInfo(name, shape) for name, shape in shapes.items()]


def _decoder(config: Mapping[str, Any], family: str) -> Shapes:
    """Llama and its relatives: gated feed-forward, grouped keys and values, norms without bias."""
    hidden, inner, words = (int(config[k]) for k in ("hidden_size", "intermediate_size", "vocab_size"))
    heads = int(config["num_attention_heads"])
    groups = int(config.get("num_key_value_heads") or heads)
    width = int(config.get("head_dim") or {"qwen3": 128, "gemma3_text": 256}.get(family, hidden // heads))
    shapes: Shapes = {"model.embed_tokens.weight": (words, hidden)}
    for index in range(int(config["num_hidden_layers"])):
        block = f"model.layers.{index}"
        shapes |= _attention(f"{block}.self_attn", config, family, hidden, heads * width, groups * width, width)
        for name in ("gate_proj", "up_proj", "down_proj"):
            shape = (hidden, inner) if name == "down_proj" else (inner, hidden)
            shapes[f"{block}.mlp.{name}.weight"] = shape
            if config.get("mlp_bias") and family == "llama":
                shapes[f"{block}.mlp.{name}.bias"] = shape[:1]
        norms = ["input_layernorm", "post_attention_layernorm"]
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"] if family == "gemma3_text" else []
        shapes |= {f"{block}.{name}.weight": (hidden,) for name in norms}
    shapes["model.norm.weight"] = (hidden,)
    return shapes if is_tied(config) else shapes | {"lm_head.weight": (words, hidden)}


def _attention(
    prefix: str, config: Mapping[str, Any], family: str, hidden: int, queries: int, keys: int, width: int
) -> Shapes:
    shapes: Shapes = {}
    biased = family == "qwen2" or bool(config.get("attention_bias"))
    for name, size in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys), ("o_proj", queries)):
        shape = (hidden, size) if name == "o_proj" else (size, hidden)
        shapes[f"{prefix}.{name}.weight"] = shape
        if biased and not (family == "qwen2" and name == "o_proj") and family != "mistral":
            shapes[f"{prefix}.{name}.bias"] = shape[:1]
    if family in ("qwen3", "gemma3_text"):
        shapes |= {f"{prefix}.{name}.weight": (width,) for name in ("q_norm", "k_norm")}
    return shapes


def _gpt2(config: Mapping[str, Any]) -> Shapes:
    """GPT-2: matrices are (in, out), every one with a bias, positions in a table."""
    hidden = int(config["n_embd"])
    inner = int(config.get("n_inner") or 4 * hidden)
    shapes: Shapes = {
        "transformer.wte.weight": (int(config["vocab_size"]), hidden),
        "transformer.wpe.weight": (int(config["n_positions"]), hidden),
    }
    for index in range(int(config["n_layer"])):
        block = f"transformer.h.{index}"
        pieces: Shapes = {
            "ln_1": (hidden,), "attn.c_attn": (hidden, 3 * hidden), "attn.c_proj": (hidden, hidden),
            "ln_2": (hidden,), "mlp.c_fc": (hidden, inner), "mlp.c_proj": (inner, hidden),
        }  # fmt: skip
        for name, shape in pieces.items():
            shapes |= {f"{block}.{name}.weight": shape, f"{block}.{name}.bias": shape[-1:]}
    shapes |= {f"transformer.ln_f.{part}": (hidden,) for part in ("weight", "bias")}
    return shapes if is_tied(config) else shapes | {"lm_head.weight": (int(config["vocab_size"]), hidden)}


def shapes_note(config: Mapping[str, Any]) -> str:
    """What to say of shapes that are not written down here; "" of those that are."""
    family = config.get("model_type", "")
    return "" if family in FAMILIES else f"shapes of {family} by transformers on the meta device"


def _on_meta(config: Mapping[str, Any]) -> list[ParamInfo]:
    """Any other family: built by transformers without data.  Imports torch; remote code is never run here.

    What transformers warns of (its tokens, its defaults) is nothing that shapes depend on, and is not shown.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    fields = {k: v for k, v in config.items() if k not in ("model_type", "transformers_version")}
    shown = logging.get_verbosity()
    logging.set_verbosity(logging.log_levels["error"])
    try:
        with warnings.catch_warnings(action="ignore"), torch.device("meta"):
            made = AutoConfig.for_model(config["model_type"], **fields)
            model = AutoModelForCausalLM.from_config(made)  # type: ignore[no-untyped-call]
        model.tie_weights()
    except Exception as error:  # each family checks its configuration in its own way
        raise ConfigError(
            f"config.json has model_type {config.get('model_type')!r}, which transformers cannot build: "
            f"{error or type(error).__name__}; families planned without weights: {', '.join(FAMILIES)}"
        ) from None
    finally:
        logging.set_verbosity(shown)
    return [ParamInfo(name, tuple(p.shape)) for name, p in model.named_parameters()]
