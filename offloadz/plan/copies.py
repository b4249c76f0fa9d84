"""How often state on disk exists: what makes a step whole, what holds a checkpoint, and what a kill then costs.

Left to others: the bytes (`placement.home_bytes`), whether they fit (`search.py`), what a copy is (`memory/copies.py`).
The trade-off: a 13B model has 160 GB of state, so three copies are half a terabyte; where that is not there the run
keeps fewer, and says what it gives up.
"""

from __future__ import annotations

from offloadz.plan.placement import Placement

LINKED_COPIES = 3
"""From so many copies on a checkpoint is links to one of them: two make a step whole, each more holds a checkpoint."""


def copy_choices(placement: Placement, keep: int, copies: int, linkable: bool) -> list[int]:
    """How often state on disk may exist, the most first.

    `copies`: what a user fixed, or 0.  `keep`: checkpoints to hold, 0 for as many as is usual.  `linkable`: checkpoints
    lie on the file system of the swap path.
    """
    least = placement.least_copies
    if copies or not placement.state_on_disk or placement.commit == "in_place":
        return [max(copies, least)]
    return [2 + held for held in range(keep or 1, 0, -1) if linkable] + [2, 1][: 3 - least]


def linked(placement: Placement) -> bool:
    """Whether checkpoints are hard links to the state on disk."""
    return placement.flips and placement.copies >= LINKED_COPIES


def num_kept(placement: Placement, keep: int) -> int:
    """Checkpoints that stay; `keep`: as a user fixed it, or 0."""
    return placement.copies - 2 if linked(placement) else keep or 2


def fewer_kept(placement: Placement, keep: int) -> str:
    """Why fewer checkpoints stay than `keep` asks for; empty where as many do."""
    held = num_kept(placement, keep)
    if held >= keep:
        return ""
    return f"train.keep = {keep} needs {2 + keep} copies, there is room for {placement.copies}: {_told(held)}"


def kept_reason(placement: Placement, keep: int) -> str:
    """How many checkpoints stay, and why no more; `keep`: as a user fixed it, or 0."""
    usual = "as many as is usual with links" if linked(placement) else "as many as is usual"
    asked = f"train.keep = {keep} asks for no more" if keep else usual
    return fewer_kept(placement, keep) or f"{_told(num_kept(placement, keep))}, {asked}"


def _told(num: int) -> str:
    return "1 checkpoint is kept" if num == 1 else f"{num} checkpoints are kept"


def copies_reason(placement: Placement, asked: int, keep: int, linkable: bool) -> str:
    """Why the state on disk exists so often, and what a kill costs; `keep`: checkpoints that a user asks for, or 0."""
    copies = placement.copies
    if placement.commit == "in_place":
        why = 'commit = "in_place" updates where it lies; a kill costs what was done since the last checkpoint'
    elif asked and copies == asked:
        why = "as asked" if copies > 1 else "a kill costs what was done since the last checkpoint"
    elif not placement.state_on_disk:
        why = 'commit = "shadow" writes one beside the other; a kill costs what was done since the last checkpoint'
    elif copies >= LINKED_COPIES:
        fewer = fewer_kept(placement, keep)
        why = "live, shadow, and one for each checkpoint, which is hard links; a kill costs a step at most"
        why += f"; {fewer}" if fewer else ""
    elif copies == 2:
        short = "; there is no room for more" if linkable else ""
        why = f"live and shadow; a kill costs a step at most, checkpoints are written out{short}"
    else:
        why = "there is no room for more; checkpoints are written out, and a kill costs what was done since the last"
    return f"state on disk in {copies} {'copies' if copies > 1 else 'copy'}: {why}"
