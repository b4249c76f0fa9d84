"""What all stand-ins of one model share: the run's session, the rows of the current call, and how they are split.

A stage watches the calls of the whole model (a pre-hook on it) to know how many rows are under way, keeps a live KV
cache out of training, and finds the batch axes of a block's inputs: it runs the model once more with one more row,
with stand-ins that only look, and compares shapes (`axes.py`).  An axis is never guessed from a size.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from offloadz.model.body import Body
from offloadz.model.graphs import Keeping
from offloadz.plan.errors import ConfigError
from offloadz.plan.steps import Turn
from offloadz.runtime.devices import Device
from offloadz.runtime.session import Session

log = logging.getLogger("offloadz")

ROUTED = "output_router_logits"
RECORDED = ("output_attentions", ROUTED)
"""Outputs that transformers records by hooks inside the blocks; only those of routers have a way out with gradients."""


@dataclass
class RootCall:
    """The outermost call of the model that is under way."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    rows: int
    thread: int


@dataclass
class Tile:
    """A vocabulary tile in the slot: weights (rows, width), the slot its gradient goes to, and its first row.

    `bias` (rows) and its slot where the head has one.  A slot is None where nothing is trained.
    """

    weight: Tensor
    slope: Tensor | None
    first_row: int
    bias: Tensor | None = None
    bias_slope: Tensor | None = None

    def move(self, to: Tile) -> None:
        """Be where the same tile is now."""
        self.weight, self.slope, self.bias, self.bias_slope = to.weight, to.slope, to.bias, to.bias_slope


