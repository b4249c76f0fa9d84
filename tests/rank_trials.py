"""What ranks do in the tests of odd models and of what goes wrong: more functions for `group.py` to call."""

from __future__ import annotations

import errno
import os
import signal
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from odd_models import Odd, mean_loss, odd_batches
from rank_jobs import command, dealt, leave, shards
from samples import samples
from tiny_models import batches, tiny, weights
from torch import Tensor

import offloadz
from offloadz.plan.errors import RankFailed


def windows(rank: int, folder: str, family: str, **how: Any) -> None:
    """Samples with 1 to 40 targets in micro-batches and sweeps."""
    out: dict[str, Any] = {"losses": [], "norms": []}
    with offloadz.offload(tiny(family), offloadz.AdamW(lr=1e-3), **how) as run:
        for batch in [samples()] * 3:
            out["losses"].append(float(run.step(dealt(batch, rank))))
            out["norms"].append(run.report.grad_norm)
        out["weights"] = weights(run)
    leave(folder, rank, out)


def skips(rank: int, folder: str, steps: int, **how: Any) -> None:
    """A layer that all ranks take on odd steps only, and looks at both forms in between."""
    model, out = Odd(), {"losses": [], "norms": []}
    model.skipped = (1,)
    with offloadz.offload(model, offloadz.AdamW(lr=1e-3), **how) as run:
        for index, batch in enumerate(odd_batches(steps)):
            out["losses"].append(float(run.step(dealt(batch, rank), loss_fn=mean_loss)))
            out["norms"].append(run.report.grad_norm)
            with torch.no_grad():
                for odd in (0, 1)[: index % 3]:
                    run.model(input_ids=batch["input_ids"], odd=torch.full((4,), odd))
        out["weights"], out["steps"] = weights(run), dict(run.session.steps)
    leave(folder, rank, out)


GROUPS = {"groups": [{"match": ["*layers.0*"], "lr": 3e-4, "weight_decay": 0.2}]}
OTHERS = {"groups": [{"match": ["*layers.0*"], "lr": 0.5, "weight_decay": 0.0}], "lr": 0.25}


def counts(rank: int, folder: str, saved: str = "", **how: Any) -> None:
    """Steps under groups and a schedule, a checkpoint, a step; or (with `saved`) that step from it, begun otherwise."""
    settings = {"lr": 1e-3, **(OTHERS if saved else GROUPS)}
    with offloadz.offload(tiny("qwen3", seed=5 if saved else 0), offloadz.AdamW(**settings), **how) as run:
        *before, last = batches(4)
        for batch in before[: 1 if saved else 3]:
            run.step(dealt(batch, rank))
        for group in run.optimizer.param_groups:
            group["lr"] *= 0.9
        run.load(saved) if saved else run.save(f"{folder}/saved")
        out: dict[str, Any] = {"begun": dict(run.session.steps), "loss": float(run.step(dealt(last, rank)))}
        out |= {"steps": dict(run.session.steps), "rates": [group["lr"] for group in run.optimizer.param_groups]}
        leave(folder, rank, out | shards(run))


class Choosy(torch.nn.Module):
    """A block with an expert of which rank 0 alone has rows."""

    def __init__(self) -> None:
        super().__init__()
        self.common, self.expert = torch.nn.Linear(48, 48), torch.nn.Linear(48, 48)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.common(x).tanh()
        return x + self.expert(x).tanh() if os.environ["RANK"] == "0" else x


