"""Broken and empty records in every form and file.  Case G16, kind K16.

Files are real, damage is what happens to files: cut off, glued, badly encoded, a key missing.  Each strict error must
name the place and the reason; skipping must count exactly what it leaves out, and must refuse where it cannot know.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from toys import Cfg, byte_tokenizer, shown
from transformers import PreTrainedTokenizerFast

from offloadz.plan.errors import ConfigError
from offloadz.train.data import load_both, load_dataset, read_records
from offloadz.train.forms import Completion, Dialogue

ASK, ANSWER = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}
SAME = Dialogue([ASK, ANSWER])
GOOD: dict[str, tuple[dict[str, Any], Any]] = {
    "messages": ({"messages": [ASK, ANSWER]}, SAME),
    "sharegpt": ({"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]}, SAME),
    "alpaca": ({"instruction": "hi", "input": "", "output": "yes"}, SAME),
    "prompt_completion": ({"prompt": "hi", "completion": " yes"}, Completion("hi", " yes")),
    "text": ({"text": "hi"}, "hi"),
}
FORMS = tuple(GOOD)
BAD: dict[str, list[tuple[dict[str, Any], str]]] = {
    "messages": [
        ({"messages": [ASK, {"role": "assistant", "content": ""}]}, "the content of message 2 is empty"),
        ({"messages": [ASK, {"role": "assistant"}]}, "message 2 has no 'content' key"),
        ({"messages": []}, "'messages' is empty"),
        ({"messages": [{"role": "user", "content": 7}]}, "the content of message 1 is a int"),
        ({"messages": [ASK, {**ANSWER, "weight": 0}]}, "message 2 has the key 'weight'"),
        ({"messages": [ASK, {**ANSWER, "tool_calls": "f()"}]}, "'tool_calls' of message 2"),
        ({"messages": [ASK, ANSWER], "tools": "f"}, "'tools' is a str"),
    ],
    "sharegpt": [
        (
            {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": " "}]},
            "value of turn 2 is empty",
        ),
        ({"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt"}]}, "turn 2 has no 'value' key"),
        ({"conversations": [{"value": "hi"}]}, "turn 1 has no 'from' key"),
        ({"conversations": []}, "'conversations' is empty"),
        ({"conversations": [{"from": "observation", "value": "x"}]}, "turn 1 is from 'observation'"),
        ({"conversations": [{"from": "human", "value": 7}]}, "the value of turn 1 is a int"),
        ({"conversations": ["hi"]}, "turn 1 is a str"),
    ],
    "alpaca": [
        ({"instruction": "hi", "output": ""}, "'output' is empty"),
        ({"instruction": "hi"}, "no 'output' key"),
        ({"instruction": " ", "input": "", "output": "x"}, "'instruction' is empty"),
        ({"instruction": ["hi"], "output": "x"}, "'instruction' is a list"),
        ({"instruction": "hi", "input": 3, "output": "x"}, "'input' is a int"),
        ({"instruction": "hi", "output": "x", "history": [["a"]]}, "entry 1 of 'history' is no pair"),
    ],
    "prompt_completion": [
        ({"prompt": "hi", "completion": ""}, "'completion' is empty"),
        ({"prompt": "hi", "chosen": "x"}, "no 'completion' key"),
        ({"prompt": None, "completion": "x"}, "'prompt' is a NoneType"),
        ({"prompt": [ASK, ANSWER], "completion": [ANSWER]}, "'prompt' holds answers"),
        ({"prompt": [ASK], "completion": "x"}, "'completion' is a str; needed is a list"),
    ],
    "text": [
        ({"text": ""}, "'text' is empty"),
        ({"other": 1}, "no 'text' key"),
        ({"text": None}, "'text' is a NoneType"),
    ],
}


@pytest.fixture(scope="module")
def tok() -> PreTrainedTokenizerFast:
    return byte_tokenizer()


def dump(path: Path, records: list[Any]) -> list[str]:
    """Records as the file that the name asks for."""
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    elif path.suffix == ".json":
        path.write_text(json.dumps(records, indent=1))
    else:
        pq.write_table(pa.Table.from_pylist(records), path)
    return [str(path)]


def place(suffix: str, number: int) -> str:
    return {"jsonl": f"jsonl:{number}", "json": f"json: item {number}", "parquet": f"parquet: row {number}"}[suffix]


@pytest.mark.parametrize("suffix", ["jsonl", "json", "parquet"])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_in_every_file(tmp_path: Path, form: str, suffix: str) -> None:
    """Found by itself and by name; the same records whatever they are written in."""
    record, value = GOOD[form]
    files = dump(tmp_path / f"a.{suffix}", [record] * 3)
    for cfg in (Cfg(), Cfg(format=form)):
        records = read_records(files, cfg)
        assert [item.value for item in records.items] == [value] * 3
        assert str(records.items[2].place).endswith(place(suffix, 3))


@pytest.mark.parametrize("suffix", ["jsonl", "json"])
@pytest.mark.parametrize("form", FORMS)
def test_bad_records_are_listed_or_counted(tmp_path: Path, form: str, suffix: str) -> None:
    good, _ = GOOD[form]
    bad = [record for record, _ in BAD[form]]
    files = dump(tmp_path / f"a.{suffix}", [good, *bad, good])
    with pytest.raises(ConfigError) as caught:
        read_records(files, Cfg())
    head, *rows = str(caught.value).splitlines()
    assert f"{len(bad)} bad record(s)" in head and len(rows) == len(bad)
    for number, (row, (_, reason)) in enumerate(zip(rows, BAD[form], strict=True), 2):
        assert f"{place(suffix, number)}: " in row and reason in row
    records = read_records(files, Cfg(on_bad="skip"))
    assert (len(records.items), len(records.bad)) == (2, len(bad))


def test_bad_rows_of_parquet(tmp_path: Path) -> None:
    """A column has a value in every row: an absent key is a null, whatever the form."""
    rows = [{"text": "a", "messages": None}, {"text": None, "messages": None}, {"text": " ", "messages": None}]
    table = pa.Table.from_pylist(rows, pa.schema({"text": pa.string(), "messages": pa.null()}))
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match=r"2 bad(?s:.*)row 2: 'text' is a NoneType(?s:.*)row 3: 'text' is empty"):
        read_records([str(tmp_path / "a.parquet")], Cfg())
    assert len(read_records([str(tmp_path / "a.parquet")], Cfg(on_bad="skip")).bad) == 2


def test_parquet_cut_off_or_no_parquet(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    dump(path, [{"text": f"text number {i}"} for i in range(5000)])
    whole = path.read_bytes()
    for damaged in (whole[:-100], whole[: len(whole) // 2], b"PAR1", b"", whole[4:]):
        path.write_bytes(damaged)
        for on_bad in ("stop", "skip"):
            with pytest.raises(ConfigError, match=r"a\.parquet is damaged .* cut off"):
                read_records([str(path)], Cfg(on_bad=on_bad))


def test_array_cut_off_at_every_byte(tmp_path: Path) -> None:
    """The position is the file's end; all whole items are kept when skipping, and one is counted."""
    path = tmp_path / "a.json"
    whole = json.dumps(
        [{"text": 'a"\\é\n'}, {"text": "b", "n": [1, -2.5, True]}], ensure_ascii=False, indent=1
    ).encode()
    first_end, second_end = whole.index(b"},") + 1, whole.rindex(b"}") + 1
    for size in range(first_end, len(whole)):
        path.write_bytes(whole[:size])
        item = 2 if size < second_end else 3
        with pytest.raises(ConfigError, match=rf"a\.json: item {item}: the file ends .* cut off at byte") as caught:
            read_records([str(path)], Cfg())
        told = int(str(caught.value).rsplit("byte ", 1)[1])
        assert size - 1 <= told <= size  # the end may lie inside a letter of two bytes
        records = read_records([str(path)], Cfg(on_bad="skip"))
        assert len(records.items) == item - 1 and len(records.bad) == 1
    for size in range(1, first_end):
        path.write_bytes(whole[:size])
        with pytest.raises(ConfigError, match=r"no valid record|bad record"):
            read_records([str(path)], Cfg())


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b'[{"text": "a"}, {"text": b}, {"text": "c"}]', r"item 2, which begins at byte 16: broken JSON at byte 25"),
        (b'[{"text": "a"} {"text": "b"}]', r"item 1, .*byte 15.*comma or the closing bracket is missing"),
        (b'[{"text": "a"}] [{"text": "b"}]', r"something follows the array, at byte 16"),
        (b'[{"text": "a\xff"}, {"text": "b"}]', r"not UTF-8 at byte 12"),
        (b'[{"text": "a"}, ' + b"[" * 100_000 + b"]" * 100_000 + b"]", r"item 2, .* cannot be read"),
    ],
)
def test_damage_inside_an_array_is_never_skipped(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(content)
    for on_bad in ("stop", "skip"):
        with pytest.raises(ConfigError, match=reason):
            read_records([str(path)], Cfg(on_bad=on_bad))


def test_arrays_that_are_fine(tmp_path: Path) -> None:
    """A byte-order mark, no items' worth of spaces, lines of JSON under the other name, an item that is no object."""
    path = tmp_path / "a.json"
    path.write_bytes(b'\xef\xbb\xbf \n[ {"text": "\xc3\xa9"} , {"text": "b"} ]\n\n')
    assert [r.value for r in read_records([str(path)], Cfg()).items] == ["é", "b"]
    path.write_text('{"text": "a"}\n{"text": "b"}\n')
    assert str(read_records([str(path)], Cfg()).items[1].place) == f"{path}:2"
    path.write_text('[{"text": "a"}, 3]')
    with pytest.raises(ConfigError, match="item 2: a JSON int; needed is an object"):
        read_records([str(path)], Cfg())
    path.write_text('{\n "data": [{"text": "a"}]\n}\n')
    with pytest.raises(ConfigError, match="one object over many lines; needed is an array"):
        read_records([str(path)], Cfg())
    path.write_text("[]")
    with pytest.raises(ConfigError, match="no valid record"):
        read_records([str(path)], Cfg())


def test_names_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=r"'someone/dialogues' is no file here, and as a data set of the hub"):
        read_records(["someone/dialogues"], Cfg())
    with pytest.raises(ConfigError, match="mend the name"):
        read_records(["data/a.jsonl"], Cfg())
    (tmp_path / "a.jsonl.gz").write_bytes(b"\x1f\x8b")
    with pytest.raises(ConfigError, match=r"must end in \.jsonl, \.json, \.parquet"):
        read_records([str(tmp_path / "*.gz")], Cfg())


