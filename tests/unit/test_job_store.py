"""The job's store: a deadline for every question, and answers that a stranger may have written."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch._C._distributed_c10d import HashStore, PrefixStore, TCPStore

from autopar.backends.collectives import CommunicationFailure, may_fail, note_update
from autopar.errors import CollectiveError
from autopar.runtime.job.meeting import TORCHRUN, meet
from autopar.runtime.job.ports import held_port
from autopar.runtime.job.presence import SILENCE_S, Presence
from autopar.runtime.job.process_group import Group, Rendezvous, _own_device
from autopar.runtime.job.pulse import beat_of
from autopar.runtime.job.servers import Serving, _number
from autopar.runtime.job.store import Connection, JobStore, StoreFailure, StoreSilent

SERVER = """
import sys, time
from torch._C._distributed_c10d import TCPStore
store = TCPStore("127.0.0.1", int(sys.argv[1]), is_master=True, wait_for_workers=False)
print("serves", flush=True)
time.sleep(100)
"""
GARBAGE = [
    b"\xff\xfe\x00",
    b"",
    b"{",
    b"[1]",
    b"[" * 100_000,
    b"9" * 5000,
    b'{"1": 2}',
    b'{"a": "gone"}',
    b'{"9": "gone"}',
]


def test_a_port_that_is_held_is_the_stores_alone() -> None:
    with held_port() as port:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("", port))
        store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        assert store.port == port
        del store
        # Another one after it, as where ranks are started again.
        assert TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False).port == port


@pytest.fixture
def server() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process that serves a store, and its port."""
    with (
        held_port() as port,
        subprocess.Popen([sys.executable, "-c", SERVER, str(port)], stdout=subprocess.PIPE, text=True) as process,
    ):
        try:
            assert process.stdout is not None and process.stdout.readline() == "serves\n"
            yield process, port
        finally:
            process.kill()


