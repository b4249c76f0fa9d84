"""The stand-in of a block: the one seam with autograd.

Forward: fetch the flat weights and run the block on each micro-batch, either with its graph, which waits for the
backward (`graphs.py`), or without one, and only the input is kept, with the results of its products where these have
room (`products.py`).  Backward: fetch again, run with a graph where none was kept, let autograd add the weight
gradients into the flat gradient slot.  The block's class, its place in the model and the model's own `forward` stay, so
masks and rotary tables made there go on working.

The trade-off: a block that keeps no graph runs forward twice (a third more products), and in exchange only one such
block's graph exists at any time, for one micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from offloadz.model.axes import Axes, Probe, Seen, Shapes, compared, one_more_row, shapes_of
from offloadz.model.body import Body
from offloadz.model.graphs import Graph, Saved, refuse_again, refuse_in_backward
from offloadz.model.hooks import unhooked
from offloadz.model.products import Products, Read
from offloadz.model.recorded import aside, hand_on, recorded_now
from offloadz.model.stage import Stage
from offloadz.model.unread import Unread, Watched, has_own
from offloadz.plan.errors import ConfigError
from offloadz.plan.left import GRAPH, PRODUCTS
from offloadz.plan.ops import Op
from offloadz.plan.steps import Turn


class Call:
    """One call of a block: its inputs flattened, which of them is the hidden state, and how the rows are split."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.leaves, self.spec = tree_flatten((args, kwargs))
        floating = [i for i, x in enumerate(self.leaves) if isinstance(x, Tensor) and x.is_floating_point()]
        self.hidden_at = floating[0] if floating else -1
        self.side_at = floating[1:]
        self.ranges: list[tuple[int, int]] = []
        self.axes: Axes | None = None
        self.turn = Turn(-1, -1)
        self.out_spec: TreeSpec | None = None
        self.wants_hidden = False
        """Whether a gradient goes on to what made the hidden state."""
        self.recorded = recorded_now()
        """What transformers records inside the block during this call."""
        self.begun = -1
        """The step it belongs to; -1 once a backward has been through."""

    @property
    def hidden(self) -> Tensor:
        return self.leaves[self.hidden_at]  # type: ignore[no-any-return]

    def inputs(self, micro: int, hidden: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments of one micro-batch, with `hidden` in its place."""
        leaves = [self.cut(x, i, micro) for i, x in enumerate(self.leaves)]
        leaves[self.hidden_at] = hidden
        return tree_unflatten(leaves, self.spec)  # type: ignore[no-any-return]

    def cut(self, leaf: Any, index: int, micro: int) -> Any:
        axis = self.axes.inputs[index] if self.axes else None
        return leaf if axis is None else leaf.narrow(axis, *self.ranges[micro])

    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The block's answer, and beside it what was recorded inside."""
        if not self.recorded:
            return forward(*args, **kwargs)
        with aside(self.recorded) as lists:
            return forward(*args, **kwargs), lists

    def release(self) -> None:
        """The hidden state is saved elsewhere; only its shape is still needed here."""
        self.leaves[self.hidden_at] = torch.empty_like(self.hidden, device="meta")


class BlockSeat:
    """Stands in for a block, or for a single module outside the blocks."""

    def __init__(self, stage: Stage, index: int, name: str, kind: str, unit: int, body: Body) -> None:
        self.stage, self.index, self.name, self.kind, self.unit, self.body = stage, index, name, kind, unit, body
        self.unread = Unread()
        self.trainable = stage.session.spec.units[unit].trainable
        self.unfolding = body.forward
        """What runs where a graph is wanted."""
        body.stand_in(self.__call__)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call, stage = Call(args, kwargs), self.stage
        if stage.probe is not None:
            return self._look(call)
        if call.hidden_at < 0:
            raise ConfigError(f"{self.name}: called without a floating point tensor; such a block is not built")
        graded = torch.is_grad_enabled() and (call.hidden.requires_grad or self.trainable)
        if torch.is_grad_enabled():
            self._refuse(call)
        self._split(call)
        call.wants_hidden = call.hidden.requires_grad
        if graded:
            stage.session.fit_saved(max(self._micro_bytes(call, micro) for micro in range(len(call.ranges))))
            outs = _BlockTurn.apply(stage.anchor, call.hidden, self, call)
        else:
            outs = self.forward(call, False)
        answer = tree_unflatten(list(outs), call.out_spec)
        if call.recorded:
            answer, lists = answer
            hand_on(lists)
        return answer

    def _look(self, call: Call) -> Any:
        if self.kind == "block":
            return self.stage.probe.visit(self.index, self.body, call.leaves, call.spec)
        return call.hidden.new_zeros(_leaf_shape(self.body, call.hidden))

    def _refuse(self, call: Call) -> None:
        """What would go wrong in silence: a cache, and side inputs that want a gradient."""
        if self.kind == "block":
            refuse_in_backward(self.name)
        for leaf in call.leaves:
            if hasattr(leaf, "get_seq_length"):
                raise ConfigError(
                    f"{self.name}: a key/value cache reached the block with gradients on; pass use_cache=False"
                )
        for index in call.side_at:
            if call.leaves[index].requires_grad:
                raise ConfigError(
                    f"{self.name}: input {index} (shape {tuple(call.leaves[index].shape)}) requires a gradient"
                    " beside the hidden"
                    " state; such blocks are not built: freeze what makes it, or detach it"
                )

    def _split(self, call: Call) -> None:
        """Decide the micro-batches of a call."""
        stage, rows = self.stage, self.stage.rows
        stateful = any(hasattr(leaf, "get_seq_length") for leaf in call.leaves)
        whole = not rows or not stage.micro_rows or stage.micro_rows >= rows or stateful
        if call.recorded and not whole and torch.is_grad_enabled():
            raise ConfigError(
                f"{self.name}: {', '.join(call.recorded)} with micro-batches is not built: what is recorded inside"
                " blocks is for all rows at once; set train.micro_batch_size = train.batch_size"
            )
        if whole or call.recorded or (self.kind == "module" and call.hidden.shape[0] != rows):
            call.ranges = [(0, call.hidden.shape[0] if call.hidden.dim() else 0)]
            return
        call.ranges = stage.ranges(rows)
        if self.kind == "module":
            call.axes = Axes(tuple(0 if i == call.hidden_at else None for i in range(len(call.leaves))), (0,))
            return
        call.axes = find_axes(stage, self, call)
        if call.axes.inputs[call.hidden_at] is None:
            raise ConfigError(
                f"{self.name}: the hidden state {tuple(call.hidden.shape)} has no batch axis; set"
                " train.micro_batch_size = train.batch_size"
            )

    def _micro_bytes(self, call: Call, micro: int) -> int:
        axis = call.axes.inputs[call.hidden_at] if call.axes else None
        share = 1.0 if axis is None else call.ranges[micro][1] / max(1, call.hidden.shape[axis])
        return round(call.hidden.nbytes * share)

    def forward(self, call: Call, graded: bool) -> tuple[Any, ...]:
        """Run every micro-batch without a graph; returns the output leaves for all rows."""
        session = self.stage.session
        kept = self.stage.leaves(self.index, call.hidden) if graded else ""
        call.turn, call.begun = session.begin("forward", self.index, len(call.ranges), graded, kept=kept), session.begun
        outs: list[Any] = []
        run = {GRAPH: self._unfold, PRODUCTS: self._make}.get(kept, self._run)
        for micro in range(len(call.ranges)):
            session.compute(lambda op, micro=micro: run(op, call, micro, outs))  # type: ignore[misc]
        if kept:
            self.stage.learn(call.turn, call.hidden)
        if graded:
            call.release()
        return tuple(outs)

    def _run(self, op: Op, call: Call, micro: int, outs: list[Any]) -> None:
        """A micro-batch without its graph; the input is kept where a backward will come."""
        hidden = call.cut(call.hidden, call.hidden_at, micro).contiguous().detach()
        room = self.stage.session.room
        if call.turn.graded:
            room.lay_input(call.turn.call, micro, hidden)
        self._gather(call, micro, self._bare(call, micro, hidden, room.weights(self.unit, op.reads[0])), outs)

    def _bare(self, call: Call, micro: int, hidden: Tensor, sections: list[Tensor]) -> list[Any]:
        """Outputs of a micro-batch, without a graph."""
        args, kwargs = call.inputs(micro, hidden)
        lent = self.body.lent(self.body.views(sections))
        with torch.no_grad(), self.stage.seeded(call.turn.call, micro), lent:
            leaves, call.out_spec = tree_flatten(call.run(self.body.forward, args, kwargs))
        return leaves

    def _unfold(self, op: Op, call: Call, micro: int, outs: list[Any]) -> None:
        """A micro-batch with its graph, which is kept for the backward."""
        hidden = call.cut(call.hidden, call.hidden_at, micro).contiguous()
        sections = self.stage.session.room.weights(self.unit, op.reads[0])
        others = (x for i, x in enumerate(call.leaves) if i != call.hidden_at)
        saved = Saved(self.name, sections, hidden, tuple(others))
        with saved.hooks():
            graph, leaves = self._graph(call, micro, hidden, saved)
        self.stage.session.room.graphs[call.turn.call, micro] = graph
        self._gather(call, micro, leaves, outs)

    def _make(self, op: Op, call: Call, micro: int, outs: list[Any]) -> None:
        """A micro-batch whose input is kept, and the results of its products, behind which its graph is let go."""
        hidden = call.cut(call.hidden, call.hidden_at, micro).contiguous().detach()
        room, key = self.stage.session.room, (call.turn.call, micro)
        room.lay_input(*key, hidden)
        slot = room.slots.get(op.writes[0])
        saved = Watched(self.name, room.weights(self.unit, op.reads[0]), hidden)
        saved.products = products = Products(self.name, self.stage.device.generators(), slot)
        with saved.hooks(), products.recording(saved.pack):
            graph, leaves = self._graph(call, micro, hidden, saved)
        if not has_own(graph.ends) and not self.body.watched():
            products.leave_out()
        room.graphs[key] = products
        if slot is not None:
            room.lay_home(f"y{key[0]}.{micro}@host", min(products.nbytes, slot.numel()))
        self._gather(call, micro, leaves, outs)

    def _graph(self, call: Call, micro: int, hidden: Tensor, saved: Saved) -> tuple[Graph, list[Any]]:
        """Run a micro-batch with a graph, over the weights of `saved`; returns it and the outputs without it."""
        graph = Graph(
            hidden.detach().requires_grad_(call.wants_hidden),
            self.body.leaves(saved.sections, self.stage.touched),
            saved,
        )
        args, kwargs = call.inputs(micro, graph.hidden)
        with torch.enable_grad(), self.stage.seeded(call.turn.call, micro), self.body.lent(graph.leaves):
            outs, call.out_spec = tree_flatten(call.run(self.unfolding, args, kwargs))
        return graph, graph.close(outs)

    def _gather(self, call: Call, micro: int, leaves: list[Any], outs: list[Any]) -> None:
        """Put a micro-batch's outputs among those of all rows."""
        if len(call.ranges) == 1:
            outs[:] = leaves
            return
        first, count = call.ranges[micro]
        for index, leaf in enumerate(leaves):
            axis = call.axes.outputs[index] if call.axes else None
            if micro == 0:
                whole = (
                    leaf
                    if axis is None
                    else leaf.new_empty((*leaf.shape[:axis], self.stage.rows, *leaf.shape[axis + 1 :]))
                )
                outs.append(whole)
            if axis is not None:
                outs[index].narrow(axis, first, count).copy_(leaf)

    def backward(self, call: Call, grads: tuple[Tensor | None, ...]) -> Tensor | None:
        """Through every micro-batch's graph; adds weight gradients to the slot, returns the hidden state's."""
        session, turn = self.stage.session, call.turn
        refuse_again(self.name, session, call.begun)
        call.begun = -1
        session.begin("backward", self.index, turn.micros, True, turn.call, turn.kept)
        back: list[Tensor] = []
        for micro in range(len(call.ranges)):
            session.compute(lambda op, micro=micro: self._rerun(op, call, micro, grads, back))  # type: ignore[misc]
        return back[0] if back else None

    def _rerun(self, op: Op, call: Call, micro: int, grads: tuple[Tensor | None, ...], back: list[Tensor]) -> None:
        """The backward of a micro-batch: through the graph that was kept, or through one that is made anew."""
        room = self.stage.session.room
        sections = room.weights(self.unit, op.reads[0])
        again = self._held if call.turn.kept == GRAPH else self._again
        graph = again(op, call, micro, sections)
        slopes = room.slopes(self.unit, op.writes[-1]) if op.writes else []
        taking = self.body.taking(graph.leaves, slopes, adds=set(op.writes) <= set(op.reads))
        with taking, self.body.lent(graph.leaves):  # lent to what a block runs again itself (`torch.utils.checkpoint`)
            graph.backward(sections, [self._cut_grad(call, index, micro, grad) for index, grad in enumerate(grads)])
        if call.wants_hidden:
            self._put_back(call, micro, graph.hidden, back)

    def _held(self, op: Op, call: Call, micro: int, sections: list[Tensor]) -> Graph:
        """The graph that a micro-batch left, over the weights where they are now."""
        graph: Graph = self.stage.session.room.graphs.pop((call.turn.call, micro))
        self.body.move(graph.leaves, sections)
        return graph

    def _again(self, op: Op, call: Call, micro: int, sections: list[Tensor]) -> Graph:
        """The graph of a micro-batch from its saved input, and from results of its products as far as they were
        kept."""
        room, key = self.stage.session.room, (call.turn.call, micro)
        *_, results, place = (place for place in op.reads if place not in op.writes)
        hidden = room.saved_input(*key, place)
        products = room.graphs.pop(key, None)
        if products is None:
            graph = self._anew(call, micro, hidden, sections)
        else:
            graph = self._answered(call, micro, hidden, sections, products, room.slots.get(results))
        room.live.pop(key, None)
        return graph

    def _answered(
        self, call: Call, micro: int, hidden: Tensor, sections: list[Tensor], products: Products, slot: Tensor | None
    ) -> Graph:
        """The graph of a micro-batch from its input and results of its products; whole, where it now saves something
        behind one that nobody was to read."""
        saved = Watched(self.name, sections, hidden)
        saved.products = products
        try:
            with saved.hooks(), products.answering(slot):
                return self._graph(call, micro, hidden, saved)[0]
        except Read:
            return self._graph(call, micro, hidden, Saved(self.name, sections, hidden))[0]

    def _anew(self, call: Call, micro: int, hidden: Tensor, sections: list[Tensor]) -> Graph:
        """The graph of a micro-batch from its input alone."""
        saved = partial(Watched, self.name, sections, hidden)
        return self.unread.again(lambda at: self._graph(call, micro, hidden, at)[0], saved, self.body.watched())

    def _cut_grad(self, call: Call, index: int, micro: int, grad: Tensor | None) -> Tensor | None:
        axis = call.axes.outputs[index] if call.axes else None
        return grad if grad is None or axis is None else grad.narrow(axis, *call.ranges[micro])

    def _put_back(self, call: Call, micro: int, hidden: Tensor, back: list[Tensor]) -> None:
        grad = hidden.grad if hidden.grad is not None else torch.zeros_like(hidden)
        axis = call.axes.inputs[call.hidden_at] if call.axes else None
        if axis is None:
            back.append(grad)
            return
        if micro == 0:
            back.append(grad.new_empty(call.hidden.shape))
        back[0].narrow(axis, *call.ranges[micro]).copy_(grad)


class _BlockTurn(torch.autograd.Function):
    """A block's turn forward, and its turn backward."""

    @staticmethod
    def forward(ctx: FunctionCtx, anchor: Tensor, hidden: Tensor, seat: BlockSeat, call: Call) -> tuple[Any, ...]:
        ctx.seat, ctx.call = seat, call  # type: ignore[attr-defined]
        ctx.set_materialize_grads(False)
        outs = seat.forward(call, True)
        ctx.mark_non_differentiable(*[o for o in outs if isinstance(o, Tensor) and not o.is_floating_point()])
        return outs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, ctx.seat.backward(ctx.call, grads), None, None


def find_axes(stage: Stage, seat: BlockSeat, call: Call) -> Axes:
    """Batch axes of a block's inputs and outputs, from the cache or from a looking forward with one more row."""
    key = (seat.index, _form(shapes_of(call.leaves), stage.rows))
    if key not in stage.axes:
        probes = [_look_forward(stage, more) for more in (False, True)]
        for index, shapes in probes[0].inputs.items():
            name = stage.session.spec.seats[index].name
            axes = Axes(
                compared(name, "input", shapes, probes[1].inputs[index]),
                compared(name, "output", probes[0].outputs[index], probes[1].outputs[index]),
            )
            stage.axes[index, _form(shapes, stage.rows)] = axes
    if key not in stage.axes:
        raise ConfigError(
            f"{seat.name}: its inputs change their form from call to call; set train.micro_batch_size ="
            " train.batch_size"
        )
    return stage.axes[key]  # type: ignore[no-any-return]


def _form(shapes: Shapes, rows: int) -> tuple[tuple[bool, ...] | None, ...]:
    """What calls of one structure have alike: per input the axes as long as the batch.  Positions may be given for each
    row in one call and for all in the next."""
    return tuple(None if shape is None else tuple(size == rows for size in shape) for shape in shapes)


def _look_forward(stage: Stage, more: bool) -> Probe:
    """Run the model's outer code once over stand-ins that only look, with the call's rows or one more."""
    root, seats = stage.root, stage.session.spec.seats
    if root is None:
        raise ConfigError("a block was called outside a call of its model; micro-batches are not possible there")
    args, kwargs = one_more_row((root.args, root.kwargs), root.rows) if more else (root.args, root.kwargs)
    stage.probe = Probe(max(i for i, s in enumerate(seats) if s.kind == "block"))
    try:
        # Dropout outside the blocks must not notice: a resumed run looks again where the straight one does not.
        with torch.no_grad(), stage.undrawn(), unhooked(root.module.modules()):
            root.module(*args, **kwargs)
    except Seen:
        pass
    finally:
        probe, stage.probe = stage.probe, None
    return probe  # type: ignore[no-any-return]


def _leaf_shape(body: Body, hidden: Tensor) -> tuple[int, ...]:
    """Output shape of a single module: its input's, or with the features of a linear layer."""
    features = getattr(body.module, "out_features", None)
    return tuple(hidden.shape) if features is None else (*hidden.shape[:-1], features)
