"""What the tests of batches of several lengths run on each rank: lengths that differ, under plans of all kinds."""

from __future__ import annotations

import copy

import torch
from torch import nn

import autopar
from autopar import ClusterSpec, Plan
from autopar.runtime.job.order import CollectiveOrder
from autopar.spec.plan import ParameterSlice, SyncGroup
from tests.unit.test_shapes import Scorer, batch, loss_of

PLANS: dict[str, dict[tuple[str, ...], str]] = {
    "shared out": {
        ("words.weight",): "row_sharded_table",
        ("out.weight", "out.bias"): "class_sharded_head",
        ("hidden.weight",): "column_parallel_linear",
        ("hidden.bias", "places.weight"): "all_reduce",
    },
    "parts": {
        ("words.weight",): "sparse_rows",
        ("hidden.weight", "out.weight"): "sufficient_factors",
        ("places.weight",): "partitioned_parameter_server",
        ("hidden.bias", "out.bias"): "parameter_server",
    },
}
LENGTHS = (((2, 5), (2, 5)), ((2, 5), (2, 9)), ((2, 7), (2, 6)), ((3, 4), (2, 5)), ((2, 11), (5, 6)), ((2, 5), (4, 8)))
"""(samples, length) of each rank, step by step: some ranks have symbols before others."""


def _plan(name: str, n: int) -> Plan:
    made = autopar.plan(
        Scorer().double(), ClusterSpec.local(n), example_inputs=batch(2, 5), loss_fn=loss_of, strategy="ddp"
    )
    groups = tuple(
        SyncGroup(strategy=strategy, members=tuple(ParameterSlice(name=m) for m in members))
        for members, strategy in PLANS[name].items()
    )
    return made.model_copy(update={"groups": groups})


def _global_loss(model: nn.Module, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    sums = [loss_of(model(x), y) * y.numel() for x, y in batches]
    return torch.stack(sums).sum() / sum(y.numel() for _, y in batches)


def steps(rank: int, n: int, name: str) -> list[float]:
    """How far losses and parameters are from those of one process; and the number of captures."""
    model = Scorer().double()
    eager = copy.deepcopy(model)
    program = autopar.optimize(
        model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.01),
        loss_fn=loss_of,
        example_inputs=batch(2, 5),
        plan=_plan(name, n),
    )
    other = torch.optim.AdamW(eager.parameters(), lr=0.01)
    far = 0.0
    for step, shapes in enumerate((*LENGTHS, *LENGTHS[:2])):
        parts = 2 if step >= len(LENGTHS) else 1  # at last, micro-batches of different lengths
        all_ranks = [[batch(*s, seed=10 * step + r)] for r, s in enumerate(shapes)]
        if parts == 2:
            all_ranks = [[mine[0], batch(3, 6 + r, seed=step)] for r, mine in enumerate(all_ranks)]
        mine = all_ranks[rank]
        loss = program.step(mine[0]) if parts == 1 else program.step(micro_batches=mine)
        other.zero_grad()
        expected = _global_loss(eager, [b for r in all_ranks for b in r])
        expected.backward()
        other.step()
        far = max(far, abs(float(loss - expected)))
    with program.gathered():
        for a, b in zip(model.parameters(), eager.parameters(), strict=True):
            far = max(far, float((a - b).detach().abs().max()))
    return [far, len(list(program._compiled))]


def drop_in(rank: int, n: int) -> list[float]:
    """The same of a drop-in module, whose losses the ranks compute themselves."""
    model = Scorer().double()
    eager = copy.deepcopy(model)
    module = autopar.optimize(
        model, example_inputs=batch(2, 5)[0], strategy="ddp", weight=lambda inputs: float(inputs["ids"].numel())
    )
    far = 0.0
    for step, shapes in enumerate(LENGTHS):
        everyone = [batch(*s, seed=10 * step + r) for r, s in enumerate(shapes)]
        module.zero_grad()
        eager.zero_grad()
        x, y = everyone[rank]
        loss_of(module(x), y).backward()
        _global_loss(eager, everyone).backward()
        for a, b in zip(model.parameters(), eager.parameters(), strict=True):
            assert a.grad is not None and b.grad is not None
            far = max(far, float((a.grad - b.grad).abs().max()))
    return [far, len(list(module.program._compiled))]


def another_order(rank: int, n: int) -> list[float]:
    """The same where a capture with symbols would issue other collectives, and is not used."""
    original = CollectiveOrder.check

    def check(self: CollectiveOrder, program: object, graph: object, *more: object) -> None:
        if graph.joint.sizes is not None:  # type: ignore[attr-defined]
            raise autopar.errors.PlanMismatchError("another order")
        original(self, program, graph, *more)  # type: ignore[arg-type]

    CollectiveOrder.check = check  # type: ignore[method-assign,assignment]
    try:
        return drop_in(rank, n)
    finally:
        CollectiveOrder.check = original  # type: ignore[method-assign]


class Scores(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.first = nn.Embedding(50, 8), nn.Linear(8, 16)
        self.norm, self.last = nn.LayerNorm(16), nn.Linear(16, 50)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.last(self.norm(self.first(self.table(ids))).relu()), targets)


def autocast_that_comes_and_goes(rank: int, n: int) -> tuple[int, float]:
    """How many orders of collectives steps with and without autocast have, and how far parameters are from those of
    one process."""
    mine, plain = Scores(), Scores()
    each = [torch.randint(0, 50, (2, 6), generator=torch.Generator().manual_seed(r)).unbind() for r in range(n)]
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    program = autopar.optimize(
        mine, example_inputs=each[rank], optimizer=torch.optim.SGD(mine.parameters(), lr=0.1), strategy="sharded"
    )
    for on in (False, True, True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=on):
            program.step(each[rank])
            optimizer.zero_grad()
            loss = plain(*(torch.cat([b[i] for b in each]) for i in range(2)))
        loss.backward()
        optimizer.step()
    with program.gathered():
        far = max(
            float((a - b).detach().abs().max()) for a, b in zip(mine.parameters(), plain.parameters(), strict=True)
        )
    return len({c.program.order_hash for c in program._compiled}), far
