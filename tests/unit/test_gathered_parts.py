"""Of which parameters ranks gather what the gradient is made of."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autopar


class TwoLookups(nn.Module):
    def __init__(self, padding_idx: int | None) -> None:
        super().__init__()
        self.table, self.padding_idx = nn.Embedding(500, 4, padding_idx=0), padding_idx

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table(x) + F.embedding(x + 1, self.table.weight, self.padding_idx)  # type: ignore[no-any-return]


@pytest.mark.parametrize(("padding_idx", "strategy"), [(0, "sparse_rows"), (None, "all_reduce"), (2, "all_reduce")])
def test_a_table_whose_lookups_differ_in_padding_is_not_sent_as_rows(padding_idx: int | None, strategy: str) -> None:
    """One lookup's padding may be a row that another lookup trains, and rows of all lookups are merged."""
    model = TwoLookups(padding_idx)
    plan = autopar.plan(
        model,
        autopar.ClusterSpec.local(2),
        example_inputs=(torch.tensor([0, 3]), torch.ones(2, 4)),
        loss_fn=F.mse_loss,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        strategy="structured",
    )
    assert [g.strategy for g in plan.groups] == [strategy]


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
