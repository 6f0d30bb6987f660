"""Sparsification: what its operators do to values, of which optimizers it takes, and what it is priced at."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar.cost_models.analytic import AnalyticCostModel
from autopar.cost_models.steps import mean_step_s, predict_steps
from autopar.errors import PlanError
from autopar.ops.context import Context
from autopar.ops.sparsification import (
    chunk_norms,
    chunks_of,
    largest_chunks,
    random_chunks,
    spread_chunks,
    take_chunks,
    with_momentum,
)
from autopar.spec.plan import ParameterSlice, SyncGroup
from autopar.spec.topology import Topology
from autopar.strategies.lowering import lower_plan
from autopar.strategies.timing import moments_of
from tests.unit.synthetic import MLP, cpu_hosts, training_graph

Choose = Callable[[torch.Tensor, int, int], torch.Tensor]
CHUNK = 4


def largest(flat: torch.Tensor, chunk: int, count: int) -> torch.Tensor:
    return largest_chunks(chunk_norms(flat, chunk), count)


def drawn(flat: torch.Tensor, chunk: int, count: int) -> torch.Tensor:
    return random_chunks(torch.zeros(1, dtype=torch.int64), chunks_of(len(flat), chunk), count)


def sent(flat: torch.Tensor, choose: Choose, count: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """What a rank alone updates with; `flat` becomes what it keeps."""
    chosen = choose(flat, CHUNK, count)
    values = take_chunks(flat, chosen, CHUNK, dtype or flat.dtype)
    return spread_chunks(torch.full_like(flat, 7.0, dtype=values.dtype), values, chosen, CHUNK)


def nasty() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    huge = torch.full((40,), 1e-3)
    huge[17] = 1e12
    return {
        "random": torch.randn(400, generator=draw),
        "float64": torch.randn(400, generator=draw, dtype=torch.float64),
        "one huge element": huge,
        "zeros": torch.zeros(40),
        "constant": torch.full((40,), -3.0),
        "the last chunk is largest, and has fewer elements": torch.arange(39.0),
        "fewer elements than a chunk": torch.randn(CHUNK - 1, generator=draw),
    }


@pytest.mark.parametrize("name", nasty())
@pytest.mark.parametrize("choose", [largest, drawn])
def test_what_is_sent_and_what_is_kept_are_all_that_there_was(name: str, choose: Choose) -> None:
    flat = nasty()[name]
    if len(flat) < CHUNK:  # as the strategy does
        chosen, kept = choose(flat, len(flat), 1), flat.clone()
        assert torch.equal(take_chunks(kept, chosen, len(flat), flat.dtype), flat) and not kept.any()
        return
    for count in (1, 3, chunks_of(len(flat), CHUNK)):
        kept = flat.clone()
        got = sent(kept, choose, count)
        assert torch.equal(got + kept, flat) and not (got * kept).any()
        assert int(got.count_nonzero()) <= count * CHUNK


@pytest.mark.parametrize("name", nasty())
def test_top_k_is_contractive(name: str) -> None:
    """At most 1 - k/n of the squared norm is left, whatever the values."""
    flat = nasty()[name]
    chunks = chunks_of(len(flat), CHUNK)
    for count in {1, max(1, chunks // 10), chunks} if len(flat) >= CHUNK else ():
        kept = flat.clone()
        sent(kept, largest, count)
        left, of = (float(x.double().square().sum()) for x in (kept, flat))
        assert left <= (1 - count / chunks) * of * 1.0001


def test_chunks_that_ranks_choose_together_are_contractive_over_all_ranks() -> None:
    """Not for each rank: one of which no chunk is chosen keeps all."""
    ranks = [torch.randn(400, generator=torch.Generator().manual_seed(r)) * 10**r for r in range(3)]
    chosen = largest_chunks(torch.stack([chunk_norms(x, CHUNK) for x in ranks]).sum(0), 10)
    before = sum(float(x.double().square().sum()) for x in ranks)
    for x in ranks:
        take_chunks(x, chosen, CHUNK, x.dtype)
    assert sum(float(x.double().square().sum()) for x in ranks) <= (1 - 10 / 100) * before


@pytest.mark.parametrize("name", ["random", "one huge element", "constant"])
def test_random_k_is_contractive_in_the_mean_and_no_chunk_waits_for_ever(name: str) -> None:
    flat, count, steps = nasty()[name].double(), torch.zeros(1, dtype=torch.int64), 4000
    chunks = chunks_of(len(flat), CHUNK)
    k = max(1, chunks // 10)
    often = torch.zeros(chunks)
    left = 0.0
    for _ in range(steps):
        chosen = random_chunks(count, chunks, k)
        assert len(set(chosen.tolist())) == k
        often[chosen] += 1
        kept = flat.clone()
        take_chunks(kept, chosen, CHUNK, flat.dtype)
        left += float(kept.square().sum()) / steps
    assert int(count) == steps
    assert left == pytest.approx((1 - k / chunks) * float(flat.square().sum()), rel=0.05)
    # Within five standard deviations of a binomial distribution.
    share = k / chunks
    assert float((often / steps - share).abs().max()) < 5 * (share * (1 - share) / steps) ** 0.5


def test_draws_leave_the_global_generator_alone_and_are_the_same_again() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    draws = [random_chunks(torch.tensor([c]), 1000, 10).tolist() for c in (0, 1, 0, 2**31)]
    assert torch.equal(torch.get_rng_state(), before)
    assert draws[0] == draws[2] and draws[0] != draws[1] and draws[3] != draws[0]


def test_of_equal_chunks_the_first_are_chosen() -> None:
    assert largest_chunks(torch.tensor([1.0, 2.0, 1.0, 2.0, 2.0, 0.0]), 2).tolist() == [1, 3]
    assert largest_chunks(torch.zeros(100), 3).tolist() == [0, 1, 2]


@pytest.mark.parametrize("odd", [torch.inf, -torch.inf, torch.nan, -torch.nan])
def test_what_is_not_finite_arrives(odd: float) -> None:
    flat = torch.arange(40.0)
    flat[2] = odd
    got = sent(flat, largest, 2)
    assert torch.equal(got[2].isnan(), torch.tensor(odd).isnan()) and not got[2].isfinite()
    assert flat.isfinite().all(), "it would come again in every step"


def test_what_sixteen_bits_round_is_kept() -> None:
    flat = torch.randn(39, generator=torch.Generator().manual_seed(2))
    kept = flat.clone()
    got = sent(kept, largest, 3, torch.bfloat16)
    assert got.dtype == torch.bfloat16 and torch.equal(got.float() + kept, flat)
    assert bool((got != 0).logical_and(kept != 0).any())


def test_a_ramp_is_the_papers_and_each_stage_is_priced_as_it_sends() -> None:
    """75, 93.75, 98.4, 99.6 and then 99.9 % are not sent: about a quarter is left by each stage."""
    group = SyncGroup(
        strategy="dgc",
        members=(ParameterSlice(name="w"),),
        options={"density": 0.001, "chunk": 1, "ramp": 4, "ramp_steps": 100},
        from_step=50,
    )
    graph, context, elements = training_graph([("w", (1000, 1000))]), Context(4), 1_000_000
    sent = {}
    for step in (49, 50, 149, 150, 250, 350, 450, 10_000):
        program = lower_plan([group], graph, context, moments_of([group], step))
        sent[step] = [c.elements for c in program.calls if c.op.is_collective and c.group is not None][-1] / elements
    assert sent == {
        49: 1.0, 50: 0.251189, 149: 0.251189, 150: 0.063096, 250: 0.015849, 350: 0.003982, 450: 0.001, 10_000: 0.001
    }  # fmt: skip
    topology, model = Topology(cpu_hosts(4, "200 Mbit/s")), AnalyticCostModel()
    steady = predict_steps(model, [group], graph, context, topology)
    assert steady.sent_bytes == predict_steps(model, [group], graph, context, topology, step=450).sent_bytes
    times = [
        predict_steps(model, [group], graph, context, topology, step=s).step_time_s for s in (0, 50, 150, 250, 350)
    ]
    assert [*times[1:], steady.step_time_s] == sorted([*times[1:], steady.step_time_s], reverse=True)
    peaks = [predict_steps(model, [group], graph, context, topology, step=s).peak_memory_bytes for s in (0, 50, 450)]
    assert steady.peak_memory_bytes == max(peaks) > peaks[-1]
    mean_s = (50 * times[0] + 100 * sum(times[1:]) + 550 * steady.step_time_s) / 1_000
    assert mean_step_s(model, [group], graph, context, topology, 1_000) == pytest.approx(mean_s)


def test_momentum_on_one_rank() -> None:
    kept, gradients = torch.zeros(7), [torch.ones(2, 2), torch.full((3,), 2.0)]
    with_momentum(kept, gradients, 0.5)
    again = with_momentum(kept, gradients, 0.5)
    assert [g.tolist() for g in again] == [[[1.5, 1.5], [1.5, 1.5]], [3.0, 3.0, 3.0]]
    assert with_momentum(torch.zeros(0), [], 0.5) == []
    assert torch.equal(with_momentum(kept, torch.ones(7), 0.0), torch.ones(7))  # type: ignore[arg-type]


BATCH = torch.ones(2, 4), torch.zeros(2, 3)


def _program(optimizer: Callable[[nn.Module], torch.optim.Optimizer]) -> autopar.Program:
    """Under DGC, on one rank."""
    model, cluster = nn.Linear(4, 3), autopar.ClusterSpec.local(1)
    plan = autopar.plan(model, cluster, strategy="ddp", example_inputs=BATCH, loss_fn=F.mse_loss)
    groups = tuple(g.model_copy(update={"strategy": "dgc"}) for g in plan.groups)
    plan = plan.model_copy(update={"groups": groups, "fidelity": "compressed"})
    return autopar.optimize(model, plan=plan, optimizer=optimizer(model), example_inputs=BATCH, loss_fn=F.mse_loss)


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda m: torch.optim.AdamW(m.parameters()),
        lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
        lambda m: torch.optim.SGD([{"params": [m.weight], "momentum": 0.5}, {"params": [m.bias], "lr": 1.0}], lr=0.1),
    ],
)
def test_dgc_refuses_momentum_beside_its_own(optimizer: Callable[[nn.Module], torch.optim.Optimizer]) -> None:
    with pytest.raises(PlanError, match=r"cannot use dgc: it keeps the momentum itself, .*SGD\(..., momentum=0\)"):
        _program(optimizer)


def test_dgc_refuses_momentum_that_comes_later() -> None:
    """A one-cycle schedule sets it, whatever the optimizer was made with."""
    program = _program(lambda m: torch.optim.SGD(m.parameters(), lr=0.1, weight_decay=0.1))
    program.step(BATCH)
    torch.optim.lr_scheduler.OneCycleLR(program.optimizer, max_lr=0.1, total_steps=10)
    for _ in range(2):
        with pytest.raises(PlanError, match="cannot use dgc: it keeps the momentum itself"):
            program.step(BATCH)


@pytest.mark.parametrize(("strategy", "part"), [("top_k", 1 / 64 + 0.01), ("random_k", 0.01), ("dgc", 1 / 64 + 0.01)])
def test_little_is_sent_and_what_is_kept_takes_memory(strategy: str, part: float) -> None:
    graph, context = training_graph(MLP), Context(4)
    members = tuple(ParameterSlice(name=name) for name, _ in MLP)
    pricer = AnalyticCostModel().pricer(graph, Topology(cpu_hosts(4)))
    of = {
        name: pricer.estimate(lower_plan([SyncGroup(strategy=name, members=members)], graph, context))
        for name in ("all_reduce", strategy)
    }
    elements = sum(p.spec.numel for p in graph.parameters)
    assert of[strategy].sent_bytes[0] == pytest.approx(part * of["all_reduce"].sent_bytes[0], rel=0.01)
    kept = of[strategy].peak_memory_bytes[0] - of["all_reduce"].peak_memory_bytes[0]
    assert kept >= (8 if strategy == "dgc" else 4) * elements
    assert of[strategy].step_time_s < of["all_reduce"].step_time_s


def test_a_drop_in_module_and_complex_numbers_are_refused() -> None:
    group = SyncGroup(strategy="top_k", members=tuple(ParameterSlice(name=name) for name, _ in MLP))
    with pytest.raises(PlanError, match="kept from step to step, so the program needs the optimizer"):
        lower_plan([group], training_graph(MLP), Context(4, has_optimizer=False))
    with pytest.raises(PlanError, match="parameters are averaged as they are"):
        lower_plan([group.model_copy(update={"every": 2})], training_graph(MLP), Context(4))
