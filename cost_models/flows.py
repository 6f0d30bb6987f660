"""Which links messages between ranks cross, so that traffic is a sum over hosts and not over pairs of ranks.

A message leaves its rank for the host, crosses the network between two hosts, and enters the other rank; between ranks
of one host it stays there. All messages between two hosts take one way through the network.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import permutations
from typing import NamedTuple

import numpy as np

from autopar.cost_models.alike import Indices
from autopar.cost_models.price import Floats
from autopar.ops.subgroups import Subgroups, all_subgroups
from autopar.spec.topology import Link, Topology


class FromOthers(NamedTuple):
    """Links that a message crosses for each rank of the subgroup that is on another host than the rank at their end."""

    links: Indices
    ends: Indices
    """The rank at the end of each link."""
    subgroup: Indices
    """By rank: the number of its subgroup."""
    place: Indices
    """By rank: a number that it shares with the ranks of its subgroup on its host."""

    def times(self, by_rank: Floats) -> Floats:
        """For each link, the sum of `by_rank` over these ranks."""
        of_subgroup: Floats = np.bincount(self.subgroup, by_rank)[self.subgroup].astype(float)
        return (of_subgroup - np.bincount(self.place, by_rank)[self.place])[self.ends]


@dataclass(frozen=True, slots=True)
class Traffic:
    """Traffic on each link, linear in a number of each rank."""

    links: Indices
    ranks: Indices
    times: Floats
    """[entry]: how often the rank's number of that entry crosses the link."""
    count: int
    """The number of links."""
    from_others: FromOthers | None = None

    def __call__(self, by_rank: Floats) -> Floats:
        found: Floats = np.bincount(self.links, self.times * by_rank[self.ranks], self.count).astype(float)
        if self.from_others is not None:
            found += np.bincount(self.from_others.links, self.from_others.times(by_rank), self.count)
        return found


@lru_cache(maxsize=4)
def ways_of(topology: Topology) -> Ways:
    """The ways of a topology, which searches for one cluster share."""
    return Ways(topology)


