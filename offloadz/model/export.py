"""A trained model as a Hugging Face directory: every tensor once, streamed, read back and compared.

Works from a live run or from a checkpoint directory; both give the same bytes.  Training state is left to
`train/checkpoint.py`.  The trade-off: the weights are read once more from the drive after they were written, which
doubles the export's traffic and means that a directory that appears is one that was seen to be whole.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from offloadz.memory.flat import DTYPES, spans
from offloadz.model.aside import clean_leftovers, write_text
from offloadz.model.conversion import Cut, Layout
from offloadz.model.files import StreamReader, StreamWriter
from offloadz.model.linked import open_tensors
from offloadz.model.manifest import BUFFERS, MODEL, read_manifest, verify
from offloadz.model.sources import INDEX_FILE, SINGLE_FILE
from offloadz.model.together import appearing_to_all, by_first, write_together, writes
from offloadz.model.vocabulary import write_tokenizer
from offloadz.model.weights import Names, declare_untied, names_of
from offloadz.plan.errors import ConfigError, DamagedState
from offloadz.plan.spec import Unit
from offloadz.plan.words import human
from offloadz.runtime import native
from offloadz.runtime.ranks import Solo

SMALL_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "chat_template*",
    "preprocessor_config.json",
    "processor_config.json",
    "*.py",
)
"""What belongs to a model besides weights and configuration."""

Shape = tuple[int, ...]


class Stock(Protocol):
    """A model's tensors and small files, wherever they are."""

    written: dict[str, str]
    """Name in the exported files -> canonical name."""
    cuts: dict[str, Cut]
    """Which elements of it, for names that hold a part."""
    storage: dict[str, tuple[Shape, str]]
    """Canonical name -> logical shape and the dtype in which its working weight is kept."""
    ranks: Solo
    """Who writes together."""

    def pieces(self, dtype: str) -> Iterator[tuple[str, int, Tensor]]:
        """(canonical name, first element, flat tensor in the dtype of `exported_dtype`), each element once over all
        ranks."""
        ...

    def buffers(self) -> dict[str, Tensor]: ...

    def buffer_name(self, name: str) -> str:
        """What exported files call a buffer."""
        ...

    def write_small_files(self, directory: Path, dtype: str | None) -> None:
        """config.json (for `dtype`, or as it is), generation_config.json, tokenizer."""
        ...


def export(run_or_checkpoint: Any, out: str | Path, dtype: str | None = None, shard_bytes: float = 5e9) -> Path:
    """Write `out`, a Hugging Face directory, from a run or from a checkpoint directory; returns it.

    `dtype`: "bfloat16" takes the working weights as they are, "float32" the masters; None is what the run works with.
    Weights kept in fp32 in a bf16 run stay fp32.  `out` appears whole or not at all; what is there is replaced only if
    it was exported before.  Raises ConfigError, DiskFailed (numbers first), DamagedState (what was read back differs).
    """
    stock: Stock = (
        CheckpointStock(Path(run_or_checkpoint))
        if isinstance(run_or_checkpoint, (str, Path))
        else RunStock(run_or_checkpoint)
    )
    dtype = dtype or run_dtype(stock.storage)
    if dtype not in DTYPES:
        raise ConfigError(f"dtype is {dtype}; an export is bfloat16 or float32")
    out = Path(out)
    _require_free_name(out)
    buffers = {stock.buffer_name(name): buffer for name, buffer in stock.buffers().items()}
    entries = {name: (exported_dtype(stock, of, dtype), _shape(stock, name)) for name, of in stock.written.items()}
    entries |= {name: (buffer.dtype, tuple(buffer.shape)) for name, buffer in buffers.items()}
    nbytes = sum(_size(*entry) for entry in entries.values())
    if stock.ranks.rank == 0:
        clean_leftovers(out.parent, out.name)
    with appearing_to_all(stock.ranks, out, nbytes, "an export") as scratch:
        by_first(stock.ranks, lambda: stock.write_small_files(scratch, dtype))
        _write_weights(scratch, stock, buffers, entries, dtype, shard_bytes)
    return out


def export_command(checkpoint: str | Path, out: str | Path, dtype: str) -> int:
    """`offloadz export`: exit status 0, or an exception that says what is wrong."""
    replaced = " (in place of an earlier export)" if Path(out).is_dir() and any(Path(out).iterdir()) else ""
    done = export(Path(checkpoint), out, dtype)
    size = sum(path.stat().st_size for path in done.iterdir())
    print(f"{done}: {human(size)} in {dtype}, read back and compared{replaced}")
    return 0


def logical_tensors(units: tuple[Unit, ...]) -> dict[str, tuple[Shape, str, bool]]:
    """Name -> (shape, storage dtype, trainable) of every tensor that lies in units; tiles are put together."""
    found: dict[str, tuple[Shape, str, bool]] = {}
    for unit in units:
        for section in unit.sections:
            for member in section.members:
                shape = member.shape
                if member.name in found:
                    shape = (found[member.name][0][0] + shape[0], *shape[1:])
                found[member.name] = (shape, section.dtype, section.trainable)
    return found


