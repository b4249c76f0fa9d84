"""A training step as data: small ops over named places, with a text form.

An `Op` says on which lane it runs, what it does, for which unit, and which places it reads and writes.  Before `passes`
a place is a value on a tier (`w3@host`); after it, a home (`w3.0@disk`) or a numbered slot (`host.w#1`).  Every order
that matters between two ops follows from the places they share; nothing else orders them.

Kinds of values: `w` weights, `p` a part of the weights on its way through an update, `s` a part of the optimizer state,
`g` gradients, `h` a part of a gradient on its way into an update, `x` the saved input of a seat, `k` a kept graph, `y`
kept results of products.
Where an update is written beside what is valid, that is `s3.0@spare` in memory and `s3.0@next` on disk.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

LANES = ("device", "h2d", "d2h", "cpu", "disk_read", "disk_write", "net")
"""In-order queues.  `device` is the computation itself: a walk pauses there until the model's own code arrives."""


class Op(NamedTuple):
    """One small piece of work.  `after` are indices of earlier ops; `enters` are places first met in this program.

    A tuple, since a plan makes a hundred thousand of them and passes make each anew.
    """

    lane: str
    verb: str
    phase: str
    """forward | backward | arrival | finish | ahead | update: the part of the step; of a walk that is given up only
    updates are still done."""
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    seat: int = -1
    unit: int = -1
    part: int = -1
    call: int = -1
    micro: int = -1
    nbytes: int = 0
    """Bytes moved (transfers) or elements touched (device, cpu): what the op costs on its lane."""
    after: tuple[int, ...] = ()
    enters: tuple[str, ...] = ()

    def at(self, reads: tuple[str, ...], writes: tuple[str, ...]) -> Op:
        """The same work over other places (made of slices: a 13B step has twenty thousand ops)."""
        return Op._make((*self[:_READS], reads, writes, *self[_READS + 2 :]))

    def moving(self, nbytes: int) -> Op:
        """The same work on so many bytes."""
        return Op._make((*self[:_BYTES], nbytes, *self[_BYTES + 1 :]))

    def linked(self, after: tuple[int, ...], enters: tuple[str, ...]) -> Op:
        """The same work with its edges."""
        return Op._make((*self[:_AFTER], after, enters))

    def text(self) -> str:
        """One line: `lane verb phase seat/unit/part/call/micro nbytes reads -> writes after ... enters ...`."""
        where = "/".join(str(v) for v in (self.seat, self.unit, self.part, self.call, self.micro))
        line = f"{self.lane:<10} {self.verb:<9} {self.phase:<8} {where:<14} {self.nbytes:>11} "
        line += f"{','.join(self.reads) or '-'} -> {','.join(self.writes) or '-'}"
        line += f" after {','.join(map(str, self.after))}" if self.after else ""
        return line + (f" enters {','.join(self.enters)}" if self.enters else "")

    @staticmethod
    def parse(line: str) -> Op:
        """The op of a line made by `text`; raises ValueError naming a line that is none."""
        words = line.split()
        if len(words) < 8 or words[6] != "->":
            raise ValueError(f"not an op: {line!r}; needed: lane verb phase s/u/p/c/m bytes reads -> writes")
        seat, unit, part, call, micro = map(int, words[3].split("/"))
        tail = dict(zip(words[8::2], words[9::2], strict=True))
        return Op(
            words[0], words[1], words[2], _names(words[5]), _names(words[7]), seat, unit, part, call, micro,
            int(words[4]), tuple(map(int, _names(tail.get("after", "")))), _names(tail.get("enters", "")),
        )  # fmt: skip


_READS, _BYTES, _AFTER = map(Op._fields.index, ("reads", "nbytes", "after"))
"""Where in an op its places begin, its bytes are, and its edges begin, with which it ends."""


@dataclass(frozen=True)
class Program:
    """Ops in submission order, with the number of slots of each pool they were placed in.

    `held`: values that are in slots when it begins, and those slots; `left`: likewise when it has ended.
    """

    ops: tuple[Op, ...]
    slots: dict[str, int] = field(default_factory=dict)
    held: Mapping[str, str] = field(default_factory=dict)
    left: Mapping[str, str] = field(default_factory=dict)

    def text(self, failed: int = -1) -> str:
        """The whole program, a numbered line per op; `failed` marks the line at which a run stopped."""
        mark = ["<-- failed here" if i == failed else "" for i in range(len(self.ops))]
        return "\n".join(f"{i:>5} {op.text()} {mark[i]}".rstrip() for i, op in enumerate(self.ops))

    @staticmethod
    def parse(text: str) -> Program:
        return Program(tuple(Op.parse(line.strip().split(None, 1)[1]) for line in text.splitlines() if line.strip()))

    def __len__(self) -> int:
        return len(self.ops)


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(",")) if text not in ("", "-") else ()


def part_named(place: str) -> tuple[str, int, int]:
    """Kind, unit and part of a place at rest: ("s", 3, 0) of `s3.0@host`."""
    unit, part = place[1 : place.index("@")].split(".")
    return place[0], int(unit), int(part)
