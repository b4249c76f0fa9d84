"""The head and the loss in chunks: logits never exist whole.

The base model runs once.  Then the causal model's own forward runs per chunk of target tokens and per vocabulary tile,
with the base answered by the chunk and the head by the tile, so scalings and soft caps of any family act as they are
written.  A running log-sum-exp over tiles gives each token's log-probability; backward goes over the tiles once more
and adds the weight gradient in place.  Only positions with a target are computed.

Follows the online softmax of Milakov and Gimelshein (2018).  The trade-off: where logits are not kept between forward
and backward (`graphs.py`), the products with the table are done twice, and the largest buffer is one chunk by one tile
(512 tokens x 1-16 Mi elements / width) instead of tokens x vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from offloadz.model.body import Body
from offloadz.model.graphs import Saved, refuse_again
from offloadz.model.hooks import unhooked
from offloadz.model.stage import Stage, Tile
from offloadz.plan.errors import ConfigError, DoesNotFit
from offloadz.plan.footprint import HEAD_CHUNK_TOKENS
from offloadz.plan.ops import Op
from offloadz.plan.steps import Turn

MAX_LOGITS_BYTES = 4 << 30
"""Largest whole-logits tensor that is made when a caller asks for it."""


class HeadSeat:
    """Stands in for the output layer, a product with every tile of a table."""

    def __init__(self, stage: Stage, index: int, name: str, body: Body) -> None:
        self.stage, self.index, self.name, self.body = stage, index, name, body
        spec = stage.session.spec
        self.units = spec.seats[index].units
        self.trainable = any(spec.units[u].trainable for u in self.units)
        last = spec.units[self.units[-1]].sections[0].members[0]
        self.num_words = last.first_row + last.shape[0]
        body.stand_in(self.__call__)

    def __call__(self, hidden: Tensor) -> Tensor:
        stage = self.stage
        if stage.probe is not None:
            return hidden[..., :1]
        if stage.tile is not None:
            return _TileProduct.apply(hidden, stage.tile)  # type: ignore[no-any-return]
        self._check_size(hidden)
        if torch.is_grad_enabled() and (hidden.requires_grad or self.trainable):
            return _Logits.apply(stage.anchor, hidden, self)  # type: ignore[no-any-return]
        return self.forward(hidden, False)[0]

    def _check_size(self, hidden: Tensor) -> None:
        nbytes = hidden.numel() // max(1, hidden.shape[-1]) * self.num_words * 4
        if nbytes > MAX_LOGITS_BYTES:
            raise DoesNotFit(
                f"{self.name}: logits of shape {(*hidden.shape[:-1], self.num_words)} take {nbytes} bytes, more"
                f" than {MAX_LOGITS_BYTES};"
                " use offloadz.token_logprobs, which never makes them whole, or fewer rows"
            )

    def forward(self, hidden: Tensor, graded: bool) -> tuple[Tensor, Turn]:
        """Whole logits, tile by tile."""
        turn = self.begin("forward", graded)
        out = hidden.new_empty((*hidden.shape[:-1], self.num_words))
        for _ in self.units:
            self.stage.session.compute(lambda op: self._fill(op, hidden, out))
        return out, turn

    def _fill(self, op: Op, hidden: Tensor, out: Tensor) -> None:
        tile = self.opened(op, False)
        with torch.no_grad():
            out[..., tile.first_row : tile.first_row + len(tile.weight)] = linear(hidden, tile.weight, tile.bias)

    def backward(self, turn: Turn, hidden: Tensor, grad: Tensor) -> Tensor:
        """Gradient of whole logits: into each tile's slot, and to the hidden state."""
        self.begin("backward", True, turn.call)
        back = torch.zeros_like(hidden, dtype=torch.float32)  # a sum over tiles
        for _ in self.units:
            self.stage.session.compute(lambda op: self._unfill(op, hidden, grad, back))
        return back.to(hidden.dtype)

    def _unfill(self, op: Op, hidden: Tensor, grad: Tensor, back: Tensor) -> None:
        tile = self.opened(op, self.trainable)
        piece = grad[..., tile.first_row : tile.first_row + len(tile.weight)]
        add_slope(tile, piece, hidden)
        back += piece @ tile.weight

    def begin(self, verb: str, graded: bool, call: int = -1, kept: str = "") -> Turn:
        return self.stage.session.begin(verb, self.index, 1, graded, call, kept)

    def opened(self, op: Op, with_slope: bool) -> Tile:
        """The tile whose turn it is; adds to its gradient count as touching the table."""
        room = self.stage.session.room
        sections = room.spec.units[op.unit].sections
        member = sections[0].members[0]
        weight, *bias = room.weights(op.unit, op.reads[0])
        tile = Tile(weight.view(member.shape), None, member.first_row, *bias)
        if with_slope:
            slopes, still = room.slopes(op.unit, op.writes[-1]), self.body.frozen()
            self.stage.touched.update({place.name for place in self.body.places} - still)
            tile.slope = slopes[0].view(member.shape) if member.name not in still else None
            tile.bias_slope = slopes[1] if bias and sections[1].members[0].name not in still else None
        return tile


