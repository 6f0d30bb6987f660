"""What programs keep of a model's parameters is theirs: it is not put back with the model's own state."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autopar.errors import PlanError, PlanMismatchError
from autopar.runtime.job.process_group import Group
from autopar.runtime.model.eager import kept_attributes
from autopar.runtime.model.unchanged import Unchanged
from autopar.runtime.sharded_rows import ShardedRows


def test_a_batch_that_cannot_be_captured_leaves_spread_parameters_as_they_are() -> None:
    """Tracing gives them memory and takes it away again; what it left behind is put back where it failed."""
    model = nn.Linear(3, 4).double()
    before = model.weight.detach()[1::2].clone()
    rows = ShardedRows([model], dict(model.named_parameters()), Group(rank=1, world_size=2))
    rows.spread(["weight"])
    put_back = kept_attributes([model])
    with rows.traceable():
        pass
    put_back()
    rows.check("step")
    assert torch.equal(rows.shards["weight"], before)
    with pytest.raises(PlanError, match="the rows of 'weight' are spread over the ranks"):
        model(torch.zeros(1, 3))


def test_whoever_freezes_a_spread_parameter_is_told_the_way_out() -> None:
    """`optimize` again would be refused, as the model's own parameters hold no values."""
    model = nn.Linear(3, 4).double()
    unchanged = Unchanged({"": model}, {}, torch.optim.SGD(model.parameters(), 0.1))
    ShardedRows([model], dict(model.named_parameters()), Group(rank=1, world_size=2)).spread(["weight"])
    model.weight.requires_grad_(False)
    with pytest.raises(PlanMismatchError, match=r"'weight' was trained .*state_dict\(\)\['model'\] into a new model"):
        unchanged.check()
