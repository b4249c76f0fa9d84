"""The numbers of a step of a large model, from walks over smaller ones (`shorter.py`).

A step grows by the same with each block that is like its neighbours, so two walks tell of a model of any depth.  What
was asked once is remembered with the model, as a search asks for the same step under several limits.  Left to others:
the program and the timeline of the whole model (`predict`, which `offloadz show` prints).  The trade-off: times are off
by some thousandths, and bytes by less than a ten-thousandth where parts are taken together;
`tests/plan/test_estimate.py` holds times to a hundredth.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from offloadz.plan.footprint import Batch
from offloadz.plan.left import most_products, product_seats
from offloadz.plan.machine import Machine
from offloadz.plan.placement import Placement
from offloadz.plan.predict import Prediction, predict
from offloadz.plan.shorter import equal_blocks, shorter, walked
from offloadz.plan.spec import ModelSpec


def estimate(spec: ModelSpec, placement: Placement, batch: Batch, machine: Machine) -> Prediction:
    """`predict` as far as numbers go; program and timeline are those of a smaller model."""
    key = ("estimate", placement, batch, machine.cores, tuple(machine.rates.items()))
    if key not in spec.memo:
        spec.memo[key] = _estimate(spec, placement, batch, machine)
    found: Prediction = spec.memo[key]
    return found


def _estimate(spec: ModelSpec, placement: Placement, batch: Batch, machine: Machine) -> Prediction:
    count, numbers, (spared, made) = equal_blocks(spec)[1], walked(spec), shares(spec, placement)
    alike = placement
    if count > numbers[1] and not {spared, made} <= {0.0, 1.0}:  # blocks are not alike: each as their mean
        alike = replace(placement, kept=0, cheap=most_products(spec) if made else 0)
    spared, made = (0.0, 1.0) if alike is placement else (spared, made)
    few, *more = [predict(part, alike, batch, machine, spared, made) for part in shorter(spec)]
    return _beyond(few, more[0], (count - numbers[0]) / (numbers[1] - numbers[0])) if more else few


def shares(spec: ModelSpec, placement: Placement) -> tuple[float, float]:
    """Of the model's seats, those that keep their graph, and those that keep results of products."""
    spared = placement.kept / max(1, len(spec.unfolding_seats))
    made = len(product_seats(spec, placement.cheap, placement.kept)) / max(1, most_products(spec))
    return spared, min(1 - spared, made)


def _beyond(few: Prediction, more: Prediction, far: float) -> Prediction:
    """What stands `far` times as far from `few` as `more` does."""

    def grown(low: float, high: float) -> float:
        return low + far * (high - low)

    def each(low: Mapping[str, float], high: Mapping[str, float]) -> dict[str, float]:
        return {name: grown(low.get(name, 0.0), high[name]) for name in high}

    shared_s = each(few.shared_s, more.shared_s)
    return replace(
        more,
        step_s=max(grown(few.step_s, more.step_s), *shared_s.values(), 0.0),
        busy_s=each(few.busy_s, more.busy_s),
        shared_s=shared_s,
        taken_s=each(few.taken_s, more.taken_s),
        disk_read_bytes=round(grown(few.disk_read_bytes, more.disk_read_bytes)),
        disk_written_bytes=round(grown(few.disk_written_bytes, more.disk_written_bytes)),
    )
