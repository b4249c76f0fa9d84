"""What somebody does to a run's files behind its back, or asks of state that is not there: said aloud, nothing claimed.

Files and whole directories removed under a live run, checkpoints moved, an output moved after a kill, state that is to
be adopted and is none, copies of state in memory, an export of a run directory, tables of another length.
"""

from __future__ import annotations

import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from test_kill import last_step, resumed_step
from test_linked import IN_MEMORY, digest, running, same, steps, tensors
from tiny import ON_DISK, tables, write_config
from zygote import Zygote

from offloadz.check import check_command
from offloadz.memory.record import FLIP_FILE
from offloadz.model.export import export
from offloadz.model.manifest import read_manifest
from offloadz.plan.errors import CannotGoOn, ConfigError, DamagedState, DiskFailed, UpdateFailed


@pytest.mark.parametrize("what", ["one file", "everything"])
def test_removed_under_a_live_run(tmp_path: Path, caplog: pytest.LogCaptureFixture, what: str) -> None:
    with running(tmp_path / "whole", copies=3) as run:
        wanted = [*steps(run, 1, 5), digest(run)]
    with running(tmp_path / "swap", copies=3) as run:
        shadow, losses = run.session.room.drive.shadow, steps(run, 1, 2)
        assert shadow is not None and shadow.flipped is not None
        shadow.keeps = shadow.worth_keeping = True
        if what == "one file":
            gone = next(shadow.path.glob("state/optimizer.*.bin"))
            gone.unlink()
        else:
            gone = shadow.path
            shutil.rmtree(gone)
        losses += steps(run, 3, 5)
        assert not shadow.worth_keeping  # the end of a run claims nothing
        assert caplog.text.count("removed or replaced under the run: it goes on") == 1 and str(gone) in caplog.text
        saved = run.save(tmp_path / "saved")
        assert "linked" not in read_manifest(saved) and read_manifest(saved)["step"] == 5
        assert [*losses, digest(run)] == wanted
    with running(tmp_path / "again", IN_MEMORY) as run:
        run.load(saved)
        assert digest(run) == wanted[-1]
    assert not [path for path in (tmp_path / "swap").rglob("*") if path.is_file()]


