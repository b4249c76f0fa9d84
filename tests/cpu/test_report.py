"""`offloadz report`: a page that stands alone, tells the run's own numbers, and copes with what runs leave behind.

The run is a real one with everything on disk, stopped by a signal and gone on with.  What a browser makes of the page
is looked at where chromium or chrome is on the path.
"""

from __future__ import annotations

import html
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from tiny import ON_DISK, make_texts, tables

import offloadz.train.loop as loop
from offloadz.config import config_from_tables
from offloadz.plan.errors import ConfigError
from offloadz.plan.paths import held_bytes
from offloadz.plan.timeline import read_trace, read_traces
from offloadz.report.charts import merged
from offloadz.report.drawing import MOST_POINTS, bucketed
from offloadz.report.page import MOST_ROWS, number, ranges, render, report_command
from offloadz.report.read import is_held, read_run
from offloadz.report.simulated import simulated
from offloadz.train.begin import alone
from offloadz.train.metrics import METRICS, read_metrics
from offloadz.train.progress import Display

PROMPT = "w3 w24"
CHARTS = {"loss", "lr", "norm", "step-time", "lanes", "timeline", "measured", "speed", "memory-host", "memory-disk"}
ROOT = Path(__file__).parents[2]
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), "")


class Read(HTMLParser):
    """Elements with their attributes, and the text of the cells of each table, row by row, by the table's id."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.tables: dict[str, list[list[str]]] = {}
        self.text = ""
        self._rows: list[list[str]] = []
        self._in_cell = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag == "table":
            self._rows = self.tables.setdefault(dict(attrs).get("id") or "", [])
        elif tag == "tr":
            self._rows.append([])
        elif tag in ("td", "th"):
            self._rows[-1].append("")
            self._in_cell = True

    def handle_endtag(self, tag: str) -> None:
        self._in_cell = self._in_cell and tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        self.text += data
        if self._in_cell:
            self._rows[-1][-1] += data.strip()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run of 12 steps, stopped behind step 7 and finished by the same command."""
    folder = tmp_path_factory.mktemp("report")
    make_texts(folder / "eval.jsonl", 10, seed=5)
    more = {"data__eval": [str(folder / "eval.jsonl")], "train__eval_every": 5, "train__sample_prompts": [PROMPT],
            "train__sample_tokens": 4, "train__trace_steps": [3, 9], "debug__samples": False}  # fmt: skip

    class Stopping(Display):
        def step(self, line: dict[str, Any]) -> None:
            super().step(line)
            if line["step"] == 7:
                os.kill(os.getpid(), signal.SIGTERM)

    config = config_from_tables(tables(folder, **more, **ON_DISK), training=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "Display", Stopping)
        assert loop.train(config) == 143
    assert loop.train(config) == 0
    return folder / "run"


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy of what a report reads, to be spoilt."""
    shutil.copytree(finished, tmp_path / "run", ignore=shutil.ignore_patterns("checkpoints", "final"))
    return tmp_path / "run"


@pytest.fixture(scope="module")
def page(finished: Path) -> str:
    return render(read_run(finished))


def steps_of(directory: Path) -> list[dict[str, Any]]:
    return [line for line in read_metrics(directory / METRICS) if "loss" in line]


def changed(directory: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """The metrics with each line put through `change`."""
    lines = read_metrics(directory / METRICS)
    for line in lines:
        change(line)
    (directory / METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return directory


def points(page: str, gid: str) -> list[tuple[float, float]]:
    """The places of the vertices of a line in a chart."""
    found = re.search(rf'<g id="{gid}">\s*<path d="([^"]*)"', page)
    assert found is not None, gid
    return [(float(x), float(y)) for x, y in re.findall(r"[ML] ([-\d.]+) ([-\d.]+)", found[1])]


# ---- the page ----


def test_the_page_stands_alone(page: str) -> None:
    """Nothing is loaded: no address, no script, no reference but to itself; every id is there once."""
    read = Read(page)
    assert "http:" not in page and "https:" not in page and "//" not in re.sub(r"/\*.*?\*/", "", page)
    tags = Counter(tag for tag, _ in read.elements)
    assert not {"script", "link", "img", "iframe", "image", "object"} & set(tags)
    ids = Counter(found["id"] for _, found in read.elements if found.get("id"))
    assert [name for name, count in ids.items() if count > 1] == []
    for _, found in read.elements:
        target = found.get("href") or "#"
        assert target == "#" or (target.startswith("#") and target[1:] in ids)
        assert not {"src", "srcset", "data"} & set(found)
    assert set(re.findall(r"url\(#([^)]*)\)", page)) <= set(ids) and len(re.findall(r"url\((?!#)", page)) == 0
    assert "@import" not in page and len(page) < 400_000


def test_all_charts_are_there_for_light_and_dark(page: str) -> None:
    ids = {found.get("id") for _, found in Read(page).elements}
    assert {f"chart-{name}" for name in CHARTS} <= ids
    assert page.count("<svg ") == len(CHARTS) == page.count('role="img"')
    assert "prefers-color-scheme: dark" in page and "width=device-width" in page
    drawn = re.findall(r"<svg .*?</svg>", page, re.DOTALL)
    assert not any(re.search(r"(fill|stroke): #", svg) for svg in drawn)  # every colour is a variable of the page
    used = {name for svg in drawn for name in re.findall(r"var\(--(\w+)\)", svg)}
    assert used <= set(re.findall(r"--(\w+):", page))


def test_lines_are_drawn_through_the_numbers_of_the_metrics(page: str, finished: Path) -> None:
    steps = steps_of(finished)
    for gid, key in (("loss-measured", "loss"), ("norm-measured", "grad_norm"), ("step-time-measured", "step_s"),
                     ("speed-measured", "tokens_per_s")):  # fmt: skip
        at, values = points(page, gid), [line[key] for line in steps]
        assert len(at) == 12, gid
        low, high = values.index(min(values)), values.index(max(values))
        scale = (at[high][1] - at[low][1]) / (values[high] - values[low])
        for (x, y), line, value in zip(at, steps, values, strict=True):
            assert y == pytest.approx(at[low][1] + scale * (value - values[low]), abs=0.01), (gid, line["step"])
            share = (line["step"] - 1) / 11
            assert x == pytest.approx(at[0][0] + share * (at[-1][0] - at[0][0]), abs=0.01)
        assert scale < 0  # more is higher


def test_tables_hold_the_numbers_of_the_metrics(page: str, finished: Path) -> None:
    read, steps = Read(page), steps_of(finished)
    rows = read.tables["all-steps"][1:]
    assert [row[0] for row in rows] == [str(step) for step in range(1, 13)]
    for row, line in zip(rows, steps, strict=True):
        assert float(row[1]) == pytest.approx(line["loss"], rel=1e-5)
        wanted = [number(line[key]) for key in ("lr", "grad_norm", "tokens", "target_tokens", "step_s")]
        assert row[2:7] == wanted and row[12] == line["bottleneck"]
    told = [line for line in read_metrics(finished / METRICS) if "eval_loss" in line]
    losses = [float(row[1]) for row in read.tables["evaluations"][1:]]
    assert losses == pytest.approx([line["eval_loss"] for line in told], rel=1e-5) and len(told) == 3
    assert len(re.findall("<use ", re.search(r'<g id="loss-evaluation">.*?</g>', page, re.DOTALL)[0])) == 3  # type: ignore[index]
    tokens = sum(line["tokens"] for line in steps)
    assert f"{tokens:,}" in read.text


def test_the_plan_stands_beside_what_was_measured(page: str, finished: Path) -> None:
    plan = json.loads((finished / "plan.json").read_text())
    rows = {row[0]: row for row in Read(page).tables["compared"][1:]}
    assert rows["step time"][1] == f"{number(plan['step_s'])} s"
    assert {"lane device", "lane disk_read", "lane disk_write", "host memory", "held on disk"} <= set(rows)
    assert "The lane that was mis-rated most is" in page or "No lane is off by more than 15 %" in page


def test_the_timeline_is_the_plans_own(finished: Path) -> None:
    run = read_run(finished)
    assert run.config is not None and run.plan is not None
    timeline, note = simulated(run.config, run.plan)
    assert timeline is not None and note.startswith("Simulated, by the same walk")
    busy = timeline.busy_s()
    assert {lane: s for lane, s in busy.items() if s} == pytest.approx(
        {lane: s for lane, s in run.plan["taken_s"].items() if s}, rel=0.02
    )
    _, note = simulated(run.config, {**run.plan, "step_s": 2 * run.plan["step_s"]})
    assert note.startswith("Simulated anew")


def test_the_timeline_of_several_ranks_has_their_exchanges(finished: Path) -> None:
    run = read_run(finished)
    assert run.config is not None and run.plan is not None
    timeline, note = simulated(run.config, {**run.plan, "ranks": 2, "zero_stage": 3, "commit": "hold"})
    assert timeline is not None, note
    assert timeline.busy_s()["net"] > 0


def test_a_traced_step_is_what_its_line_says(finished: Path, page: str) -> None:
    """Busy time of the computation is that of the metrics; every lane's ops lie in the step, one behind the other.
    What begins once the step is decided is the next one's, and not in the line."""
    for found, step in zip(read_traces(finished, [9, 3, 12]), (3, 9), strict=True):
        line = steps_of(finished)[step - 1]
        assert found.name == f"step {step}, measured" and found.length_s >= 0.9 * line["busy_s"]["device"]
        assert found.busy_s()["device"] == pytest.approx(line["busy_s"]["device"], rel=1e-3)
        assert {load.lane for load in found.loads()} == {"device", "h2d", "d2h", "cpu", "disk_read", "disk_write"}
        decided_s = max(s.end_s for s in found.spans if s.lane == "device")
        for lane, busy in found.busy_s().items():
            assert busy == pytest.approx(sum(s.end_s - s.start_s for s in found.spans if s.lane == lane), rel=1e-6)
            busy = sum(s.end_s - s.start_s for s in found.spans if s.lane == lane and s.start_s < decided_s)
            assert busy <= 1.05 * line["busy_s"][lane] + 1e-3
    assert "Timeline of step 9, measured" in page and "The last of 2 traced steps" in page
    assert sorted(path.name for path in (finished / "traces").iterdir()) == ["step-000003.json", "step-000009.json"]


