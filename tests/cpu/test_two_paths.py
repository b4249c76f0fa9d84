"""Several swap paths at the level of the tier: shares, both at once, copies, and errors that name the right path."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from test_copies import contents, copied
from test_transfer import LENGTHS, random_bytes

from offloadz.memory.disk import DiskTier
from offloadz.memory.host import HostPool
from offloadz.memory.record import LAYOUT_FILE, Saved, home_of, layout_text, read_saved
from offloadz.memory.stripes import path_of, shares, weights_of
from offloadz.memory.tier import PIECE_BYTES, Extent, TransferFailed
from offloadz.plan.errors import DamagedState, DiskFailed, DoesNotFit
from offloadz.plan.spec import aligned
from offloadz.runtime.transfer import ThreadTransfer

LARGE = 18 * PIECE_BYTES
SIZES = (5000, 12 * PIECE_BYTES + 77, 4096, 9 * PIECE_BYTES)


def opened(*paths: Path, weights: tuple[int, ...] = (600, 400), adopt: Saved | None = None, **how: Any) -> DiskTier:
    ios = how.pop("ios", None) or [ThreadTransfer(2) for _ in paths]
    (first, *others) = zip(paths, ios, strict=True)
    tier = DiskTier(*first, *others, owner="run", adopt=adopt, **how)
    if adopt is None:
        tier.weights = weights
    return tier


@pytest.fixture
def buffer() -> torch.Tensor:
    return HostPool(LARGE).take("buffer", LARGE)


def test_all_lengths_come_back_whole_and_in_parts(tmp_path: Path, buffer: torch.Tensor) -> None:
    tier = opened(tmp_path / "a", tmp_path / "b", tmp_path / "c", weights=(500, 200, 300))
    extents = [tier.reserve("state", f"weights/{n}", n) for n in LENGTHS]
    tier.allocate()
    for i, extent in enumerate(extents):
        buffer[: LENGTHS[i]] = random_bytes(LENGTHS[i], i)
        tier.write(extent, buffer)
    assert tier.bytes_written == sum(map(aligned, LENGTHS))
    for i, extent in enumerate(extents):
        wanted = random_bytes(LENGTHS[i], i)
        tier.read(extent, buffer.fill_(0x33))
        assert torch.equal(buffer[: LENGTHS[i]], wanted) and not buffer[LENGTHS[i] : aligned(LENGTHS[i])].any()
        for start in range(0, LENGTHS[i], 3 * PIECE_BYTES):  # across the borders of shares
            stop = min(start + 5 * PIECE_BYTES, LENGTHS[i])
            tier.read(extent, buffer.fill_(0x33), stop - start, start)
            assert torch.equal(buffer[: stop - start], wanted[start:stop]), (i, start)
    wanted, rows = random_bytes(LENGTHS[-1], len(LENGTHS) - 1), torch.tensor([0, 5, 7000, 16000])
    out = torch.empty((4, 1000), dtype=torch.uint8)
    tier.read_rows(extents[-1], 1000, 4, rows, out)
    assert torch.equal(out, wanted[4:16001004].view(-1, 1000)[rows])
    lengths = [path.stat().st_size for path in sorted(tmp_path.rglob("weights*.bin"))]
    assert [path.name for path in sorted(tmp_path.rglob("*.bin"))] == ["weights.bin", "weights@1.bin", "weights@2.bin"]
    assert sum(lengths) == sum(map(aligned, LENGTHS)) and min(lengths) >= PIECE_BYTES
    tier.close()
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


class Meeting(ThreadTransfer):
    """Moves nothing before another one moves too."""

    barrier = threading.Barrier(2, timeout=60)

    def read(self, *args: Any) -> None:
        self.barrier.wait()
        super().read(*args)

    def write(self, *args: Any) -> None:
        self.barrier.wait()
        super().write(*args)


def test_both_paths_are_at_work_at_once(tmp_path: Path, buffer: torch.Tensor) -> None:
    tier = opened(tmp_path / "a", tmp_path / "b", ios=[Meeting(1), Meeting(1)])
    extent = tier.reserve("state", "weights/a", LARGE)
    tier.allocate()
    buffer.copy_(random_bytes(LARGE, 1))
    tier.write(extent, buffer)
    tier.read(extent, buffer.zero_())
    assert torch.equal(buffer, random_bytes(LARGE, 1))
    tier.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("share")]


class Broken(ThreadTransfer):
    """A drive that fails."""

    def write(self, *args: Any) -> None:
        raise TransferFailed(errno.EIO, "write", 0, 4096, 0)


def test_errors_name_the_right_path(tmp_path: Path, buffer: torch.Tensor) -> None:
    tier = opened(tmp_path / "a", tmp_path / "b")
    extent = tier.reserve("state", "weights/a", LARGE)
    tier.allocate()
    tier.write(extent, buffer.fill_(7))
    for number in (0, 1):
        path = tier.paths[number].path / f"state/weights{'@1' if number else ''}.bin"
        with path.open("r+b") as file:
            file.seek(2 * PIECE_BYTES + 9)
            file.write(b"\x5a")
        with pytest.raises(DamagedState, match=rf"weights/a: file {path} is damaged at byte {2 * PIECE_BYTES}"):
            tier.read(extent, buffer)
        tier.write(extent, buffer.fill_(7))
    tier.close()
    tier = opened(tmp_path / "a", tmp_path / "b", ios=[ThreadTransfer(1), Broken(1)])
    extent = tier.reserve("state", "weights/a", LARGE)
    tier.allocate()
    with pytest.raises(DiskFailed, match=rf"file {tier.paths[1].path}/state/weights@1.bin"):
        tier.write(extent, buffer)
    with pytest.raises(DamagedState, match="left half-written"):
        tier.read(extent, buffer)
    tier.close()


def test_a_full_path_is_named_and_nothing_stays_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = opened(tmp_path / "a", tmp_path / "b")
    small = tier.reserve("scratch", "gradients/small", 4096)
    tier.allocate()
    real = os.posix_fallocate

    def full(fd: int, offset: int, length: int) -> None:
        if "@1" in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(fd, offset, length)

    tier.reserve("state", "weights/a", LARGE)
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(DoesNotFit, match=rf"swap path {tier.paths[1].path}: \d+ bytes are needed"):
            tier.allocate()
    assert sum(path.stat().st_blocks for path in tmp_path.rglob("*.bin")) * 512 == small.nbytes
    tier.allocate()
    tier.close()


class Bench:
    """State in copies on two paths."""

    def __init__(self, a: Path, b: Path, buffer: torch.Tensor, adopt: Saved | None = None, **how: Any) -> None:
        self.tier, self.buffer = opened(a, b, adopt=adopt, copies=3, **how), buffer
        self.extents = [self.tier.reserve("state", f"weights/{i}", size) for i, size in enumerate(SIZES)]
        try:
            self.tier.allocate()
        except BaseException:
            self.tier.close()
            raise
        assert self.tier.shadow is not None
        self.shadow, self.state = self.tier.shadow, self.tier.path / "state"
        paths = [[str(files.path / "state"), w] for files, w in zip(self.tier.paths, self.tier.weights, strict=True)]
        places = [[e.file, e.offset, e.nbytes, e.label] for e in self.shadow.copies.extents]
        for files in self.tier.paths:
            (files.path / "state" / LAYOUT_FILE).write_text(layout_text({"extents": places, "paths": paths}))

    def write(self, value: int) -> None:
        for i, extent in enumerate(self.extents):
            self.tier.write(extent, self.buffer.fill_(value + i))

    def read(self) -> list[int]:
        found = []
        for extent in self.extents:
            self.tier.read(extent, self.buffer.fill_(255))
            held = self.buffer[: extent.nbytes]
            assert bool((held == held[0]).all())
            found.append(int(held[0]))
        return found


def of_shares(saved: Saved) -> list[int]:
    """The value of each extent, the same in all its shares."""
    found: dict[str, set[int]] = {}
    for extent, value in zip(saved.extents, contents(saved), strict=True):
        found.setdefault(extent.label, set()).add(value)
    assert all(len(values) == 1 for values in found.values())
    return [values.pop() for values in found.values()]


def test_flips_links_and_going_on_are_of_all_paths(tmp_path: Path, buffer: torch.Tensor) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    it = Bench(a, b, buffer, weights=(300, 700))
    assert {path_of(extent.file) for extent in it.shadow.copies.extents} == {0, 1}
    it.write(10)
    it.shadow.flip({"step": 1})
    link = tmp_path / "out" / "1"
    link.mkdir(parents=True)
    assert it.shadow.can_link(link) == ""
    it.shadow.link_into(link)
    shutil.copy(it.state / LAYOUT_FILE, link / LAYOUT_FILE)
    it.shadow.pin(link)
    it.write(20)
    it.shadow.flip({"step": 2})
    it.write(30)  # not flipped
    home, other = it.state, it.tier.paths[1].path / "state"
    saved = read_saved(home)
    assert saved.directories == (home, other) and saved.weights == (300, 700) and of_shares(saved) == [20, 21, 22, 23]
    assert home_of(other) == home_of(home) == home and not saved.absent
    kill = [copied(path, tmp_path / f"killed{i}") for i, path in enumerate((a, b))]
    it.tier.close()
    assert not list(a.iterdir()) and not list(b.iterdir())
    assert of_shares(read_saved(link)) == [10, 11, 12, 13]  # both paths are gone, the links have it all
    it = Bench(tmp_path / "c", tmp_path / "d", buffer, adopt=read_saved(link), checkpoints=tmp_path / "out")
    assert it.tier.weights == (300, 700) and it.read() == [10, 11, 12, 13] and list(it.shadow.copies.pins) == [link]
    for value in range(50, 90, 10):
        it.write(value)
        it.shadow.flip({})
    assert it.read() == [80, 81, 82, 83] and of_shares(read_saved(link)) == [10, 11, 12, 13]
    it.tier.close()
    for place, path in zip(kill, (a, b), strict=True):
        shutil.rmtree(path)
        place.rename(path)
    it = Bench(a, b, buffer, adopt=read_saved(home))
    assert it.read() == [20, 21, 22, 23]
    it.write(40)
    assert of_shares(read_saved(home)) == [20, 21, 22, 23]
    it.shadow.flip({"step": 3})
    assert of_shares(read_saved(home)) == [40, 41, 42, 43] and it.read() == [40, 41, 42, 43]
    it.tier.close()


def test_paths_fill_up_by_their_weights() -> None:
    weights, sums = (617, 383), [0, 0]
    for turn in range(500):
        for path, share in enumerate(shares(8 * PIECE_BYTES, weights, turn)):
            sums[path] += share
    assert abs(sums[0] / sum(sums) - 0.617) < 0.002


def test_weights_stop_where_the_room_does() -> None:
    fast, slow = (3e9, 3e9), (1e9, 1e9)
    assert weights_of([fast, slow], [1000, 1000]) == (750, 250)
    assert weights_of([fast, slow], [400, 1000]) == (400, 600)
    assert weights_of([fast, slow, slow], [100, 1000, 1000]) == (100, 450, 450)
    assert weights_of([fast, slow, slow], [100, 300, 1000]) == (100, 300, 600)
    assert weights_of([fast, slow], [400, 600]) == (400, 600)
    with pytest.raises(ValueError, match="all together 1000"):
        weights_of([fast, slow], [400, 599])


def test_an_extent_on_one_path_is_its_share(tmp_path: Path) -> None:
    tier = opened(tmp_path, weights=(1000,))
    assert tier.reserve("state", "weights/a", LARGE) == Extent("state/weights.bin", 0, LARGE, "weights/a")
    tier.close()


def test_a_kill_in_the_look_for_links_leaves_no_checkpoint(
    tmp_path: Path, buffer: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name must not be taken for a checkpoint that is not whole, or the next start would be refused."""
    real, made = os.link, []
    monkeypatch.setattr(os, "link", lambda source, target: (real(source, target), made.append(Path(target))))
    it = Bench(tmp_path / "a", tmp_path / "b", buffer)
    assert it.shadow.can_link(tmp_path / "out" / "step-000000") == ""
    it.tier.close()
    assert len(made) == 2 and not any(path.match("step-*") for path in made)
