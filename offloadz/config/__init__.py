"""The configuration of a run: read from TOML and the command line, checked once, refused as a whole.

`load_config` answers with a `Config` in which every value is in force, or with one `ConfigError` that lists every
problem found: unknown keys with the nearest name, keys in the wrong section, names of other trainers, wrong types,
contradictions, and what is not built yet (`NOT_BUILT`).  What keys there are is `sections.py`.  Paths are not
opened here: files belong to the rooms that read them.  Trade-off: a key outside the known ones is always an error,
so notes need the prefix `x-`.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from offloadz.config.read import Reading, line_numbers, read_toml, take_override, take_tables
from offloadz.config.sections import (
    RULES,
    SECTIONS,
    DataConfig,
    DebugConfig,
    GroupConfig,
    ModelConfig,
    OffloadConfig,
    OptimizerConfig,
    TrainConfig,
)
from offloadz.config.values import Every, parse_every, shown, to_toml
from offloadz.plan.errors import ConfigError
from offloadz.plan.words import nearest, parse_bytes

__all__ = [
    "NOT_BUILT",
    "Config",
    "DataConfig",
    "DebugConfig",
    "Every",
    "GroupConfig",
    "ModelConfig",
    "OffloadConfig",
    "OptimizerConfig",
    "TrainConfig",
    "config_differences",
    "config_from_tables",
    "load_config",
    "parse_bytes",
    "parse_every",
]


@dataclasses.dataclass(frozen=True)
class Config:
    """A whole configuration.  Built by `load_config`; one built by hand is not checked."""

    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    offload: OffloadConfig = dataclasses.field(default_factory=OffloadConfig)
    debug: DebugConfig = dataclasses.field(default_factory=DebugConfig)

    def to_toml(self) -> str:
        """The effective configuration as TOML; `load_config` reads it back to an equal Config."""
        lines = []
        for section in SECTIONS:
            lines.append(f"[{section}]")
            part = getattr(self, section)
            lines += [f"{field.name} = {to_toml(getattr(part, field.name))}" for field in dataclasses.fields(part)]
            lines.append("")
        return "\n".join(lines)


class NotBuilt(NamedTuple):
    """A value of the contract that is refused: `values` lists them, empty means anything but the default."""

    key: str
    values: tuple[Any, ...]
    reason: str
    instead: str


_LATER = "is not built yet"


def _refused(key: str) -> tuple[str, ...]:
    return RULES["model"][key].refused


# Everything the contract names and this version does not do.  A line leaves the table when the thing is in force.
NOT_BUILT: tuple[NotBuilt, ...] = (
    NotBuilt("model.dtype", _refused("dtype"), "is refused: its range needs a loss scaler", '"bfloat16" or "float32"'),
)


def load_config(path: str | Path | None, overrides: Sequence[str] = (), *, training: bool = False) -> Config:
    """The checked configuration of a TOML file with `section.key=value` overrides.

    `path`: None for overrides alone, which need not say what is trained.
    `training` also asks for what only a run needs: data, an output, this machine, one rank.
    Raises one ConfigError that lists every problem with its place, the value found and what is needed.
    """
    reading = Reading()
    text, tables = read_toml(Path(path)) if path is not None else ("", {})
    lines = line_numbers(text)
    take_tables(reading, tables, lambda key: f"{path}, line {lines[key]}" if key in lines else str(path))
    for override in overrides:
        take_override(reading, override)
    return _finished(reading, training, whole=path is not None)


def config_from_tables(tables: Mapping[str, Any], *, training: bool = False) -> Config:
    """The checked configuration of nested dicts as `tomllib` gives them; raises ConfigError like `load_config`."""
    reading = Reading()
    take_tables(reading, tables, lambda key: "")
    return _finished(reading, training)


def config_differences(old: Config, new: Config, *, every_key: bool = False) -> list[str]:
    """What keeps `new` from going on where `old` stopped, one line per key; keys in `new.train.resume_with` may differ.

    Keys that never change a number (placement, saving, logging) count only with `every_key`.
    """
    found = []
    for section, keys in RULES.items():
        for key, rule in keys.items():
            name = f"{section}.{key}"
            before, now = getattr(getattr(old, section), key), getattr(getattr(new, section), key)
            if before != now and (every_key or not (rule.free or name in new.train.resume_with)):
                found.append(f"{name}: the checkpoint has {shown(before)}, the configuration {shown(now)}")
    return found


def _finished(reading: Reading, training: bool, whole: bool = True) -> Config:
    config = Config(**{section: kind(**reading.values[section]) for section, kind in SECTIONS.items()})
    found = [*_not_built(config, NOT_BUILT), *_contradictions(config), *_of_other_rules(config)]
    found += _needed(config, training) if whole else ()
    unread = set(reading.wrong)  # a default stands in for these: nothing can be said about them together with others
    for keys, text in found:
        if not unread.intersection(keys):
            reading.refuse(keys[0], reading.places.get(keys[0], ""), text)
    if reading.problems:
        raise ConfigError(_listed(reading.problems))
    return config


def _listed(problems: Iterable[str]) -> str:
    problems = list(dict.fromkeys(problems))
    if len(problems) == 1:
        return problems[0]
    return f"{len(problems)} problems in the configuration:\n" + "\n".join(f"  {problem}" for problem in problems)


_Problem = tuple[tuple[str, ...], str]


def _not_built(config: Config, table: Iterable[NotBuilt]) -> Iterable[_Problem]:
    default = Config()
    for key, values, reason, instead in table:
        section, _, name = key.partition(".")
        value = getattr(getattr(config, section), name)
        if value in values if values else value != getattr(getattr(default, section), name):
            yield (key,), f"{shown(value)} {reason}; write {instead}"
    if config.model.attention not in ("auto", "eager", "sdpa"):
        yield ("model.attention",), f'{shown(config.model.attention)} {_LATER}; write "auto", "eager" or "sdpa"'
    if not re.fullmatch(r"auto|cpu|[a-z]+:\d+", config.offload.device):
        text = f'found {shown(config.offload.device)}, needs "auto", "cpu" or a device with its number such as "cuda:0"'
        yield ("offload.device",), text


def _contradictions(config: Config) -> Iterable[_Problem]:
    """Pairs of values that cannot both be in force."""
    data, train, optimizer, offload = config.data, config.train, config.optimizer, config.offload
    if train.micro_batch_size > train.batch_size:
        yield (
            ("train.micro_batch_size", "train.batch_size"),
            f"found {train.micro_batch_size}, needs at most train.batch_size = {train.batch_size}; change one",
        )
    most = -(-train.batch_size // max(train.micro_batch_size, 1))
    if offload.sweeps > most:
        yield (
            ("offload.sweeps", "train.batch_size", "train.micro_batch_size"),
            f"found {offload.sweeps}, needs at most {most}, the number of micro-batches of a step",
        )
    if train.steps and train.epochs != 1.0:
        text = f"found {train.steps} and train.epochs = {train.epochs}: both say how long; leave one out"
        yield ("train.steps", "train.epochs"), text
    if optimizer.warmup >= 1 and optimizer.warmup != int(optimizer.warmup):
        yield ("optimizer.warmup",), f"found {optimizer.warmup}, needs a share below 1 or a whole number of steps"
    elif train.steps and optimizer.warmup > train.steps:
        text = f"found {optimizer.warmup:g} steps, needs at most train.steps = {train.steps}"
        yield ("optimizer.warmup", "train.steps"), text
    if optimizer.schedule == "constant" and optimizer.min_lr:
        text = f'found {optimizer.min_lr} with schedule = "constant", which never ends lower; leave one out'
        yield ("optimizer.min_lr", "optimizer.schedule"), text
    if offload.commit == "in_place" and optimizer.max_grad_norm:
        text = f"in_place cannot clip, found optimizer.max_grad_norm = {optimizer.max_grad_norm}; write 0 there"
        yield ("offload.commit", "optimizer.max_grad_norm"), text
    if data.eval and data.eval_share:
        yield ("data.eval_share", "data.eval"), "found with data.eval: both say what is held out; leave one out"
    if train.eval_every and not (data.eval or data.eval_share):
        text = f"found {train.eval_every} without data to evaluate on; write data.eval or leave it out"
        yield ("train.eval_every", "data.eval"), text
    if train.sample_every and not train.sample_prompts:
        text = f'found {train.sample_every} without a prompt; write train.sample_prompts = ["..."] or leave it out'
        yield ("train.sample_every", "train.sample_prompts"), text
    if data.format == "text":
        for key, default in (("train_on", "assistant"), ("chat_template", "")):
            if getattr(data, key) != default:
                text = f'found {shown(getattr(data, key))} with format = "text", which has no turns; leave it out'
                yield (f"data.{key}", "data.format"), text
    if config.model.kernels == "liger" and offload.device == "cpu":
        text = 'found "liger", whose kernels need a GPU, with offload.device = "cpu"; write "eager" or "compile"'
        yield ("model.kernels", "offload.device"), text
    on_disk = [k for k in ("parameters", "gradients", "optimizer", "activations") if getattr(offload, k) == "disk"]
    if on_disk and not offload.swap:
        text = f'found [], but offload.{on_disk[0]} = "disk" needs a directory, such as ["/nvme0/swap"]'
        yield ("offload.swap", f"offload.{on_disk[0]}"), text
    for key in train.resume_with:
        section, _, name = key.partition(".")
        if name not in RULES.get(section, {}):
            guess = nearest(key, (f"{other}.{one}" for other, keys in RULES.items() for one in keys))
            yield ("train.resume_with",), f"names the unknown key {key}" + (f"; nearest is {guess}" if guess else "")


def _of_other_rules(config: Config) -> Iterable[_Problem]:
    """Settings of the optimizer that its rule does not have, and a recipe that its weights do not."""
    optimizer, default = config.optimizer, OptimizerConfig()
    for key, names in (("betas", "adamw, adam and lion"), ("eps", "adamw and adam"), ("momentum", "sgd")):
        value = getattr(optimizer, key)
        if value != getattr(default, key) and optimizer.name not in names.replace(" and ", ", ").split(", "):
            text = f'found {shown(value)}, which belongs to {names}, with name = "{optimizer.name}"; leave it out'
            yield (f"optimizer.{key}", "optimizer.name"), text
    if optimizer.state == "int8-sr" and config.model.dtype == "float32":
        text = 'found "int8-sr", which rounds bf16 weights, with model.dtype = "float32"; write "int8"'
        yield ("optimizer.state", "model.dtype"), text


def _needed(config: Config, training: bool) -> Iterable[_Problem]:
    """What has no default and must be written; a run also needs data, a place and to be alone."""
    missing = "is missing; it has no default, such as "
    if not config.model.path:
        yield ("model.path",), missing + 'path = "models/my-model"'
    if not training:
        return
    if not config.data.train:
        yield ("data.train",), missing + 'train = ["data.jsonl"]'
    if not config.train.output:
        yield ("train.output",), missing + 'output = "runs/my-run"'
