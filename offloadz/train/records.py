"""Reading records: files and globs to good records and bad ones, with file, line and reason of each.

All records are read before anything else starts.  In strict mode one error lists every bad one; when skipping they are
counted, never lost.  How files are taken apart is `files.py`'s, what a record says `forms.py`'s, what it becomes
(tokens, samples, batches) is left to `tokens.py` and `data.py`.

Its one trade-off: every record is held as Python objects until it is tokenised (about twice the size of the files),
which buys that a broken line is known before a model is loaded, not after an hour.
"""

from __future__ import annotations

import glob
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from offloadz.config.sections import ENDINGS
from offloadz.plan.errors import ConfigError
from offloadz.train.files import Place, read_objects
from offloadz.train.forms import FORMS, RecordError, SeveralForms, Value, form_of, value_of
from offloadz.train.hub import hub_files, hub_name

NUM_BAD_SHOWN = 20
_CHOICES = {
    "format": ("auto", *FORMS),
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
    """One good record: what it says and where it stands."""

    place: Place
    value: Value


@dataclass(frozen=True)
class BadRecord:
    """One that cannot be trained on, and why."""

    place: Place
    reason: str


@dataclass
class Records:
    """All records of the files, in file order, and the bad ones (only with `on_bad = "skip"`)."""

    items: list[Record]
    bad: list[BadRecord]
    files: list[str]


def check_settings(cfg: DataSettings) -> None:
    """Refuse values of `[data]` that mean nothing (`ConfigError`), before a file is opened."""
    for name, choices in _CHOICES.items():
        if getattr(cfg, name) not in choices:
            raise ConfigError(f"data.{name} = {getattr(cfg, name)!r}: needed is one of {', '.join(choices)}")
    if cfg.max_length < 2:
        raise ConfigError(f"data.max_length = {cfg.max_length}: at least 2 tokens are needed, one to predict the other")
    if not 0 <= cfg.eval_share < 1:
        raise ConfigError(f"data.eval_share = {cfg.eval_share}: needed is a share of at least 0 and below 1")


def find_files(patterns: Sequence[str]) -> list[str]:
    """The files that names, globs and hub names mean, in the order given, globs sorted; each there, and only once."""
    files: list[str] = []
    for pattern in patterns:
        for file in _files_of(pattern):
            if file in files:
                raise ConfigError(f"data: {file} is named twice (again by {pattern!r}); name it once")
            if not file.endswith(ENDINGS):
                raise ConfigError(f"data: {file}: its name must end in {', '.join(ENDINGS)}; others are not built")
            files.append(file)
    if not files:
        raise ConfigError(f"data.train names no file; name at least one ({', '.join(ENDINGS)})")
    return files


def _files_of(pattern: str) -> list[str]:
    name = str(Path(pattern).expanduser())
    if Path(name).is_file():
        return [name]
    found = sorted(f for f in glob.glob(name, recursive=True) if Path(f).is_file())
    if found:
        return found
    on_hub = hub_name(pattern)
    if on_hub is None:
        raise ConfigError(f"data: {pattern!r} matches no file; mend the name in data.train or data.eval")
    return hub_files(on_hub)


def read_records(patterns: Sequence[str], cfg: DataSettings) -> Records:
    """Read all records of all files.

    With `on_bad = "stop"` one `ConfigError` lists place and reason of every bad one (the first 20 and the count);
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


def stop_on_bad(bad: Sequence[BadRecord], cfg: DataSettings) -> None:
    """In strict mode, one `ConfigError` for all bad records."""
    if bad and cfg.on_bad == "stop":
        raise ConfigError(
            f"data: {len(bad)} bad record(s); mend them, or write on_bad = 'skip' under [data] to train without them"
            + listing(bad)
        )


def listing(bad: Sequence[BadRecord]) -> str:
    """The first 20 bad records, one a row, and how many more there are."""
    rows = [f"\n  {item.place}: {item.reason}" for item in bad[:NUM_BAD_SHOWN]]
    more = len(bad) - NUM_BAD_SHOWN
    return "".join(rows) + (f"\n  and {more} more" if more > 0 else "")


def _read_file(file: str, form: str, records: Records) -> None:
    """Append the good and bad records of one file; form "auto" is settled by the first record that shows one."""
    for place, found in read_objects(file):
        try:
            if isinstance(found, RecordError):
                raise found
            if form == "auto":
                form = form_of(found)
            records.items.append(Record(place, value_of(found, form)))
        except SeveralForms as error:
            raise ConfigError(f"data: {place} {error}") from error
        except RecordError as error:
            records.bad.append(BadRecord(place, str(error)))
