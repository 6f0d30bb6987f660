"""Activations that are computed again: nothing changes but memory and time, and a plan says so where it must be."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar.errors import InfeasibleError
from autopar.ir.batch import flatten
from autopar.ir.build import traced_step, training_graph
from autopar.spec.cluster import ClusterSpec
from autopar.spec.plan import Plan, Recompute
from autopar.spec.units import Figure
from benchmarks.zoo import find, huggingface, plain
from tests.tiers import newer, thorough

LEVELS: tuple[Recompute, ...] = ("selective", "full")


class Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))
        return y


class Deep(nn.Module):
    """Residual blocks whose activations outweigh their parameters."""

    def __init__(self, blocks: int = 12, width: int = 16, dropout: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(width, dropout) for _ in range(blocks)), nn.Linear(width, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.blocks(x)
        return y


def batch(samples: int = 512) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    return torch.randn(samples, 16, generator=draw), torch.randn(samples, 3, generator=draw)


def deep(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return Deep(dropout=dropout)


def run(model: nn.Module, example: Any, loss_fn: Any, level: Recompute) -> list[torch.Tensor]:
    """Loss, gradients and new values of buffers, from the joint graph itself."""
    graph = training_graph(model, flatten(example), loss_fn, recompute=level)
    assert graph.joint is not None
    named: dict[tuple[str, Any], torch.Tensor] = {
        ("parameter", n): p.detach() for n, p in model.named_parameters(remove_duplicate=False)
    }
    named |= {("buffer", n): b.clone() for n, b in model.named_buffers(remove_duplicate=False)}
    named |= {("batch", i): t for i, t in enumerate(flatten(example).tensors)}
    named["tangent", 0] = torch.ones((), dtype=graph.joint.outputs[0].meta["val"].dtype)
    torch.manual_seed(5)
    outputs = graph.joint.module(*(named[key] for key in graph.joint.inputs))
    return [o for o in outputs if isinstance(o, torch.Tensor)]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_every_gradient_stays_the_same_bit_for_bit(level: Recompute, dropout: float) -> None:
    model = deep(dropout)
    for a, b in zip(run(model, batch(), F.mse_loss, "none"), run(model, batch(), F.mse_loss, level), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    "name", ["resnet18", *(pytest.param(name, marks=thorough) for name in ("gpt2", "bert", "dlrm"))]
)
@pytest.mark.parametrize("level", LEVELS)
def test_real_models_compute_the_same(name: str, level: Recompute) -> None:
    entries = huggingface.ENTRIES if name in ("gpt2", "bert") else plain.ENTRIES
    entry = find(entries, name)
    model, example = entry.build(), entry.batch(2, 0)
    for a, b in zip(run(model, example, entry.loss_fn, "none"), run(model, example, entry.loss_fn, level), strict=True):
        assert torch.equal(a, b)


def test_less_is_alive_and_more_is_computed() -> None:
    graphs = {
        level: training_graph(deep(), flatten(batch()), F.mse_loss, recompute=level) for level in ("none", *LEVELS)
    }
    live = {level: max(n.live_bytes for n in g.compute) for level, g in graphs.items()}
    flops = {level: sum(n.flops for n in g.compute if "mm" in n.op) for level, g in graphs.items()}
    assert live["selective"] < 0.9 * live["none"]
    assert live["full"] < 0.6 * live["none"]
    assert flops["none"] == flops["selective"] < flops["full"] < 1.4 * flops["none"]


def cluster_with(memory_bytes: float) -> ClusterSpec:
    local = ClusterSpec.local(1)
    device = local.hosts[0].devices[0].model_copy(update={"memory": Figure(float(memory_bytes))})
    host = local.hosts[0].model_copy(update={"devices": (device,)})
    return local.model_copy(update={"hosts": (host,)})


def planned(memory_bytes: float) -> Plan:
    model = deep()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    cluster = cluster_with(memory_bytes)
    return autopar.plan(
        model,
        cluster,
        example_inputs=batch(),
        loss_fn=F.mse_loss,
        optimizer=optimizer,
        memory_reserve=0.0,
        time_budget_s=0.2,
    )


def test_a_plan_computes_again_only_what_memory_asks_for() -> None:
    peaks = {}
    for level in ("none", *LEVELS):
        graph = training_graph(deep(), flatten(batch()), F.mse_loss, recompute=level)
        peaks[level] = max(n.live_bytes for n in graph.compute)
    assert planned(1 << 40).recompute == "none"
    whole = planned(1 << 40).prediction
    assert whole is not None
    fixed = whole.peak_memory_bytes - peaks["none"]
    for level in LEVELS:
        plan = planned(fixed + 1.02 * peaks[level])
        assert plan.recompute == level
        assert "recompute" in plan.explain()
        assert plan.digest != planned(1 << 40).digest
    with pytest.raises(InfeasibleError, match="computed again in the backward pass already"):
        planned(fixed + 0.5 * peaks["full"])


def test_where_nothing_fits_the_leanest_plan_of_all_levels_is_told_of() -> None:
    """Of a model that is mostly parameters, computing again saves no memory."""
    wide, ids = nn.Sequential(nn.Embedding(100, 16), nn.Linear(16, 100)), torch.arange(12)
    host = "{name: host, count: 2, devices: [{kind: cpu, memory: 20 KiB}]}"
    with pytest.raises(InfeasibleError) as e:
        autopar.plan(
            wide,
            ClusterSpec.loads(f"{{hosts: [{host}], network: 1GbE}}"),
            example_inputs=(ids, ids),
            loss_fn=F.cross_entropy,
        )
    assert "no plan fits: the leanest of" in str(e.value) and "computed again" not in str(e.value)


@pytest.mark.parametrize("level", LEVELS)
def test_programs_train_alike(level: Recompute) -> None:
    ends = []
    start = deep()
    plain_plan = planned(1 << 40)
    for how in ("none", level):
        model = copy.deepcopy(start)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        plan = plain_plan.model_copy(update={"recompute": how})
        program = autopar.optimize(model, example_inputs=batch(), loss_fn=F.mse_loss, optimizer=optimizer, plan=plan)
        for samples in (512, 512, 100):  # another shape is captured anew
            program.step(batch(samples))
        ends.append([p.detach() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_an_element_of_results_that_are_kept_is_not_taken_out_twice() -> None:
    """Both would be one tensor, over which the forward pass and what is computed again would write."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 2)).double()
    example = (torch.randn(5, 4, dtype=torch.float64), torch.randn(5, 2, dtype=torch.float64))
    for level in LEVELS:
        found = run(model, example, F.mse_loss, level)
        expected = run(model, example, F.mse_loss, "none")
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@newer  # before, nodes are called otherwise in a second tracing
@pytest.mark.parametrize("level", ["none", *LEVELS])
def test_what_was_traced_once_serves_every_level(level: Recompute) -> None:
    model, example = deep(), flatten(batch(4))
    traced = traced_step(model, example, F.mse_loss)
    nodes = [n.format_node() for n in traced.module.graph.nodes]
    settings: dict[str, Any] = {"loss_fn": F.mse_loss, "recompute": level}
    again, once = (training_graph(model, example, traced=t, **settings) for t in (traced, None))
    assert again == once and again.joint is not None and once.joint is not None
    assert again.joint.module.code == once.joint.module.code
    assert [n.format_node() for n in traced.module.graph.nodes] == nodes


class Cubes(nn.Module):
    """Layers with a cube, as the approximation of GELU has one: what its derivative is made of is computed behind the
    first nodes of the backward pass, though it depends on none of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            h = layer(x)
            x = x + torch.tanh(h + 0.04 * torch.pow(h, 3.0))
        return x


def test_what_the_backward_pass_computes_for_itself_is_not_kept_for_it() -> None:
    example, live = flatten((torch.randn(4096, 32), torch.randn(4096, 32))), {}
    for level in ("none", *LEVELS):
        graph = training_graph(Cubes(), example, F.mse_loss, recompute=level)
        live[level] = max(n.live_bytes for n in graph.compute)
    assert live["full"] < 0.5 * live["none"]
