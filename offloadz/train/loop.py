"""`offloadz train`: from a configuration to a finished model directory, over kills, signals and resumes.

Written on the Python API alone (`load`, `offload`, `run.step`, `run.flush`, `token_logprobs`, `run.export`, and the
state of a run in `checkpoint.py`), so whatever it does a loop of one's own can do.  The order of things: data, then the
checkpoint to go on from, then the plan, and only then weights; so what is wrong is said while nothing has been started.

[Note: a point between steps] Everything that is not a step happens between two: evaluate, save, stop.  What has been
done at a point is written in the checkpoint (`step`, `evaluated_step`), so a run that was stopped or killed goes on in
the same order.  The trade-off: a signal waits for the end of a step, which for a large model takes minutes.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import random
import time
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
import torch
from rich.console import Console

import offloadz
from offloadz.config import config_differences, config_from_tables, parse_every
from offloadz.memory.host import give_back
from offloadz.model.aside import remove_directory, write_text
from offloadz.model.manifest import read_manifest, verify
from offloadz.plan.errors import ConfigError
from offloadz.plan.search import Plan, human
from offloadz.runtime.meter import process_bytes
from offloadz.train.checkpoint import load_checkpoint, newest_valid, save_checkpoint
from offloadz.train.data import Loader
from offloadz.train.metrics import Metrics
from offloadz.train.planning import Task, decided, optimizer_of, plan_lines, read_task, task_lines
from offloadz.train.progress import Display
from offloadz.train.schedule import schedule_of, scheduler_of
from offloadz.train.signals import Interrupted, Signals

if TYPE_CHECKING:
    from offloadz.config import Config
    from offloadz.model.run import Run, StepReport

FINISHED = "finished.json"
MEMORY_SLACK = 1.2
"""How far over the plan's limit memory that no file backs may be before a run ends itself: the kernel would not ask."""


class RunStopped(RuntimeError):
    """A run ended itself: too many skipped updates, or too much memory; the message says what to change."""


@dataclass
class Progress:
    """Where a run is; what a checkpoint's `extra` holds besides the states of loader and scheduler."""

    step: int = 0
    evaluated_step: int = 0
    num_skipped: int = 0
    skipped_in_row: int = 0


def train(config: Config) -> int:
    """Train as configured; 0 when the run is finished, 130 or 143 after a signal.  Raises the errors of `plan/errors`."""
    console = Console(highlight=False, soft_wrap=True)
    with Signals() as signals, ExitStack() as stack:
        try:
            return _train(config, console, signals, stack)
        except Interrupted as interrupted:
            return interrupted.status


def _train(config: Config, console: Console, signals: Signals, stack: ExitStack) -> int:
    say = lambda text: console.print(text, markup=False)  # noqa: E731
    output = Path(config.train.output)
    task = read_task(config)
    give_back()
    for line in task_lines(task):
        say(f"data: {line}")
    stack.enter_context(_alone(output))
    start = _start(config, output, say)
    if start is not None and _is_finished(output, start, task.num_steps):
        say(f"this run is finished: {task.num_steps} steps, {output / 'final'}; to train on, raise train.steps or "
            "train.epochs and name it in train.resume_with")  # fmt: skip
        return 0
    plan = decided(config)
    for line in plan_lines(plan, config):
        say(f"plan: {line}")
    write_text(output / "config.toml", config.to_toml())
    write_text(output / "plan.json", json.dumps(plan.to_json(), indent=1) + "\n")
    run = stack.enter_context(_offloaded(config, plan))
    training = Training(config, run, task, plan, signals, start, console)
    stack.callback(training.close)
    return training.go()


