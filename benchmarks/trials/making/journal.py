"""The journal: an append-only file of records, which a run of the collector that follows another one continues."""

from __future__ import annotations

import hashlib
import lzma
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from benchmarks.trials.records import AnyRecord, Cluster, Dataset, Graph, read

LIMIT_BYTES = 10_000_000
"""Of the compressed form, which is committed."""


class Journal:
    """What was measured so far, and a file to which more is appended. A context manager."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.known = Dataset()
        self._file: IO[str] | None = None

    def __enter__(self) -> Self:
        if self.path.exists():
            _cut_off_half_a_line(self.path)
            self.known.add(read(self.path))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("a", encoding="utf-8")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()

    def write(self, record: AnyRecord) -> None:
        """Appends a record; graphs and clusters that are there already are left out."""
        if isinstance(record, Graph) and record.digest in self.known.graphs:
            return
        if isinstance(record, Cluster) and record.digest in self.known.clusters:
            return
        assert self._file is not None, "a journal is written inside `with`"
        # Defaults are left out, but for what tells the kinds of records apart.
        data = record.model_copy().model_dump_json(exclude_defaults=True)
        self._file.write(f'{{"kind":"{record.kind}",{data[1:]}\n')
        self._file.flush()
        self.known.add([record])


def digest(text: str) -> str:
    """Sixteen characters that stand for a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def pack(sources: Iterable[Path], target: Path) -> int:
    """Writes the records of journals into one compressed file, each graph and cluster once; returns its size in bytes.

    Raises ValueError where it would be larger than may be committed.
    """
    lines: dict[str, None] = {}
    for source in sources:
        with source.open(encoding="utf-8") as file:
            lines |= dict.fromkeys(line for line in file if line.endswith("\n"))
    data = lzma.compress("".join(lines).encode(), preset=9 | lzma.PRESET_EXTREME)
    if len(data) > LIMIT_BYTES:
        raise ValueError(f"{len(data)} bytes compressed, more than the {LIMIT_BYTES} that may be committed")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(data)
    return len(data)


def _cut_off_half_a_line(path: Path) -> None:
    """A run that was killed while it wrote leaves one."""
    whole = path.read_bytes()
    end = whole.rfind(b"\n") + 1
    if end < len(whole):
        with path.open("r+b") as file:
            file.truncate(end)
