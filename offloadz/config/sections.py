"""The sections of a configuration: every key with its default, its bounds and what it means.

Frozen dataclasses whose fields carry their `Rule` (see `values.py`); checking and reading is `read.py`'s.
Trade-off: the classes stand in one file rather than beside their owners, so that reading a configuration imports
neither torch nor the rooms (`offloadz --help` answers in a fifth of a second).
"""

import dataclasses
from typing import Any

from offloadz.config.values import Rule
from offloadz.plan.words import parse_bytes

ENDINGS = (".jsonl", ".json", ".parquet")
"""Of names that mean files of records; others may be data sets of the hub."""

_TIERS = ("auto", "device", "host", "disk")


def _key(default: Any, kind: str, doc: str, **rule: Any) -> Any:
    return dataclasses.field(default=default, metadata={"rule": Rule(kind, doc, **rule)})


def rules(section: type) -> dict[str, Rule]:
    """The rule of each key of a section, in the order of the file."""
    return {field.name: field.metadata["rule"] for field in dataclasses.fields(section)}


@dataclasses.dataclass(frozen=True)
class GroupConfig:
    """One entry of `optimizer.groups`: parameters whose name matches take these settings; None: the section's."""

    match: tuple[str, ...] = _key((), "texts", "name patterns")
    lr: float | None = _key(None, "float", "learning rate", low=0)
    weight_decay: float | None = _key(None, "float", "weight decay", low=0)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """What is trained."""

    path: str = _key(
        "", "text", "Hugging Face directory (config.json, safetensors, tokenizer), or whole name on the hub: org/name"
    )
    init: str = _key("pretrained", "text", "random: config.json only", choices=("pretrained", "random"))
    dtype: str = _key(
        "bfloat16", "text", "working weights and compute", choices=("bfloat16", "float32"), refused=("float16",)
    )
    keep_float32: tuple[str, ...] = _key((), "texts", "name patterns kept in fp32 in compute, storage, checkpoint")
    freeze: tuple[str, ...] = _key((), "texts", "name patterns: no gradient, no state, no write-back")
    attention: str = _key("auto", "text", "auto | eager | sdpa: what transformers takes")
    kernels: str = _key(
        "auto",
        "text",
        "kernels of the blocks: torch's own (auto, eager), compiled by a compiler that must be there, or Liger's",
        choices=("auto", "eager", "compile", "liger"),
    )
    add_tokens: tuple[str, ...] = _key((), "texts", "special tokens a template needs; the table grows")
    trust_remote_code: bool = _key(False, "bool", "run Python files that lie beside the model")


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """What it is trained on."""

    train: tuple[str, ...] = _key(
        (), "texts", "files, globs, or data sets of the hub: org/name[/path][@revision][:split]"
    )
    eval: tuple[str, ...] = _key((), "texts", "as train")
    eval_share: float = _key(0.0, "float", "instead of eval files: share of train held out", low=0, below=1)
    format: str = _key(
        "auto",
        "text",
        "form of the records; auto is found per file",
        choices=("auto", "messages", "sharegpt", "alpaca", "prompt_completion", "text"),
    )
    max_length: int = _key(2048, "int", "tokens per sample", low=2)
    on_long: str = _key("drop", "text", "longer samples", choices=("drop", "cut_left", "cut_right", "error"))
    on_bad: str = _key("stop", "text", "records that cannot be read", choices=("stop", "skip"))
    packing: bool = _key(True, "bool", "samples in one row never see each other; positions restart")
    train_on: str = _key("assistant", "text", "which turns are targets", choices=("assistant", "last", "all"))
    chat_template: str = _key("", "text", 'file, or built-in: chatml | llama3 | gemma | mistral; "": the tokenizer\'s')
    shuffle: bool = _key(True, "bool", "a new order of rows each epoch; false: file order")


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """How long, how many rows at a time, and what is kept."""

    output: str = _key("", "text", "run directory", free=True)
    steps: int = _key(0, "int", "optimizer steps; 0: use epochs", low=0)
    epochs: float = _key(1.0, "float", "passes over the data", above=0)
    batch_size: int = _key(32, "int", "rows per optimizer step over all ranks", low=1)
    micro_batch_size: int = _key(
        0, "int", "rows at a time; 0: the plan decides, and a run that goes on keeps it", low=0
    )
    seed: int = _key(0, "int", "order of rows, dropout, random weights", low=0)
    log_every: int = _key(1, "int", "steps between log lines", low=1, free=True)
    eval_every: int = _key(0, "int", "steps between evaluations; 0: never in between", low=0)
    sample_prompts: tuple[str, ...] = _key(
        (),
        "texts",
        "what the model is asked between steps (dialogues: as a user's turn); answers go into the log",
        free=True,
    )
    sample_every: int = _key(
        0, "int", "steps between samples; 0: with each evaluation and at the end", low=0, free=True
    )
    sample_tokens: int = _key(64, "int", "most tokens of a sample's answer", low=1, free=True)
    save_every: int | str = _key("30min", "every", "steps or time; 0: never in between", free=True)
    keep: int = _key(
        0, "int", "checkpoints with optimizer state that stay; 0: 2, or 1 where they are links to state on disk",
        low=0, free=True,
    )  # fmt: skip
    keep_weights: int = _key(0, "int", "weights-only exports kept besides", low=0, free=True)
    resume: str = _key("auto", "text", "auto | never | a checkpoint directory", free=True)
    resume_with: tuple[str, ...] = _key((), "texts", "keys allowed to differ from the checkpoint", free=True)
    max_skipped: int = _key(8, "int", "updates skipped in a row before the run ends with status 1", low=0, free=True)
    trace_steps: tuple[int, ...] = _key((), "ints", "steps whose measured timeline is written", low=1, free=True)


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """How weights are updated."""

    name: str = _key("adamw", "text", "the rule", choices=("adamw", "adam", "lion", "sgd"))
    lr: float = _key(1e-5, "float", "learning rate at the top of the schedule", low=0)
    betas: tuple[float, float] = _key(
        (0.9, 0.95), "pair", "adamw, adam: decay of the moments; lion: of the step and of its moment", low=0, below=1
    )
    eps: float = _key(1e-8, "float", "adamw, adam: added to the root of the second moment", above=0)
    momentum: float = _key(0.9, "float", "of sgd; 0 keeps nothing", low=0, below=1)
    weight_decay: float = _key(0.0, "float", "decoupled (adamw, lion) or added to the gradient (adam, sgd)", low=0)
    no_decay: tuple[str, ...] = _key(("*norm*", "*bias*"), "texts", "name patterns without weight decay")
    groups: tuple[GroupConfig, ...] = _key(
        (),
        "groups",
        'each match with lr, weight_decay or both, such as [{match = ["*.embed*"], lr = 1e-6}]; a pattern that matches '
        "no parameter is an error",
    )
    max_grad_norm: float = _key(1.0, "float", "clipping of the global norm; 0: off", low=0)
    schedule: str = _key("cosine", "text", "after the warm-up", choices=("cosine", "linear", "constant"))
    warmup: float = _key(0.03, "float", "below 1 a share of all steps, else steps", low=0)
    min_lr: float = _key(0.0, "float", "where the schedule ends, a share of lr", low=0, high=1)
    state: str = _key("fp32", "text", "how the state is stored", choices=("fp32", "bf16", "int8", "int8-sr"))


