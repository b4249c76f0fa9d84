"""`offloadz bench`: what it writes is what a plan reads, and nothing else stays, however it ends."""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
import threading
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from offloadz.bench import command
from offloadz.bench.blocks import blocks
from offloadz.bench.bus import BESIDE, Bus
from offloadz.bench.command import bench_command
from offloadz.bench.machine_file import FIRST_LINE, Figures, conditions, text_of
from offloadz.bench.rounds import LEAST_ROUNDS, Measured, Sizes, fitted, measured
from offloadz.config import load_config
from offloadz.memory.disk import DiskTier
from offloadz.plan.catalogue import LANES, read_machine
from offloadz.plan.errors import ConfigError
from offloadz.plan.machine import TYPICAL_RATES, host_limit, probe_machine
from offloadz.plan.question import question
from offloadz.runtime.rehearsal import Rehearsal

SMALL = Sizes(
    rounds=2, tokens=16, few_tokens=4, hidden=64, inner=128, product_s=0.02, elements=1 << 18, copy_bytes=2 << 20,
    extent_bytes=2 << 20, num_extents=4, num_parts=2, on_device=(16, 64, 128),
)  # fmt: skip
CHILD = """
import sys
from offloadz.bench import command
from offloadz.bench.rounds import Sizes
from offloadz.cli import main
sizes = Sizes(rounds=2, tokens=16, hidden=64, inner=128, elements=1 << 18, copy_bytes=2 << 20,
              extent_bytes={extent}, num_extents={count})
command.Sizes = lambda: sizes
main(["bench", "--swap", sys.argv[1], "-o", sys.argv[2]])
"""


def child(extent: int, count: int) -> list[str]:
    return [sys.executable, "-c", CHILD.format(extent=extent, count=count)]


@pytest.fixture
def swap(tmp_path: Path) -> Path:
    (tmp_path / "swap").mkdir()
    return tmp_path / "swap"


def test_what_is_measured_is_what_a_plan_reads(swap: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, other = tmp_path / "box.toml", tmp_path / "other"
    other.mkdir()
    assert bench_command([str(swap), str(other)], out, SMALL) == 0
    said = capsys.readouterr().out
    told = tomllib.loads(out.read_text())
    assert [drive["path"] for drive in told["drive"]] == [str(swap), str(other)]
    found = read_machine(str(out), probe_machine(), [swap])
    for key, lane in LANES.items():
        assert found.rates[lane] == told["drive"][0][key] > 0
    lanes = {
        "float32",
        "float32_few",
        "eager",
        "memory",
        "memory_shared",
        "h2d",
        "d2h",
        "cpu",
        "cpu_bf16",
        "cpu_int8",
        "cpu_int8_sr",
    }
    assert lanes == set(told["rates"]) and all(found.rates[lane] == told["rates"][lane] > 0 for lane in lanes)
    assert found.rates_source.startswith("machine file box.toml (") and "measured 20" in found.rates_source
    assert "typical" not in found.rates_source, "all that a plan takes from it was measured"
    assert told["host"] == {"memory": host_limit().total_bytes, "cores": found.cores}
    assert {"date", "load_before", "isa", "update_threads", "torch", "lockable", "kernel", "io", "extents"} <= set(
        told["conditions"]
    )
    assert told["spread"].keys() == {f"rates.{lane}" for lane in lanes} | {
        f"{path}.{kind}" for path in (swap, other) for kind in LANES
    }
    assert all(f"{name} " in said for name in ("rates.float32", f"{other} both")), "each figure is said"
    assert not [*swap.iterdir(), *other.iterdir()]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["box.toml", "other", "swap"]


def test_a_rehearsed_device_is_measured_with_blocks_and_both_ways_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, copied = [], []
    monkeypatch.setattr(command, "blocks", lambda *how: made.append(how) or blocks(*how))
    copy = Bus._copy
    monkeypatch.setattr(Bus, "_copy", lambda bus, op: copied.append(op.lane) or copy(bus, op))
    device = Rehearsal(bfloat16=True)
    bench_command([], tmp_path / "box.toml", SMALL, device)
    told = tomllib.loads((tmp_path / "box.toml").read_text())["gpu"]
    assert told.keys() == {"model", "memory", "float32", "eager", "bandwidth", "h2d", "d2h"}
    found = read_machine(str(tmp_path / "box.toml"), probe_machine())
    assert all(found.rates[key] == told[key] > 0 for key in ("float32", "eager", "bandwidth", "h2d", "d2h"))
    assert found.device_bytes == told["memory"] == 8 << 30 and not found.unified
    assert made[2:] == [(*SMALL.on_device, dtype, device) for dtype in (torch.float32, torch.bfloat16)]
    turns = SMALL.rounds + 1
    assert (copied.count("h2d"), copied.count("d2h")) == (turns + BESIDE * turns,) * 2


def test_what_the_bus_copies_arrives() -> None:
    with Bus(Rehearsal(), 1 << 16) as bus:
        bus._host["h2d"].fill_(7)
        bus._card["d2h"].fill_(9)
        assert bus.rate("h2d")() > 0 and bool((bus._card["h2d"] == 7).all()) and bool((bus._host["d2h"] == 9).all())
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("offloadz-")]


