"""Curves of a benchmark as a picture: one panel per list of named lines.  matplotlib draws (extra `report`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

Line = tuple[Sequence[float], Sequence[float]]
"""Values of x, values of y."""


@dataclass(frozen=True)
class Panel:
    """One pair of axes."""

    title: str
    x: str
    y: str
    lines: Mapping[str, Line]
    logarithmic: bool = False
    limit: tuple[str, float] | None = None
    """A horizontal line that must not be crossed: its name and height."""


def draw(target: Path, panels: Sequence[Panel]) -> None:
    """Write `target` (SVG or PNG by its ending)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams["svg.hashsalt"] = "offloadz"  # the same figures give the same file
    figure, axes = pyplot.subplots(1, len(panels), figsize=(5.2 * len(panels), 3.6), squeeze=False)
    for axis, panel in zip(axes[0], panels, strict=True):
        for index, (name, (xs, ys)) in enumerate(panel.lines.items()):
            dashed = "--" if index % 2 else "-"  # two lines that lie on each other are both seen
            axis.plot(xs, ys, dashed, label=name, linewidth=1.8 if index % 2 else 2.6, alpha=0.9)
        if panel.limit:
            axis.axhline(panel.limit[1], color="#cf222e", linewidth=1)
            axis.annotate(panel.limit[0], (0.02, panel.limit[1]), xycoords=("axes fraction", "data"), va="bottom",
                          fontsize=9, color="#cf222e")  # fmt: skip
        axis.set(title=panel.title, xlabel=panel.x, ylabel=panel.y, yscale="log" if panel.logarithmic else "linear")
        axis.grid(alpha=0.3)
        axis.legend(frameon=False, fontsize=9)
    figure.tight_layout()
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, metadata={"Date": None} if target.suffix == ".svg" else None)
    pyplot.close(figure)
