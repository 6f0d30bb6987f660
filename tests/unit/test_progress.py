"""How far a rank is in what ranks do together, as it is compared where all ranks have left a step by errors."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

import autopar
from autopar.backends.collectives import progress


def test_a_step_counts_the_updates_of_its_replica() -> None:
    model = nn.Linear(3, 2)
    batch = torch.ones(4, 3), torch.ones(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    program = autopar.optimize(model, example_inputs=batch, loss_fn=F.mse_loss, optimizer=optimizer)
    program.step(batch)  # the first one is proven, which takes further ones
    before = progress()
    program.step(batch)
    assert progress()[1] - before[1] == 2 * len(program.plan.groups), "each begins and ends"
