"""What a module consists of: its repeated blocks, tables, head and single modules, as a spec the plan understands.

Blocks are the longest list of modules of one type (or the lists a user names); embeddings outside them are tables; the
output layer is a head where it is a plain product; everything else outside is a single module, or moves like a block
where it has parameters of its own beside modules inside.  No model family is named.  What does not fit this picture is
refused by name, before a weight is read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from offloadz.plan.errors import ConfigError
from offloadz.plan.recipes import EXACT, Recipe
from offloadz.plan.shapes import ParamInfo, TableInfo, make_spec
from offloadz.plan.spec import ModelSpec, Seat


@dataclass(frozen=True)
class Outline:
    """A spec, the module of each seat, and the canonical name of the parameter at each (module's identity,
    attribute)."""

    spec: ModelSpec
    modules: tuple[nn.Module, ...]
    names: dict[tuple[int, str], str]


def outline(
    model: nn.Module,
    dtype: str,
    recipe: Recipe = EXACT,
    *,
    blocks: Sequence[str] = (),
    keep_float32: Sequence[str] = (),
    freeze: Sequence[str] = (),
    groups: Sequence[str] = (),
) -> Outline:
    """The outline of a model whose working weights are stored in `dtype`, the optimizer's state by `recipe`.

    `blocks`: names of the lists whose entries are the blocks; empty: the longest.  `keep_float32`, `freeze`, `groups`:
    see `shapes.make_spec`.  Raises ConfigError naming what is not built: a model without repeated blocks, parameters
    shared between blocks or around them, encoder-decoders.
    """
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise ConfigError(
            f"{type(model).__name__} is an encoder with a decoder: its decoder's blocks take the encoder's"
            " states, which"
            " want a gradient beside the hidden state; such blocks are not built"
        )
    names = {id(p): name for name, p in model.named_parameters()}
    prefixes = block_names(model, blocks)
    prefixes += _wholes(model, prefixes)
    _check_shared(model, prefixes, names)
    outer = {n: m for n, m in model.named_modules() if n and not _inside(n, prefixes)}
    tables = {n: m for n, m in outer.items() if isinstance(m, nn.Embedding)}
    heads = _heads(model, outer, tables)
    twins = _twins(outer, {*tables, *heads}, names)
    order = [
        n for n, m in model.named_modules() if n in prefixes or (n in outer and (n in tables or n in heads or _owns(m)))
    ]
    order = [n for n in order if n not in heads and n not in twins] + list(heads)
    infos = [ParamInfo(name, tuple(p.shape), trainable=p.requires_grad) for name, p in model.named_parameters()]
    spec = make_spec(
        infos,
        prefixes,
        [TableInfo(n, names[id(m.weight)]) for n, m in tables.items()],
        [TableInfo(n, names[id(m.weight)], names[id(m.bias)] if m.bias is not None else "") for n, m in heads.items()],
        dtype=dtype,
        order=order,
        keep_float32=keep_float32,
        freeze=freeze,
        groups=groups,
        config=config_of(model),
    )
    spec = _with_twins(spec, twins).with_recipe(recipe)
    by_name = dict(model.named_modules())
    places = {(id(m), a): names[id(p)] for m in model.modules() for a, p in m._parameters.items() if p is not None}
    return Outline(spec, tuple(by_name[s.name] for s in spec.seats), places)


def block_names(model: nn.Module, lists: Sequence[str] = ()) -> list[str]:
    """Full names of the repeated blocks, in model order."""
    found = {n: m for n, m in model.named_modules() if isinstance(m, nn.ModuleList | nn.Sequential)}
    for name in lists:
        if name not in found:
            raise ConfigError(f"blocks: {name!r} is no list of modules; the model has {', '.join(found) or 'none'}")
    if not lists:
        alike = {n: m for n, m in found.items() if len(m) and len({type(x) for x in m}) == 1 and _size(m)}
        if not alike:
            raise ConfigError(
                "the model has no list of equal modules (nn.ModuleList); name its blocks with blocks=[...]"
            )
        lists = [max(alike, key=lambda n: (_size(alike[n]), -n.count(".")))]
    return [f"{n}.{i}" if n else str(i) for n in lists for i in range(len(found[n]))]


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _inside(name: str, prefixes: Sequence[str]) -> bool:
    return any(name == p or name.startswith(p + ".") for p in prefixes)


def _owns(module: nn.Module) -> bool:
    return any(p is not None for p in module._parameters.values())


def _wholes(model: nn.Module, prefixes: Sequence[str]) -> list[str]:
    """Modules with parameters of their own beside modules inside (a vision model's embeddings): taken like blocks.

    A parameter that stands around the blocks would be needed while they run.
    """
    found: list[str] = []
    for name, module in model.named_modules():
        if not _owns(module) or next(module.children(), None) is None or _inside(name, [*prefixes, *found]):
            continue
        if not name or any(prefix.startswith(f"{name}.") for prefix in prefixes):
            own = next(n for n, p in module._parameters.items() if p is not None)
            raise ConfigError(
                f"{name or 'the model'}.{own}: a parameter of a module that has the blocks inside is not built;"
                " move it into a module of its own"
            )
        found.append(name)
    return found


def _check_shared(model: nn.Module, prefixes: Sequence[str], names: dict[int, str]) -> None:
    """A parameter of two blocks would need both at once."""
    by_name = dict(model.named_modules())
    owner: dict[int, str] = {}
    for prefix in prefixes:
        for param in by_name[prefix].parameters():
            before = owner.setdefault(id(param), prefix)
            if before != prefix:
                raise ConfigError(
                    f"{names[id(param)]} is shared by the blocks {before} and {prefix}; such sharing is not"
                    " built, untie them"
                )
    for name, module in by_name.items():
        if not _inside(name, prefixes):
            for param in module._parameters.values():
                if param is not None and id(param) in owner:
                    raise ConfigError(
                        f"{names[id(param)]} is shared by {name} and the block {owner[id(param)]}; such sharing"
                        " is not built, untie them"
                    )


def _heads(model: nn.Module, outer: dict[str, nn.Module], tables: dict[str, nn.Module]) -> dict[str, Any]:
    """The output layer of a causal model, and any linear layer that shares a table's weight."""
    out = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    shared = {id(m.weight) for m in tables.values()}
    linear = {name: module for name, module in outer.items() if isinstance(module, nn.Linear)}
    return {name: module for name, module in linear.items() if module is out or id(module.weight) in shared}


def _twins(outer: dict[str, nn.Module], taken: set[str], names: dict[int, str]) -> dict[str, str]:
    """Single modules all of whose parameters belong to an earlier one: name -> name of the owner."""
    first: dict[int, str] = {}
    twins = {}
    for name, module in outer.items():
        own = [p for p in module._parameters.values() if p is not None]
        if name in taken or not own:
            continue
        owners = {first.setdefault(id(p), name) for p in own}
        if len(owners) > 1:
            raise ConfigError(
                f"{name} shares only some of its parameters with {sorted(owners - {name})[0]}; share all of them"
                " or none"
            )
        if owners != {name}:
            twins[name] = owners.pop()
    return twins


def _with_twins(spec: ModelSpec, twins: dict[str, str]) -> ModelSpec:
    seats = list(spec.seats)
    for name, owner in twins.items():
        at = next(i for i, s in enumerate(seats) if s.name == owner)
        seats.insert(at + 1, Seat(name, "module", seats[at].units))
    return replace(spec, seats=tuple(seats))


def config_of(model: nn.Module) -> dict[str, Any] | None:
    """A transformers model's configuration as plain data; None for other modules."""
    config = getattr(model, "config", None)
    return config.to_dict() if hasattr(config, "to_dict") else None


def most_common_dtype(model: nn.Module) -> str:
    """Storage dtype a model asks for by its parameters."""
    counts: Counter[str] = Counter()
    for param in model.parameters():
        counts[str(param.dtype).removeprefix("torch.")] += param.numel()
    return counts.most_common(1)[0][0] if counts else "float32"
