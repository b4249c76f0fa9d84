"""Reading a configuration: tables and overrides become checked values, or problems with their place.

What values mean together, and what is not built, is judged in `offloadz.config`; this room looks at one key at a time.
Trade-off: reading goes on after a problem with the default standing in, so that one go shows everything.
"""

import dataclasses
import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from offloadz.config.names import FOREIGN, FOREIGN_VALUES
from offloadz.config.sections import RULES, SECTIONS, GroupConfig, rules
from offloadz.config.values import checked, from_command_line, shown
from offloadz.plan.errors import ConfigError
from offloadz.plan.words import nearest

NOTE_PREFIX = "x-"
_Place = Callable[[str], str]


@dataclasses.dataclass
class Reading:
    """What is known while a configuration is read: accepted values, where they stand, and all problems so far."""

    values: dict[str, dict[str, Any]] = dataclasses.field(default_factory=lambda: {name: {} for name in SECTIONS})
    places: dict[str, str] = dataclasses.field(default_factory=dict)
    wrong: set[str] = dataclasses.field(default_factory=set)
    problems: list[str] = dataclasses.field(default_factory=list)

    def refuse(self, key: str, place: str, text: str) -> None:
        """Note a problem of a key; `place` is "" for a default or a value given from Python."""
        self.wrong.add(key)
        self.problems.append(f"{key} ({place}): {text}" if place else f"{key}: {text}")