def run_dtype(storage: Mapping[str, tuple[Shape, str]]) -> str:
    """The dtype a run works in: bfloat16 as soon as any weight is kept so."""
    return "bfloat16" if any(kept == "bfloat16" for _, kept in storage.values()) else "float32"


def exported_dtype(stock: Stock, name: str, dtype: str) -> torch.dtype:
    """The dtype of one exported tensor: weights kept in fp32 in a bf16 run are not rounded."""
    kept = stock.storage[name][1] == "float32" and run_dtype(stock.storage) == "bfloat16"
    return torch.float32 if kept else DTYPES[dtype]


def master_of(weight: Tensor, low: Tensor | None) -> Tensor:
    """The fp32 value of a part: the weight with its low bits, or the weight itself."""
    if low is None:
        return weight.float()
    master = torch.empty(weight.numel(), dtype=torch.float32)
    native.join_master_(master, weight, low)
    return master


def working_weight(master: Tensor) -> Tensor:
    """The bf16 working weight of an fp32 master, rounded as the update rounds it."""
    weight, low = (torch.empty(master.numel(), dtype=dtype) for dtype in (torch.bfloat16, torch.int16))
    native.split_master_(weight, low, master)
    return weight


class RunStock(Stock):
    """The tensors of a live run."""

    def __init__(self, run: Any) -> None:
        self._run, self._session, self._model = run, run.session, run.model
        self.ranks: Solo = run.ranks
        self._names: Names = names_of(self._model)
        self.written: dict[str, str] = self._names.written
        self.cuts: dict[str, Cut] = self._names.cuts
        self.tensors = logical_tensors(self._session.spec.units)
        self.moments: tuple[str, ...] = self._session.spec.recipe.moments
        self.storage: dict[str, tuple[Shape, str]] = {
            name: (shape, kept) for name, (shape, kept, _) in self.tensors.items()
        }
        absent = sorted(set(self.written.values()) ^ set(self.storage))
        if absent:
            raise ConfigError(f"names of the model and of its stored weights differ: {', '.join(absent[:10])}")

    def pieces(self, dtype: str) -> Iterator[tuple[str, int, Tensor]]:
        for view in self._session.parts(write=False) if writes(self._run) else ():
            flat = master_of(view.weight, view.low) if dtype == "float32" else view.weight
            for span in spans(view.unit, view.part):
                name = span.member.name
                yield name, span.first_element, flat[span.part_slice].to(exported_dtype(self, name, dtype))

    def buffers(self) -> dict[str, Tensor]:
        return {name: buffer.detach().cpu() for name, buffer in self.buffers_in_place().items()}

    def buffer_name(self, name: str) -> str:
        return self._names.buffer_names[name]

    def buffers_in_place(self) -> dict[str, Tensor]:
        """The model's own persistent buffers, not copies."""
        found: dict[str, Tensor] = {}
        for name, (holder, own) in self._names.buffers.items():
            module = holder()
            if module is None:
                raise ConfigError(f"the module that held buffer {name} is gone")
            found[name] = getattr(module, own)
        return found

    def write_small_files(self, directory: Path, dtype: str | None) -> None:
        write_model_files(self._model, self._names, directory, dtype)


class CheckpointStock(Stock):
    """The tensors of a checkpoint directory, checked before the first is given out."""

    def __init__(self, directory: Path) -> None:
        told = read_manifest(directory)
        verify(directory, told)
        self._directory, self._told, self.ranks = directory, told, Solo()
        self.written: dict[str, str] = told["written"]
        self.cuts: dict[str, Cut] = {name: Cut.from_told(cut) for name, cut in told.get("cuts", {}).items()}
        self._buffer_names: dict[str, str] = told.get("buffer_names", {})
        self.storage: dict[str, tuple[Shape, str]] = {
            name: (tuple(e["shape"]), e["storage"]) for name, e in told["parameters"].items()
        }

    def pieces(self, dtype: str) -> Iterator[tuple[str, int, Tensor]]:
        with open_tensors(self._directory, self._told) as (reader, _):
            for name in self.storage:
                target = exported_dtype(self, name, dtype)
                split = self.storage[name][1] == "bfloat16" and reader.entries[name].dtype == torch.float32
                for start, piece in reader.pieces(name):
                    round_as_update = split and target == torch.bfloat16
                    yield name, start, working_weight(piece) if round_as_update else piece.to(target)

    def buffers(self) -> dict[str, Tensor]:
        with StreamReader(self._directory / BUFFERS) as reader:
            return {name: reader.read(name).view(entry.shape) for name, entry in reader.entries.items()}

    def buffer_name(self, name: str) -> str:
        return self._buffer_names.get(name, name)

    def write_small_files(self, directory: Path, dtype: str | None) -> None:
        for path in (self._directory / MODEL).iterdir():
            if path.suffix != ".safetensors":
                shutil.copyfile(path, directory / path.name)
        config = directory / "config.json"
        if dtype and config.is_file():
            told = json.loads(config.read_text(encoding="utf-8"))
            write_text(config, json.dumps(_with_dtype(told, dtype), indent=2) + "\n")


