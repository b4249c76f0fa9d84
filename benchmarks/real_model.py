"""A real model on real dialogues, everything on disk, beside a plain PyTorch loop on the same batches.

    python benchmarks/real_model.py DATA [--steps 10] [--rows 4] [--length 256] [--lr 1e-5] [--work DIR] [--json]

`DATA` holds `gemma3-270m/` (a Hugging Face directory) and `messages.jsonl`.  The product is run as a user runs it, as a
process of its own, whose peak memory the system reports; the plain loop computes in fp32 with bf16-rounded working
weights and an fp32 master under torch's AdamW.  Prints loss by loss, and one JSON object with --json.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def main() -> None:
    args = arguments()
    work = Path(args.work)
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    config = write_config(work, args)
    ours = run_product(config, work)
    plain = run_plain(config, args.steps)
    shown = compare(ours, plain, work)
    if args.json:
        print(json.dumps(shown))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="directory with gemma3-270m/ and messages.jsonl")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--work", default="runs/real-model")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def write_config(work: Path, args: argparse.Namespace) -> Path:
    """The configuration of the run, and its chat template."""
    data = Path(args.data).absolute()
    (work / "chatml.jinja").write_text(CHATML)
    sections: dict[str, dict[str, Any]] = {
        "model": {"path": str(data / "gemma3-270m")},
        "data": {
            "train": [str(data / "messages.jsonl")], "packing": False, "max_length": args.length,
            "on_long": "cut_right", "chat_template": str((work / "chatml.jinja").absolute()),
        },
        "train": {
            "output": str((work / "run").absolute()), "steps": args.steps, "batch_size": args.rows, "save_every": 0,
        },
        "optimizer": {"lr": args.lr, "warmup": 0.0, "schedule": "constant"},
        "offload": {"swap": [str((work / "swap").absolute())]},
    }  # fmt: skip
    sections["offload"] |= dict.fromkeys(("parameters", "gradients", "optimizer", "activations"), "disk")
    lines = []
    for name, section in sections.items():
        lines.append(f"[{name}]")
        lines += [f"{key} = {json.dumps(value)}" for key, value in section.items()]
    path = work / "config.toml"
    path.write_text("\n".join(lines) + "\n")
    return path


def run_product(config: Path, work: Path) -> dict[str, Any]:
    """`offloadz train` and what it left: losses, peak resident bytes, the plan."""
    began = time.monotonic()
    process = subprocess.Popen([sys.executable, "-m", "offloadz", "train", str(config)])
    _, status, usage = os.wait4(process.pid, 0)
    if os.waitstatus_to_exitcode(status) != 0:
        raise SystemExit(f"offloadz train ended with {os.waitstatus_to_exitcode(status)}")
    lines = [json.loads(line) for line in (work / "run" / "metrics.jsonl").read_text().splitlines()]
    return {
        "losses": [line["loss"] for line in lines if "loss" in line],
        "norms": [line["grad_norm"] for line in lines if "loss" in line],
        "step_s": [line["step_s"] for line in lines if "loss" in line],
        "peak_rss_bytes": usage.ru_maxrss * 1024,
        "plan": json.loads((work / "run" / "plan.json").read_text()),
        "wall_s": time.monotonic() - began,
    }


def run_plain(config_path: Path, num_steps: int) -> dict[str, Any]:
    """The plain loop on the batches that the product saw."""
    import reference
    import torch
    from transformers import AutoModelForCausalLM

    from offloadz.config import load_config
    from offloadz.train.data import Loader
    from offloadz.train.planning import read_task

    config = load_config(config_path, [])
    loader = Loader(read_task(config).samples, config.train.batch_size, config.train.seed, config.data.shuffle)
    batches = [loader.next_batch() for _ in range(num_steps)]
    model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32).train()
    told = config.optimizer
    trace = reference.plain_run(
        model, batches, lr=told.lr, betas=told.betas, eps=told.eps, weight_decay=told.weight_decay,
        max_grad_norm=told.max_grad_norm, micro_rows=1, bf16_weights=True,
    )  # fmt: skip
    return {"losses": trace.losses, "norms": trace.norms}


def compare(ours: dict[str, Any], plain: dict[str, Any], work: Path) -> dict[str, Any]:
    """Print both runs side by side; the figures as one object."""
    differences = [abs(a - b) / abs(b) for a, b in zip(ours["losses"], plain["losses"], strict=True)]
    for step, (a, b, d) in enumerate(zip(ours["losses"], plain["losses"], differences, strict=True), 1):
        print(f"step {step:>3}  loss {a:.5f}  plain {b:.5f}  differs by {d:.3%}")
    planned = ours["plan"]["peak"]["host"]
    ratios = {"largest_loss_difference": max(differences), "rss_vs_plan": ours["peak_rss_bytes"] / planned}
    print(f"peak RSS {ours['peak_rss_bytes'] / 2**30:.3f} GiB, planned {planned / 2**30:.3f} GiB")
    print(f"final/ loads with transformers: {loads(work / 'run' / 'final')} parameters")
    return {
        "ratios": ratios,
        "peak_rss_bytes": ours["peak_rss_bytes"],
        "ours": ours["losses"],
        "plain": plain["losses"],
        "step_s": ours["step_s"],
    }


def loads(final: Path) -> int:
    """Parameters of the exported directory as plain transformers loads it, strictly."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, info = AutoModelForCausalLM.from_pretrained(final, output_loading_info=True)
    wrong = [key for key, value in info.items() if value]
    if wrong:
        raise SystemExit(f"loading {final}: {', '.join(wrong)}")
    AutoTokenizer.from_pretrained(final)
    return sum(p.numel() for p in model.parameters())


if __name__ == "__main__":
    main()
