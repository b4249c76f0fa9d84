"""Case G03, kind K03: swap I/O with real tensor sizes, on drives that write short, stay short, fill up or flip bits.

The round trip of every length and dtype is `tests/cpu/test_disk.py`; here the drive is bad.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from shims import main, run_file, spoiled

from offloadz.memory.disk import DiskTier, Extent
from offloadz.memory.host import HostPool
from offloadz.memory.tier import PIECE_BYTES
from offloadz.plan.errors import DamagedState, DiskFailed, DoesNotFit
from offloadz.runtime.transfer import ThreadTransfer

# Linear 37 x 53 with bias 53: bf16 weights, fp32 moments; then sizes around a page, a piece and a request.
SIZES = [37 * 53 * 2, 53 * 2, 37 * 53 * 4, 53 * 4, 0, 1, 511, 513, 4095, 4097, PIECE_BYTES + 1, 4 * PIECE_BYTES + 8191]
BUFFER_BYTES = 6 * PIECE_BYTES


class Bench:
    """A tier with one extent per size, and what was written to each."""

    def __init__(self, directory: Path, checksum: bool = True) -> None:
        self.pool = HostPool(2 * BUFFER_BYTES)
        self.buffer = self.pool.take("buffer", BUFFER_BYTES)
        self.tier = DiskTier(directory, ThreadTransfer(2), owner="bench", checksum=checksum)
        self.extents = [self.tier.reserve("state", f"weights/p{i}", size) for i, size in enumerate(SIZES)]
        self.tier.allocate()
        self.content: dict[Extent, torch.Tensor] = {}

    def write(self, extent: Extent, seed: int) -> None:
        data = torch.randint(0, 256, (extent.nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
        self.buffer.fill_(0xAA)  # the padding must come from the tier
        self.buffer[: extent.nbytes] = data
        self.tier.write(extent, self.buffer)
        self.content[extent] = data

    def write_all(self, seed: int) -> None:
        for i, extent in reversed(list(enumerate(self.extents))):
            self.write(extent, seed * 100 + i)

    def equal(self, extent: Extent) -> bool:
        self.buffer.fill_(0x55)
        self.tier.read(extent, self.buffer)
        return torch.equal(self.buffer[: extent.nbytes], self.content[extent])

    def all_equal(self) -> bool:
        return all(self.equal(extent) for extent in self.extents)

    def close(self) -> None:
        self.tier.close()


def _error(step: Any) -> dict[str, Any]:
    try:
        step()
    except Exception as error:
        return {"type": type(error).__name__, "errno": getattr(error, "errno", None), "text": str(error)}
    return {"type": None}


def bad_writes(directory: Path) -> dict[str, Any]:
    """Every way of a bad write, one after the other in one process that has to outlive them all."""
    found: dict[str, Any] = {}
    bench = Bench(directory)
    for seed, mode in enumerate(("short_write", "interrupted"), start=1):
        with spoiled(mode) as count:
            bench.write_all(seed)
            found[mode] = {"spoiled": count()}
        found[mode]["equal"] = bench.all_equal()
        found[mode]["stored"] = os.path.getsize(bench.tier.path / "state/weights.bin")
    last = bench.extents[-1]
    for seed, mode in enumerate(("stuck_write", "crumb_write", "eio_write"), start=3):
        with spoiled(mode):
            found[mode] = _error(lambda seed=seed: bench.write(last, seed))
        found[mode]["then_read"] = _error(lambda: bench.equal(last))
        found[mode]["others_equal"] = all(bench.equal(extent) for extent in bench.extents[:-1])
        bench.write(last, seed + 10)
        found[mode]["written_again"] = bench.equal(last)
    bench.close()
    found["left"] = os.listdir(directory)
    return found


def bad_reads(directory: Path) -> dict[str, Any]:
    """Every way of a bad read; the bytes on the drive are right all the time."""
    found: dict[str, Any] = {}
    bench = Bench(directory)
    bench.write_all(1)
    for mode in ("short_read", "interrupted"):
        with spoiled(mode) as count:
            found[mode] = {"equal": bench.all_equal(), "spoiled": count()}
    for mode in ("stuck_read", "crumb_read", "eio_read"):
        with spoiled(mode):
            found[mode] = _error(lambda: bench.equal(bench.extents[-1]))
        found[mode]["then_equal"] = bench.all_equal()
    bench.close()
    return found


def full_drive(directory: Path) -> dict[str, Any]:
    """No space: when room is taken, when more is taken later, and in the middle of a write."""
    found: dict[str, Any] = {}
    bench = Bench(directory)
    bench.write_all(1)
    size = os.path.getsize(bench.tier.path / "state/weights.bin")
    later = bench.tier.reserve("state", "weights/later", 3 * PIECE_BYTES)
    with spoiled("no_room"):
        found["reserve"] = _error(bench.tier.allocate)
    found["reserve"]["given_back"] = os.path.getsize(bench.tier.path / "state/weights.bin") == size
    found["reserve"]["use"] = _error(lambda: bench.write(later, 9))
    bench.tier.allocate()
    bench.write(later, 9)
    found["reserve"]["later_equal"] = bench.equal(later)
    with spoiled("enospc", after=1 << 20):
        found["middle"] = _error(lambda: bench.write_all(2))
    found["middle"]["small_equal"] = all(bench.equal(extent) for extent in bench.extents[:-1])
    bench.close()
    return found


@pytest.fixture(scope="module")
def writes(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run_file(__file__, "bad_writes", tmp_path_factory.mktemp("writes"))


@pytest.fixture(scope="module")
def reads(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run_file(__file__, "bad_reads", tmp_path_factory.mktemp("reads"))


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run_file(__file__, "full_drive", tmp_path_factory.mktemp("full"))


@pytest.mark.parametrize("mode", ["short_write", "interrupted"])
def test_short_and_interrupted_writes_are_resumed(writes: Any, mode: str) -> None:
    assert writes[mode]["spoiled"] >= len(SIZES) // 3
    assert writes[mode]["equal"]
    assert writes[mode]["stored"] == sum(-(-size // 4096) * 4096 for size in SIZES)


@pytest.mark.parametrize("mode", ["stuck_write", "crumb_write", "eio_write"])
def test_a_write_that_stays_short_names_everything_and_hurts_nobody_else(writes: Any, mode: str) -> None:
    found = writes[mode]
    assert found["type"] == "DiskFailed" and found["errno"] == 5
    for part in ("write", "weights/p11", "state/weights.bin", "offset", "wanted", "found"):
        assert part in found["text"]
    assert found["then_read"]["type"] == "DamagedState"
    assert found["others_equal"] and found["written_again"]
    assert writes["left"] == []


@pytest.mark.parametrize("mode", ["short_read", "interrupted"])
def test_short_and_interrupted_reads_are_resumed(reads: Any, mode: str) -> None:
    assert reads[mode]["spoiled"] >= len(SIZES) // 3
    assert reads[mode]["equal"]


@pytest.mark.parametrize("mode", ["stuck_read", "crumb_read", "eio_read"])
def test_a_read_that_stays_short_is_an_error_and_no_damage(reads: Any, mode: str) -> None:
    found = reads[mode]
    assert found["type"] == "DiskFailed" and found["errno"]
    assert "read of weights/p11" in found["text"] and "wanted" in found["text"]
    assert found["then_equal"]


def test_a_full_drive_is_refused_when_room_is_taken(full: Any) -> None:
    found = full["reserve"]
    assert found["type"] == "DoesNotFit"
    assert str(3 * PIECE_BYTES) in found["text"] and "are free" in found["text"] and "offload.swap" in found["text"]
    assert found["given_back"]
    assert found["use"]["type"] == "ValueError" and "allocate()" in found["use"]["text"]
    assert found["later_equal"]


def test_a_full_drive_in_the_middle_names_room_and_parameter(full: Any) -> None:
    found = full["middle"]
    assert found["type"] == "DiskFailed" and found["errno"] == 28
    assert "weights/p11" in found["text"] and "bytes are free" in found["text"]
    assert found["small_equal"]


def test_more_than_the_drive_has_is_refused_before_any_of_it_is_taken(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.tier.reserve("scratch", "gradients/all", 1 << 50)
    with pytest.raises(DoesNotFit, match=str(1 << 50)):
        bench.tier.allocate()
    assert not (bench.tier.path / "scratch/gradients.bin").exists()
    bench.close()


@pytest.mark.parametrize("size_index", range(len(SIZES)))
def test_one_flipped_bit_on_disk_is_found(tmp_path: Path, size_index: int) -> None:
    bench = Bench(tmp_path)
    bench.write_all(1)
    extent = bench.extents[size_index]
    if extent.nbytes == 0:
        assert bench.all_equal()
        bench.close()
        return
    path = bench.tier.path / extent.file
    where = extent.offset + extent.nbytes - 1
    with open(path, "r+b") as file:
        file.seek(where)
        byte = file.read(1)[0]
        file.seek(where)
        file.write(bytes([byte ^ 0x10]))
        file.flush()
        os.fsync(file.fileno())
    with pytest.raises(DamagedState) as caught:
        bench.equal(extent)
    assert extent.label in str(caught.value) and str(path) in str(caught.value)
    assert all(bench.equal(other) for other in bench.extents if other != extent)
    bench.close()


def test_a_file_cut_short_behind_our_back_is_an_error(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.write_all(1)
    os.truncate(bench.tier.path / "state/weights.bin", bench.extents[-1].offset + 4096)
    with pytest.raises(DiskFailed, match=r"weights/p11.*wanted .* found"):
        bench.equal(bench.extents[-1])
    bench.close()


def test_without_checksums_a_flip_passes_and_unwritten_pieces_are_still_zeros(tmp_path: Path) -> None:
    bench = Bench(tmp_path, checksum=False)
    last = bench.extents[-1]
    bench.buffer.fill_(7)
    bench.tier.write(last, bench.buffer, PIECE_BYTES, PIECE_BYTES)
    bench.tier.read(last, bench.buffer)
    assert not bench.buffer[:PIECE_BYTES].any() and not bench.buffer[2 * PIECE_BYTES : last.nbytes].any()
    assert bool((bench.buffer[PIECE_BYTES : 2 * PIECE_BYTES] == 7).all())
    bench.close()


def test_kept_state_has_its_checksums_beside_it(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.write_all(1)
    bench.tier.close(keep_state=True)
    index = json.loads((bench.tier.path / "state/extents.json").read_text())
    data = (bench.tier.path / "state/weights.bin").read_bytes()
    for entry, extent in zip(index, bench.extents, strict=True):
        assert (entry["label"], entry["nbytes"], entry["offset"]) == (extent.label, extent.nbytes, extent.offset)
        assert len(entry["crc32c"]) == extent.num_pieces and all(crc >= 0 for crc in entry["crc32c"])
        assert data[extent.offset : extent.offset + extent.nbytes] == bytes(bench.content[extent].numpy())
    assert not (bench.tier.path / "scratch").exists()


if __name__ == "__main__":
    main(globals())
