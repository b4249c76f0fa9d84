"""A Hugging Face model without its weights: the module on meta, where its weights are, and by which names.

`load` builds the module so that nothing of the size of the weights is ever allocated; `sources.py` reads them later,
in pieces, straight to their tier.  What a run needs to know of names to write files again (`names_of`) is written down
here once, before blocks are replaced.  The trade-off: the module is built by its own constructor with each parameter
sent to meta as it is registered, so one parameter at a time exists as untouched pages; buffers are real at once, while
a whole construction on meta would have left rotary tables and embedding scales without data.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from offloadz.memory.heap import map_large_blocks
from offloadz.model.conversion import Cut, file_names
from offloadz.model.sources import FileSource, RandomSource, Source, persistent_buffers, put_parameter, tie_groups
from offloadz.model.vocabulary import Added, GrownSource, grow
from offloadz.plan.errors import ConfigError
from offloadz.plan.headers import local_directory

_sources: weakref.WeakKeyDictionary[nn.Module, Source] = weakref.WeakKeyDictionary()
_names: weakref.WeakKeyDictionary[nn.Module, Names] = weakref.WeakKeyDictionary()
_constructing = threading.RLock()

PASSING_BYTES = 128 << 10
"""Parameters from this size on are mapped by themselves while a module is built."""


@dataclass(frozen=True)
class Names:
    """What files call a model's tensors, and where the small files beside them came from."""

    written: dict[str, str]
    """Name in a file of weights -> canonical name, as `save_pretrained` would choose: declared ties once."""
    cuts: dict[str, Cut]
    """Which elements of it, for names in files that hold a part (one expert of all)."""
    ties_hold: bool
    """Whether every tie that the configuration declares is real; if not, all names are written and it is undone."""
    buffers: dict[str, tuple[weakref.ref[nn.Module], str]]
    """Persistent buffers: the module that holds each, and its name there."""
    buffer_names: dict[str, str]
    """What files call them."""
    directory: Path | None
    """Where tokenizer and generation files are."""
    added: Added | None = None
    """Tokens that this tokenizer lacks and the model has."""
    texts: dict[str, str] = field(default_factory=dict)
    """File name -> text of small files that go with the weights and stand in for the directory's."""


def load(
    path: str | Path,
    dtype: torch.dtype | str = torch.bfloat16,
    *,
    init: str = "pretrained",
    seed: int = 0,
    attention: str = "auto",
    add_tokens: Sequence[str] = (),
    trust_remote_code: bool = False,
) -> nn.Module:
    """A causal language model with parameters on meta, buffers real, ties redone, and its source of weights known.

    `path`: a Hugging Face directory, or a text `org/name` for one on the hub.
    `dtype`: bfloat16 or float32, of the parameters; buffers keep theirs.
    `init`: "pretrained" reads the directory's safetensors, "random" needs config.json only and draws by `seed`.
    `add_tokens`: special tokens that tokenizer and table are given where they lack them (`vocabulary.py`).
    Raises ConfigError for what configuration or files are not, DamagedState for files that contradict themselves.
    """
    dtype = getattr(torch, dtype, dtype) if isinstance(dtype, str) else dtype
    if dtype not in (torch.bfloat16, torch.float32):
        raise ConfigError(f"model.dtype is {dtype}; it must be bfloat16 or float32")
    if init not in ("pretrained", "random"):
        raise ConfigError(f'model.init is "{init}"; it must be "pretrained" or "random"')
    directory = _directory(path, init)
    model = _construct(directory, dtype, attention, trust_remote_code)
    _sources[model] = _source(model, directory, init, seed, add_tokens)
    _read_generation_config(model, directory)
    added = Added(tuple(add_tokens), trust_remote_code) if add_tokens else None
    _names[model] = replace(_describe(model, directory), added=added)
    return model


def _source(model: nn.Module, directory: Path, init: str, seed: int, tokens: Sequence[str]) -> Source:
    """Where the weights are; a model that needs rows for new tokens has them afterwards."""
    if init == "random":
        grow(model, directory, tokens)
        return RandomSource(model, seed)
    source = FileSource(directory, model)
    _undo_false_ties(model, source)
    source.fill_buffers(persistent_buffers(model))
    return GrownSource(source, model) if grow(model, directory, tokens) else source


def source_of(model: nn.Module) -> Source | None:
    """Where the weights of a model made by `load` are; None for other modules."""
    return _sources.get(model)


def names_of(model: nn.Module) -> Names:
    """The names files use for a model's tensors; noted at the first call, so call it before blocks are replaced."""
    if model not in _names:
        _names[model] = _describe(model, None)
    return _names[model]


def add_text(model: nn.Module, file: str, text: str) -> None:
    """From now on checkpoints and exports of `model` hold a small file of this name and text."""
    names_of(model).texts[file] = text


def _directory(path: str | Path, init: str) -> Path:
    """The directory of a model; a hub name is resolved by huggingface_hub's own cache."""
    directory = local_directory(path)
    if directory is not None:
        return directory
    from huggingface_hub import snapshot_download

    wanted = ["*.json", "*.txt", "*.model", "*.jinja", "*.py"] + ["*.safetensors"] * (init == "pretrained")
    try:
        return Path(snapshot_download(str(path), allow_patterns=wanted))
    except Exception as error:  # whatever the hub's client raises, the user wrote this name
        raise ConfigError(f"model.path: {path} is neither a directory nor to be had as a hub name: {error}") from error


