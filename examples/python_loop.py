"""The quickstart as a loop of one's own: load, offload, step, evaluate, save, export.

    python examples/python_loop.py [NUM_STEPS] [DIRECTORY]

Everything `offloadz train` does is written on these calls.  Parameters, gradients, optimizer state and saved inputs are
on disk here; leave the four names out and the plan decides.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

import offloadz

HERE = Path(__file__).parent / "quickstart"


def batches(tokenizer: Any, rows: int, length: int) -> Iterator[dict[str, torch.Tensor]]:
    """Batches as for a transformers model: every token is a target but padding (-100)."""
    lines = (HERE / "train.jsonl").read_text(encoding="utf-8").splitlines()
    texts = [tokenizer.apply_chat_template(json.loads(line)["messages"], tokenize=False) for line in lines]
    for start in range(0, len(texts) - rows + 1, rows):
        chosen = texts[start : start + rows]
        batch = tokenizer(chosen, padding=True, truncation=True, max_length=length, return_tensors="pt")
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        yield {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"], "labels": labels}


def main(num_steps: int, directory: Path) -> list[float]:
    """Train, save, export; returns the losses."""
    tokenizer = AutoTokenizer.from_pretrained(HERE / "model")
    model = offloadz.load(HERE / "model", dtype=torch.bfloat16, init="random")
    losses = []
    with offloadz.offload(
        model,
        optimizer=offloadz.AdamW(lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0),
        swap=directory / "swap",
        parameters="disk", gradients="disk", optimizer_state="disk", activations="disk",
        batch_size=16, max_length=128, output=directory,
    ) as run:  # fmt: skip
        schedule = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda step: min(1.0, (step + 1) / 5))
        source = batches(tokenizer, 16, 128)
        for step, batch in zip(range(1, num_steps + 1), source, strict=False):
            loss = run.step(batch)  # forward, backward, clip, update
            schedule.step()
            losses.append(float(loss))
            print(f"step {step}  loss {losses[-1]:.4f}  norm {run.report.grad_norm:.3f}")
        with torch.no_grad():  # any number of times, in any order, leaves no trace
            logp = offloadz.token_logprobs(model, batch)
        print(f"the last batch once more: {-float(logp.sum()) / int((batch['labels'][:, 1:] != -100).sum()):.4f}")
        run.save(directory / "checkpoint")  # run.load(...) goes on from it under any placement
        run.export(directory / "model")  # loads with transformers as it is
    return losses


if __name__ == "__main__":
    arguments = sys.argv[1:]
    main(int(arguments[0]) if arguments else 30, Path(arguments[1] if len(arguments) > 1 else "runs/python_loop"))
