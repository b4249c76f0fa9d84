"""How the state of an optimizer is stored: rules, formats, and the bytes of each, as data.

A *rule* is the arithmetic (adam for AdamW and Adam, lion, sgd); a *state* is the format of what it keeps (fp32, bf16,
int8, int8-sr).  A `Recipe` is one of each; it answers every question about sizes, so nothing else asks which it is.
What a format means bit by bit is the native library's (`runtime/native.py`, `docs/optimizer.md`).

The trade-off: int8 moments carry one fp32 scale per 256 elements (1.6 % of a byte more per element); smaller blocks
would follow outliers more closely, larger ones would lose the small values beside them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from offloadz.plan.errors import ConfigError

BLOCK_ELEMENTS = 256
"""Elements that share one scale, counted from the start of a parameter's run inside a part; the kernels' `BLOCK`."""

STATES = {"fp32": 4, "bf16": 2, "int8": 1, "int8-sr": 1}
"""Bytes of one stored moment of one element, per format; in the order of fewer bytes and more rounding."""

RULES: dict[str, tuple[str, ...]] = {
    "adam": ("exp_avg", "exp_avg_sq"),
    "lion": ("exp_avg",),
    "sgd": ("momentum_buffer",),
}
"""What a rule keeps per element, by torch's names."""

NAMES = {"adamw": "adam", "adam": "adam", "lion": "lion", "sgd": "sgd"}
"""`optimizer.name` to its rule."""

WEIGHT_BYTES = {"bfloat16": 2, "float32": 4}


@dataclass(frozen=True)
class Recipe:
    """The rule of an update, what it keeps, and in which format."""

    state: str = "fp32"
    rule: str = "adam"
    momentum: bool = True
    """False: sgd without momentum, which keeps nothing."""

    @property
    def moments(self) -> tuple[str, ...]:
        """Names of what is kept per element, in the order of the layout."""
        return RULES[self.rule] if self.momentum else ()

    @property
    def num_moments(self) -> int:
        return len(self.moments)

    @property
    def code_bytes(self) -> int:
        """Bytes of one element of a stored moment."""
        return STATES[self.state]

    @property
    def scaled(self) -> bool:
        """Whether moments are codes with a scale per block."""
        return self.code_bytes == 1

    @property
    def keeps_master(self) -> bool:
        """Whether a bf16 weight has 16 more bits; without them its updates are rounded stochastically."""
        return self.state != "int8-sr"

    @property
    def plain(self) -> Recipe:
        """The first format of the rule; where nothing is kept but low halves each stands for itself."""
        return replace(self, state="fp32") if self.num_moments else self

    def low_item_bytes(self, dtype: str) -> int:
        """Bytes per element of the master's low half: none where the weight itself is fp32."""
        return 2 if self.keeps_master and dtype == "bfloat16" else 0

    def resting_bytes(self, dtype: str) -> float:
        """Bytes kept per parameter between steps: weight, low half, moments with their scales."""
        scales = 4 / BLOCK_ELEMENTS if self.scaled else 0
        return WEIGHT_BYTES[dtype] + self.low_item_bytes(dtype) + self.num_moments * (self.code_bytes + scales)

    def moved_bytes(self, dtype: str) -> float:
        """Bytes an update reads and writes per parameter: its gradient once, the rest in and out."""
        return WEIGHT_BYTES[dtype] + 2 * self.resting_bytes(dtype)

    def told(self, dtype: str) -> str:
        """In words, with the bytes a parameter."""
        kept = {"fp32": "fp32", "bf16": "bf16", "int8": "8-bit", "int8-sr": "8-bit"}[self.state]
        master = "as fp32 masters" if self.keeps_master or dtype == "float32" else "with stochastic rounding"
        moments = f"{kept} {' and '.join(self.moments)}" if self.num_moments else "no moments"
        return f"{master} with {moments}, {self.resting_bytes(dtype):.3g} bytes a parameter at rest"


EXACT = Recipe()
"""AdamW with fp32 masters and moments."""


def recipe_of(name: str, state: str, momentum: float = 0.0) -> Recipe:
    """The recipe of `optimizer.name`, `optimizer.state` and `optimizer.momentum` (of sgd alone).

    Raises ConfigError with the list for a rule or format that is not there.
    """
    if name not in NAMES:
        raise ConfigError(f"optimizer.name = {name!r} is not built; needed: one of {', '.join(NAMES)}")
    if state not in STATES:
        raise ConfigError(f"optimizer.state = {state!r} is not built; needed: one of {', '.join(STATES)}")
    return Recipe(state, NAMES[name], momentum > 0 or NAMES[name] != "sgd")


def check_recipe(recipe: Recipe, dtype: str) -> None:
    """Refuse, as ConfigError, a recipe that has no meaning for a model whose weights are stored in `dtype`."""
    if not recipe.keeps_master and dtype == "float32":
        raise ConfigError(
            f'optimizer.state = "{recipe.state}" with model.dtype = "float32": it saves the low half of bf16 weights, '
            'and these are fp32; write optimizer.state = "int8", or model.dtype = "bfloat16"'
        )


def num_blocks(num_elements: int) -> int:
    """Scales of a run of elements."""
    return -(-num_elements // BLOCK_ELEMENTS)


def cheaper(recipe: Recipe, dtype: str) -> Iterator[Recipe]:
    """Formats that keep less of the same rule, the mildest first."""
    for state in STATES:
        other = replace(recipe, state=state)
        if other.resting_bytes(dtype) < recipe.resting_bytes(dtype) and (other.keeps_master or dtype == "bfloat16"):
            yield other
