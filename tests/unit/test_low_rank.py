"""What ranks make of matrices by half a power iteration, without ranks: several modules, and a sum."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

from autopar.cost_models.analytic import AnalyticCostModel
from autopar.ops.context import Context
from autopar.ops.power_iteration import Matrices, PowerIteration, matrices, orthonormal, start_matrix
from autopar.spec.plan import ParameterSlice, SyncGroup
from autopar.spec.topology import Topology
from autopar.strategies.lowering import lower_plan
from tests.unit.synthetic import MLP, cpu_hosts, training_graph

SHAPES = ((8, 6), (5,), (), (4, 3, 2), (0, 4), (3, 40), (1, 9), (6, 8))


class Ranks:
    """The same group on several ranks."""

    def __init__(self, of: Matrices, ranks: int, elements: int, dtype: torch.dtype = torch.float64) -> None:
        self.modules = [PowerIteration(of, dtype, torch.device("cpu")) for _ in range(ranks)]
        self.residuals = [torch.zeros(elements, dtype=dtype) for _ in range(ranks)]
        self.factors = [torch.zeros(of.factor_elements, dtype=dtype) for _ in range(ranks)]
        self.turns = [torch.zeros(1, dtype=torch.int64) for _ in range(ranks)]

    def step(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        kept = zip(self.modules, gradients, self.residuals, self.factors, self.turns, strict=True)
        total = torch.stack([m.encode(g, r, f, t) for m, g, r, f, t in kept]).sum(0)
        kept = zip(self.modules, gradients, self.residuals, self.factors, self.turns, strict=True)
        found = [m.decode(total, f, t, g.dtype) for m, g, _, f, t in kept]
        assert all(torch.equal(found[0], other) or found[0].isnan().any() for other in found)
        return found[0]


def _elements(shapes: Sequence[tuple[int, ...]]) -> int:
    return sum(map(math.prod, shapes))


def _draws(ranks: int, elements: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(elements, generator=draw, dtype=torch.float64).to(dtype) for _ in range(ranks)]


@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_what_is_sent_and_what_is_kept_add_up(rank: int, dtype: torch.dtype) -> None:
    of, elements = matrices(SHAPES, rank, 2.0), _elements(SHAPES)
    ranks = Ranks(of, 3, elements, torch.float64 if dtype == torch.float64 else torch.float32)
    off = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 0.05}[dtype]
    for step in range(4):
        before, given = torch.stack(ranks.residuals).sum(0), _draws(3, elements, dtype, step)
        found = ranks.step(given)
        assert found.dtype == dtype
        sent_and_kept = found.to(before.dtype) + torch.stack(ranks.residuals).sum(0)
        assert torch.allclose(sent_and_kept, before + torch.stack(given).sum(0), rtol=off, atol=off)
        for start, stop in of.whole:
            assert not any(r[start:stop].any() for r in ranks.residuals)
    assert [int(t) for t in ranks.turns] == [4, 4, 4]


def test_the_operator_is_contractive() -> None:
    """What is left of an input is never larger than it, on each rank for itself, whatever the input: a projection."""
    shapes = ((12, 10),)
    of = matrices(shapes, 2, 2.0)
    huge, single = torch.zeros(120, dtype=torch.float64), torch.zeros(120, dtype=torch.float64)
    huge[7], single[0] = 1e30, 1e-300
    nasty = [torch.full((120,), 3.0, dtype=torch.float64), huge, single, torch.zeros(120, dtype=torch.float64)]
    for given in (*_draws(5, 120), *nasty):
        ranks = Ranks(of, 2, 120)
        for _ in range(4):
            inputs = [g + r for g, r in zip((given, -2 * given), ranks.residuals, strict=True)]
            ranks.step([given, -2 * given])
            for i, r in zip(inputs, ranks.residuals, strict=True):
                assert r.isfinite().all() and float(r.norm()) <= float(i.norm()) * (1 + 1e-12)


@pytest.mark.parametrize("rank", [1, 3])
def test_of_one_gradient_again_and_again_the_largest_part_is_sent(rank: int) -> None:
    """Two turns are a power iteration, so that what is left of a constant matrix is what the best matrix of this rank
    leaves."""
    (given,) = _draws(1, 30 * 20)
    left, _, right = torch.linalg.svd(given.view(30, 20))
    values = torch.linspace(1, 0.05, 20, dtype=torch.float64) ** 4
    given = ((left[:, :20] * values) @ right).reshape(-1)
    ranks = Ranks(matrices(((30, 20),), rank, 2.0), 1, 600)
    for _ in range(30):
        ranks.residuals[0].zero_()
        ranks.step([given])
    assert float(ranks.residuals[0].norm()) == pytest.approx(float(values[rank:].norm()), rel=1e-4)


def test_zeros_give_zeros_and_no_factor_stays_at_zero() -> None:
    """Also where a factor's first element could only be seen by a gradient that is always zero there."""
    of = matrices(((8, 6),), 2, 2.0)
    ranks, zeros = Ranks(of, 2, 48), torch.zeros(48, dtype=torch.float64)
    for _ in range(3):
        assert not ranks.step([zeros, zeros]).any()
    only_last = zeros.clone()
    only_last[-1] = 1.0
    sent = sum(ranks.step([only_last, only_last])[-1] for _ in range(12))
    assert float(sent) > 20