def add_slope(tile: Tile, grad: Tensor, hidden: Tensor) -> None:
    """slope += grad^T hidden, and the bias's += the sum of grad, in place."""
    rows = grad.reshape(-1, grad.shape[-1])
    if tile.slope is not None:
        _ADD_PRODUCT[hidden.dtype](tile.slope, rows.t(), hidden.reshape(-1, hidden.shape[-1]))
    if tile.bias_slope is not None:
        tile.bias_slope.add_(rows.sum(0))


_ADD_PRODUCT: dict[torch.dtype, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    torch.float32: Tensor.addmm_,
    torch.bfloat16: lambda slope, left, right: slope.add_(left @ right),
}
"""Dtype of the computation to what adds a product to an fp32 gradient: bfloat16 as autograd does for other weights."""


class _TileProduct(torch.autograd.Function):
    """hidden times one tile; the weight's gradient is added in place, outside autograd."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, tile: Tile) -> Tensor:
        ctx.save_for_backward(hidden)
        ctx.tile = tile
        return linear(hidden, tile.weight, tile.bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        add_slope(ctx.tile, grad, ctx.saved_tensors[0])
        return grad @ ctx.tile.weight, None


class _Logits(torch.autograd.Function):
    """Whole logits, for a caller's own loss."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, hidden: Tensor, seat: HeadSeat) -> Tensor:
        ctx.seat = seat
        ctx.save_for_backward(hidden)
        out, ctx.turn = seat.forward(hidden, True)
        ctx.begun = seat.stage.session.begun
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None]:
        refuse_again(ctx.seat.name, ctx.seat.stage.session, ctx.begun)
        ctx.begun = -1
        return None, ctx.seat.backward(ctx.turn, ctx.saved_tensors[0], grad), None


class Score(NamedTuple):
    """Logits (tokens, tile rows) of a chunk against a tile; behind them the model's head code, back to `hidden`."""

    hidden: Tensor
    logits: Tensor
    tile: Tile


@dataclass
class Scores:
    """The scores of all chunks against one tile, kept for their backward."""

    tile: Tile
    chunks: list[Score]
    nbytes: int


