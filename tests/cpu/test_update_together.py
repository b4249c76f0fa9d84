"""Updates of many spans in one call: the bits of one call each, whatever their sizes, formats, order and threads.

Case G07, kind K07 (numerics of the CPU optimizer).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch

from offloadz.runtime import native

TILE = 32768  # csrc/adam.cpp
SIZES = (TILE + 300, 0, 5, TILE, 256, 3 * TILE + 7, 1, 0, 640, 2 * TILE - 1)
FORMATS = (("split", torch.float32), ("split", torch.bfloat16), ("split", torch.uint8), ("alone", torch.uint8))
HYPER = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "grad_scale": 0.37}


@pytest.fixture(autouse=True)
def widest() -> Iterator[None]:
    yield
    native.select_isa(native.isa_supported()[-1])


class Piece:
    """A span of a parameter of its own, with a seed of its own."""

    def __init__(self, number: int, count: int, weight: str, moments: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(number)
        self.number, self.weight = number, torch.zeros(count, dtype=torch.bfloat16)
        low = torch.zeros(count, dtype=torch.int16)
        native.split_master_(self.weight, low, torch.randn(count, generator=generator) * 0.05)
        self.low = low if weight == "split" else None
        self.moments = tuple(torch.zeros(count, dtype=moments) for _ in range(2))
        coded = moments == torch.uint8
        self.scales = tuple(torch.zeros(-(-count // native.BLOCK)) if coded else None for _ in range(2))
        self.grad = torch.randn(count, generator=generator).bfloat16()

    @property
    def tensors(self) -> tuple[object, ...]:
        return self.weight, self.low, self.moments, self.scales, self.grad

    def update(self) -> native.Update:
        return native.Update("adam", *self.tensors, first_element=self.number)  # type: ignore[arg-type]

    def numbers(self, step: int) -> native.Numbers:
        return native.Numbers("adam", step=step, **HYPER).seeded(self.number)

    def alone(self, step: int) -> None:
        told = {"step": step, "seed": self.number, "first_element": self.number, "threads": 1, **HYPER}
        native.update_("adam", *self.tensors, **told)  # type: ignore[arg-type]

    def bits(self) -> list[bytes]:
        kept = (self.weight, self.low, *self.moments, *self.scales)
        return [bytes(t.view(torch.uint8).numpy()) for t in kept if t is not None]


def pieces() -> list[Piece]:
    """Every size in some format, neighbours in different ones."""
    return [Piece(i, size, *FORMATS[i % len(FORMATS)]) for i, size in enumerate(SIZES)]


def test_together_they_have_the_bits_of_each_alone() -> None:
    left = {2, 5}  # parameters without a gradient in this step
    wanted = pieces()
    for step, piece in itertools.product((1, 2, 3), wanted):
        if step != 2 or piece.number not in left:
            piece.alone(step)
    for isa, threads, back in itertools.product(native.isa_supported(), (1, 2, 5), (False, True)):
        native.select_isa(isa)
        found = pieces()
        inside = found[::-1] if back else found
        updates = native.Updates([piece.update() for piece in inside])
        for step in (1, 2, 3):
            out = left if step == 2 else set()
            updates.step([None if p.number in out else p.numbers(step) for p in inside], threads)
        for a, b in zip(wanted, found, strict=True):
            assert a.bits() == b.bits(), (a.number, isa, threads, back)


def test_nothing_at_all_is_done_too() -> None:
    piece = Piece(0, 300, "split", torch.float32)
    before = piece.bits()
    native.Updates([]).step([], 2)
    native.Updates([piece.update()]).step([None], 2)
    assert piece.bits() == before


def test_updates_that_share_memory_are_refused() -> None:
    piece = Piece(0, 300, "split", torch.float32)
    with pytest.raises(ValueError, match=r"share \d+ bytes of memory; they must not overlap"):
        native.Updates([piece.update(), piece.update()])


def test_numbers_of_another_rule_are_refused() -> None:
    updates = native.Updates([Piece(0, 300, "split", torch.float32).update()])
    with pytest.raises(ValueError, match="the numbers are those of lion; an update by adam needs its own"):
        updates.step([native.Numbers("lion", step=1, lr=1.0)], 1)
    with pytest.raises(ValueError, match="rule is 'adagrad'"):
        native.Numbers("adagrad", step=1, lr=1.0)
    with pytest.raises(ValueError, match="0 numbers for 1 updates; each needs its own, or None"):
        updates.step([], 1)


def test_numbers_are_equal_where_every_result_is() -> None:
    one = native.Numbers("adam", step=3, seed=5, **HYPER)
    assert one == native.Numbers("adam", step=3, **HYPER).seeded(5)
    assert one.scales and not native.Numbers("adam", step=3, lr=1.0).scales
    for other in ({"step": 4}, {"seed": 6}, {"lr": 2e-2}, {"grad_scale": 0.38}, {"decoupled": False}):
        assert one != native.Numbers("adam", **{"step": 3, "seed": 5, **HYPER, **other})
    assert one != native.Numbers("lion", step=3, seed=5, **HYPER)