def write_model_files(model: nn.Module, names: Names, directory: Path, dtype: str | None) -> None:
    """config.json as the weights are, generation_config.json, and what lies beside the weights the model came from."""
    for pattern in SMALL_FILES if names.directory else ():
        for path in names.directory.glob(pattern) if names.directory else ():
            if path.is_file():
                shutil.copyfile(path, directory / path.name)
    if names.added is not None and names.directory is not None:
        write_tokenizer(names.directory, names.added, directory)
    for file, text in names.texts.items():
        write_text(directory / file, text)
    config = getattr(model, "config", None)
    if config is not None and hasattr(config, "to_json_string"):
        config = copy.deepcopy(config)
        config.architectures = [type(model).__name__]
        if not names.ties_hold:
            declare_untied(config)
        told = json.loads(config.to_json_string(use_diff=True))
        write_text(directory / "config.json", json.dumps(_with_dtype(told, dtype), indent=2) + "\n")
    generation = getattr(model, "generation_config", None)
    if generation is not None:
        write_text(directory / "generation_config.json", generation.to_json_string(use_diff=True))


def _with_dtype(told: dict[str, Any], dtype: str | None) -> dict[str, Any]:
    """A configuration, and those inside it, that states the dtype of the weights."""
    if dtype is None:
        return told
    inner = {key: _with_dtype(value, dtype) for key, value in told.items() if _is_config(value)}
    return {**told, **inner, "dtype": dtype}


def _is_config(value: Any) -> bool:
    return isinstance(value, dict) and ("model_type" in value or "dtype" in value)


def _write_weights(
    directory: Path,
    stock: Stock,
    buffers: Mapping[str, Tensor],
    entries: Mapping[str, tuple[torch.dtype, Shape]],
    dtype: str,
    shard_bytes: float,
) -> None:
    """All shards at once, each tensor streamed to every name it is written under; then read back and compared."""
    shards = _shards(entries, shard_bytes)
    where = {name: file for file, names in shards.items() for name in names}
    layout = Layout(stock.written, stock.cuts, {of: prod(shape) for of, (shape, _) in stock.storage.items()})
    files = {directory / file: {name: entries[name] for name in names} for file, names in shards.items()}

    def fill(writers: dict[Path, StreamWriter]) -> None:
        for of, start, flat in stock.pieces(dtype):
            for name, at, piece in layout.spread(of, start, flat):
                writers[directory / where[name]].write(name, at, piece)
        for name, buffer in buffers.items() if stock.ranks.rank == 0 else ():
            writers[directory / where[name]].write(name, 0, buffer.reshape(-1))

    metadata = {"format": "pt", "writer": "offloadz"}
    write_together(stock.ranks, files, fill, metadata=metadata, verify=True)
    if stock.ranks.rank:
        return
    if len(shards) > 1:
        total = sum(_size(*entry) for entry in entries.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        write_text(directory / INDEX_FILE, json.dumps(index, indent=2) + "\n")


def _shards(entries: Mapping[str, tuple[torch.dtype, Shape]], shard_bytes: float) -> dict[str, list[str]]:
    """File name -> tensor names, filled in order up to `shard_bytes` (a larger tensor has a file of its own)."""
    groups: list[list[str]] = [[]]
    held = 0
    for name, entry in entries.items():
        if groups[-1] and held + _size(*entry) > shard_bytes:
            groups.append([])
            held = 0
        groups[-1].append(name)
        held += _size(*entry)
    if len(groups) == 1:
        return {SINGLE_FILE: groups[0]}
    return {f"model-{i:05}-of-{len(groups):05}.safetensors": names for i, names in enumerate(groups, 1)}


def _shape(stock: Stock, name: str) -> Shape:
    """Shape of a tensor in the exported files."""
    return stock.cuts[name].shape if name in stock.cuts else stock.storage[stock.written[name]][0]


def _size(dtype: torch.dtype, shape: Shape) -> int:
    return torch.Size(shape).numel() * dtype.itemsize


def _require_free_name(out: Path) -> None:
    """Only an empty directory or an earlier export may be replaced: never the model that was trained from."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    for path in sorted(out.glob("*.safetensors"))[:1] if out.is_dir() else ():
        try:
            with StreamReader(path) as reader:
                if reader.metadata.get("writer") == "offloadz":
                    return
        except DamagedState:
            break
    raise ConfigError(f"{out} exists and is no earlier export; choose another directory")