@dataclasses.dataclass(frozen=True)
class OffloadConfig:
    """Where bytes live and how they move; `auto` and 0 leave it to the plan."""

    device: str = _key("auto", "text", "what computes: cpu | cuda:0 | auto (a GPU if there is one)", free=True)
    parameters: str = _key("auto", "text", "tier of the parameters", choices=_TIERS, free=True)
    gradients: str = _key("auto", "text", "tier of the gradients", choices=_TIERS, free=True)
    optimizer: str = _key("auto", "text", "tier of the optimizer state", choices=_TIERS, free=True)
    activations: str = _key("auto", "text", "tier of the inputs of blocks", choices=_TIERS, free=True)
    swap: tuple[str, ...] = _key((), "texts", "directories; of several each gets a share by its speed", free=True)
    machine: str = _key(
        "auto", "text", "a machine file or name of the catalogue; auto: this box's last bench", free=True
    )
    device_memory: str = _key("auto", "size", 'most bytes used there, such as "22GiB"', free=True)
    host_memory: str = _key("auto", "size", 'most bytes used there, such as "48GiB"', free=True)
    slots: int = _key(0, "int", "blocks in flight; 0: the plan decides", low=0, free=True)
    recompute: str = _key(
        "auto", "text", "blocks run again in the backward; auto: those without room, or with inputs on disk; "
        "cheap: all but their products", choices=("auto", "all", "none", "cheap"), free=True,
    )  # fmt: skip
    sweeps: int = _key(
        0, "int", "passes over the blocks per step; 0: the plan decides, and a run that goes on keeps it", low=0
    )
    commit: str = _key(
        "auto", "text", "when updates become final", choices=("auto", "hold", "shadow", "in_place"), free=True
    )
    checksum: bool = _key(True, "bool", "CRC32C of every piece on disk", free=True)
    io: str = _key("auto", "text", "disk back end", choices=("auto", "io_uring", "threads"), free=True)
    threads: int = _key(0, "int", "of the update; 0: cores allowed / local ranks", low=0, high=256, free=True)
    zero_stage: str | int = _key("auto", "stage", "auto | 0-3, with torchrun", free=True)

    @property
    def device_memory_bytes(self) -> int | None:
        """Bytes of `device_memory`, None for auto."""
        return None if self.device_memory == "auto" else parse_bytes(self.device_memory)

    @property
    def host_memory_bytes(self) -> int | None:
        """Bytes of `host_memory`, None for auto."""
        return None if self.host_memory == "auto" else parse_bytes(self.host_memory)


@dataclasses.dataclass(frozen=True)
class DebugConfig:
    """For looking for errors in offloadz itself."""

    poison: bool = _key(False, "bool", "NaN into freed slots, random delays before every transfer", free=True)
    samples: bool = _key(False, "bool", "ids of the step's samples into metrics.jsonl", free=True)


SECTIONS: dict[str, type] = {
    "model": ModelConfig,
    "data": DataConfig,
    "train": TrainConfig,
    "optimizer": OptimizerConfig,
    "offload": OffloadConfig,
    "debug": DebugConfig,
}
RULES: dict[str, dict[str, Rule]] = {section: rules(kind) for section, kind in SECTIONS.items()}