def _construct(directory: Path, dtype: torch.dtype, attention: str, trust_remote_code: bool) -> nn.Module:
    """The module with parameters on meta in `dtype`, real buffers, no random number drawn, in evaluation mode."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if not (directory / "config.json").is_file():
        raise ConfigError(f"model.path: {directory} has no config.json")
    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code)
    except (ValueError, KeyError, OSError) as error:
        raise ConfigError(f"model.path: {directory / 'config.json'} is not readable: {error}") from error
    if getattr(config, "quantization_config", None):
        raise ConfigError(f"model.path: the weights in {directory} are quantised; full training needs the plain ones")
    chosen: dict[str, Any] = {} if attention == "auto" else {"attn_implementation": attention}
    generator = torch.default_generator.get_state()
    try:
        with _parameters_on_meta():
            # Built in fp32 whatever `dtype`: only parameters are cast, so a table of angles keeps its precision.
            model: nn.Module = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                config, dtype=torch.float32, trust_remote_code=trust_remote_code, **chosen
            )
    except (ValueError, ImportError) as error:
        raise ConfigError(f"{directory}: {error} (model.attention, model.trust_remote_code)") from error
    finally:
        torch.default_generator.set_state(generator)
    _cast_parameters(model, dtype)
    model.tie_weights()  # type: ignore[operator]
    _set_dtype(model, dtype)
    _require_buffers(model)
    return model.eval()


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Parameters go to meta as modules register them, shared ones together; buffers stay real."""
    plain = nn.Module.register_parameter
    seen = WeakIdKeyDictionary()

    def register(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        plain(self, name, param)
        if param is None or param.is_meta:
            return
        if param not in seen:
            seen[param] = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
        self._parameters[name] = seen[param]

    with _constructing:
        # Each parameter exists for a moment, in memory that nobody touches; on the heap they would leave holes as large
        # as the model, and whatever is computed later would fill them (15 MiB a block of a 13B, 128 tokens).
        map_large_blocks(PASSING_BYTES)
        nn.Module.register_parameter = register  # type: ignore[method-assign]
        try:
            yield
        finally:
            nn.Module.register_parameter = plain  # type: ignore[method-assign]
            map_large_blocks()


def _cast_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """Parameters to `dtype`, but for those the family itself insists on keeping in fp32; ties stay ties."""
    strict = tuple(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    for name, aliases in tie_groups(model).items():
        old = model.get_parameter(name)
        if not old.is_floating_point():
            raise ConfigError(f"{name} is {old.dtype}; parameters that are no floats are not built")
        kept = any(pattern in name for pattern in strict)
        new = nn.Parameter(old.detach().to(torch.float32 if kept else dtype), requires_grad=old.requires_grad)
        for alias in aliases:
            put_parameter(model, alias, new)


def _set_dtype(model: nn.Module, dtype: torch.dtype) -> None:
    config: Any = model.config
    config.dtype = dtype
    for key in getattr(config, "sub_configs", {}):
        if getattr(config, key, None) is not None:
            getattr(config, key).dtype = dtype


def _require_buffers(model: nn.Module) -> None:
    bare = [name for name, buffer in model.named_buffers() if buffer.is_meta]
    if bare:
        raise ConfigError(f"buffers without data after construction: {', '.join(bare)}; this family is not supported")
    left = [name for name, parameter in model.named_parameters() if not parameter.is_meta]
    if left:
        raise ConfigError(
            f"parameters that the model did not register: {', '.join(left)}; this family is not supported"
        )


def _undo_false_ties(model: nn.Module, source: FileSource) -> None:
    """Where the configuration says tied and the files hold two different tensors, believe the files and say so."""
    for name, alias in source.differing_ties():
        warnings.warn(
            f"config.json ties {alias} to {name}, but {source.directory} holds both with different values: "
            "they are kept apart, and tie_word_embeddings is set to false",
            stacklevel=3,
        )
        old = model.get_parameter(name)
        put_parameter(model, alias, nn.Parameter(torch.empty_like(old), requires_grad=old.requires_grad))
        source.untie(name, alias)
        getattr(model, "all_tied_weights_keys", {}).pop(alias, None)
        declare_untied(model.config)


def declare_untied(config: Any) -> None:
    """Let a configuration say that embedding and head are two tensors."""
    for part in {id(c): c for c in (config, config.get_text_config())}.values():
        part.tie_word_embeddings = False


def _read_generation_config(model: nn.Module, directory: Path) -> None:
    if not (directory / "generation_config.json").is_file() or not hasattr(model, "generation_config"):
        return
    from transformers import GenerationConfig

    try:
        model.generation_config = GenerationConfig.from_pretrained(directory)  # type: ignore[assignment]
    except (ValueError, OSError) as error:
        raise ConfigError(f"{directory / 'generation_config.json'} is not readable: {error}") from error


def _describe(model: nn.Module, directory: Path | None) -> Names:
    groups = tie_groups(model)
    canonical = {alias: name for name, aliases in groups.items() for alias in aliases}
    expand = getattr(model, "get_expanded_tied_weights_keys", None)
    declared: dict[str, str] = expand(all_submodels=True) if expand else {}
    declared = {alias: name for alias, name in declared.items() if alias in canonical and name in canonical}
    holds = all(canonical[alias] == canonical[name] for alias, name in declared.items())
    left_out = set(declared) if holds else set()
    buffers = {}
    for name in persistent_buffers(model):
        path, _, own = name.rpartition(".")
        buffers[name] = (weakref.ref(model.get_submodule(path)), own)
    shapes = {alias: tuple(model.get_parameter(alias).shape) for alias in canonical if alias not in left_out}
    shapes |= {name: tuple(buffer.shape) for name, buffer in persistent_buffers(model).items()}
    names, cuts = file_names(model, shapes)
    written = {file: canonical[of] for file, of in names.items() if of in canonical}
    cuts = {file: replace(cut, of=canonical[cut.of]) for file, cut in cuts.items() if cut.of in canonical}
    return Names(written, cuts, holds, buffers, {of: file for file, of in names.items() if of in buffers}, directory)
