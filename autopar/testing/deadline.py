"""A deadline for what a rank looks at: past it, the rank says in which operation it is, and ends."""

from __future__ import annotations

import linecache
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import torch.fx

from autopar.ops.base import Call
from autopar.runtime.writer import CALL

STUCK = 3
"""The exit status of a rank that has ended so."""
LINGER_S = 3.0
"""Between a rank's last words and its end, so that ranks that wait for it say where they are, not that it is gone."""


class Deadline:
    """Ends this process where something takes longer than it may."""

    def __init__(self, seconds: float, last_words: Callable[[str], None]) -> None:
        """`last_words`: is told what it was in, from another thread, before the process ends."""
        self.seconds = seconds
        self._last_words = last_words
        self._watched = threading.get_ident()

    @contextmanager
    def on(self) -> Iterator[None]:
        """Around what may take so long."""
        timer = threading.Timer(self.seconds, self._end)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _end(self) -> None:
        self._last_words(f"did not end within {self.seconds:g} s: it {place(sys._current_frames()[self._watched])}")
        time.sleep(LINGER_S)
        os._exit(STUCK)


def place(frame: FrameType | None) -> str:
    """Where a thread is, in words: in which operation of a step, or else in which line."""
    innermost = frame
    while frame is not None:
        node = _node(frame)
        if node is not None and CALL in node.meta:
            call: Call = node.meta[CALL][0]
            begun = call.op.waits_for(call)
            does = f"waits for '{begun.op.name}'" if begun is not None else f"is in '{call.op.name}'"
            of = "" if call.group is None else f" of group {call.group.index} ('{call.group.spec.strategy}')"
            return f"{does}{of}"
        frame = frame.f_back
    if innermost is None:
        return "has ended"
    return f"is at {innermost.f_code.co_filename}:{innermost.f_lineno}, in {innermost.f_code.co_name}"


def _node(frame: FrameType) -> torch.fx.Node | None:
    """The node that a frame runs, of an interpreter or of a graph's own code."""
    run, module = frame.f_locals.get("n"), frame.f_locals.get("self")
    if isinstance(run, torch.fx.Node) and frame.f_code.co_name == "run_node":
        return run
    if not isinstance(module, torch.fx.GraphModule) or frame.f_code.co_name != "forward":
        return None
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno, frame.f_globals)
    name = line.split("=")[0].split(":")[0].strip()  # as in `wait_1: "f32[3]" = wait(...)`
    return next((n for n in module.graph.nodes if n.name == name), None)
