"""Predicted bytes against hand-made sums and what torch really allocates.  Case G01, kind K01 (the plan's part)."""

from __future__ import annotations

import subprocess
import sys
import weakref
from dataclasses import replace
from typing import Any

import pytest
from programs import stagger_bytes

from offloadz.plan.footprint import (
    BASELINE_BYTES,
    Batch,
    checkpoint_bytes,
    footprint,
    graph_bytes,
    num_saved,
    score_copies,
)
from offloadz.plan.placement import KINDS, Placement
from offloadz.plan.shapes import ParamInfo, TableInfo, make_spec
from offloadz.plan.spec import ModelSpec

WIDTH, ROWS = 1024, 4096
MIB = 1 << 20


def square(dtype: str = "bfloat16", **more: Any) -> ModelSpec:
    """Two blocks of 1 Mi elements and a tied table of 4 Mi (four tiles), so that every size is a round number."""
    params = [ParamInfo("emb.weight", (ROWS, WIDTH))]
    params += [ParamInfo(f"layers.{i}.w.weight", (WIDTH, WIDTH)) for i in range(2)]
    sizes = {"hidden_size": WIDTH, "vocab_size": ROWS, "num_attention_heads": 4}
    tables, heads = [TableInfo("emb", "emb.weight")], [TableInfo("head", "emb.weight")]
    return make_spec(params, ["layers.0", "layers.1"], tables, heads, dtype=dtype, config=sizes, **more)


DISK = Placement("disk", "disk", "disk", "disk", slots=2, storage="bfloat16")
BATCH = Batch(rows=4, length=256, micro_rows=2)


def test_a_spare_is_counted_where_it_lies() -> None:
    """`commit = "shadow"`: of what is in memory a second home, of what is on disk a second copy."""
    memory = replace(DISK, parameters="host", optimizer="host", gradients="host", commit="shadow")
    found = footprint(square(), memory, BATCH, baseline_bytes=0)
    held = {name: nbytes for name, nbytes in found.terms["step"]["host"].items() if "spare" in name}
    assert held == {"spare parameters": 12 * MIB, "spare optimizer": 60 * MIB + stagger_bytes(square())}
    frozen = footprint(square(freeze=("*layers*",)), memory, BATCH, baseline_bytes=0)
    assert frozen.terms["step"]["host"]["spare parameters"] == 8 * MIB  # of the table alone
    mixed = replace(memory, optimizer="disk", copies=memory.least_copies + 1)
    found = footprint(square(), mixed, BATCH, baseline_bytes=0)
    assert found.terms["step"]["disk"]["optimizer"] == 2 * (60 * MIB + stagger_bytes(square()))
    assert found.terms["step"]["host"]["parameters"] == found.terms["step"]["host"]["spare parameters"] == 12 * MIB


def test_storage_is_the_sum_done_by_hand() -> None:
    found = footprint(square(), DISK, BATCH, baseline_bytes=0)
    disk = found.terms["step"]["disk"]
    assert disk["parameters"] == 12 * MIB
    assert disk["optimizer"] == 60 * MIB + stagger_bytes(square())  # low bits and two moments: 10 bytes a parameter
    assert disk["gradients"] == 2 * 2 * MIB + 4 * 4 * MIB  # blocks rounded; the tied table may hold an open fp32 sum
    assert disk["saved inputs"] == 2 * 2 * (2 * 256 * WIDTH * 4)  # seats x micro-batches x fp32 hidden states
    step = found.terms["step"]["host"]
    slots = {name: nbytes // MIB for name, nbytes in step.items() if name.startswith("slots")}
    assert slots == {
        "slots host.w": 4, "slots compute.w": 8, "slots compute.g": 8, "slots host.g": 8, "slots host.p": 4,
        "slots host.s": 20, "slots host.h": 4, "slots host.x": 4,
    }  # fmt: skip
    assert step["hidden states"] == 4 * 1024 * WIDTH * 4
    assert found.terms["save"]["checkpoint"] == {"checkpoints": 3 * 6 * MIB * 12, "room beside them": 64 * MIB}
    assert found.terms["export"]["checkpoint"] == {"final": 12 * MIB}


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_on_disk_leaves_memory(kind: str) -> None:
    """What a kind holds at rest moves from host to disk; host keeps slots for it and nothing else changes tier."""
    memory = Placement("host", "host", "host", "host", storage="bfloat16")
    name = "saved inputs" if kind == "activations" else kind
    before, after = (footprint(square(), p, BATCH) for p in (memory, replace(memory, **{kind: "disk"})))
    assert after.terms["step"]["disk"][name] == before.terms["step"]["host"][name] > 0
    assert name not in after.terms["step"]["host"]
    assert set(after.terms["step"]["disk"]) == {name}


def test_on_a_cpu_the_device_is_the_host() -> None:
    kept = Placement("device", "device", "device", "device", storage="bfloat16")
    one = footprint(square(), kept, BATCH)
    two = footprint(square(), replace(kept, unified=False), BATCH)
    state_bytes = 60 * MIB + stagger_bytes(square())
    assert one.peak["device"] == 0 and one.terms["step"]["host"]["optimizer"] == state_bytes
    assert two.terms["step"]["device"]["optimizer"] == state_bytes and "optimizer" not in two.terms["step"]["host"]
    assert {"slots compute.w", "slots compute.g", "hidden states"} <= set(two.terms["step"]["device"])


def test_peaks_are_the_largest_phase_and_sweeps_shrink_the_hidden_state() -> None:
    found = footprint(square(), DISK, BATCH)
    for tier, phases in found.bytes.items():
        assert found.peak[tier] == max(phases.values())
        for phase, nbytes in phases.items():
            assert nbytes == sum(found.terms[phase].get(tier, {}).values())
    halved = footprint(square(), replace(DISK, accumulate=True), replace(BATCH, sweeps=2))
    for tier, name in (("host", "hidden states"), ("disk", "saved inputs")):
        assert halved.terms["step"][tier][name] * 2 == found.terms["step"][tier][name]
    assert halved.terms["step"]["disk"]["gradients"] == 6 * MIB * 4  # open sums are fp32


def test_frozen_weights_have_no_state_and_no_saved_inputs_below() -> None:
    spec = square(freeze=["emb.*", "layers.0.*"])
    found = footprint(spec, DISK, BATCH)
    assert found.terms["step"]["disk"]["optimizer"] == 10 * MIB + stagger_bytes(spec)
    assert found.terms["step"]["disk"]["gradients"] == 2 * MIB
    assert num_saved(spec) == 1
    assert checkpoint_bytes(spec) == MIB * 12 + 5 * MIB * 2


def test_scores_count_only_where_attention_makes_them() -> None:
    cases = {("sdpa", "llama"): 0, ("eager", "llama"): 2, ("sdpa", "gpt2"): 4}
    assert {(a, m): score_copies(a, {"model_type": m}) for a, m in cases} == cases
    assert score_copies("sdpa", {"model_type": "gpt2", "attn_pdrop": 0.0}) == 0
    assert score_copies("sdpa", {"model_type": "llama", "attention_dropout": 0.1}) == 4


class Allocations:
    """The largest number of bytes of torch tensors alive at once, beside those that were there before."""

    def __init__(self) -> None:
        self.now = self.most = 0
        self.alive: set[int] = set()

    def see(self, storage: Any) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        if nbytes and key not in self.alive:
            self.alive.add(key)
            self.now += nbytes
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self.gone, key, nbytes)

    def gone(self, key: int, nbytes: int) -> None:
        self.alive.discard(key)
        self.now -= nbytes


