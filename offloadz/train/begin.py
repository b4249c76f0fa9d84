"""The run directory at the start of a run: is it free, which checkpoint to go on from, is there anything left to do.

The later of two is gone on from: the newest checkpoint that is whole, or the state that the last flip of a killed run
left in the swap path.  What either holds is `model/state.py`'s and `flips.py`'s, which ones are kept `checkpoint.py`'s.
The trade-off: a run directory is held by a lock on the directory, which dies with the process whatever ends it; where
a network file system locks no directories, two runs in one output are not noticed.
"""

from __future__ import annotations

import fcntl
import json
import os
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offloadz.config import config_differences, config_from_tables
from offloadz.memory.record import FLIP_FILE, Saved, home_of, make_directories, read_saved
from offloadz.memory.swapdir import STATE, leftovers, remove
from offloadz.model.aside import clean_leftovers, write_text
from offloadz.model.flips import told_of
from offloadz.model.manifest import read_manifest, verify
from offloadz.model.together import by_first
from offloadz.plan.cut import Cut
from offloadz.plan.errors import CannotGoOn, ConfigError, DamagedState
from offloadz.plan.paths import directory_of, owner_name
from offloadz.runtime.ranks import Solo
from offloadz.train.checkpoint import from_flip, newest_order, newest_valid

if TYPE_CHECKING:
    from offloadz.config import Config

FINISHED = "finished.json"
"""Written behind the export: says for which step `final/` was made."""


@dataclass(frozen=True)
class Start:
    """Where a run goes on: a checkpoint, or the state that a dead run's last flip left on disk."""

    path: Path
    step: int
    flip: Saved | None = None
    linked: bool = False
    """Whether the path holds files that a run may take over instead of copying them."""
    cut: Cut | None = None
    """How its plan had cut the batch."""

    @property
    def num_ranks(self) -> int:
        """Of how many ranks the state on disk is."""
        return len(set(self.flip.ranks)) if self.flip else 1

    def __str__(self) -> str:
        return f"the state on disk in {self.path}" if self.flip else str(self.path)


def find_start(config: Config, output: Path, say: Callable[[str], None]) -> Start | None:
    """What to go on from: the newest checkpoint, every byte of it checked, or newer state in the swap path.

    Raises ConfigError where the configuration is another.
    """
    if config.train.resume == "auto":
        clean_leftovers(output / "checkpoints", "step-*")
        start = flipped_start(config, output, say)
        if start is not None:
            return start
    start = checkpoint_start(config, output, say)
    for line in moved_lines(config, start.step if start else 0) if config.train.resume == "auto" else ():
        say(f"resume: {line}")
    return start


def start_for_all(config: Config, output: Path, say: Callable[[str], None], ranks: Solo) -> Start | None:
    """`find_start` by rank 0 for all.  State of several ranks is not taken over as it lies, nor any by several: it is
    made a checkpoint, by links, and read."""
    found: list[Start | None] = []

    def look() -> None:
        start = find_start(config, output, say)
        if start is not None and start.linked and max(ranks.size, start.num_ranks) > 1:
            start = instead_of(start, "it is of several ranks or for several", config, config.train.keep or 2, say)
        found.append(start)

    by_first(ranks, look)
    told = ranks.first(
        [str(found[0].path), found[0].step, found[0].cut and asdict(found[0].cut)] if found and found[0] else None
    )
    return found[0] if found else Start(Path(told[0]), told[1], cut=Cut.read(told[2], told[0])) if told else None


def forget_ranks(config: Config, output: Path) -> None:
    """Remove what dead ranks of this output left in the swap paths; what rank 0 left its next run takes over."""
    for swap in config.offload.swap:
        for left in leftovers(swap) if Path(swap).is_dir() else ():
            if left.owner.startswith(f"{owner_name(output)}/rank-"):
                remove(left)


def moved_lines(config: Config, step: int) -> Iterator[str]:
    """A line for newer state of such a run whose output is not where it was: it may be this one, moved after a kill."""
    for left in chain.from_iterable(leftovers(swap) for swap in config.offload.swap if Path(swap).is_dir()):
        if not (left.path / STATE / FLIP_FILE).exists() or Path(left.owner).exists():
            continue
        try:
            note = read_saved(left.path / STATE).record.note
            old = config_from_tables(tomllib.loads(note["extra"]["config"]))
        except (DamagedState, OSError, KeyError, TypeError, ValueError):
            continue
        if note["step"] > step and not config_differences(old, config):
            yield (
                f"{left.path} holds the state of step {note['step']} of such a run in {left.owner}, which is not there "
                "any more; if that is this run, end it, move its directory back and start it there to lose no step"
            )


