"""What ranks do in the tests: functions that `group.py` calls in each of several processes."""

from __future__ import annotations

import importlib.util
import os
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tiny_models import VOCABULARY, batches, tiny, weights, whole_tensors
from torch import Tensor

import offloadz
from offloadz.plan.errors import RankFailed
from offloadz.runtime.rehearsal import Rehearsal


def dealt(batch: dict[str, Any], rank: int) -> dict[str, Any]:
    return {key: value[rank :: int(os.environ["WORLD_SIZE"])] for key, value in batch.items()}


def leave(folder: str, rank: int, out: Any) -> None:
    torch.save(out, Path(folder) / f"out-{rank}.pt")


def train(
    rank: int,
    folder: str,
    family: str = "llama",
    rows: int = 4,
    steps: int = 5,
    drop: tuple[int, ...] = (),
    changes: dict[str, Any] | None = None,
    rehearsed: bool = False,
    **how: Any,
) -> None:
    """Some steps, each rank with its rows; losses, norms, weights and moments of its shards are left behind.

    `drop`: ranks whose rows have no targets.  `rehearsed`: on a device with memory of its own, each.
    """
    how |= {"device": Rehearsal()} if rehearsed else {}
    out: dict[str, Any] = {"losses": [], "norms": [], "targets": []}
    sent = _counted()
    with offloadz.offload(tiny(family, **(changes or {})), offloadz.AdamW(lr=1e-3), **how) as run:
        for batch in batches(steps, rows):
            batch["labels"] = batch["labels"].clone()
            for empty in drop:
                batch["labels"][empty :: int(os.environ["WORLD_SIZE"])] = -100
            out["losses"].append(float(run.step(dealt(batch, rank))))
            out["norms"].append(run.report.grad_norm)
            out["targets"].append(run.report.target_tokens)
        run.flush()
        out["sent"] = dict(sent)
        out["weights"] = weights(run)
        out["bytes"] = _held(run)
        out["units"] = [(u.num_elements, len(u.sections)) for u in run.session.spec.units]
        out["threads"] = run.threads
    leave(folder, rank, out)


def _held(run: Any) -> dict[str, dict[str, int]]:
    """Bytes at rest per kind, from the pool and from the lengths of files' extents."""
    room = run.session.room
    homes = {kind: sum(held.numel() for (k, _), held in room.homes.items() if k == kind) for kind in "wsg"}
    extents = {kind: sum(e.nbytes for place, e in room.extents.items() if place[0] == kind) for kind in "wsg"}
    return {"host": homes, "disk": extents}


def _counted() -> Counter[str]:
    """Elements of float tensors that each collective brings to this rank from others, counted where torch is called."""
    found: Counter[str] = Counter()
    ranks = int(os.environ["WORLD_SIZE"])

    def counting(name: str, plain: Any, times: int) -> Any:
        def call(out: Tensor, *args: Any, **kwargs: Any) -> Any:
            if out.dtype in (torch.float32, torch.bfloat16):
                found[name] += times * out.numel() * (ranks - 1) // ranks
            return plain(out, *args, **kwargs)

        return call

    for name, times in (("all_gather_single", 1), ("all_to_all_single", 1), ("all_reduce", 2)):
        setattr(dist, name, counting(name, getattr(dist, name), times))
    return found


def shards(run: Any) -> dict[str, dict[str, Tensor]]:
    """Everything a resume must give back, as far as it is this rank's."""
    kinds = {"weight": whole_tensors(run), "low": whole_tensors(run, "low")}
    return kinds | {kind: whole_tensors(run, kind) for kind in ("exp_avg", "exp_avg_sq")}


def save(rank: int, folder: str, more: bool = False, **how: Any) -> None:
    """Some steps, then a checkpoint (and, with `more`, another step and one) and an export."""
    with offloadz.offload(tiny("qwen3"), offloadz.AdamW(lr=1e-3), **how) as run:
        for batch in batches(3):
            run.step(dealt(batch, rank))
        run.save(Path(folder) / "saved")
        if more:
            run.step(dealt(batches(1, seed=3)[0], rank))
            run.save(Path(folder) / "later")
        run.export(Path(folder) / "exported")
        leave(folder, rank, shards(run))


def load(rank: int, folder: str, saved: str, **how: Any) -> None:
    """A checkpoint put back, looked at, exported, and trained on from."""
    with offloadz.offload(tiny("qwen3", seed=5), offloadz.AdamW(lr=1e-3), **how) as run:
        run.load(saved)
        out: dict[str, Any] = shards(run)
        run.export(Path(folder) / "exported")
        out["loss"] = float(run.step(dealt(batches(1, seed=9)[0], rank)))
        leave(folder, rank, out)


def whole(rank: int, folder: str, **how: Any) -> None:
    """Some steps, then the optimizer's state in torch's form, put back and taken again, and the module with weights."""
    run = offloadz.offload(tiny("qwen3"), offloadz.AdamW(lr=1e-3), **how)
    for batch in batches(3):
        run.step(dealt(batch, rank))
    held, told = shards(run), run.optimizer.state_dict()
    for state in told["state"].values():
        state["exp_avg"] = -state["exp_avg"]
    run.optimizer.load_state_dict(told)
    again, names = run.optimizer.state_dict(), [name for g in told["param_groups"] for name in g["param_names"]]
    run.close(materialize=True)
    leave(folder, rank, {
        **held, "told": {name: told["state"][i] for i, name in enumerate(names)},
        "again": {name: again["state"][i] for i, name in enumerate(names)},
        "module": {name: param.detach() for name, param in run.model.named_parameters()},
    })  # fmt: skip


