"""Is the plan right: predicted beside measured, for real training processes of several sizes and placements.

    python benchmarks/plan_error.py --path DIR [--model MODEL] [--only NAME,...] [--machine FILE] [--json]

In `DIR` (on the drive to be used) each configuration is trained for a few steps by `offloadz train`, in a process of
its own that is ended after the last one; before the first of a start `offloadz bench` measures the box, unless
`--machine` names a file of it.  What was measured is kept in `DIR/results`, so a start takes up what is missing: with
`--only` name by name, a minute or two each.  `--model` is a directory of a real model for the configurations named
`real-*`; without it they are null.  Peaks are of resident memory up to the last step, times the median of steady steps:
a run is killed behind it, so those of a save and an export are not in here (tests/cpu/test_memory_of_a_run.py holds
them).  Ends with 1, and says why, where a row is off or fewer than 8 are right.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from offloadz.plan.verdict import steady

EXAMPLES = Path(__file__).parent.parent / "examples" / "quickstart"
MEMORY, TIME = 0.10, 0.20
"""How far off a prediction may be, either way."""
LIMIT_S = 240
LEAST_RIGHT = 8
"""Configurations that have to be right."""

SHAPES = {
    "110m": (768, 2048, 12, 12, 16000),
    "350m": (1024, 2816, 24, 16, 16000),
    "1b": (2048, 5632, 18, 32, 32000),
}
"""Hidden and inner size, blocks, heads, words of a Llama."""

RAM: dict[str, Any] = {}
STATE = {"optimizer": "disk", "commit": "hold"}
KEPT = {"optimizer": "disk", "gradients": "disk", "commit": "hold"}
ALL = {"parameters": "disk", "gradients": "disk", "optimizer": "disk", "activations": "disk"}
CONFIGURATIONS: dict[str, tuple[str, int, int, dict[str, Any]]] = {
    "110m-ram": ("110m", 2, 512, RAM),
    "110m-disk": ("110m", 2, 512, ALL),
    "110m-in-place": ("110m", 1, 256, ALL | {"commit": "in_place"}),
    "350m-ram": ("350m", 1, 256, RAM),
    "350m-disk": ("350m", 2, 128, STATE),
    "350m-micro": ("350m", 2, 128, RAM | {"micro": 1, "state": "bf16"}),
    "1b-ram": ("1b", 1, 128, RAM | {"state": "int8"}),
    "1b-disk": ("1b", 1, 128, STATE | {"state": "int8-sr"}),
    "real-ram": ("real", 1, 512, RAM),
    "real-disk": ("real", 2, 256, KEPT),
}
"""Shape, rows, tokens a row, and what is placed where (`micro`: rows of a micro-batch).  *hold* is named where weights
are in memory and state on disk: a run that may go over to *shadow* has the second home of its weights planned from the
beginning, and touches it only then, many steps after the last one here."""


def main() -> None:
    args = arguments()
    work = Path(args.path).absolute()
    (work / "results").mkdir(parents=True, exist_ok=True)
    names = args.only.split(",") if args.only else list(CONFIGURATIONS)
    missing = [n for n in names if not result(work, n).exists() and (args.model or not n.startswith("real"))]
    machine = args.machine or (benched(work) if missing else "")
    for name in missing:
        result(work, name).write_text(json.dumps(measured(name, work, machine, args)))
    rows = {n: json.loads(result(work, n).read_text()) if result(work, n).exists() else None for n in CONFIGURATIONS}
    shown = {"ratios": {n: row and {k: row[k] for k in ("memory", "time")} for n, row in rows.items()}, "runs": rows}
    print(json.dumps(shown) if args.json else table(rows))
    if wrong := shortfall(rows):
        sys.exit(wrong)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", required=True, help="directory for swap files, outputs and results")
    parser.add_argument("--model", default="", help="directory of a real model")
    parser.add_argument("--only", default="", help=", ".join(CONFIGURATIONS))
    parser.add_argument("--machine", default="", help="a machine file of this box instead of a bench")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    unknown = [name for name in args.only.split(",") if name and name not in CONFIGURATIONS]
    if unknown or args.steps < 5:
        parser.error(f"--only {', '.join(unknown)}: there are {', '.join(CONFIGURATIONS)}; --steps from 5 on")
    return args


def result(work: Path, name: str) -> Path:
    return work / "results" / f"{name}.json"


def offloadz(*words: str, **more: Any) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-m", "offloadz", *words], text=True, **more)


def benched(work: Path) -> str:
    """A machine file of this box, measured now."""
    (work / "swap").mkdir(exist_ok=True)
    with offloadz("bench", "--swap", str(work / "swap"), "--out", str(work / "box.toml"), stdout=sys.stderr) as bench:
        if bench.wait():
            raise SystemExit("offloadz bench failed")
    return str(work / "box.toml")


def model_of(shape: str, work: Path) -> Path:
    """The directory of a made-up model: a config.json, and the quickstart's tokenizer."""
    place = work / "models" / shape
    if not place.exists():
        shutil.copytree(EXAMPLES / "model", place)
        hidden, inner, blocks, heads, words = SHAPES[shape]
        told = json.loads((place / "config.json").read_text())
        told |= {
            "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": blocks, "vocab_size": words,
            "num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": hidden // heads,
        }  # fmt: skip
        (place / "config.json").write_text(json.dumps(told))
    return place


