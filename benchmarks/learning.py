"""Does a cheaper recipe learn as much: one real model, trained alike under each, evaluated on the same rows.

    python benchmarks/learning.py DATA [--recipes fp32,bf16,int8,int8-sr] [--steps 200] [--work DIR] [--json]

`DATA` holds `gemma3-270m/` (a Hugging Face directory) and `messages.jsonl`.  Each recipe is an `offloadz train` of its
own: 2 rows of 128 tokens a step, constant rate, 64 rows held out and scored at the start, every 50 steps and at the
end.  About 20 minutes a recipe on two cores; a script that was ended goes on from the last checkpoint when it is
started again, and what is done is not done twice.  Checkpoints (3.2 GB) go when a recipe is done.

The curves go to `learning.json` in the work directory and, with all recipes there and matplotlib installed, to
`docs/pictures/learning.svg`; `--draw` draws from what is saved.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
ROWS, LENGTH, NUM_HELD_OUT, EVERY = 2, 128, 64, 50
MOST_QUESTION_CHARACTERS = 240
"""Of the first turn: what is trained on has to begin within the row."""

Curve = list[tuple[int, float]]


def main() -> None:
    args = arguments()
    work = Path(args.work)
    work.mkdir(parents=True, exist_ok=True)
    recipes = args.recipes.split(",")
    if not args.draw:
        split(Path(args.data) / "messages.jsonl", work)
        for recipe in recipes:
            train(recipe, work, args)
    shown = collect(recipes, work, args.steps)
    (work / "learning.json").write_text(json.dumps(shown, indent=1) + "\n")
    for recipe in recipes:
        last = shown["evaluations"][recipe][-1][1]
        apart = last / shown["evaluations"][recipes[0]][-1][1] - 1
        print(f"{recipe:>8}  evaluation loss {last:.5f} after {args.steps} steps  {apart:+.3%}")
    if len(recipes) > 1:
        picture(shown, Path(args.picture))
    if args.json:
        print(json.dumps(shown))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="directory with gemma3-270m/ and messages.jsonl")
    parser.add_argument("--recipes", default="fp32,bf16,int8,int8-sr", help="the first is what the others are held to")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--work", default="runs/learning")
    parser.add_argument("--picture", default=str(ROOT / "docs/pictures/learning.svg"))
    parser.add_argument("--draw", action="store_true", help="train nothing, draw what is there")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def split(messages: Path, work: Path) -> None:
    """Dialogues whose first question is short: the first of them are held out, the rest trained on."""
    chosen = []
    for line in messages.read_text(encoding="utf-8").strip().split("\n"):  # splitlines would cut at U+2028 too
        turns = json.loads(line)["messages"]
        if turns[0]["role"] == "user" and len(turns[0]["content"]) <= MOST_QUESTION_CHARACTERS:
            chosen.append(line)
    if len(chosen) < 2 * NUM_HELD_OUT:
        raise SystemExit(f"{messages} has {len(chosen)} dialogues that begin shortly; needed: {2 * NUM_HELD_OUT}")
    for name, lines in (("eval", chosen[:NUM_HELD_OUT]), ("train", chosen[NUM_HELD_OUT:])):
        target, text = work / f"{name}.jsonl", "\n".join(lines) + "\n"
        if not target.exists() or target.read_text(encoding="utf-8") != text:
            target.write_text(text, encoding="utf-8")


def write_config(recipe: str, work: Path, args: argparse.Namespace) -> Path:
    """Everything in memory, for speed: placement changes no number."""
    at = work.absolute()
    sections: dict[str, dict[str, Any]] = {
        "model": {"path": str((Path(args.data) / "gemma3-270m").absolute())},
        "data": {
            "train": [str(at / "train.jsonl")], "eval": [str(at / "eval.jsonl")], "packing": False,
            "max_length": LENGTH, "on_long": "cut_right", "chat_template": "gemma",
        },
        "train": {
            "output": str(at / recipe), "steps": args.steps, "batch_size": ROWS, "micro_batch_size": ROWS,
            "eval_every": EVERY, "save_every": EVERY, "keep": 1,
        },
        "optimizer": {"lr": args.lr, "schedule": "constant", "warmup": 0.0, "state": recipe},
        "offload": dict.fromkeys(("parameters", "gradients", "optimizer", "activations"), "host"),
    }  # fmt: skip
    from configurations import write_tables

    return write_tables(work / f"{recipe}.toml", sections)


def train(recipe: str, work: Path, args: argparse.Namespace) -> None:
    """One recipe to its end, from wherever it is; its weights and checkpoints go, its metrics stay."""
    done = work / recipe / "done.json"
    if done.exists() and json.loads(done.read_text()) == [args.steps, args.lr]:
        return
    config = write_config(recipe, work, args)
    start = work / "start.json"
    if not start.exists():
        start.write_text(json.dumps(score(config)))
    status = subprocess.run([sys.executable, "-m", "offloadz", "train", str(config)]).returncode
    if status != 0:
        raise SystemExit(f"offloadz train of {recipe} ended with {status}; start the script again to go on")
    for name in ("checkpoints", "final"):
        shutil.rmtree(work / recipe / name)
    done.write_text(json.dumps([args.steps, args.lr]))


def score(config_path: Path) -> float:
    """The evaluation loss before the first step, which is that of every recipe."""
    import torch

    import offloadz
    from offloadz.config import load_config
    from offloadz.train.data import Loader
    from offloadz.train.planning import read_task

    config = load_config(config_path, [])
    held_out = read_task(config).evaluation
    assert held_out is not None
    loader = Loader(held_out, ROWS, shuffle=False)
    model = offloadz.load(config.model.path, dtype=torch.bfloat16)
    sums, num_targets = [], 0
    with offloadz.offload(model, offloadz.SGD(), micro_batch_size=ROWS, max_length=LENGTH) as run, torch.no_grad():
        for _ in range(loader.num_batches_per_epoch):
            batch = loader.next_batch()
            sums.append(float(offloadz.token_logprobs(run, batch).double().sum()))
            num_targets += int((batch["labels"][:, 1:] != -100).sum())
    return -math.fsum(sums) / num_targets


def collect(recipes: list[str], work: Path, steps: int) -> dict[str, Any]:
    """Evaluations, training losses and the last evaluation over the first recipe's, from the metrics."""
    evaluations: dict[str, Curve] = {}
    losses: dict[str, Curve] = {}
    for recipe in recipes:
        lines = [json.loads(line) for line in (work / recipe / "metrics.jsonl").read_text().splitlines()]
        start = [(0, json.loads((work / "start.json").read_text()))]
        evaluations[recipe] = start + [(line["step"], line["eval_loss"]) for line in lines if "eval_loss" in line]
        losses[recipe] = [(line["step"], line["loss"]) for line in lines if "loss" in line]
        if evaluations[recipe][-1][0] != steps:
            raise SystemExit(f"{recipe} stands at step {evaluations[recipe][-1][0]} of {steps}")
    last = {recipe: curve[-1][1] for recipe, curve in evaluations.items()}
    ratios = {f"{recipe}_vs_{recipes[0]}": last[recipe] / last[recipes[0]] for recipe in recipes[1:]}
    return {"ratios": ratios, "steps": steps, "evaluations": evaluations, "losses": losses}


def picture(shown: dict[str, Any], target: Path) -> None:
    """Evaluation losses, and how far each lies from the first recipe's."""
    try:
        from curves import Panel, draw
    except ImportError:
        print("matplotlib is not installed: no picture")
        return
    found = {name: list(zip(*curve, strict=True)) for name, curve in shown["evaluations"].items()}
    base_name = next(iter(found))
    first = found[base_name][1]
    apart = {
        name: (xs, [100 * (y / base - 1) for y, base in zip(ys, first, strict=True)])
        for name, (xs, ys) in found.items()
    }
    draw(target, [
        Panel("evaluation loss, 64 rows held out", "step", "loss", found),
        Panel(f"difference from {base_name}", "step", "%", apart),
    ])  # fmt: skip
    print(f"curves in {target}")


if __name__ == "__main__":
    main()
