"""The plain PyTorch loop that everything is compared with.

No slots, no lanes, no tricks: the model's own forward without a cache, the mean over the target tokens of the whole
step, torch's clipping, torch's AdamW (or an fp32 master beside bf16-rounded working weights), one micro-batch after the
other.  Correctness is agreement with this file.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn


@dataclass
class Trace:
    """What a reference run leaves: per step loss and norm before clipping, and the final weights by name."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)


def plain_run(
    model: nn.Module,
    batches: list[dict[str, Tensor]],
    *,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    max_grad_norm: float = 1.0,
    micro_rows: int = 0,
    bf16_weights: bool = False,
) -> Trace:
    """Train `model` (fp32) on `batches`, one optimizer step each.  `bf16_weights`: compute with rounded masters."""
    masters = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    leaves = {n: m.requires_grad_() for n, m in masters.items()}
    settings = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
    optimizer = torch.optim.AdamW(leaves.values(), **settings, foreach=False)
    trace = Trace()
    params = dict(model.named_parameters())
    for batch in batches:
        _lay(params, masters, bf16_weights)
        model.zero_grad(set_to_none=True)
        trace.losses.append(backward(model, batch, micro_rows))
        for name, leaf in leaves.items():
            grad = params[name].grad
            leaf.grad = None if grad is None else (grad.bfloat16().float() if bf16_weights else grad.clone())
        norm = torch.nn.utils.clip_grad_norm_(leaves.values(), max_grad_norm or float("inf"), foreach=False)
        trace.norms.append(float(norm))
        optimizer.step()
    _lay(params, masters, bf16_weights)
    trace.weights = {n: m.detach().clone() for n, m in masters.items()}
    return trace


def _lay(params: dict[str, nn.Parameter], masters: dict[str, Tensor], rounded: bool) -> None:
    """Put the working weights into the model."""
    with torch.no_grad():
        for name, master in masters.items():
            params[name].copy_(master.bfloat16().float() if rounded else master)


def backward(model: nn.Module, batch: dict[str, Tensor], micro_rows: int = 0) -> float:
    """Gradients of the mean loss over all targets of the batch, micro-batch by micro-batch; returns the loss."""
    labels = batch["labels"]
    rows = labels.shape[0]
    targets = int((labels[:, 1:] != -100).sum())
    total = 0.0
    for first in range(0, rows, micro_rows or rows):
        part = {k: v[first : first + (micro_rows or rows)] for k, v in batch.items()}
        loss = summed_loss(model, part) / targets
        loss.backward()
        total += float(loss.detach())
    return total


def summed_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Sum of the negative log-probabilities of the targets."""
    inputs = {k: v for k, v in batch.items() if k != "labels"}
    logits = model(**inputs, use_cache=False).logits[:, :-1].float()
    targets = batch["labels"][:, 1:].flatten()
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets, ignore_index=-100, reduction="sum")
