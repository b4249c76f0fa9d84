"""Case G19, kind K19: what a launcher sets for other libraries does not slow the update down, and is said.

Real processes: OMP_NUM_THREADS=1 as torchrun sets it, an affinity of one core, two ranks on one machine.  The number of
threads changes no bit of what is trained.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

RUN = """
import hashlib, json, os, sys
cores = int(sys.argv[1])
if cores:
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
import torch
from torch import nn
import offloadz
from offloadz.runtime.threads import cores_allowed, update_threads

class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(700, 700) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return x

torch.manual_seed(0)
settings, digest = offloadz.AdamW(lr=1e-3, state="int8-sr"), hashlib.sha256()
with offloadz.offload(Plain(), settings, dtype=torch.bfloat16) as run:
    for x in torch.randn(2, 3, 700):
        run.step({"x": x}, loss_fn=lambda model, batch: model(batch["x"]).square().mean())
    for view in run.session.parts():
        digest.update(view.weight.float().numpy().tobytes())
    threads, reason = run.threads, update_threads(0)[1]
    print(json.dumps([threads, cores_allowed()[0], reason, digest.hexdigest(), torch.get_num_threads()]))
"""


def launched(cores: int = 0, **environment: str) -> list[Any]:
    """[threads of the update, cores allowed, the reason, a digest of the weights, threads of torch]."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2]), **environment}
    command = [sys.executable, "-c", RUN, str(cores)]
    answer = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def test_one_thread_asked_for_by_a_launcher_one_core_and_two_ranks() -> None:
    threads, cores, reason, wanted, of_torch = launched()
    assert of_torch == 1 and threads == cores
    assert "OMP_NUM_THREADS=1 holds for computation, offload.threads for updates" in reason
    for cores_given, environment in ((1, {}), (0, {"LOCAL_WORLD_SIZE": "2"})):
        threads, found, reason, digest, _ = launched(cores_given, **environment)
        assert threads == max(1, found // int(environment.get("LOCAL_WORLD_SIZE", "1")))
        assert ("shared by 2 ranks" in reason) == bool(environment)
        assert cores_given == 0 or threads == found == 1
        assert digest == wanted


@pytest.mark.parametrize("value", ["", "0", "many", "-2"])
def test_a_count_of_ranks_that_is_none_counts_as_one(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from offloadz.runtime.threads import cores_allowed, update_threads

    monkeypatch.setenv("LOCAL_WORLD_SIZE", value)
    assert update_threads(0)[0] == cores_allowed()[0]
