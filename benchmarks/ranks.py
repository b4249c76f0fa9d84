"""A step over several ranks of this machine against one process and against the plan; plans for boxes with 1-8 GPUs.

    python benchmarks/ranks.py [--ranks 1 2 4] [--stage 3] [--steps 4] [--simulate-only] [--json]

Measured: a random Llama of 15 M parameters, 8 rows of 128 tokens a step in all, ranks on gloo over the loopback device,
which share this machine's cores, so more ranks are no faster here; what is looked at is the cost of the exchanges.
Simulated: 13B, 32B and 70B over GPUs of the catalogue, weights and state in host memory, one row of 4,096 tokens per
rank and step.  No GPU has run this yet.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
SHAPE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 384, "intermediate_size": 1024,
    "num_hidden_layers": 8, "num_attention_heads": 6, "num_key_value_heads": 6, "vocab_size": 1024,
    "max_position_embeddings": 256, "tie_word_embeddings": False, "hidden_act": "silu", "rms_norm_eps": 1e-5,
}  # fmt: skip
ROWS, LENGTH = 8, 128
LARGE = {"13B": (5120, 13824, 40, 40, 40, 32000), "32B": (5120, 27648, 64, 40, 8, 152064)}
LARGE["70B"] = (8192, 28672, 80, 64, 8, 128256)
SHARES = ("h100",)
"""Boxes of the catalogue whose host is the share of one GPU: with more of them it grows."""

BOXES, COUNTS, ROW_LENGTH = ("rtx4090", "h100"), (1, 2, 4, 8), 4096
GAIN_BOX, GAIN_ROWS = "h100", (1, 16, 64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--simulate-only", action="store_true")
    parser.add_argument("--inside", default="", help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.inside:
        one_rank(Path(args.inside), args)
        return
    found: dict[str, Any] = {"ratios": {}, "simulated": list(simulated())}
    if not args.simulate_only:
        found["measured"] = [measured(ranks, args) for ranks in args.ranks]
        alone = found["measured"][0]["step_s"]
        for told in found["measured"]:
            found["ratios"][f"{told['ranks']}_ranks_vs_first"] = told["step_s"] / alone
            found["ratios"][f"{told['ranks']}_ranks_vs_plan"] = told["step_s"] / told["planned_step_s"]
    print(json.dumps(found) if args.json else "\n".join(table(found)))


def measured(ranks: int, args: argparse.Namespace) -> dict[str, Any]:
    """Seconds of a step of that many ranks."""
    with tempfile.TemporaryDirectory() as folder, socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = str(held.getsockname()[1])
        held.close()
        (Path(folder) / "config.json").write_text(json.dumps(SHAPE))
        command = [sys.executable, __file__, "--inside", folder, "--stage", str(args.stage), "--steps", str(args.steps)]
        told = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
        told |= {"MASTER_PORT": port, "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // ranks))}
        environments = [{**os.environ, **told, "RANK": str(rank), "PYTHONPATH": str(ROOT)} for rank in range(ranks)]
        running = [subprocess.Popen(command, env=environment) for environment in environments]
        statuses = [process.wait() for process in running]
        if any(statuses):
            raise SystemExit(f"{ranks} ranks did not end well")
        answer: dict[str, Any] = json.loads((Path(folder) / "answer.json").read_text())
        return answer


def one_rank(folder: Path, args: argparse.Namespace) -> None:
    """What each process does; the first leaves the answer."""
    import torch

    import offloadz
    from offloadz.runtime.ranks import join

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    ranks = join()
    model = offloadz.load(folder, dtype=torch.float32, init="random")
    stage = args.stage if ranks.size > 1 else "auto"
    how = {"batch_size": ROWS, "max_length": LENGTH, "zero_stage": stage, "micro_batch_size": 1}
    with offloadz.offload(model, offloadz.AdamW(lr=1e-5), **how) as run:
        ids = torch.randint(0, 1024, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))[
            ranks.rank :: ranks.size
        ]
        took, net = [], []
        for _ in range(args.steps + 1):
            begun = time.perf_counter()
            run.step({"input_ids": ids, "labels": ids})
            took.append(time.perf_counter() - begun)
            net.append(run.report.busy_s["net"])
        answer = {"ranks": ranks.size, "stage": run.session.spec.share.stage, "step_s": statistics.median(took[1:]),
                  "net_busy_s": statistics.median(net[1:]), "planned_step_s": run.plan.step_s,
                  "parameters": run.session.spec.num_elements}  # fmt: skip
    if ranks.rank == 0:
        (folder / "answer.json").write_text(json.dumps(answer))


def simulated() -> Iterator[dict[str, Any]]:
    """A row per model, GPU and number of ranks."""
    for name, shape in LARGE.items():
        for box in BOXES:
            for ranks in COUNTS:
                # The question is time, not room.
                machine = replace(of_ranks(box, ranks), host_bytes=4 << 40)
                plan = planned(shape, machine, ranks, 1, parameters="host", gradients="host", optimizer="host")
                busy = plan.busy_s or {}
                yield {
                    "model": name, "gpu": box, "ranks": ranks, "fits": plan.fits, "step_s": plan.step_s,
                    "tokens_per_s": plan.tokens_per_s, "bottleneck": plan.bottleneck,
                    "fetch_s": busy.get("h2d", 0.0), "net_s": busy.get("net", 0.0),
                    "device_bytes": plan.peak["device"], "host_bytes": plan.peak["host"],
                }  # fmt: skip


def gains() -> Iterator[dict[str, Any]]:
    """A row per model, number of GPUs that bring their share of a server each, and rows a GPU: in memory where it fits,
    else with what has to be on the drives."""
    for name, shape in LARGE.items():
        for rows in GAIN_ROWS:
            alone = 0.0
            for ranks in COUNTS:
                machine = of_ranks(GAIN_BOX, ranks)
                plans = (planned(shape, machine, ranks, rows, swap=swap) for swap in (False, True))
                plan = next(plan for plan in plans if plan.fits)
                each = plan.tokens_per_s / ranks
                alone = alone or each
                tiers = {getattr(plan.placement, kind) for kind in ("parameters", "gradients", "optimizer")}
                yield {"model": name, "ranks": ranks, "rows": rows, "on_disk": "disk" in tiers, "each": each,
                       "over_share": each / alone, "host_bytes": plan.peak["host"]}  # fmt: skip


def of_ranks(box: str, ranks: int) -> Any:
    """A box of the catalogue, grown with the number of ranks where it is the share of one GPU."""
    from offloadz.plan.catalogue import read_machine
    from offloadz.plan.machine import Machine

    machine = read_machine(box, Machine("any", 1 << 30, "the table", device_bytes=1 << 30)).computing(
        "bfloat16", "auto"
    )
    times = ranks if box in SHARES else 1
    grown = {k: r * times for k, r in machine.rates.items() if k.startswith(("cpu", "memory", "disk"))}
    size = {"cores": machine.cores * times, "host_bytes": machine.host_bytes * times}
    return replace(machine, **size, rates={**machine.rates, **grown})


def planned(shape: tuple[int, ...], machine: Any, ranks: int, rows: int, **told: Any) -> Any:
    """The plan of stage 3 for so many rows a rank."""
    from offloadz.plan.stages import decide_for
    from offloadz.plan.wishes import Wishes

    stage = 3 if ranks > 1 else "auto"
    asked = Wishes(rows * ranks, ROW_LENGTH, compute="bfloat16", ranks=ranks, zero_stage=stage, commit="hold", keep=1)
    return decide_for(spec_of(shape), machine, replace(asked, copies=1, **told))


@cache
def spec_of(shape: tuple[int, ...]) -> Any:
    from offloadz.plan.headers import spec_from_formula

    keys = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    told = {"model_type": "llama", "tie_word_embeddings": False, **dict(zip((*keys, "vocab_size"), shape, strict=True))}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(told))
        return spec_from_formula(Path(folder), "bfloat16")


def table(found: dict[str, Any]) -> Iterator[str]:
    for told in found.get("measured", ()):
        yield (f"{told['ranks']} ranks, stage {told['stage']}: step {told['step_s']:.3f} s "
               f"(plan {told['planned_step_s']:.3f}), net busy {told['net_busy_s']:.3f} s")  # fmt: skip
    yield from simulated_table(found["simulated"])


def simulated_table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Markdown of `simulated`."""
    yield "| model | GPU | ranks | step, s | tokens/s | over one | fetch, s | between ranks, s | busiest |"
    yield "|---" * 9 + "|"
    for told in rows:
        one = next(t for t in rows if (t["model"], t["gpu"]) == (told["model"], told["gpu"]))
        gain = told["tokens_per_s"] / one["tokens_per_s"] if one["tokens_per_s"] else 0.0
        yield (f"| {told['model']} | {told['gpu']} | {told['ranks']} | {told['step_s']:.2f} | "
               f"{told['tokens_per_s']:,.0f} | {gain:.2f} | {told['fetch_s']:.2f} | {told['net_s']:.2f} | "
               f"{told['bottleneck']} |")  # fmt: skip


def gains_table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Markdown of `gains`: a line per model and number of GPUs."""
    yield "| model | GPUs | " + " | ".join(f"rows a GPU: {count}" for count in GAIN_ROWS) + " |"
    yield "|---" * (2 + len(GAIN_ROWS)) + "|"
    for model, ranks in dict.fromkeys((told["model"], told["ranks"]) for told in rows):
        cells = []
        for told in (t for t in rows if (t["model"], t["ranks"]) == (model, ranks)):
            share = f", {told['over_share']:.2f}" if ranks > 1 else ""
            share = f"{share[:2]}**{share[2:]}**" if told["over_share"] > 1.005 else share
            cells.append(f"{told['each']:,.0f}{share}, {'drives' if told['on_disk'] else 'memory'}")
        yield f"| {model} | {ranks} | {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
