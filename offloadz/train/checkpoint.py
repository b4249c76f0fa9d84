"""The checkpoints of a run: which are there, which is the newest that can be trusted, which may go.

What is in one, and how it gets there whole, is `model/state.py`'s.  When to save and what `extra` means is left to the
loop.  The trade-off: the newest one is read and compared from end to end before a resume reads it again, 12 bytes a
parameter more, and in return a rotten one is passed over by name instead of met half-way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from offloadz.memory.record import Saved, make_directories
from offloadz.model.aside import clean_leftovers, remove_directory
from offloadz.model.flips import checkpoint_of, shadow_of
from offloadz.model.manifest import MANIFEST, read_manifest, verify
from offloadz.model.state import load_state, save_state
from offloadz.model.together import by_first
from offloadz.model.told import random_states, set_random_states
from offloadz.plan.errors import ConfigError, DamagedState

__all__ = ["load_checkpoint", "newest_valid", "random_states", "save_checkpoint", "set_random_states"]

STEP_NAMES = "step-*"


def save_checkpoint(directory: Path, run: Any, extra: Mapping[str, Any], keep: int = 2) -> Path:
    """Write `directory`/step-NNNNNN (`directory` is the run's `checkpoints/`), then delete all but the `keep` newest.

    `extra` holds at least `step`, and what the caller wants back from `load_checkpoint`: plain values, tensors, arrays.
    The new checkpoint is whole, flushed and in place before an old one goes.  Raises DiskFailed with numbers before
    anything was touched where there is no room, ValueError for what `extra` cannot hold.
    """
    if keep < 1:
        raise ConfigError(f"train.keep is {keep}; at least 1 checkpoint must be kept")
    directory = Path(directory)
    target, before = directory / f"step-{int(extra['step']):06d}", []

    def prepared() -> None:
        make_directories(directory)
        clean_leftovers(directory, STEP_NAMES)
        before.extend(_in_order(directory))
        if target.exists() and not (target / MANIFEST).is_file():
            remove_directory(target)  # it has our name and was never whole, or is not any more

    by_first(run.ranks, prepared)
    replaced = [str(path) for path in _replaced(before, target, keep)]  # rank 0 alone has looked
    going = tuple(map(Path, run.ranks.first(replaced)))
    save_state(target, run, extra, order=max((order for order, _ in before), default=0) + 1, going=going)
    by_first(run.ranks, lambda: [remove_directory(path) for path in going])
    shadow = shadow_of(run)
    if shadow is not None:
        shadow.secured()
        shadow.release_gone()
    return target


def newest_order(checkpoints: Path) -> int:
    """The order of the newest checkpoint, whole or not; 0 where there is none."""
    return max((order for order, _ in _in_order(checkpoints)), default=0) if checkpoints.is_dir() else 0


def from_flip(saved: Saved, checkpoints: Path, keep: int) -> Path:
    """Make a checkpoint of the state that a dead run left on disk, by links, then delete all but the `keep` newest.

    Raises CannotGoOn where links are not possible, DamagedState where that state is not whole; none is deleted then.
    """
    step = int(saved.record.note["step"])
    before = _in_order(checkpoints) if checkpoints.is_dir() else []
    target = checkpoints / f"step-{step:06d}"
    checkpoint_of(saved, target, newest_order(checkpoints) + 1)
    for path in _replaced(before, target, keep):
        remove_directory(path)
    return target


def _replaced(before: Sequence[tuple[int, Path]], target: Path, keep: int) -> list[Path]:
    """What goes of those that were there before `target`, of which `keep` stay with it, the oldest first."""
    old = [path for _, path in before if path != target]
    return old[: max(0, len(old) - (keep - 1))]


def beyond(checkpoints: Path, keep: int, valid: Path | None) -> list[Path]:
    """All checkpoints but `keep`: those stay that are not newer than the newest valid one, as far as there are.

    `valid`: that one, where it is known; None: they are read, the newest first, until one is.
    """
    before = [path for _, path in _in_order(checkpoints)] if checkpoints.is_dir() else []
    if len(before) <= keep:
        return []
    trusted = (valid or newest_valid(checkpoints)[0] or before[-1]).absolute()
    behind = next((at for at, path in enumerate(before, 1) if path.absolute() == trusted), len(before))
    return [*before[behind:], *before[:behind]][: len(before) - keep]


def prune_weights(directory: Path, step: int, keep: int) -> None:
    """Remove all but the `keep` newest exports in a run's `weights/`, the newest being that of `step`."""
    there = sorted(p for p in directory.glob(STEP_NAMES) if p.is_dir() and p.name.count("-") == 1)
    # What a run that was taken back left of later steps is older than this one.
    there.sort(key=lambda p: (int(p.name[5:]) <= step, p.name))
    for path in there[:-keep]:
        remove_directory(path)


def newest_valid(checkpoints: Path) -> tuple[Path | None, list[tuple[Path, str]]]:
    """The newest checkpoint in a run's `checkpoints/` whose every byte is as listed, and the newer ones with reasons.

    Leftovers of dead writers are removed first.  (None, [...]) where none is valid.
    """
    checkpoints = Path(checkpoints)
    if not checkpoints.is_dir():
        return None, []
    clean_leftovers(checkpoints, STEP_NAMES)
    rejected = []
    for _, path in reversed(_in_order(checkpoints)):
        try:
            verify(path, read_manifest(path))
        except (DamagedState, OSError) as error:
            rejected.append((path, str(error)))
        else:
            return path, rejected
    return None, rejected


def load_checkpoint(path: Path, run: Any, *, checked: bool = False, adopted: bool = False) -> dict[str, Any]:
    """Put a checkpoint into a run of any placement (see `load_state`); returns the `extra` it was saved with."""
    return load_state(Path(path), run, checked=checked, adopted=adopted)


def _in_order(checkpoints: Path) -> list[tuple[int, Path]]:
    """(order, directory) of all checkpoints, the newest last; one without a readable list goes by its step."""
    names = [p for p in checkpoints.glob(STEP_NAMES) if p.is_dir() and ".tmp-" not in p.name and ".old-" not in p.name]
    found, order = [], 0
    for path in sorted(names):
        try:
            order = int(read_manifest(path)["order"])
        except (DamagedState, OSError):
            order += 1
        found.append((order, path))
    return sorted(found)
