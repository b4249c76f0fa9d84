"""State of several ranks on disk in copies: one record decides for all, and a checkpoint is links to the files of all.

A rank is killed at the points of a flip between which the others' files and the one record could come apart; each time
all go on from one whole step, to the bits of a run that nobody disturbed.
"""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import pytest
import torch
from group import Nursery, logs, merged
from test_rank_deaths import lines
from tiny import ON_DISK, tables, write_config

from offloadz.memory.record import FLIP_FILE

STEPS, FLIP = 6, 3
DISK = dict.fromkeys(("parameters", "gradients", "optimizer_state"), "disk")


def configured(folder: Path, **changes: object) -> Path:
    folder.mkdir()
    told = {"train__steps": STEPS, "train__save_every": 0, "train__batch_size": 4, "model__dtype": "float32"}
    return write_config(folder / "config.toml", tables(folder, **told | ON_DISK | changes))


@pytest.mark.parametrize(
    ("victim", "point", "step"),
    [(1, "flushed", FLIP - 1), (0, "flushed", FLIP - 1), (0, "recorded", FLIP), (1, "recorded", FLIP),
     (1, "known", FLIP), (0, "known", FLIP)],
)  # fmt: skip
def test_a_kill_in_a_flip_leaves_one_step_for_all(
    nursery: Nursery, tmp_path: Path, victim: int, point: str, step: int
) -> None:
    config, log = configured(tmp_path / "a", offload__zero_stage=victim * 2 + 1), tmp_path / "log"
    nursery.start(2, "rank_trials.dies", log, arguments=["train", str(config)], victim=victim, point=point, flip=FLIP)
    statuses = nursery.wait()
    assert statuses[victim] == -signal.SIGKILL and statuses[1 - victim] == 1, logs(log, 2)
    nursery.start(2, "command", log, arguments=["train", str(config)])
    assert nursery.wait() == [0, 0], logs(log, 2)
    assert f"checkpoints/step-{step:06d}, to be read from there" in logs(log, 2)[0]
    plain = configured(tmp_path / "b", offload__zero_stage=victim * 2 + 1)
    nursery.start(2, "command", log, arguments=["train", str(plain)])
    assert nursery.wait() == [0, 0], logs(log, 2)
    found, wanted = (
        [(line["step"], line["loss"], line["samples"]) for line in lines(f)] for f in (tmp_path / "a", tmp_path / "b")
    )
    assert found == wanted
    final = [folder / "run" / "final" / "model.safetensors" for folder in (tmp_path / "a", tmp_path / "b")]
    assert final[0].read_bytes() == final[1].read_bytes()
    assert not [path for path in (tmp_path / "a" / "swap").rglob("*") if path.is_file()]


def test_one_process_goes_on_from_what_killed_ranks_left(nursery: Nursery, tmp_path: Path) -> None:
    config, log = configured(tmp_path / "a", offload__zero_stage=3), tmp_path / "log"
    nursery.start(2, "rank_trials.dies", log, arguments=["train", str(config)], victim=0, point="recorded", flip=FLIP)
    nursery.wait()
    nursery.start(1, "command", log, arguments=["train", str(config), "offload.zero_stage=auto"])
    assert nursery.wait() == [0], logs(log, 1)
    assert [line["step"] for line in lines(tmp_path / "a")] == list(range(1, STEPS + 1))
    assert not [path for path in (tmp_path / "a" / "swap").rglob("*") if path.is_file()]


@pytest.mark.parametrize("secured", [True, False])
def test_files_that_another_rank_took_with_it_are_missed_only_without_a_checkpoint(
    nursery: Nursery, tmp_path: Path, secured: bool
) -> None:
    """A rank that ends because another was killed leaves no files that a checkpoint holds; the record stays."""
    config = configured(tmp_path / "a", offload__zero_stage=3, train__save_every=FLIP if secured else 0)
    log = tmp_path / "log"
    how = {"victim": 0, "point": "flushed", "flip": FLIP + 1}
    nursery.start(2, "rank_trials.dies", log, arguments=["train", str(config)], **how)
    nursery.wait()
    record = next((tmp_path / "a" / "swap").rglob(FLIP_FILE))
    for directory in (tmp_path / "a" / "swap").iterdir():
        if directory.is_dir() and directory not in record.parents:
            shutil.rmtree(directory)
    nursery.start(1, "command", log, arguments=["train", str(config), "offload.zero_stage=auto"])
    assert nursery.wait() == [0 if secured else 2], logs(log, 1)
    wanted = (
        f"step {FLIP}, is left out: a checkpoint holds all of it" if secured else "which is not there; mount that drive"
    )
    assert wanted in logs(log, 1)[0]


def test_every_checkpoint_of_a_run_is_links(nursery: Nursery, tmp_path: Path) -> None:
    """Also where the one before has to go for it, which only the first rank has looked for."""
    log, how = tmp_path / "log", {"train__save_every": 2, "train__steps": 4}
    config = configured(tmp_path / "a", offload__zero_stage=3, **how)
    nursery.start(2, "command", log, arguments=["train", str(config)])
    assert nursery.wait() == [0, 0], logs(log, 2)
    (kept,) = (tmp_path / "a" / "run" / "checkpoints").iterdir()
    assert kept.name == "step-000004" and "linked" in json.loads((kept / "manifest.json").read_text())
    assert "written out" not in logs(log, 2)[0]


@pytest.mark.parametrize(("stage", "commit"), ((3, "hold"), (1, "shadow")))
def test_a_checkpoint_is_links_to_the_files_of_all_ranks(
    nursery: Nursery, tmp_path: Path, swap: Path, stage: int, commit: str
) -> None:
    """Two of them, with a step in between that writes to other copies; the ranks' own files are gone when they end."""
    how = {"dtype": "bfloat16", "swap": str(swap), **DISK}
    outs = nursery.run(2, "save", tmp_path, more=True, copies=4, zero_stage=stage, commit=commit, **how)
    for name in ("saved", "later"):
        linked = json.loads((tmp_path / name / "manifest.json").read_text())["linked"]
        assert {
            f"{role}{rank}.{copy}.bin" for role in ("weights", "optimizer") for rank in ("", "@1") for copy in "0123"
        } >= linked.keys()
        assert {file.partition(".")[0] for file in linked} == {"weights", "weights@1", "optimizer", "optimizer@1"}
    exported = (tmp_path / "exported" / "model.safetensors").read_bytes()
    for ranks, other in ((1, 0), (3, 2)):
        loaded = nursery.run(
            ranks, "load", tmp_path / str(ranks), saved=str(tmp_path / "later"), zero_stage=other, dtype="bfloat16"
        )
        for kind in ("weight", "low", "exp_avg", "exp_avg_sq"):
            found, wanted = merged(loaded, kind), merged(outs, kind)
            assert all(torch.equal(found[name], wanted[name]) for name in wanted), (ranks, kind)
        assert (tmp_path / str(ranks) / "exported" / "model.safetensors").read_bytes() == exported
