"""Machine files: a box written down as TOML, and the boxes and parts that come along by name.

Every figure may name its source (`{ value = 7.0e9, source = "..." }`, else the `source` of its table or of the file);
without one it counts as typical and unverified.  A box may name parts of the catalogue (a GPU, its link, memory,
drives): their figures hold where the file has none of its own.  What several lanes get of memory and drives at once
follows from what one gets alone, by typical shares, where a file does not tell it.  What else a file leaves out is
taken from this box.  Left to others: what this box has (`machine.py`), and whether a run may use a file's limits
(`question.py`).  The trade-off: a box has one GPU, because plans for several are not built.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from offloadz.plan.errors import ConfigError
from offloadz.plan.machine import COMPUTING, TYPICAL_RATES, UNVERIFIED, Drive, Machine
from offloadz.plan.rooms import drive_of
from offloadz.plan.words import nearest, parse_bytes

FOLDER = Path(__file__).parent / "machines"

BYTES, RATE, FLOPS, UPDATES, COUNT, TEXT, TABLE, NOTES = (
    "bytes", "bytes/s", "flop/s", "parameters/s", "count", "text", "table", "notes",
)  # fmt: skip
UNITS = {
    "host": {"memory": BYTES, "cores": COUNT},
    "rates": {
        "device": FLOPS, **dict.fromkeys(COMPUTING, FLOPS), "float32_few": FLOPS, "memory": RATE,
        "memory_shared": RATE, "h2d": RATE, "d2h": RATE, "cpu": UPDATES, "cpu_bf16": UPDATES, "cpu_int8": UPDATES,
        "cpu_int8_sr": UPDATES,
    },
    "gpu": {"memory": BYTES, **dict.fromkeys(COMPUTING, FLOPS), "bandwidth": RATE, "h2d": RATE, "d2h": RATE},
    "drive": {"size": BYTES, "read": RATE, "write": RATE, "both": RATE, "read_parts": RATE, "write_parts": RATE,
              "endurance": BYTES},
}  # fmt: skip
"""The figures of each table of a machine file, with their units."""
LANES = {
    "read": "disk_read", "write": "disk_write", "both": "disk_both", "read_parts": "disk_read_parts",
    "write_parts": "disk_write_parts",
}  # fmt: skip
"""Keys of [[drive]] that are rates, and what they are called in `Machine.rates`."""
PARTS = {"drive": ("drives", "drive"), "ram": ("memories", "rates"), "gpu": ("gpus", "gpu"), "link": ("links", "gpu")}
"""Kinds of parts: the file that lists them, and the table of a machine file whose figures they are."""

GPU_MEMORY = "device_memory"

MEMORY_SHARED = 0.8
"""Of the rate of memory alone what an update and copies get of it together: `offloadz bench` found 0.71 and 0.78 on a
virtual machine of two cores; typical, unverified."""

_WORDS = {
    "": {"name": TEXT, "source": TEXT, "host": TABLE, "rates": TABLE, "gpu": TABLE, "drive": TABLE,
         "conditions": NOTES, "spread": NOTES},
    "host": {"ram": TEXT, "source": TEXT},
    "rates": {"source": TEXT},
    "gpu": {"model": TEXT, "link": TEXT, "source": TEXT},
    "drive": {"model": TEXT, "path": TEXT, "source": TEXT},
}  # fmt: skip
"""What else may stand in each table; [conditions] and [spread] are for people, and hold anything."""


@dataclass(frozen=True)
class Figure:
    """A number with the place where it comes from."""

    value: float
    source: str


def machine_names() -> list[str]:
    """Names of the boxes that come along."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def read_machine(told: str, base: Machine, swap: Sequence[Path] = (), gpu: bool = True) -> Machine:
    """The machine of a file or a catalogue name; what it leaves out is that of `base`.

    `swap`: the directories whose drives count.  `gpu`: whether the box's GPU computes, if it has one, or its CPU.
    Raises ConfigError that names file and field for what is wrong.
    """
    path = _found(told)
    tables = _tables(path)
    _known(tables, "", path)
    default = _text(tables, "source", path, UNVERIFIED)
    host = _figures(tables.get("host", {}), "host", path, default)
    ram = _text(tables.get("host", {}), "ram", path, "")
    rates = {
        **(part("ram", ram, f"{path}: host.ram =") if ram else {}),
        **_figures(tables.get("rates", {}), "rates", path, default),
    }
    rates = _with_shared(rates)
    card = _card(tables["gpu"], path, default) if "gpu" in tables else {}
    drive, disk = _drive_of(tables.get("drive", []), path, default, swap)
    lanes = {**rates, **{LANES[key]: disk[key] for key in LANES if key in disk}}
    memory = int(host["memory"].value) if "memory" in host else base.host_bytes
    found = replace(
        base,
        name=_text(tables, "name", path, path.stem),
        host_bytes=memory,
        device_bytes=memory,
        host_source=f"machine file {path.name}, {host['memory'].source}" if "memory" in host else base.host_source,
        cores=int(host["cores"].value) if "cores" in host else base.cores,
        drive=drive,
        gpu=_text(tables["gpu"], "model", path, "a GPU") if card else "",
    )
    if gpu and card:
        of_cpu = {"device", "h2d", "d2h", "float32_few", *COMPUTING}
        lanes = {lane: figure for lane, figure in lanes.items() if lane not in of_cpu} | card
        found = replace(found, device="cuda", unified=False, device_bytes=int(lanes.pop(GPU_MEMORY).value))
    told_of = f"machine file {path.name} ({_sources(lanes)})" if lanes else base.rates_source
    return replace(found, rates={**base.rates, **{lane: f.value for lane, f in lanes.items()}}, rates_source=told_of)


