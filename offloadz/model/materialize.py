"""A run's weights back into its module, which is then an ordinary one.

Left to others: taking the stand-ins out of the way (`run.py`).  The whole model has to fit in memory, which is checked
before a tensor is made; who has no room for it exports instead.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from offloadz.memory.flat import spans
from offloadz.model.body import Place
from offloadz.model.together import require_alone
from offloadz.plan.errors import DoesNotFit
from offloadz.plan.machine import host_limit
from offloadz.runtime.session import Session


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Every buffer of a module to a device, one that several modules share as one object."""
    moved: dict[int, Tensor] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_meta:
                module._buffers[name] = moved.setdefault(id(buffer), buffer.to(device))


def put_back(model: nn.Module, session: Session, places: Sequence[Place]) -> None:
    """Put every weight where its parameter stood, tied ones as one object.  Raises DoesNotFit with both figures."""
    require_alone(session.room.ranks, "run.close(materialize=True)")
    params = dict(model.named_parameters())
    need, free = sum(p.numel() * p.element_size() for p in params.values()), host_limit().available_bytes
    if need > free:
        raise DoesNotFit(f"materialize: the weights take {need} bytes, {free} are available; export the model instead")
    whole: dict[str, Tensor] = {}
    for view in session.parts():
        for span in spans(view.unit, view.part):
            name = span.member.name
            if name not in whole:
                whole[name] = torch.empty(params[name].shape, dtype=view.weight.dtype)
            flat, at = whole[name].view(-1), span.first_element
            flat[at : at + span.stop - span.start] = view.weight[span.part_slice]
    made: dict[str, nn.Parameter] = {}
    for place in places:
        if place.name not in made:
            made[place.name] = nn.Parameter(whole[place.name], params[place.name].requires_grad)
        place.module._parameters[place.attribute] = made[place.name]
