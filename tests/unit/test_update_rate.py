"""How fast an optimizer updates: measured on a stand-in for its parameters, which are left alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import autopar
from autopar.cost_models import AnalyticCostModel
from autopar.runtime.optimizers.optimizer import ELEMENTWISE
from autopar.runtime.optimizers.update_rate import update_s_per_byte


class _Subclass(torch.optim.SGD):
    """May do more than update."""


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 4))


@pytest.mark.parametrize("kind", sorted(ELEMENTWISE, key=str))
@pytest.mark.parametrize("begun", [False, True])
def test_neither_parameters_nor_the_optimizer_are_changed(kind: Any, begun: bool) -> None:
    model = _model()
    optimizer = kind([{"params": [p], "lr": 0.01} for p in model.parameters()])
    if begun:
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
    before = copy.deepcopy((optimizer.state_dict(), model.state_dict(), [p.grad for p in model.parameters()]))
    took = update_s_per_byte(optimizer)
    assert took is not None and 0 < took < 1e-3
    after = (optimizer.state_dict(), model.state_dict(), [p.grad for p in model.parameters()])
    torch.testing.assert_close(after, before, rtol=0, atol=0)


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda p: _Subclass(p, lr=0.1),
        lambda p: torch.optim.Adafactor(p),
        lambda p: torch.optim.SGD(p, lr=0.1, differentiable=True),
    ],
)
def test_what_may_do_more_than_update_each_element_is_not_run(optimizer: Any) -> None:
    assert update_s_per_byte(optimizer(list(_model().parameters()))) is None


def test_hooks_of_the_user_are_not_called_and_parameters_without_values_tell_nothing() -> None:
    called: list[object] = []
    optimizer = torch.optim.AdamW(_model().parameters())
    optimizer.register_step_post_hook(lambda *args: called.append(args))
    assert update_s_per_byte(optimizer) is not None and not called
    handle = register_optimizer_step_pre_hook(lambda *args: called.append(args))
    try:
        assert update_s_per_byte(optimizer) is None and not called
    finally:
        handle.remove()
    assert update_s_per_byte(torch.optim.AdamW(_model().to("meta").parameters())) is None


def test_plans_whose_compute_is_measured_have_their_updates_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    rates: list[Any] = []
    made = AnalyticCostModel.__init__

    def seen(self: AnalyticCostModel, optimizer: Any, *args: Any, **options: Any) -> None:
        rates.append(optimizer.rates)
        made(self, optimizer, *args, **options)

    monkeypatch.setattr(AnalyticCostModel, "__init__", seen)
    for measures in (False, True):
        model = _model()
        settings: dict[str, Any] = {
            "example_inputs": (torch.ones(2, 8), torch.ones(2, 4)),
            "loss_fn": nn.functional.mse_loss,
            "optimizer": torch.optim.AdamW(model.parameters()),
            "strategy": "ddp",
        }
        autopar.plan(model, autopar.ClusterSpec.local(2), measure_compute=measures, **settings)
    unmeasured, measured = rates[0], rates[-1]
    assert unmeasured == () and len(measured) == 1 and measured[0][1] > 0
