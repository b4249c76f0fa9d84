"""`offloadz data`: what became of every record, and the first samples as the model will see them.

The counting is `train/data.py`'s; this room only prints.  Trade-off: the tokenizer and the model's config.json are
read, never its weights, so the audit takes seconds and cannot see what only a forward pass would show.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offloadz.config import load_config
from offloadz.plan.errors import ConfigError

if TYPE_CHECKING:
    from offloadz.train.data import Dataset

_BAR = 40
"""Characters of the longest bar of the histogram."""


def data_command(config_path: Path, overrides: Sequence[str], num_samples: int) -> int:
    """Audit `data.train` and `data.eval`, print samples of the former; 0, or ConfigError for bad data."""
    config = load_config(config_path, overrides)
    if not config.data.train:
        raise ConfigError('data.train is missing; it has no default, such as train = ["data.jsonl"]')
    from rich.console import Console

    from offloadz.train.data import load_both
    from offloadz.train.planning import read_tokenizer

    tokenizer, vocab_size = read_tokenizer(config)
    console = Console(highlight=False, soft_wrap=True)
    data, train = config.data, config.train
    samples, other = load_both(data.train, data.eval, tokenizer, data, vocab_size, train.batch_size, train.seed)
    _print_audit(console, "data.train", samples)
    if other is not None:
        _print_audit(console, "data.eval" if data.eval else f"held out (data.eval_share = {data.eval_share})", other)
    show = _print_rows if samples.row_length else _print_samples
    show(console, samples, tokenizer, num_samples)
    return 0


def _print_audit(console: Any, name: str, dataset: Dataset) -> None:
    """The counts, and how many samples there are of each length."""
    console.print(f"[bold]{name}[/bold]: " + ", ".join(dataset.audit.files))
    for line in dataset.audit.lines(histogram=False):
        console.print("  " + line, markup=False)
    counts = dataset.audit.lengths
    most = max(counts.values())
    for bound, count in sorted(counts.items()):
        bar = "#" * max(1, round(_BAR * count / most))
        console.print(f"  {bound // 2 + 1:>7} - {bound:<7} {bar} {count}", markup=False)


def _print_samples(console: Any, dataset: Dataset, tokenizer: Any, num_samples: int) -> None:
    """The first samples in the order of the files."""
    from offloadz.train.data import marked_pieces

    for index in range(min(num_samples, len(dataset))):
        _print_sample(console, f"sample {index + 1}", dataset, index)
        _print_pieces(console, marked_pieces(dataset, index, tokenizer))


def _print_rows(console: Any, dataset: Dataset, tokenizer: Any, num_samples: int) -> None:
    """The samples of the first packed rows, in the order of the files, as they stand behind each other."""
    from offloadz.train.batches import Loader
    from offloadz.train.data import marked_pieces

    left = num_samples
    for number, row in enumerate(Loader(dataset, 1, shuffle=False).rows, 1):
        if left <= 0:
            return
        for place, index in enumerate(row.tolist()[:left], 1):
            _print_sample(console, f"row {number}, sample {place} of {len(row)}", dataset, index)
            _print_pieces(console, marked_pieces(dataset, index, tokenizer))
        left -= len(row)


def _print_sample(console: Any, name: str, dataset: Dataset, index: int) -> None:
    ids, targets = dataset[index]
    head = f"\n{name}, {dataset.source(index)}: {len(ids)} tokens, {int(targets.sum())} trained"
    console.print(head, markup=False, style="bold")


def _print_pieces(console: Any, pieces: Sequence[tuple[str, bool]]) -> None:
    """Trained text in green; without colours between guillemets, so that a file shows it too."""
    from rich.text import Text

    plain = console.color_system is None
    text = Text()
    for piece, trained in pieces:
        shown = f"«{piece}»" if trained and plain else piece
        text.append(shown, style="bold green" if trained else "dim")
    console.print(text)
