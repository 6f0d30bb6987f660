"""Of which parameters ranks gather what the gradient is made of."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autopar


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_a_weight_without_elements_is_not_made_of_factors() -> None:
    model = nn.Sequential(nn.Linear(0, 3), nn.Linear(3, 2))
    plan = autopar.plan(
        model,
        autopar.ClusterSpec.local(2),
        example_inputs=(torch.ones(4, 0), torch.ones(4, 2)),
        loss_fn=F.mse_loss,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        strategy="sufficient_factors",
    )
    found = {str(m): g.strategy for g in plan.groups for m in g.members}
    assert found["1.weight"] == "sufficient_factors" and found["0.weight"] == "all_reduce"
