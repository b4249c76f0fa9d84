"""The native code is free of data races, as ThreadSanitizer sees it: a build of its own, driven by `races.cpp`.

Kind K12 (a result that depends on timing) at its lowest layer.  There is no OpenMP in the library: its team is of plain
threads that wait on mutexes and condition variables (csrc/pool.h), all of which ThreadSanitizer follows, so what is
built is the usual code with one more flag.  What the kernel does for io_uring it cannot see; the driver compares bytes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
JOBS = ("update", "forks", "threads", "rings", "refusal")
FLAGS = ["-std=c++17", "-O1", "-g", "-pthread", "-fsanitize=thread"]
RACE, NO_RING = 66, 77


def done(*words: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    how = {"capture_output": True, "text": True, "timeout": 800}
    return subprocess.run([str(word) for word in words], cwd=ROOT, env={**os.environ, **env}, **how)


def built(compiler: str, source: Path, out: Path, *more: str | Path) -> subprocess.CompletedProcess[str]:
    return done(compiler, *FLAGS, source, *more, "-o", out)


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command that starts the driver; without random addresses where the runtime asks for that."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ to build for ThreadSanitizer")
    place = tmp_path_factory.mktemp("races")
    (place / "nothing.cpp").write_text("int main() {}\n")
    nothing = place / "nothing"
    answer = built(compiler, place / "nothing.cpp", nothing)
    if answer.returncode:
        pytest.skip(f"{compiler} has no runtime of ThreadSanitizer: {answer.stderr.strip()[-200:]}")
    starts = [before for before in ([], ["setarch", "-R"]) if not before or shutil.which(before[0])]
    starts = [before for before in starts if done(*before, nothing).returncode == 0]
    if not starts:
        pytest.skip(f"ThreadSanitizer does not start here: {done(nothing).stderr.strip()[:200]}")
    where = ["--build-lib", place / "lib", "--build-temp", place / "objects"]
    answer = done(sys.executable, "setup.py", "-q", "build_ext", *where, OFFLOADZ_SANITIZE="thread")
    assert answer.returncode == 0, answer.stderr
    (library,) = (place / "lib/offloadz").glob("_native*.so")
    # Its functions of Python are never called.
    link = [library, "-Wl,--unresolved-symbols=ignore-in-shared-libs", f"-Wl,-rpath,{library.parent}"]
    answer = built(compiler, HERE / "races.cpp", place / "races", *link)
    assert answer.returncode == 0, answer.stderr
    return [*starts[0], str(place / "races")]


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("job", JOBS)
def test_the_native_code_has_no_races(job: str, start: list[str], tmp_path: Path) -> None:
    found = done(*start, tmp_path, job)
    if found.returncode == NO_RING:
        pytest.skip(found.stdout.strip())
    assert found.returncode == 0 and "WARNING" not in found.stderr, found.stderr


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("job", "where"), [("update", "csrc/kernels.inl"), ("threads", "csrc/"), ("rings", "csrc/")])
def test_a_race_is_seen(job: str, where: str, start: list[str], tmp_path: Path) -> None:
    found = done(*start, tmp_path, job, "seeded", TSAN_OPTIONS="halt_on_error=1")
    if found.returncode == NO_RING:
        pytest.skip(found.stdout.strip())
    assert found.returncode == RACE and "data race" in found.stderr and where in found.stderr, found.stderr


def test_other_sanitizers_are_refused_by_name() -> None:
    found = done(sys.executable, "setup.py", "--name", OFFLOADZ_SANITIZE="address")
    assert found.returncode and "OFFLOADZ_SANITIZE is 'address'; it must be thread" in found.stderr
