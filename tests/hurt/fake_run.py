"""A run for tests of files: a model's state as plain tensors, offered through the same part views as a session's.

With `small_parts` parts are cut small and tables into tiles, so that every larger tensor is met in several pieces.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
from torch import Tensor, nn

import offloadz.plan.shapes as plan_shapes
import offloadz.plan.spec as plan_spec
from offloadz.memory.flat import DTYPES, spans
from offloadz.model.sources import ModuleSource
from offloadz.model.weights import names_of
from offloadz.plan.shapes import ParamInfo, TableInfo, make_spec
from offloadz.plan.spec import ModelSpec, Part, Unit
from offloadz.runtime import native
from offloadz.runtime.ranks import Solo


@contextmanager
def small_parts(part_elements: int = 1000, tile_elements: int = 640) -> Iterator[None]:
    """Parts and tiles of a few rows, as a large model would have them in millions."""
    with (
        mock.patch.object(plan_spec, "PART_ELEMENTS", part_elements),
        mock.patch.object(plan_shapes, "tile_elements", lambda largest: tile_elements),
    ):
        yield


def tiny(kind: str = "llama", tied: bool = False, layers: int = 2) -> nn.Module:
    """A model of transformers with odd sizes and non-trivial values in fp32."""
    from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Qwen3Config

    small = {"hidden_size": 24, "intermediate_size": 56, "num_hidden_layers": layers, "vocab_size": 103}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "tie_word_embeddings": tied}
    config = {
        "llama": lambda: LlamaConfig(**small, **heads),
        "qwen3": lambda: Qwen3Config(**small, **heads),
        "gpt2": lambda: GPT2Config(n_embd=24, n_layer=layers, n_head=4, vocab_size=103, n_positions=64),
    }[kind]()
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.eval()


class Plain(nn.Module):
    """A model of torch alone, for child processes that should start quickly."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.embed_tokens = nn.Embedding(103, 24)
        self.model = nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(24, 24) for _ in range(4))})


@dataclass
class View:
    """The part view of `offloadz.runtime.session`."""

    unit_index: int
    unit: Unit
    part_index: int
    part: Part
    weight: Tensor
    low: Tensor | None
    exp_avg: Tensor | None
    exp_avg_sq: Tensor | None

    @property
    def trained(self) -> bool:
        return bool(self.moments)

    @property
    def moments(self) -> dict[str, Tensor]:
        found = {"exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}
        return {name: tensor for name, tensor in found.items() if tensor is not None}


@dataclass
class FakeSession:
    spec: ModelSpec
    views: list[View] = field(default_factory=list)
    steps: dict[str, int] = field(default_factory=dict)
    step: int = 0

    def spread(self) -> None:
        pass

    def parts(self, write: bool = False) -> Iterator[View]:
        """Copies, of which only those made for writing come back."""
        for stored in self.views:
            copies = {k: v.clone() for k, v in vars(stored).items() if isinstance(v, Tensor)}
            yield (given := View(**{**vars(stored), **copies}))
            if write:
                for key in copies:
                    getattr(stored, key).copy_(getattr(given, key))


class FakeRun:
    """What a run offers; its masters are the model's parameters, its moments are random."""

    def __init__(
        self, model: nn.Module, dtype: str = "bfloat16", freeze: tuple[str, ...] = (), keep: tuple[str, ...] = ()
    ):
        names_of(model)
        self.model = model
        self.ranks = Solo()
        self.session = FakeSession(_spec(model, dtype, freeze, keep))
        self.optimizer = SimpleNamespace(
            param_groups=[
                {"params": [], "lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1},
                {"params": [], "lr": 2e-4, "betas": (0.8, 0.9), "weight_decay": 0.0},
            ]
        )
        source = ModuleSource(model)
        torch.manual_seed(11)
        for index, unit in enumerate(self.session.spec.units):
            for k, part in enumerate(unit.parts):
                self.session.views.append(_view(index, unit, k, part, source))
        self.session.steps = {name: 3 + i for i, name in enumerate(dict(model.named_parameters()))}

    def wipe(self) -> None:
        """Spoil everything a checkpoint brings back."""
        for view in self.session.views:
            for tensor in vars(view).values():
                if isinstance(tensor, Tensor):
                    tensor.fill_(5)
        self.session.steps = {}
        for group in self.optimizer.param_groups:
            group |= {"lr": 9.0, "weight_decay": 9.0}

    def master(self) -> dict[str, Tensor]:
        """Flat fp32 master per tensor, put together from the parts."""
        shapes = {name: p.numel() for name, p in self.model.named_parameters()}
        out = {name: torch.full((count,), float("nan")) for name, count in shapes.items()}
        for view in self.session.views:
            flat = view.weight.float()
            if view.low is not None:
                native.join_master_(flat, view.weight, view.low)
            for span in spans(view.unit, view.part):
                stop = span.first_element + span.stop - span.start
                out[span.member.name][span.first_element : stop] = flat[span.part_slice]
        return out

    def working(self) -> dict[str, Tensor]:
        """Flat working weight per tensor in its own dtype."""
        out: dict[str, list[tuple[int, Tensor]]] = {}
        for view in self.session.views:
            for span in spans(view.unit, view.part):
                out.setdefault(span.member.name, []).append((span.first_element, view.weight[span.part_slice]))
        return {name: torch.cat([t for _, t in sorted(cuts, key=lambda c: c[0])]) for name, cuts in out.items()}


def same_state(one: FakeRun, other: FakeRun) -> bool:
    """Whether all bits of two runs of one layout are equal."""
    for a, b in zip(one.session.views, other.session.views, strict=True):
        for key, tensor in vars(a).items():
            if isinstance(tensor, Tensor) and not torch.equal(tensor, getattr(b, key)):
                return False
    return one.session.steps == other.session.steps


def files_of(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}


def _spec(model: nn.Module, dtype: str, freeze: tuple[str, ...], keep: tuple[str, ...]) -> ModelSpec:
    params = [ParamInfo(name, tuple(p.shape)) for name, p in model.named_parameters()]
    names = [p.name for p in params]
    blocks = list(dict.fromkeys(m.group(0) for n in names if (m := re.match(r"[a-z]+\.[a-z]+\.\d+", n))))
    tables = [
        TableInfo(n.rpartition(".")[0], n)
        for n in names
        if n.rpartition(".")[0].endswith(("embed_tokens", "wte", "wpe"))
    ]
    heads = [TableInfo("lm_head", next((n for n in names if n.startswith("lm_head")), tables[0].weight))]
    return make_spec(params, blocks, tables, heads, dtype=dtype, freeze=list(freeze), keep_float32=list(keep))


def _view(index: int, unit: Unit, k: int, part: Part, source: ModuleSource) -> View:
    master = torch.empty(part.num_elements)
    for span in spans(unit, part):
        master[span.part_slice] = source.read(span.member.name, span.first_element, span.stop - span.start)
    trained = unit.sections[part.section].trainable
    weight, low = master.to(DTYPES[part.dtype]), None
    if trained and part.dtype == "bfloat16":
        low = torch.empty(part.num_elements, dtype=torch.int16)
        native.split_master_(weight, low, master)
    moments = (torch.randn(part.num_elements), torch.rand(part.num_elements)) if trained else (None, None)
    return View(index, unit, k, part, weight, low, *moments)
