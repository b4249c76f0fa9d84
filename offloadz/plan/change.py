"""What to change so that a plan fits: one field, or two, the mildest first.

Settings come before hardware, one of them or two: placement before what costs time, that before what costs checkpoints,
then what changes a number (the format of the optimizer's state), then the length of samples.  Only then comes room on
another drive, with a setting where it takes one, and last a machine with more memory (`needed`), which costs most.
Whether a change helps is the search's to say.  The trade-off: pairs are tried too, so a refusal of a 70B model asks for
the bytes of a thousand placements: half a second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import TYPE_CHECKING, Any

from offloadz.plan.recipes import Recipe, cheaper
from offloadz.plan.spec import ModelSpec
from offloadz.plan.words import human

if TYPE_CHECKING:
    from offloadz.plan.candidates import Candidate
    from offloadz.plan.wishes import Wishes

TO_DISK = ("optimizer", "gradients", "parameters", "activations")
"""The order in which kinds leave memory."""


@dataclass(frozen=True)
class Asked:
    """A model under a recipe, and what the user fixed."""

    spec: ModelSpec
    wishes: Wishes


Change = Callable[[Asked], Asked]
Told = tuple[str, Change]
"""What to write, and what it does to what is asked."""

First = Callable[[Asked], "tuple[Candidate, str]"]
"""What fits, or what lacks least and what it lacks (`Space.first`)."""


def smallest_change(asked: Asked, peak: Mapping[str, int], first: First) -> str:
    """The first change that fits, of one or two fields; empty where none does.  `peak`: bytes needed now."""
    for some in _in_order(list(_settings(asked, peak, first)), list(_drives(asked, peak))):
        other = asked
        for _, change in some:
            other = change(other)
        if not first(other)[1]:
            return " and ".join(text for text, _ in some)
    return ""


def _in_order(settings: Sequence[Told], drives: Sequence[Told]) -> Iterator[tuple[Told, ...]]:
    """What to try, the cheapest first: a setting, two, a drive, a drive with a setting."""
    yield from ((one,) for one in settings)
    yield from combinations(settings, 2)
    yield from ((one,) for one in drives)
    yield from product(settings, drives)


def needed(peak: Mapping[str, int], shares: Mapping[str, float], ranks: int = 1) -> str:
    """In words what a machine would need to have; a run may use `shares` of memory.  `peak`: of each rank."""
    host = f"{human(ranks * int(peak['host'] / shares['host']), up=True)} of free host memory"
    device = f", {human(int(peak['device'] / shares['device']), up=True)} of GPU memory" if peak["device"] else ""
    disk = f", {human(ranks * peak['disk'], up=True)} under offload.swap" if peak["disk"] else ""
    return f"a machine with {host}{device}{disk} and {human(peak['checkpoint'], up=True)} under train.output"


def _settings(asked: Asked, peak: Mapping[str, int], first: First) -> Iterator[Told]:
    """The mildest first.  What all ranks share is written as a whole, while each of them asks for its own part."""
    spec, wishes, ranks = asked.spec, asked.wishes, asked.spec.share.ranks
    if wishes.commit == "shadow":
        yield 'offload.commit = "hold"', _wish(commit="hold")
    if wishes.recompute in ("none", "cheap"):
        yield 'offload.recompute = "auto"', _wish(recompute="auto")
    if not wishes.swap:
        yield "name a directory on a drive in offload.swap", _wish(swap=True)
    for kind in TO_DISK:
        if getattr(wishes, kind) not in ("auto", "disk"):
            yield f'offload.{kind} = "disk"', _wish(swap=True, **{kind: "disk"})
    if wishes.slots > 1:
        yield "offload.slots = 1", _wish(slots=1)
    if wishes.micro_batch_size > 1:
        yield "train.micro_batch_size = 1", _wish(micro_batch_size=1)
    if 0 < wishes.sweeps < wishes.batch_size:
        yield f"offload.sweeps = {wishes.batch_size}", _wish(sweeps=wishes.batch_size)
    if wishes.keep != 1:
        yield "train.keep = 1", _wish(keep=1)
    if wishes.host_memory is not None:
        unlimited = first(_wish(host_memory=None)(asked))[0].footprint.peak["host"]
        for host in (peak["host"], unlimited):  # the latter where what lacks least lacks a drive
            yield f'offload.host_memory = "{human(ranks * host, up=True)}"', _wish(host_memory=host)
    for recipe in cheaper(spec.recipe, spec.dtype):
        yield f'optimizer.state = "{recipe.state}"', _store(recipe)
    length = wishes.max_length // 2
    while length >= 64:
        yield f"data.max_length = {length}", _wish(max_length=length)
        length //= 2


def _drives(asked: Asked, peak: Mapping[str, int]) -> Iterator[Told]:
    """Another drive, where one is named and has no room."""
    wishes, ranks = asked.wishes, asked.spec.share.ranks
    saved = peak["checkpoint"] if wishes.same_drive else 0
    room, need = wishes.disk_free, peak["disk"] + saved
    if wishes.swap and room is not None and room < need:
        told = f"name another drive in offload.swap, with {human(ranks * peak['disk'] + saved, up=True)} free"
        yield told, _wish(disk_free=room + need, linkable=False)


def _wish(**fields: Any) -> Change:
    return lambda asked: replace(asked, wishes=replace(asked.wishes, **fields))


def _store(recipe: Recipe) -> Change:
    return lambda asked: replace(asked, spec=asked.spec.with_recipe(recipe))
