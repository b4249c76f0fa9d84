"""Reading records: files and globs to good lines and bad lines, with file, line and reason of each.

All lines are read before anything else starts.  In strict mode one error lists every bad line; when skipping they are
counted, never lost.  What a record becomes (tokens, samples, batches) is left to `tokens.py` and `data.py`.

Its one trade-off: every record is held as Python objects until it is tokenised (about twice the size of the files),
which buys that a broken line is known before a model is loaded, not after an hour.
"""

from __future__ import annotations

import glob
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from offloadz.plan.errors import ConfigError
from offloadz.train.tokens import Message, RecordError

NUM_BAD_SHOWN = 20
_ROLES = ("system", "developer", "user", "assistant", "tool")
# The key by which a record shows its form; the value names the form.
_FORM_OF_KEY = {
    "messages": "messages",
    "text": "text",
    "conversations": "sharegpt",
    "instruction": "alpaca",
    "prompt": "prompt_completion",
}
_BUILT_FORMS = ("messages", "text")
_CHOICES = {
    "format": ("auto", *_BUILT_FORMS),
    "on_bad": ("stop", "skip"),
    "on_long": ("drop", "cut_left", "cut_right", "error"),
    "train_on": ("assistant", "last", "all"),
}


class DataSettings(Protocol):
    """The fields of `[data]` that this room reads."""

    @property
    def format(self) -> str: ...
    @property
    def max_length(self) -> int: ...
    @property
    def on_long(self) -> str: ...
    @property
    def on_bad(self) -> str: ...
    @property
    def packing(self) -> bool: ...
    @property
    def eval_share(self) -> float: ...
    @property
    def train_on(self) -> str: ...
    @property
    def chat_template(self) -> str: ...


@dataclass(frozen=True)
class Record:
    """One good line: a text, or a list of messages with `role` and `content`."""

    file: str
    line: int
    value: str | list[Message]


@dataclass(frozen=True)
class BadLine:
    """One line that is no record, and why."""

    file: str
    line: int
    reason: str


@dataclass
class Records:
    """All records of the files, in file order, and the lines that are none (only with `on_bad = "skip"`)."""

    items: list[Record]
    bad: list[BadLine]
    files: list[str]


def check_settings(cfg: DataSettings) -> None:
    """Refuse what `[data]` asks for and this room does not do (`ConfigError`), before a file is opened."""
    if cfg.packing:
        raise ConfigError("data.packing = true is not built yet; write packing = false under [data]")
    if cfg.eval_share:
        raise ConfigError(f"data.eval_share = {cfg.eval_share} is not built yet; name files in data.eval, or write 0.0")
    if cfg.format in set(_FORM_OF_KEY.values()) - set(_BUILT_FORMS):
        raise ConfigError(f"data.format = {cfg.format!r} is not built yet; use 'messages' or 'text'")
    for name, choices in _CHOICES.items():
        if getattr(cfg, name) not in choices:
            raise ConfigError(f"data.{name} = {getattr(cfg, name)!r}: needed is one of {', '.join(choices)}")
    if cfg.max_length < 2:
        raise ConfigError(f"data.max_length = {cfg.max_length}: at least 2 tokens are needed, one to predict the other")


def find_files(patterns: Sequence[str]) -> list[str]:
    """The files that names and globs mean, in the order given, globs sorted; each must be there, and only once."""
    files: list[str] = []
    for pattern in patterns:
        name = str(Path(pattern).expanduser())
        found = (
            [name] if Path(name).is_file() else sorted(f for f in glob.glob(name, recursive=True) if Path(f).is_file())
        )
        if not found:
            raise ConfigError(f"data: {pattern!r} matches no file; mend the name in data.train or data.eval")
        for file in found:
            if file in files:
                raise ConfigError(f"data: {file} is named twice (again by {pattern!r}); name it once")
            if not file.endswith(".jsonl"):
                raise ConfigError(f"data: {file}: only .jsonl files are built yet; write one JSON object a line")
            files.append(file)
    if not files:
        raise ConfigError("data.train names no file; name at least one .jsonl file")
    return files


def read_records(patterns: Sequence[str], cfg: DataSettings) -> Records:
    """Read all lines of all files.

    With `on_bad = "stop"` one `ConfigError` lists file, line and reason of every bad line (the first 20 and the count);
    with "skip" they are counted.  A file without any good record is an error in both.
    """
    check_settings(cfg)
    records = Records([], [], find_files(patterns))
    barren = []
    for file in records.files:
        before = len(records.items)
        _read_file(file, cfg.format, records)
        if len(records.items) == before:
            barren.append(file)
    if barren and (cfg.on_bad == "skip" or not records.bad):
        raise ConfigError(f"data: no valid record in {', '.join(barren)}" + listing(records.bad))
    stop_on_bad(records.bad, cfg)
    return records


def stop_on_bad(bad: Sequence[BadLine], cfg: DataSettings) -> None:
    """In strict mode, one `ConfigError` for all bad lines."""
    if bad and cfg.on_bad == "stop":
        raise ConfigError(
            f"data: {len(bad)} bad line(s); mend them, or write on_bad = 'skip' under [data] to train without them"
            + listing(bad)
        )