def part(kind: str, name: str, where: str) -> dict[str, Figure]:
    """The figures of a part of the catalogue; ConfigError with the nearest name where there is none."""
    path, section = FOLDER / "parts" / f"{PARTS[kind][0]}.toml", PARTS[kind][1]
    known = _tables(path)
    if name not in known:
        raise ConfigError(f"{where} {name!r} is not in the catalogue{_hint(name, known)}")
    return _figures(known[name], section, path, UNVERIFIED)


def with_part(machine: Machine, kind: str, name: str) -> Machine:
    """The box with another GPU, link or memory of the catalogue; ConfigError with the nearest name of what is none."""
    figures = part(kind, name, kind)
    if kind == "ram":
        return with_rates(machine, _with_shared(figures))
    if kind == "link" and machine.unified:
        raise ConfigError(f"link {name!r}: {machine.name} computes on its CPU; name its GPU first, --set gpu=NAME")
    if kind == "gpu":
        figures = {**(part("link", "pcie4-x16", "link") if machine.unified else {}), **figures}
        size = int(figures.pop("memory").value)
        own = {lane: rate for lane, rate in machine.rates.items() if lane not in (*COMPUTING, "float32_few")}
        machine = replace(machine, device="cuda", unified=False, device_bytes=size, gpu=name, rates=own)
    return with_rates(machine, figures)


def with_drives(machine: Machine, names: Sequence[str]) -> Machine:
    """The box with drives of the catalogue, one for each swap path; a share of everything lies on each."""
    rated = [_with_both(part("drive", name, "drive")) for name in names]
    drive, figures = _together([(_drive(name, one), one) for name, one in zip(names, rated, strict=True)])
    return with_rates(replace(machine, drive=drive), {LANES[key]: figures[key] for key in LANES if key in figures})


def with_rates(machine: Machine, figures: Mapping[str, Figure]) -> Machine:
    """The box with other rates; one of the device holds whatever it computes in, until one for that is told."""
    told = machine.rates_source.removesuffix(" and --set")
    computing = (*COMPUTING, "float32_few")
    kept = {k: rate for k, rate in machine.rates.items() if "device" not in figures or k not in computing}
    rates = {**kept, **{lane: figure.value for lane, figure in figures.items()}}
    for shared, alone in (("memory_shared", lambda r: r["memory"]), ("disk_both", _in_turn)):
        if shared in kept and shared not in figures:  # as much of the new rates as it was of the old ones
            rates[shared] = kept[shared] * alone(rates) / alone(machine.rates)
    return replace(machine, rates=rates, rates_source=f"{told} and --set")


def _with_shared(figures: dict[str, Figure]) -> dict[str, Figure]:
    """Figures of memory with what an update and copies get of it together."""
    if "memory" not in figures or "memory_shared" in figures:
        return figures
    told = Figure(MEMORY_SHARED * figures["memory"].value, f"{MEMORY_SHARED} of memory alone ({UNVERIFIED})")
    return {**figures, "memory_shared": told}


def _with_both(figures: dict[str, Figure]) -> dict[str, Figure]:
    """Figures of a drive with what it reads and writes at once: no more than in turn (docs/published.md)."""
    if not {"read", "write"} <= set(figures) or "both" in figures:
        return figures
    rate = _in_turn({LANES[key]: figures[key].value for key in ("read", "write")})
    return {**figures, "both": Figure(rate, f"as much as in turn ({UNVERIFIED})")}


def _in_turn(rates: Mapping[str, float]) -> float:
    """Bytes/s of a drive that reads as much as it writes, one after the other."""
    return 2 / (1 / rates["disk_read"] + 1 / rates["disk_write"])


