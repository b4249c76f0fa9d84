"""A block of a real family as its model calls it: the module and what it is called with beside the hidden state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM


def first_block(
    family: str, config: dict[str, Any], attention: str
) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """The first block of a model in training mode, and its further arguments for 2 rows of 256 tokens."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **config), attn_implementation=attention)
    block = next(module for name, module in model.train().named_modules() if name.endswith(".0"))
    caught: dict[str, Any] = {}

    def catch(_: Any, args: Any, kwargs: Any) -> None:
        caught.update(args=args, kwargs=kwargs)
        raise InterruptedError

    hook = block.register_forward_pre_hook(catch, with_kwargs=True)
    with pytest.raises(InterruptedError):
        model(input_ids=torch.zeros(2, 256, dtype=torch.long), use_cache=False)
    hook.remove()
    return block, caught["args"][1:], caught["kwargs"]
