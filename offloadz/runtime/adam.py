"""The plain torch twin of the native update, op by op, for tests; training never calls it.

It leaves speed to `native.adamw_` (a pass per operation costs about ten times the memory traffic) and has its bits:
both use only correctly rounded operations.  That is why the square root is numpy's: torch's, from MKL, is off by one
unit in the last place for about 0.7 % of arguments.
"""

import numpy as np
import torch
from torch import Tensor


def adamw_reference(
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    grad_scale: float = 1.0,
    decoupled: bool = True,
) -> None:
    """One step in place on float32 tensors of one shape (`grad` may be bfloat16); arguments as in `native.adamw_`."""
    numbers = [1 - lr * weight_decay, weight_decay, 1 - beta1, beta2, 1 - beta2]
    numbers += [(1 - beta2**step) ** 0.5, eps, -(lr / (1 - beta1**step)), grad_scale]
    keep, decay, w1, b2, w2, root, small, minus, scale = torch.tensor(numbers, dtype=torch.float64).float().unbind()
    g = grad.float() * scale
    if decoupled:
        master.mul_(keep)
    else:
        g = g + decay * master
    near = exp_avg + w1 * (g - exp_avg)
    exp_avg.copy_(g - (g - exp_avg) * (1 - w1) if w1 >= 0.5 else near)  # torch's lerp starts from the nearer end
    exp_avg_sq.copy_(exp_avg_sq * b2 + (w2 * g) * g)
    denom = torch.from_numpy(np.sqrt(exp_avg_sq.numpy())) / root + small
    master.add_((minus * exp_avg) / denom)
