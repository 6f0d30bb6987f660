"""Python's garbage collector, kept from looking through large graphs again and again."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """For tracing, which makes millions of objects that live on, where looking among them for garbage takes a sixth of
    its time; and for proofs, beside whose objects it would look through all that was traced: 0.6 s, of a step of 0.07 s
    (`gc.callbacks` in the first step of the scaled-down ResNet-50 of `benchmarks.proof`)."""
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
