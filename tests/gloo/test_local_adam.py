"""Local Adam on real ranks is Local Adam as it is written down, and its second moment that of exact training."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar.errors import PlanError
from autopar.ops.context import Context
from autopar.ops.mean_variance import SKETCH, SKETCHED, Sketches, take_common_parts
from autopar.spec.plan import ParameterSlice, SyncGroup
from autopar.strategies.lowering import lower_plan
from tests.gloo import local_adam
from tests.gloo.ranks import run_worlds
from tests.tiers import sizes
from tests.unit.synthetic import MLP, training_graph

CPU = torch.device("cpu")
PINNED = 0.0057379061
"""The last loss of a tiny training on two ranks."""


def test_programs_do_what_the_definition_says(tmp_path: Path) -> None:
    worlds = dict.fromkeys(sizes(2, also=(1, 3, 4)), (str(tmp_path),))
    for n, of_ranks in run_worlds(local_adam.everything, worlds).items():
        for found in of_ranks:
            assert max(found["off"].values()) < 1e-10, (n, found)
            if n == 2:
                assert found["goes on"] == 0.0 and found["unused"] < 1e-12, found
                assert found["begun anew"] < 1e-12, found
                first, exact, same, local = found["losses"]
                assert same == pytest.approx(first, rel=1e-12) and local < first / 20
                assert local == pytest.approx(PINNED, abs=1e-6), (exact, local)


def test_the_common_part_of_noise_is_that_of_its_mean() -> None:
    """Of gradients with a mean and noise, on 8 ranks: the mean of many sketches."""
    torch.manual_seed(0)
    ranks, elements, mean, times = 8, 5_000, 0.5, 50
    found = torch.zeros(4, dtype=torch.float64)
    for stream in range(times):
        alike = torch.randn(elements)
        own = [[mean + torch.randn(elements), alike, torch.ones(7), torch.zeros(9)] for _ in range(ranks)]
        summed = torch.stack([Sketches(stream, ranks, torch.float64, CPU)(g) for g in own]).sum(0)
        assert len(summed) == 4 * SKETCHED
        found += take_common_parts(torch.full((4,), 0.3, dtype=torch.float64), summed, ranks) / times
    expected = (mean**2 + 1 / ranks) / (mean**2 + 1)
    assert float(found[0]) == pytest.approx(expected, rel=4 * (2 / SKETCH / times) ** 0.5)
    assert found[1:].tolist() == pytest.approx([1.0, 1.0, 0.3]), "without a gradient, it is what it was"


def test_what_is_not_finite_is_not_taken() -> None:
    state = torch.tensor([0.3], dtype=torch.float32)
    for broken in (torch.inf, torch.nan):
        summed = Sketches(0, 2, torch.float32, CPU)([torch.tensor([1.0, broken])])
        assert float(take_common_parts(state, summed, 2)) == pytest.approx(0.3)


def test_it_needs_adam_in_32_bits() -> None:
    group = SyncGroup(strategy="local_adam", members=tuple(ParameterSlice(name=n) for n, _ in MLP), every=2)
    with pytest.raises(PlanError, match="the optimizer must be torch"):
        lower_plan([group], training_graph(MLP), Context(4, plain_adam=False))
    assert lower_plan([group], training_graph(MLP), Context(4, plain_adam=True))


@pytest.mark.parametrize(("rows", "beta"), [(40, 0.999), (4_000, 0.999), (40, 0.9)])
def test_rows_that_are_rarely_looked_up_are_synchronized_in_each_step(rows: int, beta: float) -> None:
    """Their newest square would make steps too short, as it does under LocalSGD: the period is not theirs."""
    model = nn.Sequential(nn.Embedding(rows, 4), nn.Linear(4, 4))
    plan = autopar.plan(
        model,
        autopar.ClusterSpec.local(4),
        example_inputs=(torch.arange(8), torch.ones(8, 4)),
        loss_fn=F.mse_loss,
        optimizer=torch.optim.AdamW(model.parameters(), betas=(0.9, beta)),
        strategy="local_adam+every=4",
        fidelity="local",
    )
    found = {str(m): (g.strategy, g.every) for g in plan.groups for m in g.members}
    assert found["1.weight"] == ("local_adam", 4)
    often = 8 / rows / (1 - beta) > 50
    assert found["0.weight"] == (("local_adam", 4) if often else ("all_reduce", 1))
