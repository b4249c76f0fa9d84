"""A whole training step beside what others make of it: a plain loop, FSDP2, DeepSpeed.

    python benchmarks/peers.py [--json] [--path DIR] [--rounds 3] [--steps 4] [--arms a,b] [--deepspeed-python FILE]

A Llama of 110 M parameters (12 layers of 768, 16,000 words), two rows of 512 tokens a step, AdamW, no clipping.  Every
arm is a process of its own, once a round, so a busy machine slows all alike; its figure is the median of its steps
without the first.  Ratios are of tokens per second, medians of the ratios within a round; `rss` is the peak of the
process.  Arms:

- `plain`: PyTorch's own loop in float32 with fused AdamW; `plain_recompute`: the same with activation checkpointing;
- `host`, `disk`: ours with all state in memory, or parameters, gradients and optimizer state in `--path`; nothing runs
  twice; `recompute`: as `host`, every block again in its backward; `bf16`: as `host`, weights in bfloat16; `compile`:
  as `host`, blocks compiled, which takes a C++ compiler;
- `fsdp2`: torch's fully_shard with CPUOffloadPolicy; `deepspeed`: ZeRO stage 3 with parameters and optimizer state on
  `--path`, by `--deepspeed-python` or where it can be imported; else null, as its ratio is.

The trade-off: a process for each arm costs its imports each time, and in return peak memory is the arm's alone.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROWS, LENGTH, WORDS = 2, 512, 16000
SHAPE = {
    "vocab_size": WORDS, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12,
    "num_attention_heads": 12, "num_key_value_heads": 12, "max_position_embeddings": LENGTH,
    "tie_word_embeddings": False, "use_cache": False,
}  # fmt: skip
HYPER = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.01}
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
"""What frameworks for several ranks want to find in the environment."""

RATIOS = {
    "host_vs_plain": ("host", "plain"),
    "disk_vs_plain": ("disk", "plain"),
    "recompute_vs_plain_recompute": ("recompute", "plain_recompute"),
    "disk_vs_deepspeed": ("disk", "deepspeed"),
    "host_vs_fsdp2": ("host", "fsdp2"),
    "bf16_vs_plain": ("bf16", "plain"),
    "bf16_vs_host": ("bf16", "host"),
    "compile_vs_host": ("compile", "host"),
}
Step = Callable[[Any], float]
Arm = Callable[[Path], Step]


def model_of() -> Any:
    """The model with random weights, the same in every arm."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SHAPE, attn_implementation="sdpa"))


def loop_of(model: Any) -> Step:
    """The plain loop over a model."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **HYPER)

    def step(ids: Any) -> float:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step


def plain(path: Path) -> Step:
    """PyTorch as it is."""
    return loop_of(model_of())


def plain_recompute(path: Path) -> Step:
    """PyTorch with activation checkpointing of each block."""
    model = model_of()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    return loop_of(model)


def fsdp2(path: Path) -> Step:
    """torch's fully_shard over one rank, all on the host."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    dist.init_process_group("gloo")
    how = {"mesh": init_device_mesh("cpu", (1,)), "offload_policy": CPUOffloadPolicy(pin_memory=False)}
    model = model_of()
    for block in [*model.model.layers, model]:
        fully_shard(block, **how)
    return loop_of(model)


def ours(**wishes: Any) -> Arm:
    """An arm of ours under these wishes."""

    def arm(path: Path) -> Step:
        import offloadz

        run = offloadz.offload(
            model_of(), offloadz.AdamW(**HYPER), swap=path, batch_size=ROWS, max_length=LENGTH, micro_batch_size=ROWS,
            max_grad_norm=0.0, **wishes,
        )  # fmt: skip
        return lambda ids: float(run.step({"input_ids": ids, "labels": ids}))

    return arm


def deepspeed(path: Path) -> Step:
    """ZeRO stage 3 with parameters and optimizer state on a drive, in its fastest settings for this size."""
    import deepspeed as peer
    import torch._dynamo.polyfills.loader  # noqa: F401  it compares signatures, so not inside `zero.Init`

    on_drive = {"device": "nvme", "nvme_path": str(path), "pin_memory": True}
    zero = {
        "stage": 3, "contiguous_gradients": True, "overlap_comm": False, "reduce_bucket_size": 50_000_000,
        "sub_group_size": 30_000_000, "stage3_prefetch_bucket_size": 15_000_000,
        "stage3_param_persistence_threshold": 10_000, "stage3_max_live_parameters": 30_000_000,
        "stage3_max_reuse_distance": 30_000_000,
        "offload_optimizer": {**on_drive, "buffer_count": 5, "pipeline_read": False, "pipeline_write": False},
        "offload_param": {**on_drive, "buffer_count": 6, "buffer_size": 13_000_000, "max_in_cpu": 0},
    }  # fmt: skip
    told = {
        "train_micro_batch_size_per_gpu": ROWS, "gradient_accumulation_steps": 1, "steps_per_print": 10**9,
        "zero_optimization": zero, "zero_allow_untested_optimizer": True, "bf16": {"enabled": False},
        "optimizer": {"type": "AdamW", "params": HYPER},
        "aio": {"block_size": 1 << 20, "queue_depth": 32, "intra_op_parallelism": 1, "single_submit": False,
                "overlap_events": True},
    }  # fmt: skip
    peer.init_distributed("gloo")
    with peer.zero.Init(config_dict_or_path=told):  # built otherwise, float32 parameters land on the drive in bfloat16
        model = model_of()
    held, *_ = peer.initialize(model=model, model_parameters=model.parameters(), config=told)

    def step(ids: Any) -> float:
        loss = held(input_ids=ids, labels=ids).loss
        held.backward(loss)
        held.step()
        return float(loss)

    return step


