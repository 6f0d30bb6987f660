"""Auxiliary losses that read what the forward pass has left in Python, beside a drop-in module."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar.runtime.drop_in.module import SyncedModule

BATCHES = [(torch.randn(8, 6), torch.randn(8, 3)) for _ in range(3)]


class Holder:
    hidden: Any = None


class Keeps(nn.Module):
    def __init__(self, keep: Callable[[Keeps, torch.Tensor], None]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.keep = nn.Linear(6, 8), nn.Linear(8, 3), keep
        self.hidden: Any = None
        self.of, self.listed = Holder(), list[torch.Tensor]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(self.first(x))
        self.keep(self, h)
        return self.last(h)  # type: ignore[no-any-return]


def _in_attribute(net: Keeps, h: torch.Tensor) -> None:
    net.hidden = h


def _in_object(net: Keeps, h: torch.Tensor) -> None:
    net.of.hidden = h


def _in_list(net: Keeps, h: torch.Tensor) -> None:
    net.listed.append(h)


def _as_loss(net: Keeps, h: torch.Tensor) -> None:
    net.hidden = h.square().mean()


def _detached(net: Keeps, h: torch.Tensor) -> None:
    net.hidden = h.detach()


READ: dict[Callable[[Keeps, torch.Tensor], None], Callable[[Keeps], torch.Tensor]] = {
    _in_attribute: lambda net: net.hidden,
    _in_object: lambda net: net.of.hidden,
    _in_list: lambda net: net.listed[-1],
    _as_loss: lambda net: net.hidden,
}


def _trained(net: Keeps, run: nn.Module, read: Callable[[Keeps], torch.Tensor]) -> dict[str, torch.Tensor]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for x, y in BATCHES:
        optimizer.zero_grad()
        (F.mse_loss(run(x), y) + read(net).square().mean()).backward()
        optimizer.step()
    return {name: p.detach() for name, p in net.named_parameters()}


@pytest.mark.parametrize("keep", READ)
def test_gradients_flow_through_what_forward_keeps(keep: Callable[[Keeps, torch.Tensor], None]) -> None:
    """Captured, the loss found what was there before: nothing, or an old tensor."""
    net, plain = Keeps(keep), Keeps(keep)
    with pytest.warns(autopar.AutoparWarning, match="as through an auxiliary loss[^$]*So the model runs eagerly"):
        run = autopar.optimize(net, example_inputs=BATCHES[0][0], strategy="ddp")
    assert net.hidden is None and net.of.hidden is None and not net.listed, "planning's own runs are put back"
    torch.testing.assert_close(_trained(net, run, READ[keep]), _trained(plain, plain, READ[keep]))


def test_gradients_flow_through_what_a_hook_keeps() -> None:
    each = []
    for captured in (True, False):
        net, kept = Keeps(lambda net, h: None), dict[str, torch.Tensor]()
        net.first.register_forward_hook(lambda module, inputs, output, kept=kept: kept.update(hidden=output))
        run: nn.Module = net
        if captured:
            with pytest.warns(autopar.AutoparWarning, match="So the model runs eagerly"):
                run = autopar.optimize(net, example_inputs=BATCHES[0][0], strategy="ddp")
        each.append(_trained(net, run, lambda net, kept=kept: kept["hidden"]))  # type: ignore[misc]
    torch.testing.assert_close(*each)


def _is_captured(module: SyncedModule) -> bool:
    return not module.program.graph.eager


def test_what_takes_no_gradient_is_no_reason_to_run_eagerly() -> None:
    with pytest.warns(autopar.AutoparWarning, match="sets or changes 'model.hidden', which the captured step does not"):
        run = autopar.optimize(Keeps(_detached), example_inputs=BATCHES[0][0], strategy="ddp")
    assert _is_captured(run)
    with warnings.catch_warnings(action="ignore"):
        normed = nn.Sequential(torch.nn.utils.weight_norm(nn.Linear(6, 3)))
        assert _is_captured(autopar.optimize(normed, example_inputs=BATCHES[0][0], strategy="ddp"))
        always = autopar.optimize(Keeps(_in_attribute), example_inputs=BATCHES[0][0], strategy="ddp", capture="always")
        assert _is_captured(always)
