"""`offloadz train`: from a configuration to a finished model directory, over kills, signals and resumes.

Written on the Python API alone (`load`, `offload`, `run.step`, `run.flush`, `token_logprobs`, `run.export`, and the
state of a run in `checkpoint.py`), so whatever it does a loop of one's own can do.  The order of things: data, then the
checkpoint to go on from, then the plan, and only then weights; so what is wrong is said while nothing has been started.

[Note: a point between steps] Everything that is not a step happens between two: evaluate, sample, save, stop.  What
has been done at a point is written in the checkpoint (`step`, `evaluated_step`, `sampled_step`), so a run that was
stopped or killed goes on in the same order.  The trade-off: a signal waits for the end of a step, which for a large
model takes minutes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offloadz.config import parse_every
from offloadz.memory.heap import give_back
from offloadz.model.aside import write_text
from offloadz.model.flips import shadow_of, told_of
from offloadz.model.state import load_flip
from offloadz.model.together import by_first
from offloadz.model.told import seed_all
from offloadz.plan.answer import Plan
from offloadz.plan.cut import cut_told
from offloadz.plan.errors import ConfigError
from offloadz.plan.words import human
from offloadz.runtime.meter import process_bytes
from offloadz.runtime.ranks import Solo, join
from offloadz.runtime.tracing import traced
from offloadz.train import said
from offloadz.train.batches import Loader, row_lengths
from offloadz.train.begin import (
    Start,
    alone,
    check_swap,
    forget_ranks,
    is_finished,
    mark_finished,
    start_for_all,
)
from offloadz.train.checkpoint import load_checkpoint, newest_order, prune_weights, save_checkpoint
from offloadz.train.closing import PlanCheck
from offloadz.train.evaluation import evaluated
from offloadz.train.metrics import SAMPLES, Metrics, Unwritten, plain, write_trace
from offloadz.train.offloaded import begun, tell_kept, tell_swap, tell_unlinked
from offloadz.train.planning import Task, decided, plan_lines, read_task, task_lines
from offloadz.train.progress import Display
from offloadz.train.sampling import Prompts
from offloadz.train.schedule import schedule_of, scheduler_of
from offloadz.train.signals import Interrupted, Signals

if TYPE_CHECKING:
    from rich.console import Console

    from offloadz.config import Config
    from offloadz.model.run import Run, StepReport

MEMORY_SLACK = 1.2
"""How far over the plan's limit memory that no file backs may be before a run ends itself: the kernel would not ask."""

ECHO_S = 10.0
"""Torchrun passes on a signal that a terminal has given to all ranks already."""

SAMPLED_SHARE = 4
"""A micro-batch's tokens over those of samples asked at once: keys and values of all blocks stay below one's graph."""


Measure = Callable[["Config", int, Callable[[str], None], int], None]


class RunStopped(RuntimeError):
    """A run ended itself: too many skipped updates, or too much memory; the message says what to change."""


@dataclass
class Progress:
    """Where a run is; what a checkpoint's `extra` holds besides the states of loader and scheduler."""

    step: int = 0
    evaluated_step: int = 0
    sampled_step: int = 0
    num_skipped: int = 0
    skipped_in_row: int = 0


def train(config: Config, measure: Measure = lambda *_: None) -> int:
    """Train as configured; 0 when the run is finished, 130, 143 or 129 after a signal.

    `measure(config, steps, say, ranks)` is called before the plan is made: it may measure the box.
    Raises the errors of `plan/errors.py`, and `RunStopped`.
    """
    console, ranks = said.console(), join()
    console.quiet = ranks.rank > 0
    with Signals(echo_s=ECHO_S if ranks.size > 1 else 0.0) as signals, ExitStack() as stack:
        try:
            return _train(config, console, signals, stack, ranks, measure)
        except Interrupted as interrupted:
            return interrupted.status


