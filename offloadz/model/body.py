"""A module that owns no weights: they are lent to it for the time of one call.

The module stays where it is in the user's model, with its class, attributes and hooks; only its parameters are on the
meta device and its `forward` is answered by a stand-in.  Lending puts views of a slot where the parameters were.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
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

    def views(self, sections: list[Tensor]) -> dict[str, Tensor]:
        """Shaped views of flat sections, by parameter name."""
        out = {}
        for name, (index, start, shape) in self._members.items():
            out[name] = sections[index][start : start + prod(shape)].view(shape)
        return out

    def leaves(self, sections: list[Tensor], touched: set[str]) -> dict[str, Tensor]:
        """Views that require gradients, see `aim`; notes in `touched` who got one."""
        weights = self.views(sections)
        for name in self._trained - self.frozen():
            leaf = weights[name].detach().requires_grad_()
            if leaf.dtype != torch.float32:
                leaf.grad_dtype = torch.float32
            leaf.register_post_accumulate_grad_hook(lambda _, name=name: touched.add(name))  # type: ignore[misc]
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

    def aim(self, leaves: Mapping[str, Tensor], slopes: list[Tensor]) -> None:
        """Let the gradients of `leaves` be added in place to the slope sections."""
        for name, leaf in leaves.items():
            if leaf.requires_grad:
                index, start, shape = self._members[name]
                leaf.grad = slopes[index][start : start + prod(shape)].view(shape)

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
