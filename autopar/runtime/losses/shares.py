"""Losses of several terms, each a mean over something else: how much each rank's batch counts in each of them.

`weight=` returns the count of each term, the loss each term. The counts are summed over all ranks before a step, and
the step's loss is the sum of this rank's shares in the terms: so that the sum over ranks is the loss of one process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from autopar.backends import collectives
from autopar.errors import SpecError
from autopar.ir.batch import Weighted
from autopar.ir.weightless import lacks_values
from autopar.runtime.job.process_group import Group
from autopar.runtime.losses.meaning import LossMeaning
from autopar.runtime.step_writer import batch_share


def counts_of(weight: Callable[[Any], Any], batch: Any) -> dict[str, float] | tuple[float, ...] | None:
    """What `weight` says of a batch, by term; `None` where it says one number. Raises `SpecError` for anything else."""
    said = weight(batch)
    if isinstance(said, Mapping) and said:
        return {str(k): _number(v) for k, v in said.items()}
    if isinstance(said, (tuple, list)) and said:
        return tuple(_number(v) for v in said)
    _number(said)
    return None


def one_weight(weight: Callable[[Any], Any], batch: Any) -> float:
    """What `weight` says of a batch of a drop-in module, which does not see the terms of a loss. Raises `SpecError`
    where that is not one number."""
    if counts_of(weight, batch) is not None:
        raise SpecError("weight= returns several counts, which needs the optimizer: a drop-in module sees no loss")
    return float(weight(batch))


def with_shares(batch: Any, counts: dict[str, float] | tuple[float, ...], shares: Sequence[torch.Tensor]) -> Weighted:
    """The batch with a rank's share in each term."""
    return Weighted(batch, dict(zip(counts, shares, strict=True)) if isinstance(counts, dict) else tuple(shares))


def example_of(weight: Callable[[Any], Any] | None, batch: Any) -> Any:
    """A batch as programs capture it: with shares where `weight` says several counts. Raises `SpecError` where the
    batch has no values, and `weight` asks for some."""
    try:
        counts = None if weight is None else counts_of(weight, batch)
    except Exception as e:
        if any(isinstance(x, torch.Tensor) and lacks_values(x) for x in pytree.tree_leaves(batch)):
            raise SpecError(
                f"weight= cannot count in this batch, which has no values (it is on the meta device, or fake): {e}. "
                "Pass a batch with values, or have weight= return tensors"
            ) from e
        raise
    if counts is None:
        return batch
    return with_shares(batch, counts, list(torch.ones(len(counts), dtype=torch.float64)))


class LossShares:
    """A program's shares in the terms of its loss, where it has several."""

    def __init__(
        self, weight: Callable[[Any], Any] | None, group: Group, device: torch.device, meaning: LossMeaning
    ) -> None:
        self._weight = weight
        self._group = group
        self._device = device
        self._meaning = meaning
        self._terms: list[Any] | None = None
        """Of the loss, as `weight` has named or numbered them first; empty where it says one number."""

    def of(self, batches: Sequence[Any]) -> Sequence[Any]:
        """The micro-batches of a step, each with its shares; as they are, where the loss has one term. By all ranks
        together. Raises `SpecError` where `weight` names other terms than before."""
        if self._weight is None or self._terms == []:
            return batches
        each = [counts_of(self._weight, b) or () for b in batches]
        for counts in each:
            terms = list(counts) if isinstance(counts, dict) else [*range(len(counts))]
            self._terms = terms if self._terms is None else self._terms
            if terms != self._terms:
                raise SpecError(f"weight= returns counts of {terms}, and of {self._terms} before: name the same terms")
        if not self._terms:
            return batches
        self._meaning.take_as_sum()
        rows = [list(c.values()) if isinstance(c, dict) else list(c) for c in each]
        weights = torch.tensor(rows, dtype=torch.float64, device=self._device)
        total = weights.sum(0)
        if self._group.name is not None:
            with self._group.guard("summing the counts of the loss's terms"):
                total = collectives.wait(collectives.all_reduce(total, self._group.name))
        shares = batch_share(weights, total, torch.float64, self._group.world_size * len(batches))
        return [with_shares(b, c, list(s)) for b, c, s in zip(batches, each, shares, strict=True)]


def _number(said: Any) -> float:
    if isinstance(said, torch.Tensor) and lacks_values(said) and said.numel() == 1:
        return 1.0  # of a batch that is planned for, where the terms count, and no number does
    try:
        found = float(said)
    except (TypeError, ValueError, RuntimeError) as e:
        raise SpecError(
            f"weight= returned a {type(said).__name__}, expected a number, or a dict or tuple of numbers, one for each "
            "term of the loss"
        ) from e
    if not found >= 0:
        raise SpecError(f"weight= returned {found}, expected a number that is not negative")
    return found
