"""Four short passes that make a sequential program fast: slots, hoist, edges, checks.

`place` gives every value that is not at home a slot, as a register allocator would; with two slots a pool is a double
buffer, and nothing else in the project knows of prefetching.  `hoisted` puts each op just after the last computation
it has to wait for, never past an earlier op of its own lane.  `link` turns shared places into edges.  `check` refuses a
program in which an edge points forward.

[Note: order is kept per lane] Without that rule all updates of a step, which wait for nothing but the norm, would queue
on the drive before the weights of the third block, and the forward would wait for the last update.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from offloadz.plan.errors import DoesNotFit
from offloadz.plan.ops import Program
from offloadz.plan.placement import Placement

SLOT_KINDS = "wpsghxy"


def compiled(program: Program, placement: Placement, pace: Sequence[int] = ()) -> Program:
    """All passes in order; `pace`: see `hoisted`."""
    placed = place(program, placement)
    waits = hazards(placed)
    linked = link(placed, waits, hoisted(placed, waits, pace))
    check(linked)
    return linked


def pool_of(value: str, placement: Placement) -> str:
    """The pool a value on a tier lives in, or "" if that place is its home: `w3@host` -> `host.w`."""
    name, tier = value.split("@")
    kind, part = name[0], "." in name
    if tier in ("disk", "device", "live", "spare", "next", "ahead"):
        return ""
    if tier == "compute" or kind in "ph":
        return f"{tier}.{kind}"
    homes = {"w": placement.parameters, "g": placement.gradients, "s": placement.optimizer, "x": placement.activations}
    homes["y"] = placement.products_route[-1]
    at_home = homes[kind] == tier
    return "" if at_home and (part or kind in "xy") else f"{tier}.{kind}"


def place(program: Program, placement: Placement) -> Program:
    """Values away from home get slots; raises DoesNotFit naming the pool when it is too small.

    What is `held` has one until its last use; what is `left` is made last, in the one that is told, and keeps it.
    """
    away, end = pools_of(program, placement), len(program.ops)
    lasts = iter(last_uses(program, away))
    fresh = [(-1, slot) for slot in range(placement.slots)]
    pools: dict[str, list[tuple[int, int]]] = {}
    """Per pool its slots, first the one that was given longest ago: (index after which it is free, number)."""
    for held in program.held.values():
        pool, number = held.split("#")
        slots = pools.setdefault(pool, fresh.copy())
        slots.remove((-1, int(number)))
        slots.append((next(lasts), int(number)))
    where = {**program.left, **program.held}
    ops = []
    for index, op in enumerate(program.ops):
        reads = tuple(map(where.get, op.reads, op.reads))
        for value in op.writes:
            if value in away and value not in op.reads:
                pool = away[value]
                slots, until = pools.setdefault(pool, fresh.copy()), next(lasts)
                told = program.left[value] if until == end else ""
                free = _free(slots, index, told)
                if free is None:
                    raise DoesNotFit(
                        f"pool {pool} has {placement.slots} slots and op {index} ({op.verb}) needs one more;"
                        " raise offload.slots"
                    )
                slot = slots.pop(free)[1]
                slots.append((until, slot))
                where[value] = f"{pool}#{slot}"
        ops.append(op.at(reads, tuple(map(where.get, op.writes, op.writes))))
    return Program(tuple(ops), {pool: len(slots) for pool, slots in pools.items()}, program.held, program.left)


def _free(slots: Sequence[tuple[int, int]], index: int, told: str) -> int | None:
    """Where among `slots` the first is that is free for op `index`, or the one that is `told`; None where none is."""
    number = int(told.partition("#")[2] or -1)
    free = (at for at, (until, slot) in enumerate(slots) if until < index and number in (-1, slot))
    return next(free, None)


def pools_of(program: Program, placement: Placement) -> dict[str, str]:
    """The pool of every value that the program writes away from its home."""
    values = dict.fromkeys(value for op in program.ops for value in op.writes)
    return {value: pool for value in values if (pool := pool_of(value, placement))}


def last_uses(program: Program, away: Mapping[str, str]) -> list[int]:
    """For each value that is held, and each time that one `away` from home is made, in their order: the index of the
    last op that touches it; -1 where none does, and one past the last op where it is left."""
    made = {value: number for number, value in enumerate(program.held)}
    lasts = [-1] * len(made)
    for index, op in enumerate(program.ops):
        for value in op.reads:
            if value in made:
                lasts[made[value]] = index
        for value in op.writes:
            if value in away and value not in op.reads:
                made[value] = len(lasts)
                lasts.append(index)
            elif value in made:
                lasts[made[value]] = index
    for value in away.keys() & program.left.keys():
        lasts[made[value]] = len(program.ops)
    return lasts


def hoisted(program: Program, waits: Sequence[set[int]], pace: Sequence[int] = ()) -> list[int]:
    """The order in which each op is right after the last `device` op that it (or an earlier op of its lane) has to wait
    for; whatever an op waits for stays before it.

    `pace`: for each op of the lane `net` behind how many `device` ops it stands at least (`pace.py`).
    """
    level: list[int] = []
    lanes: dict[str, int] = {}
    computed = [-1, *(index for index, op in enumerate(program.ops) if op.lane == "device")]
    least = iter(pace)
    for index, op in enumerate(program.ops):
        own = max([level[w] for w in waits[index]], default=-1)
        own = max(own, computed[next(least, 0)]) if op.lane == "net" else own
        own = index if op.lane == "device" else max(own, lanes.get(op.lane, -1))
        lanes[op.lane] = own
        level.append(own)
    behind = [2 * at + (op.lane != "device") for at, op in zip(level, program.ops, strict=True)]
    return sorted(range(len(level)), key=behind.__getitem__)


def link(program: Program, waits: Sequence[set[int]], order: Sequence[int]) -> Program:
    """The ops in this order, with hazards as edges (`after`), and places that each is the first to touch (`enters`)."""
    number = [0] * len(order)
    for new, index in enumerate(order):
        number[index] = new
    seen: set[str] = set()
    ops = []
    for index in order:
        op = program.ops[index]
        places, enters = op.reads + op.writes, tuple[str, ...]()
        if not seen.issuperset(places):
            enters = tuple([place for place in dict.fromkeys(places) if place not in seen])
            seen.update(enters)
        ops.append(op.linked(tuple(sorted([number[w] for w in waits[index]])), enters))
    return replace(program, ops=tuple(ops))


def hazards(program: Program) -> list[set[int]]:
    """Per op the earlier ops it must follow: writers of what it reads, writers and readers of what it writes."""
    writer: dict[str, int] = {}
    readers: dict[str, list[int]] = {}
    found = []
    for index, op in enumerate(program.ops):
        waits = {writer[r] for r in op.reads if r in writer}
        for target in op.writes:
            waits.update(readers.get(target, ()))
            if target in writer:
                waits.add(writer[target])
        for source in op.reads:
            readers.setdefault(source, []).append(index)
        for target in op.writes:
            writer[target], readers[target] = index, []
        waits.discard(index)
        found.append(waits)
    return found


def check(program: Program) -> None:
    """Edges point backward: a walk would wait for ever for an op that it has not submitted."""
    for index, op in enumerate(program.ops):
        last = max(op.after, default=-1)
        if last >= index:
            raise RuntimeError(f"op {index} waits for op {last}:\n{program.text(index)}")
