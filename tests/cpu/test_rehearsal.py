"""A device with memory of its own, rehearsed on the CPU: same bits as where host and device are one memory.

The `Rehearsal` copies for real and later, fills its slots with NaN, goes backward on another thread, and under poison
is late with what it computes; so what is missing from a program shows here and not first on a GPU.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from odd_models import odd_run
from reference import plain_run
from safetensors.torch import load_file
from tiny import tables
from tiny_models import (
    FAMILIES,
    Outcome,
    assert_close,
    assert_same_bits,
    assert_same_weights,
    batches,
    start_of,
    tiny,
    train,
    weights,
)

import offloadz
from offloadz.config import config_from_tables
from offloadz.model import offload as offloads
from offloadz.plan import pace
from offloadz.plan.ops import Program
from offloadz.plan.passes import compiled
from offloadz.runtime import rehearsal
from offloadz.runtime import session as sessions
from offloadz.runtime.devices import delays
from offloadz.runtime.rehearsal import Rehearsal
from offloadz.train import planning
from offloadz.train.loop import train as train_of

ROOT = Path(__file__).parents[2]
KINDS = ("parameters", "gradients", "optimizer_state", "activations")
PLACEMENTS = list(product(("device", "host", "disk"), repeat=4))
STEPS = batches(3)
DISK, HOST = dict.fromkeys(KINDS, "disk"), dict.fromkeys(KINDS, "host")


def ran(family: str, swap: Path | str = "unused", **how: Any) -> Outcome:
    how = {"micro_batch_size": 2, "recompute": "all", **how}
    with offloadz.offload(tiny(family), offloadz.AdamW(lr=1e-3), swap=swap, **how) as run:
        return train(run, STEPS)


@cache
def calm(family: str, micro: int, dtype: torch.dtype = torch.float32) -> Outcome:
    """Host and device one memory, and one slot: nothing runs ahead of the computation."""
    return ran(family, micro_batch_size=micro, dtype=dtype, slots=1, **HOST)


HUNDRED = pytest.param(100, marks=[pytest.mark.full, pytest.mark.timeout(1800)])


@pytest.mark.parametrize("runs", [1, HUNDRED])
@pytest.mark.parametrize("index", range(len(PLACEMENTS)), ids=["-".join(p) for p in PLACEMENTS])
def test_every_placement_has_the_bits_of_one_memory(index: int, runs: int, swap: Path) -> None:
    """Of a hundred runs all are poisoned, of single ones every second."""
    where = dict(zip(KINDS, PLACEMENTS[index], strict=True))
    for seed in range(index, index + runs * len(PLACEMENTS), len(PLACEMENTS)):
        source = random.Random(seed)
        family, slots, sweeps = source.choice(FAMILIES), source.choice((1, 2, 3)), source.choice((1, 2))
        how = {"slots": slots, "sweeps": sweeps, "poison": runs > 1 or index % 2 == 0, "seed": seed}
        how["recompute"] = ("all", "none")[seed // 2 % 2]
        found = ran(family, swap, device=Rehearsal(), **where, **how)
        assert_same_bits(found, calm(family, 2), f"{family}, {how}")


@pytest.mark.parametrize("where", [HOST, DISK], ids=["host", "disk"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_plain_loop_is_matched(family: str, where: dict[str, str], swap: Path) -> None:
    found = ran(family, swap, device=Rehearsal(), poison=True, **where)
    assert_close(found, plain_run(tiny(family), STEPS, micro_rows=2), start_of(tiny(family)))


@pytest.mark.parametrize("slots", [1, 2])
def test_weights_that_are_widened_on_the_device_have_the_same_bits(slots: int, swap: Path) -> None:
    """A device without bfloat16 products: bytes cross as they are stored, gradients are rounded before they leave."""
    where: dict[str, str]
    for where in (HOST, DISK, dict.fromkeys(KINDS, "device")):
        found = ran("qwen3", swap, device=Rehearsal(), dtype=torch.bfloat16, slots=slots, poison=True, **where)
        assert_same_bits(found, calm("qwen3", 2, torch.bfloat16), str(where))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_device_that_computes_in_bfloat16_follows_the_plain_loop(family: str, swap: Path) -> None:
    steps = batches(20)
    wanted = plain_run(tiny(family), steps, micro_rows=2, bf16_weights=True)
    outcomes = []
    for where in (HOST, DISK):
        with offloadz.offload(
            tiny(family), offloadz.AdamW(lr=1e-3), swap=swap, micro_batch_size=2, dtype=torch.bfloat16,
            device=Rehearsal(bfloat16=True), **where,
        ) as run:  # fmt: skip
            assert run.session.room.compute_dtype == torch.bfloat16
            outcomes.append(train(run, steps))
    assert_same_bits(outcomes[1], outcomes[0])
    for step, (a, b) in enumerate(zip(outcomes[0].losses, wanted.losses, strict=True)):
        assert abs(a - b) <= 5e-3 * abs(b), f"step {step}: {a}, wanted {b}"


def test_updates_in_place_and_other_rules(swap: Path) -> None:
    for settings in (offloadz.AdamW(lr=1e-3, state="int8"), offloadz.SGD(lr=1e-2), offloadz.Lion(lr=1e-4)):
        outcomes = []
        for more in ({}, {"device": Rehearsal(), "poison": True}):
            how = {"commit": "in_place", "max_grad_norm": 0.0, "optimizer_state": "device", "gradients": "host"}
            with offloadz.offload(tiny("qwen3"), settings, micro_batch_size=2, parameters="host", **how, **more) as run:
                outcomes.append(train(run, STEPS))
        assert_same_bits(outcomes[1], outcomes[0], str(settings))


def test_a_layer_of_odd_steps_only(swap: Path) -> None:
    """Plans are given up in mid-flight, evaluations come in between, and a loss of one's own is used."""
    assert_same_bits(odd_run(swap, device=Rehearsal(), poison=True), odd_run(swap))


