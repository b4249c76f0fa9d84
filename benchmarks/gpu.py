"""One GPU in eight minutes: is it right, does it overlap, and how fast is it beside what the plan says?

    python benchmarks/gpu.py [--json] [--device auto] [--limit 24GiB] [--minutes 8] [--sizes 1b,3b,7b,14b] [--swap DIR]
        [--state int8-sr] [--rows 16] [--length 1024]

In order, each part with what time is left: a tiny model in float32 and bfloat16 against a plain PyTorch loop on the
same device; poisoned runs of several placements against a calm one, bit by bit; then models of 1B to 14B with random
weights within `--limit` of the device's memory, everything else in host memory (or under `--swap`, where that does not
fit): tokens/s beside predicted, and how much of the copies the computation hides.  A size is left out, with the reason,
where the host has no room for it or its weights would not be made in time.

`--device rehearsal` runs all of it at tiny sizes on a CPU that behaves like a device: it shows that this program runs,
and its times mean nothing.

`fp32_norm_off`: largest relative difference of a norm from the plain loop (1e-5 is the promise); `bf16_loss_off`: of a
loss (5e-3).  `poison_equal`: share of poisoned runs with the bits of the calm one (1).  Each size has
`tokens_vs_predicted`, `step_vs_slowest_lane` (1: all hidden behind it) and `copies_hidden` (share of the copies' time
in which the device computed on).  A part without time is null.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import offloadz
from offloadz.plan.errors import ConfigError, DoesNotFit
from offloadz.plan.words import parse_bytes

KINDS = ("parameters", "gradients", "optimizer_state", "activations")
SHAPES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 3, "num_attention_heads": 4},
    "1b": {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32},
    "3b": {"hidden_size": 3200, "intermediate_size": 8640, "num_hidden_layers": 26, "num_attention_heads": 32},
    "7b": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32},
    "14b": {"hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 40, "num_attention_heads": 40},
}
VOCABULARY = 32000
STEPS, MEASURED = 5, 2
SPREAD = [("host",) * 4, ("device",) * 4, ("host", "device", "host", "device"), ("device", "host", "host", "host")]


def main() -> None:
    args = arguments()
    found = measured(args)
    print(json.dumps(found) if args.json else "\n".join(f"{key}: {value}" for key, value in found.items()))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto", help="auto, one of torch's such as cuda:0, or rehearsal")
    parser.add_argument("--limit", default="24GiB", help="most bytes of the device's memory")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--sizes", default="1b,3b,7b,14b", help=", ".join(SHAPES))
    parser.add_argument("--swap", default="", help="a directory, for what does not fit into host memory")
    parser.add_argument("--state", default="int8-sr", help="fp32 | bf16 | int8 | int8-sr")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def measured(args: argparse.Namespace) -> dict[str, Any]:
    """All parts, as far as there is time."""
    until_s = time.monotonic() + 60 * args.minutes
    rehearsed = args.device == "rehearsal"
    device = device_of(args.device)()
    if device.unified:
        raise SystemExit("torch finds no accelerator here; --device rehearsal shows that this program runs")
    facts = device.facts
    del device
    sizes = ["tiny"] if rehearsed else args.sizes.split(",")
    rows, length = (4, 32) if rehearsed else (args.rows, args.length)
    make = device_of(args.device)
    norm_off, loss_off = parity(make, torch.float32)[0], parity(make, torch.bfloat16)[1]
    say(f"parity: norm {norm_off:.1e} in float32, loss {loss_off:.1e} in bfloat16")
    equal = poisoned(make, until_s)
    say(f"poison: {equal:.0%} equal")
    models: dict[str, Any] = {}
    rate = 0.0
    for size in sizes:
        models[size] = attempt(size, rate, until_s, lambda s=size: sized(args, s, make, rows, length))  # type: ignore[misc]
        rate = models[size].get("weights_per_s", rate)
        say(f"{size}: {json.dumps(models[size])}")
    ratios = {"fp32_norm_off": norm_off, "bf16_loss_off": loss_off, "poison_equal": equal}
    for key in ("tokens_vs_predicted", "step_vs_slowest_lane", "copies_hidden"):
        ratios |= {f"{key}_{size}": found.get(key) for size, found in models.items()}
    return {"ratios": ratios, "device": facts.gpu, "free_bytes": facts.free_bytes, "models": models}


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def device_of(told: str) -> Callable[[], Any]:
    """What makes a device for one run."""
    if told == "rehearsal":
        from offloadz.runtime.rehearsal import Rehearsal

        return lambda: Rehearsal(bfloat16=True)
    from offloadz.runtime.chosen import device_named

    return lambda: device_named(told)


def config_of(shape: dict[str, int], words: int) -> Any:
    from transformers import LlamaConfig

    sizes = {**shape, "vocab_size": words, "max_position_embeddings": 4096, "tie_word_embeddings": False}
    return LlamaConfig(**sizes, num_key_value_heads=shape["num_attention_heads"])


def tiny() -> nn.Module:
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(config_of(SHAPES["tiny"], 512))


def batch_of(seed: int, rows: int, length: int, words: int) -> dict[str, Tensor]:
    ids = torch.randint(0, words, (rows, length), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


def trained(make: Callable[[], Any], **how: Any) -> tuple[list[float], list[float]]:
    """Losses and norms of a few steps of the tiny model."""
    losses, norms = [], []
    with offloadz.offload(tiny(), offloadz.AdamW(lr=1e-3), device=make(), micro_batch_size=2, **how) as run:
        for seed in range(STEPS):
            losses.append(float(run.step(batch_of(seed, 4, 32, 512))))
            norms.append(run.report.grad_norm)
    return losses, norms


def plain(make: Callable[[], Any], dtype: torch.dtype) -> tuple[list[float], list[float]]:
    """The same by a plain loop on the same device: float32 masters, working weights rounded to `dtype`."""
    device = make()
    model = tiny().to(device.torch)
    masters = [p.detach().clone().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=1e-3, foreach=False)
    losses, norms = [], []
    for seed in range(STEPS):
        batch = device.bring(batch_of(seed, 4, 32, 512))
        with torch.no_grad():
            for param, master in zip(model.parameters(), masters, strict=True):
                param.copy_(master.to(dtype).float())
        total = 0.0
        model.zero_grad()
        for first in (0, 2):
            loss = model(**{k: v[first : first + 2] for k, v in batch.items()}, use_cache=False).loss / 2
            loss.backward()
            total += float(loss.detach())
        for param, master in zip(model.parameters(), masters, strict=True):
            master.grad = None if param.grad is None else param.grad.to(dtype).float()
        norms.append(float(nn.utils.clip_grad_norm_(masters, 1.0, foreach=False)))
        optimizer.step()
        losses.append(total)
    return losses, norms


def parity(make: Callable[[], Any], dtype: torch.dtype) -> tuple[float, float]:
    """Largest relative difference from the plain loop: of a norm, of a loss."""
    (losses, norms), (losses_2, norms_2) = trained(make, dtype=dtype), plain(make, dtype)
    return worst(norms, norms_2), worst(losses, losses_2)


def worst(found: list[float], wanted: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(found, wanted, strict=True))


def poisoned(make: Callable[[], Any], until_s: float) -> float:
    """Share of runs under poison, over placements and slots, that have the bits of a calm one."""
    results = []
    with tempfile.TemporaryDirectory() as swap:
        calm = trained(make, slots=1, **dict.fromkeys(KINDS, "host"))
        for seed, placement in enumerate([*SPREAD, ("disk",) * 4] * 2):
            if time.monotonic() > until_s:
                break
            where = dict(zip(KINDS, placement, strict=True))
            results.append(trained(make, slots=1 + seed % 3, poison=True, seed=seed, swap=swap, **where) == calm)
    return sum(results) / len(results) if results else float("nan")


def attempt(size: str, rate: float, until_s: float, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What was measured of a size, or why it was not.  `rate`: weights a second that were made before; 0: unknown."""
    config = config_of(SHAPES[size], VOCABULARY)
    block = 4 * config.hidden_size**2 + 3 * config.hidden_size * config.intermediate_size
    weights = config.num_hidden_layers * block + 2 * VOCABULARY * config.hidden_size
    needed_s, left_s = weights / rate * 1.5 if rate else 0.0, until_s - time.monotonic()
    if needed_s > left_s or left_s < 0:
        return {"left_out": f"about {needed_s:.0f} s are needed, {left_s:.0f} s are left"}
    try:
        return work()
    except (DoesNotFit, ConfigError) as error:
        return {"left_out": str(error)}
    finally:
        gc.collect()


