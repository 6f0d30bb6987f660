"""Models that run eagerly, in one process: what they hold, hand back and are done with, as in plain PyTorch."""

from __future__ import annotations

import contextlib
import copy
import itertools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar.errors import AutoparWarning, CaptureError

X, Y = torch.randn(5, 4, dtype=torch.float64), torch.randn(5, 2, dtype=torch.float64)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.seldom = nn.Linear(4, 6), nn.Linear(6, 2), nn.Linear(6, 6)
        self.fails = False
        self.double()

    def forward(self, x: torch.Tensor) -> Any:
        h = self.first(x)
        if x[0, 0].item() > 50:
            h = self.seldom(h)
        if self.fails:
            h.register_hook(_fail)
        return self.last(h)


def _fail(_: torch.Tensor) -> torch.Tensor:
    raise ValueError("a backward pass fails")


def synced(net: nn.Module) -> Any:
    return autopar.optimize(net, example_inputs=X, capture="never")


def program(net: nn.Module, optimizer: torch.optim.Optimizer, **settings: Any) -> Any:
    return autopar.optimize(
        net, example_inputs=(X, Y), loss_fn=F.mse_loss, optimizer=optimizer, capture="never", **settings
    )


def counted(module: Any) -> list[int]:
    """Grows by one with each backward pass that is synchronized."""
    calls: list[int] = []
    before = module.program._end

    def end(*given: Any) -> Any:
        calls.append(1)
        return before(*given)

    module.program._gradients._end = end
    return calls


class Holds(Net):
    """Hands back an object that PyTorch knows nothing of; or nothing."""

    def forward(self, x: torch.Tensor) -> Any:
        found = type("Output", (), {})()
        found.inner = {"logits": super().forward(x)}
        return found


class Keeps(Net):
    def forward(self, x: torch.Tensor) -> None:
        self.found = super().forward(x)


@pytest.mark.parametrize("kind", [Holds, Keeps])
def test_a_drop_in_may_hand_back_any_object_or_none(kind: type[Net]) -> None:
    net = kind()
    module = synced(net)
    calls = counted(module)
    for _ in range(2):
        output = module(X)
        found = net.found if isinstance(net, Keeps) else output.inner["logits"]
        F.mse_loss(found, Y).backward()
    assert len(calls) == 2, "each backward pass is synchronized"


def test_a_penalty_alone_is_kept_to_the_rank_whoever_still_holds_an_output() -> None:
    """Ranks that hold outputs for other times would wait for each other."""
    net = Net()
    module = synced(net)
    calls = counted(module)
    kept = module(X)
    F.mse_loss(kept, Y).backward()
    net.first.weight.square().sum().backward()
    assert len(calls) == 1


@contextlib.contextmanager
def in_half() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float16)
    yield
    torch.set_default_dtype(before)


class Observes(nn.Module):
    """Makes a number of a tensor, which cannot be captured, in one of PyTorch's modes."""

    def __init__(self, mode: Any) -> None:
        super().__init__()
        self.layer, self.mode = nn.Linear(4, 2).double(), mode

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(x)
        with self.mode():
            mean = found.detach().mean().item()
        return found + mean


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, in_half])
@pytest.mark.filterwarnings("ignore:the model cannot be captured:autopar.AutoparWarning")
def test_a_capture_that_fails_in_one_of_pytorchs_modes_ends_it(mode: Any) -> None:
    module = autopar.optimize(Observes(mode), example_inputs=X)
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    assert torch.get_default_dtype() is torch.float32
    module(X).sum().backward()
    assert all(p.grad is not None for p in module.parameters())


class Scaled(Net):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), self.scale


def test_a_parameter_that_is_handed_back_keeps_no_hooks() -> None:
    net = Scaled()
    module = synced(net)
    for _ in range(2):
        output, scale = module(X)
        (F.mse_loss(output, Y) * scale).backward()
    assert not net.scale._backward_hooks


def test_gradients_behind_a_backward_pass_that_failed_are_not_those_from_before() -> None:
    net, other = Net(), Net()
    module = synced(net)
    F.mse_loss(module(X), Y).backward()
    net.fails = True
    with pytest.raises(ValueError, match="fails"):
        F.mse_loss(module(X), Y).backward()
    net.fails = False
    net.zero_grad()
    F.mse_loss(module(X), Y).backward()
    F.mse_loss(other(X), Y).backward()
    for a, b in zip(net.parameters(), other.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None)
        assert a.grad is None or (b.grad is not None and torch.allclose(a.grad, b.grad, rtol=1e-12))


def test_gradients_that_are_to_be_differentiated_are_refused() -> None:
    module = synced(Net())
    with pytest.raises(CaptureError, match="create_graph"):
        F.mse_loss(module(X), Y).backward(create_graph=True)


