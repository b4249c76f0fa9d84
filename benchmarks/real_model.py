"""A real model on real dialogues, everything on disk, beside a plain PyTorch loop on the same batches.

    python benchmarks/real_model.py DATA [--steps 20] [--rows 4] [--length 512] [--longer 60] [--picture FILE] [--json]

`DATA` holds `gemma3-270m/` (a Hugging Face directory), `sharegpt.jsonl` and, cut off in the middle of a record,
`sharegpt-cut.json`.  The product is run as a user runs it, as a process of its own whose peak memory the system
reports; so is the plain loop: fp32 computation, bf16-rounded working weights, an fp32 master under torch's AdamW.
Then a longer run with other rows held out, judged by plain transformers before and after, which also generates from its
`final/`.  What is done is kept in `--work`, and a second start goes on from there; an hour on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).parent))

QUESTION = "What is a good way to learn a new language?"


def main() -> None:
    args = arguments()
    if args.plain:
        print(json.dumps(plain_losses(Path(args.data), args.steps)))
        return
    work = Path(args.work)
    work.mkdir(parents=True, exist_ok=True)
    short = write_config(work, "short", args, {"steps": args.steps, "batch_size": args.rows, "save_every": "10min"}, {})
    ours = kept(work / "ours.json", lambda: run_product(short, work / "short"))
    plain = kept(work / "plain.json", lambda: run_plain(short, args.steps))
    shown = compare(ours, plain)
    lines = [curves(ours, plain)]
    if args.longer:
        told = {"steps": args.longer, "batch_size": args.rows, "save_every": "10min", "eval_every": args.longer // 4}
        longer = write_config(work, "longer", args, told, {"eval_share": 0.01, "max_length": args.length // 2})
        learned = kept(work / "learned.json", lambda: run_longer(longer, work / "longer"))
        shown |= learned
        shown["ratios"]["held_out_after_vs_before"] = learned["held_out_after"] / learned["held_out_before"]
        lines.append(held_out(learned))
    shown["cut_off_file"] = refused(args, work)
    draw_all(args, lines)
    print(json.dumps(shown) if args.json else "\n".join(f"{key}: {value}" for key, value in shown.items()))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="directory with gemma3-270m/, sharegpt.jsonl and sharegpt-cut.json")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--longer", type=int, default=60, help="steps of the longer run, at half the length; 0: none")
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--work", default="runs/real-model")
    parser.add_argument("--picture", default="", help="draw the curves into this file")
    parser.add_argument("--plain", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def kept(path: Path, work: Any) -> Any:
    """What an earlier start left in `path`, else the result of `work`, kept there."""
    if not path.exists():
        path.write_text(json.dumps(work()))
    return json.loads(path.read_text())


def write_config(
    work: Path, name: str, args: argparse.Namespace, train: dict[str, Any], data: dict[str, Any], file: str = "",
) -> Path:  # fmt: skip
    """A configuration: ShareGPT records in a built-in template, everything on disk."""
    folder = Path(args.data).absolute()
    sections: dict[str, dict[str, Any]] = {
        "model": {"path": str(folder / "gemma3-270m")},
        "data": {
            "train": [str(folder / (file or "sharegpt.jsonl"))], "format": "sharegpt", "chat_template": "gemma",
            "max_length": args.length, "on_long": "cut_right", "on_bad": "skip",
        } | data,
        "train": {"output": str((work / name).absolute())} | train,
        "optimizer": {"lr": args.lr, "warmup": 0.0, "schedule": "constant"},
        "offload": {"swap": [str((work / "swap").absolute())]},
    }  # fmt: skip
    sections["offload"] |= dict.fromkeys(("parameters", "gradients", "optimizer", "activations"), "disk")
    from configurations import write_tables

    return write_tables(work / f"{name}.toml", sections)


def measured(command: list[str]) -> tuple[str, int]:
    """Standard output and peak resident bytes of a process that must end well."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    return said, usage.ru_maxrss * 1024


def run_product(config: Path, output: Path) -> dict[str, Any]:
    """`offloadz train` and what it left: losses, evaluations, peak resident bytes, the plan."""
    began = time.monotonic()
    _, peak = measured([sys.executable, "-m", "offloadz", "train", str(config)])
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    return {
        "losses": [line["loss"] for line in steps],
        "norms": [line["grad_norm"] for line in steps],
        "step_s": [line["step_s"] for line in steps],
        "evaluations": [(line["step"], line["eval_loss"]) for line in lines if "eval_loss" in line],
        "peak_rss_bytes": peak,
        "planned_bytes": json.loads((output / "plan.json").read_text())["peak"]["host"],
        "wall_s": time.monotonic() - began,
    }


def run_plain(config: Path, num_steps: int) -> dict[str, Any]:
    """The plain loop on the batches that the product saw, in a process of its own."""
    said, peak = measured([sys.executable, __file__, str(config), "--plain", "--steps", str(num_steps)])
    return {**json.loads(said.splitlines()[-1]), "peak_rss_bytes": peak}


