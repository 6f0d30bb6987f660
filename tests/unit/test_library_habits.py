"""What models of libraries do in their forward pass besides computing: they are captured, and train as eagerly."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

import autopar
from autopar.errors import AutoparWarning, CaptureError
from tests.tiers import newer


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 2).double()


class Clamps(_Layer):
    """Writes to its batch, as heads for questions and answers do to the positions of answers."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        labels.clamp_(0, 1)
        return F.cross_entropy(self.layer(x.mul_(2.0)), labels)


class AsksForGradients(_Layer):
    """Has its input require a gradient, as speech models do so that what follows can be checkpointed."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = x[:, None]
        if self.training:
            hidden.requires_grad = True
        return F.cross_entropy(self.layer(hidden)[:, 0], labels.clamp(0, 1))


class Checks(_Layer):
    """Checks values by a function of PyTorch's."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        torch._check_tensor_all(labels < 10)
        return F.cross_entropy(self.layer(x), labels.clamp(0, 1))


class Maps(_Layer):
    """Maps a function under a mode that changes what indexing means, as masks of attention are made."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with TransformGetItemToIndex():
            weight = torch.vmap(lambda i: i * 2.0)(torch.arange(2))
        return F.cross_entropy(self.layer(x) * weight, labels.clamp(0, 1))


class Summarizes(_Layer):
    """Returns states of a sequence, and the first of them again, as encoders do."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        states = self.layer(x).reshape(2, 2, 2)
        return {"states": states, "summary": states[:, 0]}


class Unfreezes(_Layer):
    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for p in self.layer.parameters():
            p.requires_grad = True
        return F.cross_entropy(self.layer(x), labels.clamp(0, 1))


def _batch() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    return {"x": torch.randn(4, 3, dtype=torch.float64, generator=g), "labels": torch.tensor([-2, 0, 1, 3])}


def _step(net: nn.Module, with_optimizer: bool = True) -> dict[str, torch.Tensor]:
    """A step, captured, and its batch."""
    optimizer, batch = torch.optim.SGD(net.parameters(), lr=0.1), _batch()
    settings: dict[str, Any] = {"example_inputs": batch, "strategy": "ddp", "capture": "always"}
    if with_optimizer:
        autopar.optimize(net, optimizer=optimizer, **settings).step(batch)
    else:
        autopar.optimize(net, **settings)(**batch).backward()
        optimizer.step()
    return batch


def _trained(net: _Layer) -> torch.Tensor:
    """The weight after a step of plain PyTorch."""
    net = copy.deepcopy(net)
    net(**_batch()).backward()
    assert net.layer.weight.grad is not None
    return net.layer.weight.detach() - 0.1 * net.layer.weight.grad


@pytest.mark.parametrize("with_optimizer", [True, False])
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Clamps, "changes 'tensor 0 of the batch', 'tensor 1 of the batch'"),
        (AsksForGradients, ""),
        pytest.param(Checks, r"no part of the captured training step.*\n.*_check_tensor_all", marks=newer),
        (Maps, ""),
    ],
)
def test_is_captured_and_trains_as_it_does_eagerly(kind: type[_Layer], said: str, with_optimizer: bool) -> None:
    net = kind()
    expected = _trained(net)
    with pytest.warns(AutoparWarning, match=said) if said else contextlib.nullcontext():
        batch = _step(net, with_optimizer)
    torch.testing.assert_close(net.layer.weight.detach(), expected)
    assert all(batch[name].equal(tensor) for name, tensor in _batch().items())


def test_a_loop_that_thaws_parameters_is_not_taken_for_one_that_asks_for_gradients() -> None:
    with pytest.raises(CaptureError, match=r"p\.requires_grad = True"):
        _step(Unfreezes())


def test_outputs_that_share_memory_are_captured_and_their_gradients_add_up() -> None:
    net = Summarizes()
    plain = copy.deepcopy(net)
    batch = _batch()
    module = autopar.optimize(net, example_inputs=batch, strategy="ddp", capture="always")
    for run in (module, plain):
        output = run(**batch)
        (output["states"].square().sum() + 3 * output["summary"].sum()).backward()
    torch.testing.assert_close(net.layer.weight.grad, plain.layer.weight.grad)
