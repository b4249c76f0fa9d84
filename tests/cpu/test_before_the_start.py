"""What plan and run must agree on, and what is said, before a weight is read.  Kinds K11 (freezing), K16 (lengths)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import families
import pytest
import torch
from tiny import make_model, tables, write_config

import offloadz.train.loop as loop
from offloadz.cli import main
from offloadz.config import config_from_tables
from offloadz.model.outline import outline
from offloadz.model.weights import load
from offloadz.plan.errors import ConfigError
from offloadz.plan.headers import model_spec
from offloadz.plan.question import question
from offloadz.plan.spec import ModelSpec
from offloadz.train.planning import plan_lines, read_task


def run(told: dict[str, dict[str, Any]]) -> int:
    return loop.train(config_from_tables(told, training=True))


# ---- frozen: the plan reads names from files, the run has those of the module ----


def trained(spec: ModelSpec) -> dict[str, int]:
    """Trained elements by parameter."""
    found: dict[str, int] = {}
    for section in (s for u in spec.units for s in u.sections if s.trainable):
        for member in section.members:
            found[member.name] = found.get(member.name, 0) + member.num_elements
    return found


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "llama", "gpt2"])
def test_plan_and_run_freeze_the_same(tmp_path: Path, family: str) -> None:
    torch.manual_seed(0)
    families.FAMILIES[family].build().save_pretrained(tmp_path)
    model = load(tmp_path, torch.float32)
    mixed = ["*.experts.*"], ["*.experts.gate_up_proj"], ["*layers.1.mlp*", "*norm*"], ["*gate.weight"]
    plain = ["*mlp*"], ["*.1.*"], ["*ln_*", "*norm*"]
    before = trained(model_spec(str(tmp_path), "float32"))
    for patterns in mixed if family in ("qwen3_moe", "mixtral") else plain[:2]:
        for kept in ((), tuple(patterns)):
            planned = model_spec(str(tmp_path), "float32", freeze=patterns, keep_float32=kept)
            drawn = outline(model, "float32", freeze=patterns, keep_float32=kept).spec
            assert trained(planned) == trained(drawn), patterns
            assert sum(trained(planned).values()) < sum(before.values()) == planned.num_elements
            assert sorted(u.num_elements for u in planned.units) == sorted(u.num_elements for u in drawn.units)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_a_name_that_only_files_have_is_refused_by_both(tmp_path: Path, family: str) -> None:
    families.FAMILIES[family].build().save_pretrained(tmp_path)
    patterns = ["*experts.0.*"]
    with pytest.raises(ConfigError, match=r"'\*experts\.0\.\*' matches none"):
        model_spec(str(tmp_path), "float32", freeze=patterns)
    with pytest.raises(ConfigError, match=r"'\*experts\.0\.\*' matches none"):
        outline(load(tmp_path, torch.float32), "float32", freeze=patterns)


# ---- samples longer than the model's positions ----


def test_more_than_a_table_of_positions_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_model(tmp_path / "model", "gpt2")
    words = r"data\.max_length: 65 tokens, the model has a table of 64 positions .* needed: at most 64"
    with pytest.raises(ConfigError, match=words):
        run(tables(tmp_path, data__max_length=65))
    assert not (tmp_path / "swap").exists()
    with pytest.raises(SystemExit) as caught:
        main(["plan", str(write_config(tmp_path / "run.toml", tables(tmp_path, data__max_length=65)))])
    assert caught.value.code == 2 and "65" in capsys.readouterr().err
    asked = {"train__sample_prompts": ["w1 w2"], "train__sample_tokens": 63, "data__max_length": 64}
    with pytest.raises(ConfigError, match=r"train\.sample_prompts with train\.sample_tokens: 65 tokens"):
        run(tables(tmp_path, **asked))
    assert (
        run(tables(tmp_path, **{**asked, "train__sample_tokens": 62, "train__steps": 1, "optimizer__warmup": 0})) == 0
    )


def test_more_than_computed_positions_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tables(tmp_path, data__max_length=65, train__steps=1, optimizer__warmup=0)
    assert run(config) == 0
    told = "data.max_length: 65 tokens are more than the 64 positions the model is made for"
    assert told in capsys.readouterr().out
    assert any(told in note for note in question(config_from_tables(config)).notes)
    assert question(config_from_tables(tables(tmp_path, data__max_length=64))).notes == ()


# ---- a swap directory where there is nothing ----


def test_a_swap_path_without_its_parent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short = {"train__steps": 1, "optimizer__warmup": 0, "offload__optimizer": "disk"}
    assert run(tables(tmp_path, **short)) == 0
    assert "is the drive mounted" not in capsys.readouterr().out
    near = {"offload__swap": [str(tmp_path / "nvme" / "swap")], "train__output": str(tmp_path / "second")}
    assert run(tables(tmp_path, **short, **near)) == 0
    assert f"swap: {tmp_path / 'nvme'} does not exist and is made, with swap in it" in capsys.readouterr().out
    far = {"offload__swap": [str(tmp_path / "mnt" / "nvme" / "swap")], "train__output": str(tmp_path / "third")}
    with pytest.raises(ConfigError, match=r"offload\.swap = .*: neither .*mnt/nvme nor .*mnt exists; mount the drive"):
        run(tables(tmp_path, **short, **far))
    assert not (tmp_path / "mnt").exists()


# ---- a plan counts positions, a run tokens ----


def test_how_full_rows_are_is_told_where_they_are_padded(tmp_path: Path) -> None:
    config = config_from_tables(tables(tmp_path), training=True)
    samples = read_task(config).samples
    lines = list(plan_lines(question(config).answer(), config, samples))
    mean = samples.audit.num_tokens / len(samples)
    assert any(
        f"predicted for 192 positions a step (rows of data.max_length), about {int(6 * mean)} of" in t for t in lines
    )
