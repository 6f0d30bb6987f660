"""Ctrl-C during a search: the first one ends it and keeps the best plan so far, the second one leaves at once."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Self

import click


class Interrupts:
    """While it is open, an interrupt sets `stop` once the search has `begun`, and raises `KeyboardInterrupt` before
    that, and when it comes again."""

    def __init__(self, stop: threading.Event) -> None:
        self.stop = stop
        self.begun = False
        self._before: object = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._interrupted)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if callable(self._before) or isinstance(self._before, int):
            signal.signal(signal.SIGINT, self._before)

    def _interrupted(self, number: int, frame: FrameType | None) -> None:
        if not self.begun or self.stop.is_set():
            raise KeyboardInterrupt
        self.stop.set()
        click.echo("\nstopping; the best plan so far is kept (once more: leave at once)", err=True)