def read_toml(path: Path) -> tuple[str, dict[str, Any]]:
    """Text and tables of a TOML file; ConfigError with the line if it is none."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"the configuration {path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"the configuration {path} is not UTF-8 text (byte {error.start})") from None
    try:
        return text, tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        number = re.search(r"line (\d+)", str(error))
        line = text.split("\n")[int(number[1]) - 1].strip() if number else ""
        quoted = f": {line[:80]}" if line else ""
        raise ConfigError(f"the configuration {path} is not TOML: {error}{quoted}") from None


def line_numbers(text: str) -> dict[str, int]:
    """Line of each table and key, for messages only (a key inside a multi-line text may be taken for one)."""
    found: dict[str, int] = {}
    section = ""
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*\[+\s*([^\[\]]+?)\s*\]", line):
            section = header[1].replace('"', "").replace(" ", "")
            found.setdefault(section, number)
        elif key := re.match(r"""\s*([\w."'-]+)\s*=""", line):
            name = key[1].replace('"', "").replace("'", "")
            found.setdefault(f"{section}.{name}" if section else name, number)
    return found


def take_tables(reading: Reading, tables: Mapping[str, Any], place: _Place) -> None:
    """Read every key of a TOML document; `place` tells where a `section.key` stands."""
    for section, table in tables.items():
        if section.startswith(NOTE_PREFIX):
            continue
        if section in SECTIONS and isinstance(table, Mapping):
            for key, value in table.items():
                _take(reading, section, key, value, place(f"{section}.{key}"))
        elif isinstance(table, Mapping) and section not in FOREIGN:
            _take_unknown_section(reading, section, table, place)
        elif section in SECTIONS:
            hint = f"; write [{section}] with keys below it"
            reading.refuse(section, place(section), f"needs a table, found {shown(table)}{hint}")
        else:
            reading.refuse(section, place(section), _unknown_key("", section))


def _take_unknown_section(reading: Reading, section: str, table: Mapping[str, Any], place: _Place) -> None:
    guess = nearest(section, SECTIONS)
    hint = f"nearest is [{guess}]" if guess else "sections are " + ", ".join(f"[{name}]" for name in SECTIONS)
    reading.refuse(f"[{section}]", place(section), f"unknown section; {hint}")
    for key, value in table.items():  # its keys are looked at as well, so that one go shows every problem
        _take(reading, guess, key, value, place(f"{section}.{key}"), written=section)


def take_override(reading: Reading, override: str) -> None:
    """Read one `section.key=value` of the command line; it replaces what the file says."""
    name, equals, raw = override.partition("=")
    name = name.strip()
    section, dot, key = name.partition(".")
    place = "command line"
    if section.startswith(NOTE_PREFIX) or key.startswith(NOTE_PREFIX):
        return
    if not equals or not name:
        reading.refuse(shown(override), place, "needs the form section.key=value, such as optimizer.lr=1e-5")
    elif not dot:
        reading.refuse(name, place, _unknown_key("", name))
    elif reading.places.get(name) == place:
        reading.refuse(name, place, "is given twice; give it once")
    elif section not in SECTIONS:
        _take_unknown_section(reading, section, {key: raw}, lambda _: place)
    else:
        rule = RULES[section].get(key)
        _take(reading, section, key, from_command_line(raw.strip(), rule) if rule else raw, place)


def _take(reading: Reading, section: str, key: str, value: Any, place: str, written: str = "") -> None:
    """Check one value and keep it; what is wrong is noted and the default stands in until the end of the reading."""
    name = f"{written or section}.{key}"
    if key.startswith(NOTE_PREFIX):
        return
    rule = RULES[section].get(key) if section else None
    if rule is None:
        reading.refuse(name, place, _unknown_key(section, key))
        return
    if written:
        return
    reading.places[name] = place
    reading.values[section].pop(key, None)
    try:
        if rule.kind == "groups":
            reading.values[section][key] = _groups(value)
        elif rule.kind == "stage":
            reading.values[section][key] = _stage(value)
        else:
            reading.values[section][key] = checked(value, rule)
    except ValueError as error:
        meant = FOREIGN_VALUES.get(name, {}).get(value.lower() if isinstance(value, str) else "")
        reading.refuse(name, place, f"found {shown(value)}, {meant or error}")


def _unknown_key(section: str, key: str) -> str:
    """Why a key is not one of this section, and which one was meant."""
    homes = [other for other, keys in RULES.items() if key in keys]
    if key.lower() in FOREIGN and not homes:
        return f"is a name of another trainer; {FOREIGN[key.lower()]}"
    if homes:
        return f"is a key of [{homes[0]}]" + (f", not of [{section}]" if section else "") + f"; write {homes[0]}.{key}"
    if not section and key in SECTIONS:
        return f"is a section, not a key; write {key}.KEY=value"
    everywhere = {name: f"{other}.{name}" for other, keys in RULES.items() for name in keys}
    for known in (RULES[section] if section else {}, everywhere):
        if guess := nearest(key, known):
            return f"unknown key; nearest is {everywhere[guess]}"
    return "unknown key; keys are " + ", ".join(RULES[section] if section else everywhere.values())


def _groups(value: Any) -> tuple[GroupConfig, ...]:
    form = 'such as [{match = ["*.embed*"], lr = 1e-6, weight_decay = 0.1}]'
    if not isinstance(value, list | tuple) or not all(isinstance(item, Mapping | GroupConfig) for item in value):
        raise ValueError(f"needs a list of tables, {form}")
    groups, known = [], rules(GroupConfig)
    for number, item in enumerate(value):
        if isinstance(item, GroupConfig):
            item = {key: got for key, got in dataclasses.asdict(item).items() if got is not None}
        item = {key: got for key, got in item.items() if not key.startswith(NOTE_PREFIX)}
        for key in item:
            if key not in known:
                hint = nearest(key, known)
                raise ValueError(
                    f"entry {number} has the unknown key {key}; "
                    + (f"nearest is {hint}" if hint else "keys are " + ", ".join(known))
                )
        try:
            group = GroupConfig(**{key: checked(got, known[key]) for key, got in item.items()})
        except ValueError as error:
            raise ValueError(f"entry {number} {error}, {form}") from None
        if not group.match or (group.lr is None and group.weight_decay is None):
            raise ValueError(f"entry {number} needs match and at least one of lr, weight_decay, {form}")
        groups.append(group)
    return tuple(groups)


def _stage(value: Any) -> str | int:
    text = str(value)
    if isinstance(value, bool) or text not in ("auto", "0", "1", "2", "3"):
        raise ValueError('needs "auto" or 0, 1, 2, 3')
    return text if text == "auto" else int(text)