def test_a_bench_of_this_box_changes_what_is_predicted(swap: Path, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    sizes = '"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4'
    (tmp_path / "model/config.json").write_text(f'{{"model_type": "llama", "vocab_size": 512, {sizes}}}')
    config = tmp_path / "run.toml"
    config.write_text(
        f'[model]\npath = "{tmp_path}/model"\ninit = "random"\n[data]\nmax_length = 64\n[train]\n'
        f'output = "{tmp_path}/out"\n[offload]\nswap = ["{swap}"]\noptimizer = "disk"\n'
    )
    plain = question(load_config(config)).answer()
    bench_command([str(swap)], tmp_path / "box.toml", SMALL)
    for asked in (
        question(load_config(config)),  # the last bench of this box
        question(load_config(config, [f"offload.machine={tmp_path}/box.toml"])),
        question(load_config(config), f"{tmp_path}/box.toml"),
    ):
        plan, rates = asked.answer(), tomllib.loads((tmp_path / "box.toml").read_text())["rates"]
        assert plan.step_s != plain.step_s and "measured 20" in plan.rates_source
        assert plan.busy_s and plain.busy_s
        ratio = plan.busy_s["cpu"] / plain.busy_s["cpu"]
        assert ratio == pytest.approx(TYPICAL_RATES["cpu"] / rates["cpu"])


@pytest.mark.parametrize(
    ("path", "out", "sizes", "words"),
    [
        ("none", "box.toml", SMALL, "none: there is no such directory"),
        ("file", "box.toml", SMALL, "file: there is no such directory"),
        ("swap", "box.toml", Sizes(extent_bytes=1 << 50), "are free, measuring writes 8192.1TiB; free some or name"),
        ("swap", "box.toml", Sizes(elements=1 << 50), "to use, measuring needs 16384.1TiB"),
        ("swap", "none/box.toml", SMALL, "needs the name of a file in a directory that is there"),
        ("swap", "swap", SMALL, "needs the name of a file in a directory that is there"),
        ("swap", "file", SMALL, "was not written by `offloadz bench`; name another, or remove it"),
    ],
)
def test_what_cannot_be_measured_or_written_is_said_before(
    swap: Path, tmp_path: Path, path: str, out: str, sizes: Sizes, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text('name = "mine"\n')
    with pytest.raises(ConfigError) as caught:
        bench_command([str(tmp_path / path)], tmp_path / out, sizes)
    assert (words in str(caught.value) and str(tmp_path) in str(caught.value)) or "host memory" in str(caught.value)
    assert (tmp_path / "file").read_text() == 'name = "mine"\n'
    assert not capsys.readouterr().out and not [*swap.iterdir()] and not (tmp_path / "box.toml").exists()


def test_a_file_of_a_bench_is_written_anew(tmp_path: Path) -> None:
    out = tmp_path / "box.toml"
    out.write_text(f"{FIRST_LINE} long ago\n")
    bench_command([], out, SMALL)
    assert "[rates]" in out.read_text() and "[[drive]]" not in out.read_text()


def test_an_interrupt_leaves_nothing(swap: Path, tmp_path: Path) -> None:
    """Ctrl-C while a drive is measured; who starts tests in the background may have it ignored."""
    run = [*child(4 << 20, 64), str(swap), str(tmp_path / "box.toml")]
    with subprocess.Popen(
        run, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:  # fmt: skip
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if " read " in line:
                    break
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130 and errors.strip().endswith("interrupted") and "Traceback" not in errors
    assert [path.name for path in tmp_path.iterdir()] == ["swap"] and not [*swap.iterdir()]


def test_a_drive_that_takes_no_more_is_told_and_left_clean(swap: Path, tmp_path: Path) -> None:
    """A limit on the length of files stands for a drive that fills while it is measured."""
    done = subprocess.run(
        [*child(2 << 20, 4), str(swap), str(tmp_path / "box.toml")], capture_output=True, text=True, timeout=120,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (3 << 20, 3 << 20)),
    )  # fmt: skip
    assert done.returncode == 3 and "Traceback" not in done.stderr
    assert f"swap path {swap}" in done.stderr and "bytes are needed" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["swap"] and not [*swap.iterdir()]


def test_a_busy_machine_is_told_in_the_file(tmp_path: Path) -> None:
    figures = Figures()
    figures.add("rates", "cpu", Measured(1e9, 0.05, 6))
    figures.add("rates", "memory", Measured(2e10, 0.5, 2))
    assert list(figures.wide()) == ["rates.memory 50%"] and list(figures.fewer(6)) == ["rates.memory 2"]
    for busy, words in ((0.9, "on a busy machine (90% of it in use by others)"), (0.1, "")):
        path = tmp_path / "box.toml"
        path.write_text(text_of(figures, conditions(1, busy, 1.5), 5))
        found = read_machine(str(path), probe_machine())
        assert (
            found.rates["cpu"] == 1e9
            and (words in found.rates_source)
            and ("busy" in found.rates_source) == bool(words)
        )


def test_a_figure_is_the_median_of_its_rounds_without_the_first() -> None:
    rates = iter([100.0, 3.0, 1.0, 2.0])
    assert measured(lambda: next(rates), 3) == Measured(2.0, 1.0, 3)


def test_a_figure_without_time_left_has_the_fewest_rounds() -> None:
    calls: list[float] = []
    found = measured(lambda: calls.append(1.0) or 1.0, 6, 0.0)
    assert found.num_rounds == LEAST_ROUNDS and len(calls) == LEAST_ROUNDS + 1
    assert measured(lambda: 1.0, 6, 3600.0).num_rounds == 6


@pytest.mark.parametrize("num_paths", [1, 4])
@pytest.mark.parametrize("pace", [2e7, 1e8, 2.2e8, 3e9])
def test_a_slow_drive_moves_no_more_than_there_is_time_for(pace: float, num_paths: int) -> None:
    sizes = Sizes()
    most_s = sizes.drives_s / num_paths
    fits = fitted(sizes, pace, most_s)
    assert fits.least_bytes / pace <= 1.25 * most_s
    if pace == 3e9:
        assert fits == sizes
    else:
        assert fits.least_bytes > 0.5 * min(sizes.least_bytes, pace * most_s), "as much as there is time for"
    least = fitted(sizes, 1.0, 1.0)
    assert (least.num_extents, least.extent_bytes, least.num_parts) == (2, sizes.part_bytes, 2)


def test_a_drive_without_time_is_measured_with_the_fewest_bytes_and_the_file_says_so(
    swap: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, moved = replace(SMALL, rounds=6, drives_s=0.0), []
    close = DiskTier.close

    def closed(tier: DiskTier) -> None:
        moved.append((tier.bytes_written, tier.bytes_read))
        close(tier)

    monkeypatch.setattr(DiskTier, "close", closed)
    bench_command([str(swap)], tmp_path / "box.toml", sizes)
    part, passes = sizes.part_bytes, LEAST_ROUNDS + 1
    assert moved[0] == (2 * part, 2 * part), "the first look"
    assert moved[1] == (4 * part + passes * 5 * part, passes * 5 * part), "filled; and two extents, half of both, parts"
    told = tomllib.loads((tmp_path / "box.toml").read_text())["conditions"]
    assert told["extents"] == [f"{swap}: 2 of 2.0MiB, 2 of 2.0MiB"]
    assert {f"{swap}.{kind} 2" for kind in LANES} <= set(told["fewer_rounds"])
