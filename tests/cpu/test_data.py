"""Records, masks, batches.  Case G16 (kind K16) and the data side of G17 (kind K17).

The masks are written by hand as text: pieces in [[double brackets]] are trained.  Files are real files.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from toys import Cfg, byte_tokenizer, chat, shown, turns, word_tokenizer, write
from transformers import PreTrainedTokenizerFast

from offloadz.plan.errors import ConfigError
from offloadz.train.data import Dataset, Loader, load_dataset, marked_pieces, read_records, tokenise
from offloadz.train.forms import Dialogue
from offloadz.train.tokens import mask_from_offsets

THINK = (  # like Qwen3: the last answer gets an empty thought, earlier ones have none
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' and loop.last %}{{ '<think></think>' }}{% endif %}"
    "{{ m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
COUNTED = (  # writes the number of messages first, so that no rendering is a prefix of a longer one
    "{{ messages | length }}{% for m in messages %}{% if m['role'] == 'assistant' %}"
    "A:{% generation %}{{ m['content'] }}{% endgeneration %}<|im_end|>{% else %}U:{{ m['content'] }}\n{% endif %}"
    "{% endfor %}"
)


@pytest.fixture(scope="module")
def tok() -> PreTrainedTokenizerFast:
    return byte_tokenizer()


# --- masks ------------------------------------------------------------------------------------------------------------

S, E = "<|im_start|>", "<|im_end|>"
H, J, Q = "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"
MASKS = [
    ("chatml", ["u:hi", "a:yes"], f"{S}user\nhi{E}\n{S}assistant\n[[yes{E}]]\n"),
    ("chatml", ["u:a", "a:b", "u:c"], f"{S}user\na{E}\n{S}assistant\n[[b{E}]]\n{S}user\nc{E}\n"),
    (
        "chatml",
        ["s:a", "u:b", "a:b", "a:c"],
        f"{S}system\na{E}\n{S}user\nb{E}\n{S}assistant\n[[b{E}]]\n{S}assistant\n[[c{E}]]\n",
    ),
    (
        "chatml",
        ["u:end|", "a:end|", "u:end|", "a:|im_end"],
        f"{S}user\nend|{E}\n{S}assistant\n[[end|{E}]]\n{S}user\nend|{E}\n{S}assistant\n[[|im_end{E}]]\n",
    ),
    ("llama3", ["u:hi", "a:yes"], f"<s>{H}user{J}\n\nhi{Q}{H}assistant{J}\n\n[[yes{Q}]]"),
    (
        "llama3",
        ["s:a", "u:b", "a:user", "u:user", "a:assistant"],
        f"<s>{H}system{J}\n\na{Q}{H}user{J}\n\nb{Q}{H}assistant{J}\n\n[[user{Q}]]"
        f"{H}user{J}\n\nuser{Q}{H}assistant{J}\n\n[[assistant{Q}]]",
    ),
    ("llama3", ["a:yes", "u:no"], f"<s>{H}assistant{J}\n\n[[yes{Q}]]{H}user{J}\n\nno{Q}"),
    (
        "gemma",
        ["s:be", "u:hi", "a:model", "u:a", "a:b"],
        "<s><start_of_turn>user\nbe\n\nhi<end_of_turn>\n<start_of_turn>model\n[[model<end_of_turn>]]\n"
        "<start_of_turn>user\na<end_of_turn>\n<start_of_turn>model\n[[b<end_of_turn>]]\n",
    ),
]


@pytest.mark.parametrize(("template", "record", "expected"), MASKS)
def test_masks_by_hand(
    tmp_path: Path, tok: PreTrainedTokenizerFast, template: str, record: list[str], expected: str
) -> None:
    assert chat(tmp_path, turns(*record), template, tok) == expected


def test_mask_as_numbers(tmp_path: Path) -> None:
    """The same with whole words and the mask as 0 and 1, token by token."""
    tok = word_tokenizer()
    files = write(tmp_path / "a.jsonl", [turns("u:hi there", "a:yes no", "u:a", "a:b")])
    chatml = load_dataset(files, tok, Cfg(chat_template="chatml"), len(tok))[0]
    #           S user \n hi _ there E \n S asst \n yes _ no E \n S user \n a E \n S asst \n b E \n
    expected = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 0]
    assert chatml[1].astype(int).tolist() == expected
    assert chatml[0].dtype == np.int32 and tok.convert_ids_to_tokens(chatml[0].tolist())[:3] == [S, "user", "\n"]
    llama = load_dataset(files, tok, Cfg(chat_template="llama3"), len(tok))[0]
    #          <s> H user J \n \n hi _ there Q H asst J \n \n yes _ no Q H user J \n \n a Q H asst J \n \n b Q
    expected = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1]
    assert llama[1].astype(int).tolist() == expected


def test_mistral_trains_the_end_token_of_every_turn(tmp_path: Path, tok: PreTrainedTokenizerFast) -> None:
    got = chat(tmp_path, turns("u:hi", "a:yes", "u:a", "a:b"), "mistral", tok)
    assert got == "<s>[INST] hi[/INST][[ yes</s>]][INST] a[/INST][[ b</s>]]"


def test_train_on(tmp_path: Path, tok: PreTrainedTokenizerFast) -> None:
    record = turns("u:a", "a:b", "u:c", "a:d")
    last = chat(tmp_path, record, "chatml", tok, train_on="last")
    assert last == f"{S}user\na{E}\n{S}assistant\nb{E}\n{S}user\nc{E}\n{S}assistant\n[[d{E}]]\n"
    # Position 0 is never a target: nothing stands before it.
    every = chat(tmp_path, record, "chatml", tok, train_on="all")
    assert every == f"{S}[[user\na{E}\n{S}assistant\nb{E}\n{S}user\nc{E}\n{S}assistant\nd{E}\n]]"


def template_file(tmp_path: Path, text: str) -> str:
    path = tmp_path / "t.jinja"
    path.write_text(text)
    return str(path)


def test_template_that_rewrites_earlier_turns(tmp_path: Path, tok: PreTrainedTokenizerFast) -> None:
    """The user says what the assistant says: the mask must not land on the user."""
    got = chat(tmp_path, turns("u:yes", "a:yes", "u:yes", "a:no"), template_file(tmp_path, THINK), tok)
    assert got == (
        f"{S}user\nyes{E}\n{S}assistant\n[[yes{E}]]\n{S}user\nyes{E}\n{S}assistant\n[[<think></think>no{E}]]\n"
    )


def test_prompt_that_is_no_prefix(tmp_path: Path, tok: PreTrainedTokenizerFast) -> None:
    """A prompt that opens a thought (as R1's): the answer itself is trained, found behind the question."""
    text = THINK.replace("'<|im_start|>assistant\n' }}{% endif %}", "'<|im_start|>assistant\n<think>' }}{% endif %}")
    text = text.replace("'<think></think>'", "''")
    got = chat(tmp_path, turns("u:yes", "a:yes", "u:no", "a:no"), template_file(tmp_path, text), tok)
    assert got == f"{S}user\nyes{E}\n{S}assistant\n[[yes{E}]]\n{S}user\nno{E}\n{S}assistant\n[[no{E}]]\n"


def test_rewritten_turns_and_a_prompt_that_is_no_prefix(tmp_path: Path, tok: PreTrainedTokenizerFast) -> None:
    text = THINK.replace("'<|im_start|>assistant\n' }}{% endif %}", "'<|im_start|>assistant\n<think>\n' }}{% endif %}")
    got = chat(tmp_path, turns("u:yes", "a:yes", "u:no", "a:no"), template_file(tmp_path, text), tok)
    # The first answer is found behind its question, which says the same and ends the same way.
    assert got.startswith(f"{S}user\nyes{E}\n{S}assistant\n[[yes{E}]]\n{S}user\nno{E}\n{S}assistant\n")
    assert got.endswith(f"[[no{E}]]\n")


def test_tokens_on_the_edge_of_a_span() -> None:
    """A token over an edge is in; one without width is trimmed white space in front of its position."""
    offsets = np.array([[0, 3], [3, 3], [2, 5], [5, 8], [8, 8], [8, 10], [9, 12]])
    expected = [False, False, True, True, True, True, True]
    assert mask_from_offsets(offsets, [(3, 10)]).tolist() == expected


def test_template_without_generation_prompt(tmp_path: Path, tok: PreTrainedTokenizerFast) -> None:
    text = THINK.split("{% if add_generation_prompt %}")[0].replace("<think></think>", "")
    got = chat(tmp_path, turns("u:hi", "a:assistant", "u:b", "a:im_end"), template_file(tmp_path, text), tok)
    assert got == f"{S}user\nhi{E}\n{S}assistant\n[[assistant{E}]]\n{S}user\nb{E}\n{S}assistant\n[[im_end{E}]]\n"


def test_markers_are_used_where_nothing_else_helps(tmp_path: Path, tok: PreTrainedTokenizerFast) -> None:
    record = turns("u:hi", "a:yes", "u:b", "a:c")
    got = chat(tmp_path, record, template_file(tmp_path, COUNTED), tok)
    assert got == f"4U:hi\nA:[[yes{E}]]U:b\nA:[[c{E}]]"
    bare = COUNTED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    with pytest.raises(ConfigError, match=r"chat\.jsonl:1: .*put \{% generation %\}"):
        chat(tmp_path, record, template_file(tmp_path, bare), tok)


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ("", r"has none; set data\.chat_template .* chatml \| llama3 \| gemma \| mistral"),
        ("chatmll", r"did you mean 'chatml'"),
        ("{% for m in %}", r"does not parse at line 1"),
        ("{% for m in messages %}{{ m['content'] }}{% endfor %}", r"chat\.jsonl:1: .*never learn to stop"),
        ("{{ raise_exception('roles must alternate') }}", r"chat\.jsonl:1: .*roles must alternate"),
    ],
)
def test_template_errors(tmp_path: Path, tok: PreTrainedTokenizerFast, choice: str, message: str) -> None:
    name = template_file(tmp_path, choice) if "{" in choice else choice
    with pytest.raises(ConfigError, match=message):
        chat(tmp_path, turns("u:a", "a:b"), name, tok)