def _train(config: Config, console: Console, signals: Signals, stack: ExitStack, ranks: Solo, measure: Measure) -> int:
    def say(text: str) -> None:
        console.print(text, markup=False)

    output = Path(config.train.output)
    task = read_task(config)
    give_back()
    for line in task_lines(task):
        say(f"data: {line}")
    by_first(ranks, lambda: stack.enter_context(alone(output)))
    start = start_for_all(config, output, say, ranks)
    if config.train.resume != "never" and ranks.first(is_finished(output, start, task.num_steps)):
        more = ("to train on, raise train.steps or train.epochs and name it in train.resume_with" if start else
                'its checkpoints are gone; train.resume = "never" begins again')  # fmt: skip
        say(f"this run is finished: {task.num_steps} steps, {output / 'final'}; {more}")
        return 0
    by_first(ranks, lambda: (check_swap(config, say), forget_ranks(config, output)))
    by_first(ranks, lambda: measure(config, task.num_steps, say, ranks.size))
    plan = decided(config, task.prompts, say, ranks, start and start.cut)
    for line in plan_lines(plan, config, task.samples):
        say(f"plan: {line}")
    told = {"config.toml": config.to_toml(), "plan.json": json.dumps(plan.to_json(), indent=1) + "\n"}
    told["data.json"] = json.dumps(task.to_json(), indent=1) + "\n"
    by_first(ranks, lambda: [write_text(output / name, text) for name, text in told.items()])
    run, start = begun(config, plan, task, start, say)
    stack.callback(tell_kept, run, say)
    stack.enter_context(run)
    disk = run.session.room.disk
    if disk is not None:
        tell_swap(disk, say)
    tell_unlinked(run, plan, output, say)
    training = Training(config, run, task, plan, signals, start, console)
    stack.callback(training.close)
    return training.go()


