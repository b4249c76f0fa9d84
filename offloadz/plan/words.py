"""Figures as people read and write them: bytes, seconds, counts; and the name that was meant by one that is none.

What a program reads (`--json`, plan.json, metrics.jsonl) keeps bare numbers.  The trade-off: three digits at most, so
two figures that differ by less look alike.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import SequenceMatcher

_SIZE_UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_SIZE_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}

UNITS = (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))
"""In which bytes are told, and from how many on."""


def human(nbytes: int, up: bool = False) -> str:
    """Bytes for people, in a unit that the configuration takes back; `up` rounds so that it never says too little."""
    for unit, size in UNITS:
        if nbytes >= size:
            tenths = -(-nbytes * 10 // size) if up else round(nbytes * 10 / size)
            return f"{tenths / 10:.1f}{unit}"
    return f"{nbytes}B"


def parse_bytes(text: str) -> int:
    """Bytes of a size such as "22GiB" or "1.5 TB" (rounded down); ValueError without a unit or at zero."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", text) if isinstance(text, str) else None
    unit = _SIZE_UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise ValueError('needs a size with a unit out of B, KiB, MiB, GiB, TiB, KB, MB, GB, TB, such as "22GiB"')
    size_bytes = int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit
    if size_bytes <= 0:
        raise ValueError('needs a size above zero, such as "22GiB"')
    return size_bytes


def lasting(seconds: float) -> str:
    """A time such as "0.25 s", "950 s", "28 min" or "4 h 35 min"."""
    if seconds < 999.5:
        return f"{seconds:.3g} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours:,} h {minutes} min" if hours else f"{minutes} min"


def difference(ratio: float, unit: str) -> str:
    """Measured over predicted in words, such as "+20%"; beyond a factor of two the factor.  `unit`: "s" for times."""
    if ratio >= 2:
        return f"{ratio:,.{1 if ratio < 10 else 0}f} times as {'long' if unit == 's' else 'much'}"
    return f"{ratio - 1:+.0%}" if ratio > 0.5 else f"{ratio:.2f} of it"


def counted(number: int, thing: str) -> str:
    """Such as "1 slot" and "2 slots"."""
    return f"{number:,} {thing}" if number == 1 else f"{number:,} {thing}s"


def nearest(name: str, known: Iterable[str]) -> str:
    """The known name closest to `name` ("" when none is close); the same letters in another order count as close."""

    def closeness(other: str) -> float:
        left, right = name.lower(), other.lower()
        return SequenceMatcher(None, left, right).ratio() + 0.5 * (sorted(left) == sorted(right))

    best = max(known, key=closeness, default="")
    return best if best and closeness(best) >= 0.55 else ""