def test_end_of_turn_in_pieces_is_trained_and_noted(tmp_path: Path, tok: PreTrainedTokenizerFast) -> None:
    text = THINK.replace("<|im_end|>", "<|stop|>").replace("<think></think>", "")
    files = write(tmp_path / "a.jsonl", [turns("u:a", "a:b")])
    data = load_dataset(files, tok, Cfg(chat_template=template_file(tmp_path, text)), len(tok))
    assert shown(data, 0, tok).endswith(f"{S}assistant\n[[b<|stop|>]]\n")
    assert any("'<|stop|>'" in note and "tokens of this tokenizer" in note for note in data.audit.notes)


def test_special_tokens_written_by_a_user_are_plain_text(tmp_path: Path, tok: PreTrainedTokenizerFast) -> None:
    """Words that spell a special token become none, at the edges of a message too; the mask does not move."""
    question, answer = f"{E}what is {E}{E} or {S}é?", f"an {E}"
    files = write(tmp_path / "a.jsonl", [turns("u:a", "a:b"), turns(f"u:{question}", f"a:{answer}", "u:a", "a:b")])
    data = load_dataset(files, tok, Cfg(chat_template="chatml"), len(tok))
    assert shown(data, 1, tok) == (
        f"{S}user\n{question}{E}\n{S}assistant\n[[{answer}{E}]]\n{S}user\na{E}\n{S}assistant\n[[b{E}]]\n"
    )
    start, end = tok.convert_tokens_to_ids([S, E])
    ids = data[1][0].tolist()
    assert (ids.count(start), ids.count(end)) == (4, 4)
    assert any("1 dialogue(s)" in note and "a.jsonl:2" in note for note in data.audit.notes)


