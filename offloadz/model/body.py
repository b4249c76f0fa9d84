"""A module that owns no weights: they are lent to it for the time of one call.

The module stays where it is in the user's model, with its class, attributes and hooks; only its parameters are on the
meta device and its `forward` is answered by a stand-in.  Lending puts views of a slot where the parameters were.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from offloadz.model.hooks import hooked
from offloadz.plan.spec import Unit


@dataclass(frozen=True)
class Place:
    """Where in the module tree a parameter stands: `module._parameters[attribute]`, and its name in the unit."""

    module: nn.Module
    attribute: str
    name: str


class Body:
    """A module and the places of its parameters.  `names`: canonical name at (module's identity, attribute)."""

    def __init__(self, module: nn.Module, unit: Unit | None, names: Mapping[tuple[int, str], str]) -> None:
        self.module = module
        self.forward = module.forward
        self.places = [
            Place(owner, attribute, names[id(owner), attribute])
            for owner in module.modules()
            for attribute, param in owner._parameters.items()
            if param is not None
        ]
        self._members = {
            m.name: (i, m.start, m.shape) for i, s in enumerate(unit.sections if unit else ()) for m in s.members
        }
        self._trained = {m.name for s in (unit.sections if unit else ()) if s.trainable for m in s.members}
        self._due: dict[str, Tensor] = {}
        """Where first gradients of the backward under way are to be written, of those that have not come."""

    def views(self, sections: list[Tensor]) -> dict[str, Tensor]:
        """Shaped views of flat sections, by parameter name."""
        return {name: self._view(sections, name) for name in self._members}

    def _view(self, sections: list[Tensor], name: str) -> Tensor:
        index, start, shape = self._members[name]
        return sections[index][start : start + prod(shape)].view(shape)

    def leaves(self, sections: list[Tensor], touched: set[str]) -> dict[str, Tensor]:
        """Views that require gradients, see `taking`; notes in `touched` who got one."""
        weights = self.views(sections)
        for name in self._trained - self.frozen():
            leaf = weights[name].detach().requires_grad_()
            if leaf.dtype != torch.float32:
                leaf.grad_dtype = torch.float32
            leaf.register_hook(partial(_note, name, touched))
            leaf.register_post_accumulate_grad_hook(partial(self._come, name))
            weights[name] = leaf
        return weights

    def move(self, leaves: Mapping[str, Tensor], sections: list[Tensor]) -> None:
        """Let `leaves` be where the weights are now: they lay in a slot that went to others."""
        for name, weight in self.views(sections).items():
            leaves[name].data = weight

    def watched(self) -> bool:
        """Whether what happens inside is seen from outside, beside what is given back: by forward hooks of a user, or
        in buffers."""
        inner = (module for module in self.module.modules() if module is not self.module)
        return hooked(inner) or any(True for _ in self.module.buffers())

    @contextmanager
    def taking(self, leaves: Mapping[str, Tensor], slopes: list[Tensor], adds: bool) -> Iterator[None]:
        """While this lasts the gradients of `leaves` come to the slope sections: added in place to what these hold, or
        in place of it, and zeros where none came."""
        views = {name: self._view(slopes, name) for name in self._trained}
        self._due = {} if adds else dict(views)
        for name in views if adds else ():
            if leaves[name].requires_grad:
                leaves[name].grad = views[name]
        try:
            yield
            for slope in self._due.values():
                slope.zero_()
        finally:
            self._due = {}  # they keep their memory

    def _come(self, name: str, leaf: Tensor) -> None:
        """What has come, if anything: a first gradient is a tensor of its own, which is now written where it is to
        be."""
        if leaf.grad is not None and name in self._due:
            slope = self._due.pop(name)
            come = leaf.grad.to_dense()  # some tables give their gradients as rows (`sparse=True`)
            torch.add(come, 0.0, out=slope)  # the bits of a sum that began at zero, which is never -0.0
            leaf.grad = slope

    def frozen(self) -> set[str]:
        """Names of parameters that take no gradient now: by themselves at rest, as a user may set from step to step."""
        held = ((place.name, place.module._parameters[place.attribute]) for place in self.places)
        return {name for name, param in held if param is not None and not param.requires_grad}

    @contextmanager
    def lent(self, weights: Mapping[str, Tensor]) -> Iterator[None]:
        """The module has these tensors for its parameters while the block lasts."""
        before = [place.module._parameters[place.attribute] for place in self.places]
        for place in self.places:
            place.module._parameters[place.attribute] = weights[place.name]  # type: ignore[assignment]
        try:
            yield
        finally:
            for place, param in zip(self.places, before, strict=True):
                place.module._parameters[place.attribute] = param

    def stand_in(self, forward: Any) -> None:
        """Let `forward` answer calls of the module."""
        self.module.forward = forward

    def stand_out(self) -> None:
        """The module answers for itself again."""
        self.module.__dict__.pop("forward", None)


def _note(name: str, touched: set[str], grad: Tensor | None) -> None:
    """Note who gets a gradient: a function of a user may answer with none, and an optimizer lets such a one be."""
    if grad is not None:
        touched.add(name)
