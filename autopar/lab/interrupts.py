"""Signals that end a program in order, so that it can clean up behind itself."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
_AGAIN_S = 0.01
"""After which a lost signal is sent again: the destructor that it fell into has ended."""


@contextmanager
def exit_on_signals() -> Iterator[None]:
    """While it is open, SIGTERM and SIGHUP raise SystemExit in the main thread, where nothing else handles them.

    What they or Ctrl-C raise is lost where it falls into a destructor, for Python lets nothing out of there. It is
    raised again behind it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    changed = [number for number in _SIGNALS if signal.getsignal(number) is signal.SIG_DFL]
    for number in changed:
        signal.signal(number, _leave)
    before = sys.unraisablehook
    sys.unraisablehook = partial(_not_lost, before)
    try:
        yield
    finally:
        sys.unraisablehook = before
        for number in changed:
            signal.signal(number, signal.SIG_DFL)


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _not_lost(otherwise: Callable[[UnraisableHookArgs], object], lost: UnraisableHookArgs) -> None:
    error = lost.exc_value
    number: int | None = None
    if isinstance(error, KeyboardInterrupt):
        number = signal.SIGINT
    elif isinstance(error, SystemExit) and isinstance(error.code, int) and error.code - 128 in _SIGNALS:
        number = error.code - 128
    if number is None:
        otherwise(lost)
    else:
        threading.Timer(_AGAIN_S, os.kill, (os.getpid(), number)).start()