def test_a_factor_of_too_few_directions_becomes_orthonormal() -> None:
    one = torch.randn(9, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for factors in (torch.zeros(9, 3, dtype=torch.float64), one.expand(9, 3), one * torch.tensor([1.0, 0.0, 1e-200])):
        q = orthonormal(factors.t()[None], start_matrix(9, 3).t())[0]
        assert torch.allclose(q @ q.t(), torch.eye(3, dtype=torch.float64), atol=1e-12)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_arrives(value: float) -> None:
    of, given = matrices(((8, 6), (5,)), 1, 2.0), _draws(2, 53)
    given[1][3] = value
    assert not Ranks(of, 2, 53).step(given)[:48].isfinite().all()
    whole = _draws(2, 53)
    whole[1][50] = value
    found = Ranks(of, 2, 53).step(whole)
    assert not found[50].isfinite() and found[:50].isfinite().all()


def test_pytorchs_random_numbers_are_left_alone_and_turns_are_read_again_behind_a_checkpoint() -> None:
    of, state = matrices(((8, 6),), 1, 2.0), torch.get_rng_state()
    ranks, other = Ranks(of, 1, 48), Ranks(of, 1, 48)
    (given,) = _draws(1, 48)
    for _ in range(3):
        ranks.step([given])
    assert torch.equal(torch.get_rng_state(), state)
    other.step([given])
    for kept, loaded in (
        (ranks.residuals, other.residuals),
        (ranks.factors, other.factors),
        (ranks.turns, other.turns),
    ):
        loaded[0].copy_(kept[0])
    assert torch.equal(ranks.step([given]), other.step([given]))


def test_which_members_are_approximated_and_how_much_is_sent() -> None:
    """About as much in even turns as in odd ones, where there are members to choose among; padded to the larger."""
    of = matrices(SHAPES, 1, 2.0)
    assert [(m.rows, m.columns) for m in of.approximated] == [(8, 6), (4, 6), (3, 40), (6, 8)]
    assert of.whole_elements == 5 + 1 + 9
    assert matrices(SHAPES, 4, 2.0).approximated == () and matrices((), 1, 2.0).factor_elements == 0
    alike = matrices(((64, 16), (16, 64), (64, 16), (64, 16), (30, 30)), 2, 2.0)
    assert alike.used_elements(0) == alike.used_elements(1) == 2 * (4 * 40 + 30)
    alone = matrices(((64, 16),), 2, 2.0)
    assert (alone.used_elements(0), alone.used_elements(1), alone.factor_elements) == (32, 128, 128)
    for turn in (0, 1, 2):
        assert sum(count * length for _, count, length in alike.alike(turn)) * 2 == alike.used_elements(turn)


def test_it_is_less_to_send_and_is_priced() -> None:
    """Its bytes, its residual, and the products on the device."""
    graph, context = training_graph(MLP), Context(4)
    members = tuple(ParameterSlice(name=name) for name, _ in MLP)
    pricer = AnalyticCostModel().pricer(graph, Topology(cpu_hosts(4)))
    of = {
        name: pricer.estimate(lower_plan([SyncGroup(strategy=name, members=members)], graph, context))
        for name in ("all_reduce", "power_sgd")
    }
    elements = sum(p.spec.numel for p in graph.parameters)
    assert of["power_sgd"].sent_bytes[0] < 0.1 * of["all_reduce"].sent_bytes[0]
    assert of["power_sgd"].compute_s > of["all_reduce"].compute_s
    assert of["power_sgd"].peak_memory_bytes[0] - of["all_reduce"].peak_memory_bytes[0] >= 4 * elements