def test_special_token_that_cannot_be_plain_text_is_an_error(tmp_path: Path) -> None:
    """A tokenizer of whole words knows `</s>` as that token alone."""
    tok = word_tokenizer()
    files = write(tmp_path / "a.jsonl", [turns("u:a", "a:b"), turns("u:a </s>", "a:b")])
    with pytest.raises(ConfigError, match=r"a\.jsonl:2: .*knows no other tokens"):
        load_dataset(files, tok, Cfg(chat_template="chatml"), len(tok))
    data = load_dataset(files, tok, Cfg(chat_template="chatml", on_bad="skip"), len(tok))
    assert (len(data), data.audit.num_bad) == (1, 1)


WORDS = st.text("abé日🙂 \n\t'<|>", min_size=1, max_size=12)


@pytest.mark.parametrize("trim", [True, False])
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pairs=st.lists(st.tuples(WORDS, WORDS.filter(lambda w: w.strip() != "")), min_size=1, max_size=3))
def test_trained_text_is_the_answers(
    tmp_path_factory: pytest.TempPathFactory, trim: bool, pairs: list[tuple[str, str]]
) -> None:
    """Letters of several bytes, spaces at the edges, both kinds of offsets: exactly answer and end are trained."""
    tok = BYTES[trim]
    record = turns(*(turn for user, answer in pairs for turn in (f"u:{user}", f"a:{answer}")))
    files = write(tmp_path_factory.mktemp("p") / "a.jsonl", [record])
    data = load_dataset(files, tok, Cfg(chat_template="llama3"), len(tok))
    # An answer begins after two line breaks; a break of its own would be one token with them, but the template trims.
    trained = [text for text, is_trained in marked_pieces(data, 0, tok) if is_trained]
    assert trained == [answer.strip() + Q for _, answer in pairs]


