"""Samples between steps: in the log, equal to what plain transformers says, no trace on training.  Kind K18."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny import ON_DISK, make_model, tables
from tiny_models import tiny

import offloadz
import offloadz.train.loop as loop
from offloadz.config import config_from_tables
from offloadz.plan.errors import ConfigError
from offloadz.train.metrics import METRICS, Metrics, read_metrics
from offloadz.train.sampling import Prompts
from offloadz.train.signals import Signals
from offloadz.train.templates import ChatTemplate, find_template

TIMES = ("step_s", "busy_s", "wait_s", "bottleneck", "bytes", "tokens_per_s", "predicted_step_s")
TEXTS = ("w3 w24", "w10", "w1 w10 w73")


def told(folder: Path, **changes: Any) -> dict[str, dict[str, Any]]:
    return tables(folder, **{"train__sample_tokens": 5, "train__sample_prompts": list(TEXTS), **changes})


def run(tables_: dict[str, dict[str, Any]]) -> int:
    return loop.train(config_from_tables(tables_, training=True))


def lines_of(output: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in line.items() if k not in TIMES} for line in read_metrics(output / METRICS)]


def plain_answer(model: Any, tokenizer: Any, text: str) -> str:
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    out = model.generate(ids, do_sample=False, max_new_tokens=5, pad_token_id=2, eos_token_id=2)[0, ids.shape[1] :]
    words = out.tolist()
    return str(tokenizer.decode(words[: words.index(2)] if 2 in words else words))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_samples_are_those_of_the_model_and_leave_no_trace(
    tmp_path: Path, family: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Everything on disk; prompts of different lengths are padded, which may not be seen in an answer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    make_model(tmp_path / "model", family)
    exact = {"model__dtype": "float32", "optimizer__lr": 1e-2, **ON_DISK}
    with_, without = tmp_path / "run", tmp_path / "without"
    assert run(told(tmp_path, train__sample_every=4, **exact)) == 0
    out = capsys.readouterr().out
    assert run(tables(tmp_path, train__output=str(without), **exact)) == 0
    lines = lines_of(with_)
    samples = [line for line in lines if "generated" in line]
    assert [line["step"] for line in samples] == [4, 8, 12]
    assert [line for line in lines if "generated" not in line] == lines_of(without)
    one, other = (path / "final" / "model.safetensors" for path in (with_, without))
    assert one.read_bytes() == other.read_bytes()
    model = AutoModelForCausalLM.from_pretrained(with_ / "final").eval()
    tokenizer = AutoTokenizer.from_pretrained(with_ / "final")
    for text, sample in zip(TEXTS, samples[-1]["generated"], strict=True):
        assert set(sample) == {"prompt", "text", "num_tokens", "ended"} and sample["prompt"] == text
        assert sample["text"] == plain_answer(model, tokenizer, text)
        assert f"step 12/12  {text!r} -> {sample['text']!r}" in out
    assert samples[0]["generated"] != samples[-1]["generated"]  # it has learnt in between
    board = EventAccumulator(str(with_ / "tensorboard")).Reload()
    texts = board.Tensors("sample 1/text_summary")
    assert [event.step for event in texts] == [4, 8, 12]
    assert samples[-1]["generated"][0]["text"] in texts[-1].tensor_proto.string_val[0].decode()


def test_samples_come_with_each_evaluation_and_stand_once_after_a_resume(tmp_path: Path) -> None:
    changes = {"data__eval_share": 0.25, "train__eval_every": 3, "train__keep": 9, "train__save_every": 3}
    assert run(told(tmp_path, **changes)) == 0
    straight = tmp_path / "run"
    lines = lines_of(straight)
    kinds = [next(key for key in ("loss", "eval_loss", "generated") if key in line) for line in lines]
    assert kinds == (["loss"] * 3 + ["eval_loss", "generated"]) * 4
    again = tmp_path / "again"
    shutil.copytree(straight, again)
    shutil.rmtree(again / "final")
    for name in ("step-000009", "step-000012"):
        shutil.rmtree(again / "checkpoints" / name)
    assert run(told(tmp_path, train__output=str(again), **changes)) == 0
    assert lines_of(again) == lines
    one, other = (path / "final" / "model.safetensors" for path in (straight, again))
    assert one.read_bytes() == other.read_bytes()


def test_lines_of_samples_are_cut_back(tmp_path: Path) -> None:
    whole = (
        '{"step": 2, "loss": 1}\n{"step": 2, "eval_loss": 1}\n{"step": 2, "generated": []}\n{"step": 3, "loss": 1}\n'
    )
    for steps, kept in [((2, 2, 2), 3), ((2, 2, 0), 2), ((2, 0, 0), 1), ((3, 2, 2), 4)]:
        (tmp_path / METRICS).write_text(whole)
        Metrics(tmp_path, *steps).close()
        assert len(read_metrics(tmp_path / METRICS)) == kept, steps


def test_a_signal_leaves_samples_for_the_next_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of an answer: the run ends at this step, and its samples come first when it goes on."""
    plain = Prompts._answers

    def interrupted(self: Prompts, model: Any, first: int, last: int, stop: Any) -> Any:
        calls = []

        def stop_at_third() -> bool:
            calls.append(1)
            if len(calls) == 3:
                signals[-1].status = 143
            return bool(stop())

        return plain(self, model, first, last, stop_at_third)

    signals: list[Signals] = []
    made = Signals.__init__
    monkeypatch.setattr(Signals, "__init__", lambda self, **how: (made(self, **how), signals.append(self))[0])
    with monkeypatch.context() as patched:
        patched.setattr(Prompts, "_answers", interrupted)
        assert run(told(tmp_path, train__sample_every=4)) == 143
    assert [("generated" in line, line["step"]) for line in lines_of(tmp_path / "run")][-1] == (False, 4)
    assert run(told(tmp_path, train__sample_every=4)) == 0
    lines = lines_of(tmp_path / "run")
    assert [line["step"] for line in lines if "generated" in line] == [4, 8, 12]
    assert [line["step"] for line in lines] == sorted(line["step"] for line in lines)


