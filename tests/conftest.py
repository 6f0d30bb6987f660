"""What holds for all tests."""

from __future__ import annotations

import signal

import pytest

# A shell starts what it runs in the background with SIGINT ignored, and nohup with SIGHUP, and processes inherit both:
# the programs that tests send these signals to would never see them. A handler is not inherited.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda number, frame: None)


@pytest.hookimpl(tryfirst=True)  # xdist's own hook reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where tests run in several processes: those that start ranks keep to one, those of the lab to another, so that
    not more than two jobs share the cores; the others go wherever there is room."""
    for item in items:
        for folder in ("gloo", "lab"):
            if f"tests/{folder}/" in item.nodeid:
                item.add_marker(pytest.mark.xdist_group(folder))
