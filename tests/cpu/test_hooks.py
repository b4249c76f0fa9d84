"""Forward hooks of a user, on modules or on all at once: called for what is computed and nothing else, with its values.

Around a block once for all rows, inside one once for each micro-batch, and again where the block runs again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import batches, tiny
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

import offloadz

ROWS, MICRO = 4, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))  # type: ignore[no-any-return]


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


Seen = dict[str, list[Any]]


@contextmanager
def seeing(model: nn.Module, where: str) -> Iterator[Seen]:
    """What each module gives, by its name; told by hooks on each, or by one on all."""
    seen: Seen = {}
    names = {id(module): name for name, module in model.named_modules()}

    def see(module: nn.Module, args: Any, out: Any) -> None:
        if id(module) in names:
            seen.setdefault(names[id(module)], []).append(out.detach().clone() if isinstance(out, Tensor) else out)

    some = list(model.modules())
    handles = [register_module_forward_hook(see)] if where == "all" else [m.register_forward_hook(see) for m in some]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize("where", ["each", "all"])
@pytest.mark.parametrize("recompute", ["none", "all", "cheap"])
def test_they_see_what_is_computed(recompute: str, where: str, swap: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blank = torch.empty_strided  # stands for products that nobody reads
    monkeypatch.setattr(torch, "empty_strided", lambda *how, **more: blank(*how, **more).fill_(float("inf")))
    model, x = Stack(), torch.linspace(-1, 1, ROWS * 8).view(ROWS, 8)
    with torch.no_grad(), seeing(model, where) as plain:
        model(x)
    how = {"recompute": recompute, "micro_batch_size": MICRO, "batch_size": ROWS}
    with (
        seeing(model, where) as seen,
        offloadz.offload(model, offloadz.AdamW(lr=0.0, weight_decay=0.0), swap=swap, **how) as run,
    ):
        for _ in range(3):
            run.step({"x": x}, loss_fn=lambda m, b: m(b["x"]).square().mean())
            again = 1 if recompute == "none" else 2
            for name, (wanted,) in plain.items():
                found = seen.pop(name)
                if name.endswith((".up", ".down")):
                    assert len(found) == again * ROWS // MICRO, name
                    forward, backward = found[: ROWS // MICRO], found[ROWS // MICRO :]
                    assert torch.allclose(torch.cat(forward), wanted, atol=1e-6) and len(backward) in (0, len(forward))
                    assert all(map(torch.equal, forward, backward)), name
                else:
                    assert len(found) == 1 and torch.allclose(found[0], wanted, atol=1e-6), name
            assert not seen


def test_a_loss_by_tokens_calls_the_base_once_and_the_head_with_chunks(swap: Path) -> None:
    model, batch = tiny("llama"), batches(1)[0]
    words = model.config.vocab_size
    how = {"micro_batch_size": 2, "recompute": "none", "batch_size": len(batch["input_ids"])}
    with seeing(model, "each") as seen, offloadz.offload(model, offloadz.AdamW(lr=1e-3), swap=swap, **how) as run:
        run.step(batch)
    assert {name: len(seen[name]) for name in ("model", "model.embed_tokens", "model.layers.0", "model.norm")} == {
        "model": 1, "model.embed_tokens": 1, "model.layers.0": 1, "model.norm": 1,
    }  # fmt: skip
    targets = int((batch["labels"][:, 1:] != -100).sum())
    assert sum(out.shape[1] for out in seen["lm_head"]) == targets and {o.shape[2] for o in seen["lm_head"]} == {words}
