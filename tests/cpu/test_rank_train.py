"""`offloadz train` over several ranks: one log, one set of files, any number of ranks goes on from any other."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from group import ROOT, Nursery, logs
from tiny import ON_DISK, tables, write_config

from offloadz.config import load_config
from offloadz.plan.command import plan_command
from offloadz.plan.errors import ConfigError
from offloadz.plan.question import question
from offloadz.runtime.ranks import Solo
from offloadz.train.planning import decided, plan_lines


def trained(nursery: Nursery, ranks: int, config: Path, *overrides: str) -> list[str]:
    log = config.parent / "log"
    nursery.start(ranks, "command", log, arguments=["train", str(config), *overrides])
    statuses = nursery.wait()
    assert not any(statuses), logs(log, ranks)
    return [Path(f"{log}-{rank}").read_text() for rank in range(ranks)]


def lines(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


def configured(folder: Path, **changes: object) -> Path:
    folder.mkdir()
    told = {
        "train__batch_size": 5,
        "train__eval_every": 3,
        "data__eval_share": 0.2,
        "model__dtype": "float32",
        **changes,
    }
    return write_config(folder / "config.toml", tables(folder, **told))


def test_any_number_goes_on_from_any_other(nursery: Nursery, tmp_path: Path) -> None:
    asked = {"train__sample_prompts": ["w3 w4"], "train__sample_tokens": 3}
    alone, many = configured(tmp_path / "a", **asked), configured(tmp_path / "b", **asked)
    trained(nursery, 1, alone)
    allow = 'train.resume_with=["train.steps"]'
    for ranks, steps, stage in ((2, 4, "3"), (1, 6, "auto"), (3, 9, "2"), (2, 12, "1")):
        told = trained(nursery, ranks, many, f"train.steps={steps}", allow, f"offload.zero_stage={stage}",
                       "optimizer.schedule=constant", "optimizer.warmup=2")  # fmt: skip
        assert f"finished: {steps} steps" in told[0]
        assert not any(told[1:]), "only the first rank speaks"
    first, second = lines(tmp_path / "a"), lines(tmp_path / "b")
    steps = [line for line in second if "loss" in line]
    assert [line["step"] for line in steps] == list(range(1, 13))
    assert [line["samples"] for line in steps] == [line["samples"] for line in first if "loss" in line]
    assert [line["target_tokens"] for line in steps] == [line["target_tokens"] for line in first if "loss" in line]
    assert (tmp_path / "b" / "run" / "final" / "model.safetensors").is_file()


def test_the_same_numbers_as_one_process(nursery: Nursery, tmp_path: Path) -> None:
    for name, ranks in (("a", 1), ("b", 2)):
        trained(nursery, ranks, configured(tmp_path / name))
    for one, two in zip(lines(tmp_path / "a"), lines(tmp_path / "b"), strict=True):
        assert one.keys() == two.keys()
        for key in one.keys() & {"loss", "grad_norm", "eval_loss"}:
            assert two[key] == pytest.approx(one[key], rel=1e-4), (one["step"], key)
        for key in one.keys() & {"step", "tokens", "target_tokens", "eval_tokens", "samples", "lr"}:
            assert two[key] == one[key]


def test_torchrun_starts_it_and_a_signal_saves(tmp_path: Path) -> None:
    config = configured(tmp_path / "a", train__steps=4000, train__save_every=0, offload__zero_stage=3)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0"]
    command = [*command, "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "-m", "offloadz"]
    process = subprocess.Popen(
        [*command, "train", str(config)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    metrics, end = tmp_path / "a" / "run" / "metrics.jsonl", time.monotonic() + 120
    while not (metrics.exists() and len(metrics.read_text().splitlines()) > 2):
        assert process.poll() is None and time.monotonic() < end, process.communicate(timeout=20)[0]
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    told = process.communicate(timeout=60)[0]
    assert process.returncode != 0
    assert list((tmp_path / "a" / "run" / "checkpoints").glob("step-*")), told


def test_what_is_not_built_is_refused(tmp_path: Path) -> None:
    config = configured(tmp_path / "a")

    def told(*overrides: str, ranks: int = 2) -> str:
        asked = question(load_config(config, overrides), sets=[f"ranks={ranks}"])
        with pytest.raises(ConfigError) as error:
            asked.answer()
        return str(error.value)

    assert "torchrun" in told("offload.zero_stage=3", ranks=1)
    assert "row for each rank" in told("train.batch_size=1", "train.micro_batch_size=1")


def test_another_stage_than_the_plan_is_not_taken(tmp_path: Path) -> None:
    config = load_config(configured(tmp_path / "a"), ["offload.zero_stage=0"])
    plan = decided(config, None, lambda text: None, Solo())
    assert plan.placement.share.ranks == 1


def test_shares_and_totals_are_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = configured(tmp_path / "a", **ON_DISK)
    assert plan_command(config, sets=["ranks=2"]) == 0
    told = capsys.readouterr().out
    for words in ("a step for each of 2 ranks", "bytes for each of 2 ranks, predicted; checkpoints are one for all"):
        assert words in told
    for words in ("tokens/s over all 2 ranks", "written to swap over all 2 ranks", "host peak for each of 2 ranks"):
        assert words in told
    plan = question(load_config(config), sets=["ranks=2"]).answer()
    lines = "\n".join(plan_lines(plan, load_config(config)))
    assert "for each of 2 ranks, checkpoint" in lines and "tokens/s over all 2 ranks" in lines
    assert plan_command(config) == 0
    assert " ranks" not in capsys.readouterr().out
