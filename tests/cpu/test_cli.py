"""The command line as a user meets it: real processes, real swap paths, a real dead run; statuses of the contract.

Case G04, kind K04 in part: what dead runs leave in a swap path is told with its size and removed only after a yes.
"""

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from offloadz import __version__
from offloadz.audit import data_command
from offloadz.check import check_command
from offloadz.plan.command import plan_command
from offloadz.plan.errors import ConfigError

ROOT = Path(__file__).parents[2]
HOLDER = """
import sys, time
from offloadz.memory.swapdir import SwapDir
held = SwapDir(sys.argv[1], "/runs/" + sys.argv[2])
(held.path / "state.bin").write_bytes(b"x" * (3 << 20))
print(held.path, flush=True)
time.sleep(600)
"""


def offloadz(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "offloadz", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", **environment},
        timeout=120,
    )


def holder(swap: Path, name: str) -> tuple[subprocess.Popen[str], Path]:
    """A process that holds a run's directory in `swap`."""
    command = [sys.executable, "-c", HOLDER, str(swap), name]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


@pytest.fixture
def dead_and_live(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """The directories of a run that was killed and of one that lives, both in `tmp_path`."""
    killed, dead = holder(tmp_path, "dead")
    living, live = holder(tmp_path, "live")
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    yield dead, live
    living.kill()
    living.wait()


def test_check_tells_what_this_machine_does(tmp_path: Path) -> None:
    done = offloadz("check", "--swap", str(tmp_path), OFFLOADZ_ISA="baseline")
    assert done.returncode == 0, done.stdout + done.stderr
    for words in ("instruction set baseline", "for the update", "may be used, by", "lock limit", "GPU: none", "free"):
        assert words in done.stdout
    assert f"swap path {tmp_path}: I/O by io_uring" in done.stdout or "threads (io_uring dropped: " in done.stdout
    assert done.stdout.endswith("all good\n")
    assert list(tmp_path.iterdir()) == []  # the try leaves nothing


def test_check_names_what_is_not_good(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = offloadz("check", "--swap", str(tmp_path / "file"), "--swap", str(tmp_path), OFFLOADZ_ISA="sse9")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    last = done.stdout.splitlines()[-1]
    assert last == f"not good: native library, swap path {tmp_path / 'file'}"
    assert "sse9" in done.stdout and "is not a directory" in done.stdout


def test_check_takes_swap_paths_from_a_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    swap = tmp_path / "not" / "yet"
    path = tmp_path / "run.toml"
    path.write_text(f'[model]\npath = "m"\n[data]\npacking = false\n[offload]\nswap = ["{swap}"]\n')
    assert check_command(path, [], [], False) == 0
    told = capsys.readouterr().out
    assert f"swap path {swap}" in told and "does not exist yet" in told and not swap.exists()


def test_check_takes_values_with_and_without_a_configuration(tmp_path: Path) -> None:
    path, other = tmp_path / "run.toml", tmp_path / "other"
    path.write_text('[model]\npath = "m"\n[offload]\nswap = ["/nowhere"]\n')
    for words in ([f'offload.swap=["{other}"]'], [str(path), f"offload.swap={other}"]):
        done = offloadz("check", *words, "offload.io=threads")
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"swap path {other}: I/O by threads" in done.stdout and "/nowhere" not in done.stdout
    done = offloadz("check", "offload.swapp=x")
    assert done.returncode == 2 and "nearest is offload.swap" in done.stderr


@pytest.mark.parametrize(("clean", "answers"), [(False, ""), (True, ""), (True, "n\n"), (True, "\n")])
def test_leftovers_are_told_and_kept_without_a_yes(
    dead_and_live: tuple[Path, Path],
    clean: bool,
    answers: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dead, live = dead_and_live
    monkeypatch.setattr(sys, "stdin", io.StringIO(answers))
    assert check_command(None, [], [str(dead.parent)], clean) == 0
    told = capsys.readouterr().out
    assert f"left by a dead run: {dead}, 3.0MiB, of /runs/dead" in told and str(live) not in told
    assert (dead / "state.bin").exists() and (live / "state.bin").exists()


def test_clean_removes_the_dead_after_a_yes_and_never_the_living(
    dead_and_live: tuple[Path, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    dead, live = dead_and_live
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\ny\n"))
    assert check_command(None, [], [str(dead.parent)], True) == 0
    assert "removed" in capsys.readouterr().out
    assert not dead.exists() and (live / "state.bin").exists()
    assert check_command(None, [], [str(dead.parent)], True) == 0
    assert f"nothing to clean: no dead run left anything in {dead.parent}" in capsys.readouterr().out


def test_a_swap_path_in_place_of_a_configuration_is_told_how(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"for a swap path write --swap {tmp_path}"):
        check_command(tmp_path, [], [], False)


# ---- data ----


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """config.json and a word tokenizer, no weights: an audit needs none."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, PreTrainedTokenizerFast

    words = ["<unk>", "</s>", "<|im_start|>", "<|im_end|>", "user", "assistant", "hello", "there", "good", "day"]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    folder = tmp_path / "model"
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        eos_token="</s>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
    ).save_pretrained(folder)
    LlamaConfig(vocab_size=len(words), hidden_size=8, num_attention_heads=2).save_pretrained(folder)
    return folder


def data_config(tmp_path: Path, model: Path, lines: list[str]) -> Path:
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n")
    path = tmp_path / "run.toml"
    path.write_text(
        f'[model]\npath = "{model}"\n'
        f'[data]\ntrain = ["{tmp_path / "a.jsonl"}"]\npacking = false\nchat_template = "chatml"\n'
    )
    return path


def dialogue(answer: str) -> str:
    turns = [{"role": "user", "content": "hello there"}, {"role": "assistant", "content": answer}]
    return json.dumps({"messages": turns})


def test_data_counts_and_marks_what_is_trained(tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert data_command(data_config(tmp_path, model, [dialogue("good day")] * 5), [], 2) == 0
    told = capsys.readouterr().out
    assert "5 samples from 5 records" in told
    assert told.count("\nsample ") == 2 and f"{tmp_path / 'a.jsonl'}:2" in told
    trained = told.split("«")[1].split("»")[0]
    assert "day" in trained and "<|im_end|>" in trained and "hello" not in trained


def test_bad_data_ends_with_status_2_and_its_line(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = data_config(tmp_path, model, [dialogue("good"), '{"messages": []}', dialogue("day")])
    done = offloadz("data", str(path))
    assert done.returncode == 2 and "a.jsonl:2" in done.stderr and "Traceback" not in done.stderr
    assert data_command(path, ["data.on_bad=skip"], 0) == 0
    told = capsys.readouterr().out
    assert "2 samples" in told and "1 bad" in told and "\nsample " not in told


def test_a_model_without_a_tokenizer_is_told_by_its_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import LlamaConfig

    bare = tmp_path / "bare"
    LlamaConfig(vocab_size=10, hidden_size=8, num_attention_heads=2, num_hidden_layers=2).save_pretrained(bare)
    path = data_config(tmp_path, bare, [dialogue("good")])
    with pytest.raises(ConfigError, match=r"bare holds no tokenizer, which is one of tokenizer\.json, "):
        data_command(path, [], 1)
    assert plan_command(path, ["model.init=random", "data.train=absent.jsonl"]) == 0
    told = capsys.readouterr().out
    assert "bare holds no tokenizer" in told and "data.train: absent.jsonl is no file here" in told


@pytest.mark.parametrize("text", [None, "{", '{"model_type": "llama", "hidden_size": 7}'])
def test_data_without_a_readable_model_is_refused(
    tmp_path: Path, text: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    if text is not None:
        (tmp_path / "absent").mkdir()
        (tmp_path / "absent" / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"model\.path"):
        data_command(data_config(tmp_path, tmp_path / "absent", [dialogue("good")]), [], 1)


# ---- errors and statuses ----


def test_a_wrong_configuration_ends_with_status_2_and_one_paragraph(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        '[model]\npath = "m"\n[data]\ntrain = ["a.jsonl"]\npacking = false\n[train]\noutput = "runs/a"\nstepz = 1\n'
    )
    done = offloadz("train", str(path), "optimizer.lrr=1")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("offloadz: 2 problems") and "Traceback" not in done.stderr
    assert "nearest is train.steps" in done.stderr and "nearest is optimizer.lr" in done.stderr
    assert not (tmp_path / "runs").exists()
    done = offloadz("train", str(path), OFFLOADZ_DEBUG="1")
    assert done.returncode == 2 and "Traceback" in done.stderr


@pytest.mark.parametrize(
    "arguments", [("bench", "--swap", "none"), ("report", "runs/none"), ("trian", "a.toml"), ("train",)]
)
def test_verbs_that_are_not_there_end_with_status_2(arguments: tuple[str, ...]) -> None:
    done = offloadz(*arguments)
    assert done.returncode == 2 and done.stderr and "Traceback" not in done.stderr


def test_the_version_is_told() -> None:
    assert offloadz("--version").stdout == f"offloadz {__version__}\n"


def test_set_is_no_way_to_change_a_configuration(tmp_path: Path) -> None:
    done = offloadz("train", str(tmp_path / "run.toml"), "--set", "a=b")
    assert done.returncode == 2 and "write section.key=value behind the configuration" in done.stderr


def test_help_needs_no_torch() -> None:
    code = "import sys, offloadz.cli as c; print('torch' in sys.modules, 'transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.stdout == "False False\n", done.stderr
    done = offloadz("--help")
    assert done.returncode == 0
    for verb in ("train", "plan", "show", "bench", "check", "data", "export", "report"):
        assert f"\n  {verb} " in done.stdout


def test_errors_become_the_statuses_of_the_contract() -> None:
    from offloadz.cli import exit_status, told
    from offloadz.plan.errors import DiskFailed, DoesNotFit

    kinds = {ConfigError("a"): 2, DoesNotFit("a"): 3, DiskFailed("a"): 1, KeyboardInterrupt(): 130, KeyError("a"): 1}
    assert [exit_status(error) for error in kinds] == list(kinds.values())
    assert told(DiskFailed("the disk")) == "the disk" and told(KeyError("a")) == "KeyError: 'a'"