def plain_losses(config_path: Path, num_steps: int) -> dict[str, Any]:
    import reference
    import torch
    from transformers import AutoModelForCausalLM

    from offloadz.config import load_config
    from offloadz.train.data import Loader
    from offloadz.train.planning import read_task

    config = load_config(config_path, [])
    loader = Loader(read_task(config).samples, config.train.batch_size, config.train.seed, config.data.shuffle)
    batches = [tensors(loader.next_batch()) for _ in range(num_steps)]
    model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32).train()
    told = config.optimizer
    trace = reference.plain_run(
        model, batches, lr=told.lr, betas=told.betas, eps=told.eps, weight_decay=told.weight_decay,
        max_grad_norm=told.max_grad_norm, micro_rows=1, bf16_weights=True,
    )  # fmt: skip
    return {"losses": trace.losses, "norms": trace.norms}


def tensors(batch: dict[str, Any]) -> dict[str, Any]:
    """A batch as plain transformers take it from the reference, which turns the cache off by itself."""
    return {key: value for key, value in batch.items() if key != "use_cache"}


def compare(ours: dict[str, Any], plain: dict[str, Any]) -> dict[str, Any]:
    """Print both runs side by side; the figures as one object."""
    differences = [abs(a - b) / abs(b) for a, b in zip(ours["losses"], plain["losses"], strict=True)]
    for step, (a, b, d) in enumerate(zip(ours["losses"], plain["losses"], differences, strict=True), 1):
        print(f"step {step:>3}  loss {a:.5f}  plain {b:.5f}  differs by {d:.3%}", file=sys.stderr)
    peak, planned = ours["peak_rss_bytes"], ours["planned_bytes"]
    for name, nbytes in (("ours", peak), ("planned", planned), ("plain loop", plain["peak_rss_bytes"])):
        print(f"peak RSS, {name}: {nbytes / 2**30:.3f} GiB", file=sys.stderr)
    ratios = {"largest_loss_difference": max(differences), "rss_vs_plan": peak / planned,
              "rss_vs_plain": peak / plain["peak_rss_bytes"]}  # fmt: skip
    return {"ratios": ratios, "ours": ours, "plain": plain}


def run_longer(config: Path, output: Path) -> dict[str, Any]:
    """A longer run, and what plain transformers make of the model before and after it."""
    from offloadz.config import load_config

    found = run_product(config, output)
    before = judged(load_config(config, []).model.path, config)
    after = judged(str(output / "final"), config)
    return {
        "longer": found, "held_out_before": before["loss"], "held_out_after": after["loss"],
        "answer_before": before["answer"], "answer_after": after["answer"],
    }  # fmt: skip


def judged(path: str, config_path: Path) -> dict[str, Any]:
    """Held-out loss of a directory and its answer to a question, by plain transformers, strictly loaded."""
    import reference
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from offloadz.config import load_config
    from offloadz.train.data import Loader
    from offloadz.train.planning import read_task

    config = load_config(config_path, [])
    evaluation = read_task(config).evaluation
    assert evaluation is not None
    model, info = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, output_loading_info=True)
    wrong = [key for key, value in info.items() if value]
    if wrong:
        raise SystemExit(f"loading {path}: {', '.join(wrong)}")
    model.eval()
    loader = Loader(evaluation, 1, shuffle=False)
    total, targets = 0.0, 0
    with torch.no_grad():
        for _ in range(loader.num_batches_per_epoch):
            batch = tensors(loader.next_batch())
            total += float(reference.summed_loss(model, batch))
            targets += int((batch["labels"][:, 1:] != -100).sum())
    tokenizer = AutoTokenizer.from_pretrained(path)
    prompt = tokenizer(f"<start_of_turn>user\n{QUESTION}<end_of_turn>\n<start_of_turn>model\n", return_tensors="pt")
    said = model.generate(**prompt, max_new_tokens=40, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    return {"loss": total / targets, "answer": tokenizer.decode(said)}


def refused(args: argparse.Namespace, work: Path) -> str:
    """What `offloadz data` says of a file that ends in the middle of a record."""
    config = write_config(work, "cut", args, {}, {"on_bad": "stop"}, "sharegpt-cut.json")
    command = [sys.executable, "-m", "offloadz", "data", str(config)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 2:
        raise SystemExit(f"the cut-off file was not refused: status {done.returncode}")
    return done.stderr.strip()


def curves(ours: dict[str, Any], plain: dict[str, Any]) -> Any:
    from curves import Panel

    steps = list(range(1, len(plain["losses"]) + 1))
    lines = {"plain PyTorch loop": (steps, plain["losses"]), "offloadz, all on disk": (steps, ours["losses"])}
    return Panel("Gemma 3 270M, the same batches", "step", "loss", lines)


def held_out(learned: dict[str, Any]) -> Any:
    from curves import Panel

    told = learned["longer"]
    points = [(0, learned["held_out_before"]), *told["evaluations"]]
    steps = list(range(1, len(told["losses"]) + 1))
    lines = {"training": (steps, told["losses"]), "held out": tuple(zip(*points, strict=True))}
    return Panel("Real dialogues, a longer run", "step", "loss", lines)


def draw_all(args: argparse.Namespace, panels: list[Any]) -> None:
    if args.picture:
        from curves import draw

        draw(Path(args.picture), panels)


if __name__ == "__main__":
    main()
