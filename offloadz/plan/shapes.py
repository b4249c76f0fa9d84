"""From names and shapes to units and seats: the one cut of a model that the plan and the runtime share.

`make_spec` is told which parameters there are and which modules are blocks, tables and heads; it decides what moves as
one.  The runtime tells it what it sees in the module, `headers.py` what the files say, so both get the same bytes.  It
knows no model family and opens no file.

The trade-off: a table is cut into tiles no larger than the largest block (1 to 16 Mi elements), so a 262k-word table
needs no larger slot than a block does, and costs one product per tile.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from math import prod
from typing import Any

from offloadz.plan.errors import ConfigError
from offloadz.plan.spec import ITEM_BYTES, Member, ModelSpec, Seat, Section, Unit, aligned

MIN_TILE_ELEMENTS = 1 << 20
MAX_TILE_ELEMENTS = 1 << 24

TILE_ROWS = 16
"""Tiles have multiples of so many rows, so that a token's float32 logits fill whole cache lines: a product that writes
rows which do not is a third slower (8,457 words of 640, 512 tokens: 116 Gflop/s, 8,456: 168)."""


@dataclass(frozen=True)
class ParamInfo:
    """A parameter as the module or a file names it; a tied one occurs once, under its canonical name."""

    name: str
    shape: tuple[int, ...]
    dtype: str = ""
    """Storage dtype; empty: the model's, or float32 where `keep_float32` matches."""
    trainable: bool = True

    @property
    def num_elements(self) -> int:
        return prod(self.shape)

    @property
    def module(self) -> str:
        """The name without its last component."""
        return self.name.rpartition(".")[0]


@dataclass(frozen=True)
class TableInfo:
    """A table that is looked up by ids, or a head that multiplies with one: the seat's name and its weight's.

    A head whose weight is a table's weight is tied to it: both seats use the same units.  `bias`: the name of a head's
    bias, of which each tile holds the words of its rows; empty: none.
    """

    seat: str
    weight: str
    bias: str = ""


def make_spec(
    params: Sequence[ParamInfo],
    block_prefixes: Sequence[str],
    tables: Sequence[TableInfo],
    heads: Sequence[TableInfo] = (),
    *,
    dtype: str,
    order: Sequence[str] = (),
    keep_float32: Sequence[str] = (),
    freeze: Sequence[str] = (),
    groups: Sequence[str] = (),
    config: Mapping[str, Any] | None = None,
) -> ModelSpec:
    """Units and seats of a model.

    `params`: every parameter once, in model order.  `block_prefixes`: the full name of each repeated block
    (`model.layers.0`, ...) in forward order.  `tables`, `heads`: see `TableInfo`.  `order`: names of all seats in
    forward order; empty: tables, blocks, other modules, heads.  `keep_float32`, `freeze`: glob patterns over full
    names; `groups`: those of the optimizer's groups, which have to match something too.  `config`: the model's
    configuration, for the sizes a plan needs (see `config_sizes`).

    Raises ConfigError for a pattern that matches nothing and a dtype that is not built, ValueError for names that do
    not belong together.
    """
    if dtype not in ITEM_BYTES:
        raise ConfigError(f"model.dtype = {dtype!r}; needed: one of {', '.join(ITEM_BYTES)}")
    names = [p.name for p in params]
    told = {"model.keep_float32": keep_float32, "model.freeze": freeze, "optimizer.groups": groups}
    for key, patterns in told.items():
        _check_patterns(key, patterns, names)
    settled = [_settle(p, dtype, keep_float32, freeze) for p in params]
    by_name = {p.name: p for p in settled}
    looked_up = {t.weight for t in (*tables, *heads)}
    biases = {t.weight: by_name[t.bias] for t in heads if t.bias}
    _check_tables(by_name, tables, heads)

    owned = _group(settled, block_prefixes, looked_up | {bias.name for bias in biases.values()})
    largest = max((sum(p.num_elements for p in owned[b]) for b in block_prefixes), default=0)
    tiles = {w: _tiles(by_name[w], biases.get(w), tile_elements(largest)) for w in looked_up}
    seats: dict[str, tuple[str, list[Unit]]] = {}
    for table in tables:
        seats[table.seat] = ("table", tiles[table.weight])
    for name, members in owned.items():
        kind = "block" if name in set(block_prefixes) else "module"
        seats[name] = (kind, [Unit(name, kind, _sections(members))])
    for head in heads:
        seats[head.seat] = ("head", tiles[head.weight])
    return _number(_in_order(seats, order), dtype, config_sizes(config or {}))


