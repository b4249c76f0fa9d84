"""State in copies: flips, pinned copies, going on from what lies there.  Cases G04 and G14, kinds K04 and K14."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from offloadz.memory.copies import copy_file
from offloadz.memory.disk import DiskTier
from offloadz.memory.host import HostPool
from offloadz.memory.record import FLIP_FILE, LAYOUT_FILE, Saved, layout_text, read_record, read_saved
from offloadz.memory.tier import Extent
from offloadz.plan.errors import CannotGoOn, DamagedState
from offloadz.plan.spec import aligned
from offloadz.runtime.transfer import ThreadTransfer

SIZES = (5000, 1 << 20, 3_000_001, 4096)


class Bench:
    """A tier with four extents of state in copies, and values to write there."""

    def __init__(
        self, directory: Path, copies: int = 3, adopt: Saved | None = None, checkpoints: Path | None = None,
        sizes: tuple[int, ...] = SIZES,
    ) -> None:  # fmt: skip
        self.tier = DiskTier(
            directory, ThreadTransfer(2), owner="run", copies=copies, adopt=adopt, checkpoints=checkpoints
        )
        self.extents = [self.tier.reserve("state", f"weights/{i}", size) for i, size in enumerate(sizes)]
        self.scratch = self.tier.reserve("scratch", "gradients/a", 4096)
        try:
            self.tier.allocate()
        except BaseException:
            self.tier.close()
            raise
        self.pool = HostPool(aligned(max(sizes)))
        self.buffer = self.pool.take("buffer", aligned(max(sizes)))
        places = [[e.file, e.offset, e.nbytes, e.label] for e in self.extents]
        (self.tier.path / "state" / LAYOUT_FILE).write_text(layout_text({"extents": places}))
        assert self.tier.shadow is not None
        self.shadow = self.tier.shadow

    def write(self, value: int, which: list[int] | None = None) -> None:
        for i in which if which is not None else range(len(self.extents)):
            self.buffer.fill_(value + i)
            self.tier.write(self.extents[i], self.buffer)

    def read(self) -> list[int]:
        """The value of each extent, which must be the same in every byte."""
        found = []
        for extent in self.extents:
            self.buffer.fill_(255)
            self.tier.read(extent, self.buffer)
            held = self.buffer[: extent.nbytes]
            assert bool((held == held[0]).all())
            found.append(int(held[0]))
        return found

    def save(self, directory: Path) -> Path:
        directory.mkdir(parents=True)
        self.shadow.link_into(directory)
        shutil.copy(self.tier.path / "state" / LAYOUT_FILE, directory / LAYOUT_FILE)
        self.shadow.pin(directory)
        return directory

    def close(self) -> None:
        del self.buffer
        self.pool.close()
        self.tier.close()


@contextmanager
def bench(directory: Path, **how: object) -> Iterator[Bench]:
    made = Bench(directory, **how)  # type: ignore[arg-type]
    try:
        yield made
    finally:
        made.close()


def contents(saved: Saved) -> list[int]:
    """First byte of each extent of saved state, as the files have it."""
    found = []
    for extent, copy in zip(saved.extents, saved.record.choice, strict=True):
        with saved.where(copy_file(extent.file, copy)).open("rb") as file:
            file.seek(extent.offset)
            data = file.read(extent.nbytes)
        assert len(set(data)) == 1
        found.append(data[0])
    return found


def copied(saved: Path, to: Path) -> Path:
    """What a kill at this moment would leave."""
    shutil.copytree(saved, to)
    return to


def test_what_was_flipped_stays_until_the_next_flip(tmp_path: Path) -> None:
    with bench(tmp_path / "swap", copies=2) as it:
        state = it.tier.path / "state"
        assert it.read() == [0, 0, 0, 0]
        it.write(10)
        assert it.read() == [10, 11, 12, 13]
        it.shadow.flip({"step": 1})
        for step in range(2, 6):
            it.write(10 * step)
            it.write(10 * step, [1])  # twice in one step: into the same copy
            assert it.read() == [10 * step + i for i in range(4)]
            before = read_saved(copied(state, tmp_path / f"killed{step}"))
            assert before.record.note == {"step": step - 1} and contents(before) == [
                10 * step - 10 + i for i in range(4)
            ]
            it.shadow.flip({"step": step})
            assert contents(read_saved(state)) == [10 * step + i for i in range(4)]


def test_extents_that_no_step_writes_stay_where_they_are(tmp_path: Path) -> None:
    with bench(tmp_path / "swap", copies=2) as it:
        it.write(10)
        it.shadow.flip({})
        for step in range(3):
            it.write(50 + step, [2])
            it.shadow.flip({})
        assert it.read() == [10, 11, 54, 13]
        assert len(set(it.shadow.copies.choice())) == 2


def test_checkpoints_outlive_whatever_the_run_does(tmp_path: Path) -> None:
    checkpoints = tmp_path / "out"
    with bench(tmp_path / "swap", copies=4) as it:
        for step in range(1, 9):
            it.write(10 * step)
            it.shadow.flip({"step": step})
            if step % 3 == 0:
                assert it.shadow.can_link(checkpoints / str(step)) == ""
                it.save(checkpoints / str(step))
        assert "hold copies" in it.shadow.can_link(checkpoints / "8")
        for step in (3, 6):
            assert contents(read_saved(checkpoints / str(step))) == [10 * step + i for i in range(4)]
        shutil.rmtree(checkpoints / "3")
        assert it.shadow.can_link(checkpoints / "8") == ""
        it.save(checkpoints / "8")
        it.write(1)
        it.shadow.flip({"step": 9})
    assert not list((tmp_path / "swap").iterdir())
    for step in (6, 8):
        assert contents(read_saved(checkpoints / str(step))) == [10 * step + i for i in range(4)]
    # What no checkpoint needs has been given back: two states are left of four.
    inodes = {p.stat().st_ino: p.stat().st_blocks * 512 for p in checkpoints.rglob("weights.*.bin")}
    room = sum(aligned(size) for size in SIZES)
    assert 2 * room <= sum(inodes.values()) < 2 * room + (1 << 17)


def test_a_checkpoint_that_was_moved_or_linked_again_keeps_its_copies(tmp_path: Path) -> None:
    with bench(tmp_path / "swap") as it:
        it.write(10)
        it.shadow.flip({"step": 1})
        it.save(tmp_path / "out" / "1").rename(tmp_path / "elsewhere")
        assert "hold copies" in it.shadow.can_link(tmp_path / "out" / "2")
        for step in range(2, 6):
            it.write(10 * step)
            it.shadow.flip({"step": step})
        assert contents(read_saved(tmp_path / "elsewhere")) == [10, 11, 12, 13]
        shutil.rmtree(tmp_path / "elsewhere")
        assert it.shadow.can_link(tmp_path / "out" / "2") == ""


def killed(it: Bench) -> None:
    """As a kill leaves it: the lock is let go of, nothing is cleaned up."""
    it.tier._end.detach()
    for files in it.tier.paths:
        files.io.close()
        os.close(files._swap._lock)
        files._swap._lock = -1
        for fd in files.fds.values():
            os.close(fd)
    del it.buffer
    it.pool.close()


def test_a_killed_run_goes_on_from_its_last_flip(tmp_path: Path) -> None:
    first = Bench(tmp_path / "swap")
    first.write(10)
    first.shadow.flip({"step": 1})
    first.save(tmp_path / "out" / "1")
    first.write(20)
    first.shadow.flip({"step": 2})
    first.write(30, [0, 2])
    path = first.tier.path
    killed(first)
    with bench(tmp_path / "swap", adopt=read_saved(path / "state"), checkpoints=tmp_path / "out") as it:
        assert it.read() == [20, 21, 22, 23] and list(it.shadow.copies.pins) == [tmp_path / "out" / "1"]
        for step in range(3, 7):
            it.write(10 * step)
            it.shadow.flip({"step": step})
        assert it.read() == [60, 61, 62, 63]
        assert contents(read_saved(tmp_path / "out" / "1")) == [10, 11, 12, 13]
    assert not list((tmp_path / "swap").iterdir())


def test_state_that_cannot_be_taken_over_is_left_alone(tmp_path: Path) -> None:
    first = Bench(tmp_path / "swap")
    first.write(10)
    first.shadow.flip({"step": 1})
    state = first.tier.path / "state"
    killed(first)
    with pytest.raises(CannotGoOn, match="laid out otherwise"):
        Bench(tmp_path / "swap", adopt=read_saved(state), sizes=(4096, 1 << 20, 3_000_001, 4096))
    os.link(state / "weights.0.bin", tmp_path / "mine")
    with pytest.raises(CannotGoOn, match="no known checkpoint"):
        Bench(tmp_path / "swap", adopt=read_saved(state))
    assert contents(read_saved(state)) == [10, 11, 12, 13]
    (tmp_path / "mine").unlink()
    with bench(tmp_path / "swap", adopt=read_saved(state)) as it:
        assert it.read() == [10, 11, 12, 13]


def test_a_checkpoint_is_gone_on_from_by_links(tmp_path: Path) -> None:
    with bench(tmp_path / "swap", copies=4) as it:
        for step in (1, 2):
            it.write(10 * step)
            it.shadow.flip({"step": step})
            it.save(tmp_path / "out" / str(step))
    with bench(tmp_path / "swap", adopt=read_saved(tmp_path / "out" / "1"), copies=4) as it:
        assert it.read() == [10, 11, 12, 13] and len(it.shadow.copies.pins) == 1
        for step in range(2, 8):
            it.write(100 + step)
            it.shadow.flip({"step": step})
        assert it.read() == [107, 108, 109, 110]
    for step in (1, 2):
        assert contents(read_saved(tmp_path / "out" / str(step))) == [10 * step + i for i in range(4)]


def test_other_checkpoints_of_a_run_are_its_copies_again_unless_somebody_else_links_to_them(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with bench(tmp_path / "swap", copies=5) as it:
        for step in (1, 2, 3):
            it.write(10 * step)
            it.shadow.flip({"step": step})
            it.save(out / str(step))
    (tmp_path / "mine").mkdir()
    for path in (out / "1").glob("*.bin"):
        os.link(path, tmp_path / "mine" / path.name)
    with bench(tmp_path / "swap", adopt=read_saved(out / "2"), copies=5, checkpoints=out) as it:
        assert sorted(it.shadow.copies.pins) == [out / "2", out / "3"] and it.read() == [20, 21, 22, 23]
        for step in range(3, 9):
            it.write(100 + step)
            it.shadow.flip({"step": step})
    for step in (1, 2, 3):
        assert contents(read_saved(out / str(step))) == [10 * step + i for i in range(4)]
    with bench(tmp_path / "swap", adopt=read_saved(out / "2"), copies=3, checkpoints=out) as it:
        assert list(it.shadow.copies.pins) == [out / "2"], "three copies hold one checkpoint"


def saved_every_fourth(swap: Path, out: Path) -> Bench:
    """A run of five copies after sixteen steps, with its newest three checkpoints: the last holds the highest copy."""
    it = Bench(swap, copies=5)
    for step in range(1, 17):
        it.write(10 * step)
        it.shadow.flip({"step": step})
        if step % 4 == 0:
            it.save(out / f"{step:02d}")
            if step == 16:
                shutil.rmtree(out / "04")
                it.shadow.release_gone()
    assert max(it.shadow.copies.choice()) == 4
    return it


@pytest.mark.parametrize("in_place", [True, False])
def test_fewer_copies_take_no_more_room_than_they_are_whatever_their_numbers(tmp_path: Path, in_place: bool) -> None:
    swap, out = tmp_path / "swap", tmp_path / "out"
    first = saved_every_fourth(swap, out)
    state = first.tier.path / "state"
    if in_place:
        first.write(170)
        first.shadow.flip({"step": 17})
        killed(first)
    else:
        first.close()
    for gone in ("08", "12"):
        shutil.rmtree(out / gone)
    adopt = read_saved(state if in_place else out / "16")
    value = 170 if in_place else 160
    with bench(swap, adopt=adopt, copies=3, checkpoints=out) as it:
        assert it.read() == [value + i for i in range(4)] and list(it.shadow.copies.pins) == [out / "16"]
        for step in range(18, 24):
            it.write(10 * step)
            it.shadow.flip({"step": step})
            assert contents(read_saved(out / "16")) == [160 + i for i in range(4)]
            assert len(list(state.glob("weights.*.bin"))) == 3 and 4 in it.shadow.copies.numbers
        assert it.read() == [230 + i for i in range(4)] and it.shadow.can_link(out / "23", (out / "16",)) == ""


@pytest.mark.parametrize("fault", ["missing", "unlinkable", "tables", "aside"])
def test_a_fault_of_another_checkpoint_costs_only_that_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    swap, out, link = tmp_path / "swap", tmp_path / "out", os.link
    saved_every_fourth(swap, out).close()
    bad = out / "12"
    if fault == "missing":
        next(bad.glob("weights.*.bin")).unlink()
    elif fault == "tables":
        (bad / "tables.bin").write_bytes(b"rot")
    elif fault == "aside":
        bad = bad.rename(out / "12.tmp-1")

    def refusing(source: Path, target: Path) -> None:
        if fault == "unlinkable" and source.parent == bad:
            raise OSError(errno.EMLINK, "too many links")
        link(source, target)

    monkeypatch.setattr(os, "link", refusing)
    with bench(swap, adopt=read_saved(out / "16"), copies=5, checkpoints=out) as it:
        assert sorted(it.shadow.copies.pins) == [out / "08", out / "16"] and it.read() == [160, 161, 162, 163]
        it.write(170)
        it.shadow.flip({"step": 17})
    for step in (8, 16):
        assert contents(read_saved(out / f"{step:02d}")) == [10 * step + i for i in range(4)]


def test_what_is_gone_on_from_must_be_linked_whole(tmp_path: Path) -> None:
    swap, out = tmp_path / "swap", tmp_path / "out"
    saved_every_fourth(swap, out).close()
    next((out / "16").glob("weights.*.bin")).unlink()
    with pytest.raises(CannotGoOn, match=r"hard links from .*16 to .*state: No such file"):
        Bench(swap, adopt=read_saved(out / "16"), copies=5, checkpoints=out)
    assert contents(read_saved(out / "12")) == [120, 121, 122, 123]


def test_records_are_checked(tmp_path: Path) -> None:
    with bench(tmp_path / "swap") as it:
        it.write(10)
        it.shadow.flip({"step": 1})
        path = it.tier.path / "state" / FLIP_FILE
        data = path.read_bytes()
        for bad in (data[:-1], data[:40], b"", data[:100] + bytes([data[100] ^ 1]) + data[101:], data + b"x"):
            (tmp_path / "bad").write_bytes(bad)
            with pytest.raises(DamagedState):
                read_record(tmp_path / "bad")
        layout = it.tier.path / "state" / LAYOUT_FILE
        layout.write_text(layout.read_text().replace("5000", "5001"))
        with pytest.raises(DamagedState, match="CRC-32"):
            read_saved(it.tier.path / "state")


def test_an_extent_in_copies_is_written_whole(tmp_path: Path) -> None:
    with bench(tmp_path / "swap") as it:
        it.write(10)
        with pytest.raises(ValueError, match="written whole"):
            it.tier.write(it.extents[2], it.buffer, 1 << 20, 0)
        with pytest.raises(ValueError, match="do not lie"):
            it.tier.write(Extent("state/weights.bin", 0, 5000, "weights/0"), it.buffer, 5000, 1 << 20)
        assert it.read() == [10, 11, 12, 13]


def test_descriptors_are_back(tmp_path: Path) -> None:
    Bench(tmp_path / "swap").close()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with bench(tmp_path / "swap") as it:
            it.write(10)
            it.shadow.flip({})
            assert it.shadow.can_link(tmp_path / "out") == ""
    assert len(os.listdir("/proc/self/fd")) == before


def test_what_is_proposed_is_read_once_it_is_decided(tmp_path: Path) -> None:
    """Beside the last flip, which stays on the drive whatever is proposed; what was written at rest is kept first."""
    with contextlib.closing(Bench(tmp_path / "swap", copies=2)) as bench:
        record = bench.tier.path / "state" / FLIP_FILE
        bench.write(10)  # the first weights, never flipped

        def propose(value: int) -> None:
            for extent in bench.extents:
                bench.tier.propose(extent)
            bench.write(value)

        propose(20)
        assert bench.read() == [10, 11, 12, 13] and not bench.shadow.copies.unflipped
        bench.shadow.copies.decide(False)
        assert bench.read() == [10, 11, 12, 13]
        propose(30)
        bench.shadow.copies.decide(True)
        assert bench.read() == [30, 31, 32, 33]
        bench.shadow.flip({"step": 1})
        propose(40)
        bench.shadow.copies.decide(False)
        bench.write(50)  # the same updates again
        bench.shadow.flip({"step": 2})
        assert bench.read() == [50, 51, 52, 53] and read_record(record).note == {"step": 2}
        bench.write(60)  # loaded at rest: the record told of what was before, and the next proposal may take its place
        propose(70)
        assert bench.read() == [60, 61, 62, 63] and not record.exists()
