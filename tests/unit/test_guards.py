"""What Python held at capture, and no longer holds: captured again, taken over, or refused by name."""

from __future__ import annotations

import copy
import sys
import types
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar.errors import AutoparWarning, CaptureError, OptimizerError, PlanMismatchError

FACTOR = 1.0


class _Net(nn.Module):
    times = 1.0
    shift: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(3, 5), nn.Linear(5, 2)
        self.drop = nn.Dropout(0.0)
        self.scale = 1.0
        self.settings = {"power": 1.0}
        self.register_buffer("shift", torch.zeros(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x)) * self.scale * FACTOR * self.settings["power"] + self.shift
        scores: torch.Tensor = self.last(self.drop(hidden)) * self.times + torch.ones(2)
        return scores


class _Annealed:
    weight = 1.0

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.weight * F.mse_loss(output, target)


X, Y = torch.randn(4, 3, dtype=torch.float64), torch.randn(4, 2, dtype=torch.float64)


class _Pair:
    """A program and the same training, eagerly."""

    def __init__(self, net: nn.Module | None = None, **settings: Any) -> None:
        self.net = (net or _Net()).double()
        self.eager = copy.deepcopy(self.net)
        self.loss = settings.pop("loss_fn", _Annealed())
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.other = torch.optim.SGD(self.eager.parameters(), lr=0.1)
        settings = {"strategy": "ddp", "capture": "always", **settings}
        self.program = autopar.optimize(
            self.net, optimizer=self.optimizer, loss_fn=self.loss, example_inputs=(X, Y), **settings
        )

    def step(self) -> None:
        """A step of both, which must be equal."""
        torch.manual_seed(0)
        loss = self.program.step((X, Y))
        self.other.zero_grad()
        torch.manual_seed(0)
        expected = self.loss(self.eager(X), Y)
        expected.backward()
        self.other.step()
        assert torch.allclose(loss, expected, rtol=1e-12)
        for a, b in zip(self.net.parameters(), self.eager.parameters(), strict=True):
            assert torch.allclose(a, b, rtol=1e-12)