def test_hooks_that_wait_for_gradients_do_not_run_beforehand_and_see_what_was_synchronized() -> None:
    """They may update the parameter, as optimizers within the backward pass do."""
    net, seen = Net(), []
    net.last.bias.register_post_accumulate_grad_hook(lambda p: seen.append((p.grad, p.grad is net.last.bias.grad)))
    module = synced(net)
    assert seen == []
    F.mse_loss(module(X), Y).backward()
    assert len(seen) == 1 and seen[0][1] and seen[0][0] is net.last.bias.grad
    assert net.last.bias._post_accumulate_grad_hooks


@pytest.mark.parametrize("optimizer", ["adamw", "momentum"])
def test_parameters_may_be_frozen_for_a_while_and_used_late(optimizer: str) -> None:
    """PyTorch's fused SGD with momentum fails where some parameters get their first gradient later than others."""
    net, other = Net(), Net()

    def of(model: nn.Module) -> torch.optim.Optimizer:
        if optimizer == "adamw":
            return torch.optim.AdamW(model.parameters(), lr=0.01)
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)

    theirs = of(other)
    step, late = program(net, of(net)), X.clone()
    late[0, 0] = 100
    for i, x in enumerate([X, late, X, late, X]):
        for one in (net, other):
            one.first.requires_grad_(i not in (2, 3))
        for p in net.parameters():
            p.grad = torch.ones_like(p)  # the user's own, which is no gradient of the step's
        step.step((x, Y))
        assert all(p.grad is None for p in net.parameters())
        theirs.zero_grad()
        F.mse_loss(other(x), Y).backward()
        theirs.step()
        for a, b in zip(net.parameters(), other.parameters(), strict=True):
            assert torch.allclose(a, b, rtol=1e-12), i


def test_delayed_updates_leave_out_what_was_unused_when_they_were_made() -> None:
    net, other = Net(), Net()
    theirs = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    mine = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    given = {"example_inputs": (X, Y), "loss_fn": F.mse_loss, "optimizer": mine, "capture": "never"}
    plan = autopar.plan(net, autopar.ClusterSpec.local(1), strategy="ddp", **given)  # type: ignore[arg-type]
    delayed = [g.model_copy(update={"delay": 1}) for g in plan.groups]
    step = program(net, mine, plan=plan.model_copy(update={"groups": delayed, "fidelity": "stale"}))
    late = X.clone()
    late[0, 0] = 100
    held: list[torch.Tensor | None] = []
    for i, x in enumerate([late, X, late, X]):
        step.step((x, Y))
        theirs.zero_grad()
        F.mse_loss(other(x), Y).backward()
        now = [None if p.grad is None else p.grad.clone() for p in other.parameters()]
        for p, gradient in zip(other.parameters(), held, strict=i > 0):
            p.grad = gradient
        if held:
            theirs.step()
        held = now
        for a, b in zip(net.parameters(), other.parameters(), strict=True):
            assert torch.allclose(a, b, rtol=1e-12), i


class Counter:
    count = 0


class Draws(Net):
    """Holds state of every kind, none of it in tensors that PyTorch knows of."""

    def __init__(self) -> None:
        super().__init__()
        self.nested, self.counter = {"at": [{"calls": 0}]}, Counter()
        self.numpy, self.python = np.random.default_rng(0), random.Random(0)
        self.torch = torch.Generator().manual_seed(0)
        self.drawn: list[tuple[float, ...]] = []

    def forward(self, x: torch.Tensor) -> Any:
        self.nested["at"][0]["calls"] += 1
        self.counter.count += 1
        self.drawn.append(
            (self.numpy.random(), self.python.random(), float(torch.rand((), generator=self.torch)), random.random())
        )
        return super().forward(x)


def test_what_python_holds_goes_on_by_one_each_step() -> None:
    random.seed(0)
    net, other = Draws(), Draws()
    step = program(net, torch.optim.SGD(net.parameters(), lr=0.1))
    for _ in range(2):
        step.step((X, Y))
    random.seed(0)
    for _ in range(2):
        other(X)
    assert net.drawn == other.drawn and net.counter.count == 2 and net.nested["at"][0]["calls"] == 2


class Transforms(Net):
    """PyTorch's function transforms go with no hooks on what is saved for the backward pass."""

    def forward(self, x: torch.Tensor) -> Any:
        inner = torch.func.vmap(torch.func.grad(lambda v: self.first(v).tanh().sum()))(x)
        return super().forward(inner)