@dataclass
class Stage:
    """Shared by all stand-ins of a model."""

    session: Session
    model: nn.Module
    seed: int = 0
    keeping: Keeping = field(default_factory=lambda: Keeping(-1, ()))
    """Which turns keep their graph; by default none."""
    forwards: Callable[[Body], Callable[..., Any]] | None = None
    """What makes a block's forward where its own is not what runs (`kernels.py`)."""
    micro_rows: int = 0
    """Rows of a micro-batch; 0: all rows at once."""
    planned_positions: int = 0
    """Rows times length that the plan was made for; 0: unknown, or a larger batch was told of."""
    root: RootCall | None = None
    anchor: Tensor = field(default_factory=lambda: torch.zeros(1, requires_grad=True))
    """Requires a gradient, so that a graph begins even at integer ids."""
    probe: Any = None
    """While set, stand-ins only report what they were given."""
    axes: dict[Any, Any] = field(default_factory=dict)
    touched: set[str] = field(default_factory=set)
    """Parameters that got a gradient in this step."""
    rows_due: dict[int, list[tuple[Tensor, Tensor]]] = field(default_factory=dict)
    """Per table seat: (ids, gradient rows) per micro-batch, in order."""
    tile: Tile | None = None
    """While set, the head answers with the products of this tile."""
    answer: Any = None
    """While set, the base model answers with this instead of running."""
    still: dict[str, nn.Parameter] = field(default_factory=dict)
    """Parameters that were frozen when the run began: they have no gradient, no state, and no way back."""
    hooks: list[Any] = field(default_factory=list)
    stepping: bool = False
    """Whether a step has had a backward pass and no decision yet."""
    run: Any = None
    """The run all this belongs to, so that it lives as long as the model it stands in for."""

    def watch(self, *modules: nn.Module) -> None:
        """Hook the calls of the model (and of the base model inside it)."""
        for module in modules:
            self.hooks.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
            self.hooks.append(module.register_forward_hook(self._leave, always_call=True))

    def unwatch(self) -> None:
        for hook in self.hooks:
            hook.remove()
        self.hooks.clear()

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.session.require_thread()
        if self.probe is not None or self.answer is not None or self.root is not None:
            return None
        if torch.is_grad_enabled():
            kwargs = self._without_cache(module, kwargs)
            self._refuse_recorded(module, kwargs)
            self._refuse_thawed()
        args, kwargs = self.device.bring(args), self.device.bring(kwargs)
        self.root = RootCall(module, args, kwargs, _num_rows(args, kwargs), threading.get_ident())
        return args, kwargs

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        ours = self.root is not None and (self.root.module, self.root.thread) == (module, threading.get_ident())
        if ours and self.probe is None and self.answer is None:
            self.root = None

    def _without_cache(self, module: nn.Module, kwargs: dict[str, Any]) -> dict[str, Any]:
        """A cache that reaches the blocks in training makes a recompute append its keys twice: no cache, or an
        error."""
        config = getattr(module, "config", None)
        if kwargs.get("use_cache"):
            raise ConfigError(
                "use_cache=True with gradients on: a key/value cache cannot be trained through; pass use_cache=False"
            )
        if config is not None and hasattr(config, "use_cache"):
            return {**kwargs, "use_cache": False}
        return kwargs

    def _refuse_recorded(self, module: nn.Module, kwargs: dict[str, Any]) -> None:
        config = getattr(module, "config", None)
        for name in RECORDED:
            asked = kwargs[name] if name in kwargs else getattr(config, name, False)
            if asked and name != ROUTED:
                raise ConfigError(
                    f"{name}=True with gradients on is not built: it is recorded inside the blocks, where no graph is;"
                    " set it to False"
                )
            if asked and module is not self.model:
                raise ConfigError(
                    f"{name}=True and a loss by tokens, which has no router loss in it: pass"
                    " loss_fn=lambda model, batch: model(**batch).loss, or set it to False"
                )

    def _refuse_thawed(self) -> None:
        for name, param in self.still.items():
            if param.requires_grad:
                raise ConfigError(
                    f"{name} requires a gradient, but was frozen when the run began and has no optimizer state: begin"
                    " with it trained and freeze it by requires_grad_(False) for as long as you like, or offload anew"
                )

    def leaves(self, seat: int, hidden: Tensor) -> str:
        """What the turn of a seat with this input leaves for its backward (`Turn.kept`)."""
        return self.keeping.leaves(seat, hidden, self.session.room.graphs.values())

    def learn(self, turn: Turn, hidden: Tensor) -> None:
        """What a turn left, for the turns to come."""
        nbytes = sum(left.nbytes for (call, _), left in self.session.room.graphs.items() if call == turn.call)
        self.keeping.learn(turn.seat, hidden, turn.kept, nbytes)

    @property
    def rows(self) -> int:
        return self.root.rows if self.root is not None else 0

    def tell_larger(self, rows: int, length: int) -> None:
        """Say once that a step has more positions than the plan, whose memory and times then do not hold."""
        if 0 < self.planned_positions < rows * length:
            log.warning(
                "run.step: %d rows of %d positions, planned for %d positions in all; tell offload batch_size and "
                "max_length of the largest batch, or memory and times are not the planned ones",
                rows, length, self.planned_positions,
            )  # fmt: skip
            self.planned_positions = 0

    def ranges(self, num_rows: int) -> list[tuple[int, int]]:
        """(first row, number of rows) of each micro-batch."""
        step = self.micro_rows or num_rows
        return [(first, min(step, num_rows - first)) for first in range(0, num_rows, max(1, step))] or [(0, 0)]

    @property
    def device(self) -> Device:
        return self.session.room.device

    @contextmanager
    def seeded(self, call: int, micro: int) -> Iterator[None]:
        """Random numbers that depend on (seed, step, call, micro-batch) alone: a recompute draws the same dropout.

        A forward before the first backward pass of a step belongs to the step that this pass begins.
        """
        step = self.session.step + (not self.stepping)
        with self.undrawn():
            # torch.manual_seed formats a stack trace per absent accelerator at every call: a fifth of a small step.
            for generator in self.device.generators():
                generator.manual_seed(_mixed(self.seed, step, call, micro))
            yield

    @contextmanager
    def undrawn(self) -> Iterator[None]:
        """Whatever is drawn inside, the random states are those of before."""
        generators = self.device.generators()
        before = [generator.get_state() for generator in generators]
        try:
            yield
        finally:
            for generator, state in zip(generators, before, strict=True):
                generator.set_state(state)


def _num_rows(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Rows of a call: of its main input where that is named as transformers names it, else of its first tensor."""
    named = [kwargs[key] for key in ("input_ids", "inputs_embeds", "pixel_values") if kwargs.get(key) is not None]
    tensors = [t for t in tree_leaves((named, args, kwargs)) if isinstance(t, Tensor) and t.dim()]
    return tensors[0].shape[0] if tensors else 0


def _mixed(*numbers: int) -> int:
    """A 63-bit number from several, by the finalizer of splitmix64 (Steele, Lea, Flood 2014)."""
    state = 0
    for number in numbers:
        state = (state ^ number) + 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
        state = (state ^ state >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state >> 1
