"""A run's weights back into its module, which is then an ordinary one.

Left to others: taking the stand-ins out of the way (`run.py`).  The whole model has to fit in memory, which is checked
before a tensor is made; who has no room for it exports instead.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from offloadz.memory.flat import DTYPES, spans
from offloadz.model.body import Place
from offloadz.model.together import NOTHING, joined, require_memory
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
    params = dict(model.named_parameters())
    need, free = sum(p.numel() * p.element_size() for p in params.values()), host_limit().available_bytes
    require_memory(session.room.ranks, need, free, "materialize: the weights take", "export the model instead")
    whole: dict[str, Tensor] = {}
    for section in (s for unit in session.spec.units for s in unit.sections):
        for name in (m.name for m in section.members):
            if name not in whole:
                whole[name] = torch.full(params[name].shape, NOTHING, dtype=DTYPES[section.dtype])
    for view in session.parts():
        for span in spans(view.unit, view.part):
            flat, at = whole[span.member.name].view(-1), span.first_element
            flat[at : at + span.stop - span.start] = view.weight[span.part_slice]
    joined(session, whole.values(), "run.close(materialize=True)")
    made: dict[str, nn.Parameter] = {}
    for place in places:
        if place.name not in made:
            made[place.name] = nn.Parameter(whole[place.name], params[place.name].requires_grad)
        place.module._parameters[place.attribute] = made[place.name]
