"""Which links messages between ranks cross, so that traffic is a sum over hosts and not over pairs of ranks.

A message leaves its rank for the host, crosses the network between two hosts, and enters the other rank; between ranks
of one host it stays there. All messages between two hosts take one way through the network.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import permutations

import numpy as np
import numpy.typing as npt

from autopar.cost_models.alike import Indices
from autopar.ops.subgroups import Subgroups, all_subgroups
from autopar.spec.topology import Link, Topology

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Traffic:
    """Traffic on each link, linear in a number of each rank."""

    links: Indices
    ranks: Indices
    times: Floats
    """How often the number of a rank crosses a link; together [entry]."""
    count: int
    """Of links."""
    others: tuple[Indices, ...] = ()
    """Links that the numbers of all ranks on other hosts cross, of a subgroup: the links; for each a rank at its end;
    and for each rank, a number of its subgroup, and one of those of this that are on its host."""

    def __call__(self, by_rank: Floats) -> Floats:
        found: Floats = np.bincount(self.links, self.times * by_rank[self.ranks], self.count).astype(float)
        if self.others:
            links, ranks, subgroup, here = self.others
            others = np.bincount(subgroup, by_rank)[subgroup] - np.bincount(here, by_rank)[here]
            found += np.bincount(links, others[ranks], self.count)
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
        self._on: dict[str, list[int]] = {}
        for rank, host in enumerate(self._host_of):
            self._on.setdefault(host, []).append(rank)
        found: dict[str, Link] = {}
        self.latency_s = 0.0
        """Of the longest way."""
        first = {host: ranks[0] for host, ranks in self._on.items()}
        for ranks in self._on.values():
            for a, b in permutations(ranks, 2):
                self._add(topology.path(a, b), found)
        for a, b in permutations(first.values(), 2):
            way = topology.path(a, b)
            self._add(way, found)
            if len(self._on[self._host_of[a]]) > 1 or len(self._on[self._host_of[b]]) > 1:
                inner = topology.through(self._host_of[a], self._host_of[b])
                for other in self._on[self._host_of[a]]:
                    self._add((*topology.leave(other), *inner, *topology.enter(b)), found)
                for other in self._on[self._host_of[b]]:
                    self._add((*topology.leave(a), *inner, *topology.enter(other)), found)
        self.of_ranks = len(found)
        """So many of the links, the first ones, lie between ranks; the others lead to hosts that serve."""
        for server in topology.servers:
            for rank in range(topology.world_size):
                self._add(topology.path(rank, server), found)
                self._add(topology.path(server, rank), found)
        self.links = tuple(found.values())
        self._index = {link: i for i, link in enumerate(found)}
        self._known: dict[tuple[str, Subgroups], Traffic] = {}
        self._between: dict[tuple[int | str, int | str], list[int]] = {}
        apart = len(self._on) > 1
        self._ends = [
            (self._numbers(topology.leave(r)), self._numbers(topology.enter(r))) if apart else ([], [])
            for r in range(topology.world_size)
        ]
        """Of each rank: the links by which a message leaves it for another host, and by which one enters."""

    def _add(self, way: Sequence[Link], found: dict[str, Link]) -> None:
        self.latency_s = max(self.latency_s, sum(link.latency_s for link in way))
        for link in way:
            found.setdefault(link.id, link)

    def between(self, a: int | str, b: int | str) -> list[int]:
        """The links that a message crosses."""
        if (a, b) not in self._between:
            self._between[a, b] = self._numbers(self._topology.path(a, b))
        return self._between[a, b]

    def ring(self, subgroups: Subgroups) -> Traffic:
        """Of what each rank sends on to the next one of its subgroup."""
        return self._once("ring", subgroups)

    def from_each(self, subgroups: Subgroups) -> Traffic:
        """Of what each rank sends to every other one of its subgroup."""
        return self._once("from each", subgroups)

    def to_each(self, subgroups: Subgroups) -> Traffic:
        """Of what each rank receives from every other one of its subgroup."""
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
            on: dict[str, list[int]] = {}
            for rank in subgroup:
                on.setdefault(self._host_of[rank], []).append(rank)
            for a, b in ((a, b) for ranks in on.values() for a, b in permutations(ranks, 2)):
                entries.update((number, a if of_sender else b) for number in self.between(a, b))
            between = Counter[tuple[int, str]]()
            for one, other in permutations(on, 2):
                for number in self._through(one, other):
                    between[number, one if of_sender else other] += len(on[other if of_sender else one])
            for (number, host), messages in between.items():
                entries.update({(number, rank): messages for rank in on[host]})
            for ranks in on.values():
                subgroup_of[ranks], here[ranks] = group_number, places
                places += 1
                for rank in ranks:
                    own, others = self._ends[rank] if of_sender else self._ends[rank][::-1]
                    entries.update({(number, rank): len(subgroup) - len(ranks) for number in own})
                    far += [(number, rank) for number in others]
        links, ends = np.array(far, np.int64).reshape(-1, 2).T
        return self._traffic(entries, (links, ends, subgroup_of, here))

    def _traffic(self, entries: Counter[tuple[int, int]], others: tuple[Indices, ...] = ()) -> Traffic:
        """`entries`: how often a rank's number crosses a link, by link and rank."""
        pairs = np.array(list(entries), np.int64).reshape(-1, 2)
        return Traffic(pairs[:, 0], pairs[:, 1], np.array(list(entries.values()), float), len(self.links), others)

    def _through(self, one: str, other: str) -> list[int]:
        if (one, other) not in self._between:
            self._between[one, other] = self._numbers(self._topology.through(one, other))
        return self._between[one, other]

    def _numbers(self, way: Sequence[Link]) -> list[int]:
        return [self._index[link.id] for link in way]
