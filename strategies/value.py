"""The flat values that primitives pass on, and over which ranks they are summed."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.ir.primitives import Teams, all_teams

Sums = tuple[frozenset[int], ...]


@dataclass(frozen=True, slots=True)
class Value:
    """A flat value that primitives pass on: gradients or parameters of a group."""

    index: int
    group: int
    elements: int
    dtype: str
    stage: int
    pending: bool = False
    """A collective that has not been waited for."""
    sums: Sums = ()
    """Gradients: the ranks over which each rank's value is the sum."""
    splits: tuple[int, ...] = ()
    owner: int | None = None
    updated: bool = False
    """Parameters, after the optimizer."""
    ragged: bool = False
    """As many elements as the batch makes them; `elements` are expected."""
    position: int | None = None
    """Where in the graph it is made; `None` where its stage says so."""

    @property
    def replicated(self) -> bool:
        return not self.splits and self.owner is None

    @property
    def reduced(self) -> bool:
        """Gradients: summed over all ranks."""
        return all(len(ranks) == len(self.sums) for ranks in self.sums) and bool(self.sums)


def joined(sums: Sums, teams: Teams) -> Sums:
    """What each rank's value is the sum over, behind a sum within teams. No rank may be counted twice."""
    found = list(sums)
    for team in all_teams(teams, len(sums)):
        joined = frozenset[int]().union(*(sums[r] for r in team))
        assert len(joined) == sum(len(sums[r]) for r in team), f"a sum over ranks {team} would count some of them twice"
        for rank in team:
            found[rank] = joined
    return tuple(found)
