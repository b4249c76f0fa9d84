"""Operands of a computation lie in the device's memory, and nothing of it asks for a value: shown on the meta device.

A tensor on meta has no values, so whatever waits for one fails, and every operation is watched for operands of both
memories: the two mistakes that a CPU in the role of a device cannot see.  Copies home have nothing to copy and are left
out.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import batches, tiny
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import masking_utils

import offloadz
from offloadz.plan.ops import Op
from offloadz.runtime.device_actions import TABLES
from offloadz.runtime.rehearsal import Rehearsal
from offloadz.runtime.room import Room


class Meta(Rehearsal):
    """A device whose memory has no contents; what was brought there whole can still be asked for (ids are)."""

    torch = torch.device("meta")

    def __init__(self) -> None:
        super().__init__(bfloat16=True)
        self.known: list[tuple[Tensor, Tensor]] = []

    def empty(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="meta")

    def bring(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            self.known.append((value.to("meta"), value))
            return self.known[-1][0]
        if type(value) is dict:
            return {key: self.bring(item) for key, item in value.items()}
        return type(value)(map(self.bring, value)) if type(value) in (list, tuple) else value

    def descend(self, tensor: Tensor, grad: Tensor | None) -> None:
        tensor.backward(grad)  # on this thread, where it is watched

    def ask(self, value: Tensor) -> Tensor:
        return value if not value.is_meta else next(held for made, held in self.known if made is value)


class OneMemory(TorchDispatchMode):
    """Refuses an operation over tensors of both memories, unless it copies; single numbers may come from anywhere."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.dim()]
        assert len({x.device.type for x in tensors}) < 2 or func in COPIES, str(func)
        return func(*args, **(kwargs or {}))


COPIES = (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default)


def dropped(room: Room, op: Op) -> None:
    """What would have come home from the device is let go of."""
    room.live.pop((op.call, op.micro), None)


HOMEWARD = dict.fromkeys(("drain.g", "save.g", "save.x", "lower.s", "lower.p", "lower.h"), dropped)


@pytest.mark.parametrize(("activations", "recompute"), [("host", "all"), ("device", "all"), ("host", "none")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_pass_there_and_back(
    family: str, dtype: torch.dtype, activations: str, recompute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TABLES, False, TABLES[False] | HOMEWARD)
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda *_: None)  # transformers' own wait
    batch = {key: value for key, value in batches(1, padded=False)[0].items() if key != "attention_mask"}
    how = {"micro_batch_size": 2, "activations": activations, "recompute": recompute}
    with offloadz.offload(tiny(family), device=Meta(), dtype=dtype, **how) as run:
        assert run.loss_head is not None
        run.loss_head._checked = True  # looked at once, with values
        with OneMemory():
            logp = offloadz.token_logprobs(run, batch)
        assert logp.device.type == "meta" and logp.shape == batch["labels"].shape
        with OneMemory(), run._working():  # as `run.step` does it, which then reads the loss
            run._open_step()
            run.session.rounds = True
            run.session.descend(logp.sum())
            run.session.finish(run._scatter)
            assert run.stage.touched == {name for name, _ in run.model.named_parameters()}


def test_an_operand_of_the_host_is_refused() -> None:
    """The check checks something."""
    with OneMemory(), pytest.raises(AssertionError, match="mm"):
        torch.zeros(3, 4, device="meta") @ torch.zeros(4, 3)


def test_a_loss_of_ones_own_over_whole_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TABLES, False, TABLES[False] | HOMEWARD)
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda *_: None)
    batch = {key: value for key, value in batches(1, padded=False)[0].items() if key != "attention_mask"}
    with offloadz.offload(tiny("llama"), device=Meta(), dtype=torch.bfloat16, micro_batch_size=2) as run:
        with OneMemory(), torch.no_grad():
            assert run.model(**batch).logits.is_meta
        with OneMemory(), run._working():
            run._open_step()
            run.session.rounds = True
            run.session.descend(run.model(**batch).loss)
            run.session.finish(run._scatter)
