"""What a user may ask for of a plan.

Left to others: where it comes from (`question.py`, `model/offload.py`), what it may choose from (`candidates.py`).  The
trade-off: room and limits stand beside choices, since a user may set them too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from offloadz.plan.errors import ConfigError
from offloadz.plan.footprint import BASELINE_BYTES
from offloadz.plan.kept import check_recompute
from offloadz.plan.placement import KINDS


@dataclass(frozen=True)
class Wishes:
    """What the user fixed; `auto` and 0 leave it to the plan, None means no limit is known."""

    batch_size: int
    max_length: int
    micro_batch_size: int = 0
    sweeps: int = 0
    cut_told: str = "as configured"
    """Why these two are fixed, where they are."""
    slots: int = 0
    parameters: str = "auto"
    gradients: str = "auto"
    optimizer: str = "auto"
    activations: str = "auto"
    swap: bool = False
    """Whether a swap directory is given; without one nothing goes to disk."""
    disk_free: int | None = None
    checkpoint_free: int | None = None
    same_drive: bool = False
    """Whether `offload.swap` and `train.output` share a file system, and with it the room."""
    host_memory: int | None = None
    device_memory: int | None = None
    compute: str = "float32"
    """Dtype of computation: float32 on a CPU, whose bf16 products are unusably slow without special instructions."""
    opaque: bool = False  # see `Placement.opaque`
    score_copies: int = 0  # see `footprint.score_copies`
    keep: int = 2
    copies: int = 1
    """`keep`: 0 is 2 checkpoints, or 1 where they are links.  `copies`: of the state on disk; 0 is as many as fit."""
    linkable: bool = False  # checkpoints may be links to the state on disk: one file system, and checksums
    threads: int = 0
    baseline_bytes: int = BASELINE_BYTES
    export_item_bytes: int = 2
    reading_bytes: int = 0  # beside the interpreter while data are read
    random: bool = False  # whether the weights are drawn at random
    recompute: str = "auto"
    """Which blocks run again in the backward: auto (as far as there is no room for what they leave) | all | none
    | cheap (what lies between their products)."""
    commit: str = "auto"
    """`in_place` is only taken where it is asked for: a step that fails half-way then ends the run."""
    clipping: bool = True  # whether a step may be clipped, and so updated twice with shadow
    ranks: int = 1
    zero_stage: str | int = "auto"  # see stages.py

    def with_room(self, num_bytes: int) -> Wishes:
        """With this much room on the drive of `offload.swap`; where none is named, under `train.output`."""
        shared = num_bytes if self.same_drive or not self.swap else self.checkpoint_free
        return replace(self, disk_free=num_bytes, checkpoint_free=shared)

    def within(self, size_bytes: int | None) -> Wishes:
        """With no more of the room that is free than a drive of this size has; None: not known."""
        if size_bytes is None or self.disk_free is None:
            return self
        return self.with_room(min(size_bytes, self.disk_free))

    def on_drive(self, size_bytes: int | None, elsewhere: bool) -> Wishes:
        """With the whole of a drive, whatever is free on those here.

        `elsewhere`: not on this box, so checkpoints go there too, and a drive of unknown size has no limit.
        """
        if elsewhere:
            return replace(self, disk_free=size_bytes, checkpoint_free=size_bytes)
        return self if size_bytes is None else self.with_room(size_bytes)


def check_wishes(wishes: Wishes) -> None:
    """Raise ConfigError for wishes that contradict each other."""
    check_recompute(wishes.recompute)
    for key, number in (("train.batch_size", wishes.batch_size), ("data.max_length", wishes.max_length)):
        if number < 1:
            raise ConfigError(f"{key} = {number}; needed: at least 1")
    if not wishes.swap:
        fixed = [kind for kind in KINDS if getattr(wishes, kind) == "disk"]
        if fixed:
            raise ConfigError(
                f'offload.{fixed[0]} = "disk", and offload.swap is empty; name a directory in offload.swap'
            )
    if wishes.micro_batch_size > wishes.batch_size:
        raise ConfigError(
            f"train.micro_batch_size = {wishes.micro_batch_size} is above train.batch_size = {wishes.batch_size}"
        )
    if wishes.sweeps > wishes.batch_size:
        raise ConfigError(f"offload.sweeps = {wishes.sweeps} is above train.batch_size = {wishes.batch_size}")
