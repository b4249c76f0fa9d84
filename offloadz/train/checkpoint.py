"""The checkpoints of a run: which are there, which is the newest that can be trusted, which may go.

What is in one, and how it gets there whole, is `model/state.py`'s.  When to save and what `extra` means is left to the
loop.  The trade-off: the newest one is read and compared from end to end before a resume reads it again, 12 bytes a
parameter more, and in return a rotten one is passed over by name instead of met half-way.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from offloadz.model.aside import clean_leftovers, remove_directory
from offloadz.model.manifest import MANIFEST, read_manifest, verify
from offloadz.model.state import load_state, random_states, save_state, set_random_states
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
    directory.mkdir(parents=True, exist_ok=True)
    clean_leftovers(directory, STEP_NAMES)
    before = _in_order(directory)
    target = directory / f"step-{int(extra['step']):06d}"
    if target.exists() and not (target / MANIFEST).is_file():
        remove_directory(target)  # it has our name and was never whole, or is not any more
    save_state(target, run, extra, order=max((order for order, _ in before), default=0) + 1)
    old = [path for _, path in before if path != target]
    for path in old[: max(0, len(old) - (keep - 1))]:
        remove_directory(path)
    return target


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


def load_checkpoint(path: Path, run: Any, *, checked: bool = False) -> dict[str, Any]:
    """Put a checkpoint into a run of any placement (see `load_state`); returns the `extra` it was saved with."""
    return load_state(Path(path), run, checked=checked)


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
