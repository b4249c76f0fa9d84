"""Threads of an update walk stretches of their own and take over what others have left: each tile is done just once."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from offloadz.runtime import native

TILE = 32768  # csrc/adam.cpp


def count_down(weight: torch.Tensor, grad: torch.Tensor, threads: int, steps: int) -> None:
    """Takes 1 from every weight in each step."""
    for step in range(1, steps + 1):
        native.update_("sgd", weight, None, (), (), grad, step=step, lr=1.0, threads=threads)


@pytest.mark.parametrize("threads", [1, 2, 3, 7, 40, 256])
@pytest.mark.parametrize("count", [TILE, TILE + 1, 2 * TILE, 5 * TILE - 1, 61 * TILE + 3])
def test_every_tile_is_done_once(threads, count):
    weight, steps = torch.zeros(count), 20
    count_down(weight, torch.ones(count), threads, steps)
    assert (weight == -steps).all()


def test_updates_side_by_side_share_the_team():
    counts, steps = [TILE + 1, 9 * TILE, 17 * TILE + 5, 33 * TILE], 30
    weights = [torch.zeros(count) for count in counts]
    with ThreadPoolExecutor(len(counts)) as callers:
        calls = [callers.submit(count_down, weight, torch.ones(weight.numel()), 3, steps) for weight in weights]
    for call, weight in zip(calls, weights, strict=True):
        call.result()
        assert (weight == -steps).all()


def test_the_team_leaves_the_callers_core_to_him():
    allowed = os.sched_getaffinity(0)
    if len(allowed) < 2:
        pytest.skip("there is one core for all")
    count_down(torch.zeros(4 * TILE), torch.ones(4 * TILE), 2, 1)
    masks = [os.sched_getaffinity(int(task.name)) for task in Path("/proc/self/task").iterdir()]
    assert any(mask < allowed and len(mask) == len(allowed) - 1 for mask in masks)
    assert os.sched_getaffinity(0) == allowed
