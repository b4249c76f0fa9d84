"""The optimizer's update over one run of parameters, laid out part by part as a run does it.

Both `offloadz bench` and benchmarks/adam.py measure this.  The trade-off: gradients and weights are random numbers of a
usual size and the same in every round, because an update takes as long for any of them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from offloadz.memory.flat import state_views
from offloadz.memory.host import HostPool, needed_bytes
from offloadz.plan.recipes import Recipe, num_blocks
from offloadz.plan.spec import PART_ELEMENTS, Part, aligned
from offloadz.runtime import native

HYPER = {"lr": 1e-5, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}


def parts_of(recipe: Recipe, count: int) -> list[Part]:
    """The parts of `count` bfloat16 parameters in one run."""
    cuts = [(start, min(start + PART_ELEMENTS, count)) for start in range(0, count, PART_ELEMENTS)]
    return [Part(0, start, stop, "bfloat16", recipe, num_blocks(stop - start)) for start, stop in cuts]


def state_bytes(parts: list[Part]) -> int:
    """Bytes of the parts' state, each from a page on."""
    return sum(aligned(part.state_bytes) for part in parts)


def update_step(parts: list[Part], grad: Tensor, weight: Tensor, state: Tensor, threads: int) -> Callable[[int], None]:
    """An AdamW step over all parts, by its number, as one call; `state` has `state_bytes(parts)`, zeros at first."""
    single = []
    for part in parts:
        at, views = slice(part.start, part.stop), state_views(part, state[: part.state_bytes])
        single.append(native.Update("adam", weight[at], views.low, views.moments, views.scales, grad[at]))
        state = state[aligned(part.state_bytes) :]
    updates = native.Updates(single)

    def step(number: int) -> None:
        updates.step([native.Numbers("adam", step=number, **HYPER)] * len(parts), threads)

    return step


class Update:
    """One recipe's update over `count` parameters in memory of its own, on huge pages."""

    def __init__(self, state: str, count: int, threads: int) -> None:
        self.recipe, self.count = Recipe(state), count
        parts = parts_of(self.recipe, count)
        sizes = [2 * count, 2 * count, state_bytes(parts)]
        self._pool = HostPool(needed_bytes(sizes))
        grad, weight, room = (self._pool.take(name, size) for name, size in zip("gws", sizes, strict=True))
        for tensor, size in ((grad, 1e-3), (weight, 0.05)):
            numbers = (torch.randn(min(count, 1 << 16)) * size).bfloat16()
            for piece in tensor.view(torch.bfloat16).split(numbers.numel()):
                piece.copy_(numbers[: piece.numel()])
        room.zero_()
        self._step = update_step(parts, grad.view(torch.bfloat16), weight.view(torch.bfloat16), room, threads)
        self._number = 0

    @property
    def moved_bytes(self) -> float:
        """Bytes that a step reads and writes."""
        return self.count * self.recipe.moved_bytes("bfloat16")

    def __call__(self) -> None:
        """The next step."""
        self._number += 1
        self._step(self._number)
