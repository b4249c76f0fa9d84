"""One value of the configuration: what a field accepts, sizes and times as people write them, and TOML text.

The room turns what `tomllib` or the command line gave into the value a field holds, or says why not.  It knows no
key by name (that is `read.py`) and no foreign trainer (`names.py`).  Trade-off: the checks are some 150 plain
lines rather than a validation library, because every message must name the place, the value found and what is needed.
"""

import dataclasses
import json
import math
import re
import tomllib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from offloadz.plan.words import nearest, parse_bytes

_TIME_UNITS_S = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_NULLS = {"none", "null", "nil"}
_LARGEST_INT = 2**63 - 1


class Every(NamedTuple):
    """A rhythm: every `num_steps` optimizer steps, or every `wait_s` seconds; both zero means never."""

    num_steps: int
    wait_s: float


@dataclasses.dataclass(frozen=True)
class Rule:
    """What one field accepts; `low` and `high` are inclusive unless `above`/`below` say otherwise."""

    kind: str
    doc: str
    choices: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()  # values of the contract that `NOT_BUILT` refuses by name
    low: float | None = None
    above: float | None = None
    high: float | None = None
    below: float | None = None
    free: bool = False  # never changes a number of the run: may differ from the checkpoint on resume


def parse_every(value: int | str) -> Every:
    """The rhythm of 100, "100", "90s", "30min", "1.5h" or "1d"; 0 is never.  ValueError for anything else."""
    text = str(value).strip() if not isinstance(value, bool) else ""
    if re.fullmatch(r"\d+", text):
        return Every(int(text), 0.0)
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|min|h|d)", text)
    if match is None or float(match[1]) <= 0:
        raise ValueError('needs a number of steps or a time in s, min, h or d, such as 100 or "30min" (0: never)')
    return Every(0, float(match[1]) * _TIME_UNITS_S[match[2]])


def shown(value: object) -> str:
    """A value as the user would write it, cut to 60 characters."""
    try:
        text = to_toml(value)
    except TypeError:
        text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def to_toml(value: Any) -> str:
    """TOML text of a field's value; reading it back gives an equal value."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return "[" + ", ".join(to_toml(item) for item in value) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(k)} = {to_toml(v)}" for k, v in value.items() if v is not None) + "}"
    raise TypeError(f"no TOML form for {type(value).__name__}")


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else to_toml(name)


def from_command_line(raw: str, rule: Rule) -> Any:
    """The value `raw` means for a field: TOML syntax, and for text also a bare word or path."""
    try:
        parsed = tomllib.loads("value = " + raw)
        value = parsed["value"] if len(parsed) == 1 else raw
    except (tomllib.TOMLDecodeError, RecursionError):
        value = raw
    if rule.kind in ("text", "size", "every") and not isinstance(value, bool | list | dict):
        # A bare 2024-01-01 or 7 is a fine directory name: text stays the text that was typed.
        return value if isinstance(value, str) else raw
    if rule.kind == "texts" and isinstance(value, str):
        return [value]
    return value


def checked(value: Any, rule: Rule) -> Any:
    """`value` as the field holds it (lists as tuples); ValueError saying what is needed."""
    return _CHECKS[rule.kind](value, rule)


def _text(value: Any, rule: Rule) -> str:
    if not isinstance(value, str):
        raise ValueError("needs one of " + ", ".join(rule.choices) if rule.choices else 'needs text, such as "name"')
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError("needs text in UTF-8") from None
    if rule.choices and value not in (*rule.choices, *rule.refused):
        hint = nearest(value, rule.choices)
        raise ValueError("needs one of " + ", ".join(rule.choices) + (f"; nearest is {hint}" if hint else ""))
    if not rule.choices and value.strip().lower() in _NULLS:
        raise ValueError('needs a real value; there is no null here: leave the key out, or write ""')
    return value


def _bounded(value: Any, rule: Rule, needed: str) -> Any:
    outside = (
        (rule.low is not None and value < rule.low, f"at least {rule.low}"),
        (rule.above is not None and value <= rule.above, f"above {rule.above}"),
        (rule.high is not None and value > rule.high, f"at most {rule.high}"),
        (rule.below is not None and value >= rule.below, f"below {rule.below}"),
    )
    for wrong, bound in outside:
        if wrong:
            raise ValueError(f"needs {needed} {bound}")
    return value


def _int(value: Any, rule: Rule) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        whole = isinstance(value, float) and math.isfinite(value) and value == int(value)
        raise ValueError("needs a whole number" + (f", written {int(value)}" if whole else ""))
    if abs(value) > _LARGEST_INT:
        raise ValueError("needs a whole number below 2^63")
    return int(_bounded(value, rule, "a whole number"))


def _float(value: Any, rule: Rule) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError("needs a finite number, such as 1e-5")
    return float(_bounded(float(value), rule, "a number"))


def _bool(value: Any, rule: Rule) -> bool:
    if not isinstance(value, bool):
        raise ValueError("needs true or false")
    return value


def _texts(value: Any, rule: Rule) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
        raise ValueError('needs a list of texts, such as ["a", "b"]')
    if "" in value:
        raise ValueError('needs a list without empty texts; write [] for "none"')
    return tuple(_text(item, rule) for item in value)


def _ints(value: Any, rule: Rule) -> tuple[int, ...]:
    if not isinstance(value, list | tuple):
        raise ValueError("needs a list of whole numbers, such as [1, 2]")
    return tuple(_int(item, rule) for item in value)


def _pair(value: Any, rule: Rule) -> tuple[float, float]:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise ValueError("needs two numbers, such as [0.9, 0.95]")
    return _float(value[0], rule), _float(value[1], rule)


def _size(value: Any, rule: Rule) -> str:
    if value != "auto":
        try:
            parse_bytes(value)
        except ValueError as error:
            raise ValueError(f'{error}, or "auto"') from None
    return str(value)


def _every(value: Any, rule: Rule) -> int | str:
    if not isinstance(value, int | str):
        raise ValueError('needs a number of steps or a time, such as 100 or "30min" (0: never)')
    every = parse_every(value)
    return every.num_steps if every.wait_s == 0 else str(value)


_CHECKS: dict[str, Callable[[Any, Rule], Any]] = {
    "text": _text,
    "texts": _texts,
    "int": _int,
    "ints": _ints,
    "float": _float,
    "pair": _pair,
    "bool": _bool,
    "size": _size,
    "every": _every,
}
