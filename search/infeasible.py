"""What is said where nothing fits: which constraint, by how much, what the memory is taken by, and the nearest change
that helps."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from autopar.errors import InfeasibleError
from autopar.formatting import size
from autopar.search.base import Candidate, Problem
from autopar.search.memory_use import memory_use
from autopar.search.nearest import LEANER, fewer_constraints, larger_devices, leaner, other_inputs, other_strategies


class NoPlanFits(InfeasibleError):
    """All plans of a search exceed the devices' memory. What helps is priced when somebody asks what it says."""

    def __init__(self, problem: Problem, candidates: Sequence[Candidate]) -> None:
        super().__init__()
        self._of = problem, candidates
        self.least_bytes = min(c.overflow_bytes for c in candidates)
        """What the leanest plan exceeds it by."""

    @cached_property
    def _said(self) -> str:
        return no_plan_fits(*self._of)

    def __str__(self) -> str:
        return self._said

    def __reduce__(self) -> tuple[type[InfeasibleError], tuple[str]]:
        return InfeasibleError, (str(self),)


def no_plan_fits(problem: Problem, candidates: Sequence[Candidate]) -> str:
    """The error of a search all of whose plans exceed the devices' memory."""
    leanest = min(candidates, key=lambda c: c.order)
    helps = [str(change) for change in fewer_constraints(problem, LEANER)]
    helps += [str(change) for change in other_inputs(problem, [leanest.groups, *leaner(problem)])]
    helps.append(larger_devices(problem, leanest.estimate.peak_memory_bytes))
    if not problem.context.has_optimizer:
        helps.append("passing the optimizer, so that its state can be spread over the ranks")
    elif not problem.context.elementwise_update:
        helps.append("an optimizer whose update is elementwise, so that its state can be spread over the ranks")
    again = problem.graph.recompute != "none"
    return (
        f"no plan fits: the leanest of {len(candidates)}, '{leanest.name}', {_needs(problem, leanest)}"
        + (" Activations are computed again in the backward pass already." if again else "")
        + _what_helps(helps)
    )


def named_does_not_fit(problems: Sequence[Problem], plan: Candidate) -> str:
    """The error of a plan by name that exceeds the devices' memory. `problems`: the plan's own, then those with ever
    more of the activations computed again, with which it does not fit either."""
    first, last = problems[0], problems[-1]
    helps = [str(c) for c in other_strategies([first, last] if last is not first else [first], plan.name)]
    helps += [str(change) for change in fewer_constraints(first, [plan.name] if helps else [plan.name, *LEANER])]
    helps += [str(change) for change in other_inputs(first, [plan.groups])]
    helps.append(larger_devices(first, plan.estimate.peak_memory_bytes))
    again = len(problems) > 1
    return (
        f"plan '{plan.name}' does not fit: it {_needs(first, plan)}"
        + (" Nor does it fit with activations computed again in the backward pass." if again else "")
        + _what_helps(helps)
    )


def _needs(problem: Problem, plan: Candidate) -> str:
    use = memory_use(problem, plan)
    if use is None:
        peaks, places = plan.estimate.peak_memory_bytes, problem.topology.ranks
        rank = max(range(len(peaks)), key=lambda r: peaks[r] - places[r].device.memory_bytes.value)
        device = places[rank].device
        memory = device.memory_bytes.value
        over = size(peaks[rank] - memory)
        return f"needs {size(peaks[rank])} on rank {rank} ({device.kind}, {size(memory)}), {over} too much."
    kept = f", and {size(use.reserve_bytes)} of it are to be kept free besides" if use.reserve_bytes else ""
    return (
        f"needs {size(use.peak_bytes)} on {use.device_text}, {size(use.over_bytes)} too much{kept}. At its fullest, "
        f"memory is taken by {use.parts_text}."
    )


def _what_helps(helps: Sequence[str]) -> str:
    nearest, *others = helps
    return f" With this it fits: {nearest}" + (f"; or {'; or '.join(others)}" if others else "")
