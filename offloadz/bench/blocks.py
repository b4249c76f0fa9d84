"""How fast a block computes: its forward without a graph and its backward with recomputation, as a step has them.

A block of the usual make (norms, attention with rotary positions, a gated feed-forward) over one row of tokens, with
gradients that are added to.  Few tokens are measured besides many, because weights have to be read for any number of
them.  The trade-off: one width stands for all; on a CPU blocks of 768 to 2,048 lie within a tenth of each other.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from offloadz.bench.compute import Rate
from offloadz.bench.rounds import seconds
from offloadz.plan.predict import ATTENTION_BACK
from offloadz.runtime import native
from offloadz.runtime.devices import Cpu, Device

PASSES = 4
"""Products with each weight in a step: one forward, and a backward that recomputes it and makes two gradients."""
ATTENTION_PASSES = 2 + ATTENTION_BACK
HEAD = 64


class Block(nn.Module):
    """One block `hidden` wide."""

    def __init__(self, hidden: int, inner: int, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        shapes = [(hidden, hidden)] * 4 + [(inner, hidden)] * 2 + [(hidden, inner)]
        self.weights = nn.ParameterList([torch.randn(shape).mul_(0.02) for shape in shapes])
        self.norms = nn.ModuleList([nn.RMSNorm(hidden), nn.RMSNorm(hidden)])
        self.to(device, dtype)
        for weight in self.parameters():
            weight.grad = torch.zeros_like(weight)

    def forward(self, hidden: Tensor) -> Tensor:
        query, key, value, out, gate, up, down = self.weights
        normed, linear = self.norms[0](hidden), nn.functional.linear
        q, k, v = (self._heads(linear(normed, weight)) for weight in (query, key, value))
        mixed = nn.functional.scaled_dot_product_attention(_turned(q), _turned(k), v, is_causal=True)
        hidden = hidden + linear(mixed.transpose(1, 2).reshape(hidden.shape), out)
        normed = self.norms[1](hidden)
        return hidden + linear(nn.functional.silu(linear(normed, gate)) * linear(normed, up), down)

    def _heads(self, wide: Tensor) -> Tensor:
        rows, length, hidden = wide.shape
        return wide.view(rows, length, max(1, hidden // HEAD), -1).transpose(1, 2)


def _turned(heads: Tensor) -> Tensor:
    """As rotary positions do it: two products and a sum, whatever the angle."""
    half = heads.shape[-1] // 2
    return heads * 0.5 + torch.cat((-heads[..., half:], heads[..., :half]), -1) * 0.5


def blocks(
    tokens: int, hidden: int, inner: int, dtype: torch.dtype = torch.float32, device: Device | None = None
) -> Rate:
    """Flop/s of a block over `tokens` tokens in `dtype`, counted as a plan counts them, on a `device` or the host."""
    on = device or Cpu()
    native.shape_heap()
    block = Block(hidden, inner, on.torch, dtype)
    states = torch.randn(1, tokens, hidden).to(on.torch, dtype)
    elements = PASSES * sum(weight.numel() for weight in block.parameters())
    elements += ATTENTION_PASSES * tokens * hidden  # half of what masked rows take: what lies ahead is left out

    def work() -> None:
        with torch.no_grad():
            block(states)
        out = block(states.detach().requires_grad_())
        torch.autograd.backward([out], [states])
        on.ask(out[0, 0, :1])

    return lambda: 2 * tokens * elements / seconds(work)
