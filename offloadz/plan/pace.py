"""The compiled program of some phases, in which ranks exchange at the same points of the computation.

Ranks have different numbers of parts: of a small unit only the first one has any, so only there does a gather wait for
an update, and by the order of its lane for a saved input that leaves.  Where a walk is given up (an evaluation, a
save), a rank that had begun a gather which another had not would take the other's next one for it.  So every rank
begins an exchange no earlier than rank 0 does, whose shards are never the short ones.  Left to others: the order itself
(`passes.py`).  The trade-off: ranks but the first compile each new program twice.
"""

from __future__ import annotations

from dataclasses import replace

from offloadz.plan.ops import Program
from offloadz.plan.passes import compiled
from offloadz.plan.placement import Placement
from offloadz.plan.spec import ModelSpec
from offloadz.plan.steps import Owed, Phase, build


def program_of(spec: ModelSpec, placement: Placement, phases: tuple[Phase, ...], owed: Owed) -> Program:
    """The program of `phases` behind earlier ones."""
    pace: tuple[int, ...] = ()
    if spec.share.rank:
        first = replace(spec.share, rank=0)
        pace = exchanges(program_of(spec.shared_by(first), replace(placement, share=first), phases, owed))
    return compiled(build(spec, placement, phases, owed), placement, pace)


def exchanges(program: Program) -> tuple[int, ...]:
    """For each op of the lane `net` how many computations are before it."""
    before, found = 0, []
    for op in program.ops:
        before += op.lane == "device"
        found += [before] * (op.lane == "net")
    return tuple(found)
