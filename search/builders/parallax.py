"""Parallax (Kim et al., EuroSys 2019), as AutoDist builds it: dense gradients by all-reduce, rows of embeddings
by load-balanced parameter servers."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.ir.training_graph import Parameter
from autopar.search.builders.all_reduce import CHUNK_SIZE
from autopar.search.builders.common import Piece, alone, group, issue_order, one_dtype_each, whole
from autopar.search.builders.parameter_server import load_balanced
from autopar.spec.cluster import ClusterSpec
from autopar.spec.plan import SyncGroup
from autopar.strategies import Context


def parallax(parameters: Sequence[Parameter], context: Context, cluster: ClusterSpec) -> tuple[SyncGroup, ...]:
    """`Parallax`. A dense parameter's group is its index among *all* parameters, divided by the chunk size."""
    if context.world_size == 1:
        return alone(parameters)
    dense: dict[int, list[Piece]] = {}
    for index, parameter in enumerate(parameters):
        if parameter.structure != "rows":
            dense.setdefault(index // CHUNK_SIZE, []).append(whole(parameter))
    groups = [group("all_reduce", part) for pieces in dense.values() for part in one_dtype_each(pieces)]
    groups += load_balanced([p for p in parameters if p.structure == "rows"], context)
    return issue_order(groups, parameters)