class Training:
    """A run under way with all that goes along: samples, schedule, metrics, checkpoints."""

    def __init__(
        self, config: Config, run: Run, task: Task, plan: Plan, signals: Signals, start: Start | None, console: Console
    ) -> None:
        self.config, self.run, self.task, self.plan, self.signals = config, run, task, plan, signals
        self.output, self.ranks = Path(config.train.output), run.ranks
        self.status = 0
        """What a signal to any rank asks for, as far as all have agreed on it."""
        rows, seed, deal = config.train.batch_size, config.train.seed, (run.ranks.rank, run.ranks.size)
        self.loader = Loader(task.samples, rows, seed, config.data.shuffle, deal=deal, lengths=row_lengths(config))
        self.schedule = schedule_of(config.optimizer, task.num_steps)
        self.scheduler = scheduler_of(run.optimizer, self.schedule)
        self.progress = Progress()
        seed_all(config.train.seed + run.ranks.rank)
        line = self._resume(start) if start is not None else None
        self.every = parse_every(config.train.save_every)
        self.order = newest_order(self.output / "checkpoints")
        # State on disk may be newer than the last checkpoint, and then is not saved yet.
        self.saved_step, self.saved_at_s = self.progress.step, time.monotonic()
        if start is not None and start.flip is not None and start.flip.record.note["extra"]["order"] == self.order:
            self.saved_step = -1
        progress = self.progress
        last = (progress.step, progress.evaluated_step, progress.sampled_step)
        self.metrics = Metrics(self.output, *last) if run.ranks.rank == 0 else Unwritten()
        self.display = Display(console, self.progress.step, task.num_steps, config.train.log_every)
        self.check = PlanCheck(plan, self.output / "plan.json" if run.ranks.rank == 0 else None, task.num_steps)
        self.due_line: dict[str, Any] | None = None
        """The line of the newest step, whose updates are still under way."""
        if line is not None and self.metrics.last_step < line["step"]:
            self.metrics.write(line)  # the kill came between the step's flip and its line
        run.progress, run.before_flip = self._progress_behind, self.metrics.sync_lines
        shadow = shadow_of(run)
        if shadow is not None:
            shadow.keeps = True
        if start is not None:
            how = ", going on from the state on disk" if start.flip else ""
            self.display.say(f"resume: {start.path}, step {self.progress.step} of {task.num_steps}{how}")

    def go(self) -> int:
        """All steps that are left, then the export."""
        with self.signals.held():
            self.run.flush()
            while True:
                self._between_steps()
                if self.status or self.progress.step >= self.task.num_steps:
                    break
                self._step()
        if self.status:
            self.display.say(f"stopped at step {self.progress.step} of {self.task.num_steps}; the same command goes on")
            return self.status
        return self._finish()

    def _stopped(self) -> bool:
        """Whether a signal has come, to whichever rank; all ask at the same points."""
        self.status = self.status or self.ranks.most(self.signals.status)
        return bool(self.status)

    def close(self) -> None:
        self.display.close()
        self.metrics.close()

    # ---- steps -------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        batch = self.loader.next_batch()
        watched = self.progress.step + 1 in self.config.train.trace_steps
        with traced(self.run.session.lanes) if watched else nullcontext([]) as spans:
            self.run.step(batch)
        if watched and self.ranks.rank == 0:
            write_trace(self.output, self.progress.step + 1, spans)
        self._write_due()  # the updates of the step before are done when this one is decided
        report, progress = self.run.report, self.progress
        progress.step += 1
        self.due_line = self._line(report)
        self.display.step(self.due_line)
        for text in self.check.add(self.due_line):
            self.display.say(text)
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
        line["tokens"] = self.loader.last_num_tokens  # what fills a packed row up is no token of a sample
        line["tokens_per_s"] = line["tokens"] / report.step_s if report.step_s > 0 else 0.0
        line["predicted_step_s"] = self.plan.step_s_by(self.run.session.placement.commit)
        line["bytes"]["host_planned"] = self.plan.peak["host"]
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
                f"{report.loss}); train.max_skipped allows {most}. Lower optimizer.lr, look at the samples of these "
                "steps (debug.samples = true), or raise train.max_skipped; "
                f"checkpoints in {self.output / 'checkpoints'} are as before"
            )

    def _check_memory(self) -> None:
        """End with a message before the kernel ends the process without one."""
        limit, held = self.plan.limits.get("host"), process_bytes()["anonymous"]
        if limit is not None and held > MEMORY_SLACK * limit:
            self._settle()
            raise RunStopped(
                f"the process holds {human(held)} of memory, {human(limit)} were to be used "
                f"({self.plan.limit_source}); the plan was wrong for this model: lower train.micro_batch_size or "
                "data.max_length, or raise offload.host_memory"
            )

    # ---- between steps -----------------------------------------------------------------------------------------

    def _between_steps(self) -> None:
        progress, last = self.progress, self.progress.step >= self.task.num_steps
        if self.task.evaluation is not None and progress.step > progress.evaluated_step and self._evaluates(last):
            self._evaluate()
        if self.task.prompts is not None and progress.step > progress.sampled_step and self._samples(last):
            self._sample(self.task.prompts)
        stopped = self._stopped()
        if progress.step > self.saved_step and (stopped or last or self._save_is_due()):
            self._save()

    def _evaluates(self, last: bool) -> bool:
        every = self.config.train.eval_every
        return last or (every > 0 and self.progress.step % every == 0)

    def _samples(self, last: bool) -> bool:
        every = self.config.train.sample_every
        if not every:
            return self._evaluates(last)
        return last or self.progress.step % every == 0

    def _save_is_due(self) -> bool:
        steps, wait_s = self.every
        if steps:
            return self.progress.step % steps == 0
        return wait_s > 0 and bool(self.ranks.first(time.monotonic() - self.saved_at_s >= wait_s))

    def _settle(self) -> None:
        """All updates done and home, and the line of the newest step written."""
        self.run.flush()
        self._write_due()

    def _evaluate(self) -> None:
        """Mean loss over the target tokens of the evaluation samples; left undone, without a trace, after a signal."""
        assert self.task.evaluation is not None
        self._settle()
        found = evaluated(self.run, self.task.evaluation, max(1, self.plan.batch.rows_per_sweep), self._stopped)
        if found is None:
            return
        self.progress.evaluated_step = self.progress.step
        loss, num_targets = found
        self.metrics.write({"step": self.progress.step, "eval_loss": loss, "eval_tokens": num_targets})
        self.display.say(
            f"step {self.progress.step}/{self.task.num_steps}  evaluation loss {loss:.4f}, {num_targets} tokens"
        )

    def _sample(self, prompts: Prompts) -> None:
        """Ask the model as it is now; left undone, without a trace, after a signal."""
        self._settle()
        most_tokens = max(1, self.plan.batch.tokens_per_micro // SAMPLED_SHARE)
        answers = None if self._stopped() else prompts.ask(self.run, most_tokens, self._stopped)
        if answers is None:
            return
        self.progress.sampled_step = self.progress.step
        self.metrics.write({"step": self.progress.step, SAMPLES: [asdict(answer) for answer in answers]})
        for answer in answers:
            self.display.say(f"step {self.progress.step}/{self.task.num_steps}  {answer.prompt!r} -> {answer.text!r}")

    def _save(self) -> None:
        self._settle()
        self.metrics.sync()
        extra = self._extra(self.progress, self.scheduler.state_dict())
        began_s = time.monotonic()
        path = save_checkpoint(self.output / "checkpoints", self.run, extra, self.plan.keep)
        self.order = newest_order(self.output / "checkpoints")
        self._keep_weights()
        self.run.flush()
        self.saved_step, self.saved_at_s = self.progress.step, time.monotonic()
        self.display.say(f"saved {path} in {self.saved_at_s - began_s:.1f} s")

    def _extra(self, progress: Progress, scheduler: dict[str, Any]) -> dict[str, Any]:
        """What a resume needs from this loop; `order`: of the newest checkpoint that is there already."""
        told = {"config": self.config.to_toml(), "plan": cut_told(self.plan), "order": self.order}
        return {**asdict(progress), "loader": self.loader.state_dict(), "scheduler": scheduler, **told}

    def _progress_behind(self) -> dict[str, Any]:
        """Where the run will be behind the step just decided, for its flip: the lanes run on while this loop does."""
        self._write_due()
        progress = replace(self.progress, step=self.progress.step + 1, skipped_in_row=0)
        scheduler = self.scheduler.state_dict()
        behind = {key: scheduler[key] + 1 for key in ("last_epoch", "_step_count")}
        return {**self._extra(progress, {**scheduler, **behind}), "line": plain(self._line(self.run.report))}

    def _keep_weights(self) -> None:
        keep, directory = self.config.train.keep_weights, self.output / "weights"
        if keep:
            self.run.export(directory / f"step-{self.progress.step:06d}")
            by_first(self.ranks, lambda: prune_weights(directory, self.progress.step, keep))

    def _finish(self) -> int:
        final = self.run.export(self.output / "final")
        if self.ranks.rank:
            return 0
        mark_finished(self.output, self.progress.step)
        skipped = f", {self.progress.num_skipped} updates skipped" if self.progress.num_skipped else ""
        self.display.say(f"finished: {self.progress.step} steps{skipped}; the model is in {final}")
        return 0

    # ---- resume ------------------------------------------------------------------------------------------------

    def _resume(self, start: Start) -> dict[str, Any] | None:
        """Put everything back as it was; settings that `train.resume_with` lets differ are the configuration's.

        Returns the line of the last step where a flip told it.
        """
        fresh = [dict(group) for group in self.run.optimizer.param_groups]
        self.run.flush()
        if start.flip is not None:
            extra = load_flip(told_of(start.flip), self.run)
        else:
            extra = load_checkpoint(start.path, self.run, checked=True, adopted=start.linked)
        self.loader.load_state_dict(extra["loader"])
        self.scheduler.load_state_dict(extra["scheduler"])
        self.progress = Progress(**{key: int(extra.get(key, 0)) for key in asdict(self.progress)})
        if self.loader.num_served != self.progress.step:
            raise ConfigError(f"{start} is at step {self.progress.step}, its loader at {self.loader.num_served}")
        share = self.schedule(self.scheduler.last_epoch)
        for group, new in zip(self.run.optimizer.param_groups, fresh, strict=True):
            for key in {*self.run.optimizer.keys, "initial_lr"} - {"lr"}:
                group[key] = new[key]  # equal, unless resume_with names it
            group["lr"] = group["initial_lr"] * share
        self.scheduler.base_lrs = [group["initial_lr"] for group in self.run.optimizer.param_groups]
        self.scheduler._last_lr = [group["lr"] for group in self.run.optimizer.param_groups]
        line: dict[str, Any] | None = extra.get("line")
        return line
