"""A start that has room for fewer checkpoints than the one before: which go is said before they do.  Case G04."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny import ON_DISK, tables

import offloadz.train.loop as loop
from offloadz.config import config_from_tables
from offloadz.plan.paths import held_bytes
from offloadz.train.metrics import METRICS, read_metrics
from offloadz.train.progress import Display

SIZES = {4: 2, 3: 1}
"""Copies that a drive has room for, and checkpoints that are then kept."""


def started(folder: Path, steps: int, room: int = 0, keep: int = 3, **changes: object) -> dict[str, object]:
    """A start of a run, on a drive of `room` bytes where it is given; its plan."""
    if room:
        (folder / "box.toml").write_text(f'[[drive]]\npath = "{folder}"\nsize = {room}\n')
        changes["offload__machine"] = str(folder / "box.toml")
    told = tables(
        folder, train__steps=steps, train__keep=keep, train__save_every=1, train__resume_with=["train.steps"],
        optimizer__schedule="constant", **{**ON_DISK, **changes},
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


@pytest.mark.parametrize("copies", [4, 3])
def test_a_fuller_drive_says_what_it_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str], copies: int) -> None:
    first = started(tmp_path, 3)
    assert (first["copies"], first["keep"]) == (5, 3) and "needs 5 copies" not in capsys.readouterr().out
    assert kept(tmp_path) == [f"step-00000{step}" for step in (1, 2, 3)]
    one = first["terms"]["step"]["disk"]  # type: ignore[index]
    room = first["peak"]["disk"] + first["peak"]["checkpoint"]  # type: ignore[index]
    room -= (5 - copies) * (one["parameters"] + one["optimizer"]) // 5
    capsys.readouterr()
    plan = started(tmp_path, 4, room)
    assert (plan["copies"], plan["keep"]) == (copies, SIZES[copies])
    out, going = capsys.readouterr().out, {4: "step-000001", 3: "step-000001, step-000002"}[copies]
    why = f"train.keep = 3 needs 5 copies, there is room for {copies}: "
    why += "1 checkpoint is kept" if copies == 3 else "2 checkpoints are kept"
    assert f"checkpoints: {going} removed now: {why}\n" in out
    assert f"; {why}\n" in out and out.index("removed now") < out.index("saved /")
    assert kept(tmp_path) == [f"step-00000{step}" for step in (3, 4)][-SIZES[copies] :]
    held = max(line["bytes"]["disk_held"] for line in read_metrics(tmp_path / "run" / METRICS) if line["step"] > 3)
    assert held <= plan["peak"]["disk"]  # type: ignore[index]


def test_a_run_that_goes_on_from_its_state_on_disk_says_it_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After an error behind the third checkpoint and the flip of the fourth step."""

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
    started(tmp_path, 5, keep=2)
    out = capsys.readouterr().out
    assert "checkpoints: step-000001 removed now: 2 checkpoints are kept, train.keep = 2 asks for no more\n" in out
    assert "going on from the state on disk" in out and kept(tmp_path) == ["step-000004", "step-000005"]


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
