"""Kept graphs in the plan: their bytes against what autograd saves, how many there is room for, what their time is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from offloadz.plan.estimate import estimate
from offloadz.plan.footprint import Batch, footprint, score_copies
from offloadz.plan.kept import graph_kept_bytes, graph_room, kept_bytes
from offloadz.plan.machine import probe_machine
from offloadz.plan.placement import Placement
from offloadz.plan.predict import predict, step_program
from offloadz.plan.search import decide
from offloadz.plan.shapes import ParamInfo, TableInfo, make_spec
from offloadz.plan.spec import ModelSpec
from offloadz.plan.wishes import Wishes

FAMILY = {"vocab_size": 64, "hidden_size": 256, "num_hidden_layers": 1, "num_attention_heads": 8}
GROUPED = {**FAMILY, "num_key_value_heads": 2}
BLOCKS = [
    ("llama", {**FAMILY, "intermediate_size": 768}, 0.02),
    ("llama", {**GROUPED, "intermediate_size": 1536}, 0.02),
    ("mistral", {**GROUPED, "intermediate_size": 900}, 0.02),
    ("qwen3", {**GROUPED, "intermediate_size": 768, "head_dim": 64}, 0.02),
    ("gemma3_text", {**GROUPED, "intermediate_size": 768, "head_dim": 32}, 0.02),
    ("olmo2", {**GROUPED, "intermediate_size": 768}, 0.02),
    ("gpt_neox", {**FAMILY, "intermediate_size": 1024}, 0.02),
    ("phi3", {**GROUPED, "intermediate_size": 768, "pad_token_id": 0}, 0.11),
]
"""Families, sizes, and how far the formula may be off."""


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(("family", "config", "off"), BLOCKS, ids=lambda v: v if isinstance(v, str) else "")
def test_a_kept_graph_is_what_autograd_saves(family: str, config: dict[str, Any], off: float, attention: str) -> None:
    """Of one block; eager attention also repeats keys and values, which the formula leaves out."""
    import torch
    from first_block import first_block
    from torch.utils._pytree import tree_leaves

    from offloadz.model.graphs import Saved

    block, args, kwargs = first_block(family, config, attention)
    hidden = torch.randn(2, 256, 256, requires_grad=True)
    saved = Saved("", list(block.parameters()), hidden, tree_leaves((args, kwargs)))
    with saved.hooks():
        out = block(hidden, *args, **kwargs)
    params = [ParamInfo(f"h.0.{name}", tuple(p.shape)) for name, p in block.named_parameters()]
    spec = make_spec(params, ["h.0"], [], dtype="float32", config=config)
    batch = Batch(2, 256, 2, score_copies=score_copies(attention, {"model_type": family, **config}))
    found = graph_kept_bytes(spec, 0, Placement(), batch)
    assert out is not None and abs(found / saved.nbytes - 1) <= off + 0.12 * (attention == "eager")


def llama(blocks: int = 6, **more: Any) -> ModelSpec:
    """Blocks, a norm, a table and a head of their own."""
    params = [
        ParamInfo("emb.weight", (4096, 512)),
        ParamInfo("lm.weight", (4096, 512)),
        ParamInfo("norm.weight", (512,)),
    ]
    for i in range(blocks):
        shapes = {"q": (512, 512), "o": (512, 512), "up": (1024, 512), "gate": (1024, 512), "down": (512, 1024)}
        params += [ParamInfo(f"layers.{i}.{name}.weight", shape) for name, shape in shapes.items()]
        params += [ParamInfo(f"layers.{i}.{name}_norm.weight", (512,)) for name in "ab"]
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "vocab_size": 4096, "num_attention_heads": 8}
    prefixes = [f"layers.{i}" for i in range(blocks)]
    tables, heads = [TableInfo("emb", "emb.weight")], [TableInfo("lm", "lm.weight")]
    return make_spec(params, prefixes, tables, heads, dtype="float32", config=sizes, **more)


BATCH = Batch(rows=8, length=512, micro_rows=2)


def test_the_footprint_counts_kept_graphs_and_no_inputs_saved_for_them() -> None:
    spec, none = llama(), Placement(activations="device")
    before = footprint(spec, none, BATCH).terms["step"]["host"]
    for count in (3, len(spec.unfolding_seats)):
        place = replace(none, kept=count)
        after = footprint(spec, place, BATCH).terms["step"]["host"]
        seats = spec.unfolding_seats[-count:]
        assert after["kept graphs"] == sum(graph_kept_bytes(spec, s, none, BATCH) for s in seats)
        blocks = sum(spec.seats[s].kind != "head" for s in seats)
        assert after["saved inputs"] == before["saved inputs"] - blocks * 8 * 512 * 512 * 4
    assert "kept graphs" not in before
    head = spec.unfolding_seats[-1]
    assert graph_kept_bytes(spec, head, none, BATCH) == 8 * 512 * 4096 * 4  # logits in fp32


def test_a_kept_turn_saves_no_input_and_takes_a_third_less_time() -> None:
    spec, machine = llama(), probe_machine()
    disk = Placement("disk", "disk", "disk", "disk")
    for kept in (0, 2, len(spec.unfolding_seats)):
        program = step_program(spec, replace(disk, kept=kept), BATCH)
        graphs = [op for op in program.ops if op.verb == "forward" and any(w.startswith("k") for w in op.writes)]
        read = {r for op in program.ops if op.verb == "backward" for r in op.reads if r.startswith("k")}
        assert {w for op in graphs for w in op.writes} == read
        assert {op.seat for op in graphs} == spec.keeping_seats(kept)
        saved = {op.seat for op in program.ops if op.verb in ("save.x", "store.x", "load.x")}
        assert not saved & spec.keeping_seats(kept) and (saved or kept == len(spec.unfolding_seats))
    again, once = (predict(spec, replace(Placement(), kept=n), BATCH, machine).busy_s["device"] for n in (0, 8))
    assert 0.7 < once / again < 0.85


def test_a_deep_model_that_keeps_some_is_estimated_as_it_is_walked() -> None:
    spec, machine = llama(24), probe_machine()
    for kept in (1, 9, 20, 26):
        place = replace(Placement(), kept=kept)
        whole, found = predict(spec, place, BATCH, machine), estimate(spec, place, BATCH, machine)
        assert found.step_s == pytest.approx(whole.step_s, rel=0.02), kept
        assert found.busy_s["device"] == pytest.approx(whole.busy_s["device"], rel=0.02), kept


def wished(spec: ModelSpec, host_memory: int, recompute: str = "auto") -> Any:
    machine = replace(probe_machine(), host_bytes=1 << 40, device_bytes=1 << 40, host_source="a test")
    asked = Wishes(8, 512, micro_batch_size=2, host_memory=host_memory, recompute=recompute, baseline_bytes=0)
    return decide(spec, machine, asked)


def test_who_sends_inputs_to_disk_wants_the_memory() -> None:
    spec = llama()
    asked = Wishes(8, 512, micro_batch_size=2, swap=True, activations="disk", host_memory=1 << 36, baseline_bytes=0)
    plan = decide(spec, replace(probe_machine(), host_bytes=1 << 40), asked)
    assert plan.fits and plan.placement.kept == 0 and plan.graph_room_bytes == -1
    assert any("recompute all" in line and "on disk" in line for line in plan.reasons)
    assert decide(spec, probe_machine(), replace(asked, recompute="none")).placement.kept == len(spec.unfolding_seats)


def test_where_every_block_recomputes_what_comes_behind_them_is_kept_if_it_takes_no_memory() -> None:
    spec = llama()
    asked = Wishes(8, 512, micro_batch_size=8, host_memory=1 << 40, recompute="all", baseline_bytes=0)
    plan = decide(spec, probe_machine(), asked)
    assert {spec.seats[seat].kind for seat in spec.keeping_seats(plan.placement.kept)} == {"module", "head"}
    none = footprint(spec, replace(plan.placement, kept=0), plan.batch, baseline_bytes=0)
    assert plan.footprint.bytes["host"]["step"] <= none.bytes["host"]["step"]
    assert kept_bytes(spec, plan.placement, plan.batch) <= plan.graph_room_bytes
    many = decide(spec, probe_machine(), replace(asked, batch_size=64, micro_batch_size=2))
    assert many.placement.kept == 0 and many.graph_room_bytes == -1


def test_as_many_are_kept_as_there_is_room_for() -> None:
    spec = llama()
    least = wished(spec, 1 << 40, "all").peak["host"]
    kept = []
    for more in (0, 150 << 20, 250 << 20, 1 << 34):
        plan = wished(spec, least + more)
        kept.append(plan.placement.kept)
        assert plan.fits and plan.peak["host"] <= least + more
        room = graph_room(spec, plan.placement, plan.batch, plan.footprint, plan.limits, "auto")
        assert room == plan.graph_room_bytes >= kept_bytes(spec, plan.placement, plan.batch) or not kept[-1]
        if kept[-1] < len(spec.unfolding_seats):
            over = footprint(spec, replace(plan.placement, kept=kept[-1] + 1), plan.batch, baseline_bytes=0)
            assert over.peak["host"] > least + more
    assert kept[0] < kept[1] < kept[2] < kept[3] == len(spec.unfolding_seats)
    assert any(line.startswith("recompute none: 8 of 8 graphs are kept") for line in plan.reasons)


def test_what_was_asked_for_is_done_or_refused_with_what_would_help() -> None:
    spec = llama()
    assert wished(spec, 1 << 40, "all").placement.kept == 0
    plan = wished(spec, 1 << 40, "none")
    assert plan.placement.kept == len(spec.unfolding_seats)
    tight = wished(spec, wished(spec, 1 << 40, "all").peak["host"], "none")
    assert not tight.fits and 'offload.recompute = "auto"' in tight.smallest_change
