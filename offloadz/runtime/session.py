"""A run's lanes and programs: whose turn it is, what is in flight, what is due.

The stand-ins in the model say "forward of seat 3, two micro-batches" and then run their computation through `compute`;
the session holds the program that was expected, submits its transfers and updates around those turns, and re-plans
when somebody comes out of turn.  [Note: a guess may be wrong] The program is a guess at what the model will do, taken
from what it did in the last step; a wrong guess costs the wait for what is in flight, never a result.

Left to others: what a computation is (`model/`), what a verb does (`actions.py`), when a step ends (`model/run.py`).
The trade-off: after a step the next one's first transfers and updates are begun at once on the guess that it will be
alike; where it is not, at most `slots` fetched blocks were read in vain.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import groupby

import torch
from torch import Tensor

from offloadz.plan.ahead import found, scattered
from offloadz.plan.errors import UpdateFailed
from offloadz.plan.left import left_by
from offloadz.plan.ops import LANES, Op, Program
from offloadz.plan.pace import program_of
from offloadz.plan.steps import CLOSING, NOTHING, TERMS, Backward, Finish, Forward, Owed, Phase, Spread, Turn, Updates
from offloadz.plan.walk import Frontier, Walk
from offloadz.runtime.device_actions import TABLES
from offloadz.runtime.devices import delays
from offloadz.runtime.lanes import InlineLane, WorkerLane
from offloadz.runtime.native import Numbers
from offloadz.runtime.rest import PartView, parts, put
from offloadz.runtime.room import Room

WORKERS = tuple(lane for lane in LANES if lane != "device")

Told = tuple[str, Turn | Finish, bool]
"""What is announced: the verb, the turn, and whether gradients are rounded there."""

MAX_PROGRAMS = 8
"""Programs kept for reuse.  Evaluations and generation never repeat one (their calls are numbered on), and one of a 13B
step takes 14 MB."""

CLOSE_S = 8.0
"""How long all lanes together may take to end."""


class Session:
    """Turns, programs and lanes of one run over a `Room`.

    `micros`: micro-batches a block's turn is expected to have.  `poison`: random delays before every transfer and NaN
    into every slot before it is filled.
    """

    def __init__(self, room: Room, *, poison: bool = False, seed: int = 0) -> None:
        self.room, self.spec, self.placement = room, room.spec, room.placement
        device, self._actions = room.device, TABLES[room.placement.unified]
        self.inline = device.compute_lane(room, seed if poison else None)
        self.workers = {
            name: device.worker(name, self._act, delays(room, i, name, seed) if poison else None)
            for i, name in enumerate(WORKERS)
        }
        self.lanes: dict[str, InlineLane | WorkerLane] = {"device": self.inline, **self.workers}
        self.frontier = Frontier()
        self.walk: Walk | None = None
        self.script: deque[Told] = deque()
        """What the current walk expects to be announced, in order."""
        self.owed = NOTHING
        """What programs have left to do that is in no walk yet."""
        self.grads: dict[int, str] = {}
        """Per unit of this step: `sum` while its gradient is open, `done` once rounded."""
        self.open: list[Turn] = []
        """Graded forward turns of this step that have had no backward."""
        self.kept = left_by(self.spec, self.placement.kept, self.placement.cheap)
        """Per seat what its last turn left for its backward beside its input, or will as planned (`Turn.kept`)."""
        self.history: list[Told] = []
        self.last_step: list[Told] = []
        self.owner: int | None = None
        """The thread that is in the middle of a step, whose calls alone the model answers."""
        self.deputy: int | None = None
        """The thread that goes backward for the owner, 0 while it is not yet known; None where nobody does."""
        self.begun = 0
        """Number of steps begun, given up ones too: what a forward left is there until the next."""
        self.calls, self.micros = 0, 1
        self.rounds = False
        """Whether the coming backward turns are the step's last (their gradients are rounded as they leave)."""
        self.steps: dict[str, int] = {}
        """Parameter name to the number of updates it has had."""
        self.step = 0
        self.due_step = 0
        """The step whose updates are due or under way."""
        self.arrive: Callable[[int], None] = lambda unit: None
        """What lays settings ready for a unit whose gradient is updated from as it comes (not with `hold`)."""
        self.tables_used: dict[int, None] = {}
        """Trained table seats looked up in this step, in order."""
        self.tell: Callable[[], dict[str, object]] | None = None
        """What is to be known of a decided step besides its state, where it ends with a flip."""
        self._programs: dict[object, Program] = {}

    def begin(self, verb: str, seat: int, micros: int, graded: bool, call: int = -1, kept: str = "") -> Turn:
        """Announce a turn, then run each of its computations through `compute`.  `call` is -1 for a forward, else the
        number that the forward's turn was given; `kept`: see `Turn`.
        """
        self.check()
        self.require_thread()
        if verb == "backward" and self.owner is None:
            raise RuntimeError("loss.backward() by itself is no part of a step here; call run.backward(loss)")
        if graded and not self.placement.accumulate and self._adds(seat, call):
            self.allow_sums()
        turn = Turn(seat, self.calls if call < 0 else call, micros, graded, kept)
        last = verb == "forward" or self.rounds
        expected = bool(self.script) and self.walk is not None and self.script[0] == (verb, turn, last)
        told = f"{verb} of {self.spec.seats[seat].name} (call {turn.call}, {graded}, {last})"
        if not self.room.ranks.agree(told, expected):
            self._replan(verb, turn)
        self.script.popleft()
        if verb == "forward":
            self.calls += 1
            self._learn(turn)
        elif turn in self.open:
            self.open.remove(turn)
        # Inside an autograd function gradients are off, so a graded turn says by itself that this is training.
        if graded or torch.is_grad_enabled():
            self.history.append((verb, turn, self.rounds))
        return turn

    def require_thread(self) -> None:
        """Raise for a call of the model from another thread than the one that is in the middle of a step."""
        here = threading.get_ident()
        if self.owner in (None, here):
            return
        if self.deputy == 0 and torch._C._current_graph_task_id() >= 0:
            self.deputy = here
        if self.deputy != here:
            raise RuntimeError("the model was called from another thread in the middle of a step; wait for the step")

    def descend(self, tensor: Tensor, grad: Tensor | None = None) -> None:
        """`tensor.backward(grad)`; of a device, autograd goes backward on a thread of its own while this one waits."""
        self.deputy = 0
        try:
            self.room.device.descend(tensor, grad)
        finally:
            self.deputy = None

    def _adds(self, seat: int, call: int) -> bool:
        """Whether a seat's gradient has several terms: met twice before its backward, or more backwards follow."""
        return any(t.seat == seat for t in self.open) if call < 0 else not self.rounds

    def compute(self, work: Callable[[Op], None], on_host: bool = False) -> None:
        """Run the computation whose turn it is on this thread, once what it reads has arrived.

        `on_host`: it is the host that reads, and so waits for a device to be done with what comes from there.
        """
        walk = self.walk
        if walk is None or walk.waiting_for is None:
            raise RuntimeError("a computation without a turn; every stand-in announces itself with `begin`")
        self.inline.work, self.inline.on_host = work, on_host
        try:
            walk.compute()
        except BaseException:
            self.check()
            raise
        finally:
            self.inline.work = _nothing

    def _learn(self, turn: Turn) -> None:
        if turn.graded:
            self.open.append(turn)
            self.kept[turn.seat] = turn.kept
        if self.spec.seats[turn.seat].kind == "table" and turn.graded:
            self.tables_used.setdefault(turn.seat)

    def _replan(self, verb: str, turn: Turn) -> None:
        """Finish what is in flight and plan on from this turn."""
        self.settle()
        if self.spec.seats[turn.seat].kind == "block":
            self.micros = turn.micros
        phases = self._onward(turn) if verb == "forward" else (Backward((turn, *self._below(turn)), self.rounds),)
        self._start(phases)

    def _onward(self, turn: Turn) -> tuple[Phase, ...]:
        """The rest of a pass from this forward turn on, and the backward that will follow it."""
        training = turn.graded or torch.is_grad_enabled()
        turns = [turn]
        met = set() if self.placement.accumulate else {t.seat for t in self.open}
        for seat in (s for s in range(turn.seat + 1, len(self.spec.seats)) if s not in met):
            turns.append(self._guess(seat, turn.call + len(turns), training))
        back = tuple(t for t in reversed([*self.open, *turns]) if t.graded)
        last = self.rounds or not self.placement.accumulate
        return (Forward(tuple(turns)), Backward(back, last)) if training and back else (Forward(tuple(turns)),)

    def _guess(self, seat: int, call: int, training: bool) -> Turn:
        kind = self.spec.seats[seat].kind
        micros = self.micros if kind in ("block", "module") else 1
        graded = training and seat >= self.spec.first_trained_seat
        return Turn(seat, call, micros, graded, self.kept.get(seat, "") if graded else "")

    def _below(self, turn: Turn) -> list[Turn]:
        return [t for t in reversed(self.open) if t.call < turn.call]

    def begin_step(self) -> None:
        """A new optimizer step: forget the inputs and gradients of the one before."""
        self.check()
        self.begun += 1
        self.calls, self.open, self.grads, self.history = 0, [], {}, []
        self.tables_used, self.room.squares = {}, {}
        self.room.graphs.clear()

    def finish(self, scatter: Callable[[int, Op], None]) -> float:
        """Close all gradients; returns the sum of their squares.  `scatter(seat, op)` adds a table's rows."""
        tables = tuple(
            seat for seat in self.tables_used if any(self.spec.units[u].trainable for u in self.spec.seats[seat].units)
        )
        end = Finish(tables)
        expected = bool(self.script) and self.script[0] == ("finish", end, True)
        if not self.room.ranks.agree(f"end of the step's gradients (tables {tables})", expected):
            self.settle()
            self._start((end,))
        self.script.popleft()
        self.history.append(("finish", end, True))
        for _, seat in scattered(self.spec, tables):
            self.compute(partial(scatter, seat))
        self.compute(_nothing, on_host=True)
        self.room.forget_inputs()
        self._drain()  # bytes that the updates of the step before still store are counted with this one's
        squares = sum(float(self.room.squares[key]) for key in sorted(self.room.squares))
        return self.room.ranks.totals(squares)[0] if self.spec.share.stage else squares

    def commit(self, units: tuple[int, ...], due: Mapping[str, Numbers], taken: bool = False) -> None:
        """The step is decided: updates of `units` are due, with settings now fixed, or are done and `taken`."""
        if self.walk is not None and self.walk.waiting_for is not None:
            self.settle()  # a step without targets never came to the updates of the step before
        self.last_step = self.history or self.last_step
        self._drain()
        self.frontier.clear()  # all lanes are idle; frozen weights would gather readers for ever
        self.room.decide(units if taken else ())
        if units and self.tell is not None:
            self.room.told = self.tell()  # now and not at the flip: by then the caller is in its next step
        self.room.due, pending = ({}, ()) if taken else ({**due}, units)
        left = found(self.walk.program.left) if self.walk is not None else ()
        self.owed, self.due_step = Owed(pending, unended=bool(units), left=left), self.step

    def commit_by(self, commit: str) -> None:
        """From the next step on: `hold`, or `shadow` where the room was made for it."""
        self.placement = replace(self.placement, commit=commit)
        self._programs.clear()

    def prime(self) -> None:
        """Begin the transfers and updates of a next step like the last one."""
        phases = self._expected()
        if phases:
            self.begin_step()
            self._start(phases)

    def _expected(self) -> tuple[Phase, ...]:
        phases: list[Phase] = []
        for (verb, last), group in groupby(self.last_step, key=lambda entry: (entry[0], entry[2])):
            entries = [entry for _, entry, _ in group]
            turns = tuple(entry for entry in entries if isinstance(entry, Turn))
            if verb == "finish":
                phases += [entry for entry in entries if isinstance(entry, Finish)]
            else:
                phases.append(Forward(turns) if verb == "forward" else Backward(turns, last))
        return tuple(phases)

    def _start(self, phases: tuple[Phase, ...]) -> None:
        """A walk over the program of `phases`, with the updates that are due in their places."""
        summed = tuple(sorted(u for u, state in self.grads.items() if state == "sum"))
        told = (phases, replace(self.owed, summed=summed))
        program = self._programs.pop(told, None)
        if program is None:
            program = program_of(self.spec, self.placement, *told)
            while len(self._programs) >= MAX_PROGRAMS:
                del self._programs[next(iter(self._programs))]
        self._programs[told] = program  # the newest stands last
        self.walk = Walk(program, self.lanes, self.frontier, self._observe)
        self.owed = NOTHING
        self.script = deque(_told(phases))
        self.walk.advance()

    def _observe(self, op: Op) -> None:
        if op.verb in CLOSING or (op.verb in TERMS and op.writes):  # a rank closes what it keeps no part of, too
            self.grads[op.unit] = TERMS[op.verb]
        if op.verb in CLOSING and self.placement.commit != "hold":
            self.arrive(op.unit)

    def settle(self) -> None:
        """Bring everything to rest: all updates done and home, all lanes idle.  The walk is given up."""
        if self.walk is not None:
            self.walk.finish("update")
            self.walk = None
            self.script.clear()
        if self.owed.pending or self.owed.unended:
            self._start((Updates(),))
            self.walk = None
        self._drain()
        self.owed = NOTHING  # what was fetched too: whoever comes next may change what is at rest
        self.frontier.clear()
        self.check()

    def expect_more(self) -> None:
        """The coming backward turns are not the step's last: drop a plan that would round their gradients."""
        if self.rounds:
            self.rounds = False
            self.settle()

    def _drain(self) -> None:
        self.inline.rest(self.workers.values())
        self.check()

    def abandon(self) -> None:
        """A computation failed: the step's gradients, inputs and spares are dropped, due updates still happen."""
        self.settle()
        self.room.decide(())
        self.begin_step()
        self.room.forget_inputs()

    def check(self) -> None:
        """Raise what a lane ran into, once it is known."""
        for lane in self.workers.values():
            if lane.error is None:
                continue
            op, error = lane.error
            if op.phase in ("update", "arrival"):
                step = self.due_step if op.phase == "update" else self.step
                text = f"the update of step {step} failed ({op.verb} of {self._called(op)}): {error}"
                raise UpdateFailed(text) from error
            raise error

    def _called(self, op: Op) -> str:
        return self.spec.units[op.unit].name if op.unit >= 0 else op.verb

    def fit_saved(self, nbytes: int) -> None:
        """Make room for saved inputs of `nbytes` per micro-batch."""
        if "disk" in self.placement.saved_route:
            nbytes = self.room.ranks.most(nbytes)  # ranks settle together or not at all
        if not self.room.fits_saved(nbytes):
            self.settle()
            self.room.grow_saved(nbytes)

    def parts(self, write: bool = False) -> Iterator[PartView]:
        """Every part of the model at rest, in order; with `write`, what the caller changed goes home as it moves on."""
        self.settle()
        yield from parts(self.room, write)

    def put(self, index: int, k: int, master: Tensor) -> None:
        """Set a part's weights from fp32 values; see `rest.put`."""
        put(self.room, index, k, master)

    def spread(self) -> None:
        """After `parts` or `put` have written: weights that are whole at rest are given to all ranks."""
        self._start((Spread(),))
        self.settle()

    def allow_sums(self) -> None:
        """From now on several backward passes may add to a gradient: its home holds fp32 sums."""
        self.settle()
        self.placement = replace(self.placement, accumulate=True)
        self._programs.clear()
        self.room.widen_gradients(self.placement)

    def close(self, keep_state: bool = False) -> None:
        """End all lanes and give everything back; lanes that do not end in `CLOSE_S` seconds are left behind."""
        until_s = time.monotonic() + CLOSE_S
        self.arrive = lambda unit: None  # it leads to the run, whose lanes' threads may outlive it
        for lane in self.workers.values():
            if not lane.close(max(0.0, until_s - time.monotonic())):
                self.room.leave_memory()
        self.inline.close()
        self.walk = None
        self.script.clear()
        self.frontier.clear()
        self.room.close(keep_state)

    def _act(self, op: Op) -> None:
        self._actions[op.verb](self.room, op)


def _told(phases: tuple[Phase, ...]) -> Iterator[Told]:
    """The turns of phases as they will be announced."""
    for phase in phases:
        if isinstance(phase, Forward):
            yield from (("forward", turn, True) for turn in phase.turns)
        elif isinstance(phase, Backward):
            yield from (("backward", turn, phase.last) for turn in phase.turns)
        elif isinstance(phase, Finish):
            yield "finish", phase, True


def _nothing(op: Op) -> None:
    """The computation of an op that is only a point in the order."""
