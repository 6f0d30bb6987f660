"""A rank's sign of life: what its thread writes to the store once a second, and its farewell."""

from __future__ import annotations

import contextlib
import multiprocessing.util
import threading
import time
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

BEAT_S = 1.0
ENDED = "ended"
"""In place of a count: the rank ended of itself, well or with an error of its own."""
_FAREWELL_S = 3 * BEAT_S
"""How long the process that serves the store waits, at its end, for the others to see that it ends."""
_EXIT_S = 10.0
"""How long a process waits for its thread; on a loaded machine, an answer of the store takes more than a second."""


class End:
    """The end of a thread that says farewell."""

    def __init__(self) -> None:
        self.is_near, self.has_come = threading.Event(), threading.Event()

    def come(self) -> None:
        """Ends the thread, and waits until it has ended: within the store, it would abort the process."""
        self.is_near.set()
        self.has_come.wait(_EXIT_S)


@dataclass
class Pulse:
    """What a rank's thread writes; the thread holds this, and not the `Presence`, which may thus be freed."""

    connection: Any
    """To the store, the thread's own."""
    prefix: str
    rank: int
    world_size: int
    serves: bool
    """Whether this process serves the store."""
    server: int | None
    """The rank whose process serves the store; `None` where it is this one, or no rank's."""
    place: int = 0
    joined: bool = False
    """Whether the default process group was there."""
    server_has_ended: bool = False
    """Whether the rank that serves the store has said farewell."""
    end: End = field(default_factory=lambda: End())

    def start(self) -> None:
        """Starts the thread, which ends with the interpreter at the latest."""
        thread = threading.Thread(target=self._run, name="autopar-presence", daemon=True)
        thread.start()
        weakref.finalize(thread, self.end.come)  # one that is in the store would not survive the interpreter's end
        if multiprocessing.parent_process() is not None:  # such a process may end without the above
            multiprocessing.util.Finalize(None, self.end.come, exitpriority=0)

    def _run(self) -> None:
        try:
            self._beat()
        finally:
            self.end.has_come.set()

    def _beat(self) -> None:
        """Writes the signs of life until the rank ends, and then that it ends."""
        store, count = PrefixStore(self.prefix, self.connection), 0
        with contextlib.suppress(RuntimeError):  # the store is gone, and with it the job
            while not self.end.is_near.is_set() and (dist.is_initialized() or not self.joined):
                store.set(f"beat/{self.rank}", f"{count} {self.place}")
                self._look_at_server(store)
                count += 1
                self.end.is_near.wait(BEAT_S)
            store.set(f"beat/{self.rank}", f"{ENDED} {self.place}")
            if self.serves:
                self._take_leave(store)

    def _look_at_server(self, store: Any) -> None:
        """Sees whether the store is about to go, with the rank that serves it."""
        if self.server is not None and not self.server_has_ended:
            self.server_has_ended = _count(store, self.server) == ENDED
            if self.server_has_ended:
                store.set(f"farewell/{self.rank}", "1")

    def _take_leave(self, store: Any) -> None:
        """Waits until the others know that this rank ends: once the store has gone, they cannot know how."""
        end = time.monotonic() + _FAREWELL_S
        others = [r for r in range(self.world_size) if r != self.rank]
        while others and time.monotonic() < end:
            others = [r for r in others if not (store.check([f"farewell/{r}"]) or _has_left(store, r))]
            time.sleep(0.02)


def beat_of(text: str | None) -> tuple[str, int]:
    """The count and the place of a rank; no count where there is none, or none that can be read."""
    count, _, place = (text or "").partition(" ")
    if (count == ENDED or _is_number(count)) and _is_number(place):
        return count, int(place)
    return "", -1


def _has_left(store: Any, rank: int) -> bool:
    """Whether a rank has ended, or never came; or the ranks have heard already who is gone."""
    return _count(store, rank) in (ENDED, "") or bool(store.check(["verdict"]))


def _count(store: Any, rank: int) -> str:
    key = f"beat/{rank}"
    value = store.get(key) if store.check([key]) else b""
    return beat_of(value.decode(errors="replace"))[0]


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 16