def test_several_backward_passes_dropout_and_log_probabilities(swap: Path) -> None:
    outcomes = []
    for more in ({}, {"device": Rehearsal(), "poison": True}):
        model, out = tiny("gpt2", resid_pdrop=0.2, attn_pdrop=0.1, embd_pdrop=0.1).train(), Outcome()
        torch.manual_seed(5)
        with offloadz.offload(model, offloadz.AdamW(lr=1e-3), swap=swap, micro_batch_size=2, **DISK, **more) as run:
            for batch in STEPS:
                first, second = (offloadz.token_logprobs(model, batch).sum() for _ in range(2))
                run.backward(-first / 50)
                run.backward(-second / 50)
                run.update()
                out.losses.append(float(first.detach()))
                out.norms.append(run.report.grad_norm)
            out.weights = weights(run)
        outcomes.append(out)
    assert_same_bits(outcomes[1], outcomes[0])


def test_saved_loaded_and_materialised(tmp_path: Path, swap: Path) -> None:
    """A checkpoint of one kind of device is gone on from on another, and weights come back into the module."""
    device = dict.fromkeys(KINDS, "device")
    with offloadz.offload(tiny("llama"), offloadz.AdamW(lr=1e-3), device=Rehearsal(), **device) as run:
        train(run, STEPS[:2])
        run.save(tmp_path / "checkpoint")
    outcomes = []
    for where, more in ((HOST, {}), (device, {"device": Rehearsal(), "poison": True})):
        with offloadz.offload(tiny("llama"), offloadz.AdamW(lr=1e-3), swap=swap, **where, **more) as run:
            run.load(tmp_path / "checkpoint")
            outcomes.append(train(run, STEPS[2:]))
            model = run.model
            run.close(materialize=True)
            assert_same_weights(start_of(model), outcomes[-1].weights)
    assert_same_bits(outcomes[1], outcomes[0])


def test_longer_rows_than_planned_get_larger_slots(swap: Path) -> None:
    steps = [batches(1, length=n)[0] for n in (12, 24, 18)]
    outcomes = []
    for more in ({}, {"device": Rehearsal(), "poison": True}):
        how = {"micro_batch_size": 2, "max_length": 12, **DISK, **more}
        with offloadz.offload(tiny("llama"), offloadz.AdamW(lr=1e-3), swap=swap, **how) as run:
            outcomes.append(train(run, steps))
    assert_same_bits(outcomes[1], outcomes[0])


