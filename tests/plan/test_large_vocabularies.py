"""The time of a head: products, a chunk of tokens at a time, and its logits as they go through memory.

A wide vocabulary over a narrow hidden state (262,144 words of 640) is a head before it is anything else, so what a plan
says of it decides.  How often a logit passes memory is counted in a real step.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import prod
from typing import Any

import pytest
import torch
from tiny_models import tiny
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import offloadz
from offloadz.plan.footprint import HEAD_CHUNK_TOKENS, Batch
from offloadz.plan.machine import Machine
from offloadz.plan.placement import Placement
from offloadz.plan.predict import ATTENTION_BACK, LOGITS_BYTES, Costs, predict
from offloadz.plan.shapes import ParamInfo, TableInfo, make_spec
from offloadz.plan.spec import ModelSpec

GIB = 1 << 30
RATES = {"float32": 2e11, "device": 2e11, "device_few": 1.5e11, "memory": 5e10}
BOX = Machine("box", 64 * GIB, "a test", device_bytes=64 * GIB, cores=2)


def model(words: int, width: int, head_size: int = 0) -> ModelSpec:
    """A block of four matrices and a tied table."""
    params = [ParamInfo("emb.weight", (words, width))]
    params += [ParamInfo(f"layers.0.{n}.weight", (width, width)) for n in "abcd"]
    sizes = {"hidden_size": width, "num_attention_heads": 4, "head_dim": head_size}
    tables, heads = [TableInfo("emb", "emb.weight")], [TableInfo("head", "emb.weight")]
    return make_spec(params, ["layers.0"], tables, heads, dtype="bfloat16", config=sizes)


def seconds(spec: ModelSpec, tokens: int, kind: str = "head", **rates: float) -> dict[str, float]:
    """Forward and backward of all computations of a kind of seat, with every graph kept."""
    place = Placement(storage="bfloat16", kept=len(spec.unfolding_seats))
    machine = replace(BOX, rates={**BOX.rates, **RATES, **rates})
    batch, found = Batch(1, tokens, 1), Counter[str]()
    costs = Costs(spec, place, batch, machine)
    for op in predict(spec, place, batch, machine).program.ops:
        if op.lane == "device" and op.seat >= 0 and spec.seats[op.seat].kind == kind:
            found[op.verb] += costs(op)
    return dict(found)


@pytest.mark.parametrize("words", [32_000, 128_256, 262_144])
@pytest.mark.parametrize("width", [64, 640, 4096])
def test_the_time_of_a_head_follows_memory_beside_its_products(words: int, width: int) -> None:
    spec, tokens = model(words, width), 512
    logits = words * tokens
    fast, slow = (seconds(spec, tokens, memory=rate) for rate in (5e10, 2.5e10))
    for verb, nbytes in LOGITS_BYTES.items():
        assert slow[verb] - fast[verb] == pytest.approx(logits * nbytes / 5e10)
        products_s = fast[verb] - logits * nbytes / 5e10
        flop = 2 * logits * width * (2 if verb == "backward" else 1)
        assert flop / 2e11 < products_s < flop / 1.5e11, "over 512 tokens: between the rates over few and over many"
    narrow = sum(seconds(model(words, 64), tokens).values())
    assert narrow > logits * sum(LOGITS_BYTES.values()) / 5e10 > 0.4 * narrow, "a narrow one is its logits"
    block = [seconds(spec, tokens, "block", memory=rate) for rate in (5e10, 2.5e10)]
    assert block[0] == block[1], "blocks are rated whole"


def test_a_head_reads_its_weights_once_for_each_chunk_of_tokens() -> None:
    spec = model(128_256, 640)
    few = seconds(spec, HEAD_CHUNK_TOKENS)
    many = seconds(spec, 8 * HEAD_CHUNK_TOKENS)
    assert many == pytest.approx({verb: 8 * taken for verb, taken in few.items()})
    blocks = [seconds(spec, tokens, "block") for tokens in (HEAD_CHUNK_TOKENS, 8 * HEAD_CHUNK_TOKENS)]
    attention = 2 * 2 * 7 * HEAD_CHUNK_TOKENS * 640 * 8 * HEAD_CHUNK_TOKENS / 2e11  # of rows eight times as long
    assert blocks[1]["forward"] < 8 * blocks[0]["forward"] + attention, "blocks compute all tokens at once"


def test_attention_is_as_wide_as_its_heads() -> None:
    """Gemma 3: four heads of 256 over a hidden state of 640."""
    tokens, width = 512, 640
    plain, wide = (seconds(model(1024, width, size), tokens, "block") for size in (0, 256))
    elements = 4 * width * width
    for verb, products, again in (("forward", 1, 1.0), ("backward", 2, ATTENTION_BACK)):
        told = [products * elements + again * 2 * tokens * size for size in (4 * 256, width)]
        assert wide[verb] / plain[verb] == pytest.approx(told[0] / told[1])


class Logits(TorchDispatchMode):
    """Counts how often arrays of `count` elements are read and written, per phase."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count, self.passes = count, Counter[str]()
        self.phase = "forward"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name == "select_backward":
            self.passes[self.phase] += 3  # zeros, and a copy that is read and written
        elif not func.is_view and name not in ("_unsafe_view", "detach", "index", "index_put_"):
            tensors = [x for x in (*args, out) if isinstance(x, Tensor) and x.device.type != "meta"]
            self.passes[self.phase] += sum(prod(x.shape) == self.count for x in tensors)
        return out


def test_logits_pass_memory_as_often_as_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one chunk against one tile, with its graph kept."""
    tokens, words = 24, 211
    ids = torch.randint(0, words, (1, tokens))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    with offloadz.offload(tiny("llama"), offloadz.AdamW(), batch_size=1, max_length=tokens) as run:
        run.step(batch)
        counted, backward = Logits((tokens - 1) * words), offloadz.model.head._unreduce
        monkeypatch.setattr(
            offloadz.model.head, "_unreduce", lambda *args: (setattr(counted, "phase", "backward"), backward(*args))
        )
        with counted:
            run.step(batch)
    assert {verb: 4 * count for verb, count in counted.passes.items()} == LOGITS_BYTES
