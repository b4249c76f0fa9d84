"""Programs of small models, and what a program means: the values that every op reads, whatever the places are called.

A value is a hash of the op that made it and of what that op had read.  Two programs mean the same if every lane does
the same ops on the same values and the same values are at rest afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from offloadz.plan.ahead import found
from offloadz.plan.ops import Op, Program
from offloadz.plan.placement import Placement
from offloadz.plan.shapes import ParamInfo, TableInfo, make_spec
from offloadz.plan.spec import PAGE_BYTES, ModelSpec
from offloadz.plan.steps import Backward, Finish, Forward, Owed, Phase, Turn, Updates, build, leaves

Identity = tuple[object, ...]


def small_spec(layers: int = 3, tied: bool = True, freeze: tuple[str, ...] = (), dtype: str = "float32") -> ModelSpec:
    """A table, blocks of two sections, a norm, a head."""
    params = [ParamInfo("emb.weight", (211, 48))]
    for i in range(layers):
        params += [ParamInfo(f"layers.{i}.w", (130, 48)), ParamInfo(f"layers.{i}.b", (37,))]
    params += [ParamInfo("norm.weight", (48,))]
    if not tied:
        params += [ParamInfo("head.weight", (211, 48))]
    head = TableInfo("head", "emb.weight" if tied else "head.weight")
    blocks = [f"layers.{i}" for i in range(layers)]
    order = ["emb", *blocks, "norm", "head"]
    return make_spec(params, blocks, [TableInfo("emb", "emb.weight")], [head], dtype=dtype, order=order, freeze=freeze)


def one_pass(spec: ModelSpec, micros: int, first_call: int = 0, last: bool = True) -> tuple[Phase, ...]:
    """Every seat forward, then backward down to the lowest trained one."""
    turns = []
    for index, seat in enumerate(spec.seats):
        many = micros if seat.kind in ("block", "module") else 1
        turns.append(Turn(index, first_call + index, many, index >= spec.first_trained_seat))
    back = tuple(t for t in reversed(turns) if t.graded)
    return Forward(tuple(turns)), Backward(back, last)


def trained_units(spec: ModelSpec) -> tuple[int, ...]:
    return tuple(i for i, unit in enumerate(spec.units) if unit.trainable)


def tables(spec: ModelSpec) -> tuple[int, ...]:
    """Table seats that train."""
    found = (i for i, s in enumerate(spec.seats) if s.kind == "table")
    return tuple(i for i in found if any(spec.units[u].trainable for u in spec.seats[i].units))


def step_program(
    spec: ModelSpec, placement: Placement, micros: int = 2, sweeps: int = 1, flush: bool = True, fetched: bool = False
) -> Program:
    """The sequential program of a step in which all updates of the step before are due, and with `flush` of its own at
    the end; `fetched`: what the first of them read was left in slots by the program before, which had none."""
    phases: list[Phase] = []
    for sweep in range(sweeps):
        phases += one_pass(spec, micros, sweep * len(spec.seats), sweep == sweeps - 1)
    phases.append(Finish(tables(spec)))
    left = found(leaves(spec, placement, phases)) if fetched else ()
    program = build(spec, placement, tuple(phases), Owed(trained_units(spec), left=left))
    if not flush:
        return program
    step = tuple(op for op in program.ops if op.phase != "ahead")
    stay = {value: slot for value, slot in program.left.items() if not value.endswith("@ahead")}
    own = build(spec, placement, (Updates(),), Owed(trained_units(spec), left=found(stay)))
    return Program(step + own.ops, held=program.held)


def identity(op: Op) -> Identity:
    """What an op is, without its places."""
    return op.verb, op.phase, op.seat, op.unit, op.part, op.call, op.micro, op.nbytes


@dataclass
class Meaning:
    """Values by place, and per lane what each op did to which values."""

    values: dict[str, int] = field(default_factory=dict)
    lanes: dict[str, list[tuple[Identity, tuple[int, ...]]]] = field(default_factory=dict)

    def run(self, op: Op) -> None:
        """Do one op.  What is fetched ahead by one program is in the same place for the next."""
        found = tuple(self.values.get(place, hash(("at first", place))) for place in op.reads)
        self.lanes.setdefault(op.lane, []).append((identity(op), found))
        for index, place in enumerate(op.writes):
            self.values[place.replace("@ahead", "@host")] = hash((identity(op), found, index))

    def at_rest(self) -> dict[str, int]:
        """Values at home: places of parts, and saved inputs."""
        return {p: v for p, v in self.values.items() if "#" not in p and ("." in p)}

    def same_as(self, other: Meaning, homes: Iterable[str] = ()) -> bool:
        """Whether the lanes did the same and the same is at rest (in `homes`, or wherever both have something)."""
        mine, theirs = self.at_rest(), other.at_rest()
        both = set(homes) or mine.keys() & theirs.keys()
        return self.lanes == other.lanes and all(mine.get(p) == theirs.get(p) for p in both)


def meaning(program: Program) -> Meaning:
    """The meaning of a program done top to bottom."""
    found = Meaning()
    for op in program.ops:
        found.run(op)
    return found


def stagger_bytes(spec: ModelSpec) -> int:
    """What the stagger of its arrays adds to the state of a model whose parts all fill whole pages: a page a part."""
    return PAGE_BYTES * sum(len(unit.trained_parts) for unit in spec.units)
