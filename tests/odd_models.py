"""Plain modules that do not use each parameter once per step, and the buffers of a run as numbers.

All of them answer like a causal model of transformers (`.logits`), so that the plain loop of `reference.py` trains them
as they are.  What differs from step to step is said by a tensor of the batch, one entry per row.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from reference import summed_loss
from tiny_models import VOCABULARY, WIDTH, Outcome, weights
from torch import Tensor, nn

import offloadz
from offloadz.model.run import Batch, Run


class Layer(nn.Module):
    """A residual block; `spare` is a parameter that its forward never uses."""

    def __init__(self, spare: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 130)
        self.down = nn.Linear(130, WIDTH)
        if spare:
            self.spare = nn.Parameter(torch.randn(7, 5))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Pair(Layer):
    """A block with a second input and three outputs: the state, something the loss uses, and whole numbers."""

    def forward(self, x: Tensor, scale: Tensor, note: str = "") -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        more = self.down(torch.tanh(self.up(self.norm(x)))) * scale[:, None, None]
        return x + more, more.square().mean(-1), more.argmax(-1)


class Experts(Layer):
    """A block whose experts get the tokens whose first feature lies in their range; the last one never gets any."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, WIDTH)
        chosen = (flat[:, 0] > 0).long()
        out = torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            rows = (chosen == index).nonzero().squeeze(1)
            if rows.numel():
                out = out.index_add(0, rows, expert(flat[rows]))
        return super().forward(x) + out.view(x.shape)


class Odd(nn.Module):
    """Embedding, layers, norm, head; `odd` says per row whether this is an odd step."""

    def __init__(
        self, kind: Any = Layer, layers: int = 4, seed: int = 0, twice_normed: bool = False, **how: Any
    ) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.first_norm = nn.LayerNorm(WIDTH)
        self.layers = nn.ModuleList(kind(**how) for _ in range(layers))
        self.last_norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if twice_normed:
            self.last_norm.weight, self.last_norm.bias = self.first_norm.weight, self.first_norm.bias
        self.skipped: tuple[int, ...] = ()
        """Layers that run on odd steps only."""
        self.unused: tuple[int, ...] = ()
        """Layers that never run."""

    def forward(self, input_ids: Tensor, odd: Tensor | None = None, use_cache: bool = False) -> SimpleNamespace:
        x, extra = self.first_norm(self.embed(input_ids)), 0.0
        for index, layer in enumerate(self.layers):
            if index in self.unused or (index in self.skipped and odd is not None and not bool(odd[0])):
                continue
            if isinstance(layer, Pair):
                x, square, _ = layer(x, input_ids[:, 0].float() / VOCABULARY, note="here")
                extra = extra + square
            else:
                x = layer(x)
        logits = self.head(self.last_norm(x))
        return SimpleNamespace(logits=logits + extra[..., None] * logits if isinstance(extra, Tensor) else logits)


def odd_batches(count: int, rows: int = 4, length: int = 12) -> list[dict[str, Tensor]]:
    """Batches whose `odd` alternates."""
    source = torch.Generator().manual_seed(3)
    made = []
    for step in range(count):
        ids = torch.randint(0, VOCABULARY, (rows, length), generator=source)
        made.append({"input_ids": ids, "labels": ids.clone(), "odd": torch.full((rows,), step % 2)})
    return made


def mean_loss(model: nn.Module, batch: Batch) -> Tensor:
    """A `loss_fn`: the mean over all targets of the batch."""
    return summed_loss(model, dict(batch)) / int((batch["labels"][:, 1:] != -100).sum())


def held(run: Run) -> dict[str, int]:
    """What a run holds in memory, in bytes, and the number of its inputs that are still alive."""
    run.flush()
    room = run.session.room
    return {
        "slots": sum(s.numel() for s in room.slots.values()),
        "homes": sum(h.numel() for h in room.homes.values()),
        "saved": sum(s.numel() for s in room.saved.values()),
        "pools": len(room.pools),
        "extents": len(room.extents),
        "live": len(room.live),
        "shapes": len(room.shapes),
        "rows": sum(len(r) for r in run.stage.rows_due.values()),
        "calls": int(run.stage.root is not None),
    }


def odd_run(swap: Path, **how: Any) -> Outcome:
    """Six steps of a model whose layers are skipped in some, everything on disk, with an evaluation after each."""
    model, out = Odd(), Outcome()
    model.skipped = (1, 2)
    disk = dict.fromkeys(("parameters", "gradients", "optimizer_state", "activations"), "disk")
    with offloadz.offload(model, offloadz.AdamW(lr=1e-3), swap=swap, slots=2, **disk, **how) as run:
        for batch in odd_batches(6):
            out.losses.append(float(run.step(batch, loss_fn=mean_loss)))
            out.norms.append(run.report.grad_norm)
            with torch.no_grad():
                out.losses.append(float(run.model(input_ids=batch["input_ids"]).logits.sum()))
        out.weights = weights(run)
    return out
