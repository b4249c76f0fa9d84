"""Case G09, kind K09: however eight samples are cut into micro-batches, it is one step with one gradient.

Windows of 1x8, 2x4, 4x2 and 8x1 (micro-batches x rows) inside `run.step`, in sweeps, and as several `run.backward`
before one `run.update`; gradients in memory and on disk, clipping off and on.  All have the norm, the loss and the
weights of the plain loop on the whole batch, within section 8 of the design.  Samples have 1 to 40 targets, so a mean
of means would be far off.  Several ranks: `test_rank_kinds.py`.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from reference import Trace, plain_run
from samples import NUM_TARGETS, samples
from tiny_models import Outcome, assert_close, assert_same_bits, sliced, start_of, tiny, train, weights
from torch import Tensor

import offloadz
from offloadz.model.run import Run

WINDOWS = (1, 2, 4, 8)
"""Micro-batches of a step."""
LIMITS = {"off": 0.0, "on": 0.5}
NUM_STEPS = 3


STEPS = [samples()] * NUM_STEPS


@cache
def plain(family: str, clipping: str) -> Trace:
    return plain_run(tiny(family), STEPS, max_grad_norm=LIMITS[clipping])


def offloaded(family: str, gradients: str, clipping: str, swap: Path, **how: int) -> Run:
    return offloadz.offload(
        tiny(family), offloadz.AdamW(lr=1e-3), swap=swap, parameters="disk", optimizer_state="disk",
        activations="host", gradients=gradients, max_grad_norm=LIMITS[clipping], **how,
    )  # fmt: skip


def by_backward(run: Run, steps: list[dict[str, Tensor]], window: int, keep: slice = slice(None)) -> Outcome:
    """Each step as `window` backward passes of sums over all its targets; `keep`: which of them are made."""
    out = Outcome()
    for batch in steps:
        rows = batch["labels"].shape[0]
        num_targets = int((batch["labels"][:, 1:] != -100).sum())
        for first in range(0, rows, rows // window)[keep]:
            part = sliced(batch, first, first + rows // window)
            run.backward(-offloadz.token_logprobs(run, part).double().sum() / num_targets)
        run.update()
        out.losses.append(run.report.loss)
        out.norms.append(run.report.grad_norm)
    out.weights = weights(run)
    return out


@pytest.mark.parametrize("clipping", LIMITS)
@pytest.mark.parametrize("gradients", ["host", "disk"])
@pytest.mark.parametrize("window", WINDOWS)
def test_every_window_is_one_step(window: int, gradients: str, clipping: str, swap: Path) -> None:
    """As micro-batches of one sweep, as sweeps of one micro-batch, and as backward passes; untied and tied by turns."""
    family = ("llama", "qwen3")[(WINDOWS.index(window) + (gradients == "disk") + (clipping == "on")) % 2]
    wanted, start, rows = plain(family, clipping), start_of(tiny(family)), 8 // window
    assert all(norm > LIMITS["on"] for norm in wanted.norms)  # so that clipping, where it is on, fires
    found = {}
    for way, how in (("micro-batches", {"sweeps": 1}), ("sweeps", {"sweeps": window})):
        with offloaded(family, gradients, clipping, swap, micro_batch_size=rows, **how) as run:
            found[way] = train(run, STEPS)
            assert len(run.stage.ranges(8)) == window and run.report.target_tokens == sum(NUM_TARGETS)
    with offloaded(family, gradients, clipping, swap) as run:
        found["backward"] = by_backward(run, STEPS, window)
    for way, outcome in found.items():
        assert_close(outcome, wanted, start, f"{window} {way}")


@pytest.mark.parametrize("window", [2, 4])
def test_where_gradients_are_changes_no_bit(window: int, swap: Path) -> None:
    outcomes = []
    for gradients in ("host", "disk"):
        with offloaded("llama", gradients, "on", swap, micro_batch_size=2) as run:
            outcomes.append(by_backward(run, STEPS, window))
    assert_same_bits(*outcomes)


@pytest.mark.parametrize("gradients", ["host", "disk"])
def test_a_last_window_that_is_not_full_is_divided_by_its_own_count(gradients: str, swap: Path) -> None:
    """Seven samples, windows of four: two updates, the second over three samples and their targets."""
    whole = samples(NUM_TARGETS[:7])
    steps = [sliced(whole, 0, 4), sliced(whole, 4, 7)]
    wanted = plain_run(tiny("llama"), steps, max_grad_norm=LIMITS["on"])
    with offloaded("llama", gradients, "on", swap, micro_batch_size=1) as run:
        found = train(run, steps)
        assert run.session.step == len(steps)
    assert_close(found, wanted, start_of(tiny("llama")))


def test_the_check_would_see_what_this_case_is_about(swap: Path) -> None:
    """Only the first micro-batch kept; a mean of means."""
    wanted, start = plain("llama", "on"), start_of(tiny("llama"))
    with offloaded("llama", "host", "on", swap) as run:
        first = by_backward(run, STEPS, 4, slice(1))
    first.losses = list(wanted.losses)
    with pytest.raises(AssertionError, match="norm of step 0"):
        assert_close(first, wanted, start)
    out = Outcome(list(wanted.losses))
    with offloaded("llama", "host", "on", swap) as run:
        for batch in STEPS:
            for row in range(8):
                part = sliced(batch, row, row + 1)
                run.backward(-offloadz.token_logprobs(run, part).double().sum() / NUM_TARGETS[row] / 8)
            run.update()
            out.norms.append(run.report.grad_norm)
        out.weights = weights(run)
    with pytest.raises(AssertionError, match="norm of step 0"):
        assert_close(out, wanted, start)
