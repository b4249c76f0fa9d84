"""The other ranks of a run: gather, scatter, sum, agree.  `Solo` answers as a group of one, so nobody asks how many.

Built on torch.distributed and gloo: bytes of the model go through one group, from the `net` lane alone; a second one is
for the small exchanges of the thread that computes (whose turn it is, sums of losses, rows looked up), a third one for
flips, from the lane that writes, so none waits for another.  [Note: ranks do the same in the same order] All groups
match calls by their order.  That
order follows from the program, and every turn is agreed before it is taken; who comes with another turn, or not at all,
ends the run on all ranks.

The trade-off: an exchange before each turn costs some tenths of a millisecond, twice a block and step, and ranks that
are given unequal rows wait for the slowest at every block.  Gloo's own reduce-scatter is an all-reduce whose rest is
thrown away (torch 2.13), twice the bytes, and its all-reduce adds in the order of a ring, another one for every piece;
here every rank sends each other its shard and adds what it got, in the order of ranks, so that a sum is the same in
every stage and does not depend on timing.
"""

from __future__ import annotations

import atexit
import json
import os
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from offloadz.plan.errors import ConfigError, RankFailed
from offloadz.plan.share import ALONE, Share
from offloadz.runtime.ways import Ways

TURN_S = 600.0
"""How long ranks wait for one another at a turn: all have the same blocks, so only the rows differ."""

GROUP_S = 24 * 3600.0
"""How long any other exchange may take, such as the others' wait while one writes files; a dead rank shows at once."""

MEET_S = 600.0
"""How long a rank waits for all others to be there: they start together, and read a tokenizer's libraries at most."""

START = "start with torchrun --nproc-per-node N -m offloadz train CONFIG.toml"

FRAME = 8
"""Figures of a small exchange, the first of which says what it is."""

SUM_ELEMENTS = 1 << 18
"""Elements of each rank that a sum over whole values takes at a time: a buffer of 1 MiB a rank."""

FAILED, FAILED_S = "end of a call with an error", 60.0
"""What ranks with an error come to, and how long one waits to hear whether all others have one too."""

GONE_S = 5.0
"""How long is looked for the rank whose process has ended, once a connection is closed."""

SEEN_S = 1.0
"""The same where another thread of this rank has found it closed before."""


class Solo:
    """A group of one."""

    rank, size = 0, 1

    def share(self, stage: int) -> Share:
        """What this rank keeps in a stage of ZeRO."""
        return ALONE if self.size == 1 else Share(self.rank, self.size, stage)

    def meet(self, device: torch.device) -> str:
        """Make ready for tensors of a device that each rank has its own of; returns why these go through the host, if
        they do.  Raises ConfigError where two ranks have the same one, or one of them none."""
        return ""

    def gather(self, whole: Tensor, own: Tensor, operation: str) -> None:
        """Fill `whole` with the equal pieces `own` of all ranks, in their order; `own` may be its place in `whole`."""
        raise NotImplementedError

    def scatter(self, whole: Tensor, terms: Tensor, operation: str) -> None:
        """Sum `whole` (fp32) over ranks; this rank's piece of the sum stands in its place in `terms`, as long."""
        raise NotImplementedError

    def sum(self, whole: Tensor, operation: str) -> None:
        """Sum `whole` (fp32) over ranks, in place."""
        raise NotImplementedError

    def rows(self, lists: Sequence[Tensor], read: Callable[[Tensor], Tensor], operation: str) -> list[Tensor]:
        """`lists[q]`: ids that rank q has and this one wants; returns for each what rank q's `read` makes of them."""
        return [read(ids) for ids in lists]

    def totals(self, *values: float) -> tuple[float, ...]:
        """Each value summed over ranks, in their order."""
        return values

    def most(self, value: int) -> int:
        """The largest over ranks."""
        return value

    def agree(self, turn: str, expected: bool) -> bool:
        """Whether every rank expected this turn; RankFailed where another rank is about to take another one."""
        return expected

    def each(self, value: Any) -> list[Any]:
        """What every rank gives (as JSON has it), in their order."""
        return [value]

    def first(self, value: Any) -> Any:
        """What rank 0 gives."""
        return self.each(value)[0]

    def beside(self, work: Callable[[], bytes]) -> list[bytes]:
        """See `memory/peers.py`."""
        return [work()]

    def fail(self, *reached: float) -> None:
        """A call of this rank ended with an error when it had `reached` so much.  Where that is so on all ranks, all go
        on as they were; else this one gives up."""

    def give_up(self) -> None:
        """This rank cannot go on: whatever it is asked from now on fails at once."""