IN_MEMORY = dict.fromkeys(("parameters", "gradients", "optimizer_state"), "host")
ON_DISK = dict.fromkeys(IN_MEMORY, "disk")
ARMS: dict[str, Arm] = {
    "plain": plain,
    "host": ours(**IN_MEMORY, recompute="none"),
    "disk": ours(**ON_DISK, recompute="none"),
    "deepspeed": deepspeed,
    "plain_recompute": plain_recompute,
    "recompute": ours(**IN_MEMORY, recompute="all"),
    "bf16": ours(**IN_MEMORY, recompute="none", dtype="bfloat16"),
    "compile": ours(**IN_MEMORY, recompute="none", kernels="compile"),
    "fsdp2": fsdp2,
}


def run_arm(name: str, path: Path, steps: int, threads: int) -> dict[str, Any]:
    """The steps of one arm in this process."""
    import torch

    torch.set_num_threads(threads)
    step = ARMS[name](path)
    ids = torch.randint(0, WORDS, (steps, ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    most = [0]
    threading.Thread(target=watch, args=(most,), daemon=True).start()
    seconds, losses = [], []
    for row in ids:
        begun = time.perf_counter()
        losses.append(step(row))
        seconds.append(time.perf_counter() - begun)
    return {"step_s": statistics.median(seconds[1:]), "rss_bytes": most[0], "losses": losses}


def watch(most: list[int]) -> None:
    """The largest resident size of this process during its steps, looked at every 10 ms."""
    page = os.sysconf("SC_PAGE_SIZE")
    while True:
        most[0] = max(most[0], int(Path("/proc/self/statm").read_text().split()[1]) * page)
        time.sleep(0.01)


def asked(name: str, python: str, given: argparse.Namespace, port: int) -> dict[str, Any] | None:
    """What an arm answers from a process of its own; None for one that cannot run here, which is told."""
    path = Path(tempfile.mkdtemp(prefix="offloadz-peers-", dir=given.path))
    command = [python, str(Path(__file__).resolve()), "--arm", name, "--path", str(path)]
    command += ["--steps", str(given.steps), "--threads", str(given.threads)]
    more = {**ALONE, "MASTER_PORT": str(port), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": str(given.threads)}
    try:
        done = subprocess.run(command, env={**os.environ, **more}, capture_output=True, text=True, timeout=900)
    except subprocess.TimeoutExpired:
        print(f"{name}: no end within 900 s", file=sys.stderr)
        return None
    finally:
        shutil.rmtree(path, ignore_errors=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("ARM ")]
    if not lines:
        last = (done.stderr.strip().splitlines() or ["said nothing"])[-1]
        print(f"{name}: status {done.returncode}: {last}", file=sys.stderr)
        return None
    return json.loads(lines[-1][4:])  # type: ignore[no-any-return]


def pythons(given: argparse.Namespace) -> dict[str, str]:
    """The interpreter of each arm that can run here."""
    chosen = given.arms.split(",") if given.arms else list(ARMS)
    found = dict.fromkeys(chosen, sys.executable)
    peer = given.deepspeed_python or (sys.executable if importlib.util.find_spec("deepspeed") else "")
    if "deepspeed" in found:
        found["deepspeed"] = peer
    return {name: python for name, python in found.items() if python}


def measure(given: argparse.Namespace) -> list[dict[str, dict[str, Any]]]:
    """Per round what each arm answered."""
    rounds, port = [], 29600 + os.getpid() % 1000
    for number in range(given.rounds):
        answers = {}
        for name, python in pythons(given).items():
            answer = asked(name, python, given, port + number)
            if answer is not None:
                answers[name] = answer
                line = f"{name:<16} {answer['step_s']:.2f} s a step, {answer['rss_bytes'] / 1e9:.2f} GB"
                print(f"round {number + 1}: {line}", file=sys.stderr)
        rounds.append(answers)
    return rounds


def ratios_of(rounds: list[dict[str, dict[str, Any]]]) -> dict[str, float | None]:
    """Speed over speed and memory over memory, within each round; null where an arm is missing."""

    def middle(key: str, one: str, other: str) -> float | None:
        found = [r[other][key] / r[one][key] for r in rounds if one in r and other in r]
        return round(statistics.median(found), 3) if found else None

    ratios = {name: middle("step_s", one, other) for name, (one, other) in RATIOS.items()}
    return ratios | {"rss_disk_vs_plain": middle("rss_bytes", "plain", "disk")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object and nothing else on stdout")
    parser.add_argument("--path", default=None, help="a directory on the drive to use (default: a temporary one)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="steps of an arm, of which the first is not counted")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--arms", default="", help=f"only these: {','.join(ARMS)}")
    parser.add_argument("--deepspeed-python", default="", help="an interpreter that has deepspeed")
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.arm:
        print("ARM " + json.dumps(run_arm(given.arm, Path(given.path), given.steps, given.threads)), flush=True)
        os._exit(0)  # what frameworks leave behind at exit is not measured
    rounds = measure(given)
    names = [name for name in ARMS if any(name in r for r in rounds)]
    medians = {
        n: {k: statistics.median(r[n][k] for r in rounds if n in r) for k in ("step_s", "rss_bytes")} for n in names
    }
    found = {
        "ratios": ratios_of(rounds),
        "medians": medians,
        "losses": {n: next(r[n]["losses"] for r in rounds if n in r) for n in names},
    }
    print(json.dumps(found) if given.json else json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
