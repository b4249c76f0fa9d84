"""By what kernels blocks run: torch's own, compiled ones, or Liger's.

Others than torch's run wherever a graph is wanted, and nowhere else: an evaluation meets any shape and a cache, and has
nothing to gain that pays for a compiler.  A turn that keeps no graph runs what one that keeps it runs, and lets the
graph go at once, so that how many are kept, which is a question of room, changes no bit here either.

Left to others: how a block is compiled (`compiled.py`), which parts of a block Liger has kernels for (`liger.py`).  The
trade-off: such a forward writes what a backward would read, and throws it away; it takes the room that the backward of
the same block takes later.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from offloadz.model.blocks import BlockSeat, Call
from offloadz.model.body import Body
from offloadz.model.graphs import Graph, Saved
from offloadz.model.stage import Stage
from offloadz.plan.errors import ConfigError
from offloadz.runtime.devices import Device

KERNELS = ("auto", "eager", "compile", "liger")
"""What may be asked for; auto is eager: no compiler runs that nobody asked for."""

Forward = Callable[..., Any]


def forwards_of(kernels: str, model: nn.Module, device: Device) -> Callable[[Body], Forward] | None:
    """What makes a block's forward by these kernels; None: its own.

    Raises ConfigError for what is no choice, what this box or device cannot run, and a model they do not know.
    """
    if kernels not in KERNELS:
        raise ConfigError(f"kernels = {kernels!r}; needed: {', '.join(KERNELS)}")
    if kernels == "compile":
        from offloadz.model.compiled import compiled_forward, require_compiler

        require_compiler(device.torch)
        return compiled_forward
    if kernels == "liger":
        from offloadz.model.liger import liger_forwards, require_liger

        require_liger(model, device.torch)
        return liger_forwards(model)
    return None


class KernelSeat(BlockSeat):
    """A block that runs by `forward` where a graph is wanted."""

    def __init__(
        self, stage: Stage, index: int, name: str, kind: str, unit: int, body: Body, *, forward: Forward
    ) -> None:
        super().__init__(stage, index, name, kind, unit, body)
        self.unfolding = forward

    def _refuse(self, call: Call) -> None:
        super()._refuse(call)
        if call.recorded:
            names = ", ".join(call.recorded)
            raise ConfigError(
                f'{self.name}: {names}, which hooks record inside blocks, with kernels = "compile" or "liger" is not '
                'built; write "eager", or record nothing'
            )

    def _bare(self, call: Call, micro: int, hidden: Tensor, sections: list[Tensor]) -> list[Any]:
        if not call.turn.graded:
            return super()._bare(call, micro, hidden, sections)
        _, outs = self._graph(call, micro, hidden, Saved(self.name, sections, hidden))
        return outs

    def _anew(self, call: Call, micro: int, hidden: Tensor, sections: list[Tensor]) -> Graph:
        """Whole: what is compiled is one operation to torch, and Liger's keep tensors in their own ways."""
        return self._graph(call, micro, hidden, Saved(self.name, sections, hidden))[0]