@pytest.mark.parametrize(
    "what", ["attribute", "element", "class", "global", "loss", "probability", "buffer", "mode", "default dtype"]
)
def test_what_changes_is_seen(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = _Pair()
    pair.step()
    for value in (0.5, 2.0):
        if what == "global":
            monkeypatch.setitem(globals(), "FACTOR", value)
        elif what == "class":
            monkeypatch.setattr(_Net, "times", value)
        elif what == "default dtype":
            torch.set_default_dtype(torch.float64 if value < 1 else torch.float32)
        elif what == "loss":
            pair.loss.weight = value
        for net in (pair.net, pair.eager):
            assert isinstance(net, _Net)
            if what == "attribute":
                net.scale = value
            elif what == "element":
                net.settings["power"] = value
            elif what == "buffer":
                net.shift = torch.full((5,), value, dtype=torch.float64)
            elif what == "probability":
                net.drop.p = value / 4
            elif what == "mode":
                net.drop.train(value > 1)
        pair.step()


class _Reads(_Net):
    """What it computes tells apart what is equal to Python."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value = self.value
        if isinstance(value, frozenset):
            (value,) = value
        if isinstance(value, tuple):
            return super().forward(x * (2 if value[0] is True else 1))
        return super().forward(x + torch.atan2(torch.zeros(()), torch.full((), value)))


@pytest.mark.parametrize(("before", "after"), [((1, 2), (True, 2)), (0.0, -0.0), (frozenset({0.0}), frozenset({-0.0}))])
def test_what_changes_into_what_is_equal_to_python_is_seen(before: Any, after: Any) -> None:
    pair = _Pair(_Reads(before))
    for value in (before, after, before):
        pair.net.value = pair.eager.value = value
        pair.step()
    assert len(list(pair.program._compiled)) == 2


def test_a_method_that_a_class_is_given_is_captured() -> None:
    class Sub(_Net):
        pass

    pair = _Pair(Sub())
    pair.step()
    Sub.forward = lambda self, x: 3 * _Net.forward(self, x)  # type: ignore[method-assign]
    pair.step()


def test_a_write_to_the_batch_through_dropout_without_effect_is_refused_or_warned_of() -> None:
    # Up to PyTorch 2.13 the trace takes what dropout returns for a new tensor; later ones show the write, as they do
    # where the model writes to its batch directly.
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop, self.last = nn.Dropout(0.0), nn.Linear(3, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.last(self.drop(x).mul_(2.0))
            return found

    batch = X.clone(), Y
    net = Writes().double()
    with warnings.catch_warnings(), pytest.raises((CaptureError, AutoparWarning), match="tensor 0 of the batch"):
        warnings.simplefilter("error", AutoparWarning)
        autopar.optimize(
            net,
            optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
            loss_fn=F.mse_loss,
            example_inputs=batch,
            strategy="ddp",
        ).step(batch)
    assert torch.equal(batch[0], X)


def test_what_holds_again_is_not_captured_again() -> None:
    pair = _Pair()
    assert isinstance(pair.net, _Net) and isinstance(pair.eager, _Net)
    for value in (1.0, 0.5) * 5:
        pair.net.scale = pair.eager.scale = value
        pair.step()
    assert len(list(pair.program._compiled)) == 2


def test_what_changes_at_every_step_is_named() -> None:
    pair = _Pair()
    assert isinstance(pair.net, _Net)
    with pytest.raises(CaptureError, match=r"model\.scale == .*test_guards\.py:\d+ in forward"):
        for step in range(9):
            pair.net.scale = 1.0 + step
            pair.program.step((X, Y))


def test_a_counter_in_forward_is_refused_and_left_as_it_was() -> None:
    class Counts(_Net):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return super().forward(x) * (1.0 if self.calls < 3 else 2.0)

    net = Counts()
    with pytest.raises(CaptureError, match=r"'model\.calls' from 0 to 1.*buffer"):
        _Pair(net)
    assert net.calls == 0


def test_what_settles_is_captured() -> None:
    class Caches(_Net):
        longest = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if len(x) > self.longest:
                self.longest = len(x)
            return super().forward(x)

    _Pair(Caches()).step()


def test_a_lost_effect_is_said_once() -> None:
    class Keeps(_Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen = super().forward(x)
            return self.seen

    with pytest.warns(autopar.AutoparWarning, match=r"'model\.seen'") as said:
        pair = _Pair(Keeps())
        pair.step()
    assert len(said) == 1


@pytest.mark.parametrize("at_first", [True, False])
def test_what_is_trained_may_not_change(at_first: bool) -> None:
    net = _Net()
    net.first.bias.requires_grad_(at_first)
    pair = _Pair(net)
    net.first.bias.requires_grad_(not at_first)
    with pytest.raises(PlanMismatchError, match=r"'first\.bias' was (trained|frozen).*optimize again"):
        pair.program.step((X, Y))


def test_replaced_parameters_are_refused() -> None:
    pair = _Pair()
    assert isinstance(pair.net, _Net)
    pair.net.last.weight = nn.Parameter(torch.zeros(2, 5, dtype=torch.float64))
    with pytest.raises(PlanMismatchError, match=r"'last\.weight' was replaced"):
        pair.program.step((X, Y))


def _gradient_hook(net: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return next(net.parameters()).register_hook(lambda g: 2 * g)


def _accumulation_hook(net: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return next(net.parameters()).register_post_accumulate_grad_hook(lambda p: None)


def _optimizer_hook(net: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return optimizer.register_step_pre_hook(lambda *_: None)


@pytest.mark.parametrize("hang", [_gradient_hook, _accumulation_hook, _optimizer_hook])
def test_hooks_that_would_not_run_are_refused(hang: Any) -> None:
    pair = _Pair()
    handle = hang(pair.net, pair.optimizer)
    with pytest.raises(OptimizerError, match="hook"):
        pair.program.step((X, Y))
    handle.remove()
    pair.step()
    hang(pair.net, pair.optimizer)
    with pytest.raises(OptimizerError, match="hook"):
        autopar.optimize(
            pair.net, optimizer=pair.optimizer, loss_fn=F.mse_loss, example_inputs=(X, Y), capture="always"
        )


@pytest.mark.parametrize("entry", ["step", "module"])
def test_forward_hooks_that_come_and_go_are_captured(entry: str) -> None:
    net = _Net().double()
    eager = copy.deepcopy(net)
    module = autopar.optimize(net, example_inputs=X) if entry == "module" else None
    pair = None if module is not None else _Pair(net)
    handles: list[Any] = []
    for step in range(4):
        if step == 1:
            for one in (net, eager) if pair is None else (net, pair.eager):
                assert isinstance(one, _Net)
                handles.append(one.first.register_forward_hook(lambda m, i, o: 2 * o))
        elif step == 3:
            for handle in handles:
                handle.remove()
        if pair is not None:
            pair.step()
        else:
            assert module is not None
            assert torch.allclose(module(X), eager(X)), step
    programs = module.program if module is not None else pair.program  # type: ignore[union-attr]
    assert len(list(programs._compiled)) == 2


def test_a_hook_for_all_modules_is_refused_by_name() -> None:
    pair = _Pair()
    handle = torch.nn.modules.module.register_module_forward_hook(lambda m, i, o: None)
    try:
        with pytest.raises(CaptureError, match="registered for all modules"):
            pair.program.step((X, Y))
    finally:
        handle.remove()
    pair.step()


def test_a_step_of_the_optimizer_that_was_replaced_is_refused() -> None:
    pair = _Pair()
    torch.optim.lr_scheduler.ConstantLR(pair.optimizer)
    pair.program.step((X, Y))
    step = pair.optimizer.step
    pair.optimizer.step = lambda *args, **settings: step(*args, **settings)  # type: ignore[method-assign]
    with pytest.raises(OptimizerError, match=r"step\(\) was replaced"):
        pair.program.step((X, Y))


def test_memory_that_two_parameters_come_to_share_is_refused() -> None:
    pair = _Pair()
    pair.step()
    assert isinstance(pair.net, _Net)
    pair.net.last.bias.data = pair.net.last.bias.data.clone()
    pair.step()
    assert isinstance(pair.net, _Net)
    pair.net.last.bias.data = pair.net.first.bias.data[1:3]
    with pytest.raises(OptimizerError, match=r"'first\.bias' and 'last\.bias' share memory"):
        pair.program.step((X, Y))


def test_a_write_to_a_tensor_that_is_no_buffer_is_refused_with_what_to_do() -> None:
    class Counts(_Net):
        def __init__(self) -> None:
            super().__init__()
            self.mean = torch.zeros(3, dtype=torch.float64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.mean.mul_(0.9).add_(x.detach().mean(0))
            return super().forward(x - self.mean)

    with pytest.raises(CaptureError, match=r"neither a parameter nor a buffer[\s\S]*register_buffer"):
        _Pair(Counts())


def test_memory_shared_by_two_parameters_is_refused() -> None:
    first, last = nn.Linear(3, 5).double(), nn.Linear(5, 3).double()
    last.weight.data = first.weight.data.view(3, 5)
    net = nn.Sequential(first, last)
    with pytest.raises(OptimizerError, match=r"'0\.weight' and '1\.weight' share memory"):
        autopar.optimize(
            net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), loss_fn=F.mse_loss, example_inputs=(X, X)
        )
    module = autopar.optimize(net, example_inputs=X)
    module(X).sum().backward()


def test_float16_autocast_without_loss_scaling_is_said() -> None:
    pair = _Pair()
    with torch.autocast("cpu", torch.float16), pytest.warns(autopar.AutoparWarning, match="scales no loss"):
        pair.program.step((X, Y))


def test_a_batch_that_requires_a_gradient_is_refused() -> None:
    pair = _Pair()
    with pytest.raises(autopar.AutoparError, match="requires a gradient"):
        pair.program.step((X.clone().requires_grad_(), Y))


def test_globals_of_a_package_whose_name_begins_as_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    package = types.ModuleType("autopar_plugin")
    exec("SCALE = 1.0\ndef scaled(x):\n    return SCALE * x", vars(package))
    monkeypatch.setitem(sys.modules, "autopar_plugin", package)

    class Plugged(_Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scores: torch.Tensor = package.scaled(super().forward(x))
            return scores

    pair = _Pair(Plugged())
    for scale in (1.0, 3.0):
        monkeypatch.setattr(package, "SCALE", scale)
        pair.step()