def tile_elements(largest_block: int) -> int:
    """Most elements of a tile, from the elements of the largest block."""
    return min(max(largest_block, MIN_TILE_ELEMENTS), MAX_TILE_ELEMENTS)


def config_sizes(config: Mapping[str, Any]) -> dict[str, int]:
    """`hidden_size, intermediate_size, vocab_size, num_heads, head_size` of a transformers configuration; 0 where it
    has none."""
    text = config.get("text_config")
    facts = text if isinstance(text, Mapping) else config

    def first(*keys: str) -> int:
        return next((int(facts[k]) for k in keys if facts.get(k)), 0)

    hidden = first("hidden_size", "n_embd", "d_model")
    return {
        "hidden_size": hidden,
        "intermediate_size": first("intermediate_size", "n_inner", "ffn_dim", "d_ff") or 4 * hidden,
        "vocab_size": first("vocab_size"),
        "num_heads": first("num_attention_heads", "n_head", "num_heads"),
        "head_size": first("head_dim", "d_kv"),
    }


def _settle(param: ParamInfo, dtype: str, keep_float32: Sequence[str], freeze: Sequence[str]) -> ParamInfo:
    """The parameter with its storage dtype and whether it is trained."""
    kept = "float32" if _matches(param.name, keep_float32) else param.dtype or dtype
    if kept not in ITEM_BYTES:
        raise ConfigError(f"parameter {param.name} has dtype {kept}; needed: one of {', '.join(ITEM_BYTES)}")
    return ParamInfo(param.name, param.shape, kept, param.trainable and not _matches(param.name, freeze))


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _check_patterns(key: str, patterns: Sequence[str], names: Sequence[str]) -> None:
    """A pattern that matches nothing is a typing error: taken in silence it would train what was to be frozen, or train
    it at another rate."""
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            near = (get_close_matches(pattern, names, 1, 0.0) or ["-"])[0]
            raise ConfigError(f"{key}: {pattern!r} matches none of the {len(names)} parameters; nearest: {near}")


def _check_tables(by_name: Mapping[str, ParamInfo], tables: Sequence[TableInfo], heads: Sequence[TableInfo]) -> None:
    for table in (*tables, *heads):
        param = by_name.get(table.weight)
        if param is None:
            raise ValueError(f"{table.seat}: its weight {table.weight} is not among the {len(by_name)} parameters")
        if len(param.shape) != 2 or 0 in param.shape:
            raise ValueError(f"{table.weight} has shape {param.shape}; needed: a table of two axes")
    for head in heads:
        if f"{head.seat}.bias" in by_name and not head.bias:
            raise ValueError(f"{head.seat}.bias is a parameter of a head that was told of without it")
        others = [h for h in heads if h.weight == head.weight and h.bias != head.bias]
        if others:
            raise ConfigError(
                f"{head.seat} and {others[0].seat} share a weight and differ in their bias; such heads are not"
                " built, untie them"
            )


