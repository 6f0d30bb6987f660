"""Who is there: ranks give signs of life through the store, so that one that is gone or late can be named.

A collective that fails does not say who failed: in a ring, a rank hears of its neighbours alone, and ranks that stop
for another's sake look as dead as that one. So a thread of each rank writes a count and a place to the store, once a
second; the place is how many guarded regions the rank has entered and left. Where a collective fails, a rank whose
count stands still is gone, and one whose place is an earlier one is late. Who finds this out writes it down for all.

The store may go as well. Where its connection ends, the process that served it has ended, and whether it said farewell
tells how; where it is silent, that process is frozen, or the network between is cut.
"""

from __future__ import annotations

import contextlib
import json
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from autopar.backends.collectives import CommunicationFailure, calls_so_far, progress
from autopar.errors import CollectiveError
from autopar.runtime.job.meeting import RANK_0, attempt
from autopar.runtime.job.pulse import BEAT_S, ENDED, Pulse
from autopar.runtime.job.signs import GONE, Signs, Watch
from autopar.runtime.job.store import Connection, InThread, JobStore, StoreFailure, StoreSilent

SILENCE_S = 5.0
"""How long a rank, or the store, may give no sign of life where communication has failed: several beats, as a loaded
machine skips some."""
PATIENCE_S = 30.0
"""How long where others only wait for it: Python threads stand still while one of them reads a large file in C code,
and whole processes while a machine is moved or saved."""
LONGEST_CALL_S = 4 * SILENCE_S
"""How long a rank tries to find out who lives, on a machine so loaded that the store answers late again and again."""
ALIKE_S = 2 * SILENCE_S
"""How much later than this rank the others may have an error that all ranks have alike."""
LINGER_S = 15.0
"""How long the process that serves the store waits for the others to read what was written down."""
_LATE, _ABSENT, _LEFT = "late", "absent", "left"
_SAID = {
    GONE: "is gone: it gives no sign of life (killed, frozen or cut off)",
    ENDED: "has ended: its own output says why, or it had fewer batches than the others",
    _LATE: "is late: it runs, but has not come here",
    _LEFT: "has left this by an error of its own, which others did not have, and lives on: its own output, or where it "
    "caught the error, says which",
    _ABSENT: "never came: it was not started, has ended before, or has not called autopar.optimize",
}
_OF_THIS_RANK = {
    GONE: "this rank gave no sign of life for a while, and the others have given it up",
    _ABSENT: "this rank came too late, the others have given up waiting for it",
    _LATE: "this rank came too late, the others have given up waiting for it",
    ENDED: "this rank has ended once, and the others have seen that",
    _LEFT: "this rank has left an earlier one in its middle, and the others have seen that",
}

T = TypeVar("T")


