"""The run directory at the start of a run: is it free, which checkpoint to go on from, is there anything left to do.

Nothing is written here but the directory itself.  What a checkpoint holds is `model/state.py`'s, which ones are kept
`checkpoint.py`'s.  The trade-off: a run directory is held by a lock on the directory, which dies with the process
whatever ends it; where a network file system locks no directories, two runs in one output are not noticed.
"""

from __future__ import annotations

import fcntl
import json
import os
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from offloadz.config import config_differences, config_from_tables
from offloadz.model.aside import write_text
from offloadz.model.manifest import read_manifest, verify
from offloadz.plan.errors import ConfigError
from offloadz.train.checkpoint import newest_valid

if TYPE_CHECKING:
    from offloadz.config import Config

FINISHED = "finished.json"
"""Written behind the export: says for which step `final/` was made."""


def find_start(config: Config, output: Path, say: Callable[[str], None]) -> Path | None:
    """The checkpoint to go on from, every byte of it checked; ConfigError where the configuration is another."""
    chosen, found = config.train.resume, output / "checkpoints"
    if chosen == "never":
        if any(found.glob("step-*")):
            say(f"resume: never; checkpoints in {found} stay until {config.train.keep} new ones replace them")
        return None
    if chosen == "auto":
        start, rejected = newest_valid(found)
        for path, reason in rejected:
            say(f"resume: {path} is left out: {reason}")
    else:
        start = Path(chosen)
        if not start.is_dir():
            raise ConfigError(f'train.resume = "{chosen}" is no directory; needed: auto, never or a checkpoint')
        verify(start, read_manifest(start))
    if start is not None:
        _require_same(config, start, say)
    elif any(found.glob("step-*")):
        raise ConfigError(
            f'no checkpoint in {found} is valid; set train.resume = "never" to begin again, or another train.output'
        )
    return start


def _require_same(config: Config, start: Path, say: Callable[[str], None]) -> None:
    extra = read_manifest(start)["extra"]
    if "config" not in extra or "loader" not in extra:
        raise ConfigError(f"{start} was not written by `offloadz train`; it holds no place in the data to go on from")
    old = config_from_tables(tomllib.loads(extra["config"]))
    found = config_differences(old, config)
    if found:
        raise ConfigError(
            f"the configuration differs from that of {start}:\n  "
            + "\n  ".join(found)
            + "\nput these back, name those "
            'that may differ in train.resume_with, or begin again with train.resume = "never" or another train.output'
        )
    allowed = [
        line
        for line in config_differences(old, config, every_key=True)
        if line.partition(":")[0] in config.train.resume_with
    ]
    for line in allowed:
        say(f"resume: {line} (allowed by train.resume_with)")


def is_finished(output: Path, start: Path, num_steps: int) -> bool:
    """Whether the checkpoint is the last one and its export is there."""
    if int(read_manifest(start)["step"]) < num_steps or not (output / "final").is_dir():
        return False
    try:
        return int(json.loads((output / FINISHED).read_text())["step"]) == num_steps
    except (OSError, ValueError, KeyError, TypeError):
        return False


@contextmanager
def alone(output: Path) -> Iterator[None]:
    """The run directory, made if need be, under a lock that dies with this process; gone if nothing came into it."""
    was_there = output.exists()
    try:
        output.mkdir(parents=True, exist_ok=True)
        lock = os.open(output, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(f"train.output = {output}: {error.strerror}; name a directory you may write") from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"train.output = {output} is in use by another run; end it or choose another") from None
        except OSError:  # some network file systems lock no directories
            pass
        yield
    finally:
        os.close(lock)
        if not was_there and not any(output.iterdir()):
            output.rmdir()


def mark_finished(output: Path, num_steps: int) -> None:
    """Say that `final/` is whole and of this step."""
    write_text(output / FINISHED, json.dumps({"step": num_steps}) + "\n")
