"""A model far larger than memory: two optimizer steps of a 13B on two cores, everything on the drive.

    python benchmarks/thirteen_b.py --swap DIR [--config FILE] [--state int8-sr] [--commit in_place] [--tokens 128]
        [--steps 2] [--host-memory 6GiB] [--disk 55GB] [--limit 3GiB] [--json]

Random weights of a Llama-2-13B shape (or of any config.json) are streamed to the drive; nothing of the size of the
model is ever in memory.  By default moments are 8-bit and updated in place, which needs 4 bytes a parameter on the
drive (about 55 GB) and cannot clip; `--commit hold` clips at 1.0.  `--limit` runs it inside a memory control group of
that size (as root; v1 or v2), which ends the process where it is overstepped.  Prints plan beside measured.

Exit status 1, and a line, where peak resident memory was above `--host-memory` or `--limit`, or the drive held more
than `--disk`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from offloadz.plan.words import parse_bytes

LLAMA_2_13B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 5120, "intermediate_size": 13824,
    "num_hidden_layers": 40, "num_attention_heads": 40, "num_key_value_heads": 40, "vocab_size": 32000,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False,
    "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.02,
}  # fmt: skip
OPENLLAMA_3B = LLAMA_2_13B | {
    "hidden_size": 3200, "intermediate_size": 8640, "num_hidden_layers": 26, "num_attention_heads": 32,
    "num_key_value_heads": 32, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6,
}  # fmt: skip
SHAPES = {"llama-2-13b": LLAMA_2_13B, "openllama-3b": OPENLLAMA_3B}
GROUPS = Path("/sys/fs/cgroup")


def main() -> None:
    args = arguments()
    if not args.inside:
        status = in_a_process(args)
        if args.limit and status == -signal.SIGKILL:
            say(f"overstepped: killed for more memory than --limit {args.limit} allows")
        raise SystemExit(status if status >= 0 else 1)
    shown = trained(args)
    print(json.dumps(shown) if args.json else "\n".join(f"{key}: {value}" for key, value in shown.items()))
    lines = overstepped(shown, args)
    for line in lines:
        say(line)
    raise SystemExit(bool(lines))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--swap", required=True, help="directory on the drive")
    parser.add_argument("--config", default="llama-2-13b", help=f"{', '.join(SHAPES)}, or a config.json")
    parser.add_argument("--state", default="int8-sr", help="fp32 | bf16 | int8 | int8-sr")
    parser.add_argument("--commit", default="in_place", help="in_place | hold")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--host-memory", default="6GiB", help="what the plan may use, and resident memory may reach")
    parser.add_argument("--disk", default="", help="most that may be held on the drive")
    parser.add_argument("--limit", default="", help="size of a memory control group to run in")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def in_a_process(args: argparse.Namespace) -> int:
    """The run in a process of its own, within a control group where one is asked for; returns its exit status."""
    command = [sys.executable, __file__, *sys.argv[1:], "--inside"]
    if not args.limit:
        return subprocess.run(command, check=False).returncode
    parent, file = memory_groups(GROUPS)
    group = parent / f"offloadz-{os.getpid()}"
    group.mkdir()
    try:
        (group / file).write_text(str(parse_bytes(args.limit)))
        enter = f'echo $$ > {group}/cgroup.procs && exec "$@"'
        return subprocess.run(["sh", "-c", enter, "sh", *command], check=False).returncode
    finally:
        for _ in range(50):  # the kernel lets go of the last page a moment after the process
            try:
                group.rmdir()
                break
            except OSError:
                time.sleep(0.1)


def memory_groups(root: Path) -> tuple[Path, str]:
    """Where groups of memory are made, and the file of a group that holds its limit; v2 has them switched on first."""
    if not (root / "cgroup.controllers").is_file():
        return root / "memory", "memory.limit_in_bytes"
    (root / "cgroup.subtree_control").write_text("+memory")
    return root, "memory.max"


def overstepped(shown: dict[str, Any], args: argparse.Namespace) -> list[str]:
    """A line for each stated limit that was not kept."""
    limits = (("peak_rss_bytes", "--host-memory", args.host_memory), ("peak_rss_bytes", "--limit", args.limit),
              ("disk_bytes", "--disk", args.disk))  # fmt: skip
    return [
        f"overstepped: {key} is {shown[key]:,}, {option} {most} allows {parse_bytes(most):,}"
        for key, option, most in limits
        if most and shown[key] > parse_bytes(most)
    ]


def trained(args: argparse.Namespace) -> dict[str, Any]:
    """Build, step, measure."""
    import torch

    import offloadz

    shape = SHAPES.get(args.config) or json.loads(Path(args.config).read_text())
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(shape))
        model = offloadz.load(folder, dtype=torch.bfloat16, init="random")
    clip = 0.0 if args.commit == "in_place" else 1.0
    on_disk = dict.fromkeys(("parameters", "gradients", "optimizer_state", "activations"), "disk")
    with offloadz.offload(
        model, offloadz.AdamW(lr=1e-5, state=args.state), swap=args.swap, commit=args.commit, max_grad_norm=clip,
        batch_size=args.rows, max_length=args.tokens, host_memory=parse_bytes(args.host_memory), **on_disk,
    ) as run:  # fmt: skip
        built_s = time.monotonic() - began
        say(f"{run.session.spec.num_elements:,} parameters on the drive after {built_s:.0f} s")
        generator = torch.Generator().manual_seed(0)
        steps = []
        for _ in range(args.steps):
            ids = torch.randint(0, shape["vocab_size"], (args.rows, args.tokens), generator=generator)
            begun = time.monotonic()
            loss = float(run.step({"input_ids": ids, "labels": ids}))
            run.flush()
            steps.append({"loss": loss, "grad_norm": run.report.grad_norm, "step_s": time.monotonic() - begun,
                          "busy_s": run.report.busy_s, "bytes": run.report.bytes})  # fmt: skip
            say(f"step {len(steps)}: loss {loss:.4f}, {steps[-1]['step_s']:.0f} s, busiest {run.report.bottleneck}")
        return compared(run, steps, built_s, Path(args.swap))


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def compared(run: Any, steps: list[dict[str, Any]], built_s: float, swap: Path) -> dict[str, Any]:
    """Plan against measured: bytes of memory and drive, seconds of a step."""
    from offloadz.plan.paths import held_bytes
    from offloadz.runtime.meter import process_bytes

    plan, peak = run.plan, process_bytes()["peak"]
    held = held_bytes(swap)
    step_s = sorted(s["step_s"] for s in steps)[len(steps) // 2]
    return {
        "ratios": {
            "rss_vs_plan": peak / plan.peak["host"], "disk_vs_plan": held / plan.peak["disk"],
            "step_vs_plan": step_s / plan.step_s,
        },
        "parameters": run.session.spec.num_elements,
        "slots": plan.slots,
        "peak_rss_bytes": peak, "planned_rss_bytes": plan.peak["host"],
        "disk_bytes": held, "planned_disk_bytes": plan.peak["disk"],
        "planned_step_s": plan.step_s, "built_s": built_s, "steps": steps,
    }  # fmt: skip


if __name__ == "__main__":
    main()
