"""Blocks that are compiled, or run by Liger's kernels: the plain loop's results, and the same bits wherever they live.

What is compiled is kept by the process, so tests share models and shapes: a compilation takes seconds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import families
import numpy as np
import odd_models
import pytest
import torch
from reference import plain_run
from tiny import tables
from tiny_models import Outcome, assert_close, assert_same_bits, batches, start_of, tiny, train
from torch import Tensor

import offloadz
from offloadz.config import config_differences, config_from_tables
from offloadz.model import offload as offloading
from offloadz.model.graphs import Place, Saved
from offloadz.plan.errors import ConfigError
from offloadz.plan.question import question
from offloadz.train.batches import NUM_LENGTHS, collate, collate_packed, row_lengths

KINDS = ("parameters", "gradients", "optimizer_state", "activations")
HOST, DISK = (dict.fromkeys(KINDS, tier) for tier in ("host", "disk"))
STEPS = batches(5)


@pytest.fixture(scope="module")
def compiler() -> None:
    """Skips where nothing can be compiled."""
    from offloadz.model.compiled import require_compiler

    torch.set_num_threads(1)
    try:
        require_compiler(torch.device("cpu"))
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.fixture
def graphs() -> Callable[[], int]:
    """How many pieces of code have been made since the test began."""
    from torch._dynamo.utils import counters

    before = counters["stats"]["unique_graphs"]
    return lambda: counters["stats"]["unique_graphs"] - before


def ran(model: torch.nn.Module, swap: Path, kernels: str = "compile", steps: Any = STEPS, **how: Any) -> Outcome:
    how = {"micro_batch_size": 2, **DISK, **how}
    with offloadz.offload(model, offloadz.AdamW(lr=1e-3), swap=swap, kernels=kernels, **how) as run:
        return train(run, steps)


# ---- compile ----


def test_compiled_blocks_match_the_plain_loop_from_one_piece_of_code(
    compiler: None, swap: Path, graphs: Callable[[], int]
) -> None:
    found = ran(tiny("llama", num_hidden_layers=3), swap)
    assert graphs() == 1
    plain = tiny("llama", num_hidden_layers=3)
    start = start_of(plain)
    assert_close(found, plain_run(plain, STEPS, micro_rows=2), start)
    wanted = ran(tiny("llama", num_hidden_layers=3), swap, "eager")
    assert found.weights.keys() == wanted.weights.keys()
    assert found.norms != wanted.norms, "bit-equal to eager blocks: nothing was compiled"


def test_placement_slots_and_what_is_kept_have_the_same_bits(
    compiler: None, swap: Path, graphs: Callable[[], int]
) -> None:
    """Poison and two slots: a kept graph that read its weights from the slot of the forward would show."""
    wanted = ran(tiny("llama"), swap, recompute="all", **HOST)
    made = graphs()
    for how in (
        {"recompute": "none", "slots": 2},
        {"recompute": "all", "slots": 1},
        {"recompute": "auto", "slots": 3, **HOST, "parameters": "disk"},
    ):
        assert_same_bits(ran(tiny("llama"), swap, poison=True, **how), wanted, str(how))
    assert graphs() == made, "a slot, a layer or a placement was compiled anew"


def test_kept_graphs_hold_no_weights_and_take_less(compiler: None, swap: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed_weights: list[Any] = []
    pack = Saved.pack

    def watched(saved: Saved, tensor: Tensor) -> Any:
        kept = pack(saved, tensor)
        if isinstance(kept, Place):
            packed_weights.append(tensor.shape)
        return kept

    monkeypatch.setattr(Saved, "pack", watched)
    taken, weights = {}, {}
    for kernels in ("eager", "compile"):
        packed_weights.clear()
        how = {"swap": swap, "recompute": "none", "kernels": kernels, "micro_batch_size": 2}
        with offloadz.offload(tiny("llama"), offloadz.AdamW(), **how) as run:
            logp = offloadz.token_logprobs(run, STEPS[0])
            blocks = [i for i, seat in enumerate(run.session.spec.seats) if seat.kind == "block"]
            taken[kernels] = sum(graph.nbytes for key, graph in run.session.room.graphs.items() if key[0] in blocks)
            weights[kernels] = {tuple(sorted(shape)) for shape in packed_weights if len(shape) == 2}
            del logp
    assert weights["compile"] == weights["eager"], "a weight was kept as an activation, or not at all"
    assert 0 < taken["compile"] < taken["eager"]


class Dropping(odd_models.Pair):
    """A block with a second input, three outputs and dropout."""

    def forward(self, x: Tensor, scale: Tensor, note: str = "") -> tuple[Tensor, Tensor, Tensor]:
        out, square, chosen = super().forward(x, scale, note)
        return torch.nn.functional.dropout(out, 0.2, self.training), square, chosen


def test_an_odd_block_and_dropout_drawn_as_by_eager_blocks(
    compiler: None, swap: Path, graphs: Callable[[], int]
) -> None:
    steps = odd_models.odd_batches(3)

    def odd(kernels: str, recompute: str, training: bool = True) -> Outcome:
        model = odd_models.Odd(Dropping).train(training)
        how = {"swap": swap, "kernels": kernels, "recompute": recompute, "slots": 2, "seed": 3, **DISK}
        with offloadz.offload(model, offloadz.AdamW(lr=1e-3), **how) as run:
            return train(run, steps, loss_fn=odd_models.mean_loss)

    kept, again = odd("compile", "none"), odd("compile", "all")
    assert graphs() == 1
    assert_same_bits(kept, again)
    eager = odd("eager", "all")
    assert_close(kept, eager, start_of(odd_models.Odd(Dropping)))
    assert abs(eager.losses[0] - odd("eager", "all", training=False).losses[0]) > 1e-3, "nothing was dropped"


def packed(length: int) -> dict[str, Tensor]:
    """Four rows of three samples each."""
    (batch,) = batches(1, length=length, padded=False)
    positions = torch.arange(length).repeat(4, 1)
    for row in range(4):
        for edge in (7 + row, 15 + row):
            positions[row, edge:] = torch.arange(length - edge)
            batch["labels"][row, edge] = -100
    return {"input_ids": batch["input_ids"], "position_ids": positions, "labels": batch["labels"]}


def test_a_run_that_goes_on_compiles_anew_and_has_the_same_bits(compiler: None, swap: Path, tmp_path: Path) -> None:
    """Rows of another length and packed ones come first in the process that goes on."""
    steps = [*STEPS[:2], packed(25), packed(25)]
    how = {"swap": swap, "kernels": "compile", "micro_batch_size": 2}
    with offloadz.offload(tiny("llama"), offloadz.AdamW(lr=1e-3), **how, **HOST) as run:
        straight = train(run, steps[:2])
        run.save(tmp_path / "saved")
        rest = train(run, steps[2:])
    plain = tiny("llama")
    start = start_of(plain)
    reference = plain_run(plain, steps, micro_rows=2)
    whole = Outcome(straight.losses + rest.losses, straight.norms + rest.norms, rest.weights)
    assert_close(whole, reference, start)
    torch._dynamo.reset()  # what another process would not have
    with offloadz.offload(tiny("llama", seed=1), offloadz.AdamW(lr=1e-3), **how, **DISK) as run:
        run.load(tmp_path / "saved")
        assert_same_bits(train(run, steps[2:]), rest)


def test_evaluation_and_generation_compile_nothing(compiler: None, swap: Path, graphs: Callable[[], int]) -> None:
    with offloadz.offload(tiny("llama"), offloadz.AdamW(), swap=swap, kernels="compile") as run, torch.no_grad():
        found = offloadz.token_logprobs(run, STEPS[0])
        run.model.generate(STEPS[0]["input_ids"][:1, :5], max_new_tokens=3, do_sample=False)
    assert graphs() == 0
    with offloadz.offload(tiny("llama"), offloadz.AdamW(), swap=swap) as run, torch.no_grad():
        assert torch.equal(found, offloadz.token_logprobs(run, STEPS[0]))


def test_what_cannot_be_compiled_whole_is_refused_by_name(compiler: None, swap: Path) -> None:
    """Shapes that depend on numbers: each step would be compiled anew, or most of the block would run eager."""
    with (
        offloadz.offload(odd_models.Odd(odd_models.Experts), swap=swap, kernels="compile") as run,
        pytest.raises(ConfigError, match=r'^Experts cannot be compiled whole: .*; write kernels = "eager"'),
    ):
        run.step(odd_models.odd_batches(1)[0], loss_fn=odd_models.mean_loss)


def test_outputs_that_hooks_record_are_refused_by_name(compiler: None, swap: Path) -> None:
    model = families.FAMILIES["mixtral"].build(output_router_logits=True)
    with (
        offloadz.offload(model, swap=swap, kernels="compile") as run,
        pytest.raises(ConfigError, match="router_logits, which hooks record inside blocks"),
    ):
        run.step(STEPS[0], loss_fn=lambda model, batch: model(**batch).loss)


def test_without_a_compiler_it_is_refused_before_a_weight_is_read(
    swap: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor import config

    def read(*_: Any) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(offloading, "fill", read)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "nothing compiled before"))
    torch._dynamo.reset()
    with (
        config.patch({"cpp.cxx": ("no-such-compiler",)}),
        pytest.raises(ConfigError, match=r'^kernels = "compile" needs a C\+\+ compiler .*write "eager"'),
    ):
        offloadz.offload(tiny("llama"), swap=swap, kernels="compile")
    torch._dynamo.reset()


def test_what_kernels_may_say_and_that_they_change_bits(swap: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="kernels = 'fast'; needed: auto, eager, compile, liger"):
        offloadz.offload(tiny("llama"), swap=swap, kernels="fast")
    eager, compiled = (config_from_tables(tables(tmp_path, model__kernels=k)) for k in ("eager", "compile"))
    (found,) = config_differences(eager, compiled)
    assert found.startswith("model.kernels: ")
    allowed = tables(tmp_path, model__kernels="compile", train__resume_with=["model.kernels"])
    assert not config_differences(eager, config_from_tables(allowed))


def test_a_plan_says_what_it_does_not_know_of_them(tmp_path: Path) -> None:
    def told(kernels: str, *machine: str, **changes: Any) -> list[str]:
        asked = question(config_from_tables(tables(tmp_path, model__kernels=kernels, **changes)), *machine)
        return [note for note in asked.notes if "kernels" in note]

    assert not told("eager") and not told("auto") and not told("liger", "rtx4090")
    assert "is not known, so times are those of eager blocks" in told("liger")[0]
    assert "not known" in told("liger", "rtx4090", model__dtype="float32")[0]
    assert [note.split(": ")[1].split(",")[0] for note in told("compile", "rtx4090")] == [
        "blocks are compiled at the first step of each length of rows"
    ]


def test_rows_are_filled_up_to_one_of_a_few_lengths(tmp_path: Path) -> None:
    lengths = row_lengths(config_from_tables(tables(tmp_path, model__kernels="compile", data__max_length=30)))
    assert lengths == (4, 8, 12, 15, 19, 23, 27, 30) and len(lengths) == NUM_LENGTHS
    assert row_lengths(config_from_tables(tables(tmp_path))) == ()
    rows = [(np.arange(1, n + 1), np.ones(n, dtype=bool)) for n in (3, 13)]
    for batch in (collate(rows, 0, lengths), collate_packed([[rows[0]], [rows[1]]], 0, lengths)):
        assert batch["input_ids"].shape == (2, 15) and not batch["input_ids"][:, 13:].any()
        assert (batch["labels"][:, 13:] == -100).all()
    assert collate([(np.arange(31), np.ones(31, dtype=bool))], 0, lengths)["input_ids"].shape == (1, 31)


# ---- liger ----


SEEN: set[str] = set()
"""Which twins have run."""


class Twin:
    """What Liger's kernels compute, in torch's operations."""

    @staticmethod
    def norm(x: Tensor, w: Tensor, eps: float, offset: float, casting: str, in_place: bool, row_mode: Any) -> Tensor:
        SEEN.add(f"norm {casting}")
        assert not in_place and (offset, casting) in ((0.0, "llama"), (1.0, "gemma"))
        return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)) * (offset + w)

    @staticmethod
    def silu(a: Tensor, b: Tensor) -> Tensor:
        SEEN.add("silu")
        return torch.nn.functional.silu(a) * b

    @staticmethod
    def gelu(a: Tensor, b: Tensor) -> Tensor:
        SEEN.add("gelu")
        return torch.nn.functional.gelu(a, approximate="tanh") * b


class Rotation(torch.autograd.Function):
    """Writes over queries and keys, unseen by torch, as Liger's kernel does."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        SEEN.add("rotation")
        ctx.save_for_backward(cos, sin)
        for x in (q, k):
            x.detach().numpy()[:] = Rotation.turned(x, cos, sin).detach().numpy()
        return q.view_as(q), k.view_as(k), cos.view_as(cos), sin.view_as(sin)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return *(Rotation.turned(grad, cos, -sin) for grad in grads[:2]), None, None

    @staticmethod
    def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * cos.unsqueeze(1) + torch.cat((-second, first), -1) * sin.unsqueeze(1)


