"""Outputs of the drop-in module: those that share memory, and those that are not used."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import autopar
from autopar.errors import VerificationError
from autopar.ir import capture
from autopar.ir.apart import Apart

X = torch.randn(5, 4, dtype=torch.float64)


class _Net(nn.Module):
    """Returns `outputs(itself, its input, a hidden value)`."""

    def __init__(self, outputs: Callable[..., tuple[torch.Tensor, ...]]) -> None:
        super().__init__()
        self.outputs = outputs
        torch.manual_seed(0)
        self.first = nn.Linear(4, 3).double()
        self.scale = nn.Parameter(torch.randn(3, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.outputs(self, x, self.first(x) * self.scale)


OUTPUTS: dict[str, Callable[..., tuple[torch.Tensor, ...]]] = {
    "parameters": lambda net, x, h: (h, net.first.weight, net.first.weight.t(), net.scale[0], net.first.weight.T),
    "nothing but parameters": lambda net, x, h: (net.first.weight, net.first.bias, net.scale[0]),
    "inputs": lambda net, x, h: (h, x, x[:, :2]),
    "a view before its base, and twice": lambda net, x, h: (h[:, 0], h, h[:, 0], h),
    "views without their base": lambda net, x, h: (h.view(-1)[:9], h.view(-1)[6:]),
    "a value and itself detached": lambda net, x, h: (h.detach(), h, h[0].detach()),
    "parts, and what they are parts of": lambda net, x, h: (*h.chunk(3, 1), h),
}


def _loss(outputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    losses = [(i + 1) * o.sin().sum() + o.square().mean() for i, o in enumerate(outputs)]
    return torch.stack(losses).sum()


def _trained(model: Any, net: nn.Module, x: torch.Tensor) -> list[torch.Tensor | None]:
    given = x.clone().requires_grad_()
    _loss(model(given)).backward()
    return [given.grad, *(p.grad for p in net.parameters())]


@pytest.mark.parametrize("what", OUTPUTS)
def test_outputs_that_share_memory_each_have_their_gradient(what: str) -> None:
    net = _Net(OUTPUTS[what])
    eager = copy.deepcopy(net)
    module = autopar.optimize(net, example_inputs=X.clone().requires_grad_(), capture="always")
    for mine, theirs in zip(_trained(module, net, X), _trained(eager, eager, X), strict=True):
        assert mine is theirs is None or (
            mine is not None and theirs is not None and torch.allclose(mine, theirs, rtol=1e-12)
        )


@pytest.mark.parametrize("what", ["inputs", "a value and itself detached"])
def test_the_proof_goes_through_the_outputs_that_are_handed_out(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    monkeypatch.setattr(capture, "outputs_apart", lambda *of: Apart())
    module = autopar.optimize(_Net(OUTPUTS[what]), example_inputs=X.clone().requires_grad_(), capture="always")
    with pytest.raises(VerificationError, match="gradient of"):
        module(X.clone().requires_grad_())


def test_an_output_of_shared_memory_that_is_written_to_is_refused() -> None:
    """In eager training, the other output would change with it."""
    module = autopar.optimize(_Net(lambda net, x, h: (h, h[0])), example_inputs=X, capture="always")
    found = module(X)
    found[0].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        _loss(found).backward()


def test_an_output_that_is_a_view_may_be_written_to() -> None:
    """Of what nobody else has: the scores of a linear layer over sequences."""
    net = _Net(lambda net, x, h: (h.view(5, 3, 1), h.sum()))
    eager = copy.deepcopy(net)
    module = autopar.optimize(net, example_inputs=X, capture="always")
    for model in (module, eager):
        scores, total = model(X)
        (scores.mul_(2).sin().sum() + total).backward()
    for mine, theirs in zip(net.parameters(), eager.parameters(), strict=True):
        assert mine.grad is not None and theirs.grad is not None and torch.allclose(mine.grad, theirs.grad, rtol=1e-12)


def test_what_comes_before_has_no_gradient_where_its_output_is_not_used() -> None:
    net, before = _Net(lambda net, x, h: (h, net.scale.sin())), nn.Linear(4, 4).double()
    module = autopar.optimize(net, example_inputs=X.clone().requires_grad_(), capture="always")
    module(before(X))[1].sum().backward()
    assert before.weight.grad is net.first.weight.grad is None and net.scale.grad is not None
    module(before(X))[0].sum().backward()
    assert before.weight.grad is not None and net.first.weight.grad is not None


def test_hooks_on_parameters_run_once_and_not_in_the_proof() -> None:
    net = _Net(lambda net, x, h: (h, net.scale))
    eager = copy.deepcopy(net)
    calls: list[int] = []

    def doubled(gradient: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return 2 * gradient

    for one in (net, eager):
        one.scale.register_hook(doubled)
    module = autopar.optimize(net, example_inputs=X)
    found, expected = _trained(module, net, X), _trained(eager, eager, X)
    for a, b in zip(found, expected, strict=True):
        assert a is not None and b is not None and torch.allclose(a, b, rtol=1e-12)
    assert len(calls) == 2


def test_outputs_that_are_not_used_add_nothing_where_their_derivative_is_infinite() -> None:
    """Zeros times infinity would be NaN, in each gradient that they have a part in."""
    net = _Net(lambda net, x, h: (h, torch.sqrt((h * 0).abs() * net.scale.square()), h / 0))
    eager = copy.deepcopy(net)
    module = autopar.optimize(net, example_inputs=X.clone().requires_grad_(), capture="always")
    for used in ([0], [0, 1], [0]):

        def trained(model: Any, net: nn.Module, used: list[int] = used) -> torch.Tensor:
            net.zero_grad()
            found = _trained(lambda x: [model(x)[i] for i in used], net, X)
            return torch.cat([g.flatten() for g in found if g is not None])

        found, expected = trained(module, net), trained(eager, eager)
        assert torch.allclose(found, expected, rtol=1e-12, equal_nan=True)
        assert found.isnan().any() == (1 in used)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_module_may_be_checkpointed(reentrant: bool) -> None:
    net = _Net(lambda net, x, h: (h, h.sin()))
    eager = copy.deepcopy(net)
    module = autopar.optimize(net, example_inputs=X.clone().requires_grad_(), capture="always")
    found = _trained(lambda x: checkpoint(module, x, use_reentrant=reentrant), net, X)
    for mine, theirs in zip(found, _trained(eager, eager, X), strict=True):
        assert mine is not None and theirs is not None and torch.allclose(mine, theirs, rtol=1e-12)


def test_outputs_may_be_named_by_numbers() -> None:
    """As the levels of a feature pyramid are."""

    class Levels(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3).double()

        def forward(self, x: torch.Tensor) -> dict[str, dict[int, torch.Tensor]]:
            h = self.layer(x)
            return {"levels": {0: h, 1: h * 2}}

    net = Levels()
    module = autopar.optimize(net, example_inputs=X, capture="always")
    found = module(X)["levels"]
    assert list(found) == [0, 1] and torch.equal(found[1], net.layer(X) * 2)
