"""Data sets by their hub name, out of a cache in the hub's own layout, without a network.  Kind K16."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tiny import make_model, tables, write_config

from offloadz.plan.errors import ConfigError
from offloadz.train.hub import HubName, hub_name
from offloadz.train.records import find_files

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def cached(cache: Path, repo: str, *files: str, commit: str = COMMIT, ref: str = "main") -> Path:
    """A repository as `huggingface_hub` leaves it: blobs, links to them by commit, and a ref."""
    folder = cache / f"datasets--{repo.replace('/', '--')}"
    for number, name in enumerate(files):
        blob = folder / "blobs" / f"{commit[:8]}{number}"
        blob.parent.mkdir(parents=True, exist_ok=True)
        rows = [{"text": f"w{k} w{k + 1} w{k + 2}"} for k in range(number, number + 4)]
        if name.endswith(".parquet"):
            pq.write_table(pa.Table.from_pylist(rows), blob)
        else:
            blob.write_text("".join(json.dumps(row) + "\n" for row in rows))
        link = folder / "snapshots" / commit / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    (folder / "refs").mkdir(exist_ok=True)
    (folder / "refs" / ref).write_text(commit)
    return folder / "snapshots" / commit


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What HF_HUB_CACHE and HF_HUB_OFFLINE=1 set when they stand in the environment at the start."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache"


def test_the_command_reads_a_cached_data_set(tmp_path: Path) -> None:
    """The environment of a real process; links into the cache are followed, places are told."""
    make_model(tmp_path / "model")
    cached(tmp_path / "cache", "someone/words", "README.md", "data/train.jsonl", "data/test.jsonl")
    told = tables(tmp_path, data__train=["someone/words"], data__eval=["someone/words:test"])
    config = write_config(tmp_path / "run.toml", told)
    env = {**os.environ, "HF_HUB_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "offloadz", "data", str(config)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert f"snapshots/{COMMIT}/data/train.jsonl" in done.stdout and "4 samples from 4 records in 1 file" in done.stdout
    assert f"snapshots/{COMMIT}/data/test.jsonl" in done.stdout and "are trained on" not in done.stdout
    missing = subprocess.run(
        [*command, 'data.train=["someone/else"]'], env=env, capture_output=True, text=True, timeout=120
    )
    assert missing.returncode == 2 and "Traceback" not in missing.stderr
    assert "'someone/else' is no file here" in missing.stderr and "neither from its cache" in missing.stderr
    same = subprocess.run(
        [*command, 'data.eval=["someone/words"]'], env=env, capture_output=True, text=True, timeout=120
    )
    assert "data.eval names files that are trained on" in same.stdout


CHOICES = [
    ("a/b", ["x.jsonl", "y.jsonl"], ["x.jsonl", "y.jsonl"]),
    ("a/b", ["data/train-00001-of-00002.parquet", "data/train-00000-of-00002.parquet", "data/test-0.parquet"],
     ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"]),
    ("a/b:test", ["train.jsonl", "test.jsonl"], ["test.jsonl"]),
    ("a/b:validation", ["train/0.jsonl", "validation/0.jsonl"], ["validation/0.jsonl"]),
    ("a/b", ["dialogues.json", "dataset_infos.json", "tokenizer_config.json"], ["dialogues.json"]),
    ("a/b/en/train.jsonl", ["en/train.jsonl", "fr/train.jsonl"], ["en/train.jsonl"]),
    ("a/b/*/train.jsonl", ["en/train.jsonl", "fr/train.jsonl", "fr/test.jsonl"], ["en/train.jsonl", "fr/train.jsonl"]),
    ("a/b/en/*:test", ["en/train.jsonl", "en/test.jsonl"], ["en/test.jsonl"]),
    ("a/b@v1", ["train.jsonl"], ["train.jsonl"]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "files", "wanted"), CHOICES)
def test_which_files_are_meant(cache: Path, name: str, files: list[str], wanted: list[str]) -> None:
    root = cached(cache, "a/b", *files, ref="v1" if "@" in name else "main")
    assert find_files([name]) == [str(root / file) for file in wanted]


REFUSED = [
    (
        "a/b",
        ["train.jsonl", "train.parquet"],
        r"several kinds .*train\.jsonl, train\.parquet.*such as a/b/train\.jsonl",
    ),
    ("a/b", ["en/train.jsonl", "fr/train.jsonl"], r"several directories \(en/train\.jsonl, fr/train\.jsonl\)"),
    ("a/b", ["test.jsonl", "dev.jsonl"], r"no file of the split 'train'; its files are of the splits dev, test"),
    ("a/b:test", ["train.jsonl"], r"no file of the split 'test'; its files are of the splits train"),
    ("a/b", ["README.md", "words.csv"], r"several|no file"),
    ("a/b/no.jsonl", ["train.jsonl"], r"holds no 'no\.jsonl'; it holds train\.jsonl"),
    ("a/b@v2", ["train.jsonl"], r"is no file here, and as a data set of the hub it is not to be had"),
    ("b/a", ["train.jsonl"], r"'b/a' is no file here"),
]


@pytest.mark.parametrize(("name", "files", "words"), REFUSED)
def test_what_leaves_a_choice_is_refused(cache: Path, name: str, files: list[str], words: str) -> None:
    cached(cache, "a/b", *files)
    with pytest.raises(ConfigError, match=words):
        find_files([name])


def test_what_is_a_path_is_no_hub_name(cache: Path) -> None:
    assert hub_name("org/name") == HubName("org/name", "", None, "")
    assert hub_name("org/name/x/*.json@v1:dev") == HubName("org/name", "x/*.json", "v1", "dev")
    (cache.parent / "data").mkdir()
    for path in ("data/x", "data/x/y.jsonl", "org/x.jsonl", "/org/name", "./org/name", "name", "a/b/../c", "~/a/b", ""):
        assert hub_name(path) is None, path
    with pytest.raises(ConfigError, match=r"'data/x/y\.jsonl' matches no file"):
        find_files(["data/x/y.jsonl"])
