"""1-bit Adam: what its update is, without a process group; and what it costs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from autopar.cost_models import AnalyticCostModel
from autopar.errors import PlanError
from autopar.ops.context import Context
from autopar.ops.quantized import encode, sum_and_encode
from autopar.ops.quantizers import Quantizer
from autopar.runtime.optimizers.frozen_adam import step_frozen
from autopar.runtime.optimizers.kinds import is_plain_adam
from autopar.spec.plan import ParameterSlice, SyncGroup
from autopar.spec.topology import Topology
from autopar.strategies.lowering import lower_plan
from tests.unit.synthetic import MLP, cpu_hosts, training_graph

NAMES = tuple(ParameterSlice(name=name) for name, _ in MLP)


def trained(steps: int, optimizer: Any) -> tuple[nn.Parameter, torch.optim.Optimizer]:
    p = nn.Parameter(torch.linspace(-1, 1, 7, dtype=torch.float64))
    made = optimizer([p])
    for step in range(steps):
        p.grad = torch.sin(p.detach() * (3 + step))
        made.step()
    return p, made


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda p: torch.optim.Adam(p, lr=0.03, betas=(0.7, 0.9)),
        lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.03, dtype=torch.float64), weight_decay=0.2, eps=1e-3),
    ],
)
def test_a_momentum_that_adam_would_have_moves_as_adam_does(optimizer: Any) -> None:
    """Where gradients' squares are the estimate that Adam has of them, Adam itself freezes it."""
    p, made = trained(5, optimizer)
    other, same = copy.deepcopy((p, made))
    settings = made.param_groups[0]
    settings.setdefault("decoupled_weight_decay", isinstance(made, torch.optim.AdamW))
    for _ in range(4):
        state, beta = made.state[p], settings["betas"]
        estimate = state["exp_avg_sq"] / (1 - beta[1] ** float(state["step"]))
        gradient = estimate.sqrt() * torch.sign(p.detach())
        (mine,) = same.state.values()
        momentum = beta[0] * mine["exp_avg"] + (1 - beta[0]) * gradient
        p.grad = gradient
        made.step()
        step_frozen([other.data], [mine], [settings], [momentum])
        assert torch.allclose(p, other, rtol=0, atol=1e-14)
        assert all(torch.allclose(state[k].double(), mine[k].double(), rtol=1e-13) for k in state)


def test_what_is_left_out_is_kept_and_does_not_count() -> None:
    quantizer = Quantizer(1, 8, scale="mean")
    x = torch.tensor([4.0, -2.0, 100.0, 0.0, 3.0, -3.0], dtype=torch.float64)
    left_out = torch.tensor([False, False, True, True, False, False])
    residual = torch.zeros(6, dtype=torch.float64)
    fields = (1, 8, "mean", False, False, 0.0)
    message = encode(x, residual, None, fields, 1, 0, left_out)
    received = quantizer.decode(message, torch.float64).view(-1)[:6]
    assert received.abs().unique().tolist() == [3.0], "the mean of 4, 2, 3 and 3"
    assert residual.tolist() == [1.0, 1.0, 100.0, 0.0, 0.0, 0.0]
    of_sum = torch.zeros(6, dtype=torch.float64)
    again = sum_and_encode(torch.cat([message, message]), of_sum, None, fields, 2, 6, 0, torch.float64, left_out)
    assert quantizer.decode(again, torch.float64).view(-1)[:2].tolist() == [6.0, -6.0] and not of_sum.any()


def test_which_optimizers_it_takes() -> None:
    p = [nn.Parameter(torch.ones(2))]
    assert is_plain_adam(torch.optim.Adam(p)) and is_plain_adam(torch.optim.AdamW(p))
    assert is_plain_adam(None) is None
    for other in (torch.optim.Adam(p, amsgrad=True), torch.optim.NAdam(p), torch.optim.SGD(p, lr=0.1)):
        assert is_plain_adam(other) is False
    with pytest.raises(PlanError, match=r"the optimizer must be torch\.optim\.Adam or AdamW"):
        lower_plan([_group(from_step=5)], training_graph(MLP), Context(4, plain_adam=False))
    with pytest.raises(PlanError, match="begins with step 0: say how many steps are exact with from_step"):
        lower_plan([_group()], training_graph(MLP), Context(4))
    with pytest.raises(PlanError, match="every=4"):
        lower_plan([_group(from_step=4, every=4)], training_graph(MLP), Context(4))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_parameters_in_16_bits_are_refused(dtype: str) -> None:
    """Their variance cannot grow with Adam's correction."""
    with pytest.raises(PlanError, match=r"Adam's variance is in 16 bits.*keep the parameter in float32"):
        lower_plan([_group(from_step=5)], training_graph(MLP, dtypes=[dtype]), Context(4))


def test_it_is_less_to_send_and_is_priced() -> None:
    """Its bytes, its residuals, and the passes on the device."""
    graph, context = training_graph(MLP), Context(4)
    pricer = AnalyticCostModel().pricer(graph, Topology(cpu_hosts(4)))
    groups = SyncGroup(strategy="all_reduce", members=NAMES), _group(from_step=5)
    exact, mine = (pricer.estimate(lower_plan([group], graph, context)) for group in groups)
    elements = sum(p.spec.numel for p in graph.parameters)
    assert mine.sent_bytes[0] < 0.05 * exact.sent_bytes[0]
    assert mine.compute_s > exact.compute_s
    assert mine.peak_memory_bytes[0] - exact.peak_memory_bytes[0] >= 4 * elements


def _group(**timing: int) -> SyncGroup:
    return SyncGroup(strategy="one_bit_adam", members=NAMES, **timing)
