"""Python's garbage collector, kept from looking through large graphs again and again."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """For tracing, which makes millions of objects that live on: looking among them for garbage takes a sixth of its
    time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def among_new_alone() -> Iterator[None]:
    """For work beside a large graph that lives on: garbage is looked for among what is made within."""
    if gc.get_freeze_count():  # somebody does so already, and may want to go on
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