class Presence:
    """This rank's sign of life, and what it can learn of the other ranks'."""

    def __init__(self, connection: Connection, name: str, rank: int, world_size: int, by: str) -> None:
        """`connection`: to the job's store, one on which nothing waits for a key, as that keeps it from others; `by`:
        who serves the store, in words."""
        self.rank, self.world_size = rank, world_size
        self._served_by, self._served_here = by, by == RANK_0 and rank == 0
        prefix = f"autopar/presence/{attempt()}/{name}"
        self.store = JobStore(connection, prefix, SILENCE_S)
        self._signs = Signs(self.store)
        server = None if self._served_here or by != RANK_0 else 0
        self._pulse = Pulse(connection.store, prefix, rank, world_size, self._served_here, server)
        self._left: tuple[str, str] | None = None
        """What this rank has left in its middle, and by which error, until it is known that all ranks have left it."""
        self._begun: tuple[str, int, int] | None = None
        """What the outermost guard that is open is around, and the `progress` before it."""
        self._times_left = 0
        """How often all ranks have left something in its middle, by an error that they had alike."""
        self._pulse.start()
        weakref.finalize(self, self._pulse.end.is_near.set)

    def joined(self) -> None:
        """Says that the default process group is there, whose end is from now on the end of this rank's part."""
        self._pulse.joined = True

    @contextlib.contextmanager
    def guard(self, what: str) -> Iterator[None]:
        """Around communication that all ranks take part in: where it fails, raises `CollectiveError` with the ranks
        that are gone or late. A rank that leaves it by an error of its own has not taken part in all of it, so that
        what it sends next would be taken for the rest: unless all ranks have left it, equally far in it, the next guard
        refuses."""
        self._check_left()
        begun, self._begun = self._begun, self._begun or (what, *progress())
        self._pulse.place += 1
        before = calls_so_far()
        try:
            yield
        except CommunicationFailure as e:
            try:
                raise CollectiveError(self._explained(f"{what}, rank {self.rank}", e)) from e
            finally:
                self._pulse.place += 1
        except BaseException as e:  # of this rank's own: it has not been through with what the others wait for
            self._pulse.place -= 1
            if calls_so_far() != before:
                self.leave(what, e)
            raise
        else:
            self._pulse.place += 1
        finally:
            self._begun = begun

    def leave(self, what: str, error: BaseException) -> None:
        """Says that this rank has left what the others wait in, by an error of its own: its next guard refuses, unless
        all ranks have left it, equally far in it."""
        if self._left is None:  # by the inner one of two guards
            self._left = what, f"{type(error).__name__}: {error}".splitlines()[0][:200]
            within, issued, updates = self._begun or (what, *progress())
            far = [within, progress()[0] - issued, progress()[1] - updates]
            with contextlib.suppress(StoreFailure):  # the error that is raised says more
                self.store.set(f"left/{self._times_left}/{self.rank}", json.dumps(far))

    def _check_left(self) -> None:
        """Raises `CollectiveError` where this rank has left something in its middle, and another one has not, or is not
        equally far in it."""
        if self._left is None:
            return
        what, error = self._left
        here = f"{what}, rank {self.rank}"
        with self.asking(here):
            _until(
                lambda: all(self._has_left(r, self._signs) for r in self._others()) or bool(self._verdict(self._signs)),
                ALIKE_S,
            )
            others = [r for r in self._others() if not self._has_left(r, self._signs)]
            if others:
                self._settled({self.rank: _LEFT}, self._signs)
                raise CollectiveError(
                    f"{here}: this rank has left it by an error of its own ({error}), in the middle of what ranks do "
                    f"together, and rank {others[0]} has not: what this rank sends now would be taken for the rest of "
                    "it. End this process, so that the others end too, and go on from a checkpoint"
                )
            far = {r: self.store.get(f"left/{self._times_left}/{r}") for r in range(self.world_size)}
            other = next((r for r, text in far.items() if text != far[self.rank]), None)
            if other is not None:
                raise CollectiveError(
                    f"{here}: all ranks have left it by errors of their own (here {error}), but not equally far in "
                    f"what ranks do together: {', '.join(map(self._how_far, sorted((self.rank, other))))}. What they "
                    "send now would be taken for something else, and their replicas may differ. End this process, and "
                    "go on from a checkpoint"
                )
        self._left, self._times_left = None, self._times_left + 1

    def _how_far(self, rank: int) -> str:
        """In words, where a rank has left."""
        key = f"left/{self._times_left}/{rank}"
        return f"rank {rank} had {self.store.read(key, self.store.get(key) or '', _far_in_words)}"

    def _has_left(self, rank: int, signs: Signs) -> bool:
        """Whether a rank has left, in its middle, what this rank is in or has left."""
        return signs.store.check(f"left/{self._times_left}/{rank}")

    def connect(self, what: str, call: Callable[[], T], limit_s: float) -> T:
        """What `call` returns, which connects ranks and may hang where one is gone; all ranks do it. Raises
        `CollectiveError` with the ranks that are gone or late, `PATIENCE_S` after the last sign of life of a rank that
        is gone, and soon after `limit_s` in any case."""
        with self.guard(what):
            running = InThread(call, "autopar-connect")
            self.wait_for(f"{what}, rank {self.rank}", running.is_done, self._others(), limit_s)
            try:
                return running.result()
            except CollectiveError:
                raise
            except RuntimeError as e:  # what gloo and the store raise
                raise CommunicationFailure(str(e)) from e

    def gather(self, limit_s: float) -> None:
        """Waits until all ranks have come. Raises `CollectiveError` with those that have not within `limit_s`."""
        missing, signs = self._others(), self.patient(limit_s)

        def are_here(within_s: float) -> bool:
            missing[:] = [r for r in missing if not signs.beat(r)[0]]
            if missing:
                time.sleep(within_s)
            return not missing

        self.wait_for(f"rank {self.rank} waited for the other ranks", are_here, missing, limit_s)

    @contextlib.contextmanager
    def asking(self, here: str) -> Iterator[None]:
        """Around questions to the store: raises `CollectiveError` where it does not answer."""
        try:
            yield
        except StoreFailure as e:
            raise CollectiveError(self._of_the_store(here, e)) from e

    def patient(self, limit_s: float) -> Signs:
        """The signs of life as who waits for `limit_s` at most reads them: the store may be silent as long as a rank
        may be."""
        return self._signs.within(_patience_s(limit_s))

    def wait_for(self, here: str, is_ready: Callable[[float], bool], awaited: Sequence[int], limit_s: float) -> None:
        """Returns once `is_ready`, which is given seconds that it may wait. Raises `CollectiveError` where one of the
        `awaited` ranks has ended, where any is gone, where the store does not answer, and after `limit_s`."""
        self._check_left()
        patience_s, signs = _patience_s(limit_s), self.patient(limit_s)
        begun, pause_s, watch, looked = time.monotonic(), 0.005, None, time.monotonic()
        with self.asking(here):
            while not is_ready(pause_s):
                pause_s, now = min(2 * pause_s, 0.25), time.monotonic()
                if now - looked > BEAT_S / 2:
                    looked = now
                    watch = watch or Watch(signs, self._others())
                    found = {r: how for r, how in watch.look(patience_s).items() if how != ENDED or r in awaited}
                    found = found or self._verdict(signs)
                    if found and not is_ready(0.0):  # what has ended since may have been ready before
                        raise CollectiveError(self._blamed(here, self._settled(found, signs)))
                if now - begun > limit_s:
                    found = self._roll_call(signs, awaited, watch)
                    if not is_ready(0.0):
                        raise CollectiveError(
                            self._blamed(here, self._settled(found, signs), f"not within {limit_s:g} s")
                        )

    def _explained(self, here: str, error: BaseException) -> str:
        cause = str(error).strip().splitlines()[0][:200]
        try:
            found = self._verdict(self._signs) or self._roll_call(self._signs)
            return self._blamed(here, self._settled(found, self._signs), cause)
        except StoreFailure as e:
            return f"{self._of_the_store(here, e)}: {cause}"

    def _blamed(self, here: str, found: Mapping[int, str], cause: str = "") -> str:
        behind = f": {cause}" if cause else ""
        if self.rank in found:
            return f"{here}: {_OF_THIS_RANK[found[self.rank]]}{behind}"
        if not found:
            return f"{here}: communication failed although every rank lives and is here{behind}"
        said = "; ".join(f"rank {r} {_SAID[how]}" for r, how in sorted(found.items()))
        if self.world_size > 2 and [*found.values()].count(GONE) == self.world_size - 1:
            said += "; or this rank is, as it hears of none of the others"
        return f"{here}: {said}{behind}"

    def _of_the_store(self, here: str, error: BaseException) -> str:
        if self._pulse.server_has_ended:
            return f"{here}: rank 0 {_SAID[ENDED]}"
        return without_store(here, self._served_by, error)

    def _settled(self, found: Mapping[int, str], signs: Signs) -> Mapping[int, str]:
        """Who is to blame, as the first rank that asked has found: those that ask later may see that one end."""
        written = self._verdict(signs)  # by a rank that was seen to end: it wrote this before
        if not written and found:
            signs.store.set("verdict", json.dumps(dict(found)))
        found = written or found
        signs.store.set(f"heard/{self.rank}", "1")
        if self._served_here:  # what was written down goes with this process
            rest = [r for r in self._others() if r not in found]
            _until(lambda: all(signs.has_heard(r) for r in rest), LINGER_S)
        return found

    def _verdict(self, signs: Signs) -> dict[int, str]:
        return signs.verdict(self.world_size, _SAID)

    def _roll_call(self, signs: Signs, awaited: Sequence[int] = (), watch: Watch | None = None) -> dict[int, str]:
        """The ranks that are gone or have ended; where all live, those that never came, or have not come to this place;
        else the one that is awaited."""
        watch, place, begun = watch or Watch(signs, self._others()), self._pulse.place, time.monotonic()
        at_first, found = watch.counts(), watch.look(SILENCE_S)
        while not watch.knows_all(found, at_first) and time.monotonic() - begun < LONGEST_CALL_S:
            time.sleep(0.1)
            found = watch.look(SILENCE_S)
        # A store that has answered late again and again excuses no silence as long as that. What follows asks nothing
        # about silence anew: an answer that is late just now would excuse a rank that is gone.
        silent = [r for r, count in watch.counts().items() if count and count == at_first[r]]
        found = found or {r: GONE for r in silent if time.monotonic() - begun >= LONGEST_CALL_S}
        if found:
            return found
        beats = {r: signs.beat(r) for r in self._others()}
        return (
            {r: _ABSENT for r, (count, _) in beats.items() if not count}
            or {r: _LEFT for r in beats if self._has_left(r, signs)}
            or {r: _LATE for r, (_, at) in beats.items() if at < place}
            or {r: _LATE for r in awaited if len(awaited) == 1}
        )

    def _others(self) -> list[int]:
        return [r for r in range(self.world_size) if r != self.rank]

    @property
    def place(self) -> int:
        """How many guarded regions this rank has entered and left."""
        return self._pulse.place


def _far_in_words(text: str) -> str:
    what, issued, updates = json.loads(text)
    return f"issued {issued} collectives, and begun or ended {updates} updates, of {what}"


def without_store(here: str, served_by: str, error: BaseException) -> str:
    by = f"the process that serves the store ({served_by})"
    if isinstance(error, StoreSilent):
        return (
            f"{here}: {by} does not answer: it is frozen, cut off or gone, or this rank itself is cut off from the "
            "network"
        )
    return f"{here}: {by} is gone: it was killed, or ended at once, as its connections have ended"


def _patience_s(limit_s: float) -> float:
    """How long a rank, or the store, may give no sign of life where another waits for `limit_s` at most."""
    return max(SILENCE_S, min(PATIENCE_S, limit_s))


def _until(condition: Callable[[], bool], limit_s: float) -> None:
    end = time.monotonic() + limit_s
    while not condition() and time.monotonic() < end:
        time.sleep(0.1)
