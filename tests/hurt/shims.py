"""Running code on a bad drive: compiles `shim.c` once and starts Python under it.

A test file that wants this is also a script: under the shim it is started as `python FILE NAME DIR`, runs its function
`NAME(directory)` and prints what that returns as JSON.  So real processes meet real (spoiled) system calls, and an
abort of the interpreter is seen as what it is.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent


@functools.cache
def shim_library(source: str = "shim.c") -> str:
    """A compiled shim of this directory; skips the test where there is no C compiler."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler for the shim")
    folder = Path(tempfile.mkdtemp(prefix="offloadz-shim-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    out = folder / "shim.so"
    subprocess.run(
        [compiler, "-O1", "-Wall", "-shared", "-fPIC", "-o", out, HERE / source, "-ldl", "-lpthread"], check=True
    )
    return str(out)


def run_file(file: str, name: str, directory: Path, shim: bool = True, **env: str) -> Any:
    """What `name(directory)` of test file `file` returns in a process of its own, under the shim."""
    answer = subprocess.run(command(file, name, directory), env=environment(directory, shim, **env), **_TEXT)
    assert answer.returncode == 0, f"exit {answer.returncode}\n{answer.stdout}\n{answer.stderr}"
    return json.loads(answer.stdout.splitlines()[-1])


_TEXT: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 120}


def command(file: str, name: str, directory: Path) -> list[str]:
    """The command line that runs one function of a test file."""
    return [sys.executable, file, name, str(directory)]


def environment(directory: Path, shim: bool = True, **env: str) -> dict[str, str]:
    """The environment of a child: one thread of compute, the package and the tests in reach, the shim loaded."""
    paths = [str(HERE.parent.parent), str(HERE)]
    found = dict(os.environ) | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    if shim:
        found |= {"LD_PRELOAD": shim_library(), "SHIM_DIR": str(directory)}
    return found | env


@contextmanager
def spoiled(mode: str, after: int = 0) -> Iterator[Callable[[], int]]:
    """Inside a child: the drive is bad in this way meanwhile; gives a function that counts spoiled calls so far."""
    library = ctypes.CDLL(os.environ["LD_PRELOAD"])
    library.shim_reset()
    os.environ["SHIM_AFTER"], os.environ["SHIM_MODE"] = str(after), mode
    try:
        yield library.shim_spoiled
    finally:
        os.environ["SHIM_MODE"] = ""


@contextmanager
def mounted(directory: Path, options: str) -> Iterator[Path]:
    """A tmpfs of its own on `directory`; skips the test where mounting is not allowed."""
    directory.mkdir(exist_ok=True)
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", options, "shm", directory], **_TEXT).returncode:
        pytest.skip("mounting a tmpfs is not allowed here")
    try:
        yield directory
    finally:
        subprocess.run(["umount", "-l", directory], check=True)


def main(functions: dict[str, Any]) -> None:
    """The script side of a test file."""
    print(json.dumps(functions[sys.argv[1]](Path(sys.argv[2]))))
