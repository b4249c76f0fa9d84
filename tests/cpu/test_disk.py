"""The disk tier on a good drive: every length, dtype and order comes back (kind K03), rows, growth, threads, bounds."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from offloadz.memory.disk import DiskTier, Extent
from offloadz.memory.host import HostPool
from offloadz.memory.rows import STAGING_BYTES
from offloadz.memory.tier import PAGE_BYTES, PIECE_BYTES
from offloadz.plan.errors import DamagedState
from offloadz.plan.spec import aligned
from offloadz.runtime.transfer import ThreadTransfer

LENGTHS = [0, 1, 511, 512, 513, 4095, 4096, 4097, 7919, 104729, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1]
LENGTHS += [4 * PIECE_BYTES, 4 * PIECE_BYTES + 1, 5 * PIECE_BYTES + 15485863 % PIECE_BYTES]
DTYPES = [torch.uint8, torch.bfloat16, torch.float32]
BUFFER_BYTES = 24 * PIECE_BYTES


@pytest.fixture(scope="module")
def buffers() -> Iterator[list[torch.Tensor]]:
    pool = HostPool(2 * BUFFER_BYTES)
    yield [pool.take(f"buffer {i}", BUFFER_BYTES) for i in range(2)]


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[DiskTier]:
    made = DiskTier(tmp_path, ThreadTransfer(3), owner="test")
    yield made
    made.close()
    assert list(tmp_path.iterdir()) == []


def _noise(nbytes: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def _put(tier: DiskTier, extent: Extent, buffer: torch.Tensor, seed: int) -> torch.Tensor:
    data = _noise(extent.nbytes, seed)
    buffer[: extent.nbytes] = data
    tier.write(extent, buffer)
    return data


@given(
    parts=st.lists(st.tuples(st.sampled_from(LENGTHS) | st.integers(0, 70000), st.sampled_from(DTYPES)), max_size=8),
    order=st.randoms(use_true_random=False),
    checksum=st.booleans(),
)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_lengths_and_dtypes_in_any_order_come_back(
    tmp_path: Path, buffers: list[torch.Tensor], parts: list[tuple[int, torch.dtype]], order: object, checksum: bool
) -> None:
    buffer = buffers[0]
    tier = DiskTier(tmp_path, ThreadTransfer(2), owner="test", checksum=checksum)
    extents = [
        tier.reserve(("state", "scratch")[i % 2], f"role{i % 3}/p{i}", n * d.itemsize) for i, (n, d) in enumerate(parts)
    ]
    tier.allocate()
    jobs = list(range(len(parts)))
    order.shuffle(jobs)  # type: ignore[attr-defined]
    data = {}
    for i in jobs:
        extent, (_, dtype) = extents[i], parts[i]
        buffer.fill_(0xEE)
        data[i] = _noise(extent.nbytes, i).view(dtype)
        buffer[: extent.nbytes].view(dtype).copy_(data[i])
        tier.write(extent, buffer)
    order.shuffle(jobs)  # type: ignore[attr-defined]
    for i in jobs:
        buffer.fill_(0x77)
        tier.read(extents[i], buffer)
        nbytes = extents[i].nbytes
        assert torch.equal(buffer[:nbytes], data[i].view(torch.uint8))
        assert not buffer[nbytes : aligned(nbytes)].any()
    for file in {extent.file for extent in extents}:
        wanted = sum(aligned(extent.nbytes) for extent in extents if extent.file == file)
        assert (tier.path / file).stat().st_size == wanted
    assert tier.bytes_read == tier.bytes_written == sum(aligned(extent.nbytes) for extent in extents)
    tier.close()


def test_pieces_never_written_read_as_zeros_and_cost_no_transfer(tier: DiskTier, buffers: list[torch.Tensor]) -> None:
    extent = tier.reserve("state", "moments/a", 5 * PIECE_BYTES + 100)
    tier.allocate()
    buffer = buffers[0].fill_(9)
    tier.read(extent, buffer)
    assert not buffer[: aligned(extent.nbytes)].any() and tier.bytes_read == 0
    tier.write(extent, buffers[1].fill_(5), 2 * PIECE_BYTES, PIECE_BYTES)
    tier.read(extent, buffer.fill_(9))
    written = torch.zeros(extent.nbytes, dtype=torch.uint8)
    written[PIECE_BYTES : 3 * PIECE_BYTES] = 5
    assert torch.equal(buffer[: extent.nbytes], written) and tier.bytes_read == 2 * PIECE_BYTES


def test_parts_of_an_extent_by_whole_pieces(tier: DiskTier, buffers: list[torch.Tensor]) -> None:
    extent = tier.reserve("state", "weights/a", 3 * PIECE_BYTES + 777)
    tier.allocate()
    data = _put(tier, extent, buffers[0], 1)
    for offset, nbytes in (
        (0, PIECE_BYTES),
        (PIECE_BYTES, 2 * PIECE_BYTES),
        (3 * PIECE_BYTES, 777),
        (PIECE_BYTES, None),
    ):
        end = extent.nbytes if nbytes is None else offset + nbytes
        tier.read(extent, buffers[1].fill_(1), nbytes, offset)
        assert torch.equal(buffers[1][: end - offset], data[offset:end])
    patch = buffers[1].random_(0, 256)[: PIECE_BYTES + 777].clone()
    tier.write(extent, buffers[1], PIECE_BYTES + 777, 2 * PIECE_BYTES)
    data[2 * PIECE_BYTES :] = patch
    tier.read(extent, buffers[0])
    assert torch.equal(buffers[0][: extent.nbytes], data)


def test_small_extents_waste_less_than_a_page(tier: DiskTier) -> None:
    extents = [tier.reserve("state", f"bias/{i}", 106) for i in range(100)]
    tier.allocate()
    assert (tier.path / "state/bias.bin").stat().st_size == 100 * PAGE_BYTES
    assert [extent.offset for extent in extents] == list(range(0, 100 * PAGE_BYTES, PAGE_BYTES))


def test_room_may_grow_later(tier: DiskTier, buffers: list[torch.Tensor]) -> None:
    first = tier.reserve("state", "weights/a", PIECE_BYTES + 1)
    tier.allocate()
    data = _put(tier, first, buffers[0], 1)
    second, third = tier.reserve("state", "weights/b", 5), tier.reserve("scratch", "gradients/a", 6)
    with pytest.raises(ValueError, match=r"allocate\(\) was not called"):
        tier.read(second, buffers[0])
    tier.allocate()
    other = _put(tier, second, buffers[0], 2), _put(tier, third, buffers[0], 3)
    for extent, wanted in ((first, data), (second, other[0]), (third, other[1])):
        tier.read(extent, buffers[1])
        assert torch.equal(buffers[1][: extent.nbytes], wanted)


@given(
    row_bytes=st.sampled_from([1, 2, 96, 700, 1280, 4096, 70001, PIECE_BYTES, PIECE_BYTES + 3, STAGING_BYTES + 5]),
    first_byte=st.sampled_from([0, 1, 4096, PIECE_BYTES - 7]),
    picks=st.lists(st.floats(0, 1, exclude_max=True), max_size=30),
    size=st.integers(0, 3 * PIECE_BYTES),
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_rows_come_back(
    rows_bench: tuple[DiskTier, Extent, torch.Tensor], row_bytes: int, first_byte: int, picks: list[float], size: int
) -> None:
    tier, extent, data = rows_bench
    num_rows = (extent.nbytes - size - first_byte) // row_bytes
    rows = torch.tensor(sorted({int(pick * num_rows) for pick in picks}), dtype=torch.int64)
    out = torch.full((len(rows), row_bytes), 0x5A, dtype=torch.uint8)
    before = tier.bytes_read
    tier.read_rows(extent, row_bytes, first_byte, rows, out)
    table = data[first_byte : first_byte + num_rows * row_bytes].view(num_rows, row_bytes)
    assert torch.equal(out, table[rows])
    starts = [first_byte + row * row_bytes for row in rows.tolist()]
    pieces = {p for s in starts for p in range(s // PIECE_BYTES, (s + row_bytes - 1) // PIECE_BYTES + 1)}
    assert tier.bytes_read - before == sum(
        aligned(min(PIECE_BYTES, extent.nbytes - piece * PIECE_BYTES)) for piece in pieces
    )


@pytest.fixture(scope="module")
def rows_bench(
    tmp_path_factory: pytest.TempPathFactory, buffers: list[torch.Tensor]
) -> Iterator[tuple[DiskTier, Extent, torch.Tensor]]:
    tier = DiskTier(tmp_path_factory.mktemp("rows"), ThreadTransfer(2), owner="rows")
    tier.reserve("state", "weights/before", 5000)
    extent = tier.reserve("state", "weights/table", 20 * PIECE_BYTES + 12345)
    tier.allocate()
    yield tier, extent, _put(tier, extent, buffers[0], 4)
    tier.close()


def test_rows_of_a_table_never_written_are_zeros(tier: DiskTier) -> None:
    extent = tier.reserve("state", "weights/table", 3 * PIECE_BYTES)
    tier.allocate()
    out = torch.ones(2, 1000, dtype=torch.uint8)
    tier.read_rows(extent, 1000, 0, torch.tensor([5, 3000]), out)
    assert not out.any() and tier.bytes_read == 0


def test_rows_in_a_damaged_piece_are_refused_and_others_are_not(tier: DiskTier, buffers: list[torch.Tensor]) -> None:
    extent = tier.reserve("state", "weights/table", 3 * PIECE_BYTES)
    tier.allocate()
    data = _put(tier, extent, buffers[0], 1)
    with open(tier.path / extent.file, "r+b") as file:
        file.seek(PIECE_BYTES + 5)
        file.write(bytes([int(data[PIECE_BYTES + 5]) ^ 1]))
    out = torch.empty(1, 1024, dtype=torch.uint8)
    tier.read_rows(extent, 1024, 0, torch.tensor([1023]), out)
    assert torch.equal(out[0], data[1023 * 1024 : 1024 * 1024])
    with pytest.raises(DamagedState, match="weights/table"):
        tier.read_rows(extent, 1024, 0, torch.tensor([2000]), out)


def test_bad_rows_are_refused_with_numbers(tier: DiskTier) -> None:
    extent = tier.reserve("state", "weights/table", 1000)
    tier.allocate()
    out = torch.empty(2, 100, dtype=torch.uint8)
    for rows, text in (([3, 3], "sorted"), ([4, 3], "sorted"), ([-1, 3], "do not lie"), ([3, 10], "do not lie")):
        with pytest.raises(ValueError, match=text):
            tier.read_rows(extent, 100, 0, torch.tensor(rows), out)
    with pytest.raises(ValueError, match=r"needs uint8 \(1, 100\)"):
        tier.read_rows(extent, 100, 0, torch.tensor([3]), out)
    with pytest.raises(ValueError, match="int64"):
        tier.read_rows(extent, 100, 0, torch.tensor([3.0, 4.0]), out)


def test_one_thread_reads_while_another_writes(tier: DiskTier, buffers: list[torch.Tensor]) -> None:
    kept = [tier.reserve("state", f"weights/{i}", 2 * PIECE_BYTES + i) for i in range(4)]
    fresh = [tier.reserve("state", f"moments/{i}", 2 * PIECE_BYTES + i) for i in range(4)]
    tier.allocate()
    data = [_put(tier, extent, buffers[0], i) for i, extent in enumerate(kept)]
    problems: list[object] = []

    def read() -> None:
        for turn in range(20):
            extent = kept[turn % 4]
            tier.read(extent, buffers[0].fill_(0))
            if not torch.equal(buffers[0][: extent.nbytes], data[turn % 4]):
                problems.append(turn)

    def write() -> None:
        try:
            for turn in range(20):
                _put(tier, fresh[turn % 4], buffers[1], turn)
        except Exception as error:  # the other thread must hear of it
            problems.append(error)

    threads = [threading.Thread(target=job) for job in (read, write)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    for i, extent in enumerate(fresh):
        tier.read(extent, buffers[0])
        assert torch.equal(buffers[0][: extent.nbytes], _noise(extent.nbytes, 16 + i))
    moved = [aligned(extent.nbytes) for extent in kept]
    assert tier.bytes_read == 6 * sum(moved) and tier.bytes_written == 6 * sum(moved)


def test_bad_transfers_are_refused_before_they_start(tier: DiskTier, buffers: list[torch.Tensor]) -> None:
    extent = tier.reserve("state", "weights/a", PIECE_BYTES + 5)
    tier.allocate()
    buffer = buffers[0]
    cases = [
        ((buffer[: PIECE_BYTES + 5],), f"needs {PIECE_BYTES + PAGE_BYTES}"),
        ((buffer[1:],), "no multiple of 4096"),
        ((buffer.view(torch.int32),), "must be contiguous uint8"),
        ((buffer[::2],), "must be contiguous uint8"),
        ((buffer, 100), "no whole pieces"),
        ((buffer, 5, 4096), "do not lie|no whole pieces"),
        ((buffer, None, 4096), "no whole pieces"),
        ((buffer, PIECE_BYTES + 6), "do not lie"),
        ((buffer, 1, -1), "do not lie"),
    ]
    for arguments, text in cases:
        for call in (tier.read, tier.write):
            with pytest.raises(ValueError, match=text):
                call(extent, *arguments)  # type: ignore[arg-type]
    assert tier.bytes_written == tier.bytes_read == 0


def test_bad_names_are_refused(tier: DiskTier) -> None:
    tier.reserve("state", "weights/a", 1)
    with pytest.raises(ValueError, match="before"):
        tier.reserve("state", "weights/a", 1)
    tier.reserve("scratch", "weights/a", 1)
    for area, name in (("other", "weights/a"), ("state", "../x"), ("state", "/etc/passwd"), ("state", "")):
        with pytest.raises(ValueError, match="areas are"):
            tier.reserve(area, name, 1)
    with pytest.raises(ValueError, match="-1 bytes"):
        tier.reserve("state", "weights/b", -1)


def test_a_closed_tier_says_so(tmp_path: Path, buffers: list[torch.Tensor]) -> None:
    tier = DiskTier(tmp_path, ThreadTransfer(1), owner="test")
    extent = tier.reserve("state", "weights/a", 1)
    tier.allocate()
    tier.close()
    tier.close()
    with pytest.raises(ValueError, match="the tier is closed"):
        tier.read(extent, buffers[0])


def test_a_write_is_no_change_to_autograd(tier: DiskTier, buffers: list[torch.Tensor]) -> None:
    """A block may compute, and save for its backward, from weights that are stored meanwhile: padding is no change."""
    extent = tier.reserve("state", "weights/a", 4097)
    tier.allocate()
    buffer = buffers[0]
    weights = buffer[:4096].view(torch.float32).detach()
    before = weights._version
    tier.write(extent, buffer)
    tier.read(extent, buffer)
    assert weights._version == before
    assert not bool(buffer[4097 : aligned(4097)].any())