def test_an_error_in_a_block_ends_the_step_and_not_the_run(swap: Path) -> None:
    """Lanes that wait are released; the next step is as if nothing had been."""
    how = {"device": Rehearsal(), "recompute": "all", **DISK}
    with offloadz.offload(tiny("llama"), offloadz.AdamW(lr=1e-3), swap=swap, **how) as run:
        first = run.step(STEPS[0])
        seat = next(s for s in run.seats if getattr(s, "kind", "") == "block")
        forward, calls = seat.body.forward, []

        def broken(*args: Any, **kwargs: Any) -> Any:
            calls.append(threading.get_ident())
            if len(calls) == 2:  # the recomputation, on the thread that goes backward
                raise ArithmeticError("made up")
            return forward(*args, **kwargs)

        seat.body.forward = seat.unfolding = broken
        with pytest.raises(ArithmeticError, match="made up"):
            run.step(STEPS[1])
        seat.body.forward = seat.unfolding = forward
        assert calls[1] != calls[0] == threading.get_ident()
        second = run.step(STEPS[1])
    assert [float(first), float(second)] == ran("llama", micro_batch_size=0, **HOST).losses[:2]


def test_another_thread_is_refused_even_while_a_backward_is_under_way() -> None:
    with offloadz.offload(tiny("llama"), offloadz.AdamW(lr=1e-3), device=Rehearsal(), **HOST) as run:
        found: list[str] = []

        def elsewhere() -> None:
            try:
                with torch.no_grad():
                    run.model(**STEPS[0])
            except RuntimeError as error:
                found.append(str(error))

        seat = next(s for s in run.seats if getattr(s, "kind", "") == "block")
        backward = seat.backward

        def watched(*args: Any) -> Any:
            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join()
            return backward(*args)

        seat.backward = watched
        run.step(STEPS[0])
        assert found and "another thread" in found[0]


COMPUTED_FROM = ("compute", "device", "live")


@pytest.mark.parametrize("placement", PLACEMENTS[::7], ids=["-".join(p) for p in PLACEMENTS[::7]])
def test_blocks_compute_from_memory_of_the_device_alone(placement: tuple[str, ...], swap: Path) -> None:
    """Only a table at home, and the norm, are read by the host."""
    where = dict(zip(KINDS, placement, strict=True))
    with offloadz.offload(tiny("gpt2"), swap=swap, device=Rehearsal(), micro_batch_size=2, **where) as run:
        run.step(STEPS[0])
        walk = run.session.walk
        assert walk is not None
        for op in walk.program.ops:
            if op.lane == "device" and op.unit >= 0:
                tiers = {p.partition("#")[0].partition(".")[0] if "#" in p else p.split("@")[1] for p in op.reads}
                assert tiers <= set(COMPUTED_FROM), op.text()


LATE_S = 0.02
EDGES = [
    ("fetch.w", "forward"), ("zero.g", "backward"), ("fetch.x", "backward"),
    ("backward", "drain.g"), ("backward", "fetch.w"), ("forward", "fetch.w"), ("drain.g", "zero.g"),
    ("drain.g", "backward"),
    ("load.w", "fetch.w"), ("fetch.w", "load.w"), ("save.x", "store.x"), ("drain.g", "store.g"),
]  # fmt: skip


