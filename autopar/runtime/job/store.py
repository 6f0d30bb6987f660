"""Questions to the job's store, each with a deadline, and answers that may be anything.

The store is a server in one process, rank 0's or torchrun's, and torch asks it without a deadline: where that process
is frozen, or the network between is cut, the question never returns. So each is asked in a thread that the asking one
waits for only so long. The store asks nobody who they are, so what is read from it is checked before it is used.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from torch._C._distributed_c10d import PrefixStore

from autopar.errors import CollectiveError

MOST_BYTES = 1 << 28
"""Of one value: plans, the longest, have some megabytes."""
CONNECT_S = 30.0
"""How long the store may be silent while ranks connect. Torch's store looks up the name of each that does, and answers
nobody meanwhile: a name server that does not answer costs 10 s, by the resolver's defaults (resolv.conf(5))."""
_LATE_S = 1.0

T = TypeVar("T")


class StoreFailure(RuntimeError):
    """The store has not answered: the process that serves it is frozen, cut off or gone."""


class StoreSilent(StoreFailure):
    """... within the deadline: the connection is there, as far as this rank knows."""


class InThread(Generic[T]):
    """A call in a thread of its own, which another thread waits for as long as it likes."""

    def __init__(self, call: Callable[[], T], name: str) -> None:
        self._call, self._name = call, name
        self._done = threading.Event()
        self._result: T
        self._error: BaseException | None = None
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def _run(self) -> None:
        try:
            self._result = self._call()
        except BaseException as e:
            self._error = e
        finally:
            del self._call
            self._done.set()

    def is_done(self, within_s: float = 0.0) -> bool:
        """Whether the call has returned or raised, after at most `within_s` seconds."""
        return self._done.wait(within_s)

    def result(self) -> T:
        """What it returned; raises what it raised. To be asked for once it is done."""
        if self._error is not None:
            raise self._error
        return self._result


class Connection:
    """A store of torch that answers within a deadline, or is not asked again before it has answered."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self._unanswered: InThread[Any] | None = None
        self.silent_until = 0.0
        """When it last answered late, on the monotonic clock: nobody's signs of life have reached it before."""

    def ask(self, question: Callable[[], T], deadline_s: float) -> T:
        if self._unanswered is not None and not self._unanswered.is_done():
            raise StoreSilent("an earlier question is still unanswered")
        begun, asked = time.monotonic(), InThread(question, "autopar-store")
        if not asked.is_done(deadline_s):
            self._unanswered = asked
            raise StoreSilent(f"no answer within {deadline_s:g} s")
        if time.monotonic() - begun > _LATE_S:
            self.silent_until = time.monotonic()
        try:
            return asked.result()
        except RuntimeError as e:  # torch's, of several classes
            raise StoreFailure(str(e).strip().splitlines()[0][:200]) from e


def connected(store: Any) -> Connection:
    """A further connection to a store of torch. Raises `StoreFailure` where it is gone, or silent for `CONNECT_S`."""
    opening = InThread(store.clone, "autopar-store")
    if not opening.is_done(CONNECT_S):
        raise StoreSilent(f"no answer within {CONNECT_S:g} s")
    try:
        return Connection(opening.result())
    except RuntimeError as e:
        raise StoreFailure(str(e).strip().splitlines()[0][:200]) from e


class JobStore:
    """A connection to the store of the job, under a prefix. Threads may share it."""

    def __init__(self, store: Any, prefix: str, deadline_s: float) -> None:
        """`store`: of torch, on a connection that nothing else waits on. `deadline_s`: for each question."""
        self._connection = store if isinstance(store, Connection) else Connection(store)
        self._prefix, self._deadline_s = prefix, deadline_s
        self._store = PrefixStore(prefix, self._connection.store)

    @property
    def silent_until(self) -> float:
        """When it last answered late, as `Connection` has it."""
        return self._connection.silent_until

    def within(self, deadline_s: float) -> JobStore:
        """The same connection and prefix, with another deadline."""
        return JobStore(self._connection, self._prefix, deadline_s)

    def under(self, prefix: str, deadline_s: float | None = None) -> JobStore:
        """The same connection, under a further prefix, perhaps with another deadline."""
        deadline_s = self._deadline_s if deadline_s is None else deadline_s
        return JobStore(self._connection, f"{self._prefix}/{prefix}", deadline_s)

    def set(self, key: str, value: str) -> None:
        """Raises `StoreFailure` where the store does not answer, as all questions do."""
        self._ask(lambda: self._store.set(key, value))

    def delete(self, key: str) -> None:
        self._ask(lambda: self._store.delete_key(key))

    def check(self, key: str) -> bool:
        return self._ask(lambda: bool(self._store.check([key])))

    def get(self, key: str) -> str | None:
        """The text under a key, without waiting for it; `None` where there is none. Raises `CollectiveError` where it
        is no text, or an endless one."""
        value = self._ask(lambda: self._store.get(key) if self._store.check([key]) else None)
        if value is None:
            return None
        try:
            if len(value) <= MOST_BYTES:
                return value.decode()
        except UnicodeDecodeError:
            pass
        raise self.unreadable(key, f"{len(value)} bytes that are no text of a rank")

    def read(self, key: str, text: str, parse: Callable[[str], T]) -> T:
        """`parse(text)`; raises `CollectiveError` with the key where that cannot be."""
        try:
            return parse(text)
        except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as e:
            raise self.unreadable(key, f"{text[:80]!r} ({type(e).__name__})") from e

    def unreadable(self, key: str, found: str) -> CollectiveError:
        return CollectiveError(
            f"the job's store holds under '{self._prefix}/{key}' what no rank has written there: {found}. Another "
            "program writes to this job's address and port: start the job on a port of its own, in a closed network"
        )

    def _ask(self, question: Callable[[], T]) -> T:
        return self._connection.ask(question, self._deadline_s)
