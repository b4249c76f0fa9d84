"""Case G20, kind K20: values that contradict each other, and what is not built, are refused by name."""

from pathlib import Path

import pytest

import offloadz.config as conf
from offloadz.config import Config, config_from_tables, load_config
from offloadz.plan.errors import ConfigError

BASE = '[model]\npath = "m"\n[data]\ntrain = ["a.jsonl"]\npacking = false\n[train]\noutput = "runs/a"\n'


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return written(tmp_path, BASE)


def written(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text(text)
    return path


def refusal(path: Path, *overrides: str, training: bool = True) -> str:
    with pytest.raises(ConfigError) as error:
        load_config(path, overrides, training=training)
    return str(error.value)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["train.batch_size=4", "train.micro_batch_size=5"], "needs at most train.batch_size = 4"),
        (["train.batch_size=4", "train.micro_batch_size=2", "offload.sweeps=3"], "needs at most 2"),
        (["train.steps=5", "train.epochs=2"], "both say how long"),
        (["train.steps=5", "optimizer.warmup=6"], "needs at most train.steps = 5"),
        (["optimizer.warmup=1.5"], "whole number of steps"),
        (["optimizer.schedule=constant", "optimizer.min_lr=0.1"], "never ends lower"),
        (["offload.commit=in_place"], "in_place cannot clip"),
        (["data.eval=b.jsonl", "data.eval_share=0.1"], "both say what is held out"),
        (["train.eval_every=5"], "without data to evaluate on"),
        (["data.format=text", "data.train_on=last"], "which has no turns"),
        (["data.format=text", "data.chat_template=chatml"], "which has no turns"),
        (["offload.parameters=disk"], 'offload.parameters = "disk" needs a directory'),
        (["offload.activations=disk"], 'offload.activations = "disk" needs a directory'),
        (["train.resume_with=optimizer.lrr"], "nearest is optimizer.lr"),
        (["optimizer.momentum=0.5"], 'belongs to sgd, with name = "adamw"'),
        (["optimizer.name=lion", "optimizer.eps=1e-6"], 'belongs to adamw and adam, with name = "lion"'),
        (["optimizer.name=sgd", "optimizer.betas=[0.9, 0.99]"], "belongs to adamw, adam and lion"),
        (["optimizer.state=int8-sr", "model.dtype=float32"], 'write "int8"'),
    ],
)
def test_contradictions_are_refused(base: Path, overrides: list[str], words: str) -> None:
    assert words in refusal(base, *overrides)


@pytest.mark.parametrize(
    "override",
    [
        "model.dtype=float16",
        "model.attention=flash_attention_2",
    ],
)
def test_what_is_not_built_is_refused_by_name(base: Path, override: str) -> None:
    key, _, value = override.partition("=")
    told = refusal(base, override)
    assert told.startswith((f"{key} (command line): ", "2 problems")) and value.strip("[]") in told
    assert "not built" in told or "is refused" in told
    assert "write " in told or "; name " in told


def test_each_default_is_in_force() -> None:
    assert config_from_tables({"model": {"path": "m"}}) == Config(model=conf.ModelConfig(path="m"))


def test_a_machine_may_be_trained_on_as_planned_for(base: Path) -> None:
    for training in (False, True):
        found = load_config(base, ["offload.machine=laptop"], training=training)
        assert found.offload.machine == "laptop"


def test_what_has_no_default_is_asked_for(tmp_path: Path) -> None:
    told = refusal(written(tmp_path, "[data]\npacking = false\n"), training=True)
    assert told.startswith("3 problems") and all(key in told for key in ("model.path", "data.train", "train.output"))
