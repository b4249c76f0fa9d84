"""Case G05, kind K05: direct I/O refused, by a RAM-backed file system or by a shim; full and read-only paths."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from shims import main, mounted, run_file

from offloadz.memory.direct import CACHE_STEP_BYTES, probe_direct
from offloadz.memory.disk import DiskTier
from offloadz.memory.host import HostPool
from offloadz.memory.tier import PIECE_BYTES
from offloadz.plan.errors import ConfigError, DiskFailed, DoesNotFit
from offloadz.runtime.transfer import ThreadTransfer

BIG_BYTES = CACHE_STEP_BYTES + 3 * PIECE_BYTES + 77  # more than one step of the buffered fallback


def _cached_bytes(path: Path) -> int:
    """Bytes of a file that lie in the page cache (mincore)."""
    size = path.stat().st_size
    pages = -(-size // mmap.PAGESIZE)
    flags = (ctypes.c_ubyte * pages)()
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), size) as area:
        start = ctypes.c_char.from_buffer(area)
        assert ctypes.CDLL(None).mincore(ctypes.byref(start), ctypes.c_size_t(size), flags) == 0
        del start
    return sum(flag & 1 for flag in flags) * mmap.PAGESIZE


def round_trip(directory: Path) -> dict[str, Any]:
    """Write two extents, read them back whole and by rows; what was found, and what the tier said."""
    pool = HostPool(BIG_BYTES + (4 << 20))
    buffer = pool.take("buffer", BIG_BYTES + 4096)
    tier = DiskTier(directory, ThreadTransfer(2), owner="run")
    big = tier.reserve("state", "weights/big", BIG_BYTES)
    small = tier.reserve("state", "weights/small", 513)
    tier.allocate()
    want = torch.arange(BIG_BYTES, dtype=torch.int64).mul(2654435761).bitwise_right_shift(7).to(torch.uint8)
    buffer[:BIG_BYTES] = want
    tier.write(big, buffer)
    tier.write(small, buffer)
    cached_after_write = _cached_bytes(tier.path / "state/weights.bin")
    buffer.zero_()
    tier.read(big, buffer)
    equal = torch.equal(buffer[:BIG_BYTES], want)
    tier.read(small, buffer)
    equal = equal and torch.equal(buffer[:513], want[:513]) and not bool(buffer[513:4096].any())
    rows = torch.tensor([0, 1, 1500, 30000])
    out = torch.empty(4, 700, dtype=torch.uint8)
    tier.read_rows(big, 700, 5, rows, out)
    equal = equal and all(torch.equal(out[i], want[5 + r * 700 : 705 + r * 700]) for i, r in enumerate(rows.tolist()))
    cached = _cached_bytes(tier.path / "state/weights.bin")
    tier.close()
    return {
        "equal": equal,
        "cached": max(cached, cached_after_write),
        "notes": tier.notes,
        "direct": tier.probe.direct,
        "kind": tier.probe.file_system,
        "left": os.listdir(directory),
    }


def test_direct_where_the_drive_allows_it(tmp_path: Path) -> None:
    found = round_trip(tmp_path)
    assert found["equal"] and found["left"] == []
    if not found["direct"]:
        pytest.skip(f"{found['kind']} refuses direct I/O here; the fallback is tested below")
    assert found["notes"] == [] and found["cached"] == 0


def test_refused_direct_io_falls_back_says_so_once_and_keeps_ram_free(tmp_path: Path) -> None:
    found = run_file(__file__, "round_trip", tmp_path, SHIM_NO_DIRECT="1")
    assert found["equal"] and not found["direct"] and found["left"] == []
    if found["kind"] not in ("tmpfs", "ramfs"):
        (note,) = found["notes"]
        assert "EINVAL 22" in note and str(tmp_path) in note and "page cache" in note
        assert found["cached"] == 0


def test_a_ram_backed_path_warns_that_it_saves_no_ram(tmp_path: Path) -> None:
    with mounted(tmp_path / "ram", "size=128m") as ram:
        found = run_file(__file__, "round_trip", ram, SHIM_NO_DIRECT="1")
        assert found["equal"] and found["kind"] == "tmpfs"
        assert len(found["notes"]) == 2 and "EINVAL" in found["notes"][0] and "saves no memory" in found["notes"][1]
        bare = run_file(__file__, "round_trip", ram, shim=False)  # whatever this kernel's tmpfs does with the flag
        assert bare["equal"] and "saves no memory" in bare["notes"][-1]


def test_a_truly_full_path_is_refused_with_numbers(tmp_path: Path) -> None:
    with mounted(tmp_path / "small", "size=4m") as small:
        tier = DiskTier(small, ThreadTransfer(1), owner="run")
        tier.reserve("state", "weights/all", 64 << 20)
        with pytest.raises(DoesNotFit, match=f"{64 << 20} bytes are needed, [0-9]+ are free"):
            tier.allocate()
        tier.close()
        (small / "filler").write_bytes(bytes((4 << 20) - 4096))
        with pytest.raises((DiskFailed, ConfigError), match="No space left"):
            DiskTier(small, ThreadTransfer(1), owner="run")
        assert os.listdir(small) == ["filler"]


def test_a_read_only_path_is_refused_with_its_cause(tmp_path: Path) -> None:
    with mounted(tmp_path / "fixed", "ro") as fixed, pytest.raises(ConfigError, match=r"Read-only.*offload\.swap"):
        DiskTier(fixed, ThreadTransfer(1), owner="run")


def test_the_probe_leaves_no_file(tmp_path: Path) -> None:
    probe_direct(tmp_path)
    assert os.listdir(tmp_path) == []
    with pytest.raises(FileNotFoundError):
        probe_direct(tmp_path / "nowhere")


if __name__ == "__main__":
    main(globals())