def sized(args: argparse.Namespace, size: str, make: Callable[[], Any], rows: int, length: int) -> dict[str, Any]:
    """A model of random weights: made, stepped, measured beside its plan."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        config_of(SHAPES[size], VOCABULARY).save_pretrained(folder)
        model = offloadz.load(folder, dtype=torch.bfloat16, init="random")
    with offloadz.offload(
        model, offloadz.AdamW(lr=1e-5, state=args.state), device=make(), device_memory=parse_bytes(args.limit),
        batch_size=rows, max_length=length, swap=[args.swap] if args.swap else [], activations="host",
    ) as run:  # fmt: skip
        made_s = time.monotonic() - begun
        run.step(batch_of(0, rows, length, VOCABULARY))
        steps = []
        for seed in range(1, 1 + MEASURED):
            before_s = time.monotonic()
            run.step(batch_of(seed, rows, length, VOCABULARY))
            steps.append((time.monotonic() - before_s, run.report))
        return compared(run, steps, made_s, rows * length)


def compared(run: Any, steps: list[tuple[float, Any]], made_s: float, tokens: int) -> dict[str, Any]:
    """Measured beside predicted."""
    plan, (step_s, report) = run.plan, min(steps, key=lambda step: step[0])
    copies = report.busy_s["h2d"] + report.busy_s["d2h"]
    return {
        "tokens_per_s": tokens / step_s,
        "predicted_tokens_per_s": plan.tokens_per_s,
        "tokens_vs_predicted": tokens / step_s / plan.tokens_per_s if plan.tokens_per_s else None,
        "step_s": step_s, "busy_s": report.busy_s, "predicted_busy_s": plan.busy_s, "wait_s": report.wait_s,
        "step_vs_slowest_lane": step_s / max(report.busy_s.values()),
        "copies_hidden": 1 - min(1.0, max(0.0, step_s - report.busy_s["device"]) / copies) if copies else None,
        "device_peak_bytes": report.bytes["device_peak"], "planned_device_bytes": plan.peak["device"],
        "placement": [getattr(plan.placement, kind.removesuffix("_state")) for kind in KINDS],
        "micro_batch_size": plan.micro_batch_size,
        "weights_per_s": run.session.spec.num_elements / made_s,
    }  # fmt: skip


if __name__ == "__main__":
    main()
