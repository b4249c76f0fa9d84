"""Small tokenizers, records and settings for the tests of data; masks are shown as text with [[trained]] parts."""

from __future__ import annotations

import json
import string
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from offloadz.train.data import Dataset, load_dataset, marked_pieces

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
SPECIAL += ["<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]"]
TEXTS = ["the quick brown fox says hello there to the dog ", "user assistant system model\n", string.printable]


@dataclass(frozen=True)
class Cfg:
    format: str = "auto"
    max_length: int = 2048
    on_long: str = "drop"
    on_bad: str = "stop"
    packing: bool = False
    eval_share: float = 0.0
    train_on: str = "assistant"
    chat_template: str = ""


def _wrap(inner: Tokenizer, **special: str) -> PreTrainedTokenizerFast:
    inner.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return PreTrainedTokenizerFast(tokenizer_object=inner, **special)


def byte_tokenizer(trim: bool = True, **special: str) -> PreTrainedTokenizerFast:
    """Byte-level BPE with a few merges: letters of several bytes split, words and spaces merge."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.post_processor = processors.ByteLevel(trim_offsets=trim)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    inner.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet))
    return _wrap(inner, **(special or {"bos_token": "<s>", "eos_token": "</s>"}))


def word_tokenizer(with_start: bool = True) -> PreTrainedTokenizerFast:
    """Whole words, single spaces and line breaks are tokens; `<s>` goes in front by the tokenizer's own rule."""
    words = ["<unk>", "\n", " ", *SPECIAL, "user", "assistant", "system", "model"]
    words += ["hi", "there", "yes", "no", "a", "b", "c", "d", "e"]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s|\S+"), "isolated")
    if with_start:
        inner.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", words.index("<s>"))]
        )
    return _wrap(inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def write(path: Path, records: list[object]) -> list[str]:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return [str(path)]


def turns(*pairs: str) -> dict[str, object]:
    """`turns("u:hi", "a:yes")` is a record in the messages form."""
    roles = {"u": "user", "a": "assistant", "s": "system"}
    return {"messages": [{"role": roles[pair[0]], "content": pair[2:]} for pair in pairs]}


def shown(dataset: Dataset, index: int, tokenizer: PreTrainedTokenizerFast) -> str:
    """A sample with its trained parts in [[ ]]."""
    pieces = marked_pieces(dataset, index, tokenizer)
    return "".join(f"[[{text}]]" if trained else text for text, trained in pieces)


def chat(tmp_path: Path, record: object, template: str, tokenizer: PreTrainedTokenizerFast, **cfg: object) -> str:
    files = write(tmp_path / "chat.jsonl", [record])
    data = load_dataset(files, tokenizer, Cfg(chat_template=template, **cfg), len(tokenizer))  # type: ignore[arg-type]
    return shown(data, 0, tokenizer)