class Ways:
    """The links of a topology, numbered, and the ways over them."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._host_of = [place.host.name for place in topology.ranks]
        everyone = range(topology.world_size)
        on = self._by_host(everyone)
        apart = len(on) > 1
        ends = [(topology.leave(r), topology.enter(r)) if apart else ((), ()) for r in everyone]
        self._leave, self._enter = tuple(zip(*ends, strict=True))
        among = list(self._among(everyone))
        cables = [topology.cables(host) for host in on if apart and topology.switch_of(host) is not None]
        """Those that some pairs of hosts stand for, as do the ends of ranks."""
        found = {link.id: link for way in (*among, *self._leave, *self._enter, *cables) for link in way}
        self.of_ranks = len(found)
        """So many of the links, the first ones, lie between ranks; the others lead to hosts that serve."""
        served = [topology.path(*way) for s in topology.servers for rank in everyone for way in ((rank, s), (s, rank))]
        found |= {link.id: link for way in served for link in way}
        self.links = tuple(found.values())
        self._index = {link: i for i, link in enumerate(found)}
        self._served_latency_s = max(map(_latency_s, served), default=0.0)
        self._latencies_s: dict[Subgroups, float] = {(): max(map(_latency_s, among), default=0.0)}
        self._known: dict[tuple[str, Subgroups], Traffic] = {}
        self._between: dict[tuple[int | str, int | str], list[int]] = {}
        self._ends = [(self._numbers(leave), self._numbers(enter)) for leave, enter in ends]
        """Of each rank: the links by which a message leaves it for another host, and by which one enters."""

    def latency_s(self, subgroups: Subgroups, served: bool = False) -> float:
        """Of the longest way between two ranks of a subgroup; where hosts serve, also of those from ranks to them."""
        if subgroups not in self._latencies_s:
            ways = (way for subgroup in subgroups for way in self._among(subgroup))
            self._latencies_s[subgroups] = max(map(_latency_s, ways), default=0.0)
        return max(self._latencies_s[subgroups], self._served_latency_s if served else 0.0)

    def _by_host(self, ranks: Iterable[int]) -> dict[str, list[int]]:
        on: dict[str, list[int]] = {}
        for rank in ranks:
            on.setdefault(self._host_of[rank], []).append(rank)
        return on

    def _among(self, ranks: Iterable[int]) -> Iterator[Sequence[Link]]:
        """Ways between these ranks, as long as any: all within a host, and some that stand for those between hosts."""
        on = self._by_host(ranks)
        for here in on.values():
            for a, b in permutations(here, 2):
                yield self._topology.path(a, b)
        for one, other in self._topology.pairs(on):
            leave = max((self._leave[r] for r in on[one]), key=_latency_s)
            enter = max((self._enter[r] for r in on[other]), key=_latency_s)
            yield (*leave, *self._topology.through(one, other), *enter)

    def between(self, a: int | str, b: int | str) -> list[int]:
        """The links that a message between two ranks crosses."""
        if (a, b) not in self._between:
            self._between[a, b] = self._numbers(self._topology.path(a, b))
        return self._between[a, b]

    def ring(self, subgroups: Subgroups) -> Traffic:
        """The traffic of messages that each rank sends to the next rank of its subgroup."""
        return self._once("ring", subgroups)

    def from_each(self, subgroups: Subgroups) -> Traffic:
        """The traffic of messages that each rank sends to every other rank of its subgroup, linear in the sender's
        number."""
        return self._once("from each", subgroups)

    def to_each(self, subgroups: Subgroups) -> Traffic:
        """The traffic of messages that each rank receives from every other rank of its subgroup, linear in the
        receiver's number."""
        return self._once("to each", subgroups)

    def _once(self, kind: str, subgroups: Subgroups) -> Traffic:
        if (kind, subgroups) not in self._known:
            make = self._ring if kind == "ring" else partial(self._each, of_sender=kind == "from each")
            self._known[kind, subgroups] = make(all_subgroups(subgroups, len(self._host_of)))
        return self._known[kind, subgroups]

    def _ring(self, subgroups: Subgroups) -> Traffic:
        entries = Counter[tuple[int, int]]()
        for subgroup in subgroups:
            for i, a in enumerate(subgroup):
                entries.update((number, a) for number in self.between(a, subgroup[(i + 1) % len(subgroup)]))
        return self._traffic(entries)

    def _each(self, subgroups: Subgroups, of_sender: bool) -> Traffic:
        """The messages of every rank to every other one, by who sends them or by who receives them."""
        entries = Counter[tuple[int, int]]()
        far: list[tuple[int, int]] = []
        subgroup_of, here = np.zeros((2, len(self._host_of)), np.int64)
        places = 0
        for group_number, subgroup in enumerate(subgroups):
            on = self._by_host(subgroup)
            for a, b in ((a, b) for ranks in on.values() for a, b in permutations(ranks, 2)):
                entries.update((number, a if of_sender else b) for number in self.between(a, b))
            for (number, host), messages in self._between_hosts(on, of_sender).items():
                entries.update({(number, rank): messages for rank in on[host]})
            for host, ranks in on.items():
                if len(on) > 1 and self._topology.switch_of(host) is not None:
                    near, distant = self._numbers(self._topology.cables(host))[:: 1 if of_sender else -1]
                    entries.update({(near, rank): len(subgroup) - len(ranks) for rank in ranks})
                    far += [(distant, rank) for rank in ranks]
            for ranks in on.values():
                subgroup_of[ranks], here[ranks] = group_number, places
                places += 1
                for rank in ranks:
                    own, others = self._ends[rank] if of_sender else self._ends[rank][::-1]
                    entries.update({(number, rank): len(subgroup) - len(ranks) for number in own})
                    far += [(number, rank) for number in others]
        links, ends = np.array(far, np.int64).reshape(-1, 2).T
        return self._traffic(entries, FromOthers(links, ends, subgroup_of, here))

    def _between_hosts(self, on: Mapping[str, Sequence[int]], of_sender: bool) -> Counter[tuple[int, str]]:
        """How often each rank of a host, as the sender or as the receiver, crosses each link between hosts; cables to
        their switches left out, of hosts that have one. `on`: the ranks of a subgroup, by host."""
        found = Counter[tuple[int, str]]()
        topology, behind = self._topology, dict[str, int]()
        switches = {host: topology.switch_of(host) for host in on}
        for host, switch in switches.items():
            if switch is not None:
                behind[switch] = behind.get(switch, 0) + len(on[host])
        first = {switch: host for host, switch in reversed(switches.items()) if switch is not None}
        middle: dict[str, list[tuple[int, int]]] = {}
        for one, other in permutations(first, 2):
            ends = (first[one], first[other]) if of_sender else (first[other], first[one])
            way = topology.through(*ends)[1:-1]
            middle.setdefault(one, []).extend((number, behind[other]) for number in self._numbers(way))
        for host, switch in switches.items():
            if switch is not None:
                for number, messages in middle.get(switch, ()):
                    found[number, host] += messages
        loose = {host for host, switch in switches.items() if switch is None}
        for one, other in permutations(on, 2) if loose else ():
            if one in loose or other in loose:
                way = topology.through(one, other)[one not in loose :]
                for number in self._numbers(way if other in loose else way[:-1]):
                    found[number, one if of_sender else other] += len(on[other if of_sender else one])
        return found

    def _traffic(self, entries: Counter[tuple[int, int]], others: FromOthers | None = None) -> Traffic:
        """`entries`: how often a rank's number crosses a link, by link and rank."""
        pairs = np.array(list(entries), np.int64).reshape(-1, 2)
        return Traffic(pairs[:, 0], pairs[:, 1], np.array(list(entries.values()), float), len(self.links), others)

    def _numbers(self, way: Sequence[Link]) -> list[int]:
        return [self._index[link.id] for link in way]


def _latency_s(way: Sequence[Link]) -> float:
    return sum(link.latency_s for link in way)