def test_show_puts_measured_timelines_beside_its_own(finished: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "offloadz", "show", str(finished / "config.toml"), "--trace", str(tmp_path / "t.json")],
        cwd=ROOT, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0 and "with 2 measured" in done.stdout, done.stderr
    assert [found.name for found in read_trace(tmp_path / "t.json")] == [
        "predicted", "step 3, measured", "step 9, measured",
    ]  # fmt: skip


def test_a_damaged_trace_costs_itself_alone(run: Path) -> None:
    (run / "traces" / "step-000009.json").write_text('{"traceEvents": [{"ph": "X"}]}')
    page = render(read_run(run))
    assert "measured timelines cannot be read" in page and "chart-timeline" in page and "chart-measured" not in page


def test_what_happened_is_told(page: str) -> None:
    read = Read(page)
    starts = [row for row in read.tables[""] if row[-1].startswith(("the beginning", "went on"))]
    assert [(row[0], row[2]) for row in starts] == [("1", "the beginning"), ("8", "went on from step 7")]
    assert 'id="loss-start-0"' in page
    answers = [row for row in read.tables[""] if row[0] in ("5", "10", "12") and len(row) == 3]
    assert len(answers) == 3 and PROMPT in read.text
    assert "40 samples from 40 records" in read.text and "10 samples" in read.text
    assert page.count('class="card sample"') == 3 and "<mark>" in page
    assert ["optimizer.lr", "0.003"] in read.tables["changed"]


