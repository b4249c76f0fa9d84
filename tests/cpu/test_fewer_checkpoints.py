"""A start that has room for fewer checkpoints than the one before: which go is said before they do.  Case G04."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny import ON_DISK, tables

import offloadz.train.loop as loop
import offloadz.train.offloaded as offloaded
from offloadz.config import config_from_tables
from offloadz.memory.copies import copy_file
from offloadz.memory.record import read_saved
from offloadz.plan.errors import DoesNotFit
from offloadz.plan.paths import held_bytes
from offloadz.train.metrics import METRICS, read_metrics
from offloadz.train.progress import Display

SIZES = {4: 2, 3: 1}
"""Copies that a drive has room for, and checkpoints that are then kept."""

TREE_BYTES = 2 * 4096
"""What ext4 takes for one copy's two files whose holes were filled again: a block each for the tree of their pieces."""


def started(folder: Path, steps: int, room: int = 0, keep: int = 3, **changes: object) -> dict[str, object]:
    """A start of a run, on a drive of `room` bytes where it is given; its plan."""
    if room:
        (folder / "box.toml").write_text(f'[[drive]]\npath = "{folder}"\nsize = {room}\n')
        changes["offload__machine"] = str(folder / "box.toml")
    told = tables(
        folder, train__steps=steps, train__keep=keep, train__resume_with=["train.steps"],
        optimizer__schedule="constant", **{"train__save_every": 1, **ON_DISK, **changes},
    )  # fmt: skip
    assert loop.train(config_from_tables(told, training=True)) == 0
    found: dict[str, object] = json.loads((folder / "run/plan.json").read_text())
    return found


@pytest.fixture
def held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes that swap path and checkpoints hold behind each step."""
    found: list[int] = []

    class Looking(Display):
        def step(self, line: dict[str, object]) -> None:
            super().step(line)
            found.append(held_bytes(tmp_path / "swap", tmp_path / "run/checkpoints"))

    monkeypatch.setattr(loop, "Display", Looking)
    return found


def kept(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "run/checkpoints").iterdir())


@pytest.mark.parametrize(("copies", "steps", "every"), [(4, 3, 1), (3, 4, 1), (3, 16, 4), (4, 16, 4)])
def test_a_fuller_drive_says_what_it_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], copies: int, steps: int, every: int
) -> None:
    """After as many steps the newest checkpoints hold any of the first run's copies, the last one too."""
    first = started(tmp_path, steps, train__save_every=every)
    assert (first["copies"], first["keep"]) == (5, 3) and "needs 5 copies" not in capsys.readouterr().out
    names = [f"step-{step:06d}" for step in range(steps - 2 * every, steps + 1, every)]
    assert kept(tmp_path) == names
    one = first["terms"]["step"]["disk"]  # type: ignore[index]
    room = first["peak"]["disk"] + first["peak"]["checkpoint"]  # type: ignore[index]
    room -= (5 - copies) * (one["parameters"] + one["optimizer"]) // 5
    capsys.readouterr()
    plan = started(tmp_path, steps + 1, room)
    assert (plan["copies"], plan["keep"]) == (copies, SIZES[copies])
    out, going = capsys.readouterr().out, ", ".join(names[: 5 - copies])
    why = f"train.keep = 3 needs 5 copies, there is room for {copies}: "
    why += "1 checkpoint is kept" if copies == 3 else "2 checkpoints are kept"
    assert f"checkpoints: {going} removed now: {why}\n" in out
    assert f"; {why}\n" in out and out.index("removed now") < out.index("saved /")
    assert kept(tmp_path) == [*names, f"step-{steps + 1:06d}"][-SIZES[copies] :]
    held = max(line["bytes"]["disk_held"] for line in read_metrics(tmp_path / "run" / METRICS) if line["step"] > steps)
    assert held <= plan["peak"]["disk"] + copies * TREE_BYTES  # type: ignore[index]


