"""A run's swap paths opened: what moves bytes on each, and how much of every extent each one gets.

The weights of several paths are measured once, at the first start, and from then on are those that lie beside the
state.  Left to others: shares and files (`memory/`), the probes (`runtime/transfer.py`).  The trade-off: the probe
writes up to 128 MiB to each path, one after the other, which takes under a second on a drive.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from offloadz.memory.disk import DiskTier
from offloadz.memory.record import Saved
from offloadz.memory.stripes import SMALL_BYTES, WEIGHT_SUM, weights_of
from offloadz.memory.swapdir import STATE, owner_name
from offloadz.memory.tier import PIECE_BYTES
from offloadz.plan.answer import Plan
from offloadz.plan.errors import CannotGoOn, DoesNotFit
from offloadz.plan.paths import directory_of
from offloadz.plan.rooms import drive_of, rooms_of
from offloadz.plan.spec import aligned
from offloadz.plan.words import human
from offloadz.runtime.ranks import Solo
from offloadz.runtime.transfer import NativeTransfer, probe_speed, transfer_for

PROBE_BYTES = 128 << 20
"""Most that is written to a path to find its speed."""

LEAST_WEIGHT = WEIGHT_SUM // 50
"""A path that has room for less than this is full, and of no use."""


@dataclass(frozen=True)
class Drives:
    """The swap paths of a run; `adopt` is a directory of state to take over instead of filling them."""

    paths: Sequence[Path]
    checksum: bool
    io: str
    output: str | Path | None
    adopt: Path | None
    ranks: Solo
    """Each has its own directory there."""

    def open(self, plan: Plan, copies: int, saved: Saved | None) -> DiskTier:
        """The tier of a plan on these paths.

        Raises CannotGoOn where `saved` lies on other paths than these, DoesNotFit where one has no room at all.
        """
        rank, numbers = self.ranks.rank, self.ranks.each(len(self.paths))
        owner = owner_name(self.output) + (f"/rank-{rank}" if rank else "")
        paths = self.paths if saved is None else _in_its_order(self.paths, saved, owner)
        transfers: list[NativeTransfer] = []
        tier = None
        try:
            for path in paths:
                transfers.append(transfer_for(path, self.io))
            (first, *others) = zip(paths, transfers, strict=True)
            tier = DiskTier(
                *first, *others, checksum=self.checksum, owner=owner, copies=copies, adopt=saved,
                checkpoints=Path(self.output) / "checkpoints" if self.output else None, first=sum(numbers[:rank]),
            )  # fmt: skip
            if tier.shadow is not None:
                tier.shadow.peers = self.ranks
                tier.shadow.record = Path(self.ranks.first(str(tier.shadow.record)))
            if others and saved is None:
                tier.weights = self._weights(paths, transfers, tier, plan)
            return tier
        except BaseException:
            for closing in transfers if tier is None else [tier]:
                closing.close()
            raise

    def _weights(
        self, paths: Sequence[Path], transfers: Sequence[NativeTransfer], tier: DiskTier, plan: Plan
    ) -> tuple[int, ...]:
        """By measured speed, as far as each path has room for what the plan puts on all of them."""
        needed = max(plan.peak["disk"], 1)
        rooms = self._rooms(paths, plan)
        most = [min(WEIGHT_SUM, room * WEIGHT_SUM // needed) for room in rooms]
        if sum(most) < WEIGHT_SUM or min(most) < LEAST_WEIGHT:
            told = ", ".join(f"{path} has {human(room)}" for path, room in zip(paths, rooms, strict=True))
            raise DoesNotFit(
                f"offload.swap: {human(needed, up=True)} are needed on {len(paths)} paths, and {told} to use; free "
                "some, or leave out the path that is full"
            )
        nbytes = min(PROBE_BYTES, aligned(needed, PIECE_BYTES), min(rooms) // PIECE_BYTES * PIECE_BYTES)
        measured = zip(tier.paths, transfers, strict=True)
        speeds = [probe_speed(f.path, io, f.probe.direct, max(nbytes, PIECE_BYTES))[:2] for f, io in measured]
        return weights_of(speeds, most)

    def _rooms(self, paths: Sequence[Path], plan: Plan) -> list[int]:
        """Bytes for the shares of each path, less one extent that is not cut: it may overrun a share."""
        output = Path(self.output) if self.output else None
        beside = [output is not None and drive_of(path) == drive_of(output) for path in paths]
        counted = plan.limits["checkpoint"] is not None  # else nobody said that there will be any
        saved = plan.peak["checkpoint"] * counted // max(1, sum(beside))
        rooms = rooms_of(paths, output)
        return [max(0, room - saved * kept - SMALL_BYTES) for room, kept in zip(rooms, beside, strict=True)]


def _in_its_order(paths: Sequence[Path], saved: Saved, owner: str) -> Sequence[Path]:
    """The paths as the state that is to be gone on from numbers them; their order in the configuration is free."""
    own = {directory_of(path, owner) / STATE: path for path in paths}
    in_place = any(place in own for place in saved.directories)
    if len(saved.weights) != len(paths) or (in_place and set(own) != set(saved.directories)):
        lies = ", ".join(dict.fromkeys(map(str, saved.directories)))
        raise CannotGoOn(f"it is cut for {len(saved.weights)} swap paths ({lies}), offload.swap names {len(paths)}")
    return [own[place] for place in saved.directories] if in_place else paths