BYTES = {trim: byte_tokenizer(trim) for trim in (True, False)}


# --- plain text -------------------------------------------------------------------------------------------------------


def test_text_has_start_and_end_exactly_once(tmp_path: Path) -> None:
    files = write(tmp_path / "a.jsonl", [{"text": "hi there"}, {"text": "hi</s>"}, {"text": "a</s></s>"}])
    tok = word_tokenizer()
    data = load_dataset(files, tok, Cfg(), len(tok))
    tokens = [tok.convert_ids_to_tokens(data[i][0].tolist()) for i in range(3)]
    assert tokens == [["<s>", "hi", " ", "there", "</s>"], ["<s>", "hi", "</s>"], ["<s>", "a", "</s>"]]
    assert data[0][1].tolist() == [False, True, True, True, True]
    bare = word_tokenizer(with_start=False)
    assert bare.convert_ids_to_tokens(load_dataset(files, bare, Cfg(), len(bare))[1][0].tolist()) == ["hi", "</s>"]


def test_doubled_start_and_missing_end_are_errors(tmp_path: Path) -> None:
    files = write(tmp_path / "a.jsonl", [{"text": "hi"}, {"text": "<s>hi"}])
    tok = word_tokenizer()
    with pytest.raises(ConfigError, match=r"a\.jsonl:2: starts with '<s>' twice"):
        load_dataset(files, tok, Cfg(), len(tok))
    tok.eos_token = None
    with pytest.raises(ConfigError, match="eos_token"):
        load_dataset(files, tok, Cfg(), len(tok))


def test_ids_are_held_against_the_table(tmp_path: Path) -> None:
    tok = word_tokenizer()
    files = write(tmp_path / "a.jsonl", [{"text": "hi"}, {"text": "a e"}])
    highest = tok.convert_tokens_to_ids("e")
    load_dataset(files, tok, Cfg(), highest + 1)
    with pytest.raises(ConfigError, match=rf"a\.jsonl:2: token 3 has the id {highest}, .* has {highest} rows"):
        load_dataset(files, tok, Cfg(on_bad="skip"), highest)


# --- files ------------------------------------------------------------------------------------------------------------


def g16(path: Path) -> list[str]:
    """The file of case G16: 20 lines, 7 of them bad, no line end at the end."""
    good = [json.dumps(turns(f"u:{i}", "a:yes")).encode() for i in range(20)]
    good[3] = good[3][:30]
    good[6] = b""
    good[8] = json.dumps(turns("u:hi", "a:")).encode()
    good[10] = json.dumps({"messages": [{"role": "user", "content": "x"}, {"role": "assistant"}]}).encode()
    good[12] = json.dumps({"messages": []}).encode()
    good[14] = json.dumps({"messages": [{"role": "user", "content": 7}]}).encode()
    good[16] = b"\xef\xbb\xbf" + good[16]
    path.write_bytes(b"\n".join(good))
    return [str(path)]


def test_g16_strict_lists_every_bad_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read_records(g16(tmp_path / "g16.jsonl"), Cfg())
    head, *rows = str(caught.value).splitlines()
    assert "7 bad record(s)" in head and "on_bad = 'skip'" in head
    got = {int(row.split("jsonl:")[1].split(":")[0]): row.split(": ", 1)[1] for row in rows}
    assert list(got) == [4, 7, 9, 11, 13, 15, 17]
    wanted = ["broken JSON at column", "blank line", "content of message 2 is empty", "message 2 has no 'content' key"]
    wanted += ["'messages' is empty", "content of message 1 is a int", "byte-order mark"]
    for reason, part in zip(got.values(), wanted, strict=True):
        assert part in reason


