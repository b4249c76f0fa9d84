"""Checkpoints that outlive kills, edits and full disks, and load into any placement.  Case G14, kinds K14 and K15."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from fake_run import FakeRun, same_state, small_parts, tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from offloadz.model.files import StreamReader
from offloadz.model.manifest import decode, encode, read_manifest, verify
from offloadz.model.state import save_state
from offloadz.plan.errors import ConfigError, DamagedState, DiskFailed
from offloadz.train.checkpoint import load_checkpoint, newest_valid, save_checkpoint

FROZEN = ("model.layers.0.*",)


def made(model: nn.Module | None = None, part_elements: int = 1000, **how: Any) -> FakeRun:
    with small_parts(part_elements):
        return FakeRun(model or tiny("llama"), **how)


def changed(run: FakeRun, by: float) -> FakeRun:
    """As if updates had been made."""
    for view in run.session.views:
        for moment in view.moments.values():
            moment.add_(by)
    return run


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("kind", "tied"), [("llama", False), ("qwen3", True), ("gpt2", True)])
def test_everything_comes_back(tmp_path: Path, kind: str, tied: bool, dtype: str) -> None:
    freeze = FROZEN if kind == "llama" else ()
    run, wanted = (made(tiny(kind, tied), dtype=dtype, freeze=freeze, keep=("*.weight",) * 0) for _ in range(2))
    assert same_state(run, wanted)
    extra = {"step": 7, "loader": {"epoch": 2, "at": [1, 2]}, "lr": 0.1, "seen": torch.arange(5), "end": (1, None, 2.5)}
    random.seed(1), numpy.random.seed(2), torch.manual_seed(3)
    path = save_checkpoint(tmp_path, run, extra, keep=2)
    drawn = random.random(), numpy.random.rand(), float(torch.rand(()))
    run.wipe()
    assert not same_state(run, wanted)
    back = load_checkpoint(path, run)
    assert same_state(run, wanted)
    assert (random.random(), numpy.random.rand(), float(torch.rand(()))) == drawn
    assert run.optimizer.param_groups == wanted.optimizer.param_groups
    assert torch.equal(back.pop("seen"), extra.pop("seen")) and back == extra
    assert all(os.stat(p).st_mode & 0o077 == 0 for p in [path / "manifest.json", *path.glob("*.safetensors")])


def test_any_placement_reads_it(tmp_path: Path) -> None:
    """Other cuts into parts, and fp32 weights instead of split ones: the same masters and moments."""
    split = made(part_elements=1000)
    path = save_checkpoint(tmp_path, split, {"step": 1})
    for dtype, part_elements in (("bfloat16", 77), ("float32", 4096), ("bfloat16", 1 << 22)):
        other = made(dtype=dtype, part_elements=part_elements)
        other.wipe()
        load_checkpoint(path, other)
        for name, master in other.master().items():
            assert torch.equal(master, split.master()[name]), name
        second = save_state(tmp_path / f"again-{dtype}-{part_elements}", other, {"step": 1})
        with StreamReader(path / "optimizer.safetensors") as a, StreamReader(second / "optimizer.safetensors") as b:
            assert a.entries.keys() == b.entries.keys()
            assert all(torch.equal(a.read(name), b.read(name)) for name in a.entries)


def test_buffers_come_back(tmp_path: Path) -> None:
    model = tiny("llama")
    model.model.register_buffer("bias_of_experts", torch.arange(3.0))
    run = made(model)
    path = save_checkpoint(tmp_path, run, {"step": 1})
    model.model.bias_of_experts.zero_()
    load_checkpoint(path, run)
    assert model.model.bias_of_experts.tolist() == [0, 1, 2]


def test_of_another_model(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, made(), {"step": 1})
    deeper = made(tiny("llama", layers=3))
    before = {name: value.clone() for name, value in deeper.master().items()}
    with pytest.raises(ConfigError, match=r"missing: model\.layers\.2\..*exp_avg"):
        load_checkpoint(path, deeper)
    assert all(torch.equal(value, before[name]) for name, value in deeper.master().items())
    with pytest.raises(ConfigError, match=r"extra: model\.layers\.1"):
        load_checkpoint(path, made(tiny("llama", layers=1)))
    with pytest.raises(ConfigError, match=r"other frozen weights; extra: model\.layers\.0\..*\.exp_avg"):
        load_checkpoint(path, made(freeze=FROZEN))
    wide = tiny("llama")
    wide.lm_head.weight = nn.Parameter(torch.zeros(104, 24))
    with pytest.raises(ConfigError, match=r"misshapen: lm_head\.weight is \(103, 24\), the model needs \(104, 24\)"):
        load_checkpoint(path, made(wide))
    fewer = made()
    fewer.optimizer.param_groups.pop()
    with pytest.raises(ConfigError, match="has 2 groups, this run has 1"):
        load_checkpoint(path, fewer)


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    run = made()
    for step in range(1, 6):
        save_checkpoint(tmp_path, run, {"step": step}, keep=2)
        assert [p.name for p in sorted(tmp_path.iterdir())] == [f"step-{s:06d}" for s in (step - 1, step) if s]
    save_checkpoint(tmp_path, changed(run, 1), {"step": 3}, keep=2)  # the run went on from an older one
    assert newest_valid(tmp_path) == (tmp_path / "step-000003", [])
    save_checkpoint(tmp_path, changed(run, 1), {"step": 3}, keep=1)  # the same step again, replaced
    assert [p.name for p in tmp_path.iterdir()] == ["step-000003"]
    wanted = changed(changed(made(), 1), 1)
    load_checkpoint(tmp_path / "step-000003", run)
    assert same_state(run, wanted)
    with pytest.raises(ConfigError, match=r"train\.keep is 0"):
        save_checkpoint(tmp_path, run, {"step": 9}, keep=0)


def cut(name: str, by: int) -> Callable[[Path], None]:
    return lambda path: os.truncate(path / name, (path / name).stat().st_size - by)


def flip(name: str, at: int) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        data = bytearray((path / name).read_bytes())
        data[at] ^= 1
        (path / name).write_bytes(data)

    return change


def edit_manifest(change: Callable[[dict[str, Any]], object], honest: bool = False) -> Callable[[Path], None]:
    """Edit the list; an `honest` edit mends its checksum too."""

    def apply(path: Path) -> None:
        body = json.loads((path / "manifest.json").read_text())
        body.pop("checksum")
        change(body)
        from offloadz.model.manifest import _checksum

        body["checksum"] = _checksum(body) if honest else 1
        (path / "manifest.json").write_text(json.dumps(body))

    return apply


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no manifest": (lambda p: (p / "manifest.json").unlink(), "no finished checkpoint"),
    "empty manifest": (lambda p: (p / "manifest.json").write_text(""), "not readable"),
    "half a manifest": (cut("manifest.json", 300), "not readable"),
    "manifest is a list": (lambda p: (p / "manifest.json").write_text("[]"), "not readable"),
    "step edited": (edit_manifest(lambda m: m.update(step=99)), "not the one that was written"),
    "weights cut": (cut("weights.safetensors", 8), r"weights\.safetensors has \d+ bytes"),
    "moments gone": (lambda p: (p / "optimizer.safetensors").unlink(), r"optimizer\.safetensors is missing"),
    "config gone": (lambda p: (p / "model" / "config.json").unlink(), r"config\.json is missing"),
    "config edited": (flip("model/config.json", 20), r"config\.json is not the one"),
    "buffers cut": (cut("model/buffers.safetensors", 1), r"buffers\.safetensors has"),
    "bit in the weights": (flip("weights.safetensors", -5), r"weights\.safetensors: CRC-32"),
    "bit in the moments": (flip("optimizer.safetensors", -50_000), r"optimizer\.safetensors: CRC-32"),
    "bit in a header": (flip("weights.safetensors", 200), "CRC-32|not readable|header|gap|overlap|needs"),
    "two files changed places": (
        lambda p: (
            os.rename(p / "weights.safetensors", p / "x"),
            os.rename(p / "optimizer.safetensors", p / "weights.safetensors"),
        ),
        "missing|bytes",
    ),
    "list names less": (
        edit_manifest(lambda m: m["files"]["weights.safetensors"]["tensors"].pop("lm_head.weight"), honest=True),
        r"tensors differ from the list: lm_head\.weight",
    ),
    "list lacks its steps": (edit_manifest(lambda m: m.pop("steps"), honest=True), "lacks steps"),
    "of a later format": (edit_manifest(lambda m: m.update(format="offloadz checkpoint 9"), honest=True), "format"),
}


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("two")
    run = made()
    save_checkpoint(path, run, {"step": 100})
    save_checkpoint(path, changed(run, 1), {"step": 200})
    return path


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_newest_is_named_and_passed_over(two_checkpoints: Path, tmp_path: Path, what: str) -> None:
    subprocess.run(["cp", "-r", f"{two_checkpoints}/.", tmp_path], check=True)
    assert newest_valid(tmp_path) == (tmp_path / "step-000200", [])
    change, reason = DAMAGE[what]
    change(tmp_path / "step-000200")
    found, rejected = newest_valid(tmp_path)
    assert found == tmp_path / "step-000100"
    assert [path for path, _ in rejected] == [tmp_path / "step-000200"]
    with pytest.raises(DamagedState, match=reason):
        load_checkpoint(tmp_path / "step-000200", made())
    run = made()
    run.wipe()
    assert load_checkpoint(found, run, checked=True)["step"] == 100 and same_state(run, made())
    save_checkpoint(tmp_path, run, {"step": 150}, keep=2)
    assert newest_valid(tmp_path)[0] == tmp_path / "step-000150"
    save_checkpoint(tmp_path, run, {"step": 200}, keep=2)  # the damaged one's step comes again
    assert newest_valid(tmp_path) == (tmp_path / "step-000200", [])


def test_a_path_of_the_callers_choice(tmp_path: Path) -> None:
    run = made()
    run.session.step = 4
    (tmp_path / "empty").mkdir()
    for _ in range(2):  # into an empty directory, then over an earlier checkpoint
        assert read_manifest(save_state(tmp_path / "empty", run))["step"] == 4
    run.session.step = 9
    assert load_checkpoint(tmp_path / "empty", run) == {} and run.session.step == 4
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "text").write_text("ten years of work")
    with pytest.raises(ConfigError, match="thesis exists and is no checkpoint"):
        save_state(tmp_path / "thesis", run)
    assert (tmp_path / "thesis" / "text").exists()


def test_nothing_valid(tmp_path: Path) -> None:
    assert newest_valid(tmp_path / "absent") == (None, [])
    (tmp_path / "step-000001").mkdir()
    found, rejected = newest_valid(tmp_path)
    assert found is None and "no finished checkpoint" in rejected[0][1]


def test_no_room_is_said_before_anything_is_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = made()
    save_checkpoint(tmp_path, run, {"step": 1})
    monkeypatch.setattr("offloadz.model.aside.free_bytes", lambda directory: 4096)
    with pytest.raises(DiskFailed, match=r"a checkpoint in .* needs [\d.]+[KMG]?i?B, 4.0KiB are free"):
        save_checkpoint(tmp_path, run, {"step": 2}, keep=1)
    assert [p.name for p in tmp_path.iterdir()] == ["step-000001"] and newest_valid(tmp_path)[0]


def test_a_failure_in_the_middle_leaves_the_old_one(tmp_path: Path) -> None:
    run = made()
    save_checkpoint(tmp_path, run, {"step": 1})
    with pytest.raises(ValueError, match="cannot hold a object"):
        save_checkpoint(tmp_path, run, {"step": 2, "odd": object()}, keep=1)
    run.session.views[4].weight = torch.zeros(3)
    with pytest.raises((ValueError, RuntimeError)):
        save_checkpoint(tmp_path, run, {"step": 3}, keep=1)
    assert [p.name for p in tmp_path.iterdir()] == ["step-000001"] and newest_valid(tmp_path)[0]


FULL = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
import resource, signal
from fake_run import FakeRun, Plain
from offloadz.plan.errors import DiskFailed
from offloadz.train.checkpoint import save_checkpoint
run = FakeRun(Plain())
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))
try:
    save_checkpoint(Path(sys.argv[1]), run, {"step": 2}, keep=1)
except DiskFailed as error:
    print(error)
"""