def overflow(rank: int, folder: str, **how: Any) -> None:
    """A gradient that is not finite on the last rank alone, in the second of three steps."""
    out = []
    with offloadz.offload(tiny("llama"), offloadz.AdamW(lr=1e-3), **how) as run:
        last = rank == run.ranks.size - 1
        for step, batch in enumerate(batches(3)):
            before = weights(run)
            spoil = float("inf") if last and step == 1 else 1.0

            def loss(model: Any, batch: Any, spoil: float = spoil) -> Tensor:
                return model(**batch, use_cache=False).loss * spoil

            run.step(dealt(batch, rank), loss_fn=loss)
            run.flush()
            after = weights(run)
            same = all(torch.equal(before[name].nan_to_num(), after[name].nan_to_num()) for name in before)
            out.append((run.report.skipped, same))
    leave(folder, rank, out)


def stumbles(rank: int, folder: str, bad: tuple[int, ...], **how: Any) -> None:
    """Three steps; before the second one with a label that is no word on the ranks `bad`, and one whose loss fails."""
    out: dict[str, Any] = {"told": [], "losses": [], "same": []}

    def fails(model: Any, batch: Any) -> Tensor:
        model(batch["input_ids"], use_cache=False)
        raise KeyError("a loss of one's own")

    with offloadz.offload(tiny("llama"), offloadz.AdamW(lr=1e-3), **how) as run:
        for step, batch in enumerate(batches(3)):
            if step == 1:
                before = weights(run)
                wrong = {**batch, "labels": batch["labels"].clone()}
                for q in bad:
                    wrong["labels"][q, 5] = VOCABULARY + 7
                for loss_fn in (None, fails):
                    try:
                        run.step(dealt(wrong, rank), loss_fn=loss_fn)
                    except (offloadz.ConfigError, KeyError, RankFailed) as error:
                        out["told"].append(f"{type(error).__name__}: {error}")
                    if len(bad) < run.ranks.size:
                        leave(folder, rank, out)
                        return
                out["same"] = [torch.equal(before[n].nan_to_num(), v.nan_to_num()) for n, v in weights(run).items()]
            out["losses"].append(float(run.step(dealt(batch, rank))))
    leave(folder, rank, out)


def looks(rank: int, folder: str, **how: Any) -> None:
    """Evaluations and generated tokens between steps: what they leave of the losses."""
    with offloadz.offload(tiny("llama"), offloadz.AdamW(lr=1e-3), **how) as run:
        losses, ids = [], []
        for batch in batches(3):
            losses.append(float(run.step(dealt(batch, rank))))
            with torch.no_grad():
                losses.append(float(run.model(**dealt(batch, rank)).logits.double().sum()) * 0)
                asked = torch.arange(6).view(1, 6) % VOCABULARY
                ids.append(run.model.generate(asked, max_new_tokens=3, do_sample=False).tolist())
    leave(folder, rank, (losses, ids))


def differ(rank: int, folder: str, **how: Any) -> None:
    """Rank 1 calls the model once more than the others: all are told and end."""
    with offloadz.offload(tiny("llama"), offloadz.AdamW(lr=1e-3), **how) as run:
        batch = batches(1)[0]
        run.step(dealt(batch, rank))
        try:
            with torch.no_grad():
                if rank == 1:
                    run.model(**dealt(batch, rank))
            run.step(dealt(batch, rank))
            told = "nothing was raised"
        except RankFailed as error:
            told = str(error)
    leave(folder, rank, told)


def leaves(rank: int, folder: str) -> None:
    """A group that is met and left; the threads there are afterwards."""
    from offloadz.runtime import ranks

    assert ranks.join().most(rank) == 1
    ranks._leave()
    leave(folder, rank, [(path / "comm").read_text().strip() for path in Path("/proc/self/task").iterdir()])


def cut(rank: int, folder: str, path: str) -> None:
    """Models that are cut over ranks already: one by its layers with torch, one by transformers' plan as it is read."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
    from transformers import AutoModelForCausalLM

    dist.init_process_group("gloo")
    mesh, model, told = init_device_mesh("cpu", (2,)), tiny("llama"), []
    parallelize_module(model.model.layers[1].mlp.up_proj, mesh, ColwiseParallel())
    models = [model]
    if importlib.util.find_spec("accelerate"):  # without which transformers follows no plan
        models.append(AutoModelForCausalLM.from_pretrained(path, tp_plan="auto", tp_size=2))
    for one in models:
        try:
            offloadz.offload(one)
        except offloadz.ConfigError as error:
            told.append(str(error))
    leave(folder, rank, told)


def command(rank: int, arguments: list[str]) -> None:
    """The command line."""
    from offloadz.cli import main

    main(arguments)
