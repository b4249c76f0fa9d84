"""Machine files: a box written down as TOML, and the boxes and drives that come along by name.

Every figure may name its source (`{ value = 7.0e9, source = "..." }`, else the `source` of its table or of the file);
without one it counts as typical and unverified.  What a file leaves out is taken from this box.  Left to others: what
this box has (`machine.py`), and whether a run may use a file's limits (`wishes.py`).  The trade-off: only boxes that
compute on the CPU are in the catalogue, because plans for others are not built; a drive wears the same under both.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from offloadz.plan.errors import ConfigError
from offloadz.plan.machine import TYPICAL_RATES, UNVERIFIED, Drive, Machine

FOLDER = Path(__file__).parent / "machines"
DRIVES = FOLDER / "drives.toml"

RATES = {"device": "flop/s", "memory": "bytes/s", "h2d": "bytes/s", "d2h": "bytes/s", "cpu": "parameters/s"}
"""Keys of [rates] with their units; those of a drive are in [[drive]]."""
LANES = {"read": "disk_read", "write": "disk_write"}
"""Keys of [[drive]] that are rates, and their lanes."""

_KEYS: dict[str, tuple[str, ...]] = {
    "": ("name", "device", "source", "host", "rates", "drive"),
    "host": ("memory", "cores", "source"),
    "rates": (*RATES, "source"),
    "drive": ("model", "path", "size", *LANES, "endurance", "source"),
}


@dataclass(frozen=True)
class Figure:
    """A number with the place where it comes from."""

    value: float
    source: str


def machine_names() -> list[str]:
    """Names of the boxes that come along."""
    return sorted(path.stem for path in FOLDER.glob("*.toml") if path != DRIVES)


def read_machine(told: str, base: Machine, swap: Sequence[Path] = ()) -> Machine:
    """The machine of a file or a catalogue name; what it leaves out is that of `base`.

    `swap`: the directories whose drives count.  Raises ConfigError that names file and field for what is wrong.
    """
    path = _found(told)
    tables = _tables(path)
    _known(tables, "", path)
    device = _text(tables, "device", path, "cpu")
    if device != "cpu":
        raise ConfigError(f"{path}: device = {device!r}: a plan for it is not built yet; needed: cpu")
    default = _text(tables, "source", path, UNVERIFIED)
    host, rates = (_figures(tables.get(part, {}), part, path, default) for part in ("host", "rates"))
    drive, disk = _drive_of(tables.get("drive", []), path, default, swap)
    lanes = {**rates, **{LANES[key]: disk[key] for key in LANES if key in disk}}
    name = _text(tables, "name", path, path.stem)
    memory = int(host["memory"].value) if "memory" in host else base.host_bytes
    return replace(
        base,
        name=name,
        host_bytes=memory,
        device_bytes=memory,
        host_source=f"machine file {path.name}, {host['memory'].source}" if "memory" in host else base.host_source,
        cores=int(host["cores"].value) if "cores" in host else base.cores,
        rates={**TYPICAL_RATES, **{lane: figure.value for lane, figure in lanes.items()}},
        rates_source=f"machine file {path.name} ({_sources(lanes)})" if lanes else base.rates_source,
        drive=drive,
    )


def catalogue_drive(name: str, where: str = "drive") -> tuple[Drive, dict[str, float]]:
    """A drive of the catalogue and its rates by lane; ConfigError with the nearest name where there is none."""
    drives = _tables(DRIVES)
    if name not in drives:
        raise ConfigError(f"{where} {name!r} is not in the catalogue{_hint(name, drives)}")
    figures = _figures(drives[name], "drive", DRIVES, UNVERIFIED)
    return _drive(name, figures), {LANES[key]: figures[key].value for key in LANES}


def _found(told: str) -> Path:
    """The file that is meant: a path, or a name of the catalogue."""
    path = Path(told).expanduser()
    if path.suffix == ".toml" or "/" in told:
        if not path.is_file():
            raise ConfigError(f"machine file {told}: there is no such file")
        return path
    if told not in machine_names():
        gpu = "; machines with a GPU are not built yet" if not _hint(told, machine_names(), only=True) else ""
        raise ConfigError(
            f"machine {told!r} is not in the catalogue{_hint(told, machine_names())}{gpu}; "
            f"a file is named with its path, ./{told}.toml"
        )
    return FOLDER / f"{told}.toml"


def _tables(path: Path) -> dict[str, Any]:
    from offloadz.config.read import read_toml

    try:
        return read_toml(path)[1]
    except ConfigError as error:
        raise ConfigError(str(error).replace("the configuration", "the machine file", 1)) from None


def _hint(name: str, known: Any, only: bool = False) -> str:
    """`; nearest is ...`, or all there are; with `only` the first or nothing."""
    from offloadz.config.values import nearest

    guess = nearest(name, known)
    return f"; nearest is {guess}" if guess else "" if only else f"; there are {', '.join(known)}"


def _known(table: object, section: str, path: Path) -> Mapping[str, Any]:
    """The table, once all its keys are known ones."""
    if not isinstance(table, Mapping):
        raise ConfigError(f"{path}: {section} needs a table, found {table!r}")
    for key in table:
        if key not in _KEYS[section]:
            where = f"{section}.{key}" if section else key
            raise ConfigError(f"{path}: unknown key {where}{_hint(key, _KEYS[section])}")
    return table


def _text(table: Mapping[str, Any], key: str, path: Path, default: str) -> str:
    value = table.get(key, default)
    if not isinstance(value, str):
        raise ConfigError(f"{path}: {key} needs text, found {value!r}")
    return value


def _figures(table: object, section: str, path: Path, default: str) -> dict[str, Figure]:
    """The numbers of a table; sizes and rates may be text with a unit."""
    known = _known(table, section, path)
    source = _text(known, "source", path, default)
    return {
        key: _figure(value, key, f"{path}: {section}.{key}", source)
        for key, value in known.items()
        if key not in ("source", "model", "path")
    }


def _figure(value: Any, key: str, where: str, source: str) -> Figure:
    if isinstance(value, Mapping):
        if set(value) - {"value", "source"} or "value" not in value or not isinstance(value.get("source", ""), str):
            raise ConfigError(f'{where} needs {{ value = ..., source = "..." }}, found the keys {", ".join(value)}')
        value, source = value["value"], value.get("source", source)
    try:
        return Figure(number(value, key), source)
    except ValueError as error:
        raise ConfigError(f"{where} = {value!r}: {error}") from None


def number(value: Any, key: str) -> float:
    """A figure above zero as the key takes it: text with a unit only for bytes and bytes/s; ValueError says what is
    needed."""
    from offloadz.config.values import parse_bytes

    takes_unit = key not in ("cores", "device", "cpu")
    if isinstance(value, str) and takes_unit:
        return float(parse_bytes(value.strip().removesuffix("/s")))
    whole = key in ("cores", "memory", "size", "endurance")
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        unit = ', or text with a unit such as "64GB"' if takes_unit else ""
        raise ValueError(f"needs a number above 0{unit}")
    if (whole and value < 1) or (key == "cores" and value != int(value)):
        raise ValueError("needs a whole number from 1 on")
    return float(value)


def _drive_of(drives: object, path: Path, default: str, swap: Sequence[Path]) -> tuple[Drive | None, dict[str, Figure]]:
    """The drive that holds `swap`, with its figures: the one with the longest path above it, or one without a path;
    several that hold a share each are told as one."""
    if not isinstance(drives, list):
        raise ConfigError(f"{path}: drive needs tables [[drive]], found {drives!r}")
    found = []
    for index, table in enumerate(drives):
        known = _known(table, "drive", path)
        model, place = (_text(known, key, path, "") for key in ("model", "path"))
        figures = _figures(known, "drive", path, default)
        if model in (rated := _tables(DRIVES)):
            figures = {**_figures(rated[model], "drive", DRIVES, UNVERIFIED), **figures}
        elif model and not figures:
            hint = _hint(model, rated)
            raise ConfigError(f"{path}: drive.model = {model!r} has no figures and is not in the catalogue{hint}")
        name = model or place or f"drive {index + 1} of {path.name}"
        found.append((place, _drive(name, figures), figures))
    if sum(not place for place, _, _ in found) > 1:
        raise ConfigError(f"{path}: {len(found)} drives, and more than one without a path; give each its path")
    chosen = {}
    for one in swap or [Path("/")]:
        held = [drive for drive in found if not drive[0] or _holds(Path(drive[0]), one)]
        if not held:
            return None, {}
        place, drive, figures = max(held, key=lambda drive: len(drive[0]))
        chosen[place] = (drive, figures)
    return _together(list(chosen.values()))


def _holds(place: Path, swap: Path) -> bool:
    return swap.absolute().is_relative_to(place.absolute())


def _together(drives: Sequence[tuple[Drive, dict[str, Figure]]]) -> tuple[Drive, dict[str, Figure]]:
    """Drives that hold a share each, by their speed, as one: what one of them is first to be full, slow or worn of."""
    if len(drives) == 1:
        return drives[0]
    known = all(set(LANES) <= set(figures) for _, figures in drives)
    speeds = [1 / sum(1 / figures[key].value for key in LANES) if known else 1.0 for _, figures in drives]
    shares = [speed / sum(speeds) for speed in speeds]
    lanes = {
        key: Figure(
            min(figures[key].value / share for (_, figures), share in zip(drives, shares, strict=True)),
            "; ".join(dict.fromkeys(figures[key].source for _, figures in drives)),
        )
        for key in (LANES if known else ())
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
    by_source: dict[str, list[str]] = {}
    for lane in TYPICAL_RATES:
        by_source.setdefault(lanes[lane].source if lane in lanes else UNVERIFIED, []).append(lane)
    return "; ".join(_parts(by_source))


def _parts(by_source: Mapping[str, list[str]]) -> Iterator[str]:
    for source, lanes in by_source.items():
        yield source if len(by_source) == 1 else f"{', '.join(lanes)}: {source}"
