"""Kinds K03 and K05: io_uring and threads are the same to the disk tier, the choice between them is made by trying,
and an extent has its shares on several paths."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from offloadz.memory.direct import probe_direct
from offloadz.memory.disk import DiskTier
from offloadz.memory.host import HostPool
from offloadz.memory.stripes import SMALL_BYTES, Together, shares, weights_of
from offloadz.memory.tier import PIECE_BYTES
from offloadz.plan.errors import ConfigError
from offloadz.plan.spec import aligned
from offloadz.runtime.transfer import (
    RingTransfer,
    ThreadTransfer,
    choose_transfer,
    nearest,
    probe_speed,
    transfer_for,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int16, torch.int64, torch.uint8, torch.bool]
LENGTHS = [
    0,
    1,
    511,
    512,
    513,
    4095,
    4096,
    4097,
    65537,
    1048573,
    PIECE_BYTES + 1,
    4 * PIECE_BYTES,
    17 * PIECE_BYTES + 3,
]


@pytest.fixture(params=["threads", "io_uring"])
def made(request: pytest.FixtureRequest) -> Iterator[RingTransfer | ThreadTransfer]:
    try:
        transfer = ThreadTransfer(3) if request.param == "threads" else RingTransfer(4)
    except OSError as error:
        pytest.skip(f"io_uring is refused here: {error}")
    yield transfer
    transfer.close()


def random_bytes(nbytes: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def test_lengths_in_random_order_come_back(tmp_path: Path, made: RingTransfer | ThreadTransfer) -> None:
    pool = HostPool(18 * PIECE_BYTES)
    buffer = pool.take("buffer", 18 * PIECE_BYTES)
    tier = DiskTier(tmp_path, made, owner="test")
    extents = [tier.reserve("state", f"weights/{n}", n) for n in LENGTHS]
    tier.allocate()
    order = torch.randperm(len(LENGTHS), generator=torch.Generator().manual_seed(3)).tolist()
    for i in order:
        buffer[: LENGTHS[i]] = random_bytes(LENGTHS[i], i)
        tier.write(extents[i], buffer)
    for i in reversed(order):
        buffer.fill_(0x33)
        tier.read(extents[i], buffer)
        assert torch.equal(buffer[: LENGTHS[i]], random_bytes(LENGTHS[i], i)), LENGTHS[i]
        assert not buffer[LENGTHS[i] : aligned(LENGTHS[i])].any()
    tier.close()


def test_both_back_ends_write_the_same_file_and_table(tmp_path: Path) -> None:
    """Bits of the file, of the checksum table, and of what either reads of what the other wrote."""
    transfers = [ThreadTransfer(3), transfer_for(tmp_path)]
    data = HostPool(32 * PIECE_BYTES)
    source, back = data.take("source", 13 * PIECE_BYTES + 4096), data.take("back", 13 * PIECE_BYTES + 4096)
    source.copy_(random_bytes(source.numel(), 5))
    digests, tables, fds = [], [], []
    for i, transfer in enumerate(transfers):
        fds.append(os.open(tmp_path / f"{i}", os.O_RDWR | os.O_CREAT, 0o600))
        tables.append(torch.full((14,), -1))
        transfer.write(fds[i], source, source.numel(), 8192, tables[i])
        digests.append(hashlib.sha256((tmp_path / f"{i}").read_bytes()).hexdigest())
    assert digests[0] == digests[1] and torch.equal(tables[0], tables[1])
    for transfer, fd, table in zip(transfers, reversed(fds), reversed(tables), strict=True):
        transfer.read(fd, back.fill_(1), back.numel(), 8192, table)
        assert torch.equal(back, source)
        transfer.close()
        os.close(fd)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(shape=st.lists(st.integers(0, 67), max_size=3), dtype=st.sampled_from(DTYPES), seed=st.integers(0, 1 << 30))
def test_any_dtype_and_shape_comes_back_bit_for_bit(
    tmp_path: Path, made: RingTransfer | ThreadTransfer, shape: list[int], dtype: torch.dtype, seed: int
) -> None:
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    content = random_bytes(nbytes, seed)
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT, 0o600)
    buffer = HostPool(aligned(nbytes) + 4096).take("buffer", aligned(nbytes))
    buffer[:nbytes] = content
    table = torch.full((max(1, -(-nbytes // PIECE_BYTES)),), -1)
    made.write(fd, buffer, aligned(nbytes), 4096, table)
    made.read(fd, buffer.fill_(7), aligned(nbytes), 4096, table)
    os.close(fd)
    found = buffer[:nbytes].clone().view(dtype).reshape(shape)
    assert torch.equal(found.flatten().view(torch.uint8), content)


def test_the_choice_is_made_in_the_directory_and_leaves_nothing(tmp_path: Path) -> None:
    direct = probe_direct(tmp_path).direct
    for io in ("auto", "io_uring", "threads"):
        try:
            transfer = choose_transfer(tmp_path, direct, io)
        except ConfigError as error:
            assert io == "io_uring" and "offload.io" in str(error)
            continue
        assert io == "auto" or transfer.name == io
        speed = probe_speed(tmp_path, transfer, direct, 4 * PIECE_BYTES)
        assert min(speed) > 0
        transfer.close()
    assert list(tmp_path.iterdir()) == []
    buffered = choose_transfer(tmp_path, False)
    assert buffered.name == "threads (io_uring dropped: without direct I/O it only adds threads of the kernel)"
    buffered.close()
    with pytest.raises(ConfigError, match="aio"):
        choose_transfer(tmp_path, direct, "aio")


def test_a_path_that_does_not_exist_yet_is_tried_above(tmp_path: Path) -> None:
    assert nearest(tmp_path / "a" / "b") == tmp_path
    transfer = transfer_for(tmp_path / "a" / "b", "threads")
    assert transfer.name == "threads" and list(tmp_path.iterdir()) == []
    transfer.close()


@given(
    nbytes=st.integers(0, 1 << 33),
    weights=st.lists(st.integers(0, 1000), min_size=1, max_size=5),
    turn=st.integers(0, 99),
)
def test_shares_are_whole_pieces_by_weight(nbytes: int, weights: list[int], turn: int) -> None:
    if not sum(weights):
        with pytest.raises(ValueError, match="not all 0"):
            shares(nbytes, weights)
        return
    found = shares(nbytes, weights, turn)
    assert sum(found) == nbytes and min(found) >= 0
    assert all(share == 0 for share, weight in zip(found, weights, strict=True) if not weight)
    filled = [share for share in found if share]
    assert all(share % PIECE_BYTES == 0 for share in filled[:-1])
    if nbytes >= SMALL_BYTES:
        for share, weight in zip(found, weights, strict=True):
            assert abs(share - nbytes * weight / sum(weights)) <= 2 * PIECE_BYTES
    else:
        assert len(filled) == bool(nbytes)


def test_weights_follow_the_time_of_a_read_and_a_write() -> None:
    assert weights_of([(3e9, 3e9)]) == (1000,)
    assert weights_of([(3e9, 3e9), (1e9, 1e9)]) == (750, 250)
    assert weights_of([(4e9, 1e9), (1.6e9, 1.6e9)]) == (500, 500)  # 1.25 and 1.25 s a byte of both
    assert sum(weights_of([(1e9, 2e9), (3e9, 5e8), (7e9, 6e9)])) == 1000
    assert weights_of([(1e12, 1e12), (1e5, 1e5)]) == (999, 1)
    with pytest.raises(ValueError, match="above 0"):
        weights_of([(1e9, 0.0)])


def test_small_extents_take_turns_by_weight() -> None:
    weights = (700, 300)
    turns = [shares(4096, weights, turn).index(4096) for turn in range(1000)]
    assert turns.count(0) == 700
    for start in range(0, 1000, 100):  # spread, not one path after the other
        assert 65 <= turns[start : start + 100].count(0) <= 75


def test_shares_move_together_and_the_first_error_is_raised() -> None:
    import threading

    met = threading.Barrier(3, timeout=20)
    together = Together(3)
    together.run([met.wait, met.wait, met.wait])  # type: ignore[list-item]  # ends only if all three are under way
    done: list[int] = []

    def fail(number: int) -> None:
        done.append(number)
        raise OSError(number, "x")

    with pytest.raises(OSError) as caught:
        together.run([lambda: done.append(0), lambda: fail(1), lambda: fail(2)])
    assert caught.value.errno == 1 and sorted(done) == [0, 1, 2]
    together.close()
    alone = Together(1)
    alone.run([lambda: done.append(9)])
    alone.close()
    assert done[-1] == 9
