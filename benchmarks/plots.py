"""Line charts of a benchmark's figures, drawn by Matplotlib into files that GitHub shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import click


def check_can_draw() -> None:
    """Raises `click.ClickException` where Matplotlib is missing: to be called before the work whose plots it draws."""
    if find_spec("matplotlib") is None:
        raise click.ClickException("--save draws plots with Matplotlib, which is not installed: pip install '.[bench]'")


@dataclass(frozen=True)
class Plot:
    """Lines over one quantity."""

    name: str
    """Of the file, without its ending."""
    title: str
    x_label: str
    y_label: str
    lines: Mapping[str, Sequence[tuple[float, float]]]
    """Points of each, by what it is called."""

    def save(self, path: Path) -> None:
        """Writes it as SVG: the same points give the same file. Takes the extra `bench`."""
        from matplotlib import rc_context
        from matplotlib.figure import Figure

        with rc_context({"svg.hashsalt": self.name, "svg.fonttype": "none"}):
            figure = Figure(figsize=(6.4, 3.6), layout="constrained")
            axes = figure.subplots()
            for name, points in self.lines.items():
                axes.plot(*zip(*sorted(points), strict=True), marker="o", label=name)
            axes.set(title=self.title, xlabel=self.x_label, ylabel=self.y_label)
            axes.set_xscale("log", base=2)
            ticks = sorted({x for points in self.lines.values() for x, _ in points})
            axes.set_xticks(ticks, labels=[f"{x:g}" for x in ticks])
            axes.set_ylim(bottom=0)
            axes.grid(alpha=0.3)
            axes.legend()
            figure.savefig(path, format="svg", metadata={"Date": None})