def test_a_frozen_store_is_told_from_one_that_has_gone(
    server: tuple[subprocess.Popen[str], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    process, port = server
    patient = JobStore(TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False), "here", deadline_s=60.0)
    patient.set("key", "text")
    assert patient.check("key") and patient.get("key") == "text" and patient.get("other") is None
    store = patient.under("there", deadline_s=1.0)
    os.kill(process.pid, signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)  # until it has stopped: a signal takes its time
    with pytest.raises(StoreSilent, match="no answer within 1 s"):
        store.get("key")
    with pytest.raises(StoreSilent, match="an earlier question is still unanswered"):  # on the same connection
        patient.check("key")
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("autopar.runtime.job.meeting._SLACK_S", 0.0)
    with pytest.raises(CollectiveError, match="no answer within 4 s: rank 0 is frozen"):
        meet(4.0)
    process.kill()
    process.wait()
    end = time.monotonic() + 30
    while time.monotonic() < end:  # until the question above has got its answer
        try:
            store.check("key")
        except StoreFailure as e:
            if not isinstance(e, StoreSilent):
                break
            time.sleep(0.1)
    else:
        pytest.fail("a connection that has ended is not seen to have ended")
    with pytest.raises(CollectiveError, match="rank 0 never came, is gone, or cannot be reached from here"):
        meet(0.2)


def test_a_rank_without_a_number_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(CollectiveError, match="RANK is not set, where torchrun leaves a number"):
        meet(1.0)


@pytest.mark.parametrize("garbage", [b"\xff\xfe\x00", b"{", b"[" * 100_000, b"9" * 5000, b"[1]"])
def test_what_cannot_be_read_is_an_error_with_its_key(garbage: bytes) -> None:
    plain = HashStore()
    store = JobStore(plain, "job", deadline_s=5.0)
    PrefixStore("job", plain).set("text/1", garbage.decode("latin1") if garbage[0] < 128 else garbage)  # type: ignore[arg-type]
    with pytest.raises(CollectiveError, match=r"the job's store holds under 'job/text/1' what no rank has written"):
        store.read("text/1", store.get("text/1") or "", lambda text: json.loads(text)["ranks"])


@pytest.fixture
def other() -> Iterator[tuple[Presence, Any]]:
    """Rank 0 of two, and what rank 1, which lives, writes to."""
    plain = HashStore()
    presence = Presence(Connection(plain), "test", 0, 2, TORCHRUN)
    told, stop = PrefixStore("autopar/presence/0/test", plain), threading.Event()

    def live() -> None:
        count = 0
        while not stop.wait(0.05):
            count += 1
            told.set("beat/1", f"{count} 1")

    thread = threading.Thread(target=live)
    thread.start()
    presence.gather(20.0)
    yield presence, told
    stop.set()
    thread.join()


@pytest.mark.parametrize("garbage", GARBAGE)
def test_garbage_is_no_verdict_and_no_sign_of_life(other: tuple[Presence, Any], garbage: bytes) -> None:
    presence, told = other
    told.set("verdict", garbage)
    assert beat_of(garbage.decode(errors="replace")) == ("", -1)
    with (
        pytest.raises(CollectiveError, match="although every rank lives and is here: broken"),
        presence.guard("a step"),
    ):
        raise CommunicationFailure("broken")


def test_garbage_among_what_ranks_compare_is_an_error_with_its_key(other: tuple[Presence, Any]) -> None:
    presence, told = other
    group = Group(0, 2, object(), 5.0, presence)
    for number, garbage in enumerate([b"\xff", b'{"no": "list"'], start=0):
        told.set(f"meeting/{number}/numbers/1", garbage)
        with pytest.raises(
            CollectiveError, match=f"presence/0/test/meeting/{number}/numbers/1' what no rank has written"
        ):
            Rendezvous(group).exchange_as("numbers", "[1]", json.loads)
    told.set("meeting/2/numbers/1", "[2]")
    assert Rendezvous(group).exchange_as("numbers", "[1]", json.loads) == [[1], [2]]


def test_a_rank_that_raises_has_not_been_through(other: tuple[Presence, Any]) -> None:
    """With what the others wait for: to them, it is late."""
    presence, _ = other
    places = []
    for error in (None, ValueError, None):
        try:
            with presence.guard("a step"):
                if error is not None:
                    raise error
        except ValueError:
            pass
        places.append(presence._pulse.place)
    assert places == [2, 2, 4]


@pytest.mark.parametrize(
    ("issued", "updates", "said"),
    [
        ((2, 2), (1, 1), ""),
        ((3, 5), (0, 0), "rank 0 had issued 3 collectives, and .* 0 updates, .*, rank 1 had issued 5 collectives"),
        ((2, 2), (2, 1), "rank 0 had issued 2 collectives, and .* 2 updates, .*, rank 1 .* 1 updates"),
    ],
)
def test_ranks_that_have_all_left_a_step_go_on_if_they_were_equally_far(
    issued: tuple[int, int], updates: tuple[int, int], said: str
) -> None:
    """Else collectives of the next step would be paired with others, and replicas differ: gloo says nothing."""
    plain = HashStore()
    ranks = [Presence(Connection(plain), "left", r, 2, TORCHRUN) for r in range(2)]
    for rank, presence in enumerate(ranks):
        with pytest.raises(MemoryError), presence.guard("a step"), presence.guard("a part of it"):
            for _ in range(issued[rank]):
                with may_fail():
                    pass
            for _ in range(rank + 1):  # how often a rank waits is up to it
                with may_fail(issues=False):
                    pass
            for _ in range(updates[rank]):
                note_update()
            raise MemoryError
    for presence in ranks:
        for _ in range(2):
            with pytest.raises(CollectiveError, match=said) if said else nullcontext(), presence.guard("a step"):
                pass


def test_a_rank_that_is_silent_throughout_is_gone_though_the_store_answers_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was said to run, on a machine so loaded that no answer of the store came in time."""
    monkeypatch.setattr("autopar.runtime.job.presence.LONGEST_CALL_S", 1.0)
    plain = HashStore()
    PrefixStore("autopar/presence/0/late", plain).set("beat/1", "7 0")
    connection = Connection(plain)
    presence = Presence(connection, "late", 0, 2, TORCHRUN)
    connection.silent_until = time.monotonic() + 60.0
    with pytest.raises(CollectiveError, match="rank 1 is gone"), presence.guard("a step"):
        raise CommunicationFailure("broken")


@pytest.mark.parametrize("further", [1, 2])
def test_a_rank_whose_last_sign_was_on_its_way_is_gone(monkeypatch: pytest.MonkeyPatch, further: int) -> None:
    """It was killed as its sign went to the store, which came to it behind the first look: that is no sign of life."""
    monkeypatch.setattr("autopar.runtime.job.presence.SILENCE_S", 2.5)
    plain = HashStore()
    told = PrefixStore("autopar/presence/0/sign", plain)
    told.set("beat/1", "7 0")
    presence = Presence(Connection(plain), "sign", 0, 2, TORCHRUN)

    def on_its_way() -> None:
        for count in range(further):
            time.sleep(0.5)
            told.set("beat/1", f"{8 + count} 0")

    thread = threading.Thread(target=on_its_way)
    thread.start()
    said = "rank 1 is gone" if further == 1 else "rank 1 is late"
    with pytest.raises(CollectiveError, match=said), presence.guard("a step"):
        raise CommunicationFailure("broken")
    thread.join()


def test_two_threads_that_wait_at_once_leave_the_usual_deadline(other: tuple[Presence, Any]) -> None:
    presence, _ = other
    seen: list[float] = []
    first_goes_on, second_waits = threading.Event(), threading.Event()

    def wait(is_ready: Any) -> threading.Thread:
        thread = threading.Thread(target=presence.wait_for, args=("here", is_ready, [1], 30.0))
        thread.start()
        return thread

    def second_is_ready(within_s: float) -> bool:
        seen.append(presence.store._deadline_s)
        second_waits.set()
        first.join()
        return True

    first = wait(lambda within_s: first_goes_on.wait(20.0))
    second = wait(second_is_ready)
    assert second_waits.wait(20.0)
    first_goes_on.set()
    second.join()
    assert [*seen, presence.store._deadline_s] == [SILENCE_S, SILENCE_S]


def test_a_server_goes_on_after_garbage() -> None:
    store, said, stop = HashStore(), list[str](), threading.Event()
    good = {"ranks": 2, "servers": ["other"], "timeout_s": 5.0}
    bad = [{**good, "ranks": 0}, {**good, "servers": "other"}, {**good, "timeout_s": "soon"}, {}, [], 7]
    texts = [*GARBAGE, *(json.dumps(one).encode() for one in bad), json.dumps(good).encode()]
    for number, text in enumerate(texts, start=1):
        store.set(f"autopar/servers/{number}", text)  # type: ignore[arg-type]
    serving = Serving(store, "mine", said.append)
    thread = threading.Thread(target=serving.run, args=(stop,))
    thread.start()
    end = time.monotonic() + 30
    while len(said) < len(texts) and time.monotonic() < end:
        time.sleep(0.02)
    stop.set()
    thread.join()
    assert len(said) == len(texts) and serving.programs == 0
    for number, line in enumerate(said[:-1], start=1):
        assert f"program {number} cannot be served: the job's store holds under 'autopar/servers/{number}'" in line
    assert "has no serving host 'mine', but 'other'" in said[-1]


def test_what_a_start_of_the_ranks_has_written_is_not_for_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store of torchrun's lives on when it restarts the ranks."""
    store = cast(Any, TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
    found = []
    for attempt in ("0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
        presence = Presence(Connection(store.clone()), "0", 0, 2, TORCHRUN)
        found.append((presence._verdict(presence._signs), presence.store.check("meeting/0/model/1")))
        presence.store.set("verdict", json.dumps({"1": "gone"}))
        presence.store.set("meeting/0/model/1", "a digest")
    assert found == [({}, False)] * 2


def test_a_rank_that_is_started_anew_waits_for_its_programs_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """And takes none that rank 0 took before."""
    asked = JobStore(HashStore(), "servers", deadline_s=5.0)

    def number(rank: int) -> int:
        def wait_for(here: str, is_ready: Any, awaited: list[int], limit_s: float) -> None:
            while not is_ready(0.0):
                number(0)

        presence = SimpleNamespace(rank=rank, world_size=2, wait_for=wait_for)
        return _number(asked, cast(Presence, presence), "a group", ["server"], 5.0)

    for attempt in (0, 1):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(attempt))
        assert number(1) == attempt + 1


@pytest.mark.parametrize(("local_rank", "gpus", "device"), [("0", 1, 0), ("1", 1, None), ("1", 2, 1), ("0", 0, None)])
def test_a_rank_takes_a_gpu_where_there_is_one_for_it(
    local_rank: str, gpus: int, device: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processors train on machines that have a GPU, too."""
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpus > 0)
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    assert _own_device() == device
