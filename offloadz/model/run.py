"""A run: the one object and the few verbs with which a model is trained.

`step` is one optimizer step.  `backward` and `update` are its halves for a loop of one's own.  Whatever looks at
weights (`save`, `export`, an evaluation) settles first, so there is no state a user can be in twice.  A step returns
when its result is decided; its updates run under the next step's forward, with the settings they had when it was
decided.
"""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from offloadz.model.arrivals import Arrivals
from offloadz.model.blocks import BlockSeat
from offloadz.model.head import HeadSeat, LossHead
from offloadz.model.materialize import move_buffers, put_back
from offloadz.model.optimizer import RunOptimizer
from offloadz.model.packed import require_apart
from offloadz.model.stage import Stage
from offloadz.model.sweeps import swept, with_positions
from offloadz.model.tables import TableSeat
from offloadz.model.together import end_alike
from offloadz.plan.errors import ConfigError
from offloadz.plan.ops import LANES, Op
from offloadz.runtime.meter import process_bytes
from offloadz.runtime.ranks import Solo
from offloadz.runtime.session import Session

Batch = Mapping[str, Any]
SeatLike = BlockSeat | TableSeat | HeadSeat


@dataclass
class StepReport:
    """What a step did: the line of a log.

    Times in seconds, between this decision and the one before (or the last `flush`); of `bytes`, `disk_read` and
    `disk_written` too.  `device_peak`, `host_peak` and `locked` are of the process so far.
    """

    step: int
    loss: float = float("nan")
    grad_norm: float = 0.0
    clipped: bool = False
    skipped: bool = False
    reason: str = ""
    lr: float = 0.0
    tokens: int = 0
    target_tokens: int = 0
    step_s: float = 0.0
    busy_s: dict[str, float] = field(default_factory=dict)
    wait_s: float = 0.0
    """What the computation waited for other lanes: at its ops, and at the step's end until all have come to rest."""
    bottleneck: str = ""
    """The lane that was busy longest."""
    bytes: dict[str, int] = field(default_factory=dict)