def test_what_each_form_becomes(tmp_path: Path, tok: PreTrainedTokenizerFast) -> None:
    """System texts, inputs, histories and speakers end in their places of the template."""
    turns = [{"from": "system", "value": "be"}, {"from": "user", "value": "a"}, {"from": "assistant", "value": "b"}]
    records = {
        "s": ({"conversations": turns}, "system:be user:a assistant:[[b"),
        "t": ({"conversations": turns[1:], "system": "be"}, "system:be user:a assistant:[[b"),
        "u": ({"instruction": "a", "input": "c", "output": "b"}, "user:a\n\nc assistant:[[b"),
        "v": (
            {"instruction": "a", "output": "b", "system": "be", "history": [["c", "d"]]},
            "system:be user:c assistant:[[d]] user:a assistant:[[b",
        ),
        "w": ({"prompt": [ASK], "completion": [ANSWER]}, "user:hi assistant:[[yes"),
    }
    for name, (record, expected) in records.items():
        files = dump(tmp_path / f"{name}.jsonl", [record])
        got = shown(load_dataset(files, tok, Cfg(chat_template="chatml"), len(tok)), 0, tok)
        bare = got.replace("<|im_start|>", "").replace("<|im_end|>]]", "]]").replace("<|im_end|>", "")
        for role in ("system", "user", "assistant"):
            bare = bare.replace(f"{role}\n", f"{role}:")
        assert bare.replace("\n\n", "\r").replace("\n", " ").replace("\r", "\n\n").startswith(expected), name


