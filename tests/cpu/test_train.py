"""`offloadz train` as a whole: what it leaves, what it refuses before it starts, and that each setting is in force.

Parts of cases G16, G17, G18 (an evaluation leaves no trace) and G20 at the level of the command.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import backward
from tiny import ON_DISK, make_model, make_texts, tables, write_config

import offloadz.train.loop as loop
from offloadz.cli import main
from offloadz.config import config_from_tables, load_config
from offloadz.model.export import working_weight
from offloadz.model.linked import SavedState
from offloadz.model.manifest import read_manifest
from offloadz.plan.errors import ConfigError
from offloadz.train.begin import alone
from offloadz.train.data import Loader
from offloadz.train.metrics import METRICS, Metrics, read_metrics
from offloadz.train.planning import optimizer_of, read_task
from offloadz.train.progress import duration, told
from offloadz.train.schedule import Schedule, schedule_of

KEYS = {
    "step", "loss", "lr", "grad_norm", "clipped", "skipped", "tokens", "target_tokens", "step_s", "tokens_per_s",
    "busy_s", "wait_s", "bottleneck", "bytes", "predicted_step_s",
}  # fmt: skip
TIMES = ("step_s", "busy_s", "wait_s", "bottleneck", "bytes", "tokens_per_s", "predicted_step_s")


def run(folder: Path, **changes: Any) -> int:
    return loop.train(config_from_tables(tables(folder, **changes), training=True))


def lines_of(folder: Path, run_name: str = "run") -> list[dict[str, Any]]:
    return [line for line in read_metrics(folder / run_name / METRICS) if "loss" in line]


def status_of(config: Path, *overrides: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["train", str(config), *overrides])
    assert isinstance(caught.value.code, int)
    return caught.value.code


def test_a_whole_run_on_disk(tmp_path: Path, swap: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    make_texts(tmp_path / "eval.jsonl", 10, seed=5)
    changes = {"data__eval": [str(tmp_path / "eval.jsonl")], "train__eval_every": 5, "debug__samples": False}
    told = tables(tmp_path, **changes, **ON_DISK)
    config = write_config(tmp_path / "run.toml", told)
    assert status_of(config) == 0
    out, output = capsys.readouterr().out, tmp_path / "run"
    lines = read_metrics(output / METRICS)
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == list(range(1, 13)) and all(set(line) == KEYS for line in steps)
    assert set(steps[0]["busy_s"]) == {"device", "h2d", "d2h", "cpu", "disk_read", "disk_write", "net"}
    told = {
        "device_peak",
        "host_peak",
        "host_resident",
        "host_planned",
        "locked",
        "disk_held",
        "disk_read",
        "disk_written",
    }
    assert set(steps[0]["bytes"]) == told
    for found in (line["bytes"] for line in steps):
        assert 2**27 < found["host_resident"] <= found["host_peak"]
        assert min(found["disk_held"], found["disk_written"]) > 0
    assert steps[-1]["loss"] < steps[0]["loss"]
    evaluations = [(line["step"], line["eval_tokens"]) for line in lines if "eval_loss" in line]
    assert evaluations == [(5, 84), (10, 84), (12, 84)]
    assert load_config(output / "config.toml", training=True) == load_config(config, training=True)
    plan = json.loads((output / "plan.json").read_text())
    assert plan["fits"] and set(plan["placement"].values()) == {"disk"}
    assert steps[0]["predicted_step_s"] == plan["step_s"] > 0
    assert (plan["copies"], plan["keep"], plan["linked"]) == (3, 1, True)
    assert {p.name for p in (output / "checkpoints").iterdir()} == {"step-000012"}
    for words in ("parameters on disk", "I/O by ", "written to swap", "update threads: 1", "predicted peaks"):
        assert words in out
    assert "step 12/12  loss" in out and " left  bottleneck " in out
    model = AutoModelForCausalLM.from_pretrained(output / "final")
    assert model.dtype == torch.bfloat16 and AutoTokenizer.from_pretrained(output / "final").eos_token == "</s>"
    with SavedState(output / "checkpoints/step-000012") as state:
        masters = state.weights
        for name, weight in model.named_parameters():
            assert torch.equal(working_weight(masters.read(name)).view(weight.shape), weight), name
    assert not list((tmp_path / "swap").iterdir())
    assert (output / METRICS).stat().st_mode & 0o077 == 0


def test_an_evaluation_leaves_no_trace_and_is_the_plain_loss(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    make_texts(tmp_path / "eval.jsonl", 10, seed=5)
    changes = {"model__dtype": "float32", **ON_DISK}
    assert run(tmp_path, train__output=str(tmp_path / "without"), **changes) == 0
    assert run(tmp_path, data__eval=[str(tmp_path / "eval.jsonl")], train__eval_every=3, **changes) == 0
    both = [lines_of(tmp_path, name) for name in ("run", "without")]
    with_, without = ([{k: v for k, v in line.items() if k not in TIMES} for line in lines] for lines in both)
    assert with_ == without
    last = read_metrics(tmp_path / "run" / METRICS)[-1]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run/final").eval()
    config = config_from_tables(tables(tmp_path, data__eval=[str(tmp_path / "eval.jsonl")]))
    samples = read_task(config).evaluation
    assert samples is not None
    with torch.no_grad():
        batch = Loader(samples, len(samples), shuffle=False).next_batch()
        labels = batch.pop("labels")
        logits = model(**batch, use_cache=False).logits[:, :-1].float()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
    assert last["eval_loss"] == pytest.approx(float(loss), rel=1e-5)


@pytest.mark.parametrize("name", ["adamw", "adam"])
def test_settings_reach_the_arithmetic(tmp_path: Path, name: str) -> None:
    """Groups, decay, betas, eps, clipping and schedule, held to a plain loop over the same samples."""
    from transformers import AutoModelForCausalLM

    groups = [{"match": ["*embed*"], "lr": 1e-3, "weight_decay": 0.3}, {"match": ["*q_proj*"], "lr": 5e-3}]
    settings = {
        "lr": 2e-3, "betas": [0.8, 0.9], "eps": 1e-4, "weight_decay": 0.2, "no_decay": ["*norm*"], "warmup": 0.25,
        "schedule": "linear", "min_lr": 0.2, "max_grad_norm": 0.7, "groups": groups, "name": name,
    }  # fmt: skip
    changes = {f"optimizer__{key}": value for key, value in settings.items()}
    assert run(tmp_path, model__dtype="float32", train__steps=8, train__seed=3, **changes) == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    wanted: list[dict[str, Any]] = []
    for key, param in model.named_parameters():
        group = groups[0] if "embed" in key else groups[1] if "q_proj" in key else {}
        decay = group.get("weight_decay", 0.0 if "norm" in key else 0.2)
        wanted.append({"params": [param], "lr": group.get("lr", 2e-3), "weight_decay": decay})
    kind = torch.optim.AdamW if name == "adamw" else torch.optim.Adam
    optimizer = kind(wanted, betas=(0.8, 0.9), eps=1e-4, foreach=False)
    # Two updates of warm-up, then down from 1 to 0.2 at the ninth.
    shares = [0.5, 1.0, *(0.2 + 0.8 * (1 - k / 6) for k in range(6))]
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: shares[min(k, 7)])
    config = config_from_tables(tables(tmp_path, train__seed=3))
    loader = Loader(read_task(config).samples, 6, seed=3)
    for line in lines_of(tmp_path):
        model.zero_grad()
        batch = loader.next_batch()
        assert line["samples"] == loader.last_ids
        assert line["loss"] == pytest.approx(backward(model, batch, 3), rel=1e-5)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.7, foreach=False)
        assert line["grad_norm"] == pytest.approx(float(norm), rel=1e-4) and line["clipped"] == (norm > 0.7)
        optimizer.step()
        scheduler.step()
    start = AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    final = AutoModelForCausalLM.from_pretrained(tmp_path / "run/final").state_dict()
    for key, weight in model.state_dict().items():
        moved = (weight - start[key]).norm()
        assert moved > 0 and (final[key] - weight).norm() <= 2e-3 * moved, key


def test_too_many_skipped_updates_end_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = tables(tmp_path, optimizer__lr=1e30, optimizer__warmup=0, train__max_skipped=2, **ON_DISK)
    config = write_config(tmp_path / "run.toml", told)
    assert status_of(config) == 1
    out, error = capsys.readouterr()
    assert "3 updates in a row were skipped" in error and "train.max_skipped allows 2" in error
    assert "Traceback" not in error
    raw = (tmp_path / "run" / METRICS).read_text()
    assert "NaN" not in raw and "Infinity" not in raw
    lines = lines_of(tmp_path)
    assert [line["skipped"] for line in lines] == [False, True, True, True]
    assert all(line["loss"] is None and "finite" in line["reason"] for line in lines[1:])
    assert lines[1]["lr"] == lines[3]["lr"]  # a skipped update does not move the schedule
    assert not (tmp_path / "run/final").exists()
    (left,) = (tmp_path / "swap").iterdir()  # no checkpoint has the state of step 1, so it stays
    assert f"state of step 1 stays in {left / 'state'} (" in out and not (left / "scratch").exists()


def test_skipped_updates_are_counted_and_training_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches without a target in the middle: nothing is applied, counters and schedule stand still (K17)."""
    plain = Loader.next_batch

    def without_targets(self: Loader) -> dict[str, torch.Tensor]:
        batch = plain(self)
        if self.num_served in (3, 4):
            batch["labels"].fill_(-100)
        return batch

    monkeypatch.setattr(Loader, "next_batch", without_targets)
    assert run(tmp_path, train__max_skipped=2) == 0
    lines = lines_of(tmp_path)
    assert [line["step"] for line in lines if line["skipped"]] == [3, 4] and lines[2]["reason"] == "no target tokens"
    told = read_manifest(tmp_path / "run/checkpoints/step-000012")
    assert set(told["steps"].values()) == {10} and told["extra"]["num_skipped"] == 2
    schedule = schedule_of(config_from_tables(tables(tmp_path)).optimizer, 12)
    assert lines[-1]["lr"] == 3e-3 * schedule(9)


