"""What came of the demo: figures, a table for people, a file for programs."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.harness import Spread
from benchmarks.peers.outcome import OURS, REFERENCE, TOLERANCE, CaseOutcome, Measured, relative
from benchmarks.peers.table import LIMIT


@dataclass(frozen=True)
class Outcome:
    """Both systems, and autopar's speed as a multiple of DDP's."""

    autopar: Measured
    ddp: Measured
    loss_difference: float
    """The greatest relative difference between the two systems' losses, over all steps."""

    @classmethod
    def of(cls, case: CaseOutcome) -> Outcome:
        """Raises `ValueError`, with the reason, where one of the two did not run."""
        found = {entry.name: entry.system for entry in case.entries}
        for name in (OURS, REFERENCE):
            if name not in found:
                raise ValueError(f"{name} did not run: {case.absent.get(name, 'its ranks failed')}")
        difference = case.loss_difference(found[OURS])
        assert difference is not None
        return cls(found[OURS], found[REFERENCE], difference)

    @property
    def ratio(self) -> Spread:
        """DDP's time over autopar's, within each round."""
        return relative(self.ddp, self.autopar)

    def shortfalls(self) -> list[str]:
        """What misses its target, in words; empty where nothing does."""
        lines, losses = [], self.autopar.losses
        if self.loss_difference > TOLERANCE["exact"]:
            lines.append(f"losses differ by {self.loss_difference:.1e} of DDP's, target {TOLERANCE['exact']:.0e}")
        if losses[-1] >= losses[0]:
            lines.append(f"the loss did not fall: {losses[0]:.4f} to {losses[-1]:.4f}")
        if self.ratio.median < 1 / LIMIT:
            lines.append(f"speed is {self.ratio.median:.3f} of DDP's, target {1 / LIMIT:.2f}")
        return lines

    def table(self, title: str) -> Table:
        """The figures side by side."""
        table = Table(title=title, title_justify="left", show_edge=False)
        table.add_column("")
        table.add_column("autopar", justify="right")
        table.add_column("torch DDP", justify="right")
        both: Sequence[Measured] = (self.autopar, self.ddp)
        times = [Spread.of(1e3 * s for s in system.step_s.values()) for system in both]
        table.add_row("step time, median of blocks", *(f"{t.median:.0f} ms" for t in times))
        table.add_row("  middle half of the blocks", *(f"{t.lower:.0f} to {t.upper:.0f} ms" for t in times))
        table.add_row("speed, median of paired blocks", f"{self.ratio.median:.2f}x", "1x")
        table.add_row("  middle half of the pairs", f"{self.ratio.lower:.2f}x to {self.ratio.upper:.2f}x", "")
        table.add_row("sent per rank and step", *(_megabytes(s.sent_bytes) for s in both))
        table.add_row("  by the rank that sends most", *(_megabytes(s.sent_bytes_most) for s in both))
        table.add_row("loss of the first step", *(f"{s.losses[0]:.5f}" for s in both))
        table.add_row(f"loss of step {len(self.ddp.losses)}", *(f"{s.losses[-1]:.5f}" for s in both))
        return table

    def save(self, path: Path, about: dict[str, Any]) -> None:
        """Writes all figures as JSON, with `about`, the date, and the versions they were taken with."""
        packages = ("autopar", "torch", "transformers", "tokenizers", "numpy")
        record = {
            **about,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "versions": {"python": platform.python_version(), **{p: version(p) for p in packages}},
            "ratio": asdict(self.ratio),
            **asdict(self),
        }
        path.write_text(json.dumps(record, indent=1) + "\n")


def _megabytes(count: float | None) -> str:
    return "not counted" if count is None else f"{count / 1e6:.1f} MB"
