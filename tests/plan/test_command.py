"""`offloadz plan` and `offloadz show` as a user runs them: exit status, numbers, no torch.  Case G01, kind K01."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from offloadz.plan.command import SHOWN_LINES
from offloadz.plan.ops import Program

CONFIG = {
    "model_type": "llama", "vocab_size": 32000, "hidden_size": 1024, "intermediate_size": 2816,
    "num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 4, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A 24-layer model known by its config.json only."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "swap").mkdir()
    path = tmp_path / "run.toml"
    path.write_text(f"""
[model]
path = "{tmp_path}/model"
init = "random"
[data]
train = ["none.jsonl"]
max_length = 512
packing = false
[train]
output = "{tmp_path}/out"
batch_size = 8
[offload]
swap = ["{tmp_path}/swap"]
""")
    return path


def run(*words: str) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own, which says on its last line of stderr whether torch was imported."""
    script = (
        "import sys, atexit\n"
        "atexit.register(lambda: print('torch' in sys.modules, 'numpy' in sys.modules, file=sys.stderr))\n"
        "from offloadz.cli import main\n"
        f"sys.exit(main({list(words)!r}))"
    )
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)


def test_a_plan_that_fits_prints_its_table_without_torch(config: Path) -> None:
    done = run("plan", str(config), "--set", "host_memory=2GiB", "--set", "disk_free=900GiB")
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == "False False", "neither torch nor numpy is needed for a plan"
    said = ("--set host_memory=2GiB", "optimizer on disk", "slots 2", "from typical, unverified rates")
    for text in ("load", "step", "save", "export", "peak", "host", "disk", "checkpoint", "bottleneck", *said):
        assert text in done.stdout, text
    assert not (config.parent / "out").exists() and not any((config.parent / "swap").iterdir()), "a plan writes nothing"


def test_a_plan_that_does_not_fit_ends_with_3_and_says_what_would(config: Path) -> None:
    done = run("plan", str(config), "offload.swap=[]", "--set", "host_memory=2GiB", "--json")
    assert done.returncode == 3
    found = json.loads(done.stdout)
    assert not found["fits"] and "offload.swap" in found["smallest_change"]
    assert "does not fit" in done.stderr and found["smallest_change"] in done.stderr
    assert "Traceback" not in done.stderr


def test_what_limits_memory_and_a_drive_that_is_not_mounted_are_told(config: Path) -> None:
    """A swap path that is not there may be a drive that is not mounted: a run would fill the one of its parent."""
    other = config.parent / "nvme0"
    done = run(
        "plan", str(config), f'offload.swap=["{other}"]', "offload.host_memory=1GiB", "--set", "host_memory=2GiB"
    )
    assert f"note: offload.swap: {other} is not there; a run makes it, on the drive of {config.parent}" in done.stdout
    assert "host memory is limited by: offload.host_memory\n" in done.stdout, done.stdout
    done = run("plan", str(config), "--set", "host_memory=2GiB")
    assert "host memory is limited by: 90% of --set host_memory=2GiB\n" in done.stdout
    assert "is not there" not in done.stdout and max(map(len, done.stdout.splitlines()[:1])) > 100, "one line"


