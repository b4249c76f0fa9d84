"""Everything that is known before a weight is read: the tokenizer, the samples, how many steps, the plan.

What is wrong is found here, while nothing has been started; what was decided is told in a few lines.  Left to others:
how records become samples (`data.py`), how a plan is found (`plan/search.py`).  The trade-off: all records are read and
tokenised before the first step (about 5 s for 100,000 dialogues), so a bad line in the last file costs no training.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from offloadz.model.optimizer import KINDS, Settings
from offloadz.model.vocabulary import add_tokens
from offloadz.plan.answer import Plan
from offloadz.plan.cut import Cut, cut_words
from offloadz.plan.errors import ConfigError, DoesNotFit
from offloadz.plan.headers import find_directory, local_directory, read_config
from offloadz.plan.machine import rates_told
from offloadz.plan.positions import positions_note
from offloadz.plan.question import question
from offloadz.plan.vocabulary import table_rows, tokenizer_missing
from offloadz.plan.words import counted, human, lasting
from offloadz.runtime.chosen import facts_named
from offloadz.runtime.level import level
from offloadz.runtime.ranks import Solo
from offloadz.runtime.threads import MAX_THREADS, update_threads
from offloadz.train.batches import Loader
from offloadz.train.data import Dataset, load_both, marked_pieces
from offloadz.train.sampling import Prompts
from offloadz.train.templates import ChatTemplate
from offloadz.train.tokens import end_ids

if TYPE_CHECKING:
    from offloadz.config import Config, ModelConfig

NUM_SHOWN, SHOWN_CHARACTERS = 3, 4000
"""Samples that a run leaves to be looked at, and most characters of each."""


@dataclass(frozen=True)
class Task:
    """What is to be trained on, and for how many optimizer steps."""

    samples: Dataset
    evaluation: Dataset | None
    num_steps: int
    prompts: Prompts | None = None
    """What is asked between steps."""
    shown: tuple[dict[str, Any], ...] = ()
    """The first samples as text in runs of (text, trained), as `offloadz data` prints them."""
    ends: tuple[int, ...] = ()
    """Tokens that end an answer, as the data taught it."""

    def to_json(self) -> dict[str, Any]:
        """What `data.json` holds, so that a report needs neither the records nor the tokenizer."""
        audits = {"train": self.samples.audit, "evaluation": self.evaluation.audit if self.evaluation else None}
        told = {name: audit and {"files": audit.files, "lines": audit.lines()} for name, audit in audits.items()}
        return {"num_steps": self.num_steps, **told, "samples": self.shown}


def read_tokenizer(config: Config) -> tuple[Any, int]:
    """The tokenizer of `model.path` with `model.add_tokens`, and the rows of the table it needs; loads no weights."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    from transformers import AutoConfig, AutoTokenizer

    here = local_directory(config.model.path)  # says at once, and more plainly than the hub's client, what is not there
    name, model = here or config.model.path, None
    try:
        trusted = {"trust_remote_code": config.model.trust_remote_code}
        model = AutoConfig.from_pretrained(name, **trusted)
        tokenizer = AutoTokenizer.from_pretrained(name, **trusted)
    except Exception as error:  # a directory of somebody else's making: a broken file there ends in any kind of error
        told = tokenizer_missing(here) if model and here else ""
        if told:
            raise ConfigError(
                f"model.path: {told}, with tokenizer_config.json; copy them from the model whose words these are"
            ) from error
        first = " ".join((str(error).strip() or type(error).__name__).splitlines()[:2])
        below = "" if here else f" (there is no such directory below {os.getcwd()})"
        raise ConfigError(
            f"model.path: {config.model.path} has no model and tokenizer to read{below}: {first}"
        ) from error
    vocab_size = getattr(model.get_text_config(), "vocab_size", None)
    if not isinstance(vocab_size, int):
        raise ConfigError(f"model.path: {config.model.path}/config.json names no vocab_size")
    if config.model.add_tokens:
        vocab_size = _grown(tokenizer, vocab_size, config.model)
    return tokenizer, vocab_size


def _grown(tokenizer: Any, vocab_size: int, model: ModelConfig) -> int:
    """Add the tokens; the rows that the plan and the model count with, held to the ids the tokenizer gave."""
    directory = find_directory(model.path)
    rows = table_rows(directory, model.add_tokens, vocab_size)
    add_tokens(tokenizer, model.add_tokens)
    most = max(tokenizer.convert_tokens_to_ids(list(model.add_tokens)))
    if most >= rows:
        raise ConfigError(
            f"model.add_tokens: the tokenizer of {directory} gives the id {most}, its tokenizer.json leaves room for "
            f"{rows}: tokens of tokenizer_config.json are not in it; save the tokenizer anew with transformers"
        )
    return rows


def read_task(config: Config) -> Task:
    """All samples, checked; ConfigError lists file, line and reason of what cannot be trained on."""
    tokenizer, vocab_size = read_tokenizer(config)
    data, batch_size, seed = config.data, config.train.batch_size, config.train.seed
    samples, evaluation = load_both(data.train, data.eval, tokenizer, data, vocab_size, batch_size, seed)
    per_epoch = Loader(samples, batch_size, seed, data.shuffle).num_batches_per_epoch
    num_steps = config.train.steps or max(1, math.ceil(config.train.epochs * per_epoch - 1e-9))
    if config.optimizer.warmup > num_steps:
        raise ConfigError(
            f"optimizer.warmup is {config.optimizer.warmup:g} steps, the run has {num_steps}; "
            "lower it or raise train.epochs"
        )
    shown = tuple(shown_sample(samples, index, tokenizer) for index in range(min(NUM_SHOWN, len(samples))))
    prompts = _prompts(config, samples.template, vocab_size)
    return Task(samples, evaluation, num_steps, prompts, shown, tuple(sorted(end_ids(tokenizer, samples.template))))