def test_removed_while_a_flip_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look and the record: an error, and it does not say that anything is left."""
    from offloadz.memory import shadow as module

    with running(tmp_path / "swap", copies=3) as run:
        steps(run, 1, 2)
        put = module.put_record

        def removed(path: Path, data: bytes) -> None:
            shutil.rmtree(path.parent.parent)
            put(path, data)

        monkeypatch.setattr(module, "put_record", removed)
        with pytest.raises((UpdateFailed, DiskFailed), match="go back to the last checkpoint") as caught:
            steps(run, 3, 4)
        assert "still valid" not in str(caught.value)


def test_a_moved_checkpoint_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with running(tmp_path / "swap", copies=3) as run:
        steps(run, 1, 1)
        run.save(tmp_path / "1").rename(tmp_path / "elsewhere")
        for number in range(2, 5):
            steps(run, number, number)
            assert "linked" not in read_manifest(run.save(tmp_path / str(number)))
        assert caplog.text.count("written out as safetensors") == 1
        assert f"{tmp_path / '1'} was moved, and holds one until it is deleted" in caplog.text
        shutil.rmtree(tmp_path / "elsewhere")
        assert "linked" in read_manifest(run.save(tmp_path / "5"))


def test_state_to_adopt_that_is_none_is_refused(tmp_path: Path) -> None:
    for place in (tmp_path / "missing", tmp_path):
        with pytest.raises(ConfigError, match=rf"adopt = {place}: needed is a linked checkpoint"), running(
            tmp_path / "swap", copies=3, adopt=place
        ):  # fmt: skip
            pass
    with running(tmp_path / "swap", copies=3) as run:
        steps(run, 1, 1)
        written, linked = run.save(tmp_path / "written", portable=True), run.save(tmp_path / "linked")
    with pytest.raises(ConfigError, match=r"written: .*read with run\.load"), running(
        tmp_path / "swap", copies=3, adopt=written
    ):  # fmt: skip
        pass
    with pytest.raises(CannotGoOn), running(tmp_path / "swap", copies=1, adopt=linked):
        pass


def test_copies_of_state_in_memory_are_refused(tmp_path: Path) -> None:
    found = r"copies = 3 .*; found parameters on host, optimizer state on host, commit hold; set parameters"
    with pytest.raises(ConfigError, match=found), running(tmp_path / "swap", IN_MEMORY, copies=3):
        pass
    with running(tmp_path / "swap", copies=2) as run:
        plan = run.plan
    with pytest.raises(ConfigError, match="copies = 3 beside a plan that says 2"), running(
        tmp_path / "swap", dict.fromkeys(IN_MEMORY, "auto"), copies=3, plan=plan
    ):  # fmt: skip
        pass


# ---- offloadz train -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("removed")


@pytest.fixture(scope="module")
def config(folder: Path) -> Path:
    return write_config(folder / "run.toml", tables(folder, train__steps=9, train__save_every=4, **ON_DISK))


@pytest.fixture(scope="module")
def killed(folder: Path, config: Path, zygote: Zygote) -> tuple[Path, int]:
    """The output of a run that was killed behind a checkpoint, and the step that it had told of."""
    output = folder / "killed"
    child = zygote.start(["train", str(config), f"train.output={output}"], folder / "killed.log")
    child.until(lambda: last_step(output) >= 6)
    child.kill(signal.SIGKILL)
    child.wait()
    return output, last_step(output)


def test_left_state_is_listed_and_cleaned(
    folder: Path, config: Path, killed: tuple[Path, int], capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    """`offloadz check` says what can be gone on from; `--clean` takes it after a yes, and never a checkpoint."""
    output, reached = killed
    kept = tensors(output / "checkpoints/step-000004")
    swap = folder / "swap"
    shutil.copytree(swap, folder / "held")
    (state,) = (path.parent.parent for path in swap.glob(f"*/state/{FLIP_FILE}"))
    assert check_command(None, [], [str(swap)], False) == 0
    told = capsys.readouterr().out
    found = re.search(r"it holds the state of step (\d+): the same run started again goes on from there", told)
    assert found and int(found[1]) >= reached - 1 and f"left by a dead run: {state}" in told and str(output) in told
    assert "`offloadz check --clean` removes it" in told and state.exists()
    for damage, words in (("flip.bin", "its state cannot be gone on from"), (None, "it holds no state to go on from")):
        path = state / "state" / FLIP_FILE
        path.write_bytes(b"x") if damage else path.unlink()
        check_command(None, [], [str(swap)], False)
        assert words in capsys.readouterr().out
    answers = iter(["n", "y"])
    monkeypatch.setattr("builtins.input", lambda _: next(answers))
    check_command(None, [], [str(swap)], True)
    assert "kept" in capsys.readouterr().out and state.exists()
    check_command(None, [], [str(swap)], True)
    assert "removed" in capsys.readouterr().out and not state.exists()
    assert same(tensors(output / "checkpoints/step-000004"), kept)
    swap.rmdir()
    (folder / "held").rename(swap)


def test_an_output_moved_after_a_kill_is_told_of_newer_state(
    folder: Path, config: Path, killed: tuple[Path, int], zygote: Zygote
) -> None:
    output, reached = killed
    moved = folder / "moved"
    output.rename(moved)
    child = zygote.start(["train", str(config), f"train.output={moved}"], folder / "moved.log")
    child.until(lambda: f"resume: {moved}" in child.log.read_text())
    child.kill(signal.SIGKILL)
    child.wait()
    log = child.log.read_text()
    assert resumed_step(log) == 4, log
    found = re.search(rf"holds the state of step (\d+) of such a run in {output}, which is not there any more", log)
    assert found and int(found[1]) >= reached - 1, log
    assert log.index("holds the state of step") < log.index("resume: " + str(moved))
    shutil.rmtree(moved / "checkpoints")  # what was advised
    moved.rename(output)
    child = zygote.start(["train", str(config), f"train.output={output}"], folder / "back.log")
    assert child.wait() == 0 and resumed_step(child.log.read_text()) >= reached - 1, child.log.read_text()
    assert "such a run" not in child.log.read_text()


def test_export_of_a_run_directory_names_its_checkpoints(
    folder: Path, config: Path, zygote: Zygote, tmp_path: Path
) -> None:
    output = folder / "whole"
    assert zygote.start(["train", str(config), f"train.output={output}", "train.keep=2"], folder / "w.log").wait() == 0
    child = zygote.start(["export", str(output), str(tmp_path / "out")], folder / "export.log")
    assert child.wait() != 0
    kept = sorted(str(path) for path in (output / "checkpoints").glob("step-*"))
    assert f"in it are {', '.join(kept)}: give one of these" in child.log.read_text(), child.log.read_text()
    with pytest.raises(DamagedState, match=r"it has no manifest\.json$"):
        export(tmp_path, tmp_path / "out")


def test_tables_of_another_length_name_the_key(folder: Path, config: Path, zygote: Zygote) -> None:
    output = folder / "longer"
    command = ["train", str(config), f"train.output={output}", 'model.add_tokens=["<one>"]']
    assert zygote.start([*command, "train.steps=4"], folder / "longer0.log").wait() == 0
    tokens = ", ".join(f'"<t{number}>"' for number in range(9))
    resumed = ['train.resume_with=["model.add_tokens", "train.steps"]', f"model.add_tokens=[{tokens}]"]
    child = zygote.start([*command[:-1], *resumed], folder / "longer1.log")
    assert child.wait() == 2, child.log.read_text()
    assert "it is model.add_tokens, which cannot: put it back" in child.log.read_text(), child.log.read_text()
