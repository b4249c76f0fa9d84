"""What files call a model's tensors where a module holds them otherwise: experts in one tensor, renamed parts.

Transformers knows, per model, how files become modules, and turns that around when it saves.  Here it is asked to turn
around tensors without data; what comes back are views, and a view says which elements of which parameter a tensor in a
file holds.  Reading and writing then go by runs of elements, in pieces, in both directions alike, and no family is
named.  Left to others: reading (`sources.py`) and writing (`export.py`).

The trade-off: only conversions that move elements are built (splits, stacks, transposed axes, new names); one that
computes, or joins several parameters to one tensor, is refused by name.  A fused tensor of 128 experts is 256 runs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from offloadz.plan.errors import ConfigError

MAX_RUNS = 1 << 16
"""Most runs of one tensor: more mean that single elements would be moved."""

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Cut:
    """A tensor in a file that holds a part of a parameter: `runs` of (first element, count) in the file's order."""

    of: str
    shape: Shape
    runs: tuple[tuple[int, int], ...]

    def told(self) -> list[Any]:
        """As plain values."""
        return [self.of, list(self.shape), [list(run) for run in self.runs]]

    @classmethod
    def from_told(cls, told: list[Any]) -> Cut:
        return cls(str(told[0]), tuple(told[1]), tuple((int(first), int(count)) for first, count in told[2]))


@dataclass(frozen=True, order=True)
class Place:
    """Elements `start:stop` of a parameter, and where they lie in a file's tensor."""

    start: int
    stop: int
    file_name: str
    at: int


class Layout:
    """Where each element of each parameter is in files: for reading ranges of it, and for spreading them."""

    def __init__(self, written: Mapping[str, str], cuts: Mapping[str, Cut], sizes: Mapping[str, int]) -> None:
        places: dict[str, list[Place]] = {}
        for file_name, of in written.items():
            at, cut = 0, cuts.get(file_name)
            for first, count in cut.runs if cut else ((0, sizes[of]),):
                places.setdefault(of, []).append(Place(first, first + count, file_name, at))
                at += count
        self._places = {of: sorted(found) for of, found in places.items()}
        self._starts = {of: [place.start for place in found] for of, found in self._places.items()}
        self._longest = {of: max(p.stop - p.start for p in found) for of, found in self._places.items()}

    def within(self, of: str, start: int, stop: int) -> Iterator[tuple[Place, int, int]]:
        """Places that meet a range of a parameter, with the first and last element they have in common."""
        places = self._places[of]
        index = bisect_right(self._starts[of], start - self._longest[of])
        while index < len(places) and places[index].start < stop:
            place = places[index]
            low, high = max(start, place.start), min(stop, place.stop)
            if low < high:
                yield place, low, high
            index += 1

    def spread(self, of: str, start: int, flat: Tensor) -> Iterator[tuple[str, int, Tensor]]:
        """(name in a file, element there, values) of a range of a parameter."""
        for place, low, high in self.within(of, start, start + flat.numel()):
            yield place.file_name, place.at + low - place.start, flat[low - start : high - start]


class _AsViews(TorchFunctionMode):
    """Conversions make what they cut contiguous; here it stays a view, which says where it was cut."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is Tensor.contiguous else func(*args, **(kwargs or {}))


def file_names(model: nn.Module, shapes: Mapping[str, Shape]) -> tuple[dict[str, str], dict[str, Cut]]:
    """(name in files -> name in `shapes`, cuts of those that are not whole), as `save_pretrained` would have them.

    `shapes`: tensors by the names a module has for them.  Raises ConfigError naming a conversion that is not built.
    """
    if not hasattr(model, "save_pretrained") or not hasattr(model, "config"):
        return {name: name for name in shapes}, {}
    from transformers.core_model_loading import revert_weight_conversion

    bare = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    owner = {tensor.untyped_storage()._cdata: name for name, tensor in bare.items()}
    with _AsViews():
        found: dict[str, Tensor] = revert_weight_conversion(model, dict(bare))  # type: ignore[arg-type]
    names, cuts = {}, {}
    for file_name, tensor in found.items():
        of = owner.get(tensor.untyped_storage()._cdata)
        if of is None:
            raise ConfigError(
                f"{file_name}: files of {type(model).__name__} compute this tensor from several of the model's, or from"
                " its values; such a conversion is not built"
            )
        names[file_name] = of
        if tuple(tensor.shape) != tuple(shapes[of]) or not tensor.is_contiguous():
            cuts[file_name] = Cut(of, tuple(tensor.shape), _runs(file_name, tensor))
    _check_whole(names, cuts, shapes)
    return names, cuts


def _runs(name: str, view: Tensor) -> tuple[tuple[int, int], ...]:
    """A view's elements as runs of its storage."""
    length, inner = 1, view.dim()
    while inner and (view.shape[inner - 1] == 1 or view.stride(inner - 1) == length):
        inner -= 1
        length *= view.shape[inner]
    outer = view.shape[:inner]
    if prod(outer) > MAX_RUNS:
        raise ConfigError(f"{name}: its file holds it in {prod(outer)} scattered runs; such a conversion is not built")
    steps = [view.stride(axis) for axis in range(inner)]
    firsts = (sum(i * s for i, s in zip(index, steps, strict=True)) for index in product(*map(range, outer)))
    return tuple((int(view.storage_offset() + first), length) for first in firsts)


def _check_whole(names: Mapping[str, str], cuts: Mapping[str, Cut], shapes: Mapping[str, Shape]) -> None:
    """Every element of every parameter is in exactly one file tensor."""
    runs: dict[str, list[tuple[int, int]]] = {}
    for file_name, of in names.items():
        cut = cuts.get(file_name)
        runs.setdefault(of, []).extend(cut.runs if cut else ((0, prod(shapes[of])),))
    for of, shape in shapes.items():
        reached = 0
        for first, count in sorted(runs.get(of, [])):
            if first != reached:
                break
            reached = first + count
        if reached != prod(shape):
            raise ConfigError(f"{of}: its files would not hold each element once; such a conversion is not built")