def test_json_counts_the_parameters_bytes(config: Path) -> None:
    done = run("plan", str(config), "--set", "host_memory=2GiB", "--set", "disk_free=900GiB", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    block = 2 * 1024**2 + 2 * 256 * 1024 + 3 * 1024 * 2816 + 2 * 1024
    elements = 32000 * 1024 + 24 * block + 1024
    state = found["terms"]["step"]["disk"]["optimizer"]
    assert found["copies"] == 3 and found["linked"] and found["terms"]["save"]["checkpoint"]["checkpoints"] == 0
    state //= found["copies"]
    assert 0 <= state - elements * 10 < 24 * 4 * 4096, "10 bytes a parameter, padded to pages"
    assert found["peak"]["host"] <= 0.9 * (2 << 30)
    assert found["disk_written_per_step"] >= elements * 10
    assert found["disk_written_per_day"] == int(found["disk_written_per_step"] * (86400 / found["step_s"]))


def test_a_13b_is_planned_for_a_desktop_with_a_gpu(config: Path) -> None:
    """The line of the README, and the same with all in memory: whatever this box has."""
    large = {**CONFIG, "hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40, "vocab_size": 32000,
             "num_attention_heads": 40, "num_key_value_heads": 40, "tie_word_embeddings": False}  # fmt: skip
    (config.parent / "model/config.json").write_text(json.dumps(large))
    done = run("plan", str(config), "--machine", "rtx4090", "--set", "host_memory=64GiB")
    assert done.returncode == 0, done.stderr
    for text in ("13,015.9 M parameters", "bfloat16 on cuda", "--set host_memory=64GiB", "samsung-990-pro-2tb"):
        assert text in done.stdout, done.stdout
    swapless = ("offload.swap=[]", "--set", "host_memory=256GiB")
    done = run("plan", str(config), *swapless, "--machine", "rtx4090", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["limits"]["checkpoint"] == 2 * 10**12 and not found["smallest_change"]


def test_shapes_that_are_no_files_are_told(config: Path) -> None:
    """By transformers on meta, without a word of its own; by config.json where the weights are not there yet."""
    tiny = {**CONFIG, "model_type": "olmo2", "vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2}
    (config.parent / "model/config.json").write_text(json.dumps(tiny))
    done = run("plan", str(config))
    assert done.returncode == 0 and done.stderr.splitlines() == ["True True"], "no warning of transformers"
    assert "note: shapes of olmo2 by transformers on the meta device" in done.stdout
    (config.parent / "model/config.json").write_text(json.dumps({**tiny, "pad_token_id": 999}))
    done = run("plan", str(config))
    assert done.returncode == 2 and "'olmo2', which transformers cannot build: Padding_idx" in done.stderr
    (config.parent / "model/config.json").write_text(json.dumps(CONFIG))
    done = run("plan", str(config), "model.init=pretrained")
    assert done.returncode == 0 and done.stderr.splitlines() == ["False False"]
    assert "model holds no weights: shapes from its config.json alone; a run needs model.safetensors" in done.stdout
    assert "note: shapes" not in (told := run("plan", str(config)).stdout) and "holds no weights" not in told
    done = run("show", str(config), "model.init=pretrained")
    assert done.returncode == 2 and "model.safetensors is missing" in done.stderr


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--machine", "rtx4900"], "machine 'rtx4900' is not in the catalogue; nearest is rtx4090"),
        (["--set", "hostmemory=1GiB"], "--set 'hostmemory=1GiB'"),
        (["--set", "host_memory=much"], "--set host_memory"),
        (["offload.device=cuda:0"], 'offload.device = "cuda:0": torch finds no accelerator here'),
        (["offload.device=gpu"], 'needs "auto", "cpu" or a device with its number'),
        (["model.freeze=['*nonesuch*']"], "model.freeze: '*nonesuch*' matches none"),
        (
            ["optimizer.groups=[{match=['*embed*', '*nonesuch*'], lr=1e-6}]"],
            "optimizer.groups: '*nonesuch*' matches none",
        ),
        (["model.path=/nowhere"], "/nowhere"),
    ],
)
def test_what_is_wrong_or_not_built_ends_with_2(config: Path, words: list[str], text: str) -> None:
    done = run("plan", str(config), *words)
    assert done.returncode == 2, done.stdout + done.stderr
    assert text in done.stderr and "Traceback" not in done.stderr and not done.stdout


def test_show_prints_the_program_and_writes_the_trace(config: Path) -> None:
    trace = config.parent / "trace.json"
    short = run("show", str(config), "offload.parameters=disk")
    whole = run("show", str(config), "offload.parameters=disk", "--trace", str(trace))
    assert (short.returncode, whole.returncode) == (0, 0), short.stderr + whole.stderr
    assert short.stderr.splitlines()[-1] == "False False"
    numbered = [line for line in whole.stdout.split("\n\n")[0].splitlines() if line.strip()]
    program = Program.parse("\n".join(numbered))
    assert program.text().splitlines() == [line.rstrip() for line in numbered], "what is shown is the program itself"
    assert f"... {len(program) - SHOWN_LINES} more lines of {len(program)}" in short.stdout
    for text in ("predicted:", "device", "disk_read", "busy", "###"):
        assert text in short.stdout
    events = json.loads(trace.read_text())["traceEvents"]
    assert sum(e["ph"] == "X" for e in events) == len(program)


def test_an_earlier_runs_checkpoints_count_as_free(config: Path) -> None:
    """A resumed run replaces them, so the second plan of a run that fits is not refused."""
    from offloadz.config import load_config
    from offloadz.plan.machine import disk_free
    from offloadz.plan.question import question

    old = config.parent / "out/checkpoints/step-000001"
    old.mkdir(parents=True)
    (old / "weights").write_bytes(bytes(256 << 20))
    wishes = question(load_config(config)).wishes
    free = disk_free(config.parent)
    assert wishes.same_drive and wishes.disk_free is not None and wishes.checkpoint_free is not None
    for room in (wishes.disk_free, wishes.checkpoint_free):
        assert abs(room - free - (256 << 20)) < 128 << 20  # others may write to the drive meanwhile