class Experts(torch.nn.Module):
    """A model of such blocks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = torch.nn.ModuleList(Choosy() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def experts(rank: int, folder: str, **how: Any) -> None:
    """Steps of a model of which rank 1 meets a part only."""
    out: dict[str, Any] = {"losses": [], "norms": []}
    with offloadz.offload(Experts(), offloadz.AdamW(lr=1e-2), **how) as run:
        for step in range(3):
            x = torch.randn(3, 48, generator=torch.Generator().manual_seed(10 * step + rank))
            out["losses"].append(float(run.step({"x": x}, loss_fn=lambda model, batch: model(**batch).square().mean())))
            out["norms"].append(run.report.grad_norm)
        out["weights"], out["steps"] = weights(run), dict(run.session.steps)
    leave(folder, rank, out)


def crossing(rank: int, folder: str) -> None:
    """Both ways between ranks, and what the trial of one says that works, that is broken, that never ends."""
    from offloadz.runtime import ranks, ways

    group = ranks.join()
    assert isinstance(group, ranks.Group)
    own, plain = torch.randn(1000, generator=torch.Generator().manual_seed(rank)), group._ways
    hosted = ways.Ways(plain._host, rank, group.size)
    asked: list[int] = []
    hosted._group = lambda held: asked.append(held.numel())  # as for memory of a device that has no way of its own
    out: dict[str, Any] = {"tried": [plain.tried(plain._host, torch.device("cpu"))]}
    out["met"] = [group.meet(torch.device(name)) for name in ("cpu", f"meta:{rank}")]
    for name in ("meta:1", ("cpu", "meta:1")[rank]):
        try:
            group.meet(torch.device(name))
        except offloadz.ConfigError as error:
            out["met"].append(str(error))
    for name, way in (("plain", plain), ("hosted", hosted)):
        whole, swapped = torch.empty(1000 * group.size), torch.empty(1000)
        way.gather(whole, own)
        way.swap(swapped, own)
        out[name] = (whole, swapped)
    out["asked"] = asked
    swap, gather = dist.all_to_all_single, dist.all_gather_single

    def wrong(to: Tensor, given: Tensor, **more: Any) -> Any:
        return swap(to, given.flip(0) if rank == 0 else given, **more)

    class Never:
        def is_completed(self) -> bool:
            return False

    dist.all_to_all_single = wrong
    out["tried"].append(plain.tried(plain._host, torch.device("cpu")))
    dist.all_to_all_single, ways.TRIED_S = swap, 0.2
    dist.all_gather_single = lambda *args, **more: gather(*args, **more) and Never()
    out["tried"].append(plain.tried(plain._host, torch.device("cpu")))
    leave(folder, rank, out)


def unopened(rank: int, folder: str, **how: Any) -> None:
    """A checkpoint whose files the second rank cannot open, a step, and the checkpoint again."""
    from offloadz.model import together

    class Refused(together.StreamWriter):
        def __init__(self, *told: Any, joins: bool = False) -> None:
            if joins:
                raise OSError(errno.EMFILE, "too many open files")
            super().__init__(*told)

    first, second = batches(2)
    with offloadz.offload(tiny("llama"), offloadz.AdamW(lr=1e-3), **how) as run:
        run.step(dealt(first, rank))
        plain, together.StreamWriter = together.StreamWriter, Refused  # type: ignore[misc]
        try:
            run.save(f"{folder}/saved")
            told = "nothing was raised"
        except (OSError, RankFailed) as error:
            told = str(error)
        together.StreamWriter = plain  # type: ignore[misc]
        loss = float(run.step(dealt(second, rank)))
        run.save(f"{folder}/saved")
    leave(folder, rank, (told, loss))


def dies(rank: int, arguments: list[str], victim: int, point: str, flip: int) -> None:
    """The command line, in which a rank is killed at a point of a flip: `flushed`, what it wrote; `recorded`, as far as
    that is its part; `known`, to be recorded."""
    from offloadz.memory.copies import Copies
    from offloadz.memory.shadow import Shadow

    owner, name = {"flushed": (Shadow, "_flushed"), "recorded": (Shadow, "_recorded"), "known": (Copies, "flip")}[point]
    plain, calls = getattr(owner, name), Counter[str]()

    def counted(*args: Any) -> Any:
        calls[name] += 1
        out = None if point == "known" and calls[name] == flip else plain(*args)
        if rank == victim and calls[name] == flip:
            os.kill(os.getpid(), signal.SIGKILL)
        return out

    setattr(owner, name, counted)
    command(rank, arguments)
