"""A `model.path` that can only be a path and is not there is told at once, whoever asks; the hub is not.  Kind K16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny import tables

from offloadz.config import config_from_tables
from offloadz.model.weights import load
from offloadz.plan.errors import ConfigError
from offloadz.plan.headers import find_directory, local_directory
from offloadz.train.planning import read_tokenizer


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))

    def asked(*args: Any, **more: Any) -> None:
        raise AssertionError("the hub was asked")

    for who in ("huggingface_hub.snapshot_download", "huggingface_hub.try_to_load_from_cache"):
        monkeypatch.setattr(who, asked)
    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", asked)
    return tmp_path


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("./modle", "{here} holds no modle; nearest is model"),
        ("modle", "{here} holds no modle; nearest is model"),
        ("~/modle", "{here} holds no modle; nearest is model"),
        ("models/tinny", "{here}/models holds no tinny; nearest is tiny"),
        ("models/tinny/1/x", "{here}/models holds no tinny; nearest is tiny"),
        ("../{name}/zzz", "holds no zzz; needed: a Hugging Face directory"),
        ("model/config.json", "{here}/model/config.json is a file"),
    ],
)
def test_what_is_not_there_is_told_at_once(path: str, told: str, here: Path) -> None:
    path, told = path.format(name=here.name), told.format(here=here)
    config = config_from_tables(tables(here, model__path=path))
    for ask in (lambda: load(path), lambda: find_directory(path), lambda: read_tokenizer(config)):
        with pytest.raises(ConfigError, match=r"^model\.path = ") as caught:
            ask()
        assert told in str(caught.value) and "config.json" in str(caught.value) and "org/name" in str(caught.value)


def test_what_can_be_a_name_of_the_hub_goes_there_and_a_path_never_does(here: Path) -> None:
    assert local_directory("org/name") is None
    assert local_directory("~/model") == here / "model" and local_directory("models/tiny") == Path("models/tiny")
    with pytest.raises(ConfigError, match="holds no org"):
        local_directory(Path("org/name"))
    with pytest.raises(ConfigError, match=r"model\.path = '' is not a directory"):
        find_directory("")
