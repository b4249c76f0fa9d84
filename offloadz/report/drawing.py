"""Charts as SVG that stands inside a page: matplotlib draws, colours and fonts are left to the page.

Every colour is drawn as a stand-in that becomes a CSS variable, so one chart serves a light and a dark page; text stays
text, in the page's font.  A chart is as wide as a phone (`WIDTH`) and the page sets several beside each other.  The
trade-off: nothing can be pointed at, so exact values stand in the page's tables; a page needs no script, and some 20 kB
where an interactive library would bring 1 to 5 MB.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

from offloadz.plan.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH, HEIGHT = 330, 205
"""Of a chart, in units that are a CSS pixel on a phone."""

MOST_POINTS = 500
"""Points of a line; of more steps each point is the mean of as many neighbours as it takes."""

NAMES = (
    "ink", "faint", "grid", "measured", "predicted", "good", "bad",
    "computation", "weights", "gradients", "state", "inputs",
)  # fmt: skip
COLOURS = {name: f"#0102{number:02x}" for number, name in enumerate(NAMES, 16)}
"""What a colour of the page is called, and what stands in for it while matplotlib draws."""


@dataclass(frozen=True)
class Key:
    """An entry of a chart's legend: its words, a name of `COLOURS`, and how it looks (`line`, `dash`, `box`, ...)."""

    words: str
    colour: str
    kind: str = "line"


@dataclass(frozen=True)
class Chart:
    """A drawn chart: `name` is unique in the page, `svg` is markup, `note` tells what a reader must know."""

    name: str
    title: str
    svg: str
    keys: tuple[Key, ...] = ()
    note: str = ""


def require_matplotlib() -> None:
    """ConfigError that says what to install, before anything is read."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"`offloadz report` draws with matplotlib, which cannot be imported ({error}); "
            'install it: pip install "offloadz[report]", or pip install matplotlib'
        ) from None


def draw(name: str, title: str, paint: Callable[[Axes], None], height: float = HEIGHT) -> str:
    """The SVG of what `paint` puts on a pair of axes; ids begin with `name`, `title` is read to who cannot see."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    ink, faint = COLOURS["ink"], COLOURS["faint"]
    settings: dict[Any, Any] = {
        "svg.fonttype": "none", "svg.hashsalt": name, "path.simplify": False, "font.family": "DejaVu Sans",
        "font.size": 10, "xtick.labelsize": 9.5, "ytick.labelsize": 9.5, "axes.labelsize": 9.5, "lines.linewidth": 1.6,
        "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": COLOURS["grid"], "text.color": ink,
        "axes.labelcolor": faint, "xtick.color": COLOURS["grid"], "ytick.color": COLOURS["grid"],
        "xtick.labelcolor": faint, "ytick.labelcolor": faint, "grid.color": COLOURS["grid"], "grid.linewidth": 0.7,
        "axes.axisbelow": True, "lines.markersize": 3.2,
    }  # fmt: skip
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=(WIDTH / 72, height / 72), layout=ConstrainedLayoutEngine(w_pad=0.02, h_pad=0.03))
        axes = figure.add_subplot()
        paint(axes)
        written = io.StringIO()
        figure.savefig(written, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return _for_page(written.getvalue(), name, title)


def _for_page(svg: str, name: str, title: str) -> str:
    """The element alone: no headers and addresses, ids of its own, variables for colours, the page's font."""
    head, _, body = svg[svg.index("<svg") :].partition(">")
    view = re.search(r'viewBox="[^"]*"', head)
    svg = f'<svg role="img" aria-label="{title}" {view[0] if view else ""}>{body}'
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r"\n\s*", "\n", svg).replace("xlink:href=", "href=")
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", svg)
    for colour, stand_in in COLOURS.items():
        svg = svg.replace(stand_in, f"var(--{colour})")
    return re.sub(r"'DejaVu Sans'[^;\"]*", "var(--font)", svg).strip()


def numbers(values: Sequence[float | None]) -> list[float]:
    """Values with a gap (NaN) where there is none, or none that is a number."""
    return [float(value) if isinstance(value, int | float) else math.nan for value in values]


def bucketed(xs: Sequence[float], ys: Sequence[float], most: int = MOST_POINTS) -> tuple[list[Any], int]:
    """Points (x, least, mean, greatest) of equal runs of neighbours, and how many values a point stands for."""
    every = max(1, -(-len(xs) // most))
    points = []
    for start in range(0, len(xs), every):
        found = [y for y in ys[start : start + every] if not math.isnan(y)]
        mean = fmean(found) if found else math.nan
        points.append(
            (fmean(xs[start : start + every]), min(found, default=math.nan), mean, max(found, default=math.nan))
        )
    return points, every


def line(axes: Axes, xs: Sequence[float], ys: Sequence[float], colour: str, gid: str) -> int:
    """A line with points where they are few, a band around it where they are many; returns steps per point."""
    points, every = bucketed(xs, ys)
    at, least, mean, most = zip(*points, strict=True)
    marker = "o" if len(points) <= 40 else ""
    axes.plot(at, mean, color=COLOURS[colour], marker=marker, gid=gid)
    if every > 1:
        axes.fill_between(at, least, most, color=COLOURS[colour], alpha=0.18, linewidth=0)
    return every


def level(axes: Axes, height: float, colour: str, gid: str, style: str = "--") -> None:
    """A horizontal line: what was predicted, or must not be crossed."""
    axes.axhline(height, color=COLOURS[colour], linestyle=style, linewidth=1.4, gid=gid)