@dataclass
class Run:
    """A model under way.  Made by `offloadz.offload`; a context manager that closes itself."""

    model: nn.Module
    stage: Stage
    session: Session
    seats: list[SeatLike]
    optimizer: RunOptimizer
    loss_head: LossHead | None
    plan: Any
    sweeps: int = 1
    max_grad_norm: float = 1.0
    threads: int = 1
    report: StepReport = field(default_factory=lambda: StepReport(0))
    progress: Callable[[], Mapping[str, Any]] = dict
    """Asked when a step is decided, where it ends with a flip: what its caller wants back at a resume behind it."""
    before_flip: Callable[[], None] = lambda: None
    """Called on a lane before a flip: what must be on the drive by then."""
    _began_s: float = 0.0
    _before: dict[str, float] = field(default_factory=dict)
    _closed: bool = False

    def __post_init__(self) -> None:
        self._mark()
        self._arrivals = Arrivals(self.stage, self.optimizer, bool(self.plan.seldom_s))
        self.session.arrive = self._arrivals.take
        self.session.room.threads = self.threads

    def step(self, batch: Batch, loss_fn: Callable[[nn.Module, Batch], Tensor] | None = None) -> Tensor:
        """One optimizer step on a batch; returns the loss (float64, no dimensions).

        `batch`: tensors with rows first, as for a transformers model, with `labels` (-100: no target).  The loss is the
        mean negative log-probability over all targets of the batch.  `loss_fn(model, batch)` replaces it; it must
        return a scalar tensor.  Raises before anything is updated; weights are then as before the step.
        """
        if self.stage.stepping and self.session.owner is None:
            raise RuntimeError("run.step after run.backward would lose those gradients; call run.update() first")
        with self._working():
            require_apart(self.stage, self.loss_head.base if self.loss_head else self.model, batch)
            self.session.begin_step()
            self._give_up_rows()
            self._open_step()
            loss = self._by_tokens(batch) if loss_fn is None else self._by_function(batch, loss_fn)
            self.report.loss = loss
            self._decide()
        self.session.prime()
        return torch.tensor(loss, dtype=torch.float64)

    def backward(self, loss: Tensor) -> None:
        """One of several backward passes before an `update`; gradients add up in fp32."""
        if loss.numel() != 1:
            raise ConfigError(f"run.backward: a loss of shape {tuple(loss.shape)}; needed: one element")
        with self._working():
            self._allow_sums()
            self.session.expect_more()
            self._open_step()
            self.report.loss += self._mean_over_ranks(loss)

    def update(self) -> None:
        """Clip and update with the gradients of the backward passes since the last update."""
        if not self.stage.stepping:
            raise RuntimeError(
                "run.update() without a backward pass before it; call run.backward(loss), or run.step(batch)"
            )
        with self._working():
            self._decide()
        self.session.prime()

    @contextmanager
    def _working(self) -> Iterator[None]:
        """One verb at a time, on one thread.  What fails before the step is decided leaves everything as it was."""
        self._check_open()
        if self.session.owner is not None:
            raise RuntimeError("a step of this run is under way, on this or another thread; let it end first")
        self.session.owner = threading.get_ident()
        try:
            yield
        except BaseException as error:
            self._give_up(error)
            raise
        finally:
            self.session.owner = None

    def _by_tokens(self, batch: Batch) -> float:
        if self.loss_head is None:
            raise ConfigError(
                f"{type(self.model).__name__} has no output layer over a base model; use step(batch, loss_fn=...)"
            )
        if "labels" not in batch:
            raise ConfigError(
                f"the batch has {', '.join(batch)} and no labels; add them (-100: none) or use step(batch, loss_fn=...)"
            )
        labels = batch["labels"]
        if labels.dim() != 2:
            raise ConfigError(f"labels have shape {tuple(labels.shape)}; needed: (rows, length)")
        tokens = int(batch["attention_mask"].sum()) if "attention_mask" in batch else labels.numel()
        told = self.ranks.totals(tokens, int((labels[:, 1:] != -100).sum()))
        self.report.tokens, num_targets = map(int, told)
        self.report.target_tokens = num_targets
        if num_targets == 0:
            self.report.skipped, self.report.reason = True, "no target tokens"
            return float("nan")
        kept: list[Tensor] = []
        sweeps = self._sweeps(dict(batch))
        for index, part in enumerate(sweeps):
            self.session.rounds = index == len(sweeps) - 1
            logp = self.loss_head.token_logprobs(part)
            kept.append(logp.detach())
            self.session.descend(logp, torch.full_like(logp, -1.0 / num_targets))
        losses = [value for logp in kept for value in logp.double().reshape(-1).tolist()]
        return -self.ranks.totals(math.fsum(losses))[0] / num_targets

    def _sweeps(self, batch: dict[str, Any]) -> list[dict[str, Any]]:
        """The batch cut by rows into passes of whole micro-batches."""
        if sum(isinstance(s, TableSeat) for s in self.seats) > 1:
            batch = with_positions(batch)
        self.stage.tell_larger(*batch["labels"].shape)
        found = swept(batch, self.stage.ranges(len(batch["labels"])), self.sweeps, self.ranks)
        if len(found) > 1:
            self._allow_sums()
        return found

    def _by_function(self, batch: Batch, loss_fn: Callable[[nn.Module, Batch], Tensor]) -> float:
        if self.sweeps > 1:
            raise ConfigError(
                f"loss_fn with sweeps = {self.sweeps}: a caller's loss is not known to be a sum over rows; set"
                " offload.sweeps = 1"
            )
        self.session.rounds = True
        loss = loss_fn(self.model, self.stage.device.bring(dict(batch)))
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise ConfigError(f"loss_fn returned {type(loss).__name__}; needed: a tensor with one element")
        return self._mean_over_ranks(loss)

    def _mean_over_ranks(self, loss: Tensor) -> float:
        """Backward of a caller's loss, of which nobody knows what it is a mean over: of the ranks' mean, its value."""
        self.session.descend(loss / self.ranks.size)
        # Behind it: reading it earlier would wait for the forward.
        return self.ranks.totals(float(loss.detach()))[0] / self.ranks.size

    def _open_step(self) -> None:
        """The report of a step begins with its first backward pass."""
        if not self.stage.stepping:
            self.stage.stepping = True
            self.session.step += 1
            self.report = StepReport(self.session.step, loss=0.0)

    def _decide(self) -> None:
        """Norm, clipping, and the decision whether this step is applied."""
        if not self.report.skipped:
            squares = self.session.finish(self._scatter)
            self.stage.touched.update(*self.ranks.each(sorted(self.stage.touched)))
            self._judge(math.sqrt(squares) if squares >= 0 and math.isfinite(squares) else float("nan"))
        self._note_times()
        self.optimizer.in_update = True
        try:
            self.optimizer.step()
        finally:
            self.optimizer.in_update = False
        self._give_up_rows()

    def _judge(self, norm: float) -> None:
        report = self.report
        report.grad_norm = norm
        if not math.isfinite(norm):
            report.skipped, report.reason = True, "a gradient is not finite"
        elif not math.isfinite(report.loss):
            report.skipped, report.reason = True, "the loss is not finite"
        report.clipped = not report.skipped and 0 < self.max_grad_norm < norm
        if report.skipped:
            self._arrivals.require_whole(report.reason)

    def _take(self) -> None:
        """What `optimizer.step()` does: lay the updates ready, under settings that are now fixed."""
        session, report = self.session, self.report
        report.lr = float(self.optimizer.param_groups[0]["lr"])
        held = not (report.skipped or self._arrivals.applied)
        units = tuple(sorted(u for u in session.grads if session.spec.units[u].trainable)) if held else ()
        scale = min(1.0, self.max_grad_norm / (report.grad_norm + 1e-6)) if self.max_grad_norm > 0 and units else 1.0
        due = self.optimizer.numbers(session.steps, scale)
        due = {name: how for name, how in due.items() if name in self.stage.touched} if units else {}
        for name in due:
            session.steps[name] = session.steps.get(name, 0) + 1
        session.commit(units, due, self._arrivals.decide(due))
        self.stage.stepping = False

    def _scatter(self, seat: int, op: Op) -> None:
        table = self.seats[seat]
        if isinstance(table, TableSeat):
            table.scatter(op)

    @property
    def ranks(self) -> Solo:
        """The ranks that train this model together; those in one call what the others call."""
        return self.session.room.ranks

    def _allow_sums(self) -> None:
        if not self.session.placement.accumulate:
            self.session.allow_sums()

    def _give_up(self, error: BaseException) -> None:
        """Nothing of this step is applied; due updates of the step before are."""
        self._give_up_rows()
        self.stage.root = None
        self._arrivals.tear("an error came before its end")
        end_alike(self, error)
        self._arrivals.forget()
        if self.stage.stepping:
            self.stage.stepping = False
            self.session.step -= 1
        with suppress(Exception):  # the error under way is the one to see; this one comes again at the next call
            self.session.abandon()

    def _give_up_rows(self) -> None:
        self.stage.rows_due.clear()
        self.stage.touched.clear()

    def _note_times(self) -> None:
        report, before, began_s, disk = self.report, self._before, self._began_s, self.session.room.disk
        self._mark()
        since = {name: self._before[name] - before.get(name, 0.0) for name in self._before}
        memory = process_bytes()
        report.step_s, report.wait_s = self._began_s - began_s, since["wait"]
        report.busy_s = {lane: since.get(lane, 0.0) for lane in LANES}
        report.bottleneck = max(report.busy_s, key=lambda lane: report.busy_s[lane])
        report.bytes = {
            "device_peak": self.stage.device.peak_bytes(),
            **{f"host_{name}": memory[name] for name in ("peak", "resident")},
            "locked": memory["locked"],
            "disk_held": disk.held_bytes() if disk else 0,
            "disk_read": int(since["bytes_read"]),
            "disk_written": int(since["bytes_written"]),
        }

    def _mark(self) -> None:
        """Clocks and counters as they are now: what comes next is counted from here."""
        disk = self.session.room.disk
        for lane in self.session.lanes.values():
            lane.clock.catch_up()
        self._began_s = time.perf_counter()
        self._before = {name: lane.clock.busy_s for name, lane in self.session.lanes.items()} | {
            "wait": self.session.inline.clock.wait_s,
            "bytes_read": float(disk.bytes_read if disk else 0),
            "bytes_written": float(disk.bytes_written if disk else 0),
        }

    def flush(self) -> None:
        """Return when every update is done and home."""
        self._check_open()
        self.session.settle()
        self._mark()

    def save(self, path: str | Path, portable: bool = False) -> Path:
        """Write a checkpoint to the directory `path`; any placement can load it.

        Where the state is on disk in copies (`copies` of 3 and more) and `path` lies on the same file system, it is
        hard links, which take no time and stay valid.  Elsewhere, and with `portable`, it is safetensors in fp32.
        """
        from offloadz.model.state import cut_of, save_state

        self.flush()
        return save_state(Path(path), self, {"plan": cut_of(self)}, portable=portable)

    def load(self, path: str | Path) -> None:
        """Load a checkpoint made by `save` under any placement; the log says where its batches were cut otherwise."""
        from offloadz.model.state import load_state, tell_cut

        if self.stage.stepping:
            raise RuntimeError("run.load in a step, whose gradients are of other weights; end it by run.update() first")
        self.flush()
        tell_cut(Path(path), self, load_state(Path(path), self))

    def export(self, path: str | Path, dtype: str | None = None) -> Path:
        """Write a Hugging Face directory that loads with transformers as it is."""
        from offloadz.model.export import export

        self.flush()
        return export(self, path, dtype)

    def close(self, materialize: bool = False) -> None:
        """End the run; lanes, memory, files and locks are back.  `materialize`: leave the model with its weights."""
        if self._closed:
            return
        if self.session.owner is not None:
            raise RuntimeError("run.close() in the middle of a step; let it end, or raise an error to give it up")
        try:
            if materialize:
                self.flush()
                put_back(self.model, self.session, [place for seat in self.seats for place in seat.body.places])
        finally:
            self._closed = True
            for seat in self.seats:
                seat.body.stand_out()
            if self.loss_head is not None:
                self.loss_head.stand_out()
            self.stage.unwatch()
            RUNS.pop(id(self.model), None)
            self.stage.run = None
            move_buffers(self.model, torch.device("cpu"))
            self.session.close()

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("this run is closed; offload the model again")
        self._arrivals.require_whole()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def token_logprobs(model: nn.Module | Run, batch: Batch) -> Tensor:
    """(rows, length): at each label its log-probability given the tokens before it, 0 at -100 and at position 0.

    Differentiable, and logits never exist whole.  `model`: an offloaded model or its run.
    """
    run = model if isinstance(model, Run) else RUNS.get(id(model))
    if "labels" not in batch:
        raise ConfigError(f"token_logprobs: the batch has {', '.join(batch)}; needed: labels beside them")
    if run is None or run.loss_head is None:
        raise ConfigError("token_logprobs needs a model under offloadz.offload with an output layer")
    run._check_open()
    require_apart(run.stage, run.loss_head.base, batch)
    return run.loss_head.token_logprobs(dict(batch))


RUNS: weakref.WeakValueDictionary[int, Run] = weakref.WeakValueDictionary()
"""Open runs by the identity of their model, which keeps its run alive."""