@pytest.fixture
def ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    """The state on disk of a run after an error behind the third checkpoint and the flip of the fourth step."""

    def failing(training: loop.Training) -> None:
        if training.progress.step == 4:
            training._settle()
            raise RuntimeError("as a full drive would")
        save(training)

    save = loop.Training._save
    monkeypatch.setattr(loop.Training, "_save", failing)
    with pytest.raises(RuntimeError, match="full drive"):
        started(tmp_path, 4)
    assert kept(tmp_path) == [f"step-00000{step}" for step in (1, 2, 3)]
    monkeypatch.setattr(loop.Training, "_save", save)
    capsys.readouterr()
    (state,) = (tmp_path / "swap").glob("*/state")
    return state


def test_a_run_that_goes_on_from_its_state_on_disk_says_it_too(
    tmp_path: Path, ended: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    started(tmp_path, 5, keep=2)
    out = capsys.readouterr().out
    assert "checkpoints: step-000001 removed now: 2 checkpoints are kept, train.keep = 2 asks for no more\n" in out
    assert "going on from the state on disk" in out and kept(tmp_path) == ["step-000004", "step-000005"]


def test_the_newest_valid_checkpoint_stays_when_newer_ones_are_rotten(
    tmp_path: Path, ended: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run/checkpoints/step-000003/manifest.json").write_text("rot")
    started(tmp_path, 5, keep=1)
    out = capsys.readouterr().out
    assert "checkpoints: step-000003, step-000001 removed now: 1 checkpoint is kept, train.keep = 1 asks" in out
    assert "going on from the state on disk" in out and kept(tmp_path) == ["step-000005"]


def test_state_on_disk_that_is_rotten_costs_no_checkpoint(
    tmp_path: Path, ended: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where it must be read it is compared before it takes the place of anything."""
    saved = read_saved(ended)
    extent, copy = next((e, c) for e, c in zip(saved.extents, saved.record.choice, strict=True) if e.nbytes)
    with (saved.where(copy_file(extent.file, copy))).open("r+b") as file:
        file.seek(extent.offset)
        file.write(bytes(byte ^ 1 for byte in file.read(1)))
    started(tmp_path, 5, keep=1, offload__parameters="host")
    out = capsys.readouterr().out
    assert "step 4, is left out" in out and "damaged at byte" in out
    assert "step-000003, step 3 of 5" in out and kept(tmp_path) == ["step-000005"]


def test_a_drive_that_is_full_by_now_costs_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started(tmp_path, 3)
    monkeypatch.setattr(offloaded, "rooms_of", lambda paths, output: (1,))
    with pytest.raises(DoesNotFit, match="no checkpoint was removed"):
        started(tmp_path, 4, keep=1)
    assert kept(tmp_path) == [f"step-00000{step}" for step in (1, 2, 3)]


def test_those_that_were_written_out_go_once_the_next_is_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    started(tmp_path, 2, offload__parameters="host")
    started(tmp_path, 3)
    assert kept(tmp_path) == [f"step-00000{step}" for step in (1, 2, 3)]
    started(tmp_path, 4, keep=0)
    told = "checkpoints: step-000001, step-000002 removed once the next one is saved: 1 checkpoint is kept, as many as "
    assert f"{told}is usual with links\n" in capsys.readouterr().out and kept(tmp_path) == ["step-000004"]


def test_a_start_takes_no_more_room_than_the_one_before(tmp_path: Path, held: list[int]) -> None:
    """From the newest of three checkpoints: what the others hold are copies of the run again, not room beside them."""
    plan = started(tmp_path, 5)
    terms = plan["terms"]["step"]["disk"]  # type: ignore[index]
    one = (terms["parameters"] + terms["optimizer"]) // 5
    before, first = max(held), held_bytes(tmp_path / "run/checkpoints")
    assert 3 * one < first < 5 * one, "the copies that hold no checkpoint were given back"
    held.clear()
    started(tmp_path, 6)
    assert kept(tmp_path) == [f"step-00000{step}" for step in (4, 5, 6)] and max(held) < before + one / 4


def test_checkpoints_that_hold_no_copies_stay_until_the_next_is_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    started(tmp_path, 3, offload__parameters="host")
    assert kept(tmp_path) == [f"step-00000{step}" for step in (1, 2, 3)]
    started(tmp_path, 4, keep=1, offload__parameters="host")
    told = "checkpoints: step-000001, step-000002 removed once the next one is saved: 1 checkpoint is kept, train.keep"
    assert f"{told} = 1" in capsys.readouterr().out and kept(tmp_path) == ["step-000004"]
