"""Files of JSON objects, one a line, that are appended to and never rewritten, by several processes at a time.

A line is written at once, under a lock: a process that is killed leaves what it knew, and at most half a line, which
the next one ends and readers pass over.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from autopar.errors import SpecError


class Lines:
    """Appends to such a file; use it as a context manager. `what` it is called in errors."""

    def __init__(self, path: str | Path, what: str) -> None:
        self.path = Path(path)
        self._what = what
        self._file: int | None = None

    def __enter__(self) -> Self:
        try:
            self._file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as e:
            raise self._refused(e) from e
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._close()

    def append(self, record: Mapping[str, Any]) -> None:
        """Raises `SpecError` where it cannot be written; then nothing more can."""
        assert self._file is not None, "lines are written inside `with`"
        text = json.dumps(record, separators=(",", ":")) + "\n"
        try:
            with _locked(self._file):
                # Another process, or this one before it was killed, may have left half a line.
                left = b"\n" if _ends_within_a_line(self._file) else b""
                rest = left + text.encode()
                while rest:
                    rest = rest[os.write(self._file, rest) :]
        except OSError as e:
            self._close()
            raise self._refused(e) from e

    def _refused(self, error: OSError) -> SpecError:
        return SpecError(f"{self.path}: cannot write the {self._what}: {error.strerror or error}")

    def _close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # of what could not be written, which was said before
                os.close(self._file)
            self._file = None


def read_lines(path: str | Path) -> Iterator[dict[str, Any]]:
    """The records of such a file, oldest first; lines that are no JSON objects are passed over."""
    with Path(path).open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(record, dict):
                yield record


@contextlib.contextmanager
def _locked(file: int) -> Iterator[None]:
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError:  # a file system without locks: lines of two processes may then run into each other
        yield
        return
    try:
        yield
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)


def _ends_within_a_line(file: int) -> bool:
    size = os.fstat(file).st_size
    return size > 0 and os.pread(file, 1, size - 1) != b"\n"
