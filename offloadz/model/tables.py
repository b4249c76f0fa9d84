"""The stand-in of an embedding: a lookup fetches only the rows it needs, its gradient waits for the step's end.

The module's own forward runs over a small table of the rows that occur, with the ids renumbered, so scalings inside it
keep working.  Backward keeps (ids, gradient rows) per micro-batch; `scatter` adds them to each tile's gradient in that
order when the step ends, after a tied head's share, so the sum does not depend on how the step was cut.

The trade-off: the kept rows cost as much memory as the lookup's output until the step ends, and in exchange no dense
gradient of the whole table exists anywhere.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from offloadz.memory.flat import DTYPES
from offloadz.model.body import Body
from offloadz.model.graphs import refuse_again
from offloadz.model.stage import Stage
from offloadz.plan.errors import ConfigError
from offloadz.plan.ops import Op
from offloadz.plan.steps import Turn


class TableSeat:
    """Stands in for an embedding that lies outside the blocks."""

    def __init__(self, stage: Stage, index: int, name: str, module: nn.Embedding, body: Body) -> None:
        for option in ("max_norm", "scale_grad_by_freq", "sparse"):
            if getattr(module, option, None):
                raise ConfigError(
                    f"{name}: {option} = {getattr(module, option)} of an embedding is not built; needed: unset"
                )
        self.stage, self.index, self.name, self.module, self.body = stage, index, name, module, body
        spec = stage.session.spec
        self.units = spec.seats[index].units
        self.trainable = any(spec.units[u].trainable for u in self.units)
        self.num_rows, self.width = module.num_embeddings, module.embedding_dim
        body.stand_in(self.__call__)

    def __call__(self, ids: Tensor) -> Tensor:
        stage = self.stage
        if stage.probe is not None:
            return torch.zeros(*ids.shape, self.width, device=stage.device.torch)
        graded = torch.is_grad_enabled() and self.trainable and not self.body.frozen()
        if graded:
            return _Lookup.apply(stage.anchor, self, ids)  # type: ignore[no-any-return]
        return self.forward(ids, False)[0]

    def forward(self, ids: Tensor, graded: bool) -> tuple[Tensor, Turn]:
        session = self.stage.session
        turn = session.begin("forward", self.index, 1, graded)
        out: list[Tensor] = []
        session.compute(lambda op: out.append(self._look_up(self.stage.device.ask(ids))), on_host=True)
        return out[0], turn

    def _look_up(self, ids: Tensor) -> Tensor:
        wanted, where = torch.unique(ids.reshape(-1), return_inverse=True)
        self._check(wanted)
        room = self.stage.session.room
        rows = room.device.bring(self.rows(wanted)).to(room.compute_dtype)
        with torch.no_grad():
            return self._embed(rows, room.device.bring(where.view(ids.shape)))

    def _check(self, wanted: Tensor) -> None:
        if wanted.numel() and (wanted[0] < 0 or wanted[-1] >= self.num_rows):
            worst = int(wanted[-1] if wanted[-1] >= self.num_rows else wanted[0])
            raise ConfigError(
                f"{self.name}: id {worst} is looked up in a table of {self.num_rows} rows; needed: 0 to"
                f" {self.num_rows - 1}"
            )

    def _embed(self, rows: Tensor, where: Tensor) -> Tensor:
        """The module's own forward, on the device, over a small table; the padding row has been dealt with by id."""
        padding, self.module.padding_idx = self.module.padding_idx, None
        try:
            with self.body.lent({place.name: rows for place in self.body.places}):
                return self.body.forward(where)  # type: ignore[no-any-return]
        finally:
            self.module.padding_idx = padding

    def rows(self, wanted: Tensor) -> Tensor:
        """Rows (sorted unique ids, on the host) in storage dtype, from wherever the tiles lie, on whichever rank."""
        ranks, keeper = self.stage.session.room.ranks, self._keepers(wanted)
        where = [(keeper == rank).nonzero().squeeze(1) for rank in range(ranks.size)]
        found = ranks.rows([wanted[at] for at in where], self._rows_here, f"look-up in {self.name}")
        if len(found) == 1:
            return found[0]
        out = found[0].new_empty(wanted.numel(), self.width)
        for at, rows in zip(where, found, strict=True):
            out[at] = rows
        return out

    def _keepers(self, wanted: Tensor) -> Tensor:
        """The rank that each row is read from: this one, but where ranks keep nothing but their shards."""
        spec, ranks = self.stage.session.spec, self.stage.session.room.ranks
        keeper = torch.full_like(wanted, ranks.rank)
        for unit in (spec.units[u] for u in self.units if spec.share.stage == 3):
            member = unit.sections[0].members[0]
            inside = (wanted >= member.first_row) & (wanted < member.first_row + member.shape[0])
            keeper[inside] = (wanted[inside] - member.first_row) * self.width // unit.shard_elements[0]
        return keeper

    def _rows_here(self, wanted: Tensor) -> Tensor:
        """Rows (sorted unique ids, on the host) whose tiles are at rest on this rank, and there."""
        room = self.stage.session.room
        dtype = DTYPES[room.spec.units[self.units[0]].sections[0].dtype]
        home = room.device.torch if room.is_away(room.home_tier("w")) else torch.device("cpu")
        out = torch.empty(wanted.numel(), self.width, dtype=dtype, device=home)
        raw = out.view(torch.uint8).view(wanted.numel(), -1) if wanted.numel() else out
        for unit in self.units:
            owner = room.spec.units[unit]
            first_row = owner.sections[0].members[0].first_row
            for k in owner.kept_parts:
                part = owner.parts[k]
                if part.section:  # a tied head's bias has no rows
                    continue
                lo, hi = (first_row + e // self.width for e in (part.start, part.stop))
                a, b = torch.searchsorted(wanted, torch.tensor([lo, hi])).tolist()
                if a == b:
                    continue
                place = f"w{unit}.{k}@{room.placement.parameters}"
                local = wanted[a:b] - lo
                if place in room.extents:
                    room.drive.read_rows(room.extents[place], self.width * dtype.itemsize, 0, local, raw[a:b])
                else:
                    held = room.buffer(place)[: part.weight_bytes].view(dtype).view(-1, self.width)
                    torch.index_select(held, 0, local.to(home), out=out[a:b])
        return out

    def backward(self, turn: Turn, ids: Tensor, grad: Tensor) -> None:
        """Keep the gradient rows of each micro-batch until the step ends."""
        session = self.stage.session
        session.begin("backward", self.index, 1, True, turn.call)
        session.compute(lambda op: self._keep(ids, grad))

    def _keep(self, ids: Tensor, grad: Tensor) -> None:
        bring = self.stage.device.bring
        split = ids.dim() > 1 and ids.shape[0] == grad.shape[0]
        ranges = self.stage.ranges(ids.shape[0]) if split else [(0, ids.shape[0])]
        kept = self.stage.rows_due.setdefault(self.index, [])
        for first, count in ranges:
            wanted, where = torch.unique(ids[first : first + count].reshape(-1), return_inverse=True)
            rows = torch.zeros(wanted.numel(), self.width, dtype=grad.dtype, device=grad.device, requires_grad=True)
            with torch.enable_grad():
                out = self._embed(rows, bring(where.view(count, *ids.shape[1:])))
            torch.autograd.backward(out, grad[first : first + count])
            slope = rows.grad if rows.grad is not None else torch.zeros_like(rows)
            if self.module.padding_idx is not None:
                slope[bring((wanted == self.module.padding_idx).nonzero().squeeze(1))] = 0
            kept.append((wanted, slope))
        self.stage.touched.update(place.name for place in self.body.places)

    def scatter(self, op: Op) -> None:
        """Add the kept rows to the gradient of one tile."""
        section = self.stage.session.spec.units[op.unit].sections[0]
        if not section.trainable:  # only a tied head's bias is
            return
        member = section.members[0]
        slope = self.stage.session.room.slopes(op.unit, op.writes[-1])[0].view(member.shape)
        for wanted, rows in self.stage.rows_due.get(self.index, []):
            a, b = torch.searchsorted(
                wanted, torch.tensor([member.first_row, member.first_row + member.shape[0]])
            ).tolist()
            slope.index_add_(0, self.stage.device.bring(wanted[a:b] - member.first_row), rows[a:b].float())


class _Lookup(torch.autograd.Function):
    """A lookup whose gradient rows are kept."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, seat: TableSeat, ids: Tensor) -> Tensor:
        ctx.seat, ctx.ids = seat, seat.stage.device.ask(ids)  # here, where no computation is in the way
        out, ctx.turn = seat.forward(ctx.ids, True)
        ctx.begun = seat.stage.session.begun
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        refuse_again(ctx.seat.name, ctx.seat.stage.session, ctx.begun)
        ctx.begun = -1
        ctx.seat.backward(ctx.turn, ctx.ids, grad)
        return None, None, None
