"""Make what `examples/quickstart.toml` trains: a small model, its tokenizer and two files of short dialogues.

    python examples/make_quickstart.py [DIRECTORY]      (default: examples/quickstart)

Everything is drawn from one seed, so the same files come out each time (tests/cpu/test_quickstart.py compares).  The
model is a Llama of 0.9 M parameters and has a config.json only: its random start is drawn when training begins, which
keeps weights out of the repository.  The dialogues are made of templates here and copied from nowhere.  The trade-off:
they are so regular that a few minutes of training show a falling loss; the model learns nothing else.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, PreTrainedTokenizerFast

NUM_TRAIN, NUM_EVAL = 600, 40
VOCAB_SIZE = 640
HIDDEN_SIZE, NUM_LAYERS = 128, 4
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

COLOURS = {
    "the sky at noon": "blue", "fresh grass": "green", "a ripe lemon": "yellow", "snow": "white", "coal": "black",
    "a ripe tomato": "red", "a carrot": "orange", "a violet": "purple", "an elephant": "grey", "chocolate": "brown",
    "a flamingo": "pink", "the sea": "blue", "a frog": "green", "a raven": "black",
}  # fmt: skip
OPPOSITES = {
    "hot": "cold", "big": "small", "early": "late", "open": "closed", "full": "empty", "light": "dark", "dry": "wet",
    "fast": "slow", "high": "low", "old": "new", "loud": "quiet", "near": "far", "soft": "hard", "wide": "narrow",
}  # fmt: skip
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
NAMES = ("Ada", "Ben", "Cleo", "Dora", "Emil", "Finn", "Greta", "Hugo", "Ines", "Jonas", "Kira", "Leo", "Mara", "Nils")
WISHES = {
    "Good morning": "Good morning", "Hello": "Hello", "Good evening": "Good evening", "Hi there": "Hi", "Hey": "Hey",
}  # fmt: skip

Turn = tuple[str, str]


def arithmetic(draw: random.Random) -> Turn:
    """A sum or a difference of small numbers."""
    a, b = draw.randint(0, 20), draw.randint(0, 20)
    if draw.random() < 0.5:
        return f"What is {a} plus {b}?", f"{a} plus {b} is {a + b}."
    a, b = max(a, b), min(a, b)
    return f"What is {a} minus {b}?", f"{a} minus {b} is {a - b}."


def colour(draw: random.Random) -> Turn:
    """The colour of a thing."""
    thing = draw.choice(sorted(COLOURS))
    return f"Which colour has {thing}?", f"The colour of {thing} is {COLOURS[thing]}."


def opposite(draw: random.Random) -> Turn:
    """The opposite of a word."""
    word = draw.choice(sorted(OPPOSITES))
    return f"What is the opposite of {word}?", f"The opposite of {word} is {OPPOSITES[word]}."


def day(draw: random.Random) -> Turn:
    """The day after or before a day."""
    number = draw.randrange(len(DAYS))
    step, word = draw.choice(((1, "after"), (-1, "before")))
    return f"Which day comes {word} {DAYS[number]}?", f"The day {word} {DAYS[number]} is {DAYS[(number + step) % 7]}."


def greeting(draw: random.Random) -> Turn:
    """A greeting that is to be returned with the name."""
    name, wish = draw.choice(NAMES), draw.choice(sorted(WISHES))
    return f"{wish}, my name is {name}.", f"{WISHES[wish]}, {name}. How can I help you today?"


KINDS: tuple[Callable[[random.Random], Turn], ...] = (arithmetic, colour, opposite, day, greeting)


def dialogues(seed: int) -> Iterator[dict[str, list[dict[str, str]]]]:
    """Records in the messages form without end: one or two questions, sometimes under a system message."""
    draw = random.Random(seed)
    while True:
        messages = []
        if draw.random() < 0.3:
            messages.append({"role": "system", "content": "Answer in one short sentence."})
        for _ in range(draw.choice((1, 1, 2))):
            question, answer = draw.choice(KINDS)(draw)
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        yield {"messages": messages}


def write_dialogues(directory: Path) -> list[str]:
    """Write train.jsonl and eval.jsonl; returns the contents of all messages."""
    source = dialogues(seed=1)
    train = [next(source) for _ in range(NUM_TRAIN)]
    fresh = (record for record in source if record not in train)
    held_out = [next(fresh) for _ in range(NUM_EVAL)]
    for name, records in (("train", train), ("eval", held_out)):
        lines = [json.dumps(record) + "\n" for record in records]
        (directory / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    return [m["content"] for record in train for m in record["messages"]]


def write_tokenizer(directory: Path, contents: list[str]) -> None:
    """A byte-level BPE of at most VOCAB_SIZE tokens trained on the dialogues, with ChatML's tokens and template."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(contents, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=512,
        chat_template=CHATML,
    )
    fast.save_pretrained(directory)


def write_config(directory: Path) -> None:
    """config.json of a small Llama; its weights are drawn when training begins (`model.init = "random"`)."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=352,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
        tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
    )
    config.save_pretrained(directory)


def make(directory: Path) -> None:
    """Write everything into `directory`."""
    model = directory / "model"
    model.mkdir(parents=True, exist_ok=True)
    write_tokenizer(model, write_dialogues(directory))
    write_config(model)


if __name__ == "__main__":
    make(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "quickstart")