# ---- what runs leave behind ----


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: None, "does not exist"),
        (lambda path: path.write_text(""), "is a file"),
        (lambda path: path.mkdir(), "holds no metrics.jsonl"),
        (lambda path: (path.mkdir(), (path / METRICS).write_text("")), "is empty"),
        (lambda path: (path.mkdir(), (path / METRICS).write_text('{"step": 1, "lo')), "no whole line"),
        (lambda path: (path.mkdir(), (path / METRICS).write_bytes(b"\xff\x00\n")), "no whole line"),
    ],
)
def test_what_is_no_run_is_refused(tmp_path: Path, make: Callable[[Path], object], words: str) -> None:
    make(tmp_path / "run")
    with pytest.raises(ConfigError, match=words):
        report_command(tmp_path / "run", tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


def test_a_run_that_goes_on_is_read_as_it_stands(run: Path) -> None:
    """A half-written last line, a lock that is held, no end yet; afterwards the same run counts as stopped."""
    body = (run / METRICS).read_bytes().splitlines(keepends=True)
    (run / METRICS).write_bytes(b"".join(body[:4]) + b'{"step": 5, "loss": 2.')
    (run / "finished.json").unlink()
    with alone(run):
        assert is_held(run)
        page = render(read_run(run))
    assert 'busy">running' in page and "step 4 of 12" in page and "half written" in page
    assert len(points(page, "loss-measured")) == 4
    assert not is_held(run)
    assert 'bad">stopped' in render(read_run(run))


def test_one_step_is_enough_for_a_page_and_too_few_for_a_verdict(run: Path) -> None:
    (run / METRICS).write_bytes((run / METRICS).read_bytes().splitlines(keepends=True)[0])
    page = render(read_run(run))
    assert "No verdict" in page and "compared" not in Read(page).tables and "chart-step-time" in page
    plan = json.loads((run / "plan.json").read_text()) | {"copies": 2}
    (run / "plan.json").write_text(json.dumps(plan))
    assert "and 1 to 2, each of which writes a copy of the state on disk" in render(read_run(run))


@pytest.mark.parametrize("plan", ['{"step_s": "soon"}', '{"step_s": 3, "bytes": [], "peak": {}}', "{}"])
def test_what_is_no_number_is_a_gap(run: Path, plan: str) -> None:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    lines[1] = json.dumps(json.loads(lines[1]) | {"loss": "low", "busy_s": 7})
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (run / "plan.json").write_text(plan)
    assert report_command(run, None) == 0
    assert re.search("cannot be compared|is no plan of a run: bytes", (run / "report.html").read_text())


def test_a_page_needs_a_place(run: Path) -> None:
    for out in (run, run / "none" / "page.html"):
        with pytest.raises(ConfigError, match="needs the name of a file in a directory that is there"):
            report_command(run, out)


def test_damage_in_the_middle_is_told(run: Path) -> None:
    body = (run / METRICS).read_bytes().splitlines(keepends=True)
    (run / METRICS).write_bytes(b"".join([*body[:3], b"not json\n", *body[4:]]))
    found = read_run(run)
    assert len(found.steps) == 3 and any("damaged at line 4" in note for note in found.notes)


@pytest.mark.parametrize("content", [None, "{", "[]", "{}"])
def test_what_is_missing_is_said_and_nothing_made_up(run: Path, content: str | None) -> None:
    for name in ("plan.json", "data.json", "config.toml"):
        (run / name).unlink()
        if content is not None:
            (run / name).write_text(content)
    shutil.rmtree(run / "tensorboard")
    page = render(read_run(run))
    read = Read(page)
    assert "No verdict" in page and "compared" not in read.tables and "chart-timeline" not in page
    assert (
        "predicted" not in page[page.index("chart-step-time") : page.index("</figure>", page.index("chart-step-time"))]
    )
    assert "Not known." in page and "resumes are not shown" in page
    assert content == "{}" or all(f"{name}" in page for name in ("plan.json", "data.json", "config.toml"))
    assert len(read.tables["all-steps"]) == 13


def test_a_model_that_has_moved_costs_the_timeline_alone(run: Path) -> None:
    told = (run / "config.toml").read_text()
    (run / "config.toml").write_text(re.sub(r"(?m)^path = .*$", 'path = "/gone/model"', told))
    page = render(read_run(run))
    assert "cannot be simulated here" in page and "chart-timeline" not in page and "chart-lanes" in page


def test_skipped_steps_are_marked_and_leave_gaps(run: Path) -> None:
    def skip(line: dict[str, Any]) -> None:
        if line["step"] in (4, 5) and "loss" in line:
            line |= {"skipped": True, "reason": "a gradient is not finite", "loss": None, "grad_norm": None}

    page = render(read_run(changed(run, skip)))
    rows = Read(page).tables["skipped"][1:]
    assert [row[:3] for row in rows] == [[str(step), "a gradient is not finite", "-"] for step in (4, 5)]
    assert len(points(page, "loss-measured")) == 10
    assert len(re.findall("<use ", re.search(r'<g id="loss-skipped">.*?</g>', page, re.DOTALL)[0])) == 2  # type: ignore[index]


def test_metrics_of_an_older_run_lack_bytes_and_say_so(run: Path) -> None:
    def older(line: dict[str, Any]) -> None:
        for key in ("host_resident", "disk_held"):
            line.get("bytes", {}).pop(key, None)

    page = render(read_run(changed(run, older)))
    assert "chart-memory-host" in page and "chart-memory-disk" not in page
    disk = next(row for row in Read(page).tables["tiers"] if row[0] == "disk")
    assert disk[-1] == "-"


def test_texts_of_a_run_are_no_markup(run: Path) -> None:
    hostile = "<script>alert('x')</script>&amp;\"<b>"

    def spoil(line: dict[str, Any]) -> None:
        for sample in line.get("generated", []):
            sample |= {"prompt": hostile, "text": hostile}

    changed(run, spoil)
    data = json.loads((run / "data.json").read_text())
    data["samples"][0] |= {"pieces": [[hostile, True]], "place": hostile}
    (run / "data.json").write_text(json.dumps(data))
    page = render(read_run(run))
    assert "<script" not in page and "<b>" not in page and html.escape(hostile, quote=False)[:8] in page


def test_a_long_run_makes_a_small_page_that_says_what_it_left_out(run: Path) -> None:
    line = steps_of(run)[-1]
    lines = [
        {**line, "step": step, "loss": 3 + math.sin(step / 50), "skipped": step % 7 == 0} for step in range(1, 5001)
    ]
    (run / METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = render(read_run(run))
    assert len(page) < 1_000_000
    every = -(-5000 // MOST_POINTS)
    assert f"Each point is the mean of {every} steps" in page and len(points(page, "loss-measured")) == 500
    rows = Read(page).tables["all-steps"]
    assert MOST_ROWS // 2 < len(rows) <= MOST_ROWS + 2 and [rows[1][0], rows[-1][0]] == ["1", "5000"]
    assert "of 5000 steps, evenly chosen" in page and "and 614 more" in page


def test_without_matplotlib_it_says_what_to_install(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r'pip install "offloadz\[report\]"'):
        report_command(run, None)
    assert not (run / "report.html").exists()


def test_the_command_writes_one_file_and_changes_nothing_else(run: Path, tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    command = [sys.executable, "-m", "offloadz", "report", str(run)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "report.html: 12 steps" in done.stdout and (run / "report.html").read_text().startswith("<!DOCTYPE html>")
    assert {path: path.read_bytes() for path in before} == before
    assert (run / "report.html").stat().st_mode & 0o077 == 0  # it holds what the run's private files hold
    done = subprocess.run([*command, "-o", "/dev/null/page"], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 2 and "/dev/null/page" in done.stderr and "Traceback" not in done.stderr


# ---- small parts ----


def test_points_stand_for_runs_of_neighbours() -> None:
    points, every = bucketed(list(range(1, 12)), [float(x) for x in range(1, 11)] + [math.nan], most=4)
    assert every == 3 and points[0] == (2.0, 1.0, 2.0, 3.0) and points[3] == (10.5, 10.0, 10.0, 10.0)
    assert bucketed([1, 2], [5.0, 6.0])[0] == [(1, 5.0, 5.0, 5.0), (2, 6.0, 6.0, 6.0)]


def test_runs_of_steps_and_of_spans() -> None:
    assert list(ranges([1, 2, 3, 7, 9, 10])) == ["1-3", "7", "9-10"] and list(ranges([])) == []
    assert merged([(5, 6), (0, 1), (1.05, 2), (1.5, 1.7)], 0.1) == [(0, 2), (5, 6)]


def test_bytes_held_are_those_of_files_each_once(tmp_path: Path) -> None:
    (tmp_path / "state" / "deeper").mkdir(parents=True)
    for name in ("a", "state/b", "state/deeper/c"):
        (tmp_path / name).write_bytes(b"x" * 8192)
    os.link(tmp_path / "a", tmp_path / "state" / "link")
    blocks = sum((tmp_path / name).stat().st_blocks for name in ("a", "state/b", "state/deeper/c"))
    assert held_bytes(tmp_path) == 512 * blocks > 0
    assert held_bytes(tmp_path / "none") == 0


@pytest.mark.skipif(not BROWSER, reason="neither chromium nor chrome is on the path")
@pytest.mark.parametrize("width", [390, 1280])
def test_a_browser_shows_it_without_scrolling_sideways(page: str, tmp_path: Path, width: int) -> None:
    """In a frame as wide as a phone: nothing sticks out, nothing was loaded, every chart has a size."""
    frame = tmp_path / "frame.html"
    frame.write_text(
        f"<!DOCTYPE html><body><iframe style='width:{width}px;height:800px;border:0' srcdoc=\"{html.escape(page)}\">"
        "</iframe><p id=told></p><script>onload = () => { const view = frames[0], root = view.document;"
        "const charts = [...root.querySelectorAll('svg')].map(svg => svg.getBoundingClientRect().width);"
        "const loads = view.performance.getEntriesByType('resource').length;"
        "const width = root.scrollingElement.scrollWidth;"
        "told.textContent = JSON.stringify([width, Math.min(...charts), charts.length, loads])"
        "}</script>"
    )
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}",
               "--window-size=1400,900", "--virtual-time-budget=5000", "--dump-dom", frame.as_uri()]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    told = re.search(r'<p id="told">(\[.*?\])</p>', done.stdout)
    assert told is not None, done.stderr
    widest, narrowest, num_charts, num_loads = json.loads(told[1])
    assert widest <= width and narrowest > 250 and num_charts == len(CHARTS) and num_loads == 0
