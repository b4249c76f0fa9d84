"""A drive that fails in the middle of the stores of state in copies: a clear error, and the last flip stays valid."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from shims import main, run_file, spoiled
from test_linked import flipped, running, same, steps, tensors

from offloadz.plan.errors import DiskFailed, UpdateFailed


def stored_on_a_failing_drive(directory: Path) -> dict[str, Any]:
    """A run with copies whose drive fails in the middle of the stores of a step."""
    return stored(directory)


def stored_beside_on_a_failing_drive(directory: Path) -> dict[str, Any]:
    """The same where the stores come before the step is decided."""
    return stored(directory, commit="shadow")


def stored(directory: Path, **how: Any) -> dict[str, Any]:
    with running(directory / "swap", copies=3, **how) as run:
        steps(run, 1, 2)
        saved = run.save(directory / "saved")
        before, kept = flipped(run), tensors(saved)
        stored_bytes = sum(e.nbytes for e in run.session.room.drive.shadow.copies.extents)  # type: ignore[union-attr]
        try:
            with spoiled("eio_write", after=stored_bytes // 2):
                steps(run, 3, 4)
        except (UpdateFailed, DiskFailed) as error:
            said = str(error)
        step, state = flipped(run)
        return {"said": said, "step": step, "whole": same(state, before[1]), "saved": same(tensors(saved), kept)}


@pytest.mark.parametrize("what", ["stored_on_a_failing_drive", "stored_beside_on_a_failing_drive"])
def test_a_store_that_fails_leaves_the_last_flip(what: str, tmp_path: Path) -> None:
    found = run_file(__file__, what, tmp_path)
    assert "Input/output error" in found["said"] and re.search(
        r"write of (optimizer|weights)/\S+ failed", found["said"]
    )
    assert (found["step"], found["whole"], found["saved"]) == (2, True, True), found


if __name__ == "__main__":
    main(globals())
