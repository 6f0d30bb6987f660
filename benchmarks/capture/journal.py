"""The outcomes of a run that may be stopped: a line of JSON each, kept as they come."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import torch

import autopar
from benchmarks.capture.outcome import Outcome


def revision() -> str:
    """A digest of what outcomes depend on: autopar's sources, and the version of PyTorch."""
    digest = hashlib.sha256(torch.__version__.encode())
    package = Path(autopar.__file__).parent
    for folder in (package, *(p for p in package.iterdir() if p.is_symlink())):
        for file in sorted(folder.resolve().rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


@dataclass(frozen=True)
class Journal:
    """A file to which outcomes are added, of this revision and of others."""

    path: Path
    revision: str

    def outcomes(self, any_revision: bool = False) -> dict[str, Outcome]:
        """The last of each model, of this revision alone unless `any_revision`; a line that was cut off is left out."""
        found: dict[str, Outcome] = {}
        if not self.path.exists():
            return found
        for line in self.path.read_text().splitlines():
            try:
                told = json.loads(line)
                outcome = Outcome.of(told["outcome"])
            except (ValueError, KeyError, TypeError):
                continue
            if any_revision or told["revision"] == self.revision:
                found[outcome.name] = outcome
        return found

    def add(self, outcome: Outcome) -> None:
        """Adds a line."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps({"revision": self.revision, "outcome": outcome.as_dict()}) + "\n")
