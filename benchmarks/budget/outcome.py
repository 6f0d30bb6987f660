"""What one training came to, as a line of the journal."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

Key = tuple[str, str, int]
"""Task, method, seed."""


@dataclass(frozen=True)
class Outcome:
    """A training with one method, paired with exact training of the same weights and batches."""

    task: str
    method: str
    seed: int
    metric: float | None
    """On the test set, smaller is better; `None` where it is no number any more."""
    gained: float
    """What exact training gained over the trivial predictor, in the metric."""
    lost: float | None
    """What the method lost to exact training, as a part of `gained`: 0.01 is one per cent. Below 0, it is better."""
    lost_error: float | None
    """The standard error of `lost`, as the test set is finite: of the paired differences of all samples."""
    losses: tuple[float | None, ...]
    """Training losses over all ranks, a mean over each of `CURVE_PARTS` equal parts of the steps."""
    seconds: float
    """Wall-clock of the training on this machine, which says nothing of the method's speed on a network."""

    @property
    def key(self) -> Key:
        return self.task, self.method, self.seed


T = TypeVar("T")


def records(path: Path, kind: Callable[..., T]) -> Iterator[T]:
    """What `kind` makes of each line of a journal; a line that was cut off, or is of another kind, is left out."""
    for line in path.read_text().splitlines() if path.exists() else ():
        with suppress(ValueError, TypeError):
            yield kind(**json.loads(line))


class Journal:
    """A file to which outcomes are added, a line of JSON each."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def outcomes(self) -> dict[Key, Outcome]:
        """All that can be read; of the same training, the last. A line that was cut off is left out."""
        found: dict[Key, Outcome] = {}
        for line in self.path.read_text().splitlines() if self.path.exists() else ():
            try:
                told: dict[str, Any] = json.loads(line)
                outcome = Outcome(**{**told, "losses": tuple(told["losses"])})
            except (ValueError, KeyError, TypeError):
                continue
            found[outcome.key] = outcome
        return found

    def add(self, outcome: Outcome) -> None:
        """Adds a line."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(asdict(outcome)) + "\n")
