"""Case G05, kinds K03 and K05, for io_uring: refused at once or later, short requests, full drives, few lockable bytes.

A shim that replaces pread does not see io_uring, so one stands between the library and the ring's own system calls
(`ring_shim.c`); a seccomp filter, file size limits, a full tmpfs and an unprivileged user are the system's real ones.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from shims import main, mounted, run_file, shim_library

from offloadz.memory.disk import DiskTier
from offloadz.memory.host import HostPool
from offloadz.plan.errors import ConfigError, DamagedState, DiskFailed
from offloadz.runtime import native
from offloadz.runtime.transfer import RingTransfer, choose_transfer

MIB = 1 << 20
SIZES = [0, 1, 511, 4097, MIB + 1, 4 * MIB + 8191, 23 * MIB + 77]
MODES = ("", "half", "crumb", "busy", "no_register", "eio")
FALLS = {
    "bad_request": "a request was refused (EINVAL 22",
    "no_ring": "a ring was refused (EPERM 1",
    "no_call": "a call on its ring was refused (ENOSYS 38",
    "no_call 3": "a call on its ring was refused (ENOSYS 38",
    "no_wait": "a call on its ring was refused (EINVAL 22",
}


@pytest.fixture(scope="module", autouse=True)
def ring_works() -> None:
    try:
        RingTransfer().close()
    except OSError as error:
        pytest.skip(f"io_uring is refused on this machine: {error}")


@contextmanager
def bad_ring(mode: str) -> Iterator[ctypes.CDLL]:
    library = ctypes.CDLL(os.environ["LD_PRELOAD"])
    library.ring_reset()
    os.environ["RING_MODE"], _, os.environ["RING_AFTER"] = mode.partition(" ")
    try:
        yield library
    finally:
        os.environ["RING_MODE"] = ""


class Bench:
    """A tier by io_uring with an extent per size, and what was written to each."""

    def __init__(self, directory: Path, transfer: Any = None) -> None:
        self.pool = HostPool(32 * MIB)
        self.buffer = self.pool.take("buffer", 24 * MIB + 4096)
        self.transfer = transfer or RingTransfer(depth=3)
        self.tier = DiskTier(directory, self.transfer, owner="bench")
        self.extents = [self.tier.reserve("state", f"weights/p{i}", size) for i, size in enumerate(SIZES)]
        self.tier.allocate()

    def round_trip(self, seed: int) -> bool:
        """Whether everything written comes back, in another order."""
        drawn = torch.Generator().manual_seed(seed)
        content = {e: torch.randint(0, 256, (e.nbytes,), dtype=torch.uint8, generator=drawn) for e in self.extents}
        for extent in reversed(self.extents):
            self.buffer[: extent.nbytes] = content[extent]
            self.tier.write(extent, self.buffer)
        equal = True
        for extent in self.extents:
            self.buffer.fill_(0x55)
            self.tier.read(extent, self.buffer)
            equal = equal and torch.equal(self.buffer[: extent.nbytes], content[extent])
        return equal


def bad_rings(directory: Path) -> dict[str, Any]:
    """Every way of a bad ring, one after the other in one process, each in the middle of good work."""
    found: dict[str, Any] = {}
    for seed, mode in enumerate((*MODES, *FALLS)):
        bench = Bench(directory)
        good = mode == "no_ring" or bench.round_trip(0)
        if mode == "no_ring":
            bench.transfer._pool.fix(bench.buffer)
        with bad_ring(mode) as library:
            if mode == "no_ring":  # the ring there is must be busy for a second one to be asked for
                found[mode] = two_callers(bench)
            else:
                found[mode] = {"equal": bench.round_trip(seed)}
            found[mode] |= {"spoiled": library.ring_spoiled(), "name": bench.transfer.name}
        found[mode]["good"] = good and bench.round_trip(99)
        bench.tier.close()
    with bad_ring("no_ring"):
        found["choice"] = choices(directory)
    found["flying"], found["first"] = flying(directory)
    found["eio_stays"] = failing_drive(directory)
    found["left"] = os.listdir(directory)
    return found


def two_callers(bench: Bench) -> dict[str, Any]:
    """Two transfers at once: one has the ring, the other is refused a second one."""
    from concurrent.futures import ThreadPoolExecutor

    extent = bench.extents[-1]
    data = torch.randint(0, 256, (extent.nbytes,), dtype=torch.uint8)
    bench.buffer[: extent.nbytes] = data
    bench.tier.write(extent, bench.buffer)
    pool = HostPool(60 * MIB)
    buffers = [pool.take(f"{i}", 24 * MIB) for i in range(2)]
    equal = True
    with ThreadPoolExecutor(2) as callers:
        for _ in range(20):
            for _ in callers.map(lambda buffer: bench.tier.read(extent, buffer), buffers):
                pass
            equal = equal and all(torch.equal(buffer[: extent.nbytes], data) for buffer in buffers)
            if bench.transfer.name != "io_uring":
                break
    return {"equal": equal}


def flying(directory: Path) -> tuple[int, int]:
    """How many requests of the longest extent's read were under way with its last one, and how many of its write were
    handed in by the first call."""
    bench = Bench(directory)
    bench.round_trip(0)
    with bad_ring("") as library:
        bench.tier.read(bench.extents[-1], bench.buffer)
        at_last = library.ring_flying()
    with bad_ring("") as library:
        bench.tier.write(bench.extents[-1], bench.buffer)
        at_first = library.ring_first()
    bench.tier.close()
    return int(at_last), int(at_first)


def failing_drive(directory: Path) -> dict[str, Any]:
    """What a write and a read say where neither the ring nor plain calls get through, and what is there then."""
    bench = Bench(directory)
    told: dict[str, Any] = {"good": bench.round_trip(0), "file": str(bench.tier.path / "state/weights.bin")}
    extent, content = bench.extents[-1], bench.buffer.clone()
    for operation, move in (("read", bench.tier.read), ("write", bench.tier.write), ("again", bench.tier.read)):
        try:
            with bad_ring("eio_stays" if operation != "again" else ""):
                move(extent, bench.buffer)
        except (DiskFailed, DamagedState) as error:
            told[operation] = [type(error).__name__, error.args[0], str(error)]
        if operation == "read":
            bench.tier.read(extent, bench.buffer)
            told["then_equal"] = torch.equal(bench.buffer[: extent.nbytes], content[: extent.nbytes])
    told |= {"name": bench.transfer.name, "offset": extent.offset, "then": bench.round_trip(1)}
    bench.tier.close()
    return told


def choices(directory: Path) -> dict[str, str]:
    told = {}
    for io in ("auto", "io_uring", "threads"):
        try:
            transfer = choose_transfer(directory, True, io)
            told[io] = transfer.name
            transfer.close()
        except ConfigError as error:
            told[io] = str(error)
    return told


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run_file(
        __file__, "bad_rings", tmp_path_factory.mktemp("rings"), shim=False, LD_PRELOAD=shim_library("ring_shim.c")
    )


@pytest.mark.parametrize("mode", MODES)
def test_what_a_ring_leaves_undone_is_done(found: Any, mode: str) -> None:
    assert found[mode]["equal"] and found[mode]["good"]
    assert found[mode]["name"] == "io_uring"
    assert (found[mode]["spoiled"] > 0) == bool(mode)


@pytest.mark.parametrize("mode", FALLS)
def test_a_ring_refused_later_becomes_threads_and_loses_nothing(found: Any, mode: str) -> None:
    assert found[mode]["spoiled"] > 0
    assert found[mode]["equal"] and found[mode]["good"]
    assert found[mode]["name"].startswith(f"threads (io_uring until {FALLS[mode]}"), found[mode]["name"]


@pytest.mark.parametrize("operation", ["read", "write"])
def test_a_request_that_fails_for_good_names_everything(found: Any, operation: str) -> None:
    told = found["eio_stays"]
    kind, number, text = told[operation]
    assert (kind, number) == ("DiskFailed", errno.EIO)
    for part in (f"{operation} of weights/p6 failed: Input/output error", told["file"], f"offset {told['offset']},"):
        assert part in text, text
    assert f"wanted {4 * MIB} bytes, found 0" in text
    assert told["good"] and told["then_equal"], "a read that failed changed what is there"
    assert told["again"][0] == "DamagedState", "half of a write was taken for a whole one"
    assert told["then"] and told["name"] == "io_uring", "a drive that fails is no reason to leave the ring"


def test_a_ring_refused_at_the_start_is_dropped_with_its_reason(found: Any) -> None:
    told = found["choice"]
    assert told["auto"].startswith("threads (io_uring dropped: a ring was refused (EPERM 1: ")
    assert told["threads"] == "threads"
    assert 'offload.io = "io_uring" does not work' in told["io_uring"] and "EPERM 1" in told["io_uring"]
    assert found["left"] == []


def test_the_last_request_of_a_checked_read_goes_alone(found: Any) -> None:
    assert found["flying"] == 1  # sums of others under way with it would have nothing to run beside


def test_a_checked_write_has_its_requests_under_way_before_it_sums_any(found: Any) -> None:
    assert found["first"] == 3  # the depth


def forbid(*numbers: int) -> None:
    """A real seccomp filter for this thread and its children: these system calls are EPERM from now on."""
    libc = ctypes.CDLL(None, use_errno=True)
    rules = [(0x20, 0, 0, 0)]  # load the number
    for left, number in zip(reversed(range(len(numbers))), numbers, strict=True):
        rules.append((0x15, left + 1, 0, number))  # equal: jump to the refusal
    rules += [(0x06, 0, 0, 0x7FFF0000), (0x06, 0, 0, 0x00050000 | errno.EPERM)]
    code = b"".join(
        op.to_bytes(2, "little") + bytes([yes, no]) + value.to_bytes(4, "little") for op, yes, no, value in rules
    )
    held = ctypes.create_string_buffer(code)
    program = ctypes.create_string_buffer(
        len(rules).to_bytes(8, "little") + ctypes.addressof(held).to_bytes(8, "little"), 16
    )
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # no new privileges
    assert libc.prctl(22, 2, program, 0, 0) == 0, ctypes.get_errno()


def forbidden(directory: Path) -> dict[str, Any]:
    """io_uring_enter forbidden under a ring that works, then io_uring_setup too."""
    bench = Bench(directory)
    told = {"before": bench.round_trip(1), "name": bench.transfer.name}
    forbid(426)
    told |= {"after": bench.round_trip(2), "then": bench.transfer.name}
    bench.tier.close()
    told["no_call"] = choices(directory)
    forbid(425)
    told["no_ring"] = choices(directory)
    return told


@pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="the filter knows little-endian 64 bits")
def test_seccomp_at_the_start_and_later(tmp_path: Path) -> None:
    told = run_file(__file__, "forbidden", tmp_path, shim=False)
    assert told["before"] and told["name"] == "io_uring"
    assert told["after"] and told["then"].startswith("threads (io_uring until a call on its ring was refused (EPERM 1")
    assert "a call on its ring was refused (EPERM 1" in told["no_call"]["auto"]
    assert "a ring was refused (EPERM 1" in told["no_ring"]["auto"]
    for moment in ("no_call", "no_ring"):
        assert "does not work" in told[moment]["io_uring"] and told[moment]["threads"] == "threads"


def few_lockable_bytes(directory: Path) -> dict[str, Any]:
    """As nobody with 8 MiB of lockable memory: of a buffer of 24 MiB only a part is fixed, and nothing else changes."""
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (8 * MIB, 8 * MIB))
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
    libc = ctypes.CDLL(None, use_errno=True)
    parameters = ctypes.create_string_buffer(120)
    ring = libc.syscall(425, 4, parameters)
    pool = HostPool(16 * MIB)
    area = pool.take("a", 16 * MIB)
    entry = (ctypes.c_uint64 * 2)(area.data_ptr(), area.nbytes)
    refused = libc.syscall(427, ring, 0, ctypes.byref(entry), 1), ctypes.get_errno()
    os.close(ring)
    bench = Bench(directory, choose_transfer(directory, True))
    told = {"refused": refused, "fixed": bench.transfer.fix(bench.buffer), "equal": bench.round_trip(1)}
    told |= {"name": bench.transfer.name, "pinned": pinned_bytes()}
    bench.tier.close()
    return told


def pinned_bytes() -> int:
    """What rings hold of this process's memory."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmPin:"):
            return int(line.split()[1]) * 1024
    return 0