def shown_sample(samples: Dataset, index: int, tokenizer: Any) -> dict[str, Any]:
    """A sample for the eyes of a user: where it stands, its tokens, and its text up to `SHOWN_CHARACTERS`."""
    ids, targets = samples[index]
    pieces, left = [], SHOWN_CHARACTERS
    for text, trained in marked_pieces(samples, index, tokenizer):
        pieces.append((text[:left], trained))
        left -= len(text)
        if left <= 0:
            break
    counts = {"num_tokens": len(ids), "num_trained": int(targets.sum())}
    return {"place": samples.source(index), **counts, "pieces": pieces, "cut": left < 0}


def _prompts(config: Config, template: ChatTemplate | None, vocab_size: int) -> Prompts | None:
    told = config.train
    if not told.sample_prompts:
        return None
    return Prompts(told.sample_prompts, told.sample_tokens, lambda: read_tokenizer(config)[0], template, vocab_size)


def decided(
    config: Config, prompts: Prompts | None, say: Callable[[str], None], ranks: Solo, cut: Cut | None = None
) -> Plan:
    """The plan of a configuration on this box; DoesNotFit names the smallest change that would fit.

    `cut`: of the start that the run goes on from.
    """
    asked = question(config, find=facts_named, cut=cut)
    machine, wishes = level(asked.machine, asked.wishes, ranks)
    asked = replace(asked, machine=machine, wishes=wishes)
    notes = list(asked.notes)
    if prompts is not None:
        told, facts = "train.sample_prompts with train.sample_tokens", read_config(find_directory(config.model.path))
        notes.append(positions_note(asked.spec, facts, prompts.num_positions, told))
    for note in filter(None, notes):
        say(f"note: {note}")
    plan = asked.answer()
    if not plan.fits:
        kept = f". {cut.source} was made in {_cut(plan)}, which a run that goes on keeps" if cut is not None else ""
        raise DoesNotFit(plan.refusal() + kept + (": name what you change in train.resume_with" if kept else ""))
    if moved := cut.moved(plan) if cut is not None else "":
        say(f"resume: {moved}")
    return plan


def _cut(plan: Plan) -> str:
    return cut_words(plan.micro_batch_size, plan.sweeps)


def optimizer_of(config: Config) -> Settings:
    """The optimizer's settings as the Python API takes them."""
    told = config.optimizer
    groups = [{"match": g.match, "lr": g.lr, "weight_decay": g.weight_decay} for g in told.groups]
    kind = KINDS[told.name]
    return kind(groups=groups, no_decay=told.no_decay, state=told.state, **{k: getattr(told, k) for k in kind.keys})


def task_lines(task: Task) -> Iterator[str]:
    """The samples in a few lines."""
    yield from task.samples.audit.lines()
    if task.evaluation is not None:
        audit = task.evaluation.audit
        yield f"evaluation: {audit.num_samples} samples, {audit.num_target_tokens} trained tokens"
        yield from (f"evaluation: {line}" for line in audit.lines()[4:])


def plan_lines(plan: Plan, config: Config, samples: Dataset | None = None) -> Iterator[str]:
    """What was decided, with predicted bytes and times, in a few lines; with `samples`, how full their rows are."""
    place, share = plan.placement, plan.placement.share
    yield (
        f"weights {place.storage}, computed in {place.compute} on the {plan.device}, updated {plan.recipe_told}, "
        f"commit {plan.commit}"
    )
    yield (
        f"parameters on {place.parameters}, gradients on {place.gradients}, optimizer state on {place.optimizer}, "
        f"saved inputs on {place.activations}; {counted(plan.slots, 'slot')}, {_cut(plan)}{share.each}"
    )
    whose = {tier: share.each if tier != "checkpoint" else share.all for tier in plan.peak}
    parts = [f"{t} {human(peak)}{_of(plan.limits.get(t))}{whose[t]}" for t, peak in plan.peak.items() if peak]
    yield f"predicted peaks: {', '.join(parts)} (host memory is limited by {plan.limit_source})"
    yield (
        f"predicted step: {lasting(plan.step_s)}, {plan.tokens_per_s:,.0f} tokens/s{share.all}, bottleneck "
        f"{plan.bottleneck} ({rates_told(plan.rates_source)})"
    )
    if samples is not None and not samples.row_length:
        positions = config.train.batch_size * config.data.max_length
        tokens = config.train.batch_size * samples.audit.num_tokens // max(1, len(samples))
        yield (
            f"predicted for {positions:,} positions a step (rows of data.max_length), about {tokens:,} of them tokens: "
            "shorter rows take less time"
        )
    if plan.wear.written_bytes:
        yield from plan.wear.lines()
    told = ("state on disk in", "recompute", "zero stage")
    yield from (line for line in plan.reasons if line.startswith(told))
    threads, reason = update_threads(threads_asked(config, plan))
    if config.offload.machine != "auto" and not config.offload.threads:
        reason = f"the cores of {plan.machine} that this machine has too"
    yield f"update threads: {threads}{share.each} ({reason})"


def threads_asked(config: Config, plan: Plan) -> int:
    """Threads of the update as `offload.threads` says, else as many as a machine file has cores; 0: all there are."""
    told = config.offload
    return told.threads or (0 if told.machine == "auto" else min(plan.threads, MAX_THREADS))


def _of(limit: int | None) -> str:
    return f" of {human(limit)}" if limit is not None else ""
