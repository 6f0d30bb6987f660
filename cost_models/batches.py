"""Ranks whose batches have other sizes than the example: their graphs, and what their nodes take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction

from autopar.cost_models.compute import Rates, node_times
from autopar.ir.scaled_batch import scaled, why_not
from autopar.ir.training_graph import TrainingGraph


def graphs_for(graph: TrainingGraph, batches: Sequence[int | None]) -> list[TrainingGraph]:
    """The graph of each rank, by the samples in its batch; those of one size are one object. `None`, and where the
    graph cannot be scaled (`unscaled`): the graph itself."""
    found: dict[int | None, TrainingGraph] = {None: graph, graph.batch_size: graph}
    for batch in batches:
        if batch not in found:
            factor = _factor(graph, batch)
            found[batch] = graph if factor is None or why_not(graph, factor) is not None else scaled(graph, factor)
    return [found[batch] for batch in batches]


def unscaled(graph: TrainingGraph, batches: Sequence[int | None]) -> str | None:
    """Why ranks with other batches than the example are priced with that all the same; `None` where they are not."""
    others = sorted({b for b in batches if b is not None and b != graph.batch_size})
    factors = [_factor(graph, b) for b in others]
    if None in factors:
        return "the batch has no number of samples"
    return next((why for f in factors if f is not None and (why := why_not(graph, f)) is not None), None)


def scaled_times(
    graph: TrainingGraph, rates: Rates, other: TrainingGraph, others: Rates, measured_s: Mapping[str, float]
) -> dict[str, float]:
    """What was measured of `graph`'s nodes on a device of these rates, as it would be of the `other` graph's on one of
    `others`, by what both take on the roofline."""
    before, after = node_times(graph, rates), node_times(other, others)
    ratios = {n.name: b / a if a else 1.0 for n, a, b in zip(graph.compute, before, after, strict=True)}
    return {name: seconds * ratios.get(name, 1.0) for name, seconds in measured_s.items()}


def _factor(graph: TrainingGraph, batch: int | None) -> Fraction | None:
    return Fraction(batch, graph.batch_size) if batch and graph.batch_size else None