def listing(bad: Sequence[BadLine]) -> str:
    """The first 20 bad lines, one a row, and how many more there are."""
    rows = [f"\n  {item.file}:{item.line}: {item.reason}" for item in bad[:NUM_BAD_SHOWN]]
    more = len(bad) - NUM_BAD_SHOWN
    return "".join(rows) + (f"\n  and {more} more" if more > 0 else "")


def _read_file(file: str, form: str, records: Records) -> None:
    """Append the good and bad lines of one file; form "auto" is settled by the first line that shows one."""
    num_blank = 0
    for line, start_byte, raw in _raw_lines(file):
        body = raw.strip()
        if not body:
            num_blank += 1
            continue
        # Blank lines are bad only when something follows: at the end of a file they are a habit of editors.
        records.bad += [BadLine(file, line - k, "blank line") for k in range(num_blank, 0, -1)]
        num_blank = 0
        try:
            record = _parse(body, start_byte, cut_off=not raw.endswith(b"\n"))
            if form == "auto":
                form = _form_of(record, file, line)
            records.items.append(Record(file, line, _text(record) if form == "text" else _messages(record)))
        except RecordError as error:
            records.bad.append(BadLine(file, line, str(error)))


def _raw_lines(file: str) -> Iterator[tuple[int, int, bytes]]:
    """(line number from 1, byte where it starts, bytes with the line end) of a file without its byte-order mark."""
    at = 0
    try:
        with open(file, "rb") as source:
            for line, raw in enumerate(source, 1):
                start, at = at, at + len(raw)
                yield line, start, raw.removeprefix(b"\xef\xbb\xbf") if line == 1 else raw
    except OSError as error:
        raise ConfigError(f"data: {file} cannot be read: {error.strerror}") from error


def _parse(body: bytes, start_byte: int, cut_off: bool) -> dict[str, Any]:
    if body.startswith(b"\xef\xbb\xbf"):
        raise RecordError("a byte-order mark inside the file (two files glued together?); remove it")
    try:
        record = json.loads(body.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise RecordError(f"not UTF-8 at byte {start_byte + error.start} of the file") from error
    except json.JSONDecodeError as error:
        if cut_off:
            end = start_byte + len(body)
            raise RecordError(f"the file ends in the middle of this record, at byte {end} ({error.msg})") from error
        raise RecordError(f"broken JSON at column {error.pos + 1} ({error.msg})") from error
    except (RecursionError, ValueError) as error:
        raise RecordError(f"JSON that cannot be read ({type(error).__name__}: {str(error)[:80]})") from error
    if not isinstance(record, dict):
        raise RecordError(f"a JSON {type(record).__name__}; needed is an object")
    return record


def _form_of(record: dict[str, Any], file: str, line: int) -> str:
    shown = sorted({form for key, form in _FORM_OF_KEY.items() if key in record})
    if not shown:
        raise RecordError("neither a 'messages' nor a 'text' key")
    if len(shown) > 1:
        raise ConfigError(f"data: {file}:{line} could be {' or '.join(shown)}; say which with data.format")
    if shown[0] not in _BUILT_FORMS:
        raise ConfigError(
            f"data: {file}:{line} is in the {shown[0]!r} form, which is not built yet; use 'messages' or 'text'"
        )
    return shown[0]


def _text(record: dict[str, Any]) -> str:
    if "text" not in record:
        raise RecordError("no 'text' key")
    return _checked(record["text"], "'text'", may_be_empty=False)


def _messages(record: dict[str, Any]) -> list[Message]:
    if "messages" not in record:
        raise RecordError("no 'messages' key")
    if record.get("tools"):
        raise RecordError("'tools' are not built yet")
    messages = record["messages"]
    if not isinstance(messages, list):
        raise RecordError(f"'messages' is a {type(messages).__name__}; needed is a list")
    if not messages:
        raise RecordError("'messages' is empty")
    return [_message(message, number) for number, message in enumerate(messages, 1)]


def _message(message: Any, number: int) -> Message:
    if not isinstance(message, dict):
        raise RecordError(f"message {number} is a {type(message).__name__}; needed is an object")
    for key in ("role", "content"):
        if key not in message:
            raise RecordError(f"message {number} has no {key!r} key")
    role = message["role"]
    if role not in _ROLES:
        raise RecordError(f"message {number} has the role {role!r}; needed is one of {', '.join(_ROLES)}")
    if message.get("tool_calls"):
        raise RecordError(f"message {number} has 'tool_calls', which are not built yet")
    content = _checked(message["content"], f"the content of message {number}", may_be_empty=role != "assistant")
    return {"role": role, "content": content}


def _checked(value: Any, name: str, may_be_empty: bool) -> str:
    if not isinstance(value, str):
        raise RecordError(f"{name} is a {type(value).__name__}; needed is a string")
    if not may_be_empty and not value.strip():
        raise RecordError(f"{name} is empty")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RecordError(f"{name} holds half a character (a lone surrogate) at {error.start}") from error
    return value