def _offloaded(config: Config, plan: Plan) -> Run:
    """The model under its plan, with its weights where they belong."""
    model, offload = config.model, config.offload
    module = offloadz.load(
        model.path, dtype=getattr(torch, model.dtype), init=model.init, seed=config.train.seed,
        attention=model.attention, trust_remote_code=model.trust_remote_code,
    )  # fmt: skip
    module.train()
    return offloadz.offload(
        module, optimizer=optimizer_of(config), plan=plan, swap=list(offload.swap), slots=plan.slots,
        sweeps=plan.sweeps, micro_batch_size=plan.micro_batch_size, batch_size=config.train.batch_size,
        max_length=config.data.max_length, max_grad_norm=config.optimizer.max_grad_norm, dtype=model.dtype,
        keep_float32=model.keep_float32, freeze=model.freeze, threads=offload.threads, seed=config.train.seed,
        checksum=offload.checksum, poison=config.debug.poison, output=config.train.output,
    )  # fmt: skip


class Training:
    """A run under way with all that goes along: samples, schedule, metrics, checkpoints."""

    def __init__(
        self, config: Config, run: Run, task: Task, plan: Plan, signals: Signals, start: Path | None, console: Console
    ) -> None:
        self.config, self.run, self.task, self.plan, self.signals = config, run, task, plan, signals
        self.output = Path(config.train.output)
        self.loader = Loader(task.samples, config.train.batch_size, config.train.seed, config.data.shuffle)
        self.schedule = schedule_of(config.optimizer, task.num_steps)
        self.scheduler = scheduler_of(run.optimizer, self.schedule)
        self.progress = Progress()
        _seed(config.train.seed)
        if start is not None:
            self._resume(start)
        self.every = parse_every(config.train.save_every)
        self.saved_step, self.saved_at_s = self.progress.step, time.monotonic()
        self.metrics = Metrics(self.output, self.progress.step, self.progress.evaluated_step)
        self.display = Display(console, self.progress.step, task.num_steps, config.train.log_every)
        self.due_line: dict[str, Any] | None = None
        """The line of the newest step, whose updates are still under way."""
        if start is not None:
            self.display.say(f"resume: {start}, step {self.progress.step} of {task.num_steps}")

    def go(self) -> int:
        """All steps that are left, then the export."""
        with self.signals.held():
            self.run.flush()
            while True:
                self._between_steps()
                if self.signals.status or self.progress.step >= self.task.num_steps:
                    break
                self._step()
        if self.signals.status:
            self.display.say(f"stopped at step {self.progress.step} of {self.task.num_steps}; the same command goes on")
            return self.signals.status
        return self._finish()

    def close(self) -> None:
        self.display.close()
        self.metrics.close()

    # ---- steps -------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        batch = self.loader.next_batch()
        self.run.step(batch)
        self._write_due()  # the updates of the step before are done when this one is decided
        report, progress = self.run.report, self.progress
        progress.step += 1
        self.due_line = self._line(report)
        self.display.step(self.due_line)
        if report.skipped:
            progress.num_skipped, progress.skipped_in_row = progress.num_skipped + 1, progress.skipped_in_row + 1
            self._check_skipped(report)
        else:
            progress.skipped_in_row = 0
            self.scheduler.step()
        self._check_memory()

    def _line(self, report: StepReport) -> dict[str, Any]:
        """The line of metrics.jsonl, keys as in the contract."""
        line = asdict(report)
        line["tokens_per_s"] = report.tokens / report.step_s if report.step_s > 0 else 0.0
        line["predicted_step_s"] = self.plan.step_s
        if not report.skipped:
            del line["reason"]
        if self.config.debug.samples:
            line["samples"] = list(self.loader.last_ids)
        return line

    def _write_due(self) -> None:
        if self.due_line is not None:
            self.metrics.write(self.due_line)
            self.due_line = None

    def _check_skipped(self, report: StepReport) -> None:
        row, most = self.progress.skipped_in_row, self.config.train.max_skipped
        if row > most:
            self._settle()
            raise RunStopped(
                f"{row} updates in a row were skipped, the last because {report.reason} (step {report.step}, loss "
                f"{report.loss}); train.max_skipped allows {most}. Lower optimizer.lr, look at the samples of these steps "
                f"(debug.samples = true), or raise train.max_skipped; checkpoints in {self.output / 'checkpoints'} are as before"
            )

    def _check_memory(self) -> None:
        """End with a message before the kernel ends the process without one."""
        limit, held = self.plan.limits.get("host"), process_bytes()["anonymous"]
        if limit is not None and held > MEMORY_SLACK * limit:
            self._settle()
            raise RunStopped(
                f"the process holds {human(held)} of memory, {human(limit)} were to be used ({self.plan.limit_source}); the "
                "plan was wrong for this model: lower train.micro_batch_size or data.max_length, or raise offload.host_memory"
            )

    # ---- between steps -----------------------------------------------------------------------------------------

    def _between_steps(self) -> None:
        progress, last = self.progress, self.progress.step >= self.task.num_steps
        if self.task.evaluation is not None and progress.step > progress.evaluated_step and self._evaluates(last):
            self._evaluate()
        if progress.step > self.saved_step and (last or self.signals.status or self._save_is_due()):
            self._save()

    def _evaluates(self, last: bool) -> bool:
        every = self.config.train.eval_every
        return last or (every > 0 and self.progress.step % every == 0)

    def _save_is_due(self) -> bool:
        steps, wait_s = self.every
        if steps:
            return self.progress.step % steps == 0
        return wait_s > 0 and time.monotonic() - self.saved_at_s >= wait_s

    def _settle(self) -> None:
        """All updates done and home, and the line of the newest step written."""
        self.run.flush()
        self._write_due()

    def _evaluate(self) -> None:
        """Mean loss over the target tokens of the evaluation samples; left undone, without a trace, after a signal."""
        assert self.task.evaluation is not None
        self._settle()
        rows = max(1, self.plan.batch.rows_per_sweep)
        loader = Loader(self.task.evaluation, rows, shuffle=False)
        losses: list[float] = []
        num_targets = 0
        self.run.model.eval()
        try:
            for _ in range(loader.num_batches_per_epoch):
                if self.signals.status:
                    return
                batch = loader.next_batch()
                with torch.no_grad():
                    losses.append(float(offloadz.token_logprobs(self.run, batch).double().sum()))
                num_targets += int((batch["labels"][:, 1:] != -100).sum())
        finally:
            self.run.model.train()
            self.run.flush()
        self.progress.evaluated_step = self.progress.step
        loss = -math.fsum(losses) / num_targets
        self.metrics.write({"step": self.progress.step, "eval_loss": loss, "eval_tokens": num_targets})
        self.display.say(
            f"step {self.progress.step}/{self.task.num_steps}  evaluation loss {loss:.4f}, {num_targets} tokens"
        )

    def _save(self) -> None:
        self._settle()
        self.metrics.sync()
        extra = {
            **asdict(self.progress),
            "loader": self.loader.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "config": self.config.to_toml(),
        }
        began_s = time.monotonic()
        path = save_checkpoint(self.output / "checkpoints", self.run, extra, self.config.train.keep)
        self._keep_weights()
        self.run.flush()
        self.saved_step, self.saved_at_s = self.progress.step, time.monotonic()
        self.display.say(f"saved {path} in {self.saved_at_s - began_s:.1f} s")

    def _keep_weights(self) -> None:
        keep, directory = self.config.train.keep_weights, self.output / "weights"
        if keep:
            self.run.export(directory / f"step-{self.progress.step:06d}")
            there = sorted(p for p in directory.glob("step-*") if p.is_dir() and p.name.count("-") == 1)
            # What a run that was taken back left of later steps is older than this one.
            there.sort(key=lambda p: (int(p.name[5:]) <= self.progress.step, p.name))
            for path in there[:-keep]:
                remove_directory(path)

    def _finish(self) -> int:
        final = self.run.export(self.output / "final")
        write_text(self.output / FINISHED, json.dumps({"step": self.progress.step}) + "\n")
        skipped = f", {self.progress.num_skipped} updates skipped" if self.progress.num_skipped else ""
        self.display.say(f"finished: {self.progress.step} steps{skipped}; the model is in {final}")
        return 0

    # ---- resume ------------------------------------------------------------------------------------------------

    def _resume(self, start: Path) -> None:
        """Put everything back as it was; settings that `train.resume_with` lets differ are the configuration's."""
        fresh = [dict(group) for group in self.run.optimizer.param_groups]
        self.run.flush()
        extra = load_checkpoint(start, self.run, checked=True)
        self.loader.load_state_dict(extra["loader"])
        self.scheduler.load_state_dict(extra["scheduler"])
        self.progress = Progress(**{key: int(extra[key]) for key in asdict(self.progress)})
        if self.loader.num_served != self.progress.step:
            raise ConfigError(f"{start} is at step {self.progress.step}, its loader at {self.loader.num_served}")
        share = self.schedule(self.scheduler.last_epoch)
        for group, new in zip(self.run.optimizer.param_groups, fresh, strict=True):
            for key in ("betas", "eps", "weight_decay", "initial_lr"):
                group[key] = new[key]  # equal, unless resume_with names it
            group["lr"] = group["initial_lr"] * share
        self.scheduler.base_lrs = [group["initial_lr"] for group in self.run.optimizer.param_groups]