def test_no_template_offers_the_built_in_ones(tmp_path: Path, tok: PreTrainedTokenizerFast) -> None:
    for form in ("messages", "sharegpt", "alpaca"):
        files = dump(tmp_path / "a.jsonl", [GOOD[form][0]])
        with pytest.raises(
            ConfigError, match=r"has none; set data\.chat_template .* chatml \| llama3 \| gemma \| mistral"
        ):
            load_dataset(files, tok, Cfg(), len(tok))


def test_held_out_samples_are_not_trained_on(tmp_path: Path, tok: PreTrainedTokenizerFast) -> None:
    files = dump(tmp_path / "a.jsonl", [{"text": f"text {i}"} for i in range(20)])

    def both(seed: int, share: float = 0.25) -> tuple[set[str], set[str]]:
        train, other = load_both(files, [], tok, Cfg(eval_share=share, packing=True), len(tok), 4, seed)
        assert other is not None and train.audit.num_held_out == other.audit.num_samples == len(other)
        assert train.audit.num_tokens == sum(len(train[i][0]) for i in range(len(train)))
        assert "packed into" in train.audit.packed and other.row_length == train.row_length
        return {train.source(i) for i in range(len(train))}, {other.source(i) for i in range(len(other))}

    train, other = both(0)
    assert (len(train), len(other)) == (15, 5) and not train & other
    assert both(0) == (train, other) and both(1)[1] != other
    with pytest.raises(ConfigError, match="leaves none to train on"):
        both(0, share=0.99)