def test_what_cannot_be_counted_is_trained() -> None:
    net = Transforms()
    step = program(net, torch.optim.SGD(net.parameters(), lr=0.1))
    other = copy.deepcopy(net)
    expected = F.mse_loss(other(X), Y)
    assert float(step.step((X, Y))) == pytest.approx(expected.item(), rel=1e-12)


class Caches(Net):
    """Buffers that come and go, and grow."""

    cache: torch.Tensor | None
    queue: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", None)
        self.register_buffer("queue", torch.zeros(0, 4, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> Any:
        self.cache = None if self.cache is not None else x.detach().mean(0)
        self.queue = torch.cat([self.queue, x.detach()])
        return super().forward(x)


def test_buffers_may_come_and_go_and_grow() -> None:
    net = Caches()
    step = program(net, torch.optim.SGD(net.parameters(), lr=0.1))
    for i, there in zip(range(1, 4), itertools.cycle([True, False])):
        step.step((X, Y))
        assert (net.cache is not None) is there and len(net.queue) == i * len(X)


class Trains(Net):
    """Runs a backward pass of its own while it is run."""

    def forward(self, x: torch.Tensor) -> Any:
        found = super().forward(x)
        found.square().mean().backward(retain_graph=True)
        return found


def test_a_backward_pass_within_a_step_s_forward_pass_is_refused() -> None:
    net = Trains()
    step = program(net, torch.optim.SGD(net.parameters(), lr=0.1))
    with pytest.raises(CaptureError, match="backward pass within the forward pass"):
        step.step((X, Y))


def test_hooks_on_gradients_are_given_gradients_in_full() -> None:
    """Not a share of them, as a batch has in the global one."""
    net, seen = Net(), []
    net.last.bias.register_hook(lambda g: seen.append(g.clone()))
    step = program(net, torch.optim.SGD(net.parameters(), lr=0.1))
    step.step(micro_batches=[(X, Y), (X, Y)])
    assert len(seen) == 2 and torch.allclose(seen[0], seen[1])
    other = Net()
    F.mse_loss(other(X), Y).backward()
    assert other.last.bias.grad is not None and torch.allclose(seen[0], other.last.bias.grad, rtol=1e-12)


def test_steps_with_hooks_and_clipping_are_proved_by_gradients_as_they_count() -> None:
    net, other = Net(), Net()
    for model in (net, other):
        model.last.bias.register_hook(lambda g: 2 * g)
    step = program(net, torch.optim.SGD(net.parameters(), lr=0.1), clip_grad_norm=0.1)
    step.step(micro_batches=[(X[:1], Y[:1]), (X[1:], Y[1:])])
    F.mse_loss(other(X), Y).backward()
    torch.nn.utils.clip_grad_norm_(other.parameters(), 0.1)
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    for name, value in other.named_parameters():
        torch.testing.assert_close(net.get_parameter(name), value)


def test_a_parameter_of_one_number_in_16_bits_keeps_its_dtype_beside_hooks() -> None:
    """A share in 32 bits times a gradient without dimensions has 32 bits, which such a parameter does not take."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.last = nn.Linear(X.shape[1], Y.shape[1], dtype=X.dtype)
            self.scale = nn.Parameter(torch.tensor(0.5, dtype=torch.bfloat16))
            self.last.weight.register_hook(lambda g: None)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.mul(self.last(x), self.scale)

    net, other = Scaled(), Scaled()
    program(net, torch.optim.SGD(net.parameters(), lr=0.1)).step((X, Y))
    F.mse_loss(other(X), Y).backward()
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    for name, value in other.named_parameters():
        torch.testing.assert_close(net.get_parameter(name), value)


def test_a_plan_that_recomputes_runs_eagerly_without() -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    cluster = autopar.ClusterSpec.local(1)
    given = {"example_inputs": (X, Y), "loss_fn": F.mse_loss, "optimizer": optimizer, "capture": "never"}
    plan = autopar.plan(net, cluster, strategy="ddp", **given)  # type: ignore[arg-type]
    with pytest.warns(AutoparWarning, match="recompute='full'"):
        autopar.optimize(net, plan=plan.model_copy(update={"recompute": "full"}), **given).step((X, Y))  # type: ignore[call-overload]


def test_a_plan_is_made_with_the_optimizer_of_another_copy_as_for_captured_models() -> None:
    optimizer = torch.optim.SGD(Net().parameters(), lr=0.1)
    made = autopar.plan(
        Net(), autopar.ClusterSpec.local(2), example_inputs=(X, Y), loss_fn=F.mse_loss, optimizer=optimizer,
        strategy="ddp", capture="never",
    )  # fmt: skip
    assert {m.name for g in made.groups for m in g.members} == {n for n, _ in Net().named_parameters()}
