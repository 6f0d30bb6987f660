"""PyTorch's fused optimizers, on what they compute something else on: 16 bits under SGD, and strided memory."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar.ir.batch import flatten
from autopar.ir.build import training_graph


@pytest.mark.parametrize("fused", [None, True])
def test_sixteen_bit_parameters_are_updated_by_sgd(fused: bool | None) -> None:
    """Also where PyTorch's fused implementation is asked for, which leaves them as they are; the proof knows."""
    torch.manual_seed(0)
    net = nn.Linear(70, 3).bfloat16()
    eager = copy.deepcopy(net)
    x, y = torch.randn(4, 70).bfloat16(), torch.randn(4, 3).bfloat16()
    program = autopar.optimize(
        net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1, fused=fused), loss_fn=F.mse_loss, example_inputs=(x, y)
    )
    program.step((x, y))
    F.mse_loss(eager(x), y).backward()
    torch.optim.SGD(eager.parameters(), lr=0.1).step()
    assert torch.allclose(net.weight, eager.weight, atol=1e-3)


def _amsgrad(parameters: Any, **settings: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, amsgrad=True, **settings)


@pytest.mark.parametrize(
    ("make", "dtype"),
    [
        (torch.optim.SGD, torch.float64),
        (torch.optim.AdamW, torch.float64),
        (torch.optim.Adagrad, torch.float64),
        (torch.optim.AdamW, torch.float16),
        (_amsgrad, torch.float16),
    ],
)
def test_fused_optimizers_are_given_dense_memory(make: Any, dtype: torch.dtype) -> None:
    """PyTorch's fused implementations on CPUs walk over strided memory as if it were dense; and in 16 bits they keep
    squares that the others round to nothing, so `fused=True` is followed on what lies in parts."""
    torch.manual_seed(0)
    net = nn.Linear(4, 8, bias=False).to(dtype)
    eager = copy.deepcopy(net)
    x, y = 1e-2 * torch.randn(5, 4).to(dtype), torch.randn(5, 8).to(dtype)
    graph = training_graph(net, flatten((x, y)), F.mse_loss)
    groups = [
        {"strategy": "all_reduce", "members": [{"name": "weight", "dim": 1, "start": a, "stop": a + 2}]} for a in (0, 2)
    ]
    plan = autopar.Plan.model_validate(
        {"model": graph.model, "cluster": autopar.ClusterSpec.local(1).fingerprint, "groups": groups}
    )
    program = autopar.optimize(
        net,
        optimizer=make(net.parameters(), lr=0.1, fused=True),
        loss_fn=F.mse_loss,
        example_inputs=(x, y),
        plan=plan,
        check="always",
    )
    other = make(eager.parameters(), lr=0.1, fused=True)
    before, place = net.weight.detach().clone(), net.weight.data_ptr()
    for _ in range(3):
        program.step((x, y))
        other.zero_grad()
        F.mse_loss(eager(x), y).backward()
        other.step()
    assert torch.allclose(net.weight, eager.weight, rtol=1e-12 if dtype == torch.float64 else 1e-3)
    assert net.weight.data_ptr() == place and not torch.equal(net.weight, before)


def test_a_strided_parameter_under_a_fused_optimizer_stays_where_it_is() -> None:
    torch.manual_seed(0)
    memory = torch.randn(8, 4, 2).double()
    net, dense = nn.Linear(4, 8, bias=False).double(), nn.Linear(4, 8, bias=False).double()
    net.weight, dense.weight = nn.Parameter(memory[..., 0]), nn.Parameter(memory[..., 0].contiguous())
    between = memory[..., 1].clone()
    x, y = torch.randn(5, 4).double(), torch.randn(5, 8).double()
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    program = autopar.optimize(net, optimizer=optimizer, loss_fn=F.mse_loss, example_inputs=(x, y), check="always")
    other = torch.optim.AdamW(dense.parameters(), fused=True)
    for _ in range(2):
        program.step((x, y))
        other.zero_grad()
        F.mse_loss(dense(x), y).backward()
        other.step()
    assert torch.allclose(net.weight, dense.weight, rtol=1e-12) and torch.equal(net.weight, memory[..., 0])
    assert torch.equal(memory[..., 1], between), "nothing is written beside the parameter"


def test_moments_of_slices_are_loaded_as_their_first_step_made_them() -> None:
    """Rows of a parameter that lies the other way round are strided; a fused kernel is given a dense copy of them."""
    torch.manual_seed(0)
    net = nn.Linear(6, 4, bias=False).double()
    net.weight = nn.Parameter(torch.randn(6, 4).double().t())
    eager = copy.deepcopy(net)
    batches = [(torch.randn(5, 6).double(), torch.randn(5, 4).double()) for _ in range(4)]
    graph = training_graph(net, flatten(batches[0]), F.mse_loss)
    groups = [{"strategy": "all_reduce", "members": [{"name": "weight", "start": a, "stop": a + 2}]} for a in (0, 2)]
    plan = autopar.Plan.model_validate(
        {"model": graph.model, "cluster": autopar.ClusterSpec.local(1).fingerprint, "groups": groups}
    )
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, fused=True)
    program = autopar.optimize(net, optimizer=optimizer, loss_fn=F.mse_loss, example_inputs=batches[0], plan=plan)
    other = torch.optim.AdamW(eager.parameters(), lr=0.1)
    for number, (x, y) in enumerate(batches):
        if number == 2:
            program.load_state_dict(copy.deepcopy(program.state_dict()))
        program.step((x, y))
        other.zero_grad()
        F.mse_loss(eager(x), y).backward()
        other.step()
    assert torch.allclose(net.weight, eager.weight, rtol=1e-12)


@pytest.mark.parametrize("how", ["saved in another layout", "laid out anew in mid-training"])
def test_moments_may_lie_otherwise_than_their_parameter(how: str) -> None:
    """PyTorch's other implementations, of which the fused one is taken where the user leaves it open, do not care."""

    def trained(with_autopar: bool) -> torch.Tensor:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 2)).double()
        net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
        batches = [(torch.randn(2, 3, 4, 4).double(), torch.randn(2, 2).double()) for _ in range(4)]

        def made() -> Any:
            return autopar.optimize(net, optimizer=optimizer, loss_fn=F.mse_loss, example_inputs=batches[0])

        program = made() if with_autopar and how.startswith("laid") else None
        for number, (x, y) in enumerate(batches):
            if number == 2:
                net.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
                if with_autopar and program is None:
                    program = made()
            if program is not None:
                program.step((x, y))
            else:
                optimizer.zero_grad()
                F.mse_loss(net(x), y).backward()
                optimizer.step()
        return net[0].weight.detach().clone()  # type: ignore[operator]

    assert torch.allclose(trained(True), trained(False), rtol=1e-12)
