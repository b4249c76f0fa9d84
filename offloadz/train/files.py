"""Files of records: JSON lines, a JSON array, Parquet; each object with its place, or the reason why there is none.

What is in an object is `forms.py`'s, what is done about bad ones `records.py`'s.  A place is what a person needs to
find the record again: a line, the number of an item and the byte where it begins, a row.

Its one trade-off: a JSON array is held in memory as text while it is read, because its items have no other borders than
those the parser finds; JSON lines and Parquet are read piece by piece.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from offloadz.plan.errors import ConfigError
from offloadz.train.forms import RecordError

_MARK = b"\xef\xbb\xbf"
_ROWS_PER_READ = 1024


class Place(NamedTuple):
    """Where a record is: its line, or the number of its item or row, from 1."""

    file: str
    number: int
    unit: str = "line"

    def __str__(self) -> str:
        return f"{self.file}:{self.number}" if self.unit == "line" else f"{self.file}: {self.unit} {self.number}"


Found = tuple[Place, dict[str, Any] | RecordError]


def read_objects(file: str) -> Iterator[Found]:
    """Every object of a file, in order, or why there is none in its place.

    ConfigError for a file that cannot be opened, and for damage behind which nothing can be found again.
    """
    try:
        if file.endswith(".parquet"):
            yield from _parquet(file)
        elif file.endswith(".json") and _begins_with(file, b"["):
            yield from _array(file)
        elif file.endswith(".json") and _begins_with(file, b"{\n", b"{\r\n"):
            raise ConfigError(f"data: {file} is one object over many lines; needed is an array of records")
        else:
            yield from _lines(file)
    except OSError as error:
        raise ConfigError(f"data: {file} cannot be read: {error.strerror or error}") from error


def _begins_with(file: str, *what: bytes) -> bool:
    with open(file, "rb") as source:
        head = source.read(4096).removeprefix(_MARK).lstrip()
    return head.startswith(what)


# --- JSON lines -------------------------------------------------------------------------------------------------------


def _lines(file: str) -> Iterator[Found]:
    num_blank = 0
    for line, start_byte, raw in _raw_lines(file):
        body = raw.strip()
        if not body:
            num_blank += 1
            continue
        # Blank lines are bad only when something follows: at the end of a file they are a habit of editors.
        for back in range(num_blank, 0, -1):
            yield Place(file, line - back), RecordError("blank line")
        num_blank = 0
        try:
            yield Place(file, line), _parse(body, start_byte, cut_off=not raw.endswith(b"\n"))
        except RecordError as error:
            yield Place(file, line), error


def _raw_lines(file: str) -> Iterator[tuple[int, int, bytes]]:
    """(line number from 1, byte where it starts, bytes with the line end) of a file without its byte-order mark."""
    at = 0
    with open(file, "rb") as source:
        for line, raw in enumerate(source, 1):
            start, at = at, at + len(raw)
            yield line, start, raw.removeprefix(_MARK) if line == 1 else raw


def _parse(body: bytes, start_byte: int, cut_off: bool) -> dict[str, Any]:
    if body.startswith(_MARK):
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
    return _object(record)


def _object(record: Any) -> dict[str, Any]:
    if not isinstance(record, dict):
        raise RecordError(f"a JSON {type(record).__name__}; needed is an object")
    return record


# --- a JSON array -----------------------------------------------------------------------------------------------------

_WHITE = " \t\n\r"


def _array(file: str) -> Iterator[Found]:
    """Items one by one.  An array that ends too early loses its last item; behind damage inside nothing is found."""
    text = _text_of(file)
    at, number = _skip(text, text.index("[") + 1), 0
    decoder = json.JSONDecoder()
    while True:
        number += 1
        if at >= len(text):
            yield Place(file, number, "item"), _cut_off(text, at, number, "before the closing bracket")
            return
        if text[at] == "]":
            break
        try:
            record, end = decoder.raw_decode(text, at)
        except (json.JSONDecodeError, RecursionError, ValueError) as error:
            if not _reached_the_end(error, text):
                raise ConfigError(_broken(file, text, at, number, error)) from error
            yield Place(file, number, "item"), _cut_off(text, at, number, "in the middle of this item")
            return
        try:
            yield Place(file, number, "item"), _object(record)
        except RecordError as error:
            yield Place(file, number, "item"), error
        end = _skip(text, end)
        if end < len(text) and text[end] not in ",]":
            wrong = json.JSONDecodeError("a comma or the closing bracket is missing", text, end)
            raise ConfigError(_broken(file, text, at, number, wrong))
        at = _skip(text, end + 1) if text[end : end + 1] == "," else end
    rest = _skip(text, at + 1)
    if rest < len(text):
        raise ConfigError(f"data: {file}: something follows the array, at byte {_byte(text, rest)}; take it out")


def _text_of(file: str) -> str:
    with open(file, "rb") as source:
        raw = source.read()
    mark = len(_MARK) if raw.startswith(_MARK) else 0
    try:
        return " " * mark + raw[mark:].decode("utf-8")  # blanks keep byte positions right
    except UnicodeDecodeError as error:
        if error.reason == "unexpected end of data":
            return " " * mark + raw[mark : mark + error.start].decode("utf-8")  # cut off inside a letter
        raise ConfigError(f"data: {file} is not UTF-8 at byte {mark + error.start}; save it as UTF-8") from error


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at] in _WHITE:
        at += 1
    return at


def _byte(text: str, at: int) -> int:
    return len(text[:at].encode("utf-8"))


def _reached_the_end(error: Exception, text: str) -> bool:
    """Whether the parser failed because the text ends: a string without its end, or a fault at the very end."""
    if not isinstance(error, json.JSONDecodeError):
        return False
    return error.msg.startswith("Unterminated string") or len(text.rstrip()) - error.pos < len("\\uXXXX")


def _cut_off(text: str, at: int, number: int, where: str) -> RecordError:
    begins = f", which begins at byte {_byte(text, at)}" if "middle" in where else f" {number}"
    return RecordError(f"the file ends {where}{begins}: it is cut off at byte {_byte(text, len(text))}")


def _broken(file: str, text: str, at: int, number: int, error: Exception) -> str:
    begins = _byte(text, at)
    if isinstance(error, json.JSONDecodeError):
        told = f"broken JSON at byte {_byte(text, error.pos)}, line {error.lineno} ({error.msg})"
    else:
        told = f"JSON that cannot be read ({type(error).__name__}: {str(error)[:80]})"
    return (
        f"data: {file}: item {number}, which begins at byte {begins}: {told}. No item behind it can be found, so it "
        "cannot be skipped; mend it, or write one object a line in a .jsonl file"
    )


# --- Parquet ----------------------------------------------------------------------------------------------------------


def _parquet(file: str) -> Iterator[Found]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        with pq.ParquetFile(file) as source:
            for batch in source.iter_batches(_ROWS_PER_READ, use_threads=False):
                for row in batch.to_pylist():
                    number += 1
                    yield Place(file, number, "row"), row
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        if isinstance(error, FileNotFoundError | PermissionError):
            raise
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        where = f"behind row {number}" if number else "at its start or end"
        raise ConfigError(
            f"data: {file} is damaged {where}, so it cannot be read ({first}); it may be cut off: fetch it again"
        ) from error