class LossHead:
    """Log-probabilities of targets by the model's own head code, chunk by chunk and tile by tile."""

    def __init__(self, stage: Stage, model: nn.Module, base: nn.Module, seat: HeadSeat) -> None:
        self.stage, self.model, self.base, self.seat = stage, model, base, seat
        self._base_forward = base.forward
        self._likeness: Any = None
        self._checked = False
        base.forward = self._answer

    def _answer(self, *args: Any, **kwargs: Any) -> Any:
        return self._base_forward(*args, **kwargs) if self.stage.answer is None else self.stage.answer

    def stand_out(self) -> None:
        self.base.__dict__.pop("forward", None)

    def token_logprobs(self, batch: dict[str, Any]) -> Tensor:
        """(rows, length) log-probability of each label, where it stands; 0 where there is none and at position 0."""
        inputs = {k: v for k, v in batch.items() if k != "labels"}
        out = self.base(**inputs)
        self._likeness = out
        hidden = out.last_hidden_state if hasattr(out, "last_hidden_state") else out[0]
        # Asked here: inside a Function gradients are always off, and what an input needs says nothing of the mode.
        graded = torch.is_grad_enabled() and (hidden.requires_grad or self.seat.trainable)
        args = (self.stage.anchor, hidden, self, batch["labels"], graded)
        return _TokenLogprobs.apply(*args)  # type: ignore[no-any-return]

    def scores(self, op: Op, turn: Turn, flat: Tensor, targets: _Targets) -> Iterator[Score]:
        """Of every chunk against the tile whose turn forward it is; kept, if the turn's graph is."""
        tile, seat = self.seat.opened(op, False), self.seat
        if not turn.kept:
            return (self.score(flat[chunk], tile, False) for chunk in targets.chunks)
        saved = Saved(seat.name, [], flat)
        with saved.hooks():
            found = [self.score(flat[chunk], tile, True) for chunk in targets.chunks]
        nbytes = saved.nbytes - flat.nbytes + sum(score.logits.nbytes for score in found)
        self.stage.session.room.graphs[turn.call, op.unit] = Scores(tile, found, nbytes)
        return iter(found)

    def again(self, op: Op, turn: Turn, flat: Tensor, targets: _Targets) -> Iterator[Score]:
        """The same in the tile's turn backward, each with its graph: those that were kept, or made anew."""
        tile = self.seat.opened(op, self.seat.trainable)
        if not turn.kept:
            return (self.score(flat[chunk], tile, True) for chunk in targets.chunks)
        kept = self.stage.session.room.graphs.pop((turn.call, op.unit))
        kept.tile.move(tile)
        return (kept.chunks.pop(0) for _ in targets.chunks)

    def score(self, hidden: Tensor, tile: Tile, graded: bool) -> Score:
        """A chunk against a tile."""
        leaf = hidden.detach().requires_grad_(graded)
        with torch.set_grad_enabled(graded):
            return Score(leaf, self.scored(leaf, tile), tile)

    def scored(self, hidden: Tensor, tile: Tile) -> Tensor:
        """fp32 logits (tokens, tile rows) of a chunk of hidden states, by the model's own forward."""
        stage = self.stage
        stage.tile, stage.answer = tile, self._as_base(hidden)
        try:
            ids = torch.zeros(1, hidden.shape[0], dtype=torch.long, device=hidden.device)
            with unhooked((self.base,), ()):  # it has run before
                out = self.model(input_ids=ids, use_cache=False)
        finally:
            stage.tile = stage.answer = None
        return out.logits[0].float()  # type: ignore[no-any-return]

    def _as_base(self, hidden: Tensor) -> Any:
        """What the base model would have returned, with this chunk as its one row."""
        answer = copy.copy(self._likeness)
        answer["last_hidden_state"] = hidden.unsqueeze(0)
        return answer

    def check(self, hidden: Tensor) -> None:
        """The model must act on each logit by itself, or tiles would change the result."""
        if self._checked:
            return
        with torch.no_grad(), unhooked(self.model.modules()):
            weight = torch.linspace(-3, 3, 8 * hidden.shape[-1]).view(8, -1).to(hidden)
            probe = hidden.reshape(-1, hidden.shape[-1])[:2].detach()
            whole = self.scored(probe, Tile(weight, None, 0))
            parts = [self.scored(probe, Tile(weight[i : i + 4], None, i)) for i in (0, 4)]
        if not torch.allclose(whole, torch.cat(parts, -1), rtol=1e-4, atol=1e-4, equal_nan=True):
            raise ConfigError(
                f"{type(self.model).__name__}: its forward mixes logits of different words, so the loss cannot go"
                " by tiles; use step(batch, loss_fn=...)"
            )
        self._checked = True


class _Targets:
    """Positions with a label, cut into chunks that never cross a micro-batch.

    `labels` stay on the host, where they can be looked at without waiting for the computation; `chunks` are positions
    in the flat hidden state, beside it.
    """

    def __init__(self, stage: Stage, hidden: Tensor, labels: Tensor, num_words: int) -> None:
        if labels.shape != hidden.shape[:2] or labels.dtype != torch.long:
            raise ConfigError(
                f"labels have shape {tuple(labels.shape)} and dtype {labels.dtype}; needed: {tuple(hidden.shape[:2])},"
                " one per position of the input, and torch.int64"
            )
        labels = stage.device.ask(labels)
        shifted = torch.full_like(labels, -100)
        shifted[:, :-1] = labels[:, 1:]
        mask = shifted != -100
        wrong = mask & ((shifted < 0) | (shifted >= num_words))
        if wrong.any():
            raise ConfigError(
                f"label {int(shifted[wrong][0])} is no word of a head with {num_words}; needed: 0 to {num_words - 1},"
                " or -100"
            )
        self._bring = stage.device.bring
        chunks: list[Tensor] = []
        length = labels.shape[1]
        for first, count in stage.ranges(labels.shape[0]):
            flat = mask[first : first + count].reshape(-1).nonzero().squeeze(1) + first * length
            chunks += [c for c in flat.split(HEAD_CHUNK_TOKENS) if c.numel()]
        self._words = [shifted.reshape(-1)[chunk] for chunk in chunks]
        self.chunks: list[Tensor] = self._bring(chunks)

    def inside(self, index: int, tile: Tile) -> tuple[Tensor, Tensor]:
        """Of a chunk: which of its tokens have their word in a tile, and that word's row there."""
        word = self._words[index] - tile.first_row
        at = ((word >= 0) & (word < len(tile.weight))).nonzero().squeeze(1)
        return self._bring(at), self._bring(word[at])


