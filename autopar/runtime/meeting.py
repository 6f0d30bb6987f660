"""Calls that all ranks make together, such as `program.state_dict()`: a rank that makes one alone is told so."""

from __future__ import annotations

import time
from collections.abc import Sequence

from autopar.errors import CollectiveError
from autopar.runtime.presence import Presence
from autopar.runtime.process_group import Group, Rendezvous

_TOPIC = "call"
_PAUSE_S = 0.25


def meet(group: Group, call: str, mine: str) -> list[str]:
    """Every rank's text, by rank, once all ranks are in `call`.

    Raises `CollectiveError`, with the name of the call, where another rank has gone on to something else that all
    ranks take part in, is in another such call, has ended, or does not come within the group's timeout.
    """
    if group.presence is None:
        return [mine]
    rendezvous = Rendezvous(group)
    assert rendezvous.store is not None
    rendezvous.store.set(f"{_TOPIC}/{group.rank}", f"{call}\n{mine}")
    _watch(rendezvous, group, group.presence, call)
    try:
        texts = rendezvous.exchange(_TOPIC, f"{call}\n{mine}")
    except CollectiveError as e:
        raise CollectiveError(f"{_must(group, call)}: {e}. {_how(call)}") from e
    for rank, text in enumerate(texts):
        theirs = text.partition("\n")[0]
        if theirs != call:
            raise CollectiveError(f"{_must(group, call)}, but rank {rank} is in {theirs}. {_how(call)}")
    return [text.partition("\n")[2] for text in texts]


def _watch(rendezvous: Rendezvous, group: Group, presence: Presence, call: str) -> None:
    """Returns once all ranks are in the call, or one is gone or late; raises where one has gone on without it."""
    assert rendezvous.store is not None
    here = presence._pulse.place
    others = [r for r in range(group.world_size) if r != group.rank]
    has_ended = {r: presence.watch(r) for r in others}
    beyond: dict[int, str] = {}
    end, pause_s = time.monotonic() + group.timeout_s, 0.002
    while time.monotonic() < end:
        others = _missing(rendezvous, others)
        if not others or any(has_ended[r]() for r in others):
            return
        for rank in others:
            # A rank that comes here writes its text before it enters any further region, and thus before the beat
            # that tells of it. Two beats, as the text may come between the looks at the one and at the other.
            beat, place = presence._beat(rank)
            if place > here and beyond.setdefault(rank, beat) != beat and _missing(rendezvous, [rank]):
                raise CollectiveError(
                    f"{_must(group, call)}, but rank {rank} has gone on without it, to a step or to another call that "
                    f"all ranks make. {_how(call)}"
                )
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _PAUSE_S)


def _missing(rendezvous: Rendezvous, ranks: Sequence[int]) -> list[int]:
    assert rendezvous.store is not None
    return [r for r in ranks if not rendezvous.store.check([f"{_TOPIC}/{r}"])]


def _must(group: Group, call: str) -> str:
    return f"all ranks must call {call} together, and rank {group.rank} does"


def _how(call: str) -> str:
    if "load" in call:
        return "Read the file on every rank, and load it on every rank"
    return f"Call {call} on every rank, and write the file on one of them: `if program.rank == 0: torch.save(...)`"
