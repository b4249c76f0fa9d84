"""Files that several ranks write at once: one directory, of which each writes its shards, and one list at the end.

Rank 0 makes the directory and the files, all write into them, and rank 0 joins their checksums.  What goes wrong on one
rank is raised on all, so nobody waits for a rank that has given up.  Left to others: directories (`aside.py`), what is
in the files (`state.py`, `export.py`).  The trade-off: a list of every piece and its checksum goes to all ranks, some
megabytes for a 13B model.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from offloadz.model.aside import appearing, require_room
from offloadz.model.files import FileRecord, StreamWriter
from offloadz.plan.errors import DoesNotFit, RankFailed
from offloadz.runtime.ranks import Solo
from offloadz.runtime.session import Session

Answer = TypeVar("Answer")
Entries = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]


def together(ranks: Solo, work: Callable[[], Answer]) -> Answer:
    """Do `work` on every rank; an error of one is raised on all."""
    error: Exception | None = None
    try:
        answer = work()
    except Exception as found:
        error = found
    told = ranks.each(None if error is None else str(error) or type(error).__name__)
    if error is not None:
        raise error
    for rank, text in enumerate(told):
        if text is not None:
            raise RankFailed(f"rank {rank}: {text}")
    return answer


def end_alike(run: Any, error: BaseException) -> None:
    """A call of a run ends with `error`: where one does on all ranks, at the same place, they go on from where they
    were, else this rank cannot."""
    session = run.session
    if isinstance(error, Exception):
        run.ranks.fail(session.begun, session.calls, session.walk.num_computed if session.walk is not None else -1)
    else:
        run.ranks.give_up()


def writes(run: Any) -> bool:
    """Whether files get this rank's parts: they are its own, or those that all have and rank 0 writes."""
    return run.ranks.rank == 0 or run.session.spec.share.stage > 0


NOTHING = -0.0
"""What changes no number that it is added to, not even the sign of a zero."""


def joined(session: Session, tensors: Iterable[Tensor], what: str) -> None:
    """Tensors in which each rank has filled its shards, the rest being NOTHING: made whole on all ranks, in place."""
    if session.spec.share.shards == 1:
        return
    for tensor in tensors:
        wide = tensor.float().view(-1)
        session.room.ranks.sum(wide, what)
        tensor.view(-1).copy_(wide)


def require_memory(ranks: Solo, nbytes: int, free: int, what: str, instead: str) -> None:
    """DoesNotFit with both figures where every rank is to make `nbytes` and one found less than `free` for all."""
    need, all_of = nbytes * ranks.size, f" on all {ranks.size} ranks" if ranks.size > 1 else ""

    def check() -> None:
        if need > free:
            raise DoesNotFit(f"{what} {need} bytes{all_of}, {free} are available; {instead}")

    together(ranks, check)


def by_first(ranks: Solo, work: Callable[[], object]) -> None:
    """Have rank 0 do what is to be done once; the others wait for it."""
    together(ranks, work if ranks.rank == 0 else lambda: None)


@contextmanager
def appearing_to_all(ranks: Solo, target: Path, nbytes: int, purpose: str) -> Iterator[Path]:
    """`aside.appearing` for all ranks, after a look at the room for `nbytes`: the directory that all write in."""
    stack = ExitStack()

    def made() -> str:
        if ranks.rank:
            return ""
        require_room(target.parent, nbytes, purpose)
        return str(stack.enter_context(appearing(target)))

    scratch = Path(ranks.first(together(ranks, made)))
    try:
        yield scratch
    except BaseException:
        stack.__exit__(*sys.exc_info())
        raise
    together(ranks, stack.close)


def write_together(
    ranks: Solo,
    files: Mapping[Path, Entries],
    fill: Callable[[dict[Path, StreamWriter]], None],
    *,
    metadata: Mapping[str, str] | None = None,
    verify: bool = False,
) -> dict[str, FileRecord]:
    """New files of tensors, filled by `fill` on every rank; their records by name, on rank 0 alone."""
    writers: dict[Path, StreamWriter] = {}

    def opened() -> None:
        for path, entries in files.items():
            writers[path] = StreamWriter(path, entries, metadata, joins=ranks.rank > 0)

    def ended() -> dict[str, FileRecord]:
        if ranks.rank:
            for writer in writers.values():
                writer.sync()
            return {}
        for path, writer in writers.items():
            for told in runs[1:]:
                writer.add_runs(told[path.name])
        return {path.name: writer.finish(verify=verify) for path, writer in writers.items()}

    try:
        by_first(ranks, opened)
        together(ranks, opened if ranks.rank else lambda: None)  # files that are there now
        together(ranks, lambda: fill(writers))
        runs = ranks.each({path.name: writer.runs() for path, writer in writers.items()})
        return together(ranks, ended)
    finally:
        for writer in writers.values():
            writer.close()
