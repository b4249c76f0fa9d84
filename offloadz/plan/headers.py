"""The model as data from a Hugging Face directory: config.json and the headers of its safetensors files.

Reads some kilobytes of a model of any size and no tensor.  What a name means is guessed here (blocks are the longest
run of `prefix.N.`, tables are called `embed`, `wte` or `wpe`); how a model is cut is `shapes.make_spec`, which the
runtime calls with what it sees in the modules.  The trade-off: the forward order of seats is a guess too (tables,
blocks, other modules, head), so the time predicted for an unusual model can be off, its bytes cannot.
"""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from offloadz.plan.errors import ConfigError, DamagedState
from offloadz.plan.families import FAMILIES, is_tied, params_from_config
from offloadz.plan.shapes import ParamInfo, TableInfo, make_spec
from offloadz.plan.spec import ModelSpec
from offloadz.plan.vocabulary import table_rows, vocab_size_of, with_vocab_size
from offloadz.plan.words import nearest

MAX_HEADER_BYTES = 100 << 20
INDEX = "model.safetensors.index.json"
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
HEADS = ("lm_head", "embed_out", "output")
"""Last component of the module names that heads have."""


def model_spec(
    path: str,
    dtype: str,
    *,
    init: str = "pretrained",
    keep_float32: Sequence[str] = (),
    freeze: Sequence[str] = (),
    groups: Sequence[str] = (),
    add_tokens: Sequence[str] = (),
) -> ModelSpec:
    """The spec of `model.path`: from its files, or with init = "random" from config.json alone.

    `keep_float32`, `freeze`, `groups`: see `shapes.make_spec`.  `add_tokens`: tokens that get rows in the table where
    it has none to spare.

    Raises ConfigError where files are missing, DamagedState where a header is not one.
    """
    found = find_directory(path)
    chosen = spec_from_formula if init == "random" else spec_from_headers
    rows = table_rows(found, add_tokens, vocab_size_of(read_config(found))) if add_tokens else 0
    return chosen(found, dtype, keep_float32=keep_float32, freeze=freeze, groups=groups, rows=rows)


def spec_from_headers(
    model_dir: Path,
    dtype: str,
    *,
    keep_float32: Sequence[str] = (),
    freeze: Sequence[str] = (),
    groups: Sequence[str] = (),
    rows: int = 0,
) -> ModelSpec:
    """The spec of a directory with weights; `dtype` is the working weights' (`model.dtype`), not the files'.

    `rows`: of the table, where it grows beyond its file; 0: as it is.
    """
    config = read_config(model_dir)
    shapes = {_module_name(name, config): shape for name, shape in read_shapes(model_dir).items()}
    names = sorted((n for n in shapes if not _is_buffer(n, shapes[n])), key=_natural)
    params = [ParamInfo(name, shapes[name]) for name in names]
    if keep_float32 or freeze or groups:
        params = _as_modules_name(params, config)
    return _spec(params, config, dtype, (keep_float32, freeze, groups), rows)


def spec_from_formula(
    model_dir: Path,
    dtype: str,
    *,
    keep_float32: Sequence[str] = (),
    freeze: Sequence[str] = (),
    groups: Sequence[str] = (),
    rows: int = 0,
) -> ModelSpec:
    """The spec of a directory with config.json only (`model.init = "random"`); `rows`: of its table, 0: as it says."""
    config = read_config(model_dir)
    config = with_vocab_size(config, rows) if rows else config
    return _spec(params_from_config(config), config, dtype, (keep_float32, freeze, groups))


def local_directory(path: str | Path) -> Path | None:
    """The directory of `model.path`; None for a text that can be a name of the hub, whether it is one or not.

    Raises ConfigError for what can only be a path, and is not there.
    """
    name = os.fspath(path)
    here = Path(os.path.expanduser(name))
    if name and here.is_dir():
        return here
    if isinstance(path, str) and HUB_NAME.fullmatch(name) and not Path(name.partition("/")[0]).exists():
        return None
    told = _instead(here.absolute()) if name else "nothing is named"
    raise ConfigError(
        f"model.path = {name!r} is not a directory: {told}; needed: a Hugging Face directory "
        "(config.json, safetensors, tokenizer), or the whole name of a model on the hub, org/name"
    )


def _instead(path: Path) -> str:
    """What there is in place of a directory, and which may have been meant."""
    if path.exists():
        return f"{path} is a file"
    missing = next(above for above in (path, *path.parents) if above.parent.is_dir())
    with suppress(PermissionError):
        guess = nearest(missing.name, (there.name for there in missing.parent.iterdir() if there.is_dir()))
        return f"{missing.parent} holds no {missing.name}" + (f"; nearest is {guess}" if guess else "")
    return f"{missing.parent} may not be read"


def find_directory(path: str) -> Path:
    """The directory of `model.path`: itself, or the snapshot of a hub name that was downloaded before."""
    found = local_directory(path)
    if found is not None:
        return found
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(path, "config.json")
    if not isinstance(cached, str):
        raise ConfigError(f"model.path = {path!r} is no directory and not in the hub's local cache; download it first")
    return Path(cached).parent


def read_config(model_dir: Path) -> dict[str, Any]:
    """config.json as a dict."""
    path = model_dir / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"model.path: {path} cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise ConfigError(f"model.path: {path} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"model.path: {path} holds a {type(config).__name__}; needed: a JSON object")
    return config


