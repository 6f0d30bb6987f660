"""Calls that all ranks make together, such as `program.state_dict()`: a rank that makes one alone is told so."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable

from autopar.errors import CollectiveError, SpecError
from autopar.runtime.job.presence import Presence
from autopar.runtime.job.process_group import Group, Rendezvous
from autopar.runtime.job.store import JobStore

_TOPIC = "call"
_last: weakref.WeakKeyDictionary[Presence, JobStore] = weakref.WeakKeyDictionary()
"""Where this rank's text of the last meeting is, which is removed behind the next one: all have read it then."""
DISK_S = 24 * 3600.0
"""How long ranks wait for one that writes or reads files, as long as it lives: a disk may be slow."""


def meet(group: Group, call: str, mine: str, limit_s: float | None = None) -> list[str]:
    """Every rank's text, by rank, once all ranks are in `call`.

    Raises `CollectiveError`, with the name of the call, where another rank has gone on to something else that all
    ranks take part in, is in another such call, has ended, or does not come within `limit_s`, by default the group's
    timeout.
    """
    here = f"all ranks must call {call} together, and rank {group.rank} does"
    return gathered(group, call, mine, here, _how(call), limit_s)


def gathered(group: Group, call: str, mine: str, here: str, how: str, limit_s: float | None = None) -> list[str]:
    """The same, for what is no call of the user's. `here`: what this rank does, and `how` ranks do it together, in
    words."""
    if group.presence is None:
        return [mine]
    rendezvous = Rendezvous(group, limit_s)
    try:
        with group.presence.asking(here):
            others = [r for r in range(group.world_size) if r != group.rank]
            assert rendezvous.store is not None
            rendezvous.store.set(f"{_TOPIC}/{group.rank}", f"{call}\n{mine}")
            group.presence.wait_for(here, _all_there(rendezvous, group.presence, others), others, rendezvous.limit_s)
            texts = rendezvous.exchange(_TOPIC, f"{call}\n{mine}")
            if (before := _last.get(group.presence)) is not None:
                before.delete(f"{_TOPIC}/{group.rank}")
            _last[group.presence] = rendezvous.store
    except CollectiveError as e:
        raise CollectiveError(f"{here}: {e}. {how}") from e
    for rank, text in enumerate(texts):
        theirs = text.partition("\n")[0]
        if theirs != call:
            raise CollectiveError(f"{here}, but rank {rank} is in {theirs}. {how}")
    return [text.partition("\n")[2] for text in texts]


def agreed(
    group: Group, call: str, make: Callable[[], str], refusal: str, unforeseen: str, limit_s: float | None = None
) -> list[str]:
    """What `make` returns on every rank, by rank, once all ranks are in `call`.

    Where it fails on a rank, raises `SpecError` on all ranks: there with the cause, elsewhere with that rank, `refusal`
    ("cannot load the checkpoint") and the cause. `unforeseen` stands before a cause that is no `SpecError`. Raises
    `CollectiveError` as `meet` does.
    """
    mine, refused = "", None
    try:
        mine = make()
    except SpecError as e:
        refused = e
    except Exception as e:  # a rank that failed otherwise would leave the others waiting
        refused = SpecError(f"{unforeseen}: {type(e).__name__}: {e}")
        refused.__cause__ = e
    answers = meet(group, call, f"={mine}" if refused is None else f"!{refused}", limit_s)
    if refused is not None:
        raise refused
    for rank, answer in enumerate(answers):
        if answer.startswith("!"):
            raise SpecError(f"rank {rank} {refusal}: {answer[1:]}")
    return [answer[1:] for answer in answers]


def _all_there(rendezvous: Rendezvous, presence: Presence, others: list[int]) -> Callable[[float], bool]:
    """Whether all ranks are in the call, after so many seconds at most; raises where one has gone on without it."""
    store, signs, here = rendezvous.store, presence.patient(rendezvous.limit_s), presence.place
    assert store is not None
    beyond: dict[int, str] = {}

    def is_there(within_s: float) -> bool:
        missing = [r for r in others if not store.check(f"{_TOPIC}/{r}")]
        for rank in missing:
            # A rank that comes here writes its text before it enters any further region, and thus before the beat
            # that tells of it. Two beats, as the text may come between the looks at the one and at the other.
            beat, place = signs.beat(rank)
            if place > here and beyond.setdefault(rank, beat) != beat and not store.check(f"{_TOPIC}/{rank}"):
                raise CollectiveError(
                    f"rank {rank} has gone on without it, to a step or to another call that all ranks make"
                )
        if missing:
            time.sleep(within_s)
        return not missing

    return is_there


def _how(call: str) -> str:
    if "load" in call:
        return "Read the file on every rank, and load it on every rank"
    if "save" in call:
        return f"Call {call} on every rank, with one and the same folder"
    return f"Call {call} on every rank, and write the file on one of them: `if program.rank == 0: torch.save(...)`"
