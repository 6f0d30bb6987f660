"""The journal: every plan that a search priced, one JSON object a line, appended and never rewritten.

The first line of a search says for which model and cluster it was. A line is written at once, so that a search that
is cut short leaves what it knew. Lines can be read back with `read`; a half-written last line is passed over.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from autopar.errors import SpecError
from autopar.search.base import Candidate

FORMAT = 1


class Journal:
    """Appends to a JSONL file; use it as a context manager."""

    def __init__(self, path: str | Path, **header: Any) -> None:
        self.path = Path(path)
        self.header = header
        self._file: TextIO | None = None

    def __enter__(self) -> Self:
        try:
            self._file = self.path.open("a", encoding="utf-8")
            if _ends_within_a_line(self.path):
                self._file.write("\n")
        except OSError as e:
            self._close()
            raise SpecError(f"{self.path}: cannot write the journal: {e.strerror or e}") from e
        self._line({"search": {"format": FORMAT, **self.header}})
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._close()

    def write(self, candidate: Candidate) -> None:
        """Appends one priced plan."""
        prediction = candidate.estimate.prediction()
        self._line(
            {
                "candidate": candidate.name,
                "prediction": prediction.model_dump(),
                "overflow_bytes": candidate.overflow_bytes,
                "groups": [g.model_dump(mode="json", exclude_defaults=True) for g in candidate.groups],
            }
        )

    def _line(self, record: dict[str, Any]) -> None:
        assert self._file is not None, "a journal is written inside `with`"
        try:
            self._file.write(json.dumps(record, separators=(",", ":")) + "\n")
            self._file.flush()
        except OSError as e:
            self._close()
            raise SpecError(f"{self.path}: cannot write the journal: {e.strerror or e}") from e

    def _close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # of what could not be written, which was said before
                self._file.close()
            self._file = None


def read(path: str | Path) -> Iterator[dict[str, Any]]:
    """The records of a journal, oldest first; lines that are no JSON objects are passed over."""
    with Path(path).open(encoding="utf-8") as file:
        for line in file:
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(record, dict):
                yield record


def _ends_within_a_line(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(0, 2)
        if file.tell() == 0:
            return False
        file.seek(-1, 2)
        return file.read(1) != b"\n"
