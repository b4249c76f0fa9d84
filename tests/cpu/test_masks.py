"""Five templates x how a dialogue may look: the mask equals one written by hand.  Case G17, kind K17.

Trained parts stand in [[double brackets]].  A dialogue without an answer has none: it is dropped and counted.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from toys import Cfg, byte_tokenizer, shown, turns, word_tokenizer, write
from transformers import PreTrainedTokenizerFast

from offloadz.plan.errors import ConfigError
from offloadz.train.batches import Loader
from offloadz.train.data import load_dataset

S, E = "<|im_start|>", "<|im_end|>"
H, J, Q = "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"
G, K = "<start_of_turn>", "<end_of_turn>"
OWN = (  # a tokenizer's own template: marks its answers, and writes tools in front
    "{% if tools %}{{ 'T:' + (tools | map(attribute='name') | join(',')) + '\n' }}{% endif %}"
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ 'A:' }}"
    "{% generation %}{{ m['content'] }}{% for c in m['tool_calls'] or [] %}{{ '<call>' + c['name'] }}{% endfor %}"
    "{{ '<|eot_id|>' }}{% endgeneration %}"
    "{% else %}{{ m['role'] + ':' + m['content'] + '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'A:' }}{% endif %}"
)
TEMPLATES = ("chatml", "llama3", "gemma", "mistral", "own")
ENDS_WITH_ASSISTANT = turns("s:be", "u:hi", "a:yes", "u:a", "a:b c")
ENDS_WITH_USER = turns("u:hi", "a:yes", "u:more")
TWO_IN_A_ROW = turns("u:hi", "a:yes", "a:and no", "u:a", "a:b")
TOOLS: dict[str, Any] = {**turns("u:hi", "a:yes"), "tools": [{"name": "look", "description": "at it"}]}

MASKS = {
    "chatml": [
        f"{S}system\nbe{E}\n{S}user\nhi{E}\n{S}assistant\n[[yes{E}]]\n{S}user\na{E}\n{S}assistant\n[[b c{E}]]\n",
        f"{S}user\nhi{E}\n{S}assistant\n[[yes{E}]]\n{S}user\nmore{E}\n",
        f"{S}user\nhi{E}\n{S}assistant\n[[yes{E}]]\n{S}assistant\n[[and no{E}]]\n"
        f"{S}user\na{E}\n{S}assistant\n[[b{E}]]\n",
    ],
    "llama3": [
        f"<s>{H}system{J}\n\nbe{Q}{H}user{J}\n\nhi{Q}{H}assistant{J}\n\n[[yes{Q}]]"
        f"{H}user{J}\n\na{Q}{H}assistant{J}\n\n[[b c{Q}]]",
        f"<s>{H}user{J}\n\nhi{Q}{H}assistant{J}\n\n[[yes{Q}]]{H}user{J}\n\nmore{Q}",
        f"<s>{H}user{J}\n\nhi{Q}{H}assistant{J}\n\n[[yes{Q}]]{H}assistant{J}\n\n[[and no{Q}]]"
        f"{H}user{J}\n\na{Q}{H}assistant{J}\n\n[[b{Q}]]",
    ],
    "gemma": [
        f"<s>{G}user\nbe\n\nhi{K}\n{G}model\n[[yes{K}]]\n{G}user\na{K}\n{G}model\n[[b c{K}]]\n",
        f"<s>{G}user\nhi{K}\n{G}model\n[[yes{K}]]\n{G}user\nmore{K}\n",
        f"<s>{G}user\nhi{K}\n{G}model\n[[yes{K}]]\n{G}model\n[[and no{K}]]\n{G}user\na{K}\n{G}model\n[[b{K}]]\n",
    ],
    "mistral": [
        "<s>[INST] be\n\nhi[/INST][[ yes</s>]][INST] a[/INST][[ b c</s>]]",
        "<s>[INST] hi[/INST][[ yes</s>]][INST] more[/INST]",
        "<s>[INST] hi[/INST][[ yes</s> and no</s>]][INST] a[/INST][[ b</s>]]",
    ],
    "own": [
        f"system:be\nuser:hi\nA:[[yes{Q}]]user:a\nA:[[b c{Q}]]",
        f"user:hi\nA:[[yes{Q}]]user:more\n",
        f"user:hi\nA:[[yes{Q}]]A:[[and no{Q}]]user:a\nA:[[b{Q}]]",
    ],
}
DIALOGUES = [ENDS_WITH_ASSISTANT, ENDS_WITH_USER, TWO_IN_A_ROW]


@pytest.fixture(scope="module")
def tok() -> PreTrainedTokenizerFast:
    made = byte_tokenizer()
    made.chat_template = OWN
    return made


def name_of(template: str) -> str:
    return "" if template == "own" else template


@pytest.mark.parametrize("template", TEMPLATES)
def test_masks_equal_hand_written_ones(tmp_path: Path, tok: PreTrainedTokenizerFast, template: str) -> None:
    files = write(tmp_path / "a.jsonl", DIALOGUES)
    data = load_dataset(files, tok, Cfg(chat_template=name_of(template)), len(tok))
    assert [shown(data, i, tok) for i in range(3)] == MASKS[template]


@pytest.mark.parametrize("template", TEMPLATES)
def test_dialogues_without_an_answer_are_counted(tmp_path: Path, tok: PreTrainedTokenizerFast, template: str) -> None:
    """A system message alone is written by some templates and swallowed by others: never a sample."""
    files = write(tmp_path / "a.jsonl", [ENDS_WITH_USER, turns("s:be"), turns("u:hi")])
    data = load_dataset(files, tok, Cfg(chat_template=name_of(template)), len(tok))
    assert (len(data), data.audit.num_no_target) == (1, 2)
    alone = write(tmp_path / "b.jsonl", [turns("s:be")])
    with pytest.raises(ConfigError, match=r"no sample is left.*1 have no trained token"):
        load_dataset(alone, tok, Cfg(chat_template=name_of(template)), len(tok))


@pytest.mark.parametrize("template", TEMPLATES)
def test_truncation_by_one_token(tmp_path: Path, tok: PreTrainedTokenizerFast, template: str) -> None:
    """Cut by one token at either end: the same mask less that token; an answer that lost its end is counted."""
    files = write(tmp_path / "a.jsonl", [ENDS_WITH_ASSISTANT])
    chosen = {"chat_template": name_of(template)}
    ids, mask = load_dataset(files, tok, Cfg(**chosen), len(tok))[0]
    for on_long, part in (("cut_right", slice(None, -1)), ("cut_left", slice(1, None))):
        data = load_dataset(files, tok, Cfg(max_length=len(ids) - 1, on_long=on_long, **chosen), len(tok))
        assert data[0][0].tolist() == ids[part].tolist() and data[0][1].tolist() == mask[part].tolist()
        assert data.audit.num_cut == 1
        assert data.audit.num_cut_inside == int(on_long == "cut_right" and template in ("llama3", "mistral", "own"))
    with pytest.raises(ConfigError, match="no sample is left"):
        load_dataset(files, tok, Cfg(max_length=len(ids) - 1, **chosen), len(tok))


def test_tools_are_written_or_refused_by_name(tmp_path: Path, tok: PreTrainedTokenizerFast) -> None:
    """Built-in templates know no tools; a tokenizer's own may, and calls are trained with the answer they end."""
    files = write(tmp_path / "a.jsonl", [TOOLS])
    for template in TEMPLATES[:4]:
        with pytest.raises(ConfigError, match=rf"a\.jsonl:1: built-in template '{template}' has no place for 'tools'"):
            load_dataset(files, tok, Cfg(chat_template=template), len(tok))
    assert shown(load_dataset(files, tok, Cfg(), len(tok)), 0, tok) == f"T:look\nuser:hi\nA:[[yes{Q}]]"
    calls = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [{"name": "look"}]},
        {"role": "tool", "content": "seen"},
        {"role": "assistant", "content": "done"},
    ]
    files = write(tmp_path / "b.jsonl", [{"messages": calls, "tools": TOOLS["tools"]}])
    assert shown(load_dataset(files, tok, Cfg(), len(tok)), 0, tok) == (
        f"T:look\nuser:hi\nA:[[<call>look{Q}]]tool:seen\nA:[[done{Q}]]"
    )
    last = shown(load_dataset(files, tok, Cfg(train_on="last"), len(tok)), 0, tok)
    assert last == f"T:look\nuser:hi\nA:<call>look{Q}tool:seen\nA:[[done{Q}]]"