def part_names(kind: str) -> list[str]:
    """Names of all parts of a kind."""
    return list(_tables(FOLDER / "parts" / f"{PARTS[kind][0]}.toml"))


def _found(told: str) -> Path:
    """The file that is meant: a path, or a name of the catalogue."""
    path = Path(told).expanduser()
    if path.suffix == ".toml" or "/" in told:
        if not path.is_file():
            raise ConfigError(f"machine file {told}: there is no such file")
        return path
    if told not in machine_names():
        raise ConfigError(
            f"machine {told!r} is not in the catalogue{_hint(told, machine_names())}; "
            f"a file is named with its path, ./{told}.toml"
        )
    return FOLDER / f"{told}.toml"


def _tables(path: Path) -> dict[str, Any]:
    from offloadz.config.read import read_toml

    try:
        return read_toml(path)[1]
    except ConfigError as error:
        raise ConfigError(str(error).replace("the configuration", "the machine file", 1)) from None


def _hint(name: str, known: Any) -> str:
    """`; nearest is ...`, or all there are."""
    guess = nearest(name, known)
    return f"; nearest is {guess}" if guess else f"; there are {', '.join(known)}"


def _known(table: object, section: str, path: Path) -> Mapping[str, Any]:
    """The table, once all its keys are known ones."""
    if not isinstance(table, Mapping):
        raise ConfigError(f"{path}: {section} needs a table, found {table!r}")
    keys = {**UNITS.get(section, {}), **_WORDS[section]}
    for key in table:
        if key not in keys:
            where = f"{section}.{key}" if section else key
            raise ConfigError(f"{path}: unknown key {where}{_hint(key, keys)}")
    return table


def _text(table: object, key: str, path: Path, default: str) -> str:
    value = table.get(key, default) if isinstance(table, Mapping) else default
    if not isinstance(value, str):
        raise ConfigError(f"{path}: {key} needs text, found {value!r}")
    return value


def _figures(table: object, section: str, path: Path, default: str) -> dict[str, Figure]:
    """The numbers of a table; sizes and rates may be text with a unit."""
    known = _known(table, section, path)
    source = _text(known, "source", path, default)
    return {
        key: _figure(known[key], unit, f"{path}: {section}.{key}", source)
        for key, unit in UNITS[section].items()
        if key in known
    }


def _figure(value: Any, unit: str, where: str, source: str) -> Figure:
    if isinstance(value, Mapping):
        if set(value) - {"value", "source"} or "value" not in value or not isinstance(value.get("source", ""), str):
            raise ConfigError(f'{where} needs {{ value = ..., source = "..." }}, found the keys {", ".join(value)}')
        value, source = value["value"], value.get("source", source)
    try:
        return Figure(number(value, unit), source)
    except ValueError as error:
        raise ConfigError(f"{where} = {value!r}: {error}") from None


WITH_UNIT = {BYTES: "64GB", RATE: "7GB/s", FLOPS: "165TFLOPS"}
"""Units that a figure may be told in, with an example; without one it counts single bytes and operations."""


def number(value: Any, unit: str) -> float:
    """A figure above zero in `unit`, a number or text with its unit; ValueError says what is needed."""
    if isinstance(value, str) and unit in WITH_UNIT:
        value = _with_unit(value, unit)
    whole = unit in (COUNT, BYTES)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        more = f', or text with a unit such as "{WITH_UNIT[unit]}"' if unit in WITH_UNIT else ""
        raise ValueError(f"needs a number above 0 ({unit}){more}")
    if (whole and value < 1) or (unit == COUNT and value != int(value)):
        raise ValueError("needs a whole number from 1 on")
    return float(value)


def _with_unit(text: str, unit: str) -> float:
    if unit == FLOPS:
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([GTP])FLOPS?(?:/s)?\s*", text, re.IGNORECASE)
        if found is None:
            raise ValueError(f'needs operations a second, such as "{WITH_UNIT[FLOPS]}" or 1.65e14')
        return float(found[1]) * {"G": 1e9, "T": 1e12, "P": 1e15}[found[2].upper()]
    size, slash, per = text.strip().partition("/")
    if slash and (per != "s" or unit != RATE):
        raise ValueError(f'needs {unit}, such as "{WITH_UNIT[unit]}"')
    return float(parse_bytes(size))


