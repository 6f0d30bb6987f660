"""The proof of plans whose 16 bits round what the forward pass reads: a sample may go to the other side of a ReLU."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import autopar
from tests.gloo.ranks import run_ranks


class Net(nn.Module):
    """Trained with hidden gradients that are twice as large where it runs eagerly, if it is told to."""

    def __init__(self, doubles: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU())
        self.head, self.doubles = nn.Linear(96, 6), doubles

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.layers(x)
        if self.doubles and not torch.compiler.is_compiling():
            hidden = hidden + (hidden - hidden.detach())
        scores: torch.Tensor = self.head(hidden)
        return scores


def rounded_steps(rank: int, n: int) -> list[str]:
    warnings.simplefilter("ignore", autopar.AutoparWarning)
    found = []
    for seed, doubles in ((0, False), (1, False), (2, False), (1, True)):
        torch.manual_seed(seed)
        net, batches = Net(doubles), (torch.randn(n, 16, 32), torch.randint(6, (n, 16)))
        batch: Any = tuple(each[rank] for each in batches)
        program = autopar.optimize(
            net,
            autopar.ClusterSpec.local(n),
            example_inputs=batch,
            loss_fn=F.cross_entropy,
            optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
            strategy="column_parallel+bf16",
            fidelity="rounded",
        )
        assert any(g.strategy == "column_parallel_linear" for g in program.plan.groups)
        try:
            program.step(batch)
            found.append("")
        except autopar.AutoparError as e:
            found.append(str(e))
    return found


def test_what_rounding_makes_of_gradients_is_allowed_and_twice_the_gradient_is_not() -> None:
    *right, wrong = run_ranks(2, rounded_steps)[0]
    assert right == [""] * 3
    assert "the gradient of 'layers.2.weight'" in wrong


def made() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor], Any]:
    torch.manual_seed(1)
    return Net(False), (torch.randn(16, 32), torch.randint(6, (16,))), F.cross_entropy


def test_a_verification_allows_it_too() -> None:
    rounded = autopar.verify(made, strategy="column_parallel+bf16", world_size=2, steps=5)
    assert rounded.passed, rounded.steps
    exact = autopar.verify(made, strategy="column_parallel", world_size=2, steps=1)
    assert exact.passed and exact.tolerance < 1e-9
