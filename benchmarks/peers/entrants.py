"""Who takes part in a case: autopar and the peers that apply, each with the fastest of its choices."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from autopar.errors import AutoparError
from benchmarks.interleaved import Block, Turns
from benchmarks.peers import OURS, PEERS
from benchmarks.peers.base import Options, Peer
from benchmarks.peers.case import Case, Effort
from benchmarks.peers.outcome import Measured
from benchmarks.peers.ranks import Ranks, SystemFailed

TUNING_STEPS, TUNING_S = 3, 6.0
"""A choice is tried for so many steps behind its warm-up; for fewer, where they take longer than that together. Where
steps differ, it is tried for a whole period, whose mean counts."""
HOPELESS = 1.5
"""A choice whose first step takes so many times that of the best before it, of this peer or of another of its fidelity,
is tried no further; nor are the other choices of a peer that is so far behind another's."""

Say = Callable[[str], None]


@dataclass
class Entrant:
    """A system, before and while it runs."""

    key: str
    peer: Peer
    options: Options
    names: list[tuple[str, Peer]]
    """Those of all peers whose system this is."""
    losses: dict[int, float] = field(default_factory=dict)
    blocks: dict[int, Block] = field(default_factory=dict)
    """By round."""
    warm_step_s: float = 0.0

    @property
    def ours(self) -> bool:
        return any(name in OURS for name, _ in self.names)

    def measured(self) -> Measured:
        """What came of it."""
        blocks = self.blocks.values()
        sent = None
        if all(b.sent_bytes is not None for b in blocks):
            steps = sum(len(b.step_s) for b in blocks)
            by_rank = zip(*([s * len(b.step_s) for s in b.sent_bytes or ()] for b in blocks), strict=True)
            sent = [sum(rank) / steps for rank in by_rank]
        return Measured(
            step_s={number: block.mean_step_s for number, block in self.blocks.items()},
            losses=tuple(self.losses[i] for i in sorted(self.losses)),
            sent_bytes=statistics.mean(sent) if sent else None,
            sent_bytes_most=max(sent) if sent else None,
            options=self.options,
        )


def enter(
    names: Sequence[str], case: Case, ranks: Ranks, effort: Effort, say: Say
) -> tuple[list[Entrant], dict[str, str]]:
    """The systems of these peers, after those of autopar within each of their fidelities; and who cannot take part,
    with the reason."""
    peers = [PEERS[name] for name in names]
    reasons = {peer.name: peer.applies(case.workload, case.cluster) for peer in peers}
    fidelities = {"exact"} | {peer.fidelity for peer in peers if reasons[peer.name] is None}
    by_key: dict[str, Entrant] = {}
    absent = {}
    best_s: dict[str, float] = {}
    for peer in (*(p for p in OURS.values() if p.fidelity in fidelities), *peers):
        reason = reasons.get(peer.name)
        if reason is None:
            try:
                options = _tuned(peer, case, ranks, effort, best_s, say)
            except (AutoparError, SystemFailed) as e:
                reason = first_line(e)
            else:
                key = peer.key(options)
                by_key.setdefault(key, Entrant(key, peer, options, [])).names.append((peer.name, peer))
                continue
        absent[peer.name] = reason
    return sorted(by_key.values(), key=lambda e: not e.ours), absent


def _tuned(peer: Peer, case: Case, ranks: Ranks, effort: Effort, best_s: dict[str, float], say: Say) -> Options:
    """The fastest of a peer's choices; raises the last one's failure where none runs. `best_s` is, by fidelity, the
    time of a step of the best choice of all peers so far."""
    choices = peer.choices(case)
    if len(choices) == 1 or not effort.tune:
        return choices[0]
    times_s: list[tuple[float, int]] = []
    for i, options in enumerate(choices):
        others_s = best_s.get(peer.fidelity, float("inf"))
        if times_s and min(times_s)[0] > HOPELESS * others_s:
            break
        say(f"{peer.name}: trying {_shown(options)}")
        try:
            system = ranks.build("tuning", peer, case.workload.name, options)
            turns = Turns()
            took_s = list(turns.warm_up([system], peer.warm_up_steps + 1)[0].step_s[-1:])
            more = min(TUNING_STEPS - 1, round(TUNING_S / took_s[0]))
            if peer.period > 1:
                took_s = [turns.warm_up([system], peer.period)[0].mean_step_s]
            elif more and took_s[0] < HOPELESS * min([others_s, *(t for t, _ in times_s)]):
                took_s += turns.warm_up([system], more)[0].step_s
            ranks.drop("tuning")
        except SystemFailed as e:
            failure = e
            continue
        times_s.append((statistics.median(took_s), i))
    if not times_s:
        raise failure
    step_s, best = min(times_s)
    best_s[peer.fidelity] = min(step_s, best_s.get(peer.fidelity, step_s))
    return choices[best]


def first_line(error: Exception) -> str:
    """An error's message, short; of one that only announces what follows, with its last line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    last = lines[-1] if lines[0].endswith(":") and len(lines) > 1 else ""
    return f"{lines[0]} {last}".strip()[:300]


def _shown(options: Options) -> str:
    return ", ".join(f"{key} {value}" for key, value in options.items())