def recorder(seen: Allocations) -> Any:
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            for leaf in tree_leaves(out):
                if isinstance(leaf, torch.Tensor):
                    seen.see(leaf.untyped_storage())
            return out

    return Recorder()


FAMILY = {"vocab_size": 64, "hidden_size": 256, "num_hidden_layers": 1, "num_attention_heads": 8}
GROUPED = {**FAMILY, "num_key_value_heads": 2}
BLOCKS = [
    ("llama", {**GROUPED, "intermediate_size": 768}),
    ("llama", {**GROUPED, "intermediate_size": 1536}),
    ("qwen3", {**GROUPED, "intermediate_size": 768, "head_dim": 32}),
    ("gemma3_text", {**GROUPED, "intermediate_size": 768, "head_dim": 32}),
    ("gpt2", {"vocab_size": 64, "n_embd": 256, "n_layer": 1, "n_head": 8, "n_positions": 512}),
    ("gpt2", {"vocab_size": 64, "n_embd": 256, "n_layer": 1, "n_head": 8, "n_positions": 512, "attn_pdrop": 0.0}),
]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(("family", "config"), BLOCKS, ids=lambda v: v if isinstance(v, str) else "")
def test_a_blocks_graph_is_what_torch_allocates(family: str, config: dict[str, Any], attention: str) -> None:
    """One block, forward and backward, with preset gradients; largest weight gradient left out on both sides."""
    import torch
    from first_block import first_block

    block, args, kwargs = first_block(family, config, attention)
    for parameter in block.parameters():
        parameter.grad = torch.zeros_like(parameter)
    seen, inputs = Allocations(), torch.randn(2, 256, 256)
    with recorder(seen):
        out = block(inputs.requires_grad_(), *args, **kwargs)
        out = out[0] if isinstance(out, tuple) else out
        out.backward(torch.ones_like(out))
    params = [ParamInfo(f"h.0.{name}", tuple(p.shape)) for name, p in block.named_parameters()]
    spec = make_spec(params, ["h.0"], [], dtype="float32", config=config)
    written = {"model_type": family, **config}
    batch = Batch(2, 256, 2, score_copies=score_copies(attention, written))
    found = graph_bytes(spec, spec.units[0], batch, 4)
    real = seen.most - max(p.numel() for p in block.parameters()) * 4
    assert 0.8 < found / real < 1.2, f"predicted {found}, torch allocated {real}"


def test_the_baseline_is_what_the_imports_take() -> None:
    script = """
import torch, transformers, numba, pyarrow, safetensors
from transformers import AutoTokenizer, AutoModelForCausalLM, LlamaConfig
from torch.utils import tensorboard
c = LlamaConfig(vocab_size=99, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4)
m, x = AutoModelForCausalLM.from_config(c), torch.zeros(1, 16, dtype=torch.long)
m(input_ids=x, labels=x).loss.backward()
print(int(open("/proc/self/statm").read().split()[1]) * 4096)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert 0.8 < int(done.stdout.split()[-1]) / BASELINE_BYTES < 1.2
