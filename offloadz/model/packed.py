"""Rows that hold several samples: a look at the masks before the first of them is computed.

In a packed row `position_ids` begin again with each sample, and the model's own code makes the mask that keeps samples
apart; not every model does, not with an attention mask given, and not with a cache.  Where it does not, the loss falls
all the same and the model learns from its neighbours.  So the first such batch of a run is preceded by one look: the
model's outer code runs over stand-ins that only note what each block is given.

The trade-off: it costs one forward without a block (some milliseconds, no weights are read), and refuses models that
keep samples apart in some other way than by a mask.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec

from offloadz.model.axes import Probe, Seen
from offloadz.model.body import Body
from offloadz.model.stage import Stage
from offloadz.plan.errors import ConfigError

_APART: WeakSet[nn.Module] = WeakSet()
"""Models that have been looked at and keep samples apart."""
_LENGTH, _EDGES = 10, (4, 3)
"""Tokens of the two rows that are looked at, and where the second sample of each begins."""
_CLOSED = -1e4
"""A score this low leaves nothing of a token after the softmax."""


def require_apart(stage: Stage, model: nn.Module, batch: Mapping[str, Any]) -> None:
    """Refuse a batch of packed rows whose samples would see each other (ConfigError); other batches pass at once.

    `model`: what is called with the batch, its base model where there is one.
    """
    positions = batch.get("position_ids")
    if not isinstance(positions, Tensor) or positions.dim() != 2 or "input_ids" not in batch:
        return
    begins_again = positions.diff(dim=1) != 1
    mask = batch.get("attention_mask")
    if isinstance(mask, Tensor) and mask.shape == positions.shape:
        begins_again &= (mask[:, 1:] != 0) & (mask[:, :-1] != 0)
    if not bool(begins_again.any()):
        return
    if mask is not None:
        raise ConfigError(
            "position_ids begin again within a row that has an attention_mask: transformers then lets the samples of "
            "the row see each other; leave the attention_mask out, as offloadz.train's packed batches do"
        )
    if batch.get("use_cache"):
        raise ConfigError(
            "use_cache=True with samples that share a row: they would see each other; pass use_cache=False"
        )
    if model not in _APART:
        _look(stage, model)
        _APART.add(model)


class _Masks(Probe):
    """A looking forward that also asks whether a block is given a mask between the samples of a row."""

    open_seat: int | None = None

    def visit(self, seat: int, body: Body, leaves: list[Any], spec: TreeSpec) -> Any:
        if not any(_keeps_apart(leaf) for leaf in leaves if isinstance(leaf, Tensor)):
            self.open_seat = seat
            raise Seen
        return super().visit(seat, body, leaves, spec)


def _look(stage: Stage, model: nn.Module) -> None:
    positions = torch.arange(_LENGTH).repeat(len(_EDGES), 1)
    for row, edge in enumerate(_EDGES):
        positions[row, edge:] -= edge
    inputs: dict[str, Any] = {"input_ids": torch.zeros_like(positions), "position_ids": positions}
    if hasattr(getattr(model, "config", None), "use_cache"):
        inputs["use_cache"] = False
    seats = stage.session.spec.seats
    probe = _Masks(max(i for i, seat in enumerate(seats) if seat.kind == "block"))
    stage.probe = probe
    try:
        with torch.no_grad(), stage.undrawn():
            model(**stage.device.bring(inputs))
    except Seen:
        pass
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{type(model).__name__} takes no packed rows ({str(error).splitlines()[0]}); set data.packing = false"
        ) from error
    finally:
        stage.probe = None
    if probe.open_seat is not None:
        raise ConfigError(
            f"{type(model).__name__}: no mask between the samples of a packed row reaches "
            f"{seats[probe.open_seat].name}, so they would see each other; set data.packing = false"
        )


def _keeps_apart(leaf: Tensor) -> bool:
    """Whether this is a mask (..., queries, keys) that is closed from each second sample to the first, open within."""
    if leaf.dim() < 3 or tuple(leaf.shape[-2:]) != (_LENGTH, _LENGTH) or leaf.shape[0] != len(_EDGES):
        return False
    closed = ~leaf if leaf.dtype == torch.bool else leaf <= _CLOSED
    return all(
        bool(closed[row, ..., edge:, :edge].all()) and not bool(closed[row, ..., range(_LENGTH), range(_LENGTH)].any())
        for row, edge in enumerate(_EDGES)
    )