def has_weights(model_dir: Path) -> bool:
    """Whether there are safetensors, or an index that names some."""
    return any((model_dir / name).is_file() for name in ("model.safetensors", INDEX))


def read_shapes(model_dir: Path) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor in model.safetensors, or in the shards that its index names."""
    index = model_dir / INDEX
    if index.is_file():
        try:
            shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise DamagedState(f"{index} is not an index of shards: {error!r}") from None
        files = [model_dir / shard for shard in shards]
    else:
        files = [model_dir / "model.safetensors"]
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        if not file.is_file():
            raise ConfigError(f'model.path: {file} is missing; needed: safetensors weights, or model.init = "random"')
        shapes |= {name: tuple(entry["shape"]) for name, entry in read_header(file).items()}
    return shapes


def read_header(file: Path) -> dict[str, Mapping[str, Any]]:
    """The JSON header of a safetensors file without its metadata; raises DamagedState naming the file."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else -1
        if not 0 < length <= min(size - 8, MAX_HEADER_BYTES):
            raise DamagedState(f"{file}: a header of {length} bytes in a file of {size}; needed: a safetensors file")
        try:
            header = json.loads(stream.read(length))
            entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
            bad = [n for n, e in entries.items() if not all(isinstance(s, int) and s >= 0 for s in e["shape"])]
        except (ValueError, AttributeError, KeyError, TypeError) as error:
            raise DamagedState(f"{file}: its header is not that of a safetensors file: {error!r}") from None
    if bad:
        raise DamagedState(f"{file}: tensor {bad[0]} has the shape {entries[bad[0]]['shape']}")
    return entries


def block_names(names: Sequence[str]) -> list[str]:
    """Names of the repeated blocks: the longest run of `prefix.N.`, outermost numbers only (experts are inside)."""
    runs: dict[str, set[int]] = {}
    for name in names:
        found = re.match(r"(.*?)\.(\d+)\.", name)
        if found:
            runs.setdefault(found[1], set()).add(int(found[2]))
    if not runs:
        return []
    prefix = max(runs, key=lambda p: len(runs[p]))
    return [f"{prefix}.{number}" for number in sorted(runs[prefix])]


def _spec(
    params: list[ParamInfo],
    config: Mapping[str, Any],
    dtype: str,
    patterns: tuple[Sequence[str], Sequence[str], Sequence[str]],
    rows: int = 0,
) -> ModelSpec:
    """Guess tables, blocks and head from names, then cut; `patterns`: `keep_float32`, `freeze` and `groups`."""
    blocks = block_names([p.name for p in params])
    inside = tuple(f"{b}." for b in blocks)
    outer = [p for p in params if len(p.shape) == 2 and not p.name.startswith(inside)]
    head = [p for p in outer if p.module.rpartition(".")[2] in HEADS]
    tables = [p for p in outer if p not in head and re.search(r"emb|wte$|wpe$", p.module.rpartition(".")[2])]
    tables.sort(key=lambda p: p.shape[0] != config.get("vocab_size"))  # words before positions: a head ties to words
    if head and is_tied(config) and tables:
        params = [p for p in params if p not in head]  # a file may hold both names of one tensor
        head = []
    biases = {p.module: p.name for p in params if p.name.endswith(".bias")}
    heads = [TableInfo(p.module, p.name, biases.get(p.module, "")) for p in head]
    if not heads and tables:
        heads = [TableInfo("lm_head", tables[0].name, biases.get("lm_head", ""))]
    seats = [TableInfo(p.module, p.name) for p in tables]
    if rows:
        words = {p.name for p in tables[:1]} | {h.weight for h in heads} | {h.bias for h in heads}
        params = [replace(p, shape=(rows, *p.shape[1:])) if p.name in words else p for p in params]
        config = with_vocab_size(config, rows)
    keep_float32, freeze, groups = patterns
    return make_spec(
        params, blocks, seats, heads, dtype=dtype, keep_float32=keep_float32, freeze=freeze, groups=groups,
        config=config,
    )  # fmt: skip


def _as_modules_name(params: list[ParamInfo], config: Mapping[str, Any]) -> list[ParamInfo]:
    """Parameters by the names that patterns are for: those of the module, which joins what files hold apart (experts).

    Where nobody can say, or the module would hold other elements than the files do, the names of the files stay.
    """
    if config.get("model_type") in FAMILIES:
        return params
    try:
        named = params_from_config(config)
    except ConfigError:
        return params
    tied = is_tied(config)
    held = [p for p in params if not (tied and p.module.rpartition(".")[2] in HEADS)]
    agree = sum(p.num_elements for p in named) == sum(p.num_elements for p in held)
    return named if agree else params


def _module_name(name: str, config: Mapping[str, Any]) -> str:
    """A name in a file as the module has it (the hub's GPT-2 files lack the prefix)."""
    bare = config.get("model_type") == "gpt2" and not name.startswith(("transformer.", "lm_head."))
    return f"transformer.{name}" if bare else name


def _is_buffer(name: str, shape: tuple[int, ...]) -> bool:
    """Old files carry causal masks and rotary tables beside the parameters."""
    return name.endswith((".inv_freq", ".attn.masked_bias")) or (name.endswith(".attn.bias") and len(shape) == 4)


def _natural(name: str) -> list[tuple[int, str]]:
    """Sort key that puts layer 2 before layer 10."""
    return [(int(word), "") if word.isdigit() else (-1, word) for word in name.split(".")]
