"""What a run leaves to be read: `metrics.jsonl`, a line for each optimizer step, and the same numbers for TensorBoard.

The loop says what is in a line and when a step is done; here is how lines stay true over kills and resumes.  A resume
cuts the file back to the checkpoint's step, so each step stands in it once.  [Note: lines are a prefix] Lines are in
the order of steps, behind each step its evaluation and then its samples, so what a checkpoint does not know of is
always the end of the file.  The trade-off: every line is handed to the system at once (a kill loses none), but flushed
to the drive only before a checkpoint, because only what a checkpoint knows of is ever kept.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from offloadz.memory.record import flush_directory
from offloadz.model.aside import write_text
from offloadz.plan.errors import DiskFailed
from offloadz.plan.timeline import Span, Timeline, trace_path

METRICS = "metrics.jsonl"
CURVES = ("loss", "lr", "grad_norm", "step_s", "tokens_per_s", "eval_loss")
"""What TensorBoard is given as curves."""
SAMPLES = "generated"
"""Key of a line of samples: a list of `{prompt, text, num_tokens, ended}`."""


class Metrics:
    """The open metrics of a run directory.

    `step`, `evaluated_step` and `sampled_step` are those of the checkpoint the run goes on from (0 at the start): later
    lines are cut off.  Raises DiskFailed where the file cannot be written.
    """

    def __init__(self, directory: Path, step: int = 0, evaluated_step: int = 0, sampled_step: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.path = directory / METRICS
        self.last_step, self.num_cut = _cut(self.path, step, {"eval_loss": evaluated_step, SAMPLES: sampled_step})
        try:
            fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            flush_directory(directory)  # lines on the drive are nothing without the name
        except OSError as error:
            raise _failed(error, self.path) from error
        self._file = open(fd, "w", encoding="utf-8")  # noqa: SIM115  closed in `close`
        # TensorBoard drops what earlier files hold from the purge step on.
        self._board = SummaryWriter(str(directory / "tensorboard"), purge_step=step + 1)

    def write(self, line: Mapping[str, Any]) -> None:
        """Append one line; numbers that are not finite are written as null (JSON has no others)."""
        try:
            self._file.write(json.dumps(plain(line), allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:
            raise _failed(error, self.path) from error
        for name in CURVES:
            value = line.get(name)
            if isinstance(value, int | float) and math.isfinite(value):
                self._board.add_scalar(name, value, line["step"])
        for number, sample in enumerate(line.get(SAMPLES, ()), 1):
            # Four blanks: TensorBoard reads Markdown, and an answer is none.
            text = "\n".join(f"    {row}" for row in f"{sample['prompt']}\n-> {sample['text']}".splitlines())
            self._board.add_text(f"sample {number}", text, line["step"])

    def sync(self) -> None:
        """Bring all lines to the drive: called before a checkpoint that knows of them."""
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise _failed(error, self.path) from error
        self._board.flush()

    def sync_lines(self) -> None:
        """Bring the lines written so far to the drive, on any thread: called before a flip, whose step follows them."""
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise _failed(error, self.path) from error

    def close(self) -> None:
        """Close both; calling it twice is allowed."""
        self._file.close()
        self._board.close()


class Unwritten(Metrics):
    """What ranks other than the first write: nothing."""

    def __init__(self) -> None:
        self.last_step = self.num_cut = 0

    def write(self, line: Mapping[str, Any]) -> None: ...

    def sync(self) -> None: ...

    def sync_lines(self) -> None: ...

    def close(self) -> None: ...


def write_trace(directory: Path, step: int, spans: Sequence[Span]) -> None:
    """The measured timeline of a step, beside the metrics."""
    path = trace_path(directory, step)
    path.parent.mkdir(exist_ok=True)
    write_text(path, json.dumps(Timeline(tuple(spans), f"step {step}, measured").trace()))


def plain(value: Any) -> Any:
    """A value without numbers that JSON cannot hold."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All whole lines of a metrics file; a last one that a kill cut off is left out."""
    lines = []
    for raw in path.read_bytes().splitlines(keepends=True):
        line = _parsed(raw)
        if line is None:
            break
        lines.append(line)
    return lines


def _cut(path: Path, step: int, last_of: Mapping[str, int]) -> tuple[int, int]:
    """Cut the file back to what a checkpoint knows of; returns the last step and the number of lines that went.

    `last_of`: the last step of the lines that have a key; of all others it is `step`.
    """
    if not path.exists():
        return 0, 0
    body = path.read_bytes().splitlines(keepends=True)
    kept = reached = 0
    for raw in body:
        line = _parsed(raw)
        last = next((at for key, at in last_of.items() if line is not None and key in line), step)
        if line is None or line["step"] > last:
            break
        kept, reached = kept + 1, line["step"]
    if kept < len(body):
        os.truncate(path, sum(len(raw) for raw in body[:kept]))
    return reached, len(body) - kept


def _parsed(raw: bytes) -> dict[str, Any] | None:
    try:
        line = json.loads(raw) if raw.endswith(b"\n") else None
    except ValueError:
        return None
    return line if isinstance(line, dict) and isinstance(line.get("step"), int) else None


def _failed(error: OSError, path: Path) -> DiskFailed:
    return DiskFailed(error.errno, f"{path}: {error.strerror}; make room or choose another train.output")