@pytest.mark.parametrize("edge", EDGES, ids=["-".join(e) for e in EDGES])
def test_a_missing_edge_is_found(edge: tuple[str, str], swap: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one kind of edge taken out of every program, and what it waited for late, a run ends otherwise or not."""
    removed = 0

    def without(*args: Any) -> Program:
        nonlocal removed
        program = compiled(*args)
        ops = []
        for op in program.ops:
            after = tuple(a for a in op.after if (program.ops[a].verb, op.verb) != edge)
            removed += len(op.after) - len(after)
            ops.append(op._replace(after=after))
        return Program(tuple(ops), program.slots)

    def late(room: Any, lane: int, name: str, seed: int) -> Any:
        before = delays(room, lane, name, seed)
        return lambda op: (time.sleep(LATE_S if op.verb == edge[0] else 0.0), before(op))

    computed = LATE_S if edge[0] in ("forward", "backward") else 0.0
    monkeypatch.setattr(pace, "compiled", without)
    monkeypatch.setattr(sessions, "delays", late)
    monkeypatch.setattr(rehearsal, "jitter", lambda most_s, seed: lambda: time.sleep(computed))
    same = True
    for seed in range(3):
        try:
            how = {"poison": True, "seed": seed, "slots": 2, "recompute": "all", **DISK}
            found = ran("llama", swap, device=Rehearsal(), **how)
            assert_same_bits(found, calm("llama", 2))
        except Exception:  # whatever it is that a run stumbles over then
            same = False
            break
    assert removed and not same


@pytest.mark.parametrize("where", [HOST, DISK, dict.fromkeys(KINDS, "device")], ids=["host", "disk", "device"])
@pytest.mark.parametrize("most", [1e9, 0.3], ids=["never clipped", "always clipped"])
def test_updates_beside_what_is_valid(where: dict[str, str], most: float, swap: Path) -> None:
    """`commit = "shadow"` with a frozen matrix in a trained block, whose spare has to hold it too."""
    outcomes = []
    for more in ({}, {"device": Rehearsal(), "poison": True}):
        how = {"micro_batch_size": 2, "commit": "shadow", "max_grad_norm": most, "freeze": ["*up_proj*"], **where}
        how |= {"copies": 2} if where is DISK else {}
        with offloadz.offload(tiny("llama"), offloadz.AdamW(lr=1e-3), swap=swap, **how, **more) as run:
            outcomes.append(train(run, STEPS))
    assert_same_bits(outcomes[1], outcomes[0])


def test_a_run_of_a_configuration_on_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`offload.device` of a configuration reaches the plan, the run and the metrics; interrupted and gone on from."""
    finals = []
    for name in ("one memory", "a device"):
        told = tables(
            tmp_path,
            train__output=str(tmp_path / name),
            train__steps=6,
            model__dtype="float32",
            optimizer__schedule="constant",
        )
        if name == "a device":
            monkeypatch.setattr(planning, "facts_named", lambda told: Rehearsal().facts)
            monkeypatch.setattr(offloads, "device_named", lambda told: Rehearsal())
            assert train_of(config_from_tables({**told, "train": {**told["train"], "steps": 4}}, training=True)) == 0
            told["train"]["resume_with"] = ["train.steps"]
        assert train_of(config_from_tables(told, training=True)) == 0
        finals.append(load_file(tmp_path / name / "final" / "model.safetensors"))
    assert_same_weights(finals[1], finals[0])
    plan = json.loads((tmp_path / "a device" / "plan.json").read_text())
    assert plan["device"] == "rehearsal" and plan["peak"]["device"] > 0
    line = json.loads((tmp_path / "a device" / "metrics.jsonl").read_text().splitlines()[-1])
    assert line["bytes"]["device_peak"] > 0 and line["busy_s"]["h2d"] > 0


def test_a_device_that_is_not_there_is_refused() -> None:
    nothing = "torch finds no accelerator here; needed: auto or cpu$"
    for told, words in (("cuda:0", nothing), ("nonesuch:0", "torch finds"), (3, "needed:")):
        with pytest.raises(offloadz.plan.errors.ConfigError, match=words):
            offloadz.offload(tiny("llama"), device=told)  # type: ignore[arg-type]
    model = tiny("llama")
    with offloadz.offload(model, device=Rehearsal()) as run:
        plan = run.plan
    with pytest.raises(offloadz.plan.errors.ConfigError, match="device cpu beside a plan for rehearsal"):
        offloadz.offload(tiny("llama"), plan=plan, device="cpu", slots=plan.slots, sweeps=plan.sweeps)


def test_the_benchmark_of_a_gpu_runs() -> None:
    """`benchmarks/gpu.py` from end to end on a rehearsed device: what it says of right and wrong must hold there."""
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--json", "--device", "rehearsal"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0, done.stderr
    ratios = json.loads(done.stdout)["ratios"]
    assert ratios["fp32_norm_off"] <= 1e-5 and ratios["bf16_loss_off"] <= 5e-3 and ratios["poison_equal"] == 1
    assert ratios["tokens_vs_predicted_tiny"] > 0
