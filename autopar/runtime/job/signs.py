"""What ranks have written to the store about themselves and about each other, each asked for within one deadline."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Collection, Iterable, Mapping

from autopar.errors import CollectiveError
from autopar.runtime.job.pulse import BEAT_S, ENDED, beat_of
from autopar.runtime.job.store import JobStore

GONE = "gone"


class Signs:
    """Reads the ranks' signs of life, and what was found out about ranks. Each question raises `StoreFailure` where the
    store does not answer within its deadline."""

    def __init__(self, store: JobStore) -> None:
        self.store = store

    def within(self, deadline_s: float) -> Signs:
        """The same signs, with another deadline."""
        return Signs(self.store.within(deadline_s))

    def beat(self, rank: int) -> tuple[str, int]:
        """A rank's count and its place; no count where it has none, or none that can be read."""
        try:
            return beat_of(self.store.get(f"beat/{rank}"))
        except CollectiveError:
            return beat_of(None)

    def verdict(self, world_size: int, known: Collection[str]) -> dict[int, str]:
        """What became of which ranks, as the first rank that asked has written it down; none where it cannot be read,
        which no rank has then written. `known`: all that can become of one."""
        with contextlib.suppress(CollectiveError, ValueError, AttributeError, RecursionError):
            found = {int(r): str(how) for r, how in json.loads(self.store.get("verdict") or "{}").items()}
            if all(0 <= r < world_size and how in known for r, how in found.items()):
                return found
        return {}

    def has_heard(self, rank: int) -> bool:
        """Whether a rank has read the verdict, or has ended."""
        return self.store.check(f"heard/{rank}") or self.beat(rank)[0] == ENDED


class Watch:
    """Tells ranks that live from those that do not, by looking several times."""

    def __init__(self, signs: Signs, ranks: Iterable[int]) -> None:
        self._signs = signs
        now = time.monotonic()
        self._first = {r: signs.beat(r)[0] for r in ranks}
        self._last = {r: (count, now) for r, count in self._first.items()}

    def look(self, patience_s: float) -> dict[int, str]:
        """The ranks that have ended, and those whose count has stood still for so long. A rank that has none has not
        come yet."""
        found, now = {}, time.monotonic()
        for r, (before, since) in self._last.items():
            count = self._signs.beat(r)[0]
            if count == ENDED:
                found[r] = ENDED
            elif count != before:
                self._last[r] = (count, now)
            elif count and now - max(since, self._signs.store.silent_until) >= patience_s:
                found[r] = GONE
        return found

    def counts(self) -> dict[int, str]:
        """What each rank's count was when it was last looked at."""
        return {r: count for r, (count, _) in self._last.items()}

    def knows_all(self, found: Mapping[int, str], at_first: Mapping[int, str]) -> bool:
        """Whether every rank has been `found` not to live, or lives: its count has gone on by two from `at_first`, as
        one may have been on its way to the store when the rank was killed, and lately. One that had not come when this
        began has not come."""
        recently = time.monotonic() - 2 * BEAT_S
        return all(
            not first or r in found or (_lies_behind(self._last[r][0], at_first[r]) and self._last[r][1] > recently)
            for r, first in self._first.items()
        )


def _lies_behind(count: str, first: str) -> bool:
    return count.isdigit() and int(count) >= int(first or 0) + 2
