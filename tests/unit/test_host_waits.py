"""Where the host waits for the device in the middle of a step: found without a device, on meta tensors, of which nobody
can read a value. What reads one there is what would make the host wait on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from autopar.ir.batch import flatten
from autopar.ir.build import training_graph
from autopar.ir.training_graph import TrainingGraph
from autopar.runtime.compiled import Settings
from autopar.runtime.job.process_group import Group
from autopar.runtime.model import shared_memory
from autopar.runtime.optimizers.initial_state import initial_state
from autopar.runtime.optimizers.optimizer import context_for
from autopar.runtime.program import Program
from autopar.strategies import STRATEGIES
from autopar.testing.cases import Use, uses
from autopar.testing.tasks import TASKS
from autopar.testing.training import batches

TASK = TASKS["classes"]  # has a table, a linear layer and a head
WAITS = {
    "class_sharded_head": "samples of each rank",
    "column_parallel_linear": "samples of each rank",
    "qsgd": "how often it has drawn at random",
    "one_bit_adam": "whether elements without variance have gradients, in the 1st, 2nd, 4th, 8th, ... such step",
    "power_sgd": "whether the number of steps is even, where a checkpoint may have been loaded",
    "row_sharded_table": "rows that are looked up",
    "sharded_parameters": "whether all ranks are at their last micro-batch",
    "sparse_rows": "rows that are looked up",
    "sufficient_factors": "rows of each rank's factors",
    "terngrad": "how often it has drawn at random",
}
"""Strategies whose steps read something on the host, and what. To be shorter."""
ON_THE_HOST = {"summation_servers"}
"""Adds up on hosts, by design."""

BEHIND_OTHERS = {"one_bit_adam"}
"""Goes on from the moments that exact steps have left, and refuses the single step that is taken here."""


class _EveryChannel(dict[Any, Any]):
    """One process group in the place of those of all teams and lanes."""

    def __contains__(self, key: object) -> bool:
        return True

    def __missing__(self, key: object) -> Any:
        return dist.group.WORLD


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Group]:
    """A rank of two, whose collectives send nothing and know shapes alone."""
    import torch.distributed._tools.fake_collectives  # noqa: F401  # shapes of collectives on meta tensors

    monkeypatch.setattr(shared_memory, "check_memory", lambda parameters: None)  # meta tensors have no addresses
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        yield Group(0, 2, dist.group.WORLD, channels=_EveryChannel())
    finally:
        dist.destroy_process_group()


@cache
def captured() -> TrainingGraph:
    """The graph, its constants on the meta device, too."""
    graph = training_graph(TASK.model(), flatten(first_batch()), TASK.loss_fn)
    assert graph.joint is not None
    for node in graph.joint.module.graph.nodes:
        if "device" in node.kwargs:
            node.update_kwarg("device", torch.device("meta"))
    return graph


def first_batch() -> Any:
    return batches(TASK, "sgd", "equal", 0, 0)[0]


def step(use: Use, group: Group) -> None:
    """Takes a step that clips and updates with AdamW, on meta tensors."""
    model = TASK.model().to("meta")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if any(g.from_step for g in use.plan.groups):  # it goes on from what exact steps have left
        (settings_of,) = optimizer.param_groups
        optimizer.state.update((p, initial_state(optimizer, settings_of, p)) for p in settings_of["params"])
    context = context_for(group.world_size, optimizer, "element", 0.1, True, late_parameters=True)
    settings = Settings(TASK.loss_fn, 0.1, weight=lambda batch: 2.0)
    program = Program(model, use.plan, group, optimizer, settings, context)
    flat = flatten(first_batch())
    batch = flatten(flat.rebuild(tuple(t.to("meta") for t in flat.tensors)))
    program.adopt(captured(), batch)
    program._run([program.compile_for(batch)], [batch], [batch])


def waits(use: Use, group: Group) -> bool:
    """Whether the host reads a value in a step."""
    try:
        step(use, group)
    except (RuntimeError, NotImplementedError) as e:
        if "meta tensor" not in str(e).lower():
            raise
        return True
    return False


@pytest.mark.parametrize("name", sorted(STRATEGIES.keys() - ON_THE_HOST - BEHIND_OTHERS))
def test_which_strategies_wait(name: str, two_ranks: Group) -> None:
    optimizer = torch.optim.AdamW(TASK.model().parameters())
    context = context_for(2, optimizer, "element", None, True, late_parameters=True)
    of_settings = [waits(use, two_ranks) for use in uses(STRATEGIES[name], captured(), context)]
    assert any(of_settings) == (name in WAITS)


def test_one_rank_never_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "check_memory", lambda parameters: None)
    optimizer = torch.optim.AdamW(TASK.model().parameters())
    context = context_for(1, optimizer, "element", None, True)
    use = next(iter(uses(STRATEGIES["all_reduce"], captured(), context)))
    step(use, Group(0, 1))