@pytest.fixture
def twin(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """A package of Liger's name whose kernels are the twins."""
    package, ops = ModuleType("liger_kernel"), ModuleType("liger_kernel.ops")
    kinds = {"RMSNorm": Twin.norm, "SiLUMul": Twin.silu, "GELUMul": Twin.gelu, "Rope": Rotation.apply}
    for name, function in kinds.items():
        setattr(ops, f"Liger{name}Function", type(name, (), {"apply": staticmethod(function)}))
    package.ops = ops  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, package.__name__, package)
    monkeypatch.setitem(sys.modules, ops.__name__, ops)
    SEEN.clear()
    return SEEN


FITTING = ["llama", "mistral", "olmo2", "qwen2", "qwen3", "gemma2", "gemma3"]
"""Families of the tests that Liger's kernels are for."""


@pytest.mark.parametrize("family", FITTING)
def test_each_part_of_a_block_gets_the_kernel_of_its_family(family: str, twin: set[str], swap: Path) -> None:
    build = families.FAMILIES[family].build
    model, plain = build(), build()
    steps, start = STEPS[:3], start_of(plain)
    wanted = plain_run(plain, steps, micro_rows=2)
    casting, gate = ("gemma", "gelu") if family.startswith("gemma") else ("llama", "silu")
    how = {"slots": 2, "poison": True}
    outcomes = [ran(build(), swap, "liger", steps, recompute=each, **how) for each in ("none", "all", "cheap")]
    assert twin == {f"norm {casting}", gate, "rotation"}
    for outcome in outcomes[1:]:
        assert_same_bits(outcomes[0], outcome)
    assert_close(outcomes[0], wanted, start)
    twin.clear()
    with torch.no_grad():
        model(input_ids=STEPS[0]["input_ids"])
    assert not twin, "other models of the process run by them too"


