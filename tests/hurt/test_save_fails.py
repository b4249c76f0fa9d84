"""Kinds K14 and K15: a drive that fills up or fails while a checkpoint is written out or a model is exported.

A limit on the size of files (the system's own, met when room is reserved), no space and EIO (a shim, met in the middle
of the bytes), each at 30, 70 and 99 %: the error says what and where, what was there before stays as it was under its
name, nothing half-written is left, and the same call is good on a good drive.
"""

from __future__ import annotations

import errno
import os
import re
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from shims import main, run_file, spoiled
from test_linked import flipped, running, same, steps, tensors

from offloadz.plan.errors import DiskFailed

ERRORS = {"limit": errno.EFBIG, "enospc": errno.ENOSPC, "eio_write": errno.EIO}
SHARES = (0.3, 0.7, 0.99)


@contextmanager
def bad_drive(mode: str, share: float, sizes: list[int]) -> Iterator[None]:
    """A drive that takes this share of files of these sizes: of the largest one by a limit, else of all bytes."""
    if mode != "limit":
        with spoiled(mode, after=int(sum(sizes) * share)):
            yield
        return
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(max(sizes) * share), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def content(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


def attempts(write: Callable[[Path], Path], there: Path) -> dict[str, Any]:
    """What `write` says on every bad drive, over what is `there` already, and whether that and nothing else stays."""
    found: dict[str, Any] = {}
    before = content(there.parent)
    sizes = [path.stat().st_size for path in there.glob("*.safetensors")]
    for mode in ERRORS:
        for share in SHARES:
            told: dict[str, Any] = {"errno": None}
            try:
                with bad_drive(mode, share, sizes):
                    write(there)
            except DiskFailed as error:
                told = {"errno": error.errno, "text": str(error)}
            found[f"{mode} {share}"] = told | {"as before": content(there.parent) == before}
    return found


def saved_and_exported(directory: Path) -> dict[str, Any]:
    """Checkpoints and exports of step 1, written again at step 2 on bad drives and at last on a good one."""
    places = {"save": directory / "checkpoints/one", "export": directory / "exports/one"}
    with running(directory / "swap", copies=3) as run:
        writes = {"save": lambda path: run.save(path, portable=True), "export": lambda path: run.export(path)}
        steps(run, 1, 1)
        linked = run.save(directory / "checkpoints/linked")
        held = tensors(linked)
        for name, write in writes.items():
            write(places[name])
        steps(run, 2, 2)
        found = {name: attempts(write, places[name]) for name, write in writes.items()}
        step, state = flipped(run)
        found["state"] = {"step": step, "linked": same(tensors(linked), held)}
        for name, write in writes.items():
            old = content(places[name])
            found["state"][name] = content(write(places[name])) != old
        found["state"]["saved"] = same(tensors(places["save"]), state)
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run_file(__file__, "saved_and_exported", tmp_path_factory.mktemp("saved"))


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("mode", ERRORS)
@pytest.mark.parametrize("what", ["save", "export"])
def test_half_a_directory_never_takes_the_place_of_a_whole_one(found: Any, what: str, mode: str, share: float) -> None:
    told = found[what][f"{mode} {share}"]
    assert told["errno"] == ERRORS[mode], told
    operation = "reserve" if mode == "limit" else r"write blocks\.\d\.(weight|bias)\S*"
    where, why = r"\S+/one\.tmp-\d+/\w+\.safetensors", os.strerror(ERRORS[mode])
    wanted = rf"{operation} of \d+ bytes in {where}: {why} \([\d.]+[KMG]?i?B free"
    assert re.search(wanted, told["text"]), told["text"]
    assert told["as before"], "what was there changed, or something half-written was left beside it"


def test_state_and_links_are_untouched_and_a_good_drive_is_good(found: Any) -> None:
    assert found["state"] == {"step": 2, "linked": True, "save": True, "export": True, "saved": True}


if __name__ == "__main__":
    main(globals())
