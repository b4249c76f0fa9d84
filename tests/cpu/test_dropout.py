"""Dropout: the second forward of a block draws the masks of its first.  Case G08, kind K11, trap 17.

Masks depend on (seed, step, call, micro-batch) alone, so a plain loop that sets the generator to the same numbers
before each block must get the same gradients, and where bytes lie must not change a bit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from reference import summed_loss
from tiny_models import Outcome, assert_close, assert_same_bits, batches, start_of, tiny, train
from torch import Tensor, nn

import offloadz
from offloadz.model.stage import _mixed

DISK: dict[str, Any] = {"parameters": "disk", "optimizer_state": "disk", "activations": "disk", "slots": 2}
STEPS = batches(3)
SEED = 11


def dropping(attention: float = 0.2) -> nn.Module:
    """A GPT-2 that drops in its blocks, on scores and on both residuals."""
    return tiny("gpt2", resid_pdrop=0.2, attn_pdrop=attention).train()


def ours(swap: Path, micro: int = 2, **where: Any) -> Outcome:
    settings = offloadz.AdamW(lr=1e-3)
    with offloadz.offload(
        dropping(), settings, swap=swap, micro_batch_size=micro, seed=SEED, **{**DISK, **where}
    ) as run:
        return train(run, STEPS)


def seeded_plain(micro: int) -> Outcome:
    """The plain loop with the generator set before each block as in a run of ours (two tables stand before them)."""
    model, out = dropping(), Outcome()
    now = {"step": 0, "micro": 0}
    for index, block in enumerate(model.transformer.h):
        block.register_forward_pre_hook(
            lambda m, args, call=index + 2: torch.manual_seed(_mixed(SEED, now["step"], call, now["micro"])) and None
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    for step, batch in enumerate(STEPS, 1):
        optimizer.zero_grad()
        targets, total = int((batch["labels"][:, 1:] != -100).sum()), 0.0
        rows = batch["labels"].shape[0]
        for number, first in enumerate(range(0, rows, micro)):
            now.update(step=step, micro=number)
            loss: Tensor = summed_loss(model, {k: v[first : first + micro] for k, v in batch.items()}) / targets
            loss.backward()
            total += float(loss.detach())
        out.losses.append(total)
        out.norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)))
        optimizer.step()
    out.weights = start_of(model)
    return out


@pytest.mark.parametrize("recompute", ["all", "none"])
@pytest.mark.parametrize("micro", [4, 2])
def test_gradients_are_those_of_autograd_on_the_same_masks(micro: int, recompute: str, swap: Path) -> None:
    found = ours(swap, micro, recompute=recompute)
    assert_close(found, seeded_plain(micro), start_of(dropping()), f"micro-batches of {micro}")


def test_where_bytes_lie_does_not_change_the_masks(swap: Path) -> None:
    wanted = ours(swap)
    for activations, slots in (("device", 1), ("host", 3), ("disk", 1)):
        assert_same_bits(ours(swap, activations=activations, slots=slots), wanted, f"{activations}, {slots} slots")


def test_masks_differ_from_step_to_step_and_without_dropout(swap: Path) -> None:
    """What the tests above compare is not a dropout that never happens, nor one mask for all."""
    batch = STEPS[0]
    settings = offloadz.AdamW(lr=0.0, weight_decay=0.0)
    with offloadz.offload(dropping(), settings, swap=swap, seed=SEED, **DISK) as run:
        losses = [float(run.step(batch)) for _ in range(3)]
        run.model.eval()
        losses += [float(run.step(batch)) for _ in range(2)]
    assert len(set(losses)) == 4 and losses[3] == losses[4]


@pytest.mark.parametrize("recompute", ["all", "cheap"])
def test_several_backward_passes_have_the_masks_of_their_forwards(recompute: str, swap: Path) -> None:
    """The forward of the first one runs before anybody knows that a step begins."""

    def passes(recompute: str) -> Outcome:
        out = Outcome()
        with offloadz.offload(dropping(), offloadz.AdamW(lr=1e-3), swap=swap, seed=SEED, recompute=recompute) as run:
            run.step(STEPS[0])
            for _ in range(2):
                for batch in STEPS[1:]:
                    loss = run.model(**batch).loss
                    out.losses.append(float(loss.detach()))
                    run.backward(loss)
                run.update()
                out.norms.append(run.report.grad_norm)
            out.weights = train(run, []).weights
        return out

    wanted = passes("none")
    assert_same_bits(passes(recompute), wanted)
    assert len(set(wanted.losses)) == len(wanted.losses)
