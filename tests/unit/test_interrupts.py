"""A signal that falls into a destructor, where Python drops what is raised, still ends the program."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable

import pytest

from autopar.lab.interrupts import exit_on_signals


class _Dying:
    """Runs something in its destructor."""

    def __init__(self, last: Callable[[], object]) -> None:
        self.last = last

    def __del__(self) -> None:
        self.last()


def _outlives(last: Callable[[], object]) -> None:
    _Dying(last)
    time.sleep(5)


@pytest.mark.parametrize(
    ("number", "raised"),
    [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit), (signal.SIGHUP, SystemExit)],
)
def test_it_is_raised_again(number: signal.Signals, raised: type[BaseException]) -> None:
    was = signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    try:
        with exit_on_signals(), pytest.raises(raised) as found:
            _outlives(lambda: os.kill(os.getpid(), number))
    finally:
        signal.signal(number, was)
    if isinstance(found.value, SystemExit):
        assert found.value.code == 128 + number


def test_other_errors_of_destructors_go_where_they_went(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda lost: seen.append(lost.exc_type))
    with exit_on_signals():
        _Dying(lambda: 1 / 0)
    assert seen == [ZeroDivisionError]
    assert sys.unraisablehook.__name__ == "<lambda>"