def test_g16_skip_counts(tmp_path: Path, tok: PreTrainedTokenizerFast) -> None:
    data = load_dataset(g16(tmp_path / "g16.jsonl"), tok, Cfg(on_bad="skip", chat_template="chatml"), len(tok))
    assert (data.audit.num_records, data.audit.num_bad, data.audit.num_samples, len(data)) == (20, 7, 13, 13)
    assert data.source(12).endswith("g16.jsonl:20")
    text = "\n".join(data.audit.lines())
    assert "7 bad records skipped" in text and "g16.jsonl:15: the content of message 1" in text


def test_twenty_are_listed_and_all_counted(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("{\n" * 33 + '{"text": "x"}\n')
    with pytest.raises(ConfigError) as caught:
        read_records([str(path)], Cfg())
    lines = str(caught.value).splitlines()
    assert "33 bad" in lines[0] and len(lines) == 22 and lines[-1].strip() == "and 13 more"


def test_what_is_no_fault(tmp_path: Path) -> None:
    """A byte-order mark at the start, Windows line ends, blank lines at the end."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n{"text": "b", "id": 3}\r\n\r\n\n')
    records = read_records([str(path)], Cfg())
    assert [(r.place.number, r.value) for r in records.items] == [(1, "a"), (2, "b")]


def test_cut_off_file_says_where(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    whole = b'{"text": "abc"}\n{"text": "def"}\n'
    path.write_bytes(whole[:27])
    with pytest.raises(ConfigError, match=r"a\.jsonl:2: the file ends in the middle of this record, at byte 27"):
        read_records([str(path)], Cfg())
    path.write_bytes('{"text": "é"}'.encode()[:11])
    with pytest.raises(ConfigError, match=r"a\.jsonl:1: not UTF-8 at byte 10"):
        read_records([str(path)], Cfg())


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "\\ud800"}', "lone surrogate"),
        (b'{"text": "  "}', "'text' is empty"),
        (b'{"text": null}', "'text' is a NoneType"),
        (b"[1]", "a JSON list"),
        (b"[" * 100_000, "JSON that cannot be read"),
        (b'{"text": 1' + b"0" * 5000 + b"}", "JSON that cannot be read"),
        (b'{"other": 1}', "no 'text' key"),
        (b'{"messages": 3}', "no 'text' key"),
    ],
)
def test_hostile_lines(tmp_path: Path, line: bytes, reason: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "fine"}\n' + line + b"\n")
    with pytest.raises(ConfigError, match=reason):
        read_records([str(path)], Cfg())
    assert len(read_records([str(path)], Cfg(on_bad="skip")).bad) == 1


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([{"role": "human", "content": "x"}], "role 'human'"),
        (["x"], "message 1 is a str"),
        ([{"role": "user", "content": ["x"]}], "is a list"),
        ([{"role": "assistant", "content": "x", "tool_calls": [1]}], "tool_calls"),
        ({"role": "user"}, "'messages' is a dict"),
    ],
)
def test_hostile_messages(tmp_path: Path, messages: object, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        read_records(write(tmp_path / "a.jsonl", [{"messages": messages}]), Cfg())


def test_files_and_globs(tmp_path: Path) -> None:
    for name in ("b", "a"):
        write(tmp_path / f"{name}.jsonl", [{"text": name}])
    records = read_records([str(tmp_path / "*.jsonl")], Cfg())
    assert [r.value for r in records.items] == ["a", "b"]
    with pytest.raises(ConfigError, match=r"nothing\*.*matches no file"):
        read_records([str(tmp_path / "nothing*")], Cfg())
    with pytest.raises(ConfigError, match="named twice"):
        read_records([str(tmp_path / "a.jsonl"), str(tmp_path / "*.jsonl")], Cfg())
    with pytest.raises(ConfigError, match=r"names no file"):
        read_records([], Cfg())


def test_each_file_needs_a_record(tmp_path: Path) -> None:
    good = write(tmp_path / "good.jsonl", [{"text": "x"}])
    for content in ("", "\n\n", "{\n"):
        (tmp_path / "bad.jsonl").write_text(content)
        with pytest.raises(ConfigError, match=r"no valid record in .*bad\.jsonl"):
            read_records([*good, str(tmp_path / "bad.jsonl")], Cfg(on_bad="skip"))


def test_forms(tmp_path: Path) -> None:
    """Each file has its own form; what is not built is refused by name, what could be two is asked about."""
    files = write(tmp_path / "t.jsonl", [{"text": "x"}]) + write(tmp_path / "m.jsonl", [turns("u:a", "a:b")])
    assert [type(r.value) for r in read_records(files, Cfg()).items] == [str, Dialogue]
    for record, match in [
        ({"other": 1}, "none of the keys 'messages', 'text'"),
        ({"text": "x", "conversations": []}, "could be sharegpt or text"),
        ({"text": "x", "messages": []}, "say which with data.format"),
    ]:
        with pytest.raises(ConfigError, match=match):
            read_records(write(tmp_path / "x.jsonl", [record]), Cfg())
    assert read_records(write(tmp_path / "x.jsonl", [{"text": "x", "prompt": 1}]), Cfg(format="text")).items
    (tmp_path / "x.csv").write_text("text\n")
    with pytest.raises(ConfigError, match=r"must end in \.jsonl, \.json, \.parquet"):
        read_records([str(tmp_path / "x.csv")], Cfg())


@pytest.mark.parametrize(
    ("cfg", "match"),
    [
        (Cfg(eval_share=1.0), "eval_share"),
        (Cfg(format="share_gpt"), "data.format = 'share_gpt': needed is one of auto, messages, text, sharegpt"),
        (Cfg(on_long="cut"), "drop, cut_left, cut_right, error"),
        (Cfg(max_length=1), "max_length = 1"),
    ],
)
def test_settings_without_a_meaning_are_refused(cfg: Cfg, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        read_records(["does-not-matter.jsonl"], cfg)


# --- lengths and targets ----------------------------------------------------------------------------------------------


def test_on_long(tmp_path: Path) -> None:
    tok = word_tokenizer()
    files = write(tmp_path / "a.jsonl", [{"text": "a"}, {"text": "a b c d"}])  # 3 and 9 tokens
    whole = load_dataset(files, tok, Cfg(max_length=9), len(tok))
    assert whole.audit.lengths == {4: 1, 16: 1} and whole.max_length == 9
    drop = load_dataset(files, tok, Cfg(max_length=8), len(tok))
    assert (len(drop), drop.audit.num_dropped_long) == (1, 1)
    left = load_dataset(files, tok, Cfg(max_length=8, on_long="cut_left"), len(tok))
    right = load_dataset(files, tok, Cfg(max_length=8, on_long="cut_right"), len(tok))
    assert left[1][0].tolist() == whole[1][0][1:].tolist() and right[1][0].tolist() == whole[1][0][:8].tolist()
    assert left.audit.num_cut == right.audit.num_cut == 1 and not left[1][1][0]
    with pytest.raises(ConfigError, match=r"a\.jsonl:2: 9 tokens, data\.max_length is 8"):
        load_dataset(files, tok, Cfg(max_length=8, on_long="error"), len(tok))


def test_g17_samples_without_a_target(tmp_path: Path) -> None:
    """A prompt of 40 words and an answer of 4, cut at several lengths: counted, and an error when all are gone."""
    tok = word_tokenizer()
    files = write(tmp_path / "a.jsonl", [turns("u:" + " ".join("a" * 18), "a:b c")] * 8)
    cfg = {"chat_template": "chatml", "on_long": "cut_right"}
    whole = load_dataset(files, tok, Cfg(**cfg), len(tok))
    length, first = len(whole[0][0]), int(np.flatnonzero(whole[0][1])[0])
    assert whole.audit.num_target_tokens == 8 * 4 and whole.audit.num_tokens == 8 * length
    one = load_dataset(files, tok, Cfg(max_length=first + 1, **cfg), len(tok))
    assert one.audit.num_target_tokens == 8 and one.audit.num_no_target == 0
    with pytest.raises(ConfigError, match=r"no sample is left.*8 have no trained token"):
        load_dataset(files, tok, Cfg(max_length=first, **cfg), len(tok))
    mixed = write(tmp_path / "b.jsonl", [turns("u:a", "a:b"), turns("u:a"), turns("s:a")])
    data = load_dataset(mixed, tok, Cfg(chat_template="chatml"), len(tok))
    assert (len(data), data.audit.num_no_target, data.audit.num_records) == (1, 2, 3)


# --- batches ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ten(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    tok = word_tokenizer()
    files = write(tmp_path_factory.mktemp("ten") / "a.jsonl", [{"text": " ".join("a" * (i + 1))} for i in range(10)])
    return load_dataset(files, tok, Cfg(), len(tok))


def test_padding_is_by_position(ten: Dataset) -> None:
    """The tokenizer has no pad token, so rows are filled with the end token: its own one stays trained and seen."""
    loader = Loader(ten, 4, shuffle=False)
    batch = loader.next_batch()
    assert loader.last_ids == [0, 1, 2, 3]
    assert list(batch) == ["input_ids", "attention_mask", "labels"]
    assert all(v.dtype == torch.int64 and v.shape == (4, 9) for v in batch.values())
    end = word_tokenizer().eos_token_id
    assert batch["input_ids"][0, 2:].tolist() == [end] * 7
    assert batch["attention_mask"][0].tolist() == [1, 1, 1, 0, 0, 0, 0, 0, 0]
    assert batch["labels"][0].tolist() == [-100, batch["input_ids"][0, 1], end] + [-100] * 6


def test_file_order_and_last_batch(ten: Dataset) -> None:
    loader = Loader(ten, 4, shuffle=False)
    assert loader.num_batches_per_epoch == 3
    seen = []
    for _ in range(6):
        rows = len(loader.next_batch()["input_ids"])
        assert rows == len(loader.last_ids)
        seen.append(loader.last_ids)
    assert seen == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]] * 2
    assert [len(b["labels"]) for b in Loader(ten, 4, shuffle=False, num_batches=4)] == [4, 4, 2, 4]


def test_every_epoch_is_another_permutation(ten: Dataset) -> None:
    def order(seed: int, num_epochs: int) -> list[tuple[int, ...]]:
        loader = Loader(ten, 10, seed)
        return [tuple(loader.last_ids) for _ in range(num_epochs) if loader.next_batch()]

    epochs = order(7, 5)
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len(set(epochs)) == 5 and epochs != order(8, 5) and epochs == order(7, 5)
    # The order is part of a checkpoint's meaning: it must be the same in every version.
    assert epochs[0] == (8, 4, 1, 6, 3, 2, 7, 5, 9, 0)
    counts = Counter(epoch[0] for epoch in order(0, 200))
    assert len(counts) == 10 and max(counts.values()) < 50


@pytest.mark.parametrize("batch_size", [3, 10, 16])
def test_resume_at_every_batch(ten: Dataset, batch_size: int) -> None:
    straight = Loader(ten, batch_size, seed=3)
    states, ids, batches = [], [], []
    for _ in range(9):
        states.append(json.loads(json.dumps(straight.state_dict())))
        batches.append(straight.next_batch())
        ids.append(straight.last_ids)
    for k, state in enumerate(states):
        loader = Loader(ten, batch_size, seed=3)
        loader.load_state_dict(state)
        for j in range(k, 9):
            batch = loader.next_batch()
            assert loader.last_ids == ids[j]
            assert all(torch.equal(batch[name], batches[j][name]) for name in batch)


def test_resume_knows_how_many_batches_are_left(ten: Dataset) -> None:
    first = Loader(ten, 4, num_batches=4)
    next(first)
    second = Loader(ten, 4, num_batches=4)
    second.load_state_dict(first.state_dict())
    assert len(list(second)) == 3


def test_resume_with_other_data_is_refused(ten: Dataset, tmp_path: Path) -> None:
    state = Loader(ten, 2, seed=1).state_dict()
    with pytest.raises(ConfigError, match=r"train\.seed changed"):
        Loader(ten, 2, seed=2).load_state_dict(state)
    with pytest.raises(ConfigError, match=r"data\.shuffle changed"):
        Loader(ten, 2, seed=1, shuffle=False).load_state_dict(state)
    tok = word_tokenizer()
    records = [{"text": " ".join("a" * (i + 1))} for i in range(9)] + [{"text": " ".join("a" * 9) + " b"}]
    other = tokenise(read_records(write(tmp_path / "a.jsonl", records), Cfg()), tok, Cfg(), len(tok))
    assert len(other) == len(ten)
    with pytest.raises(ConfigError, match=r"samples of data\.train changed"):
        Loader(other, 2, seed=1).load_state_dict(state)