def configuration(name: str, work: Path, machine: str, args: argparse.Namespace) -> Path:
    """The TOML file of a configuration."""
    shape, rows, length, more = CONFIGURATIONS[name]
    more = dict(more)
    micro, state = more.pop("micro", 0), more.pop("state", "fp32")
    model: dict[str, Any] = {"path": args.model} if shape == "real" else {"path": str(model_of(shape, work))}
    sections = {
        "model": model if shape == "real" else model | {"init": "random"},
        "data": {"train": [str(EXAMPLES / "train.jsonl")], "max_length": length,
                 **({"chat_template": "chatml", "train_on": "all"} if shape == "real" else {})},
        "train": {"output": str(work / "runs" / name), "steps": args.steps + 1, "batch_size": rows,
                  "micro_batch_size": micro, "save_every": "24h", "resume": "never"},
        "optimizer": {"lr": 1e-5, "state": state, "max_grad_norm": 0.0 if more.get("commit") == "in_place" else 1.0},
        "offload": {"swap": [str(work / "swap")], "machine": machine,
                    **dict.fromkeys(("parameters", "gradients", "optimizer"), "host"), **more},
    }  # fmt: skip
    from configurations import write_tables

    return write_tables(work / f"{name}.toml", sections)


def measured(name: str, work: Path, machine: str, args: argparse.Namespace) -> dict[str, Any]:
    """One configuration: plan and measured, side by side."""
    shutil.rmtree(work / "runs" / name, ignore_errors=True)
    (work / "swap").mkdir(exist_ok=True)
    path = configuration(name, work, machine, args)
    lines = trained(path, work / "runs" / name / "metrics.jsonl", args.steps)
    plan = json.loads((work / "runs" / name / "plan.json").read_text())
    shutil.rmtree(work / "runs" / name)
    shutil.rmtree(work / "swap")
    usual = steady(lines[: args.steps], range(1, 1 + plan["copies"]))
    step_s = median(line["step_s"] for line in usual)
    peak, planned = lines[-1]["bytes"]["host_peak"], max(plan["bytes"]["host"][p] for p in ("data", "load", "step"))
    return {
        "memory": peak / planned, "time": step_s / plan["step_s"], "peak_bytes": peak, "planned_bytes": planned,
        "step_s": step_s, "planned_step_s": plan["step_s"],
        "tokens": median(line["tokens"] for line in usual), "planned_tokens": plan["tokens_per_s"] * plan["step_s"],
        "busy_s": {lane: median(line["busy_s"][lane] for line in usual) for lane in usual[0]["busy_s"]},
        "planned_busy_s": plan["taken_s"], "terms": plan["terms"]["step"]["host"],
    }  # fmt: skip


def trained(config: Path, metrics: Path, steps: int) -> list[dict[str, Any]]:
    """The lines of the first `steps` steps of a run that is ended behind them."""
    begun = time.monotonic()
    with (config.with_suffix(".log")).open("w") as log, offloadz("train", str(config), stdout=log, stderr=log) as run:
        try:
            while True:
                lines = metrics.read_text().splitlines() if metrics.exists() else []
                if len(lines) >= steps:
                    return [json.loads(line) for line in lines[:steps]]
                if run.poll() is not None or time.monotonic() - begun > LIMIT_S:
                    raise SystemExit(f"{config}: no {steps} steps in {LIMIT_S} s; see {config.with_suffix('.log')}")
                time.sleep(0.2)
        finally:
            run.send_signal(signal.SIGKILL)


def is_right(row: dict[str, Any]) -> bool:
    """Whether memory and time are within what is promised."""
    return abs(row["memory"] - 1) <= MEMORY and abs(row["time"] - 1) <= TIME


def shortfall(rows: dict[str, dict[str, Any] | None]) -> str:
    """What is wrong with the results; empty where nothing is."""
    off = [name for name, row in rows.items() if row is not None and not is_right(row)]
    num_right = sum(row is not None and is_right(row) for row in rows.values())
    found = [f"off: {', '.join(off)}"] if off else []
    found += [f"{num_right} are right, {LEAST_RIGHT} have to be"] if num_right < LEAST_RIGHT else []
    return "; ".join(found)


def table(rows: dict[str, dict[str, Any] | None]) -> str:
    """Markdown: measured over predicted, and whether it is within what is promised."""
    lines = ["| run | memory, MiB | planned | ratio | step, s | planned | ratio |  |", "|---" * 8 + "|"]
    for name, row in rows.items():
        if row is None:
            lines.append(f"| {name} | - | - | - | - | - | - | not measured |")
            continue
        told = "" if is_right(row) else "off"
        lines.append(
            f"| {name} | {row['peak_bytes'] / 2**20:,.0f} | {row['planned_bytes'] / 2**20:,.0f} | {row['memory']:.2f} "
            f"| {row['step_s']:.2f} | {row['planned_step_s']:.2f} | {row['time']:.2f} | {told} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
