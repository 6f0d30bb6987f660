"""Adaptive compression as others have it, run by autopar's runtime: a rate for each layer, decided while training.

Each begins from what its authors' code begins from. Decisions are rank 0's, from its own gradients at that moment.

- L-GreCo (Markov et al., MLSys 2024): PowerSGD with, for each layer, the rank between half and twice 4 by which the
  fewest numbers are sent, as long as the errors of all layers together are no more than with rank 4.
- Accordion (Agarwal et al., MLSys 2021): PowerSGD with rank 1, and with rank 4 in layers whose gradient's norm has
  changed by half or more since the decision before, as it does in critical regimes.
- LEGACY (ICLR 2026): top-k with a density by the layer's size and by the part of the training: small layers send
  more, and early steps. Its code divides layers at 10,000 elements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch

from autopar.spec.plan import Plan, SyncGroup

UNIFORM_RANK, LOW_RANK = 4, 1
"""PowerSGD's ranks: the one that L-GreCo begins from and Accordion takes where gradients change; and Accordion's other
one."""
BUCKETS = 10_000
"""Into which L-GreCo's knapsack divides the error that is allowed."""
CHANGE = 0.5
"""Relative change of a gradient's norm from which Accordion takes the larger rank."""
SMALL = 10_000
"""Elements of a layer that LEGACY's code counts as small below."""
DENSITIES = {"early": (0.2, 0.02), "late": (0.1, 0.01)}
"""Of small layers and of large ones, in the first and in the second half of the training."""

Gradients = Mapping[str, torch.Tensor]
"""By parameter."""


@dataclass(frozen=True)
class Rival:
    """A rule by which rates are decided."""

    name: str
    strategy: str
    """The name of the plan whose groups get these rates."""
    option: str
    """The option of its strategy that is the rate."""
    decide: Callable[[Gradients, Gradients | None, float], dict[str, float]]
    """The rate of each parameter, from the gradients now, those at the decision before, and the part of the training
    that is over, from 0 to 1. Parameters that are left out keep the plan's own rate."""


def l_greco(now: Gradients, before: Gradients | None, done: float) -> dict[str, float]:
    """Ranks by a knapsack over discretised errors: singular values say what each rank leaves out."""
    layers = {n: g.reshape(len(g), -1).double() for n, g in now.items() if g.dim() > 1}
    ranks = range(UNIFORM_RANK // 2, 2 * UNIFORM_RANK + 1)
    left_out = {n: _left_out(g, ranks) for n, g in layers.items()}
    allowed = sum(float(each[ranks.index(UNIFORM_RANK)]) for each in left_out.values())
    sent = {n: torch.tensor([float(r * sum(g.shape)) for r in ranks]) for n, g in layers.items()}
    if allowed == 0:
        return dict.fromkeys(layers, float(ranks[0]))
    fewest = torch.full((BUCKETS + 1,), torch.inf)  # numbers sent, by the error so far
    fewest[0] = 0
    choices = []
    for name in layers:
        costs = (left_out[name] / allowed * BUCKETS).floor().long()
        tried = torch.full((len(ranks), BUCKETS + 1), torch.inf)
        for i, cost in enumerate(costs.tolist()):
            if cost <= BUCKETS:
                tried[i, cost:] = fewest[: BUCKETS + 1 - cost] + sent[name][i]
        fewest, choice = tried.min(0)
        choices.append((name, costs, choice))
    at, found = int(fewest.argmin()), dict[str, float]()
    for name, costs, choice in reversed(choices):
        found[name] = float(ranks[int(choice[at])])
        at -= int(costs[int(choice[at])])
    return found


def _left_out(gradient: torch.Tensor, ranks: Iterable[int]) -> torch.Tensor:
    """The Frobenius norm of what the best approximation of each rank leaves out."""
    squares = torch.linalg.svdvals(gradient).square()
    return torch.stack([squares[r:].sum().sqrt() for r in ranks])


def accordion(now: Gradients, before: Gradients | None, done: float) -> dict[str, float]:
    """The uniform rank at first and where a gradient's norm changes much; else the lowest."""
    return {
        n: float(UNIFORM_RANK if before is None or _change(before[n], g) >= CHANGE else LOW_RANK)
        for n, g in now.items()
    }


def _change(before: torch.Tensor, now: torch.Tensor) -> float:
    norm = float(before.norm())
    return abs(float(now.norm()) - norm) / norm if norm else float("inf")


def legacy(now: Gradients, before: Gradients | None, done: float) -> dict[str, float]:
    """Densities by size and phase."""
    small, large = DENSITIES["early" if done < 0.5 else "late"]
    return {n: small if g.numel() < SMALL else large for n, g in now.items()}


RIVALS = {
    r.name: r
    for r in (
        Rival("L-GreCo", "power_sgd", "rank", l_greco),
        Rival("Accordion", "power_sgd", "rank", accordion),
        Rival("LEGACY", "top_k(chunk=8)", "density", legacy),
    )
}


def with_rates(plan: Plan, option: str, rates: Mapping[str, float]) -> Plan:
    """A plan whose groups are divided by their members' rates, each with its own."""
    groups = list[SyncGroup]()
    for group in plan.groups:
        own = group.options.get(option)
        by_rate: dict[object, list[object]] = {}
        for member in group.members:
            by_rate.setdefault(rates.get(member.name, own), []).append(member)
        for rate, members in by_rate.items():
            options = {**group.options, **({} if rate is None else {option: _plain(rate)})}
            groups.append(group.model_copy(update={"members": tuple(members), "options": options}))
    return plan.model_copy(update={"groups": tuple(groups)})


def _plain(rate: object) -> object:
    return int(rate) if isinstance(rate, float) and rate >= 1 else rate
