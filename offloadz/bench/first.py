"""A quick bench before a long run on a box that nobody measured: its plan then rests on this box, and so do later ones.

Only with `offload.machine = "auto"` and no bench of this box kept (`plan/boxes.py`), and only where typical rates say
that the run takes long enough to pay for it.  The trade-off: two rounds of small sizes in place of six;
`offloadz bench` measures better, and what it measured is taken instead.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from offloadz.bench.command import bench
from offloadz.bench.machine_file import keep
from offloadz.bench.rounds import QUICK
from offloadz.memory.heap import give_back
from offloadz.plan.boxes import bench_file
from offloadz.plan.errors import ConfigError, DiskFailed
from offloadz.plan.question import question
from offloadz.runtime.chosen import facts_named

if TYPE_CHECKING:
    from offloadz.config import Config

LONG_S = 600.0
"""Seconds that a run has to take, by typical rates."""


def measure_first(config: Config, num_steps: int, say: Callable[[str], None], ranks: int = 1) -> None:
    """Measure this box and keep it, if it is worth it for a run of so many ranks; what cannot be measured is said and
    nothing more."""
    if config.offload.machine != "auto" or bench_file().exists():
        return
    plan = question(config, sets=(f"ranks={ranks}",), find=facts_named).answer()
    if not plan.fits or plan.step_s * num_steps < LONG_S:
        return
    say("machine: this one was never measured; a quick bench, once (`offloadz bench --swap DIR` is a better one)")
    try:
        kept = keep(bench([path for path in config.offload.swap if Path(path).is_dir()], QUICK)[0])
        say(f"machine: kept as {kept}" if kept else f"machine: {bench_file()} cannot be written; rates stay typical")
    except (ConfigError, DiskFailed) as error:
        say(f"machine: not measured, rates stay typical: {error}")
    give_back()
