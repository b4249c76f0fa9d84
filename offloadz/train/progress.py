"""What a person sees while a run is under way: loss, speed, time left, and which lane the step waits for.

On a terminal one moving line, elsewhere a plain line every `train.log_every` steps.  It reads what the loop hands it
and decides nothing.  The trade-off: the time left is from a running mean of the last ten steps or so, so it follows a
change of pace within seconds and is wrong for the first two steps, which are slower than the rest.
"""

from __future__ import annotations

import math
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

SHARE = 0.15
"""Of the newest step in the running mean."""


class Display:
    """Lines and the bar of one run.  `step` is how many of `num_steps` are done already."""

    def __init__(self, console: Console, step: int, num_steps: int, log_every: int) -> None:
        self._console, self._num_steps, self._every = console, num_steps, log_every
        self._step_s = 0.0
        self._bar: Progress | None = None
        if console.is_terminal:
            columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(10), TextColumn("{task.fields[told]}"))
            self._bar = Progress(*columns, console=console, refresh_per_second=4)
            self._task = self._bar.add_task("train", total=num_steps, completed=step, told="")
            self._bar.start()

    def step(self, line: dict[str, Any]) -> None:
        """A step is decided."""
        step, took_s = int(line["step"]), float(line["step_s"])
        self._step_s = took_s if not self._step_s else self._step_s + SHARE * (took_s - self._step_s)
        left_s = (self._num_steps - step) * self._step_s
        if self._bar is not None:
            self._bar.update(self._task, completed=step, told=told(line, left_s, short=True))
        elif step % self._every == 0 or step == self._num_steps:
            self.say(f"step {step}/{self._num_steps}  {told(line, left_s)}")

    def say(self, text: str) -> None:
        """A line that stays."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def told(line: dict[str, Any], left_s: float, short: bool = False) -> str:
    """A step in words; `short` fits beside a bar on a terminal of 80 columns."""
    loss = "skipped: " + str(line["reason"]) if line["skipped"] else f"loss {line['loss']:.4f}"
    norm = f"  norm {line['grad_norm']:.3g}" if math.isfinite(line["grad_norm"]) else ""
    more = "" if short else f"{norm}  lr {line['lr']:.3g}"
    return (
        f"{loss}{more}  {line['tokens_per_s']:,.0f} tokens/s  {duration(left_s)} left  bottleneck {line['bottleneck']}"
    )


def duration(seconds: float) -> str:
    """Such as 0:07, 12:30 or 3:05:00."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
