"""Who is there: ranks give signs of life through the store, so that one that is gone or late can be named.

A collective that fails does not say who failed: in a ring, a rank hears of its neighbours alone, and ranks that stop
for another's sake look as dead as that one. So a thread of each rank writes a count and a place to the store, once a
second; the place is how many guarded regions the rank has entered and left. Where a collective fails, a rank whose
count stands still is gone, and one whose place is an earlier one is late. Who finds this out writes it down for all.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from autopar.errors import CollectiveError
from autopar.runtime.collectives import CommunicationFailure

BEAT_S = 1.0
SILENCE_S = 5.0
"""How long a rank may give no sign of life: several beats, as a loaded machine skips some."""
LINGER_S = 15.0
"""How long the process that serves the store waits for the others to read what was written down."""
_ENDED = "ended"
_SAID = {
    "gone": "is gone: it gives no sign of life (killed, frozen or cut off)",
    _ENDED: "has ended: its own output says why, or it had fewer batches than the others",
    "late": "is late: it runs, but has not come here",
}


@dataclass
class _Pulse:
    """What a rank's thread writes; the thread holds this, and not the `Presence`, which may thus be freed."""

    store: Any
    rank: int
    place: int = 0
    stop: threading.Event = field(default_factory=threading.Event)

    def beat(self) -> None:
        count = 0
        with contextlib.suppress(Exception):  # the store is gone, and with it the job
            while dist.is_initialized() and not self.stop.is_set():
                self.store.set(f"beat/{self.rank}", f"{count} {self.place}")
                count += 1
                self.stop.wait(BEAT_S)
            if dist.is_initialized():
                self.store.set(f"beat/{self.rank}", f"{_ENDED} {self.place}")


class Presence:
    """This rank's sign of life, and what it can learn of the other ranks'."""

    def __init__(self, name: str, rank: int, world_size: int, serves_store: bool) -> None:
        store = dist.distributed_c10d._get_default_store()
        self.rank, self.world_size = rank, world_size
        self._serves = serves_store
        self._store = PrefixStore(f"autopar/{name}/presence", store)
        # A connection of its own: another thread that waits for a key keeps the connection to itself.
        self._pulse = _Pulse(PrefixStore(f"autopar/{name}/presence", store.clone()), rank)  # type: ignore[attr-defined]
        thread = threading.Thread(target=self._pulse.beat, name="autopar-presence", daemon=True)
        thread.start()
        weakref.finalize(self, _end, self._pulse, thread)

    @contextlib.contextmanager
    def guard(self, what: str) -> Iterator[None]:
        """Around communication that all ranks take part in: where it fails, raises `CollectiveError` with the ranks
        that are gone or late."""
        self._pulse.place += 1
        try:
            yield
        except CommunicationFailure as e:
            raise CollectiveError(self._explained(f"{what}, rank {self.rank}", e)) from e
        finally:
            self._pulse.place += 1

    def watch(self, rank: int) -> Callable[[], str | None]:
        """A question to be asked often, while waiting for a rank: says so where that one has ended or is gone."""
        watch = _Watch(self._beat, [rank])

        def ask() -> str | None:
            how = watch.look().get(rank)
            return how and f"rank {rank} {_SAID[how]}"

        return ask

    def _explained(self, here: str, error: BaseException) -> str:
        cause = str(error).strip().splitlines()[0][:200]
        try:
            found = self._verdict(self._pulse.place)
        except Exception:
            return (
                f"{here}: a collective failed and the store does not answer, so the process that serves it (rank 0, "
                f"or torchrun) is gone: {cause}"
            )
        if self.rank in found:
            return f"{here}: this rank came too late, the others have given up waiting for it: {cause}"
        if not found:
            return f"{here}: a collective failed although every rank lives and is here: {cause}"
        return f"{here}: {'; '.join(f'rank {r} {_SAID[how]}' for r, how in found.items())}: {cause}"

    def _verdict(self, place: int) -> dict[int, str]:
        """Who is to blame, as the first rank that asked has found: those that ask later may see that one end."""
        found = self._written_down()
        if not found:
            seen = self._roll_call(place)
            found = self._written_down() or seen  # by a rank that was seen to end: it wrote this before
            if found:
                self._store.set("verdict", json.dumps(found))
        self._store.set(f"heard/{self.rank}", "1")
        if self._serves:  # what was written down goes with this process
            rest = [r for r in self._others() if r not in found]
            _until(lambda: all(self._has_heard(r) for r in rest), LINGER_S)
        return found

    def _written_down(self) -> dict[int, str]:
        if not self._store.check(["verdict"]):
            return {}
        return {int(r): str(how) for r, how in json.loads(self._store.get("verdict")).items()}

    def _roll_call(self, place: int) -> dict[int, str]:
        """The ranks that are gone; where all live, those that have not come to `place`."""
        watch = _Watch(self._beat, self._others())
        _until(watch.is_done, SILENCE_S + BEAT_S)
        return watch.look() or {r: "late" for r in self._others() if self._beat(r)[1] < place}

    def _others(self) -> list[int]:
        return [r for r in range(self.world_size) if r != self.rank]

    def _has_heard(self, rank: int) -> bool:
        return bool(self._store.check([f"heard/{rank}"])) or self._beat(rank)[0] == _ENDED

    def _beat(self, rank: int) -> tuple[str, int]:
        key = f"beat/{rank}"
        if not self._store.check([key]):
            return "", -1
        count, place = self._store.get(key).decode().split()
        return count, int(place)


class _Watch:
    """Tells ranks that live from those that do not, by looking several times."""

    def __init__(self, beat: Callable[[int], tuple[str, int]], ranks: Iterable[int]) -> None:
        self._beat = beat
        now = time.monotonic()
        self._first = {r: beat(r)[0] for r in ranks}
        self._last = {r: (count, now) for r, count in self._first.items()}

    def look(self) -> dict[int, str]:
        """The ranks that have ended, and those whose count has stood still for `SILENCE_S`."""
        found, now = {}, time.monotonic()
        for r, (before, since) in self._last.items():
            count = self._beat(r)[0]
            if count == _ENDED:
                found[r] = _ENDED
            elif count != before:
                self._last[r] = (count, now)
            elif now - since >= SILENCE_S:
                found[r] = "gone"
        return found

    def is_done(self) -> bool:
        """Whether it is known of every rank which it is."""
        found = self.look()
        return all(r in found or self._last[r][0] != first for r, first in self._first.items())


def _until(condition: Callable[[], bool], limit_s: float) -> None:
    end = time.monotonic() + limit_s
    while not condition() and time.monotonic() < end:
        time.sleep(0.1)


def _end(pulse: _Pulse, thread: threading.Thread) -> None:
    """Stops the thread, at the latest when the interpreter ends: one that is in the store would not survive that."""
    pulse.stop.set()
    if thread is not threading.current_thread():
        thread.join(timeout=SILENCE_S)
