"""Where weights come from, by name and in flat ranges: files, a live module, or the model's own random start.

Left to others: building the module (`weights.py`) and where the values go (`runtime/`).  A source answers in the dtype
it has; the caller rounds.  The trade-off: a random start computes a module's values anew for every module asked for,
twice if it is asked for twice, and in return never holds more than one module and does not depend on the order asked.
"""

from __future__ import annotations

import hashlib
import json
import re
import weakref
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from offloadz.model.conversion import Layout, file_names
from offloadz.model.files import PIECE_ELEMENTS, StreamReader
from offloadz.plan.errors import ConfigError, DamagedState

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""What a parameter may be in a file; quantised weights are not read."""


class Source(Protocol):
    """Weights by canonical name, as `model.named_parameters()` gives them: each tied group once."""

    def names(self) -> dict[str, tuple[int, ...]]:
        """Shape of every parameter."""
        ...

    def read(self, name: str, start_element: int, count: int) -> torch.Tensor:
        """A flat CPU tensor of `count` elements from `start_element` on, in the source's own dtype."""
        ...

    def release(self, name: str) -> None:
        """The tensor has been read for the last time."""
        ...


def tie_groups(model: nn.Module) -> dict[str, list[str]]:
    """Every parameter under its canonical name, with all names it goes by (the canonical one first)."""
    canonical: dict[int, str] = {}
    groups: dict[str, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(canonical.setdefault(id(parameter), name), []).append(name)
    return groups


def shapes_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter under its canonical name."""
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


class ModuleSource:
    """The weights of a module that already has them; `release` lets go of a tensor, leaving a parameter on meta."""

    def __init__(self, model: nn.Module) -> None:
        bare = [name for name, parameter in model.named_parameters() if parameter.is_meta]
        if bare:
            raise ValueError(
                f"no weights for {_some(bare)}: these parameters are on meta; load them with offloadz.load"
            )
        self._model = model
        self._shapes = shapes_of(model)
        self._groups = tie_groups(model)

    def names(self) -> dict[str, tuple[int, ...]]:
        return dict(self._shapes)

    def read(self, name: str, start_element: int, count: int) -> torch.Tensor:
        flat = self._model.get_parameter(name).detach().reshape(-1)
        return flat[start_element : start_element + count].cpu().contiguous()

    def release(self, name: str) -> None:
        old = self._model.get_parameter(name)
        bare = nn.Parameter(torch.empty_like(old, device="meta"), requires_grad=old.requires_grad)
        for alias in self._groups[name]:
            put_parameter(self._model, alias, bare)


class FileSource:
    """The safetensors files of a directory, checked against a module before the first weight is read.

    Raises ConfigError that lists every missing, extra and misshapen tensor, DamagedState for files that are not what
    their headers or the index say.
    """

    def __init__(self, directory: Path, model: nn.Module) -> None:
        self.directory = directory
        self._readers = _open_all(directory)
        self._place = {name: reader for reader in self._readers for name in reader.entries}
        buffers = persistent_buffers(model)
        self._groups = tie_groups(model)
        aliases = [alias for names in self._groups.values() for alias in names]
        shapes = {alias: tuple(model.get_parameter(alias).shape) for alias in aliases}
        shapes |= {name: tuple(buffer.shape) for name, buffer in buffers.items()}
        converted, cuts = file_names(model, shapes)
        wanted = {*shapes, *converted}
        self._on_disk = _match_names(self._place, wanted, str(getattr(model, "base_model_prefix", "")))
        # A tensor may also lie in a file as the module has it.
        written = {name: name for name in shapes if name in self._on_disk}
        written |= {file: name for file, name in converted.items() if name not in written}
        cuts = {file: cut for file, cut in cuts.items() if file in written}
        self._layout = Layout(written, cuts, {name: prod(shape) for name, shape in shapes.items()})
        self._files: dict[str, list[str]] = {}
        for file, name in written.items():
            self._files.setdefault(name, []).append(file)
        self._check({f: cuts[f].shape if f in cuts else shapes[n] for f, n in written.items()}, buffers, model)
        self._shapes = shapes_of(model)

    def names(self) -> dict[str, tuple[int, ...]]:
        return dict(self._shapes)

    def read(self, name: str, start_element: int, count: int) -> torch.Tensor:
        found = next(alias for alias in self._groups.get(name, [name]) if self._held(alias))
        met = [
            self._read_run(place.file_name, place.at + low - place.start, high - low)
            for place, low, high in self._layout.within(found, start_element, start_element + count)
        ]
        return met[0] if len(met) == 1 else torch.cat(met)

    def release(self, name: str) -> None:
        """Nothing is held."""

    def differing_ties(self) -> list[tuple[str, str]]:
        """(canonical name, alias) of tied parameters that the files hold twice with different values."""
        pairs = [(name, alias) for name, aliases in self._groups.items() for alias in aliases[1:]]
        both = [pair for pair in pairs if self._held(pair[0]) and self._held(pair[1])]
        return [pair for pair in both if not self._equal(*pair)]

    def untie(self, name: str, alias: str) -> None:
        """Give an alias its own values from the files."""
        self._groups[name].remove(alias)
        self._groups[alias] = [alias]
        self._shapes[alias] = self._shapes[name]

    def fill_buffers(self, buffers: Mapping[str, torch.Tensor]) -> None:
        """Copy persistent buffers from the files, in the buffers' own dtypes."""
        for name, buffer in buffers.items():
            if self._held(name):
                buffer.copy_(self.read(name, 0, buffer.numel()).view(buffer.shape))

    def close(self) -> None:
        for reader in self._readers:
            reader.close()

    def _held(self, name: str) -> bool:
        """Whether files hold all of a tensor."""
        return all(file in self._on_disk for file in self._files[name])

    def _read_run(self, file_name: str, start: int, count: int) -> torch.Tensor:
        name = self._on_disk[file_name]
        return self._place[name].read(name, start, count)

    def _equal(self, name: str, alias: str) -> bool:
        first, second = (self._on_disk[self._files[n][0]] for n in (name, alias))
        total = self._place[first].entries[first].num_elements
        for start in range(0, total, PIECE_ELEMENTS):
            count = min(PIECE_ELEMENTS, total - start)
            ours, theirs = (self._place[n].read(n, start, count) for n in (first, second))
            if not torch.equal(ours.float(), theirs.float()):
                return False
        return True

    def _check(self, shapes: Mapping[str, tuple[int, ...]], buffers: Iterable[str], model: nn.Module) -> None:
        used = {file: disk for file, disk in self._on_disk.items() if file in shapes}
        entries = {file: self._place[disk].entries[disk] for file, disk in used.items()}
        needed = [*self._groups.values(), *([name] for name in buffers)]
        lacking = [names[0] for names in needed if not any(self._held(name) for name in names)]
        missing = [file for name in lacking for file in self._files[name] if file not in self._on_disk]
        missing = _not_ignored(missing, model, "_keys_to_ignore_on_load_missing", ())
        known = set(used.values())
        extra = [name for name in self._place if name not in known]
        extra = _not_ignored(extra, model, "_keys_to_ignore_on_load_unexpected", (r"rotary_emb\.inv_freq",))
        wrong = [
            f"{name} is {entry.shape} in the file, {shapes[name]} in the model"
            for name, entry in entries.items()
            if entry.shape != shapes[name]
        ]
        plain = {file for name in buffers for file in self._files[name]}
        wrong += [f"{name} is {e.dtype}" for name, e in entries.items() if name not in plain and e.dtype not in FLOATS]
        told = [f"missing: {_some(missing)}"] * bool(missing) + [f"extra: {_some(extra)}"] * bool(extra)
        told += [f"misshapen: {_some(wrong)}"] * bool(wrong)
        if told:
            raise ConfigError(f"the weights in {self.directory} are not this model's; {'; '.join(told)}")


class RandomSource:
    """The model's own random start, one module at a time, the same values in whatever order modules are asked for.

    Each module draws from a generator state seeded by (seed, module name); torch's global state is left as it was.
    """

    def __init__(self, model: nn.Module, seed: int) -> None:
        # Weak, since a source is remembered for as long as its model lives; taken now, before blocks are replaced.
        self._modules = {path: weakref.ref(module) for path, module in model.named_modules()}
        self._seed = seed
        self._shapes = shapes_of(model)
        self._module = ""
        self._values: dict[str, torch.Tensor] = {}

    def names(self) -> dict[str, tuple[int, ...]]:
        return dict(self._shapes)

    def read(self, name: str, start_element: int, count: int) -> torch.Tensor:
        module, _, own = name.rpartition(".")
        if own not in self._values or module != self._module:
            self._values = {}  # let go of the last module before the next one is made
            self._values, self._module = self._draw(module), module
        flat = self._values[own].reshape(-1)
        if start_element + count >= flat.numel():
            del self._values[own]  # read to its end: a table is not held until the next module is asked for
        return flat[start_element : start_element + count]

    def release(self, name: str) -> None:
        module, _, own = name.rpartition(".")
        if module == self._module:
            self._values.pop(own, None)

    @torch.no_grad()
    def _draw(self, path: str) -> dict[str, torch.Tensor]:
        """All parameters of one module in fp32: its own start, then whatever the modules around it set (GPT-2 does)."""
        chain = self._chain(path)
        module = chain[0]
        bare = dict(module._parameters)
        generator = torch.default_generator.get_state()
        try:
            for name, parameter in bare.items():
                if parameter is not None:
                    empty = torch.full(parameter.shape, float("nan"), dtype=torch.float32)
                    module._parameters[name] = nn.Parameter(empty, requires_grad=False)
            torch.default_generator.manual_seed(_seed_of(self._seed, path))
            for start, target in self._starts(chain):
                start(target)
            values = {name: p.detach() for name, p in module._parameters.items() if p is not None}
        finally:
            module._parameters.update(bare)
            torch.default_generator.set_state(generator)
        unset = [f"{path}.{name}" for name, value in values.items() if bool(value.isnan().any())]
        if unset:
            raise ConfigError(f'the model has no random start for {_some(unset)}; model.init = "random" cannot be used')
        return values

    def _chain(self, path: str) -> list[nn.Module]:
        """A module and the modules around it, outwards."""
        pieces = path.split(".") if path else []
        found = [self._modules[".".join(pieces[:n])]() for n in range(len(pieces), -1, -1)]
        alive = [module for module in found if module is not None]
        if len(alive) != len(found):
            raise ValueError(f"the model of {path} is gone; its random start cannot be made any more")
        return alive

    def _starts(self, chain: list[nn.Module]) -> list[tuple[Any, nn.Module]]:
        """(initialiser, module) outwards; each is the initialiser of the nearest model around the module."""
        found, start = [], None
        for module in reversed(chain):
            start = getattr(module, "_init_weights", None) or start
            found.append((start, module))
        if start is None:
            raise ConfigError(f'{type(chain[-1]).__name__} has no _init_weights; model.init = "random" cannot be used')
        return [pair for pair in reversed(found) if pair[0] is not None]


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Buffers that belong into a file of weights."""
    found = {}
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                found[f"{path}.{name}" if path else name] = buffer
    return found


def put_parameter(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Replace the parameter at one dotted name."""
    path, _, own = name.rpartition(".")
    model.get_submodule(path)._parameters[own] = parameter


def _seed_of(seed: int, path: str) -> int:
    digest = hashlib.blake2b(f"{seed}/{path}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _open_all(directory: Path) -> list[StreamReader]:
    """Readers of all weight files of a directory, after checking the index against them."""
    if (directory / SINGLE_FILE).is_file():
        return [StreamReader(directory / SINGLE_FILE)]
    index = directory / INDEX_FILE
    if not index.is_file():
        others = sorted(p.name for p in directory.glob("*") if p.suffix in (".bin", ".pt", ".pth", ".gguf"))
        hint = f"; {', '.join(others[:3])} is not read (no pickle): convert it to safetensors" if others else ""
        wanted = f'neither {SINGLE_FILE} nor {INDEX_FILE}{hint}; model.init = "random" needs none'
        raise ConfigError(f"{directory} holds {wanted}")
    try:
        told = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        where = {str(name): str(file) for name, file in told.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedState(f"{index} is not readable: {error}") from error
    outside = sorted({file for file in where.values() if Path(file).name != file})
    absent = sorted({file for file in where.values() if not (directory / file).is_file()})
    if outside or absent:
        raise DamagedState(f"{index} names files that are not in {directory}: {_some(outside or absent)}")
    readers = [StreamReader(directory / file) for file in sorted(set(where.values()))]
    _check_index(index, where, readers)
    return readers


def _check_index(index: Path, where: Mapping[str, str], readers: Iterable[StreamReader]) -> None:
    found = [(name, reader.path.name) for reader in readers for name in reader.entries]
    absent = [f"{name} is not in {file}" for name, file in where.items() if (name, file) not in set(found)]
    unlisted = [f"{name} of {file} is not listed" for name, file in found if where.get(name) != file]
    if absent or unlisted:
        raise DamagedState(f"{index} does not agree with its files: {_some(absent + unlisted)}")


def _match_names(on_disk: Iterable[str], wanted: set[str], prefix: str) -> dict[str, str]:
    """Model name -> name on disk; files of a base model lack, and of a wrapped one have, the base model's prefix."""
    matched: dict[str, str] = {}
    for disk in on_disk:
        for name in (disk, f"{prefix}.{disk}", disk.removeprefix(f"{prefix}.")):
            if name in wanted:
                matched.setdefault(name, disk)
                break
    return matched


def _not_ignored(names: list[str], model: nn.Module, attribute: str, more: tuple[str, ...]) -> list[str]:
    patterns = [*(getattr(model, attribute, None) or ()), *more]
    return [name for name in names if not any(re.search(pattern, name) for pattern in patterns)]


def _some(items: list[str], limit: int = 20) -> str:
    more = f" and {len(items) - limit} more" if len(items) > limit else ""
    return ", ".join(items[:limit]) + more