def _start(config: Config, output: Path, say: Any) -> Path | None:
    """The checkpoint to go on from, every byte of it checked; ConfigError where the configuration is another."""
    chosen, found = config.train.resume, output / "checkpoints"
    if chosen == "never":
        if any(found.glob("step-*")):
            say(f"resume: never; checkpoints in {found} stay until {config.train.keep} new ones replace them")
        return None
    if chosen == "auto":
        start, rejected = newest_valid(found)
        for path, reason in rejected:
            say(f"resume: {path} is left out: {reason}")
    else:
        start = Path(chosen)
        if not start.is_dir():
            raise ConfigError(f'train.resume = "{chosen}" is no directory; needed: auto, never or a checkpoint')
        verify(start, read_manifest(start))
    if start is not None:
        _require_same(config, start, say)
    elif any(found.glob("step-*")):
        raise ConfigError(
            f'no checkpoint in {found} is valid; set train.resume = "never" to begin again, or another train.output'
        )
    return start


def _require_same(config: Config, start: Path, say: Any) -> None:
    extra = read_manifest(start)["extra"]
    if "config" not in extra or "loader" not in extra:
        raise ConfigError(f"{start} was not written by `offloadz train`; it holds no place in the data to go on from")
    old = config_from_tables(tomllib.loads(extra["config"]))
    found = config_differences(old, config)
    if found:
        raise ConfigError(
            f"the configuration differs from that of {start}:\n  "
            + "\n  ".join(found)
            + "\nput these back, name those "
            'that may differ in train.resume_with, or begin again with train.resume = "never" or another train.output'
        )
    allowed = [
        line
        for line in config_differences(old, config, every_key=True)
        if line.partition(":")[0] in config.train.resume_with
    ]
    for line in allowed:
        say(f"resume: {line} (allowed by train.resume_with)")


def _is_finished(output: Path, start: Path, num_steps: int) -> bool:
    """Whether the checkpoint is the last one and its export is there."""
    if int(read_manifest(start)["step"]) < num_steps or not (output / "final").is_dir():
        return False
    try:
        return int(json.loads((output / FINISHED).read_text())["step"]) == num_steps
    except (OSError, ValueError, KeyError, TypeError):
        return False


@contextmanager
def _alone(output: Path) -> Iterator[None]:
    """The run directory, made if need be, under a lock that dies with this process; gone if nothing came into it."""
    was_there = output.exists()
    try:
        output.mkdir(parents=True, exist_ok=True)
        lock = os.open(output, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(f"train.output = {output}: {error.strerror}; name a directory you may write") from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"train.output = {output} is in use by another run; end it or choose another") from None
        except OSError:  # some network file systems lock no directories
            pass
        yield
    finally:
        os.close(lock)
        if not was_there and not any(output.iterdir()):
            output.rmdir()


def _seed(seed: int) -> None:
    """Python's, numpy's and torch's generators: a model's own code may draw from any."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)