def test_liger_is_refused_by_name(swap: Path, twin: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def told(model: torch.nn.Module) -> str:
        with pytest.raises(ConfigError) as error:
            offloadz.offload(model, swap=swap, kernels="liger")
        return str(error.value)

    assert "gpt2 is none of gemma, gemma2, " in told(tiny("gpt2"))
    assert "Odd is none of" in told(odd_models.Odd())
    assert "the activation relu is none of silu, " in told(tiny("llama", hidden_act="relu"))

    def no_driver(*_: Any) -> None:
        raise RuntimeError("0 active drivers ([]). There should only be one.\nmore")

    monkeypatch.setattr(sys.modules["liger_kernel.ops"].LigerRMSNormFunction, "apply", no_driver)
    assert "does not run on the device cpu (0 active drivers ([]). There should only be one.)" in told(tiny("llama"))
    monkeypatch.setitem(sys.modules, "liger_kernel", None)  # type: ignore[arg-type]
    assert "needs the package liger-kernel" in told(tiny("llama"))
    with pytest.raises(ConfigError, match=r'model.kernels: found "liger", whose kernels need a GPU'):
        config_from_tables({"model": {"path": "m", "kernels": "liger"}, "offload": {"device": "cpu"}})


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter for the kernels: it wants numbers as tensors, and has none of a GPU's functions."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    pytest.importorskip("liger_kernel")
    import liger_kernel.ops.geglu as geglu
    import liger_kernel.ops.rms_norm as rms_norm
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._implicit_cvt

    def number(value: Any) -> Any:
        if not isinstance(value, float):
            return convert(value)
        return tl.tensor(interpreter.TensorHandle(np.array([value], dtype=np.float32), tl.float32), tl.float32)

    def tanh(x: Any) -> Any:
        return tl.tensor(interpreter.TensorHandle(np.tanh(x.handle.data), x.handle.dtype), x.type)

    monkeypatch.setattr(interpreter, "_implicit_cvt", number)
    monkeypatch.setattr(rms_norm, "rsqrt", lambda x: 1 / tl.sqrt(x))
    monkeypatch.setattr(geglu, "tanh", tanh)


@pytest.mark.full
@pytest.mark.parametrize("family", FITTING)
def test_the_kernels_themselves_interpreted(family: str, interpreter: None, swap: Path) -> None:
    build = families.FAMILIES[family].build
    steps = batches(2, rows=2, length=9)
    how = {"poison": True}
    outcomes = [ran(build(), swap, "liger", steps, recompute=each, **how) for each in ("none", "all", "cheap")]
    for outcome in outcomes[1:]:
        assert_same_bits(outcomes[0], outcome)
    assert_close(outcomes[0], plain_run(build(), steps, micro_rows=2), start_of(build()))