def _group(params: Sequence[ParamInfo], blocks: Sequence[str], looked_up: set[str]) -> dict[str, list[ParamInfo]]:
    """Parameters by the unit that holds them: blocks first, then every other module, each in model order."""
    groups: dict[str, list[ParamInfo]] = {name: [] for name in blocks}
    owner = {}
    for param in params:
        home = next((p for p in _ancestors(param.name) if p in groups), None)
        if home is not None:
            groups[home].append(param)
        elif param.name not in looked_up:
            owner[param.name] = param
    empty = [name for name in blocks if not groups[name]]
    if empty:
        raise ValueError(f"block {empty[0]} has no parameters of its own; needed: blocks that do not share all weights")
    inside = [p.name for members in groups.values() for p in members if p.name in looked_up]
    if inside:
        raise ConfigError(f"{inside[0]}: a table inside a block is not built; needed: tables outside the blocks")
    for param in owner.values():
        groups.setdefault(param.module, []).append(param)
    return groups


def _ancestors(name: str) -> list[str]:
    """Names of the modules around a parameter, innermost first."""
    words = name.split(".")
    return [".".join(words[:k]) for k in range(len(words) - 1, 0, -1)]


def _sections(params: Sequence[ParamInfo]) -> tuple[Section, ...]:
    """bf16 before fp32, trained before frozen; inside a section matrices first, each in model order, without gaps."""
    kinds = sorted({(p.dtype != "bfloat16", not p.trainable, p.dtype, p.trainable) for p in params})
    sections = []
    for _, _, dtype, trainable in kinds:
        chosen = [p for p in params if (p.dtype, p.trainable) == (dtype, trainable)]
        chosen.sort(key=lambda p: len(p.shape) < 2)
        start, members = 0, []
        for param in chosen:
            members.append(Member(param.name, param.shape, start))
            start += param.num_elements
        sections.append(Section(dtype, trainable, tuple(members)))
    return tuple(sections)


def _tiles(param: ParamInfo, bias: ParamInfo | None, most: int) -> list[Unit]:
    """A table cut into tiles of whole rows of nearly equal number, multiples of `TILE_ROWS` where that adds no tile;
    `most` elements at most (one row at least).

    A bias is cut alike and lies in a section of its own, so that the parts of the first are whole rows.
    """
    rows, width = param.shape
    most_rows = max(1, most // width)
    num_tiles = -(-rows // most_rows)
    per_tile = min(aligned(-(-rows // num_tiles), TILE_ROWS), most_rows)
    units = []
    for first in range(0, rows, per_tile):
        last = min(first + per_tile, rows)
        member = Member(param.name, (last - first, width), 0, first)
        sections = [Section(param.dtype, param.trainable, (member,))]
        if bias is not None:
            sections.append(Section(bias.dtype, bias.trainable, (Member(bias.name, (last - first,), 0, first),)))
        units.append(Unit(f"{param.name}[{first}:{last}]", "tile", tuple(sections)))
    return units


def _in_order(seats: dict[str, tuple[str, list[Unit]]], order: Sequence[str]) -> dict[str, tuple[str, list[Unit]]]:
    if not order:
        return seats
    if set(order) != set(seats) or len(order) != len(seats):
        odd = sorted(set(order) ^ set(seats)) or sorted(n for n in order if list(order).count(n) > 1)
        raise ValueError(f"the order has {len(order)} seats, the model {len(seats)}; first difference: {odd[0]!r}")
    return {name: seats[name] for name in order}


def _number(seats: dict[str, tuple[str, list[Unit]]], dtype: str, sizes: dict[str, int]) -> ModelSpec:
    """Give each unit a number in the order in which the seats first use it."""
    numbers: dict[str, int] = {}
    units: list[Unit] = []
    out = []
    for name, (kind, used) in seats.items():
        for unit in used:
            if unit.name not in numbers:
                numbers[unit.name] = len(units)
                units.append(unit)
        out.append(Seat(name, kind, tuple(numbers[u.name] for u in used)))
    return ModelSpec(
        tuple(units), tuple(out), dtype, sizes["hidden_size"], sizes["intermediate_size"], sizes["vocab_size"],
        sizes["num_heads"], sizes["head_size"],
    )  # fmt: skip