def test_the_drive_refuses_bytes(tmp_path: Path) -> None:
    """A real refusal by the system, of a file that grows too large."""
    save_checkpoint(tmp_path, made(), {"step": 1})
    done = child(FULL, tmp_path)
    told = done.communicate(timeout=100)[0]
    assert done.returncode == 0 and "File too large" in told and ".safetensors" in told, told
    assert [p.name for p in tmp_path.iterdir()] == ["step-000001"] and newest_valid(tmp_path)[0]


SAVING = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from fake_run import FakeRun, Plain
from offloadz.train.checkpoint import load_checkpoint, newest_valid, save_checkpoint
run, root = FakeRun(Plain()), Path(sys.argv[1])
found, rejected = newest_valid(root)
step = load_checkpoint(found, run, checked=True)["step"] if found else 0
print("go", step, len(rejected), flush=True)
while True:
    step += 1
    for view in run.session.views:
        view.moments["exp_avg"].fill_(step)
    save_checkpoint(root, run, {"step": step}, keep=1 + step % 2)
    print("saved", step, flush=True)
"""


def child(text: str, root: Path) -> subprocess.Popen[str]:
    here = Path(__file__).parent
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(here.parents[1])}
    command = [sys.executable, "-c", text, str(root), str(here)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


def test_killed_while_saving(tmp_path: Path) -> None:
    """G14 on the level of files: kill -9 at random moments of a loop that only saves."""
    draw, reached = random.Random(5), 0
    for _ in range(3):
        process = child(SAVING, tmp_path)
        lines = [process.stdout.readline()]  # type: ignore[union-attr]
        assert lines[0].startswith("go"), lines[0]
        _, step, num_rejected = lines[0].split()
        assert int(step) >= reached and num_rejected == "0"
        time.sleep(draw.random() * 0.5)
        process.send_signal(signal.SIGKILL)
        lines += process.communicate()[0].splitlines()
        saved = [int(line.split()[1]) for line in lines if line.startswith("saved")]
        reached = max([reached, *saved])
        found, rejected = newest_valid(tmp_path)
        assert rejected == [] and (found is not None or reached == 0)
        if found:
            step_found = read_manifest(found)["step"]
            assert step_found in (reached, reached + 1)
            with StreamReader(found / "optimizer.safetensors") as reader:
                assert all((reader.read(n) == step_found).all() for n in reader.entries if n.endswith("exp_avg"))
            reached = step_found
        assert len(list(tmp_path.iterdir())) <= 3  # kept ones, and at most one whose removal was cut off
        assert not list(tmp_path.glob("*.tmp-*"))
    assert reached > 3


plain_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(max_size=20),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=20,
)


@settings(max_examples=30, deadline=None)
@given(plain_values)
def test_values_come_back_through_json(value: Any) -> None:
    assert decode(json.loads(json.dumps(encode(value)))) == value


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64, torch.bool, torch.uint8])
@pytest.mark.parametrize("shape", [(), (0,), (3, 2), (1, 0, 4)])
def test_tensors_come_back_through_json(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor: Tensor = torch.randint(0, 2, shape).to(dtype)
    back = decode(json.loads(json.dumps(encode({"t": tensor, "a": numpy.arange(6).reshape(2, 3)}))))
    assert back["t"].dtype == dtype and back["t"].shape == tensor.shape and torch.equal(back["t"], tensor)
    assert (back["a"] == numpy.arange(6).reshape(2, 3)).all()


def test_no_pickle(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, made(), {"step": 1})
    verify(path, read_manifest(path))
    assert {p.suffix for p in path.rglob("*") if p.is_file()} == {".json", ".safetensors"}
