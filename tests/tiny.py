"""Files on disk that a run of seconds needs: a model directory with a tokenizer, records, a configuration.

Everything is drawn from fixed seeds; models are those of `pains.md`'s bench in small (odd sizes, tied or not).
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

WORDS = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "user", "assistant", "system"]
WORDS += ["\n", *(f"w{i}" for i in range(90))]


def make_model(folder: Path, family: str = "llama", weights: bool = True, seed: int = 0, **changes: Any) -> Path:
    """A directory with config.json, a word tokenizer with a ChatML template, and random weights."""
    import torch
    from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Qwen3Config

    small: dict[str, Any] = {
        "vocab_size": 101, "hidden_size": 24, "intermediate_size": 58, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    config = {
        "llama": lambda: LlamaConfig(**{**small, "tie_word_embeddings": False, **changes}),
        "qwen3": lambda: Qwen3Config(**{**small, "head_dim": 6, "tie_word_embeddings": True, **changes}),
        "gpt2": lambda: GPT2Config(**{"n_embd": 24, "n_layer": 2, "n_head": 4, "vocab_size": 101, "n_positions": 64,
                                      "bos_token_id": 1, "eos_token_id": 2, **changes}),
    }[family]()  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    if weights:
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    else:
        config.save_pretrained(folder)
    make_tokenizer(folder)
    return folder


def make_tokenizer(folder: Path) -> None:
    """Every word one token, words apart by single spaces."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    PreTrainedTokenizerFast(
        tokenizer_object=inner, additional_special_tokens=["<|im_start|>", "<|im_end|>"], **special
    ).save_pretrained(folder)


def make_texts(path: Path, num: int = 40, most_words: int = 14, seed: int = 0) -> Path:
    """Lines of `text` records; words follow each other by a rule, so that there is something to learn."""
    source = random.Random(seed)
    with path.open("w") as file:
        for _ in range(num):
            word, words = source.randrange(90), []
            for _ in range(source.randint(3, most_words)):
                words.append(f"w{word}")
                word = (word * 7 + 3) % 90 if source.random() < 0.9 else source.randrange(90)
            file.write(json.dumps({"text": " ".join(words)}) + "\n")
    return path


def tables(folder: Path, **changes: Any) -> dict[str, dict[str, Any]]:
    """A configuration as nested dicts; `changes` are `section__key=value`.  Model and texts are made in `folder`."""
    model, texts = folder / "model", folder / "train.jsonl"
    if not model.exists():
        make_model(model)
    if not texts.exists():
        make_texts(texts)
    told: dict[str, dict[str, Any]] = {
        "model": {"path": str(model)},
        "data": {"train": [str(texts)], "packing": False, "max_length": 32, "format": "text"},
        "train": {"output": str(folder / "run"), "steps": 12, "batch_size": 6, "micro_batch_size": 3, "save_every": 5},
        "optimizer": {"lr": 3e-3, "warmup": 2},
        "offload": {"swap": [str(folder / "swap")], "threads": 1},
        "debug": {"samples": True},
    }
    for name, value in changes.items():
        section, _, key = name.partition("__")
        told[section][key] = value
    return told


ON_DISK = {f"offload__{kind}": "disk" for kind in ("parameters", "gradients", "optimizer", "activations")}


def write_config(path: Path, told: dict[str, dict[str, Any]]) -> Path:
    """The TOML file of nested dicts."""
    from offloadz.config.values import to_toml

    lines = []
    for section, keys in told.items():
        lines += [f"[{section}]", *(f"{key} = {to_toml(value)}" for key, value in keys.items()), ""]
    path.write_text("\n".join(lines))
    return path
