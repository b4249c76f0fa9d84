"""Processes that have imported everything already: each run is a fork, so a test can kill many in few seconds.

Started as a script it reads a line of JSON (arguments of the command line, a log file), forks a child that runs the
command line to its end, prints the child's process number and then its wait status.  Nothing of torch has run before a
fork, so no thread is lost.  Each answer says what it is: a status taken for a process number would be one to kill.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]


class Zygote:
    """A parent of runs."""

    def __init__(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=environment,
        )

    def start(self, arguments: list[str], log: Path) -> Child:
        assert self.process.stdin is not None
        log.touch()  # it is looked into before the child has opened it
        self.process.stdin.write(json.dumps([arguments, str(log)]) + "\n")
        self.process.stdin.flush()
        return Child(self, self.told("pid"), log)

    def told(self, what: str) -> int:
        """The next answer, which must be about `what`."""
        assert self.process.stdout is not None
        said, number = self.process.stdout.readline().split()
        assert said == what, f"{said} {number} where {what} was awaited: a child before this one was not waited for"
        return int(number)

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(30)


class Child:
    """One run."""

    def __init__(self, zygote: Zygote, pid: int, log: Path) -> None:
        self.zygote, self.pid, self.log = zygote, pid, log

    def kill(self, signum: int) -> None:
        os.kill(self.pid, signum)  # a zombie at the most: the zygote waits only for this one, and tells us afterwards

    def until(self, holds: Callable[[], bool], most_s: float = 30.0) -> None:
        """Look every millisecond until something holds."""
        end = time.monotonic() + most_s
        while not holds():
            assert time.monotonic() < end, self.log.read_text()
            time.sleep(0.001)

    def wait(self) -> int:
        """The exit status, or minus the signal that ended it."""
        return self.zygote.told("status")


def main() -> None:
    import tensorboard.compat.tensorflow_stub  # noqa: F401
    import torch.utils.tensorboard
    import transformers.models.llama.modeling_llama  # noqa: F401

    import offloadz.cli
    import offloadz.model.export
    import offloadz.model.offload
    import offloadz.train.loop

    for line in sys.stdin:
        arguments, log = json.loads(line)
        pid = os.fork()
        if pid == 0:
            fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(fd, 1), os.dup2(fd, 2)
            torch.set_num_threads(1)
            offloadz.cli.main(arguments)
        print("pid", pid, flush=True)
        print("status", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
