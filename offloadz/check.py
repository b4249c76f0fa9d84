"""`offloadz check`: does this machine do what a run needs, and what did dead runs leave behind.

Each fact is asked of the room that a run would ask, so the answer is what a run will meet; nothing is measured (that is
`offloadz bench`).  Trade-off: a swap path is tried by writing a file of 4 KiB there, which a look at its type would
not need, because only a real try shows that direct I/O works.
"""

import resource
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from offloadz.config import load_config
from offloadz.plan.errors import ConfigError
from offloadz.plan.words import human, lasting

GOOD, NOTE, BAD = "good", "note", "BAD"


class Finding(NamedTuple):
    """One line of the self-check: `state` is GOOD, NOTE (works, but worth knowing) or BAD (a run would fail)."""

    state: str
    name: str
    text: str


def check_command(config_path: Path | None, overrides: Sequence[str], swap: Sequence[str], clean: bool) -> int:
    """Print all findings; swap paths are those of the configuration and `swap`, else the current directory.

    `overrides` replace values of the configuration, or are all of it.

    Returns 0, or 1 after naming what is not good.  With `clean` each dead run's directory is removed after a yes.
    """
    if config_path is not None and config_path.is_dir():
        raise ConfigError(
            f"{config_path} is a directory, not a configuration; for a swap path write --swap {config_path}"
        )
    offload = load_config(config_path, overrides).offload
    paths = [Path(path) for path in (*swap, *offload.swap)]
    findings = []
    for finding in all_findings(paths or [Path()], offload.io):
        print(f"{finding.state:5} {finding.name}: {finding.text}", flush=True)
        findings.append(finding)
    num_left = sum(_leftovers(path, clean) for path in paths or [Path()])
    if clean and not num_left:
        print(f"nothing to clean: no dead run left anything in {', '.join(map(str, paths or [Path.cwd()]))}")
    bad = [finding.name for finding in findings if finding.state == BAD]
    print(f"not good: {', '.join(bad)}" if bad else "all good")
    return 1 if bad else 0


def all_findings(paths: Sequence[Path], io: str = "auto") -> Iterator[Finding]:
    """The findings of this machine and of each swap path under `offload.io`; a look that fails is a finding too."""
    looks: list[tuple[str, Callable[[], Iterator[Finding]]]] = [
        ("native library", _native),
        ("threads", _threads),
        ("memory", _memory),
        ("GPU", _gpus),
    ]
    looks += [(f"swap path {path}", lambda path=path: _swap_path(path, io)) for path in paths]  # type: ignore[misc]
    for name, look in looks:
        try:
            yield from look()
        except (OSError, ValueError, RuntimeError, ImportError) as error:
            yield Finding(BAD, name, str(error) or type(error).__name__)


def _native() -> Iterator[Finding]:
    from offloadz.runtime import native

    known = ", ".join(native.isa_supported())
    yield Finding(GOOD, "native library", f"loaded; instruction set {native.isa()} (this CPU has {known})")


def _threads() -> Iterator[Finding]:
    from offloadz.runtime.threads import update_threads

    num_threads, reason = update_threads(0)
    yield Finding(GOOD, "threads", f"{num_threads} for the update: {reason}")


def _memory() -> Iterator[Finding]:
    from offloadz.plan.machine import host_limit

    limit = host_limit()
    text = f"{human(limit.available_bytes)} of {human(limit.total_bytes)} may be used, by {limit.source}"
    yield Finding(GOOD, "host memory", text)
    lockable_bytes = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    text = "unlimited" if lockable_bytes == resource.RLIM_INFINITY else human(lockable_bytes)
    yield Finding(GOOD, "lock limit", f"{text} (RLIMIT_MEMLOCK); what cannot be locked is used unlocked")


def _gpus() -> Iterator[Finding]:
    import torch

    from offloadz.runtime.devices import facts_of

    here = torch.accelerator.current_accelerator(check_available=True)
    if here is None:
        yield Finding(GOOD, "GPU", "none; the compute device is the CPU")
        return
    for number in range(torch.accelerator.device_count()):
        facts = facts_of(torch.device(here.type, number))
        text = f"{facts.gpu}, {human(facts.free_bytes)} of {human(facts.total_bytes)} free"
        text += "" if facts.bfloat16 else "; it emulates bfloat16, so blocks are widened to float32 on it"
        yield Finding(GOOD, f"GPU {number}", f'{text}; a run computes there with offload.device = "{facts.name}"')


def _swap_path(path: Path, io: str) -> Iterator[Finding]:
    from offloadz.memory.direct import probe_direct
    from offloadz.plan.machine import disk_free
    from offloadz.runtime.transfer import nearest

    name, place = f"swap path {path}", nearest(path)
    if not place.is_dir():
        yield Finding(BAD, name, f"{place} is not a directory")
        return
    probe = probe_direct(place)
    moved_by = _moved_by(place, probe.direct, io)
    how = "direct I/O works" if probe.direct else "direct I/O is refused"
    where = "" if place == path.absolute() else f" (it does not exist yet; {place} was tried)"
    text = f"I/O by {moved_by}, {how}, {human(disk_free(place))} free{where}"
    yield Finding(GOOD, name, text)
    for line in probe.lines(path):
        yield Finding(NOTE, name, line.removeprefix(name).lstrip(": "))


def _moved_by(place: Path, direct: bool, io: str) -> str:
    from offloadz.runtime import native
    from offloadz.runtime.transfer import choose_transfer

    try:
        native.isa()
    except (ImportError, ValueError):
        return "nothing: see native library"
    transfer = choose_transfer(place, direct, io)
    transfer.close()
    return transfer.name


def _leftovers(path: Path, clean: bool) -> int:
    """Tell what dead runs left in a swap path; with `clean` ask for each, and remove it after a yes; how many."""
    from offloadz.memory.swapdir import leftovers, remove

    found = leftovers(path)
    for leftover in found:
        age = f"process {leftover.pid}, {lasting(leftover.age_s)} ago"
        print(
            f"{NOTE:5} left by a dead run: {leftover.path}, {human(leftover.size_bytes)}, of {leftover.owner} ({age})"
        )
        print(f"      {_state_told(leftover.path, Path(leftover.owner))}")
        if not clean:
            print("      `offloadz check --clean` removes it; the same run started again takes it over")
        elif not _yes(f"      remove {leftover.path}? [y/N] "):
            print("      kept")
        else:
            print("      removed" if remove(leftover) else "      kept: a run has begun in it")
    return len(found)


def _state_told(directory: Path, output: Path) -> str:
    """Whether what a dead run left can be gone on from."""
    from offloadz.memory.record import FLIP_FILE, home_of, read_saved
    from offloadz.memory.swapdir import STATE
    from offloadz.plan.errors import DamagedState

    if not (directory / STATE / FLIP_FILE).exists():
        home = home_of(directory / STATE).parent
        return "it holds no state to go on from" if home == directory else f"it holds a share of the state in {home}"
    try:
        step = read_saved(directory / STATE).record.note["step"]
    except (DamagedState, OSError, KeyError) as error:
        return f"its state cannot be gone on from: {error}"
    if not output.is_dir():
        return f"it holds the state of step {step}, and its run directory is gone"
    return f"it holds the state of step {step}: the same run started again goes on from there"


def _yes(question: str) -> bool:
    try:
        return input(question).strip().lower() in ("y", "yes")
    except EOFError:  # nobody there to ask
        print()
        return False
