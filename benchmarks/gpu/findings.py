"""What a part of `benchmarks.gpu` finds, as it is handed from the part's process to the command."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness import Target


@dataclass
class Findings:
    """Rows, targets, notes and figures of one part. They are written anew whenever something is added, so that what a
    part had found is there where its time is over."""

    path: Path
    rows: list[tuple[str, str]] = field(default_factory=list)
    """What was looked at, and what was found, in words."""
    targets: list[Target] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)

    def row(self, what: str, found: str) -> None:
        """Adds a row to the table."""
        self.rows.append((what, found))
        self.save()

    def target(self, name: str, value: float | None, limit: float, **more: Any) -> None:
        """Adds a figure that has a limit; `more` are further fields of `Target`."""
        self.targets.append(Target(name, value, limit, **more))
        self.save()

    def save(self) -> None:
        """Writes all to `path`."""
        whole = {
            "rows": self.rows,
            "targets": [asdict(t) for t in self.targets],
            "notes": self.notes,
            "data": self.data,
        }
        partial = self.path.with_suffix(".part")
        partial.write_text(json.dumps(whole))
        partial.replace(self.path)

    @classmethod
    def load(cls, path: Path) -> Findings:
        """What a part has written; nothing where it has written nothing."""
        if not path.exists():
            return cls(path)
        whole = json.loads(path.read_text())
        return cls(
            path,
            [(what, found) for what, found in whole["rows"]],
            [Target(**t) for t in whole["targets"]],
            whole["notes"],
            whole["data"],
        )
