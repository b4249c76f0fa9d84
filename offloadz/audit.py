"""`offloadz data`: what became of every record, and the first samples as the model will see them.

The counting is `train/data.py`'s; this room only prints.  Trade-off: the tokenizer and the model's config.json are
read, never its weights, so the audit takes seconds and cannot see what only a forward pass would show.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from offloadz.config import load_config
from offloadz.plan.errors import ConfigError


def data_command(config_path: Path, overrides: Sequence[str], num_samples: int) -> int:
    """Audit `data.train` and `data.eval`, print samples of the former; 0, or ConfigError for bad data."""
    config = load_config(config_path, overrides)
    if not config.data.train:
        raise ConfigError('data.train is missing; it has no default, such as train = ["data.jsonl"]')
    from rich.console import Console

    from offloadz.train.data import load_dataset, marked_pieces
    from offloadz.train.planning import read_tokenizer

    tokenizer, vocab_size = read_tokenizer(config)
    console = Console(highlight=False, soft_wrap=True)
    for name, patterns in (("data.train", config.data.train), ("data.eval", config.data.eval)):
        if not patterns:
            continue
        dataset = load_dataset(patterns, tokenizer, config.data, vocab_size)
        console.print(f"[bold]{name}[/bold]: " + ", ".join(dataset.audit.files))
        for line in dataset.audit.lines():
            console.print("  " + line, markup=False)
        for index in range(min(num_samples, len(dataset)) if name == "data.train" else 0):
            ids, targets = dataset[index]
            head = f"\nsample {index + 1}, {dataset.source(index)}: {len(ids)} tokens, {int(targets.sum())} trained"
            console.print(head, markup=False, style="bold")
            _print_pieces(console, marked_pieces(dataset, index, tokenizer))
    return 0


def _print_pieces(console: Any, pieces: Sequence[tuple[str, bool]]) -> None:
    """Trained text in green; without colours between guillemets, so that a file shows it too."""
    from rich.text import Text

    plain = console.color_system is None
    text = Text()
    for piece, trained in pieces:
        shown = f"«{piece}»" if trained and plain else piece
        text.append(shown, style="bold green" if trained else "dim")
    console.print(text)
