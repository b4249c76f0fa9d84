"""Kind K03 as a user without rights and with 8 MiB of lockable memory: both back ends do all that they do for root.

The tests of the back ends run once more in one process of `nobody`, by files of its own: round trips of every length,
short and refused transfers, flipped bits, the probe and the choice.  Of root's rights one is left, to read what lies in
a home directory (the interpreter, this repository); none of those that a limit does not hold for.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from offloadz.runtime.transfer import RingTransfer

ROOT = Path(__file__).parents[2]
FILES = ("tests/cpu/test_native_io.py", "tests/cpu/test_transfer.py", "tests/hurt/test_swap_io.py")
LOCKABLE_BYTES = 8 << 20
NOBODY = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
ONE_RIGHT = [f"--{kind}=-all,+dac_read_search" for kind in ("inh-caps", "ambient-caps", "bounding-set")]
SEEN = "import os, resource; print(os.geteuid(), resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], os.access('/root', 2))"


@pytest.fixture
def private() -> Iterator[Path]:
    """A directory of nobody's, not below one of root's."""
    if os.geteuid():
        pytest.skip("only root can become nobody; as a user the back ends' own tests are these")
    if not shutil.which("setpriv"):
        pytest.skip("no setpriv here")
    path = Path(tempfile.mkdtemp(prefix="offloadz-nobody-"))
    os.chown(path, 65534, 65534)
    yield path
    shutil.rmtree(path)


def as_nobody(private: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Python with these arguments, run in `private`."""
    own = {"TMPDIR": private, "HOME": private, "PYTHONPATH": ROOT, "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [*NOBODY, *ONE_RIGHT, sys.executable, *arguments],
        cwd=private,
        env=dict(os.environ) | {key: str(value) for key, value in own.items()},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_MEMLOCK, (LOCKABLE_BYTES, LOCKABLE_BYTES)),
        capture_output=True,
        text=True,
        timeout=240,
    )


def ring_works() -> bool:
    """Whether root has io_uring here."""
    try:
        RingTransfer().close()
    except OSError:
        return False
    return True


def test_both_back_ends_as_nobody(private: Path) -> None:
    seen = as_nobody(private, "-c", SEEN)
    if seen.returncode and "Operation not permitted" in seen.stderr:
        pytest.skip(f"this root may not hand a right on: {seen.stderr.strip()}")
    assert seen.stdout.split() == ["65534", str(LOCKABLE_BYTES), "False"], seen.stderr
    plugins = ("-p", "no:cacheprovider", "-p", "no:xdist", "-o", "addopts=", f"--basetemp={private / 'tests'}")
    done = as_nobody(private, "-m", "pytest", "-q", "-rs", *plugins, *(str(ROOT / file) for file in FILES))
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed and int(passed[1]) > 90, done.stdout
    assert ("io_uring is refused" in done.stdout) == (not ring_works()), done.stdout