@pytest.mark.parametrize("word", [E, "<s>", "</s>"])
@pytest.mark.parametrize("template", TEMPLATES)
def test_words_of_a_user_are_no_special_tokens(
    tmp_path: Path, tok: PreTrainedTokenizerFast, template: str, word: str
) -> None:
    """A message that spells a special token: as many of those tokens as a message without, the same mask by hand."""
    plain, spelt = turns("u:hi", "a:yes"), turns(f"u:{word}hi{word}", f"a:yes {word}, I say")
    files = write(tmp_path / "a.jsonl", [plain, spelt])
    data = load_dataset(files, tok, Cfg(chat_template=name_of(template)), len(tok))
    number = tok.convert_tokens_to_ids(word)
    assert (data[0][0] == number).sum() == (data[1][0] == number).sum()
    one = shown(data, 0, tok)
    assert shown(data, 1, tok) == one.replace("hi", f"{word}hi{word}", 1).replace("yes", f"yes {word}, I say", 1)
    assert any("a.jsonl:2" in note and "plain" in note for note in data.audit.notes)


def test_pad_that_is_the_end_token_stays_trained(tmp_path: Path) -> None:
    """Padding is masked by position: an end token of a text is trained although rows are filled up with it."""
    tok = word_tokenizer()
    tok.pad_token = tok.eos_token
    files = write(tmp_path / "a.jsonl", [{"text": "a"}, {"text": "a b c d"}])
    for packing in (False, True):
        batch = Loader(
            load_dataset(files, tok, Cfg(packing=packing, max_length=20), len(tok)), 2, shuffle=False
        ).next_batch()
        assert (batch["labels"] == tok.eos_token_id).sum() == 2