class Word:
    """A tokenizer of one word a token, with the two special tokens of ChatML."""

    def __init__(self, folder: Path) -> None:
        from tiny import make_tokenizer
        from transformers import AutoTokenizer

        make_tokenizer(folder)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.template: ChatTemplate = find_template(self.tokenizer, "chatml")


def test_prompts_are_a_turn_where_data_are_dialogues(tmp_path: Path) -> None:
    word = Word(tmp_path)
    chat = Prompts(["w1 w2"], 4, lambda: word.tokenizer, word.template, 101)
    shown = word.tokenizer.decode(chat.rows[0])
    assert shown.startswith("<|im_start|>") and " w2 " in shown and shown.count("<|im_start|>") == 2
    assert chat._ends == {2, word.tokenizer.convert_tokens_to_ids("<|im_end|>")}
    plain = Prompts(["w1 w2"], 4, lambda: word.tokenizer, None, 101)
    assert plain.rows == [word.tokenizer("w1 w2")["input_ids"]] and plain._ends == {2}
    with pytest.raises(ConfigError, match=r"train\.sample_prompts: 'w89' has an id of 98; needed: ids below 50"):
        Prompts(["w89"], 4, lambda: word.tokenizer, None, 50)


@pytest.mark.parametrize("most_tokens", [0, 12, 16, 1000])
def test_how_many_are_asked_at_once_changes_no_answer(tmp_path: Path, swap: Path, most_tokens: int) -> None:
    word = Word(tmp_path)
    prompts = Prompts(TEXTS, 5, lambda: word.tokenizer, None, 101)
    groups = list(prompts._groups(most_tokens))
    assert groups == {12: [(0, 1), (1, 2), (2, 3)], 16: [(0, 2), (2, 3)]}.get(most_tokens, [(0, 3)])
    model = tiny("qwen3", vocab_size=101)
    wanted = [plain_answer(model, word.tokenizer, text) for text in TEXTS]
    with offloadz.offload(model, swap=swap, parameters="disk", optimizer_state="disk") as run_:
        before = torch.get_rng_state()
        run_.model.train()
        found = prompts.ask(run_, most_tokens)
        assert found is not None and [sample.text for sample in found] == wanted
        assert run_.model.training and torch.equal(torch.get_rng_state(), before)
        assert prompts.ask(run_, most_tokens, lambda: True) is None


def test_a_rhythm_without_prompts_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"train\.sample_every: found 3 without a prompt"):
        config_from_tables({"model": {"path": "m"}, "train": {"sample_every": 3}})