class Group(Solo):
    """Several processes under a launcher's usual variables, or in the process group that is there already."""

    def __init__(self) -> None:
        if not dist.is_initialized():
            _require_variables()
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one machine, whatever its name resolves to
            _meet()
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        # Gloo whatever else there is: for memory of the host, and for what is said.
        self._data, self._talk, self._flips = (
            dist.new_group(backend="gloo", timeout=timedelta(seconds=GROUP_S)) for _ in ("data", "talk", "flips")
        )
        self._ways = Ways(self._data, self.rank, self.size)
        self._given_up = False
        self._pids: list[int] = []
        self._pids = [int(pid) for pid in self.each(os.getpid())]

    def meet(self, device: torch.device) -> str:
        every = self.each(str(device))
        shared, mixed = len(set(every)) < self.size, len({name.partition(":")[0] for name in every}) > 1
        if mixed or (shared and device.type != "cpu"):
            raise ConfigError(
                f"{self.size} ranks compute on {', '.join(every)}; needed: all on the CPU, or one device for each, "
                'which offload.device = "auto" takes by LOCAL_RANK'
            )
        return self._ways.meet(device, lambda found: next(filter(None, self.each(found)), ""))

    def gather(self, whole: Tensor, own: Tensor, operation: str) -> None:
        with self._during(operation):
            self._ways.gather(whole, own)

    def scatter(self, whole: Tensor, terms: Tensor, operation: str) -> None:
        with self._during(operation):
            self._ways.swap(terms, whole)
        self._summed(terms)

    def _summed(self, terms: Tensor) -> Tensor:
        """The sum of equal terms, one of each rank, in the place of this rank's."""
        first, *middle, last = terms.view(self.size, -1).unbind()
        for term in middle:
            _add(first, first, term)
        own = terms.view(self.size, -1)[self.rank]
        _add(own, first, last)
        return own

    def sum(self, whole: Tensor, operation: str) -> None:
        """Piece by piece each rank adds its share of it, which then goes to all."""
        even = len(whole) // self.size * self.size
        rest = whole.new_zeros(self.size)
        rest[: len(whole) - even] = whole[even:]
        terms = whole.new_empty(SUM_ELEMENTS * self.size)
        with self._during(operation):
            for piece in filter(len, (*whole[:even].split(len(terms)), rest)):
                got = terms[: len(piece)]
                self._ways.swap(got, piece)
                self._ways.gather(piece, self._summed(got))
        whole[even:] = rest[: len(whole) - even]

    def rows(self, lists: Sequence[Tensor], read: Callable[[Tensor], Tensor], operation: str) -> list[Tensor]:
        with self._during(operation):
            wanted = self._swapped([len(ids) for ids in lists])
            asked = torch.empty(sum(wanted), dtype=torch.int64)
            counts = [len(ids) for ids in lists]
            dist.all_to_all_single(asked, torch.cat(list(lists)), wanted, counts, group=self._talk)
            found = [read(ids).cpu() for ids in asked.split(wanted)]
            out = found[0].new_empty((sum(counts), *found[0].shape[1:]))
            dist.all_to_all_single(out, torch.cat(found), counts, wanted, group=self._talk)
            return list(out.split(counts))

    def _swapped(self, counts: list[int]) -> list[int]:
        given = torch.tensor(counts)
        out = torch.empty_like(given)
        dist.all_to_all_single(out, given, group=self._talk)
        return [int(n) for n in out]

    def totals(self, *values: float) -> tuple[float, ...]:
        told = self._frames(f"the sums of {len(values)} figures over ranks", *values)
        return tuple(sum(row[i] for row in told) for i in range(len(values)))

    def most(self, value: int) -> int:
        return int(max(row[0] for row in self._frames("the largest figure over ranks", value)))

    def agree(self, turn: str, expected: bool) -> bool:
        return all(row[0] for row in self._frames(turn, expected, most_s=TURN_S))

    def each(self, value: Any) -> list[Any]:
        told = self._exchanged(json.dumps(value).encode(), "an exchange of facts", self._talk)
        return [json.loads(data) for data in told]

    def _exchanged(self, data: bytes, operation: str, group: Any) -> list[bytes]:
        """The bytes of every rank."""
        lengths = [int(row[0]) for row in self._frames(operation, len(data), group=group)]
        padded = bytearray(data.ljust(max(lengths), b"\0"))  # by no loop of torch's: a lane has no team of threads
        told = self._table(torch.frombuffer(padded, dtype=torch.uint8), operation, GROUP_S, group)
        return [row[:n].numpy().tobytes() for row, n in zip(told, lengths, strict=True)]

    def beside(self, work: Callable[[], bytes]) -> list[bytes]:
        """In a group of its own: the lane that flips waits for nobody but those of the other ranks."""
        error: Exception | None = None
        try:
            said = b"+" + work()
        except Exception as found:
            said, error = b"-" + (str(found) or type(found).__name__).encode(), found
        told = self._exchanged(said, "a flip of the state on disk", self._flips)
        if error is not None:
            raise error
        for rank, text in enumerate(told):
            if text[:1] == b"-":
                raise RankFailed(f"rank {rank}: {text[1:].decode()}")
        return [text[1:] for text in told]

    def fail(self, *reached: float) -> None:
        with suppress(RankFailed):  # the error under way is the one to see
            told = self._frames(FAILED, *reached, most_s=FAILED_S)
            if any(row != told[0] for row in told):
                self.give_up()

    def give_up(self) -> None:
        self._given_up = True

    def _frames(self, operation: str, *values: float, most_s: float = GROUP_S, group: Any = None) -> list[list[float]]:
        """A few figures of every rank.  All frames have one length and say what they are of, so a rank that does
        something else is found out and not misunderstood."""
        key = _key(operation)
        own = torch.zeros(FRAME, dtype=torch.float64)
        own[: 1 + len(values)] = torch.tensor([key, *values], dtype=torch.float64)
        told = self._table(own, operation, most_s, group or self._talk).tolist()
        odd = [rank for rank, row in enumerate(told) if row[0] != key]
        if odd:
            self.give_up()
            where = f"rank {self.rank} comes to the {operation}, rank {odd[0]}"
            if told[odd[0]][0] == _key(FAILED):
                raise RankFailed(f"{where} ended with an error, which it tells: start them again")
            raise RankFailed(
                f"{where} to something else: all ranks must call the "
                "model and the run alike; a layer that only some of them take cannot be trained over several ranks"
            )
        return [row[1:] for row in told]

    def _table(self, own: Tensor, operation: str, most_s: float, group: Any) -> Tensor:
        """The equal small tensors of all ranks, a row each."""
        out = own.new_empty(self.size * own.numel())
        with self._during(operation):
            work = dist.all_gather_single(out, own, group=group, async_op=True)
            work.wait(timedelta(seconds=most_s))
        return out.view(self.size, -1)

    @contextmanager
    def _during(self, operation: str) -> Iterator[None]:
        """Errors of torch.distributed become RankFailed, with the rank at fault where it can be told."""
        if self._given_up:
            raise RankFailed(self._story(operation, RuntimeError("this one had given up"), SEEN_S))
        try:
            yield
        except RuntimeError as error:
            self.give_up()
            raise RankFailed(self._story(operation, error)) from error

    def _story(self, operation: str, error: Exception, most_s: float = GONE_S) -> str:
        until_s = time.monotonic() + most_s
        while not (gone := [r for r, pid in enumerate(self._pids) if _has_ended(pid)]) and time.monotonic() < until_s:
            time.sleep(0.1)
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        who = f"rank {gone[0]} (process {self._pids[gone[0]]}) has ended" if gone else f"another rank did not ({first})"
        return f"{who}, while rank {self.rank} was at {operation}: this one ends too; the last checkpoint is as it was"