@pytest.mark.parametrize("packing", [False, True])
def test_g17_a_prompt_of_40_and_an_answer_of_4(tmp_path: Path, packing: bool) -> None:
    """64 samples cut at 128, 48, 32 and 16 tokens: the targets that are left are counted; with none it is an error."""
    tok = word_tokenizer()
    record = {"prompt": " ".join("a" * 20), "completion": " b c"}  # <s> and 39 tokens, then 4 and the end
    files = write(tmp_path / "a.jsonl", [record] * 64)
    for max_length, trained in ((128, 5), (48, 5), (45, 5), (44, 4), (41, 1)):
        cfg = Cfg(max_length=max_length, on_long="cut_right", packing=packing)
        data = load_dataset(files, tok, cfg, len(tok))
        assert (len(data), data.audit.num_target_tokens) == (64, 64 * trained)
        assert data.audit.num_cut_inside == (64 if trained < 5 else 0)
        targets = sum(int((Loader(data, 64, shuffle=False).next_batch()["labels"][:, 1:] != -100).sum()) for _ in "1")
        assert targets == 64 * trained
    for max_length in (40, 32, 16):
        cfg = Cfg(max_length=max_length, on_long="cut_right", packing=packing)
        with pytest.raises(ConfigError, match=r"no sample is left.*64 have no trained token"):
            load_dataset(files, tok, cfg, len(tok))


def test_completions_by_hand(tmp_path: Path) -> None:
    """One text: the completion and exactly one end token are trained; `all` trains the prompt too."""
    tok = word_tokenizer()
    records = [
        {"prompt": "a b", "completion": " c"},
        {"prompt": "", "completion": "d"},
        {"prompt": "a", "completion": "</s>"},
    ]
    files = write(tmp_path / "a.jsonl", records)
    data = load_dataset(files, tok, Cfg(), len(tok))

    def trained(index: int) -> list[str]:
        ids, mask = data[index]
        return [f"[{t}]" if m else t for t, m in zip(tok.convert_ids_to_tokens(ids.tolist()), mask, strict=True)]

    assert trained(0) == ["<s>", "a", " ", "b", "[ ]", "[c]", "[</s>]"]
    assert trained(1) == ["<s>", "[d]", "[</s>]"] and trained(2) == ["<s>", "a", "[</s>]"]
    every = load_dataset(files, tok, Cfg(train_on="all"), len(tok))
    assert every[0][1].tolist() == [False, True, True, True, True, True, True]
    assert np.array_equal(every[0][0], data[0][0])