def flipped_start(config: Config, output: Path, say: Callable[[str], None]) -> Start | None:
    """The flipped state of this output in a swap path, if it is whole, of this configuration and the newest."""
    places = [home_of(directory_of(swap, owner_name(output)) / STATE) for swap in config.offload.swap]
    for place in dict.fromkeys(places):
        if not (place / FLIP_FILE).exists():
            continue
        try:
            saved = read_saved(place)
            told = told_of(saved)
            step, order = int(told["step"]), int(told["extra"]["order"])
        except (DamagedState, OSError, KeyError, TypeError, ValueError) as error:
            say(f"resume: the state on disk in {place} is left out: {error}")
            continue
        newest = newest_order(output / "checkpoints")
        if newest > order + 1 or (newest == order + 1 and not _is_of_step(output / "checkpoints", newest, step)):
            continue  # a later run went on without it
        if saved.absent and newest > order:  # of this very step: what another rank took with it was secured there
            say(f"resume: the state on disk in {place}, step {step}, is left out: a checkpoint holds all of it")
            continue
        if saved.absent:
            raise ConfigError(
                f"the state on disk in {place}, step {step}, has a share in {saved.absent[0]}, which is not there; "
                'mount that drive, or set train.resume = "never" (or a checkpoint) to go on without it'
            )
        try:
            _require_same(config, place, told["extra"], say)
        except ConfigError as error:
            if not newest:
                raise
            say(f"resume: the state on disk in {place}, step {step}, is left out: {error}")
            continue
        return Start(place, step, saved, linked=True, cut=Cut.read(told["extra"].get("plan"), place))
    return None


def checkpoint_start(config: Config, output: Path, say: Callable[[str], None]) -> Start | None:
    """The checkpoint to go on from, every byte of it checked; ConfigError where the configuration is another."""
    chosen, found = config.train.resume, output / "checkpoints"
    if chosen == "never":
        if any(found.glob("step-*")):
            say(f"resume: never; checkpoints in {found} stay until new ones replace them")
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
        told = read_manifest(start)
        _require_same(config, start, told["extra"], say)
        return Start(start, int(told["step"]), linked="linked" in told, cut=Cut.read(told["extra"].get("plan"), start))
    if any(found.glob("step-*")):
        raise ConfigError(
            f'no checkpoint in {found} is valid; set train.resume = "never" to begin again, or another train.output'
        )
    return None


def instead_of(start: Start, reason: str, config: Config, keep: int, say: Callable[[str], None]) -> Start | None:
    """What to go on from where state cannot be taken over as it lies: a checkpoint to be read, made of it if need be.

    Raises ConfigError where nothing else is there: then the state stays.
    """
    if start.flip is None:
        return replace(start, linked=False)
    output = Path(config.train.output)
    try:
        made = from_flip(start.flip, output / "checkpoints", keep)
    except (CannotGoOn, DamagedState) as error:
        say(f"resume: {start}, step {start.step}, is left out: {reason}; {error}")
        other = checkpoint_start(config, output, say)
        if other is None:
            raise ConfigError(
                f"{start}, step {start.step}, cannot be gone on from: {reason}; {error}. There is no checkpoint; put "
                'the configuration back, or set train.resume = "never" to begin again'
            ) from error
        return replace(other, linked=False)
    say(f"resume: {start} became {made}, to be read from there: {reason}")
    return Start(made, start.step, cut=start.cut)


def _is_of_step(checkpoints: Path, order: int, step: int) -> bool:
    """Whether the checkpoint of this order holds this step: then it was made of the state that is on disk."""
    for path in checkpoints.glob("step-*"):
        try:
            told = read_manifest(path)
        except (DamagedState, OSError):
            continue
        if int(told["order"]) == order:
            return int(told["step"]) == step
    return False


def _require_same(config: Config, start: Path, extra: Mapping[str, Any], say: Callable[[str], None]) -> None:
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


def is_finished(output: Path, start: Start | None, num_steps: int) -> bool:
    """Whether the export of this many steps is there and no checkpoint says otherwise (they may be gone, for room)."""
    if (start is not None and start.step < num_steps) or not (output / "final").is_dir():
        return False
    try:
        return int(json.loads((output / FINISHED).read_text())["step"]) == num_steps
    except (OSError, ValueError, KeyError, TypeError):
        return False


def check_swap(config: Config, say: Callable[[str], None]) -> None:
    """Say where a swap directory is made in one that is not there; ConfigError where not even that one's parent is.

    A drive that is not mounted looks like this, and the state would go to the drive of the system.
    """
    for name in config.offload.swap:
        above = Path(name).expanduser().absolute().parent
        if above.exists():
            continue
        if not above.parent.exists():
            raise ConfigError(
                f"offload.swap = {name}: neither {above} nor {above.parent} exists; mount the drive, or make the "
                "directory if that is where the state belongs"
            )
        say(f"swap: {above} does not exist and is made, with {Path(name).name} in it; is the drive mounted?")


@contextmanager
def alone(output: Path) -> Iterator[None]:
    """The run directory, made if need be, under a lock that dies with this process; gone if nothing came into it."""
    was_there = output.exists()
    try:
        make_directories(output)
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
