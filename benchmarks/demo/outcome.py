"""What came of a comparison: figures, a table for people, a file for programs."""

from __future__ import annotations

import json
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.demo.compare import Block

LOSS_TOLERANCE = 1e-3
"""Relative. Both systems add up the same numbers in another order; AdamW amplifies that where gradients are tiny."""
RATIO_TARGET = 0.97
"""A chosen plan is never slower than this fraction of a peer's speed."""


@dataclass(frozen=True)
class SystemOutcome:
    """One system's figures."""

    step_s: float
    """Median over the timed steps."""
    step_s_quartiles: tuple[float, float]
    sent_bytes: float | None
    """Per rank and step; mean over ranks and timed steps."""
    sent_bytes_most: float | None
    """The same of the rank that sends most."""
    losses: tuple[float, ...]
    """Global mean loss of every step, warm-up included."""


@dataclass(frozen=True)
class Outcome:
    """Both systems, and autopar's speed as a multiple of DDP's."""

    autopar: SystemOutcome
    ddp: SystemOutcome
    ratios: tuple[float, ...]
    """DDP's time over autopar's, for each pair of blocks."""

    @classmethod
    def of(cls, warm_up: Sequence[Block], timed: Sequence[Block]) -> Outcome:
        """Raises ValueError where a block has no partner."""
        pairs = {
            name: sorted((b for b in timed if b.system == name), key=lambda b: b.first) for name in ("autopar", "ddp")
        }
        ratios = [d.mean_step_s / a.mean_step_s for a, d in zip(pairs["autopar"], pairs["ddp"], strict=True)]
        return cls(
            autopar=_system("autopar", warm_up, timed),
            ddp=_system("ddp", warm_up, timed),
            ratios=tuple(ratios),
        )

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)

    @property
    def ratio_quartiles(self) -> tuple[float, float]:
        return _quartiles(self.ratios)

    @property
    def loss_difference(self) -> float:
        """The greatest relative difference between the two systems' losses, over all steps."""
        both = zip(self.autopar.losses, self.ddp.losses, strict=True)
        return max(abs(a - d) / abs(d) for a, d in both)

    def shortfalls(self) -> list[str]:
        """What misses its target, in words; empty where nothing does."""
        lines = []
        if self.loss_difference > LOSS_TOLERANCE:
            lines.append(f"losses differ by {self.loss_difference:.1e} of DDP's, target {LOSS_TOLERANCE:.0e}")
        if self.autopar.losses[-1] >= self.autopar.losses[0]:
            lines.append(f"the loss did not fall: {self.autopar.losses[0]:.4f} to {self.autopar.losses[-1]:.4f}")
        if self.ratio < RATIO_TARGET:
            lines.append(f"speed is {self.ratio:.3f} of DDP's, target {RATIO_TARGET}")
        return lines

    def table(self, title: str) -> Table:
        """The figures side by side."""
        table = Table(title=title, title_justify="left", show_edge=False)
        table.add_column("")
        table.add_column("autopar", justify="right")
        table.add_column("torch DDP", justify="right")
        a, d = self.autopar, self.ddp
        low, high = self.ratio_quartiles
        table.add_row("step time, median", f"{a.step_s * 1e3:.0f} ms", f"{d.step_s * 1e3:.0f} ms")
        table.add_row("  middle half of the steps", *(_range(s.step_s_quartiles) for s in (a, d)))
        table.add_row("speed, median of paired blocks", f"{self.ratio:.2f}x", "1x")
        table.add_row("  middle half of the pairs", f"{low:.2f}x to {high:.2f}x", "")
        table.add_row("sent per rank and step", _megabytes(a.sent_bytes), _megabytes(d.sent_bytes))
        table.add_row("  by the rank that sends most", _megabytes(a.sent_bytes_most), _megabytes(d.sent_bytes_most))
        table.add_row("loss of the first step", f"{a.losses[0]:.5f}", f"{d.losses[0]:.5f}")
        table.add_row(f"loss of step {len(a.losses)}", f"{a.losses[-1]:.5f}", f"{d.losses[-1]:.5f}")
        return table

    def save(self, path: Path, about: dict[str, Any]) -> None:
        """Writes all figures as JSON, with `about`, the date, and the versions they were taken with."""
        packages = ("autopar", "torch", "transformers", "tokenizers", "numpy")
        record = {
            **about,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "versions": {"python": platform.python_version(), **{p: version(p) for p in packages}},
            "ratio": self.ratio,
            "ratio_quartiles": self.ratio_quartiles,
            "loss_difference": self.loss_difference,
            **asdict(self),
        }
        path.write_text(json.dumps(record, indent=1) + "\n")


def _system(name: str, warm_up: Sequence[Block], timed: Sequence[Block]) -> SystemOutcome:
    mine = [b for b in timed if b.system == name]
    times_s = [t for b in mine for t in b.step_s]
    every = sorted((b for b in (*warm_up, *timed) if b.system == name), key=lambda b: b.first)
    sent: list[float] | None = None
    if all(b.sent_bytes is not None for b in mine):
        by_rank = zip(*(b.sent_bytes or () for b in mine), strict=True)
        weights = [len(b.step_s) for b in mine]
        sent = [sum(s * w for s, w in zip(rank, weights, strict=True)) / sum(weights) for rank in by_rank]
    return SystemOutcome(
        step_s=statistics.median(times_s),
        step_s_quartiles=_quartiles(times_s),
        sent_bytes=sum(sent) / len(sent) if sent else None,
        sent_bytes_most=max(sent) if sent else None,
        losses=tuple(loss for b in every for loss in b.losses),
    )


def _quartiles(values: Sequence[float]) -> tuple[float, float]:
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def _range(quartiles: tuple[float, float]) -> str:
    return f"{quartiles[0] * 1e3:.0f} to {quartiles[1] * 1e3:.0f} ms"


def _megabytes(count: float | None) -> str:
    return "not counted" if count is None else f"{count / 1e6:.1f} MB"
