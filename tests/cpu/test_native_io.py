"""Transfers by threads and by io_uring: what is written is read back, and whatever goes wrong is a Python error.

Kind K03 (swap files) at its lowest layer: odd lengths, short and interrupted calls, a full drive, damaged pieces.
"""

import errno
import os
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from offloadz.runtime import native

MIB = 1 << 20
LENGTHS = [0, 4096, 8192, MIB - 4096, MIB, MIB + 4096, 4 * MIB, 4 * MIB + 4096, 9 * MIB - 4096]


def aligned(num_bytes: int, fill: int | None = None) -> torch.Tensor:
    room = torch.empty(num_bytes + 4096, dtype=torch.uint8)
    start = -room.data_ptr() % 4096
    out = room[start : start + num_bytes]
    return out.random_() if fill is None else out.fill_(fill)


def table(num_bytes: int) -> torch.Tensor:
    return torch.full((-(-num_bytes // MIB),), native.NEVER_WRITTEN)


@pytest.fixture(params=["threads", "io_uring"])
def pool(request):
    try:
        made = native.io_start(3) if request.param == "threads" else native.ring_start(5)
    except OSError as error:
        pytest.skip(f"io_uring is refused here: {error}")
    yield made
    assert made.fallen() == ""
    native.io_stop(made)


@pytest.fixture(params=["direct", "buffered"])
def fd(request, tmp_path):
    flags = os.O_RDWR | os.O_CREAT | (os.O_DIRECT if request.param == "direct" else 0)
    try:
        opened = os.open(tmp_path / "extent", flags, 0o600)
    except OSError:
        pytest.skip("this file system refuses direct I/O")
    yield opened
    os.close(opened)


@pytest.mark.parametrize("origin", [0, 4096, 3 * MIB + 8192])
@pytest.mark.parametrize("length", LENGTHS)
def test_what_is_written_is_read_back(pool, fd, length, origin):
    data, back, crcs = aligned(length), aligned(length, 7), table(length)
    native.write_at(pool, fd, data, length, origin, crcs, origin=origin)
    native.read_at(pool, fd, back, length, origin, crcs, origin=origin)
    assert torch.equal(back, data)
    for index, entry in enumerate(crcs.tolist()):
        piece = data[index * MIB : (index + 1) * MIB]
        assert entry == piece.numel() << 32 | native.crc32c(piece)
    if length:
        assert os.fstat(fd).st_size == origin + length


def test_parts_of_an_extent_move_alone_and_without_a_table(pool, fd):
    length, origin = 11 * MIB + 4096, 8192
    data, crcs = aligned(length), table(length)
    for first, last in ((5, 11), (0, 2), (2, 5)):  # across, at and inside requests of four pieces
        part = data[first * MIB : last * MIB]
        native.write_at(pool, fd, part, part.numel(), origin + first * MIB, crcs, origin=origin)
    native.write_at(pool, fd, data[11 * MIB :], 4096, origin + 11 * MIB, crcs, origin=origin)
    for first, last in ((0, 12), (3, 7), (11, 12)):
        wanted = data[first * MIB : last * MIB]
        back = aligned(wanted.numel(), 0)
        native.read_at(pool, fd, back, wanted.numel(), origin + first * MIB, crcs, origin=origin)
        assert torch.equal(back, wanted)
    back = aligned(12288, 0)
    native.read_at(pool, fd, back, 12288, origin + 3 * MIB + 4096)  # no table: any aligned place
    assert torch.equal(back, data[3 * MIB + 4096 :][:12288])


def test_pieces_never_written_read_as_zeros_and_are_not_read(pool, fd):
    crcs = table(6 * MIB)
    data = aligned(2 * MIB)
    native.write_at(pool, fd, data, 2 * MIB, MIB, crcs)
    back = aligned(6 * MIB, 9)  # the file ends after three pieces: reading the rest would fail
    native.read_at(pool, fd, back, 6 * MIB, 0, crcs)
    assert torch.equal(back[MIB : 3 * MIB], data)
    assert not back[:MIB].any()
    assert not back[3 * MIB :].any()


def test_a_changed_byte_is_found_and_placed(pool, fd):
    length, origin = 6 * MIB + 4096, 4096
    data, back, crcs = aligned(length), aligned(length), table(length)
    native.write_at(pool, fd, data, length, origin, crcs, origin=origin)
    block = aligned(4096)
    at = origin + 5 * MIB + 12288
    native.read_at(pool, fd, block, 4096, at)
    block[77] ^= 1
    native.write_at(pool, fd, block, 4096, at)
    with pytest.raises(native.NativeIOError, match="piece 5 ") as caught:
        native.read_at(pool, fd, back, length, origin, crcs, origin=origin)
    error = caught.value
    assert error.damaged
    assert (error.piece, error.offset) == (5, origin + 5 * MIB)
    assert error.wanted_crc == crcs[5].item() & 0xFFFFFFFF
    assert error.found_crc == native.crc32c(
        torch.cat([data[5 * MIB : 5 * MIB + 12288], block, data[5 * MIB + 16384 :]])[:MIB]
    )


def test_a_piece_of_another_length_is_damage(pool, fd):
    data, crcs = aligned(MIB, 0), table(MIB)
    native.write_at(pool, fd, data, MIB, 0, crcs)
    with pytest.raises(native.NativeIOError) as caught:
        native.read_at(pool, fd, data, 4096, 0, crcs)
    assert caught.value.damaged
    assert (caught.value.wanted_bytes, caught.value.found_bytes) == (MIB, 4096)


def test_what_the_system_refuses_is_an_error_with_its_number(pool, fd, tmp_path):
    buffer = aligned(8 * MIB)
    with pytest.raises(native.NativeIOError) as caught:
        native.read_at(pool, 9999, buffer, 4096, 0)
    assert caught.value.errno == errno.EBADF
    assert caught.value.operation == "read"
    native.write_at(pool, fd, buffer, 5 * MIB, 0)
    with pytest.raises(native.NativeIOError, match="wanted 4194304 bytes, found 1048576") as caught:
        native.read_at(pool, fd, buffer, 8 * MIB, 0)
    assert not caught.value.damaged
    assert (caught.value.errno, caught.value.offset, caught.value.found_bytes) == (errno.ENODATA, 4 * MIB, MIB)
    (tmp_path / "closed").touch()
    only_read = os.open(tmp_path / "closed", os.O_RDONLY)
    crcs = table(MIB)
    with pytest.raises(native.NativeIOError) as caught:
        native.write_at(pool, only_read, buffer, MIB, 0, crcs)
    os.close(only_read)
    assert caught.value.errno == errno.EBADF
    assert crcs[0] == native.NEVER_WRITTEN, "an entry for bytes that were not written"


def test_a_full_drive_is_an_error(pool):
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full here")
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        with pytest.raises(native.NativeIOError) as caught:
            native.write_at(pool, full, aligned(9 * MIB), 9 * MIB, 0, table(9 * MIB))
    finally:
        os.close(full)
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.operation == "write"


def test_many_callers_share_one_pool(pool, fd):
    size, num_callers = 3 * MIB + 4096, 6
    slot = 4 * MIB

    def round_trips(caller: int) -> bool:
        crcs, back = table(size), aligned(size)
        for _ in range(4):
            data = aligned(size)
            native.write_at(pool, fd, data, size, caller * slot, crcs, origin=caller * slot)
            native.read_at(pool, fd, back, size, caller * slot, crcs, origin=caller * slot)
            if not torch.equal(back, data):
                return False
        return True

    with ThreadPoolExecutor(num_callers) as callers:
        assert all(callers.map(round_trips, range(num_callers)))


def test_one_callers_failure_is_not_anothers(pool, fd):
    data = aligned(8 * MIB)
    native.write_at(pool, fd, data, 8 * MIB, 0)
    wrong = []

    def fail() -> None:
        mine = aligned(8 * MIB, 0)
        for _ in range(50):
            try:
                native.read_at(pool, 9999, mine, 8 * MIB, 0)
                wrong.append("no error")
            except native.NativeIOError:
                pass

    failing = threading.Thread(target=fail)
    failing.start()
    back = aligned(8 * MIB, 0)
    while failing.is_alive():
        back.fill_(0)
        native.read_at(pool, fd, back, 8 * MIB, 0)
        assert torch.equal(back, data)
    failing.join()
    assert not wrong


@pytest.mark.parametrize("start", [native.io_start, native.ring_start])
def test_a_stopped_pool_refuses_and_waits_for_its_calls(fd, start):
    try:
        made = start(2)
    except OSError as error:
        pytest.skip(f"io_uring is refused here: {error}")
    data = aligned(16 * MIB)
    with ThreadPoolExecutor(4) as callers:
        calls = [callers.submit(native.write_at, made, fd, data, 16 * MIB, 0) for _ in range(4)]
        calls[0].result()
        native.io_stop(made)
        for call in calls:
            assert call.exception() is None or "was stopped" in str(call.exception())
    native.io_stop(made)
    with pytest.raises(ValueError, match="was stopped"):
        native.read_at(made, fd, data, 4096, 0)


def test_a_fork_is_told_that_the_threads_are_not_there(pool):
    buffer = aligned(4096)
    flat = torch.ones(100000), torch.zeros(100000), torch.zeros(100000), torch.ones(100000)

    def update() -> None:
        hyper = {"lr": 1.0, "beta1": 0.9, "beta2": 0.9, "eps": 1e-8, "weight_decay": 0.0, "step": 1, "threads": 2}
        native.update_("adam", flat[0], None, flat[1:3], (None, None), flat[3], **hyper)

    update()  # the team exists before the fork
    child = os.fork()
    if child == 0:
        seen = 99
        try:
            update()  # alone, but done
            native.read_at(pool, 0, buffer, 4096, 0)
        except native.NativeIOError as error:
            seen = error.errno
        finally:
            os._exit(seen)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == errno.ECHILD


def test_wrong_arguments_name_what_was_found(pool, fd):
    buffer = aligned(4096)
    for arguments, words in [
        ((buffer, 4097, 0), "nbytes is 4097; the buffer has 4096"),
        ((buffer, -1, 0), "nbytes is -1"),
        ((buffer, 4096, -4096), "offset is -4096"),
        ((buffer.float(), 4096, 0), "buffer has dtype float32; uint8 is needed"),
        ((buffer, 4096, 4096, table(MIB)), "the transfer starts 4096 bytes into its extent"),
        ((buffer, 4096, MIB, table(MIB)), "crcs has 1 entries; 2 are needed"),
        ((buffer, 4096, 0, table(MIB).int()), "crcs has dtype int32; int64 is needed"),
    ]:
        with pytest.raises(ValueError, match=words):
            native.read_at(pool, fd, *arguments)
    for depth in (0, -1, 65):
        with pytest.raises(ValueError, match=f"depth is {depth}"):
            native.ring_start(depth)
    for request_bytes in (0, 4096, MIB + 4096, 17 * MIB):
        with pytest.raises(ValueError, match=f"request_bytes is {request_bytes}"):
            native.io_start(2, request_bytes)
    for count in (0, -1, 257):
        with pytest.raises(ValueError, match=f"num_threads is {count}"):
            native.io_start(count)


SUMMED = [0, 1, 7, 8, 9, 255, 511, 512, 513, 767, 768, 6143, 6144, 12301, 24575, 24576, 30733, MIB]


@pytest.mark.parametrize("length", SUMMED)
def test_crc32c_is_the_published_one_in_every_way(length):
    """Against a bit-by-bit twin for short data and against the other way for long; RFC 3720's values too."""
    data = torch.randint(0, 256, (length + 3,), dtype=torch.uint8)[3:]
    found = set()
    for isa in native.isa_supported():
        native.select_isa(isa)
        found.add(native.crc32c(data))
        for known, wanted in ((b"123456789", 0xE3069283), (bytes(32), 0x8A9136AA), (b"\xff" * 32, 0x62A8AB43)):
            assert native.crc32c(torch.tensor(list(known), dtype=torch.uint8)) == wanted
    crc = 0xFFFFFFFF
    for byte in data[: 40000 if length < 40000 else 0].tolist():
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    assert len(found) == 1
    if length < 40000:
        assert found == {crc ^ 0xFFFFFFFF}


SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
static int calls;
typedef ssize_t (*Move)(int, void *, size_t, off64_t);
static ssize_t hurt(const char *name, int fd, void *buffer, size_t count, off64_t at) {
  Move real = (Move)dlsym(RTLD_NEXT, name);
  const char *mode = getenv("HURT");
  int call = __sync_fetch_and_add(&calls, 1);
  if (!strcmp(mode, "interrupt") && call % 3) { errno = EINTR; return -1; }
  if (!strcmp(mode, "half") && call % 2) return real(fd, buffer, (count + 1) / 2, at);
  if (!strcmp(mode, "always_half")) return real(fd, buffer, count / 2, at);
  if (!strcmp(mode, "nothing")) return 0;
  if (!strcmp(mode, "one_byte")) return real(fd, buffer, count, at) < 1 ? -1 : 1;
  if (!strcmp(mode, "full") && name[1] == 'w' && call > 5) { errno = ENOSPC; return -1; }
  if (!strcmp(mode, "broken") && name[1] == 'r') { errno = EIO; return -1; }
  return real(fd, buffer, count, at);
}
ssize_t pread64(int fd, void *b, size_t n, off64_t at) { return hurt("pread64", fd, b, n, at); }
ssize_t pwrite64(int fd, const void *b, size_t n, off64_t at) { return hurt("pwrite64", fd, (void *)b, n, at); }
"""

HURT_CHILD = """
import os, sys, torch
from offloadz.runtime import native
room = torch.empty(2 * (6 << 20) + 3 * 4096, dtype=torch.uint8).random_()
start = -room.data_ptr() % 4096
size = (5 << 20) + 4096
data, back = room[start : start + size], room[start + (6 << 20) : start + (6 << 20) + size]
for direct in (False, True):
    try:
        fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT | (os.O_DIRECT if direct else 0), 0o600)
    except OSError:
        continue
    for mode in sys.argv[2:]:
        os.environ["HURT"] = mode
        pool, crcs = native.io_start(2), torch.full((6,), -1)
        try:
            for turn in range(3):
                native.write_at(pool, fd, data, size, 4096, crcs, origin=4096)
                native.read_at(pool, fd, back.fill_(0), size, 4096, crcs, origin=4096)
            print(direct, mode, "same" if torch.equal(data, back) else "different")
        except native.NativeIOError as error:
            print(direct, mode, error.operation, error.errno, error.found_bytes < error.wanted_bytes)
        native.io_stop(pool)
"""
HURTS = {
    "none": "same",
    "half": "same",
    "interrupt": "same",
    "always_half": f"write {errno.EIO} True",
    "nothing": f"write {errno.EIO} True",
    "one_byte": f"write {errno.EIO} True",
    "full": f"write {errno.ENOSPC} True",
    "broken": f"read {errno.EIO} True",
}


@pytest.fixture(scope="module")
def hurt(tmp_path_factory):
    """What one process saw under each fault; the shim is real code between the library and the system."""
    compiler = shutil.which("gcc") or shutil.which("g++")
    if compiler is None:
        pytest.skip("the fault shim needs a C compiler")
    folder = tmp_path_factory.mktemp("shim")
    (folder / "shim.c").write_text(SHIM)
    build = [compiler, "-x", "c", "-shared", "-fPIC", "-o", folder / "shim.so", folder / "shim.c", "-ldl"]
    subprocess.run(build, check=True)
    command = [sys.executable, "-c", HURT_CHILD, str(folder / "extent"), *HURTS]
    environment = os.environ | {"LD_PRELOAD": str(folder / "shim.so"), "HURT": "none"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("mode", HURTS)
def test_hurt_system_calls_are_resumed_or_named(hurt, mode, direct):
    if direct and not any(line.startswith("True") for line in hurt):
        pytest.skip("this file system refuses direct I/O")
    assert f"{direct} {mode} {HURTS[mode]}" in hurt


def test_the_library_brings_no_openmp():
    """[csrc/pool.h] torch's libgomp would be the one used, spinning and ending the process when a thread is refused."""
    assert b"libgomp" not in Path(native.load_library()._name).read_bytes()