def test_a_user_with_few_lockable_bytes(tmp_path: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can become nobody")
    directory = Path(tempfile.mkdtemp(prefix="offloadz-nobody-"))
    directory.chmod(0o777)
    try:
        told = run_file(__file__, "few_lockable_bytes", directory, shim=False)
    finally:
        shutil.rmtree(directory)
    assert told["refused"] == [-1, errno.ENOMEM], "the limit is not what this test is about"
    assert told["equal"] and told["name"] == "io_uring"
    assert 4 * MIB <= told["pinned"] <= 8 * MIB  # half of the limit at the least, though no buffer fits whole


def refused_buffers(directory: Path) -> dict[str, Any]:
    told = {}
    for number in (errno.ENOMEM, errno.EINVAL):
        with bad_ring(f"no_register {number}") as library:
            bench = Bench(directory)
            fixed, equal = bench.transfer.fix(bench.buffer), bench.round_trip(1)
            told[errno.errorcode[number]] = {"fixed": fixed, "equal": equal, "asked": library.ring_fixes()}
            bench.tier.close()
    return told


def test_less_is_asked_for_only_where_it_was_too_much(tmp_path: Path) -> None:
    shim = shim_library("ring_shim.c")
    told = run_file(__file__, "refused_buffers", tmp_path, shim=False, LD_PRELOAD=shim)
    assert all(one["fixed"] and one["equal"] for one in told.values())
    assert told["ENOMEM"]["asked"] > 4 * told["EINVAL"]["asked"] > 0


def test_fixed_buffers_are_pinned_and_given_back(tmp_path: Path) -> None:
    if os.geteuid():
        pytest.skip("a user may not lock enough")
    before = pinned_bytes()
    bench = Bench(tmp_path)
    assert bench.transfer.fix(bench.buffer)
    assert bench.round_trip(1)
    assert pinned_bytes() - before >= bench.buffer.nbytes
    bench.tier.close()
    for _ in range(100):  # the kernel takes a ring apart after its last descriptor is gone
        if pinned_bytes() <= before:
            break
        signal.sigtimedwait([], 0.05)
    assert pinned_bytes() <= before


def test_descriptors_threads_and_memory_are_back_after_close(tmp_path: Path) -> None:
    def held() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    Bench(tmp_path).tier.close()
    before, resident = held(), None
    for turn in range(8):
        bench = Bench(tmp_path)
        assert bench.round_trip(turn)
        bench.tier.close()
        del bench
        for _ in range(100):  # a thread of the kernel that helped a ring goes a moment later
            if held()[1] <= before[1]:
                break
            time.sleep(0.05)
        assert held()[0] == before[0] and held()[1] <= before[1]
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        resident = resident or pages
        # Eight buffers kept would be 192 MiB; the C allocator may keep one block of the test's own random bytes.
        assert (pages - resident) * 4096 < 64 * MIB
    assert os.listdir(tmp_path) == []


def test_a_full_file_system_is_an_error_with_numbers(tmp_path: Path) -> None:
    with mounted(tmp_path / "small", "size=12m") as small:
        fd = os.open(small / "file", os.O_RDWR | os.O_CREAT, 0o600)
        pool, area = native.ring_start(4), HostPool(24 * MIB).take("data", 24 * MIB)
        area.random_()
        with pytest.raises(native.NativeIOError, match="write at offset") as caught:
            native.write_at(pool, fd, area, 24 * MIB, 0, torch.full((24,), native.NEVER_WRITTEN))
        assert caught.value.errno == errno.ENOSPC
        assert caught.value.found_bytes < caught.value.wanted_bytes and pool.fallen() == ""
        pool.stop()
        os.close(fd)


def size_limit(directory: Path) -> dict[str, Any]:
    """A file that may not grow beyond 6 MiB and a page: the write there ends short, then fails."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (6 * MIB + 4096, resource.RLIM_INFINITY))
    pool, area = native.ring_start(4), HostPool(16 * MIB).take("data", 16 * MIB)
    fd = os.open(directory / "file", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        native.write_at(pool, fd, area, 16 * MIB, 0)
    except native.NativeIOError as error:
        return {"errno": error.errno, "at": error.offset, "found": error.found_bytes, "fallen": pool.fallen()}
    return {}


def test_a_write_that_ends_short_says_where(tmp_path: Path) -> None:
    told = run_file(__file__, "size_limit", tmp_path, shim=False)
    assert told == {"errno": errno.EFBIG, "at": 4 * MIB, "found": 2 * MIB + 4096, "fallen": ""}


def test_a_file_cut_short_under_the_reader(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    assert bench.round_trip(1)
    os.truncate(bench.tier.path / "state/weights.bin", bench.extents[-1].offset + 4096)
    with pytest.raises(DiskFailed, match=r"weights/p6.*wanted .* found 4096"):
        bench.tier.read(bench.extents[-1], bench.buffer)
    bench.tier.close()


if __name__ == "__main__":
    main(globals())
