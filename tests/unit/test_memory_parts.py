"""What a rank's memory is taken by adds up to the peak that is predicted, and goes by the right names."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from autopar.cost_models import ADAMW, optimizer_cost
from autopar.cost_models.memory import MemoryModel
from autopar.cost_models.memory_parts import MemoryParts, memory_parts
from autopar.errors import PlanError
from autopar.search.builders import BUILDERS, builder_named
from autopar.spec.plan import SyncGroup
from autopar.strategies import Context
from autopar.strategies.lowering import StepProgram, lower_plan
from tests.unit.synthetic import MLP, cpu_hosts, training_graph

GRAPH = training_graph(MLP, live_bytes=3 << 20)
CLUSTERS = {1: cpu_hosts(1), 3: cpu_hosts(3), 4: cpu_hosts(2, devices="2 x cpu")}


def groups(name: str, n: int, clips: bool = False) -> tuple[tuple[SyncGroup, ...], Context]:
    context = Context(n, clips=clips, late_parameters=True).on(CLUSTERS[n])
    return builder_named(name)(GRAPH.parameters, context, CLUSTERS[n]), context


def programs() -> Iterator[tuple[StepProgram, str]]:
    for i, name in enumerate((*BUILDERS, "PS+late", "zero1+late", "ddp+bf16")):
        n = list(CLUSTERS)[i % 3]
        with contextlib.suppress(PlanError):
            made, context = groups(name, n, clips=i % 2 == 0)
            yield lower_plan(made, GRAPH, context), f"{name} on {n}"


def test_the_parts_add_up_to_the_peak_of_every_rank_of_every_seed() -> None:
    model, adam = MemoryModel(GRAPH), optimizer_cost("AdamW")
    tried = 0
    for program, name in programs():
        for rank, peak in enumerate(model.peaks(program, adam)):
            parts = memory_parts(model, program, adam, rank)
            assert parts.total == peak, (name, rank)
            assert min(getattr(parts, f) for f in MemoryParts.__slots__) >= 0, (name, rank, parts)
            tried += 1
    assert tried > 50


@pytest.mark.parametrize("optimizer, state", [("AdamW", 2), ("SGD", 0)])
def test_gradients_of_replicas_are_called_gradients(optimizer: str, state: int) -> None:
    """The buckets that DDP sends hold the gradients themselves."""
    whole = GRAPH.parameter_bytes
    made, context = groups("ddp", 4)
    parts = memory_parts(MemoryModel(GRAPH), lower_plan(made, GRAPH, context), optimizer_cost(optimizer), 0)
    assert parts.parameters == whole
    assert parts.optimizer_state == state * whole
    assert whole <= parts.gradients < 2 * whole  # a bucket is packed beside the gradients that it is packed from
    assert parts.communication == 0
    assert parts.activations <= 3 << 20


def test_what_other_ranks_keep_is_no_part() -> None:
    made, context = groups("sharded", 4)
    parts = memory_parts(MemoryModel(GRAPH), lower_plan(made, GRAPH, context), ADAMW, 0)
    assert parts.parameters == pytest.approx(GRAPH.parameter_bytes / 4, rel=0.01)
    assert parts.optimizer_state == pytest.approx(2 * GRAPH.parameter_bytes / 4, rel=0.01)
