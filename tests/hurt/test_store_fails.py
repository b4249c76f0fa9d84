"""Kinds K03, K04, K14: a drive that fills up or fails in the middle of the stores of a step, near its beginning or end.

The error says what and where, the step before stays whole in state and checkpoint, and a run that goes on from there on
a good drive has the bits of one that never met the bad one.  With `in_place` there is one copy: the run says that its
weights are those of no step, and the checkpoint is what stays.  One process per way of committing meets every failure.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from shims import main, run_file, spoiled
from test_linked import digest, flipped, running, same, steps, tensors

from offloadz.memory.record import read_saved
from offloadz.model.flips import told_of
from offloadz.model.run import Run
from offloadz.model.state import load_flip
from offloadz.plan.errors import DiskFailed, UpdateFailed
from offloadz.plan.spec import aligned

ERRORS = {"enospc": errno.ENOSPC, "eio_write": errno.EIO}
SHARES = (0.3, 0.7, 0.99)


def said(act: Callable[[], object]) -> dict[str, Any]:
    """What `act` raised; the number of a drive's error is also that of what was raised from it."""
    try:
        act()
    except (UpdateFailed, DiskFailed) as error:
        number = next((e.errno for e in (error, error.__cause__) if isinstance(e, OSError)), None)
        return {"type": type(error).__name__, "errno": number, "text": str(error)}
    return {"type": None}


def stored_bytes(run: Run) -> int:
    """What the stores of one step write: nothing but weights and optimizer state is on disk."""
    return sum(aligned(e.nbytes) for e in run.session.room.extents.values())


def failing(directory: Path, mode: str, share: float, **how: Any) -> dict[str, Any]:
    """Two good steps and a checkpoint, a third whose stores fail, and what is there and can be gone on from."""
    how["output"] = directory / "run"
    with running(directory / "swap", **how) as run:
        drive = run.session.room.drive
        if drive.shadow is not None:
            drive.shadow.keeps = True  # as `offloadz train` has it
        steps(run, 1, 2)
        saved = run.save(directory / "run/checkpoints/saved")
        before, kept = digest(run), tensors(saved)
        with spoiled(mode, after=int(stored_bytes(run) * share)):
            told = {"step": said(lambda: steps(run, 3, 4)), "place": str(drive.path)}
        told |= {"next": said(lambda: steps(run, 3, 3)), "save": said(lambda: run.save(directory / "more"))}
        told |= {"saved": same(tensors(saved), kept), "left": [p.name for p in directory.glob("more*")]}
        if drive.shadow is not None:
            step, state = flipped(run)
            told |= {"flipped": step, "whole": same(state, kept)}
    with running(directory / "loaded", **how) as run:
        run.load(saved)
        told["going on"] = [[digest(run) == before, *steps(run, 3, 4), digest(run)]]
    if (drive.path / "state").exists():
        with running(directory / "swap", **how, adopt=drive.path / "state") as run:
            load_flip(told_of(read_saved(drive.path / "state")), run)
            told["going on"] += [[digest(run) == before, *steps(run, 3, 4), digest(run)]]
    return told


def hold(directory: Path) -> dict[str, Any]:
    """Updates after the decision, their stores under the next step."""
    return all_failures(directory, copies=3)


def shadow(directory: Path) -> dict[str, Any]:
    """The same where the stores come before the step is decided."""
    return all_failures(directory, copies=3, commit="shadow")


def in_place(directory: Path) -> dict[str, Any]:
    """One copy, written over as gradients come."""
    return all_failures(directory, commit="in_place", max_grad_norm=0.0)


def all_failures(directory: Path, **how: Any) -> dict[str, Any]:
    """Every error at every place, and what a run that never met one comes to."""
    with running(directory / "good", **how) as run:
        steps(run, 1, 2)
        found: dict[str, Any] = {"wanted": [True, *steps(run, 3, 4), digest(run)]}
    for mode in ERRORS:
        for share in SHARES:
            place = directory / f"{mode} {share}"
            place.mkdir()
            found[place.name] = failing(place, mode, share, **how)
    return found


@pytest.fixture(scope="module", params=["hold", "shadow", "in_place"])
def way(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    return request.param, run_file(__file__, request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("mode", ERRORS)
def test_a_store_that_fails_costs_no_step(way: tuple[str, dict[str, Any]], mode: str, share: float) -> None:
    commit, found = way
    told = found[f"{mode} {share}"]
    error = told["step"]
    assert (error["type"], error["errno"]) == ("UpdateFailed", ERRORS[mode]), error
    file = re.escape(f"{told['place']}/state/")
    assert re.search(rf"write of \w+/blocks\.\d\S* failed: {os.strerror(ERRORS[mode])}; file {file}", error["text"])
    assert re.search(r"offset \d+, wanted \d+ bytes, found 0", error["text"])
    assert "bytes are free" in error["text"] or mode != "enospc"
    assert told["next"]["type"] == told["save"]["type"] == "UpdateFailed" and told["left"] == []
    assert told["saved"], "a checkpoint changed under a store that failed"
    if commit == "in_place":
        assert "go back to the last checkpoint" in told["next"]["text"] and "go back" in told["save"]["text"]
    else:
        assert (told["flipped"], told["whole"]) == (2, True)
    assert told["going on"] == [found["wanted"]] * (1 if commit == "in_place" else 2)


if __name__ == "__main__":
    main(globals())