_group: Group | None = None


def join() -> Solo:
    """The group of this process: several ranks where a launcher (torchrun) or the caller has begun them, else one."""
    global _group
    told = os.environ.get("WORLD_SIZE", "").strip()
    several = dist.get_world_size() > 1 if dist.is_available() and dist.is_initialized() else told not in ("", "0", "1")
    if not several:
        return Solo()
    if _group is None or _group._given_up:
        if _group is None:
            atexit.register(_leave)
        _group = Group()
    return _group


def _leave() -> None:
    """End torch's threads while the interpreter is whole: one may have to give back a tensor that Python made, and ends
    the process where it cannot.  Where a rank has given up they may wait for what never comes, and are left."""
    if _group is not None and not _group._given_up:
        if dist.is_initialized():
            dist.destroy_process_group()
        del _group._data, _group._talk, _group._flips, _group._ways  # their threads end with the last who holds them


def _meet() -> None:
    """The process group of all ranks; what is exchanged goes through others, so this one's limit is that of meeting."""
    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=MEET_S))
    except (RuntimeError, ValueError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise RankFailed(
            f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} did not meet all others at "
            f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']} within {MEET_S:.0f} s ({first}); {START}"
        ) from error


def _require_variables() -> None:
    """ConfigError where a launcher's variables are missing, or none that a launcher sets."""
    told = {name: os.environ.get(name, "").strip() for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    absent = [name for name, value in told.items() if not value]
    if absent:
        raise ConfigError(f"WORLD_SIZE is {told['WORLD_SIZE']} and {', '.join(absent)} not set; {START}")
    odd = [name for name, value in told.items() if name != "MASTER_ADDR" and not value.isdecimal()]
    if odd or int(told["RANK"]) >= int(told["WORLD_SIZE"]):
        found = ", ".join(f"{name} is {told[name]}" for name in odd or ("RANK", "WORLD_SIZE"))
        raise ConfigError(f"{found}; needed: whole numbers, and RANK below WORLD_SIZE; {START}")


def _has_ended(pid: int) -> bool:
    """Whether a process of this machine is gone, or dead and only not asked after yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (OSError, IndexError):
        return True


def _key(operation: str) -> float:
    """What a small exchange says that it is of."""
    return float(zlib.crc32(operation.encode()))


PIECE = 1 << 14
"""Elements that torch adds on the calling thread alone (see [Note: one team for the update] in `lanes.py`)."""


def _add(out: Tensor, a: Tensor, b: Tensor) -> None:
    piece = PIECE if out.is_cpu else max(1, len(out))
    for to, x, y in zip(out.split(piece), a.split(piece), b.split(piece), strict=True):
        torch.add(x, y, out=to)
