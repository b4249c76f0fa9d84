"""What a newcomer sees is true: the quickstart trains, exports and loads, and the documentation agrees with the code.

The quickstart runs here as the README's command does, with fewer steps and its output elsewhere.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from itertools import islice
from pathlib import Path
from types import ModuleType

import pytest
import torch

from offloadz.model.linked import SavedState

ROOT = Path(__file__).parent.parent.parent
QUICKSTART = ROOT / "examples" / "quickstart"
NUM_STEPS = 30
COMMANDS = ("pip install . && offloadz train examples/quickstart.toml", 'pip install -e ".[test]" && pytest')
KEYS = {
    "model": "path init dtype keep_float32 freeze attention kernels add_tokens trust_remote_code",
    "data": "train eval eval_share format max_length on_long on_bad packing train_on chat_template shuffle",
    "train": "output steps epochs batch_size micro_batch_size seed log_every eval_every sample_prompts sample_every "
    "sample_tokens save_every keep keep_weights resume resume_with max_skipped trace_steps",
    "optimizer": "name lr betas eps momentum weight_decay no_decay groups max_grad_norm schedule warmup min_lr state",
    "offload": "device parameters gradients optimizer activations swap machine device_memory host_memory slots "
    "recompute sweeps "
    "commit checksum io threads zero_stage",
    "debug": "poison samples",
}


def module_of(path: Path) -> ModuleType:
    """A script of the repository as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def offloadz(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own, from the root of the repository."""
    command = [sys.executable, "-m", "offloadz", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of a short quickstart."""
    place = tmp_path_factory.mktemp("quickstart")
    overrides = [f"train.output={place}/run", f'offload.swap=["{place}/swap"]', f"train.steps={NUM_STEPS}"]
    done = offloadz("train", "examples/quickstart.toml", *overrides, "train.save_every=0", "train.eval_every=0")
    assert done.returncode == 0, done.stderr
    assert list((place / "swap").iterdir()) == []
    return place / "run"


def test_the_loss_falls_by_half_with_everything_on_disk(finished: Path) -> None:
    lines = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == list(range(1, NUM_STEPS + 1))
    last = [line["loss"] for line in steps[-5:]]
    assert sum(last) / len(last) < steps[0]["loss"] / 2
    assert [line["eval_tokens"] for line in lines if "eval_loss" in line] == [622]
    placement = json.loads((finished / "plan.json").read_text())["placement"]
    assert placement == dict.fromkeys(("parameters", "gradients", "optimizer", "activations"), "disk")
    assert min(line["bytes"]["disk_written"] for line in steps[1:]) > 12 * 900_000


def test_final_loads_with_transformers_and_has_the_bits_of_the_run(finished: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, told = AutoModelForCausalLM.from_pretrained(finished / "final", output_loading_info=True)
    assert not any(told.values()), told
    with SavedState(finished / "checkpoints" / f"step-{NUM_STEPS:06d}") as state:
        masters = {name: state.weights.read(name).view(entry.shape) for name, entry in state.weights.entries.items()}
    found = dict(model.named_parameters())
    assert set(found) == set(masters)
    for name, master in masters.items():
        assert found[name].dtype == torch.bfloat16
        rounded = ((master.view(torch.int32) + 0x8000) >> 16).to(torch.int16)  # to nearest, ties away from zero
        assert torch.equal(found[name].detach().view(torch.int16), rounded), name
    tokenizer = AutoTokenizer.from_pretrained(finished / "final")
    chat = [{"role": "user", "content": "What is the opposite of hot?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "opposite" in tokenizer.decode(answer)


def test_the_script_makes_the_files_of_the_repository(tmp_path: Path) -> None:
    module_of(ROOT / "examples" / "make_quickstart.py").make(tmp_path)
    for name in ("train.jsonl", "eval.jsonl"):
        assert (tmp_path / name).read_bytes() == (QUICKSTART / name).read_bytes()
    read = lambda folder, name: json.loads((folder / "model" / name).read_text())  # noqa: E731
    new, old = (read(folder, "config.json") for folder in (tmp_path, QUICKSTART))
    assert {**new, "transformers_version": ""} == {**old, "transformers_version": ""}
    new, old = (read(folder, "tokenizer.json")["model"]["vocab"] for folder in (tmp_path, QUICKSTART))
    assert new == old
    assert sum(path.stat().st_size for path in QUICKSTART.rglob("*") if path.is_file()) < 1_000_000


def test_no_dialogue_of_the_evaluation_is_trained_on() -> None:
    train, held_out = ((QUICKSTART / f"{name}.jsonl").read_text().splitlines() for name in ("train", "eval"))
    assert not set(train) & set(held_out)


def test_the_python_loop_runs(tmp_path: Path) -> None:
    losses = module_of(ROOT / "examples" / "python_loop.py").main(6, tmp_path)
    assert losses[-1] < losses[0] - 1
    assert (tmp_path / "model" / "model.safetensors").is_file() and (tmp_path / "checkpoint").is_dir()


def test_the_two_commands_stand_in_the_readme() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert all(command in lines for command in COMMANDS)
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert COMMANDS[1] in script


def test_every_key_is_documented() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    for section, keys in KEYS.items():
        part = re.split(r"^## ", page, flags=re.MULTILINE)
        rows = next(p for p in part if p.startswith(f"[{section}]"))
        assert re.findall(r"^\| `(\w+)`", rows, re.MULTILINE) == keys.split()


def test_what_is_made_from_code_is_up_to_date() -> None:
    """Mend with `python docs/make_tables.py`."""
    tables = module_of(ROOT / "docs" / "make_tables.py")
    assert (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8") == tables.configuration_page()
    assert tables.program_text() in (ROOT / "docs" / "step.md").read_text(encoding="utf-8")
    zero, ranks = (ROOT / "docs" / "zero.md").read_text(encoding="utf-8"), module_of(ROOT / "benchmarks" / "ranks.py")
    assert tables.zero_table() in zero
    assert "\n".join(ranks.simulated_table(list(islice(ranks.simulated(), 2)))) in zero
    assert tables.catalogue_tables() in (ROOT / "docs" / "machine.md").read_text(encoding="utf-8")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for model, gib in (("1.2B", 16), ("1.2B", 32), ("6.7B", 16)):  # all twelve take a quarter of a minute
        assert tables.cell(tables.planned(tables.MODELS[model], gib)) in readme
    cells = [tables.speed(tables.on_card(tables.LARGE[model], 32768, 64, 2)) for model in ("7B", "13B")]
    assert f"| 64 GiB, two | {' | '.join(cells)} |" in readme
    published = (ROOT / "docs" / "published.md").read_text(encoding="utf-8")
    for run in (tables.PUBLISHED[3], tables.PUBLISHED[6]):  # in memory, and on a drive
        assert tables.published_row(*run) in published


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{p.name}" for p in sorted((ROOT / "docs").glob("*.md")))])
def test_links_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        assert ((ROOT / page).parent / target).exists(), f"{page}: {target}"
    for name in re.findall(r"`((?:tests|plan|examples|benchmarks)/[\w/]+\.\w+)`", text):
        assert (ROOT / name).exists() or (ROOT / "offloadz" / name).exists(), f"{page}: {name}"
