"""Tables with `sparse=True` are captured, and trained as eager PyTorch trains them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar.ops.fragments import Fragment
from autopar.runtime.optimizers.kinds import leaves_zeros_alone
from autopar.runtime.optimizers.optimizer import OptimizerPart
from autopar.spec.plan import ParameterSlice


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.table: Any = (
            nn.Embedding(20, 4, sparse=True) if kind == "table" else nn.EmbeddingBag(20, 4, sparse=True, mode="sum")
        )
        self.layer = nn.Linear(4, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if self.kind == "function":
            found = F.embedding_bag(ids, self.table.weight, mode="mean", sparse=True)
        else:
            found = self.table(ids)
        return self.layer(found if found.dim() == 2 else found.mean(1))  # type: ignore[no-any-return]


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(step)
    count = 5 + step % 2
    return torch.randint(0, 20, (count, 3), generator=draw), torch.randn(count, 3, generator=draw).double()


OPTIMIZERS: list[Callable[[Any], torch.optim.Optimizer]] = [
    lambda p: torch.optim.SGD(p, lr=0.1),
    lambda p: torch.optim.Adagrad(p, lr=0.1),
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
]


@pytest.mark.parametrize("kind", ["table", "bag", "function"])
@pytest.mark.parametrize("make", OPTIMIZERS)
def test_steps_are_those_of_eager_pytorch(kind: str, make: Callable[[Any], torch.optim.Optimizer]) -> None:
    model, eager = Net(kind).double(), Net(kind).double()
    optimizer, other = make(model.parameters()), make(eager.parameters())
    program = autopar.optimize(
        model, example_inputs=batch(0), loss_fn=F.mse_loss, optimizer=optimizer, strategy="Parallax", capture="always"
    )
    for step in range(3):
        program.step(batch(step))
        other.zero_grad()
        F.mse_loss(eager(batch(step)[0]), batch(step)[1]).backward()
        other.step()
    assert torch.allclose(model.table.weight, eager.table.weight, rtol=0, atol=1e-14)


@pytest.mark.parametrize("kind", ["table", "bag"])
def test_gradients_of_a_drop_in_are_dense(kind: str) -> None:
    model, eager = Net(kind).double(), Net(kind).double()
    module = autopar.optimize(model, example_inputs=batch(0)[0], capture="always")
    for one in (module, eager):
        F.mse_loss(one(batch(1)[0]), batch(1)[1]).backward()
    gradient = model.table.weight.grad
    assert not gradient.is_sparse and torch.allclose(gradient, eager.table.weight.grad.to_dense(), rtol=0, atol=1e-14)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad])
def test_an_optimizer_that_is_fused_by_its_user_is_given_no_sparse_gradients(kind: Any) -> None:
    """PyTorch's fused kernels refuse them."""
    p = nn.Parameter(torch.ones(4, 2))
    optimizer = kind([p], lr=0.1, fused=True)
    part = OptimizerPart(optimizer, [Fragment("p", True, p, ParameterSlice(name="p"), 0, 0)], {"p": p})
    part.load_state(0, dict(optimizer.state[p]))
    row = torch.sparse_coo_tensor(torch.tensor([[1]]), torch.ones(1, 2), (4, 2), check_invariants=False)
    part.step([row])
    assert not leaves_zeros_alone(optimizer)
    assert p[0].tolist() == [1, 1] and p[1, 0] < 1
