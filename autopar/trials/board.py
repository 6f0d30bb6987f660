"""A board: where the search and the ranks of a job leave texts for each other, and find them. JSON only."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from autopar.errors import SpecError

POLL_S = 0.02
BEAT_S = 5.0
SILENT_S = 120.0
"""Seconds without a sign of life, after which ranks take the search for dead."""
BEAT, END = "alive", "end"


class Board(Protocol):
    """Texts by key; each is written once, but for the sign of life."""

    def put(self, key: str, text: str) -> None: ...

    def get(self, key: str) -> str | None:
        """`None` where it is not there yet."""


class FolderBoard:
    """A folder that all hosts see: a file for each key, written under another name and renamed."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def put(self, key: str, text: str) -> None:
        path = self._path(key)
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            draft.write_text(text, encoding="utf-8")
            draft.replace(path)
        except OSError as e:
            raise SpecError(f"{path}: cannot write what the ranks of the trials are told: {e.strerror or e}") from e

    def get(self, key: str) -> str | None:
        try:
            return self._path(key).read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        except OSError as e:
            raise SpecError(f"{self._path(key)}: cannot read: {e.strerror or e}") from e

    def _path(self, key: str) -> Path:
        return self.folder / f"{key.replace('/', '-')}.json"


class StoreBoard:
    """The store of a job that torchrun has started."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def put(self, key: str, text: str) -> None:
        self._store.set(key, text)

    def get(self, key: str) -> str | None:
        return bytes(self._store.get(key)).decode() if self._store.check([key]) else None


class Beating:
    """While it is open, the board shows that the search lives; at its end, that it is over.

    Where a sign cannot be written, as while a network file system is away, the next beat writes one. Where the end
    cannot be written, ranks stop by themselves after `SILENT_S` seconds without a sign.
    """

    def __init__(self, board: Board) -> None:
        self._board = board
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="autopar-trials-beat", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._over.set()
        self._thread.join()
        self._show(END, "")

    def _beat(self) -> None:
        count = 0
        while not self._over.is_set():
            self._show(BEAT, str(count))
            count += 1
            self._over.wait(BEAT_S)

    def _show(self, key: str, text: str) -> None:
        with contextlib.suppress(SpecError, RuntimeError):  # RuntimeError: torch's store
            self._board.put(key, text)


class Pulse:
    """In a rank: whether the search still lives."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._last: str | None = None
        self._since = self._looked = time.monotonic()

    @property
    def is_over(self) -> bool:
        """Whether the search has ended, or given no sign of life for long."""
        now = time.monotonic()
        if now - self._looked < BEAT_S / 5:
            return False
        self._looked = now
        beat = self._board.get(BEAT)
        if beat != self._last:
            self._last, self._since = beat, now
        return self._board.get(END) is not None or now - self._since > SILENT_S