def _card(table: object, path: Path, default: str) -> dict[str, Figure]:
    """The figures of a GPU and its link by their names in `Machine.rates`, its memory apart."""
    own = _figures(table, "gpu", path, default)
    model, link = (_text(table, key, path, "") for key in ("model", "link"))
    found = part("link", link, f"{path}: gpu.link =") if link else {}
    if model in part_names("gpu") or (model and not own):
        found |= part("gpu", model, f"{path}: gpu.model =")
    found |= own
    for key in ("memory", "eager", "float32", "h2d", "d2h"):
        if key not in found:
            raise ConfigError(f"{path}: gpu.{key} is needed; or name a model and a link of the catalogue")
    return {GPU_MEMORY if key == "memory" else key: figure for key, figure in found.items()}


def _drive_of(drives: object, path: Path, default: str, swap: Sequence[Path]) -> tuple[Drive | None, dict[str, Figure]]:
    """The drive that holds `swap`, with its figures: the one with the longest path above it, or one without a path, or
    one whose path is on the same file system; several that hold a share each are told as one.

    Drives without a path take the swap paths that lie below none, one each, in their order; the last takes the rest.
    """
    if not isinstance(drives, list):
        raise ConfigError(f"{path}: drive needs tables [[drive]], found {drives!r}")
    found = []
    for index, table in enumerate(drives):
        known = _known(table, "drive", path)
        model, place = (_text(known, key, path, "") for key in ("model", "path"))
        figures = _figures(known, "drive", path, default)
        if model in part_names("drive") or (model and not figures):
            figures = {**part("drive", model, f"{path}: drive.model ="), **figures}
        name = model or place or f"drive {index + 1} of {path.name}"
        found.append((place, _drive(name, figures), _with_both(figures)))
    free = [index for index, (place, _, _) in enumerate(found) if not place]
    chosen = {}
    for one in swap or [Path("/")]:
        held = [index for index, (place, _, _) in enumerate(found) if place and _holds(Path(place), one)]
        if not held and not free and swap:
            held = [index for index, (place, _, _) in enumerate(found) if _beside(place, one)]
        if not held and not free:
            return None, {}
        best = max(held, key=lambda index: len(found[index][0])) if held else free.pop(0) if free[1:] else free[0]
        chosen[best] = found[best][1:]
    return _together(list(chosen.values()))


def _holds(place: Path, swap: Path) -> bool:
    return swap.absolute().is_relative_to(place.absolute())


def _beside(place: str, swap: Path) -> bool:
    """Whether a swap path lies on the file system of a place that was measured here."""
    return Path(place).exists() and drive_of(Path(place)) == drive_of(swap)


def _together(drives: Sequence[tuple[Drive, dict[str, Figure]]]) -> tuple[Drive, dict[str, Figure]]:
    """Drives that hold a share each, by their speed, as one: what one of them is first to be full, slow or worn of."""
    if len(drives) == 1:
        return drives[0]
    keys = [key for key in LANES if all(key in figures for _, figures in drives)]
    known = "read" in keys and "write" in keys
    speeds = [1 / sum(1 / figures[key].value for key in keys[:2]) if known else 1.0 for _, figures in drives]
    shares = [speed / sum(speeds) for speed in speeds]
    lanes = {
        key: Figure(
            min(figures[key].value / share for (_, figures), share in zip(drives, shares, strict=True)),
            "; ".join(dict.fromkeys(figures[key].source for _, figures in drives)),
        )
        for key in (keys if known else ())
    }
    sizes = [drive.size_bytes for drive, _ in drives]
    lives = [drive.endurance_bytes for drive, _ in drives]
    size = sum(filter(None, sizes)) if all(sizes) else None
    life = min(int(life / share) for life, share in zip(lives, shares, strict=True) if life) if all(lives) else None
    sources = "; ".join(dict.fromkeys(drive.endurance_source for drive, _ in drives))
    return Drive(" + ".join(drive.name for drive, _ in drives), size, life, sources if life else ""), lanes


def _drive(name: str, figures: Mapping[str, Figure]) -> Drive:
    size, endurance = (int(figures[key].value) if key in figures else None for key in ("size", "endurance"))
    return Drive(name, size, endurance, figures["endurance"].source if endurance else "")


def _sources(lanes: Mapping[str, Figure]) -> str:
    """Each source once, with the lanes it speaks of; lanes that a file leaves out are typical."""
    typical = [lane for lane in TYPICAL_RATES if lane not in lanes and (lane != "device" or "eager" not in lanes)]
    return sources_told({**lanes, **dict.fromkeys(typical, Figure(0.0, UNVERIFIED))})


def sources_told(figures: Mapping[str, Figure]) -> str:
    """Each source once, with the figures that rest on it."""
    by_source: dict[str, list[str]] = {}
    for key, figure in figures.items():
        by_source.setdefault(figure.source, []).append(key)
    return "; ".join(k if len(by_source) == 1 else f"{', '.join(keys)}: {k}" for k, keys in by_source.items())
