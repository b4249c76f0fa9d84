"""The command line: eight verbs, each a few lines that call the room which does the work.

Here are words, exit codes and how errors are told; nothing is computed.  Rooms are imported inside their verb, so
`offloadz --help` needs neither torch nor a model (a quarter of a second).  Trade-off: a broken room shows only when
its verb is called, which the tests of that room catch and this file cannot.
"""

import functools
import os
import sys
import traceback
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer

from offloadz.plan.errors import ConfigError, DoesNotFit
from offloadz.plan.machine import DeviceFacts

app = typer.Typer(
    name="offloadz",
    help="Fine-tune all weights of a model that is larger than the device.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG.toml", help="The configuration.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[section.key=value ...]", help="Values that replace those of the file.", show_default=False
    ),
]
OtherMachine = Annotated[str, typer.Option("--machine", metavar="NAME-or-FILE", help="Another machine than this one.")]
OfMachine = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="key=value", help="A figure of it, such as host_memory=64GiB; repeatable."),
]
SwapPaths = Annotated[list[str] | None, typer.Option("--swap", metavar="PATH", help="A swap directory; repeatable.")]


def exit_status(error: BaseException) -> int:
    """The exit status of the contract for an error that ended a verb."""
    if isinstance(error, ConfigError):
        return 2
    if isinstance(error, DoesNotFit):
        return 3
    return 130 if isinstance(error, KeyboardInterrupt) else 1


def told(error: BaseException) -> str:
    """One short paragraph about an error; kinds that do not explain themselves get their name in front."""
    text = str(error).strip() or "no further message"
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    plain = isinstance(error, ValueError) or type(error).__module__.startswith("offloadz.")
    return text if plain else f"{type(error).__name__}: {text}"


def verb(work: Callable[..., int], enough: tuple[type[Exception], ...] = (BrokenPipeError,)) -> Callable[..., None]:
    """Register a verb: what it returns, or the error it ends with, becomes the exit status.

    `enough`: errors by which a reader says that it has seen enough.
    """

    @functools.wraps(work)
    def run(*args: Any, **options: Any) -> None:
        try:
            status = work(*args, **options)
        except enough:
            # `offloadz show | head`: the reader has seen enough.  What is still buffered must not be written at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            status = 0
        except (Exception, KeyboardInterrupt) as error:
            if os.environ.get("OFFLOADZ_DEBUG", "") not in ("", "0"):
                traceback.print_exc()
            else:
                rank = os.environ.get("RANK", "") if os.environ.get("WORLD_SIZE", "1") != "1" else ""
                print(f"offloadz{rank and f', rank {rank}'}: {told(error)}", file=sys.stderr)
            status = exit_status(error)
        raise typer.Exit(status)

    return app.command()(run)


def _device_here(told: str) -> DeviceFacts | None:
    """What a plan is told of `offload.device`; torch is only asked where there can be an answer."""
    from offloadz.plan.found import worth_asking

    if not worth_asking(told):
        return None
    from offloadz.runtime.chosen import facts_named

    return facts_named(told)


def _version(asked: bool) -> None:
    if asked:
        print(f"offloadz {version('offloadz')}")
        raise typer.Exit


@app.callback()
def verbs(
    asked: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Fine-tune all weights of a model that is larger than the device."""


@functools.partial(verb, enough=())
def train(
    config: ConfigFile,
    overrides: Overrides = None,
    set_: Annotated[list[str] | None, typer.Option("--set", hidden=True)] = None,
) -> int:
    """Train; goes on by itself where a checkpoint of the same run lies."""
    if set_:
        raise ConfigError(f"--set {set_[0]}: write section.key=value behind the configuration, without --set")
    from offloadz.config import load_config

    settings = load_config(config, overrides or [], training=True)
    from offloadz.bench.first import measure_first
    from offloadz.train.loop import train as run

    return int(run(settings, measure_first))


@verb
def plan(
    config: ConfigFile,
    overrides: Overrides = None,
    machine: OtherMachine = "",
    set_: OfMachine = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of tables.")] = False,
) -> int:
    """Say what a run would need and take, before it starts; loads no weights."""
    from offloadz.plan.command import plan_command

    return int(plan_command(config, overrides or [], machine or None, set_ or [], as_json, _device_here))


@verb
def show(
    config: ConfigFile,
    overrides: Overrides = None,
    machine: OtherMachine = "",
    set_: OfMachine = None,
    trace: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a Chrome/Perfetto trace.")] = None,
) -> int:
    """Print the program of a step and its simulated timeline."""
    from offloadz.plan.command import show_command

    return int(show_command(config, overrides or [], trace, _device_here, machine or None, set_ or []))


@verb
def bench(
    swap: SwapPaths = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", metavar="machine.toml", help="The file to write.")] = None,
) -> int:
    """Measure this box and write a machine file for `plan` and `train`."""
    from offloadz.bench.command import bench_command

    return int(bench_command(swap or [], out))


@verb
def check(
    told: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CONFIG.toml] [section.key=value ...]",
            help="Look at the swap paths of a configuration, of these values, or of both.",
            show_default=False,
        ),
    ] = None,
    swap: SwapPaths = None,
    clean: Annotated[bool, typer.Option("--clean", help="Ask, then remove what dead runs left.")] = False,
) -> int:
    """Look whether this machine does what a run needs, and for what dead runs left in swap paths."""
    from offloadz.check import check_command

    words = told or []
    named = bool(words) and "=" not in words[0]
    return int(check_command(Path(words[0]) if named else None, words[named:], swap or [], clean))


@verb
def data(
    config: ConfigFile,
    overrides: Overrides = None,
    samples: Annotated[int, typer.Option(min=0, help="How many samples are printed.")] = 3,
) -> int:
    """Read all records; counts, lengths, bad lines, and the first samples with trained tokens marked."""
    from offloadz.audit import data_command

    return int(data_command(config, overrides or [], samples))


@verb
def export(
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="A checkpoint directory.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The model directory to write.")],
    dtype: Annotated[str, typer.Option(metavar="bfloat16/float32", help="Of the weights.")] = "bfloat16",
) -> int:
    """Write a Hugging Face model directory from a checkpoint."""
    if dtype not in ("bfloat16", "float32"):
        why = ": float16 is not built, its range is smaller than that of the weights" if "16" in dtype else ""
        raise ConfigError(f"--dtype: found {dtype}, needs bfloat16 or float32{why}")
    from offloadz.model.export import export_command

    return int(export_command(checkpoint, out, dtype))


@verb
def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")],
    out: Annotated[
        Path | None, typer.Option("-o", "--out", metavar="FILE", help="The page; default: report.html in RUN.")
    ] = None,
) -> int:
    """One HTML page about a run: curves, memory and lanes measured beside predicted; needs no network."""
    from offloadz.report.page import report_command

    return int(report_command(run, out))


def main(arguments: list[str] | None = None) -> None:
    """Run the command line (of this process, or `arguments`); always ends with SystemExit and the verb's status."""
    app(args=arguments, prog_name="offloadz")


if __name__ == "__main__":
    main()
