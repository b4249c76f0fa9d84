"""Data sets by their hub name: from `org/name` to files in the hub's own cache.

Which files are meant is decided here, from their names alone; what is in them is `files.py`'s.  Fetching, caching and
being offline are `huggingface_hub`'s, with its own settings (HF_HUB_CACHE, HF_HUB_OFFLINE, tokens).  The trade-off: a
repository's own loading scripts and its list of configurations are not read, so where the names leave a choice it is
refused with what there is to choose from, and named by a path.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from offloadz.config.sections import ENDINGS
from offloadz.plan.errors import ConfigError

_NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)((?:/[^/:@]+)*)(?:@([\w./-]+))?(?::([\w.-]+))?")
_SPLITS = ("train", "validation", "valid", "val", "dev", "eval", "test")
_NO_DATA = ("dataset_infos.json", "dataset_info.json", "state.json", "package.json", "tokenizer*.json", "*config*.json")


class HubName(NamedTuple):
    """`org/name`, then perhaps `/path` (a glob) inside it, `@revision` and `:split`."""

    repo: str
    path: str
    revision: str | None
    split: str


def hub_name(pattern: str) -> HubName | None:
    """What a name of `data.train` means on the hub; None for what can only be a path of this machine."""
    found = _NAME.fullmatch(pattern)
    if found is None or (not found[2] and pattern.endswith(ENDINGS)) or Path(pattern.partition("/")[0]).exists():
        return None
    if "/.." in pattern or found[1].count("/") != 1:
        return None
    return HubName(found[1], found[2].removeprefix("/"), found[3], found[4] or "")


def hub_files(name: HubName) -> list[str]:
    """The files of a data set, fetched if need be; ConfigError where there are none or too many to choose from."""
    from huggingface_hub import snapshot_download

    patterns = [name.path, f"{name.path}/**"] if name.path else [f"*{ending}" for ending in ENDINGS]
    try:
        root = Path(
            snapshot_download(name.repo, repo_type="dataset", revision=name.revision, allow_patterns=patterns)
        )  # fmt: skip
    except Exception as error:  # whatever the hub's client raises, the user wrote this name
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(
            f"data: {name.repo!r} is no file here, and as a data set of the hub it is not to be had, neither from its "
            f"cache nor from the network: {first}"
        ) from error
    names = sorted(p.relative_to(root).as_posix() for p in root.rglob("*") if p.suffix in ENDINGS and p.is_file())
    chosen = _chosen([n for n in names if not any(fnmatchcase(Path(n).name, no) for no in _NO_DATA)], name)
    return [str(root / n) for n in chosen]


def _chosen(names: Sequence[str], name: HubName) -> list[str]:
    """The files that are meant, all of one kind and in one directory."""
    if name.path:
        named = [n for n in names if fnmatchcase(n, name.path)]
        if not named:
            raise ConfigError(f"data: {name.repo!r} on the hub holds no {name.path!r}; it holds {_some(names)}")
        names = named
    splits = {n: _split_of(n) for n in names}
    there = sorted({split for split in splits.values() if split})
    wanted = name.split or ("train" if there and not name.path else "")
    chosen = [n for n in names if splits[n] == wanted] if wanted else list(names)
    if not chosen:
        has = f"its files are of the splits {', '.join(there)}" if there else f"it holds {_some(names)}"
        raise ConfigError(f"data: {name.repo!r} on the hub has no file of the split {wanted!r}; {has}")
    several = [sorted({Path(n).suffix for n in chosen}), sorted({str(Path(n).parent) for n in chosen})]
    if not name.path and max(map(len, several)) > 1:
        raise ConfigError(
            f"data: {name.repo!r} on the hub holds files of several kinds or in several directories "
            f"({_some(chosen)}); name those that are meant, such as {name.repo}/{chosen[0]}"
        )
    return chosen


def _split_of(name: str) -> str:
    """The split that a file's name or its directory tells of; "" for none."""
    for part in reversed(Path(name).with_suffix("").parts):
        words = re.split(r"[^A-Za-z0-9]+", part.lower())
        found = next((split for split in _SPLITS if split in words), "")
        if found:
            return found
    return ""


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 6} more" if len(names) > 6 else ""
    return (", ".join(names[:6]) or f"no file that ends in {', '.join(ENDINGS)}") + more
