"""Several ranks at a time for the tests: forks of a process that has imported everything, under torchrun's variables.

A job is a function of `rank_jobs.py`, or of another file that is named with it; each rank calls it with its number and
the given arguments.  Nothing of torch has run before a fork, so no thread is lost.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]

IMPORTED = ("tensorboard.compat.tensorflow_stub", "torch.distributed", "torch.utils.tensorboard", "offloadz.train.loop")
IMPORTED += ("transformers.models.llama.modeling_llama", "transformers.models.qwen3.modeling_qwen3", "offloadz.cli")


def free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])


class Nursery:
    """The parent of all ranks; `devices`: they may see those that torch finds."""

    def __init__(self, devices: bool = False) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        environment |= {} if devices else {"CUDA_VISIBLE_DEVICES": ""}
        self.process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def start(self, ranks: int, job: str, log: Path, **arguments: Any) -> list[int]:
        """Fork the ranks of a job; their process numbers.  `log` gets their output, with -0, -1 ... behind its name."""
        assert self.process.stdin is not None
        told = {"ranks": ranks, "job": job, "log": str(log), "port": free_port(), "arguments": arguments}
        self.process.stdin.write(json.dumps(told) + "\n")
        self.process.stdin.flush()
        return self._told("pids")

    def wait(self) -> list[int]:
        """Exit statuses in the order of ranks; minus the signal that ended one."""
        return self._told("statuses")

    def run(self, ranks: int, job: str, folder: Path, **arguments: Any) -> list[Any]:
        """A whole job whose ranks must all end well; what each has left in `folder` (`out-RANK.pt`)."""
        import torch

        folder.mkdir(parents=True, exist_ok=True)
        log = folder / "log"
        self.start(ranks, job, log, folder=str(folder), **arguments)
        statuses = self.wait()
        assert not any(statuses), "\n".join(logs(log, ranks))
        return [torch.load(folder / f"out-{rank}.pt", weights_only=False) for rank in range(ranks)]

    def _told(self, what: str) -> list[int]:
        assert self.process.stdout is not None
        said, *numbers = self.process.stdout.readline().split()
        assert said == what, f"{said} where {what} was awaited"
        return [int(number) for number in numbers]

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)


def merged(outs: list[Any], key: str) -> dict[str, Any]:
    """Tensors of which each rank has left its shards, the rest being NaN."""
    whole: dict[str, Any] = {}
    for name, values in ((name, values) for out in outs for name, values in out[key].items()):
        held = whole.setdefault(name, values)
        whole[name] = held.where(~held.isnan(), values)
    assert not [name for name, values in whole.items() if values.isnan().any()]
    return whole


def logs(log: Path, ranks: int) -> list[str]:
    return [f"rank {rank}: {Path(f'{log}-{rank}').read_text()}" for rank in range(ranks)]


def _be_rank(rank: int, told: dict[str, Any]) -> None:
    import torch

    fd = os.open(f"{told['log']}-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(fd, 1), os.dup2(fd, 2)
    torch.set_num_threads(1)
    size = str(told["ranks"])
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": size, "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": size}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(told["port"])}
    status = 1
    try:
        module, _, job = told["job"].rpartition(".")
        getattr(import_module(module or "rank_jobs"), job)(rank, **told["arguments"])
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(status)


def main() -> None:
    for name in IMPORTED:
        import_module(name)
    for line in sys.stdin:
        told = json.loads(line)
        pids = []
        for rank in range(told["ranks"]):
            pid = os.fork()
            if pid == 0:
                _be_rank(rank, told)
            pids.append(pid)
        print("pids", *pids, flush=True)
        print("statuses", *(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids), flush=True)


if __name__ == "__main__":
    main()