class _TokenLogprobs(torch.autograd.Function):
    """Forward: a running log-sum-exp over tiles.  Backward: d logit = (target - probability) * grad, tile by tile."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, hidden: Tensor, head: LossHead, labels: Tensor, graded: bool) -> Tensor:
        seat = head.seat
        head.check(hidden)
        targets = _Targets(head.stage, hidden, labels, seat.num_words)
        flat = hidden.reshape(-1, hidden.shape[-1])
        kept = head.stage.leaves(seat.index, hidden) if graded else ""
        turn, begun = seat.begin("forward", graded, kept=kept), head.stage.session.begun
        top = [torch.full((len(c),), float("-inf"), device=hidden.device) for c in targets.chunks]
        total = [torch.zeros(len(c), device=hidden.device) for c in targets.chunks]
        hit = [torch.zeros(len(c), device=hidden.device) for c in targets.chunks]
        for _ in seat.units:
            head.stage.session.compute(
                lambda op: _reduce(head.scores(op, turn, flat, targets), targets, top, total, hit)
            )
        if kept:
            head.stage.learn(turn, hidden)
        norms = [t + s.log() for t, s in zip(top, total, strict=True)]
        out = torch.zeros(labels.numel(), device=hidden.device)
        for chunk, h, norm in zip(targets.chunks, hit, norms, strict=True):
            out[chunk + 1] = h - norm  # where the label stands, one behind the position that predicts it
        ctx.head, ctx.targets, ctx.norms, ctx.turn, ctx.begun = head, targets, norms, turn, begun
        ctx.save_for_backward(hidden)
        return out.view(labels.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None, None, None]:
        head: LossHead = ctx.head
        refuse_again(head.seat.name, head.stage.session, ctx.begun)
        ctx.begun = -1
        seat, hidden = head.seat, ctx.saved_tensors[0]
        flat = hidden.reshape(-1, hidden.shape[-1])
        back = torch.zeros_like(flat, dtype=torch.float32)  # a sum over tiles
        seat.begin("backward", True, ctx.turn.call, ctx.turn.kept)
        flat_grad = torch.cat([grad.reshape(-1)[1:], grad.new_zeros(1)])  # from the label to what predicts it
        for _ in seat.units:
            head.stage.session.compute(
                lambda op: _unreduce(
                    head.again(op, ctx.turn, flat, ctx.targets), ctx.targets, ctx.norms, flat_grad, back
                )
            )
        return None, back.to(hidden.dtype).view(hidden.shape), None, None, None


def _reduce(
    scores: Iterator[Score], targets: _Targets, top: list[Tensor], total: list[Tensor], hit: list[Tensor]
) -> None:
    """One tile's share of every chunk's log-sum-exp, and the logits of the targets that lie in it."""
    for i, score in enumerate(scores):
        logits = score.logits.detach()
        highest = torch.maximum(top[i], logits.amax(-1))
        inside, word = targets.inside(i, score.tile)
        hit[i][inside] = logits[inside, word]
        total[i].mul_((top[i] - highest).exp_()).add_((logits - highest[:, None]).exp_().sum(-1))
        top[i] = highest


def _unreduce(scores: Iterator[Score], targets: _Targets, norms: list[Tensor], grad: Tensor, back: Tensor) -> None:
    """One tile's share of the gradients of every chunk."""
    for i, score in enumerate(scores):
        chunk = targets.chunks[i]
        slope = (score.logits.detach() - norms[i][:, None]).exp_().mul_(-grad[chunk][:, None])
        inside, word = targets.inside(i, score.tile)
        slope[inside, word] += grad[chunk][inside]
        torch.autograd.backward(score.logits, slope)
        if score.hidden.grad is not None:
            back[chunk] += score.hidden.grad