def test_wrong_data_ends_with_2_before_the_model_is_opened(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_model(tmp_path / "model", weights=False)  # opening it would be another error
    (tmp_path / "train.jsonl").write_text('{"text": "w1 w2"}\n{"text": 7}\n{"tex')
    config = write_config(tmp_path / "run.toml", tables(tmp_path))
    assert status_of(config) == 2
    error = capsys.readouterr().err
    assert "train.jsonl:2" in error and "train.jsonl:3" in error
    assert not (tmp_path / "run").exists() and not (tmp_path / "swap").exists()


def test_what_does_not_fit_ends_with_3_and_starts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write_config(tmp_path / "run.toml", tables(tmp_path))
    assert status_of(config, "offload.host_memory=64MiB") == 3
    assert "64.0MiB" in capsys.readouterr().err
    assert not (tmp_path / "run").exists() and not (tmp_path / "swap").exists()


def test_one_run_at_a_time_in_an_output(tmp_path: Path) -> None:
    with alone(tmp_path / "run"), pytest.raises(ConfigError, match="is in use by another run"):
        run(tmp_path)
    assert run(tmp_path, train__steps=2) == 0


def test_saving_by_time_keeping_weights_and_epochs(tmp_path: Path) -> None:
    """Saves at every step by a tiny interval change no result; the newest are kept."""
    assert run(tmp_path, train__save_every=0, train__output=str(tmp_path / "plain")) == 0
    assert [p.name for p in (tmp_path / "plain/checkpoints").iterdir()] == ["step-000012"]
    assert run(tmp_path, train__save_every="0.0001s", train__keep=3, train__keep_weights=2) == 0
    assert sorted(p.name for p in (tmp_path / "run/checkpoints").iterdir()) == [f"step-{n:06d}" for n in (10, 11, 12)]
    assert sorted(p.name for p in (tmp_path / "run/weights").iterdir()) == ["step-000011", "step-000012"]
    files = [tmp_path / name / "model.safetensors" for name in ("plain/final", "run/final", "run/weights/step-000012")]
    assert len({path.read_bytes() for path in files}) == 1
    told = tables(tmp_path, train__output=str(tmp_path / "epochs"), train__epochs=1.5)
    del told["train"]["steps"]
    assert loop.train(config_from_tables(told, training=True)) == 0
    lines = lines_of(tmp_path, "epochs")
    assert len(lines) == math.ceil(1.5 * math.ceil(40 / 6))
    assert sorted(n for line in lines[:7] for n in line["samples"]) == list(range(40))


def test_memory_beyond_the_plan_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's figure is replaced: a process that really outgrew the box could not be a test."""
    monkeypatch.setattr(loop, "process_bytes", lambda: {"anonymous": 1 << 50})
    with pytest.raises(loop.RunStopped, match=r"offload\.host_memory"):
        run(tmp_path)
    assert [line["step"] for line in lines_of(tmp_path)] == [1]


# ---- rooms of their own ----


def test_schedules() -> None:
    cosine = [Schedule("cosine", 10, 2, 0.1)(k) for k in range(12)]
    assert cosine[:3] == [0.5, 1.0, 1.0] and cosine[10] == cosine[11] == pytest.approx(0.1)
    assert cosine[6] == pytest.approx(0.1 + 0.9 * 0.5)
    assert cosine[1:] == sorted(cosine[1:], reverse=True)
    linear = Schedule("linear", 4, 0, 0.0)
    assert [linear(k) for k in range(5)] == [1.0, 0.75, 0.5, 0.25, 0.0]
    constant = Schedule("constant", 4, 3, 0.0)
    assert [constant(k) for k in range(5)] == pytest.approx([1 / 3, 2 / 3, 1, 1, 1])


@pytest.mark.parametrize(("warmup", "num"), [(0.0, 0), (0.03, 3), (0.031, 4), (1.0, 1), (7.0, 7)])
def test_warmup_is_a_share_below_one(tmp_path: Path, warmup: float, num: int) -> None:
    config = config_from_tables({"model": {"path": "m"}, "data": {"packing": False}, "optimizer": {"warmup": warmup}})
    assert schedule_of(config.optimizer, 100).num_warmup == num


def test_warmup_longer_than_a_run_by_epochs_is_refused(tmp_path: Path) -> None:
    told = tables(tmp_path, optimizer__warmup=30)
    del told["train"]["steps"]
    with pytest.raises(ConfigError, match=r"optimizer.warmup is 30 steps, the run has 7"):
        loop.train(config_from_tables(told, training=True))


def test_adam_is_not_decoupled(tmp_path: Path) -> None:
    assert not optimizer_of(config_from_tables(tables(tmp_path, optimizer__name="adam"))).decoupled


def test_metrics_cut(tmp_path: Path) -> None:
    path = tmp_path / METRICS
    whole = '{"step": 1, "loss": 1}\n{"step": 2, "loss": 1}\n{"step": 2, "eval_loss": 1}\n'
    for step, evaluated, kept in [(2, 2, 3), (2, 0, 2), (1, 0, 1), (0, 0, 0), (5, 5, 3)]:
        path.write_text(whole + '{"step": 3, "lo')
        metrics = Metrics(tmp_path, step, evaluated)
        metrics.write({"step": step + 1, "loss": float("nan")})
        metrics.close()
        found = read_metrics(path)
        assert len(found) == kept + 1 and found[-1] == {"step": step + 1, "loss": None}


def test_a_line_fits_beside_the_bar() -> None:
    line: dict[str, Any] = {"loss": 12.3456, "grad_norm": 1.0, "lr": 1e-3, "tokens_per_s": 12345.6, "skipped": False}
    line["bottleneck"] = "disk_write"
    assert told(line, 3600, short=True) == "loss 12.3456  12,346 tokens/s  1:00:00 left  bottleneck disk_write"
    assert "lr 0.001" in told(line, 3600) and "not finite" in told({**line, "skipped": True, "reason": "not finite"}, 1)


def test_durations() -> None:
    assert [duration(s) for s in (0, 7.4, 750, 11100)] == ["0:00", "0:07", "12:30", "3:05:00"]
