"""Whoever uses a watched parameter is told of, before it is read, and once; what only asks for its shape is not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from autopar.ir.batch import flatten
from autopar.ir.build import model_fingerprint
from autopar.ir.first_uses import watchable, watched
from autopar.ir.outline import Outline, outline
from autopar.ir.seen import look


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        x, w = ctx.saved_tensors
        return g @ w.T, x.T @ g


READERS: dict[str, Callable[[nn.Parameter], object]] = {
    "operator": lambda w: w @ w,
    "in a list": lambda w: torch.cat([w.new_zeros(1, 4), w]),
    "method": lambda w: w.t(),
    "detach": lambda w: w.detach(),
    "data": lambda w: w.data,
    "numpy": lambda w: w.numpy(force=True),
    "item": lambda w: w[0, 0].item(),
    "copy": copy.deepcopy,
    "memory": lambda w: w.untyped_storage(),
    "pointer": lambda w: w.data_ptr(),
    "registered operator": lambda w: torch.ops.aten.mm(w, w),
    "autograd function": lambda w: _Product.apply(torch.ones(2, 4), w),
    "checkpoint": lambda w: checkpoint(lambda x: F.linear(x, w), torch.ones(2, 4), use_reentrant=False),
    "another module": lambda w: torch.func.functional_call(
        nn.Linear(4, 4, bias=False), {"weight": w}, torch.ones(1, 4)
    ),
    "written": lambda w: nn.init.zeros_(w),
}


@pytest.mark.parametrize("name", READERS)
def test_each_way_to_read_is_seen_once(name: str) -> None:
    w, told = nn.Parameter(torch.eye(4)), []
    with watched([(w, lambda: told.append(type(w)))]):
        assert (w.shape, w.dtype, w.dim(), w.numel(), len(w), w.requires_grad) == (
            (4, 4),
            torch.float32,
            2,
            16,
            4,
            True,
        )
        assert isinstance(w, nn.Parameter) and hash(w) and told == []
        READERS[name](w)
        READERS[name](w)
    assert len(told) == 1
    assert type(w) is nn.Parameter and list(w.__dict__) == []


def test_a_value_that_arrives_with_the_first_use_is_what_is_read() -> None:
    layer = nn.LSTM(3, 4, batch_first=True)
    x = torch.ones(2, 5, 3)
    expected = layer(x)[0]
    arrive = {n: p.detach().clone() for n, p in layer.named_parameters()}
    with torch.no_grad():
        for p in layer.parameters():
            p.fill_(torch.nan)

    def receive(name: str, p: nn.Parameter) -> None:
        with torch.no_grad():
            p.detach().copy_(arrive[name])

    with watched([(p, lambda n=n, p=p: receive(n, p)) for n, p in layer.named_parameters()]):  # type: ignore[misc]
        assert torch.equal(layer(x)[0], expected)


def test_an_error_leaves_parameters_as_they_were() -> None:
    w = nn.Parameter(torch.eye(4))
    with pytest.raises(ValueError, match="in vain"), watched([(w, lambda: None)]):
        raise ValueError("in vain")
    assert type(w) is nn.Parameter


def test_what_runs_outside_of_python_is_not_watched() -> None:
    scripted = torch.jit.script(nn.Linear(2, 2))
    compiled = nn.Linear(2, 2)
    compiled.compile()
    model = nn.ModuleDict({"script": scripted, "compiled": compiled, "plain": nn.Linear(2, 2)})
    found = watchable([model], dict(model.named_parameters()))
    assert found == {"plain.weight", "plain.bias"}


def test_all_are_told_before_pytorchs_compiler_looks_at_them() -> None:
    @torch.compile(backend="eager", fullgraph=True)
    def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x @ w

    first, second = nn.Parameter(torch.eye(3)), nn.Parameter(torch.eye(3))
    product(torch.ones(2, 3), first)
    told: list[str] = []
    with watched([(first, lambda: told.append("first")), (second, lambda: told.append("second"))]) as met:
        assert product(torch.ones(2, 3), first).equal(torch.ones(2, 3))
        assert told == ["first", "second"] and met.compiler_began
    named = {"first": first, "second": second}
    seen = look(lambda: [product(torch.ones(2, 3), first).sum() + second.sum()], named, flatten(first), named)
    assert seen.uses == ()


def test_the_forward_pass_is_cut_where_parameters_are_first_used() -> None:
    class Chooses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(64, 64) for _ in range(4)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for i in (2, 0, 3):
                x = self.layers[i](x)
            return x.sum()

    model, x = Chooses(), torch.ones(256, 64)
    named = dict(model.named_parameters())
    seen = look(lambda: [model(x)], named, flatten({"x": x}), watchable([model], named))
    order = [n for n, _ in seen.uses]
    # Layer 1, which is not used here, is expected behind the layer that the model lists before it.
    assert [n.split(".")[1] for n in order[::2]] == ["2", "0", "1", "3"] and len(order) == 8
    assert 0 < sum(s for _, s in seen.uses) <= seen.forward_s
    seen = replace(seen, forward_s=1.0, uses=tuple((n, 0.2 * n.endswith("weight")) for n in order))
    graph = outline(model_fingerprint(model, None), flatten({"x": x}), seen, 0)
    assert graph.compute[graph.backward_start].op == "backward pass"
    uses = {p.name: p.first_use for p in graph.parameters}
    assert [uses[n] for n in order[::2]] == [uses[n] for n in order[1::2]] == [1, 2, 3, 4]
    assert graph.backward_start == 5
    assert isinstance(graph.joint, Outline)
    assert list(graph.joint.seconds.values())[:6] == pytest.approx([0.2, 0.2, 0.2, 0.2, 0.2, 0])
    assert sum(n.flops for n in graph.compute) == pytest.approx(3 * seen.flops)


@pytest.mark.parametrize("held_up", [0, 3, 8])
def test_a_forward_pass_that_was_held_up_as_it_was_timed_is_cut_all_the_same(held_up: int) -> None:
    model, x = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))), torch.ones(2, 4)
    named = dict(model.named_parameters())
    seen = look(lambda: [model(x).sum()], named, flatten({"x": x}), watchable([model], named))
    moments = [1.0 if i == held_up else 1e-6 for i in range(9)]
    uses = tuple((n, s) for n, s in zip(named, moments, strict=False))
    graph = outline(model_fingerprint(model, None), flatten({"x": x}), replace(seen, forward_s=1.0, uses=uses), 0)
    first = {p.name: p.first_use for p in graph.parameters}
    assert len({first[f"{i}.weight"] for i in range(4)}) == 4
