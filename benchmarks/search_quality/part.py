"""What a part of the benchmark is given: a report to fill, what was found before, and which cases it is asked for."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.capture.journal import revision
from benchmarks.harness import Report

COLUMNS = ("part", "case", "measured", "beside", "ratio")
Figures = dict[str, Any]


def version() -> str:
    """A digest of what is found depends on: autopar, PyTorch, and this benchmark."""
    digest = hashlib.sha256(revision().encode())
    for file in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


@dataclass(frozen=True)
class Kept:
    """A file of what was found, a line of JSON a case, so that a run that was stopped goes on where it was."""

    path: Path
    version: str
    any_version: bool = False
    """Whether what another version found counts as well: all of it takes longer than an evening."""
    say: Callable[[str], None] = lambda line: None

    def of(self, case: str, measure: Callable[[], Figures]) -> Figures:
        """What was found for a case, the last time, by this version or by any; measured now where nothing was."""
        known = self._known().get(case)
        if known is None:
            self.say(case)
            known = measure()
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a") as file:
                file.write(json.dumps({"version": self.version, "case": case, "found": known}) + "\n")
        return known

    def _known(self) -> dict[str, Figures]:
        found: dict[str, Figures] = {}
        if self.path.exists():
            for line in self.path.read_text().splitlines():
                try:
                    told = json.loads(line)
                    if self.any_version or told["version"] == self.version:
                        found[told["case"]] = told["found"]
                except (ValueError, KeyError, TypeError):  # a line that was cut off
                    continue
        return found


@dataclass(frozen=True)
class Asked:
    """Which cases of one part are asked for; all where `cases` is empty."""

    cases: tuple[str, ...] = ()

    def holds(self, case: str) -> bool:
        return not self.cases or case in self.cases


Part = Callable[[Report, Kept, Asked], None]


def asked(only: Sequence[str], parts: Sequence[str], default: Sequence[str]) -> dict[str, Asked]:
    """Parts with their cases, of words like `optimum` and `optimum/17`. Raises `KeyError` for another part."""
    found: dict[str, list[str]] = {}
    for word in only or default:
        part, _, case = word.partition("/")
        if part not in parts:
            raise KeyError(f"no part '{part}': expected one of {', '.join(parts)}, or PART/CASE")
        found.setdefault(part, []).append(case)
    return {part: Asked(() if "" in cases else tuple(cases)) for part, cases in found.items()}
