"""Tensors that Python holds outside of parameters and buffers: replaced between steps, and left behind by `forward`."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune

import autopar
from autopar.errors import AutoparError, CaptureError

FACTOR = torch.ones(2, dtype=torch.float64)
X, Y = torch.randn(4, 3, dtype=torch.float64), torch.randn(4, 2, dtype=torch.float64)


class _Held(nn.Module):
    """Tensors in an attribute, a list, an array, and another module that is not registered."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 2)
        self.scale = torch.ones(2, dtype=torch.float64)
        self.several = [torch.ones(2, dtype=torch.float64)]
        self.array = np.ones(2)
        self.teacher = [nn.Linear(3, 2).double()]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.layer(x) * self.scale * self.several[0] * torch.from_numpy(self.array) * FACTOR
        known: torch.Tensor = self.teacher[0](x)
        return scores - known.detach()


class _Weighted:
    weight = torch.ones(2, dtype=torch.float64)

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.weight * output, target)


@pytest.mark.parametrize("what", ["attribute", "element", "array", "other module", "global", "loss"])
def test_a_tensor_that_is_replaced_is_seen(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    net, loss_fn = _Held().double(), _Weighted()
    eager = copy.deepcopy(net)
    optimizers = [torch.optim.SGD(n.parameters(), lr=0.1) for n in (net, eager)]
    program = autopar.optimize(net, optimizer=optimizers[0], loss_fn=loss_fn, example_inputs=(X, Y))
    new = torch.tensor([0.5, 2.0], dtype=torch.float64)
    for step in range(3):
        if step == 1 and what == "global":
            monkeypatch.setitem(globals(), "FACTOR", new)
        elif step == 1 and what == "loss":
            loss_fn.weight = new
        for held in (net, eager) if step == 1 else ():
            if what == "attribute":
                held.scale = new
            elif what == "element":
                held.several[0] = new
            elif what == "array":
                held.array = new.numpy()
            elif what == "other module":
                held.teacher[0] = nn.Linear(3, 2, bias=False).double().requires_grad_(False)
                held.teacher[0].weight.fill_(0.5)
        loss = program.step((X, Y))
        optimizers[1].zero_grad()
        expected = loss_fn(eager(X), Y)
        expected.backward()
        optimizers[1].step()
        assert torch.allclose(loss, expected, rtol=1e-12), step
    assert len(list(program._compiled)) == 2


class _Keeps(nn.Module):
    """Leaves something behind for the next batch."""

    def __init__(self, keep: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.keep = keep
        self.last: Any = None
        self.by_name: dict[str, torch.Tensor] = {}
        self.latest: deque[torch.Tensor] = deque(maxlen=4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.keep(self, self.layer(x))


def _adds_the_last(net: _Keeps, h: torch.Tensor) -> torch.Tensor:
    found = h if net.last is None else h + net.last
    net.last = found.detach()
    return found


def _adds_by_name(net: _Keeps, h: torch.Tensor) -> torch.Tensor:
    found = h + net.by_name["last"] if "last" in net.by_name else h
    net.by_name["last"] = found.detach()
    return found


def _begins(net: Any, h: torch.Tensor) -> torch.Tensor:
    if not hasattr(net, "has_begun"):
        net.has_begun = True
        return 2 * h
    return h


def _averages(net: _Keeps, h: torch.Tensor) -> torch.Tensor:
    """The first value begins the mean, so that the same batch again changes nothing."""
    now = h.detach().mean()
    net.last = now if net.last is None else 0.9 * net.last + 0.1 * now
    found: torch.Tensor = h - net.last
    return found


def _draws_once(net: _Keeps, h: torch.Tensor) -> torch.Tensor:
    if net.last is None:
        net.last = torch.rand(2)
    found: torch.Tensor = h * net.last
    return found


def _averages_the_latest(net: _Keeps, h: torch.Tensor) -> torch.Tensor:
    net.latest.append(h.detach().mean())
    return h - torch.stack(list(net.latest)).mean()


def _caches(net: _Keeps, h: torch.Tensor) -> torch.Tensor:
    if net.last is None:
        net.last = net.by_name["last"] = torch.arange(2.0)
    found: torch.Tensor = h + net.last
    return found


def _trained(
    keep: Callable[[Any, torch.Tensor], torch.Tensor],
    entry: str,
    capture: Any = "auto",
    register: Mapping[str, nn.Parameter] = MappingProxyType({}),
) -> _Keeps:
    torch.manual_seed(0)
    net, x, y = _Keeps(keep), X.float(), Y.float()
    for name, parameter in register.items():
        net.register_parameter(name, parameter)
    if entry == "module":
        autopar.optimize(net, example_inputs=x, capture=capture)(x).sum().backward()
    else:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        program = autopar.optimize(net, optimizer=optimizer, loss_fn=F.mse_loss, example_inputs=(x, y), capture=capture)
        for _ in range(6):
            program.step((x, y))
    return net


@pytest.mark.parametrize("entry", ["step", "module"])
@pytest.mark.parametrize(
    ("keep", "name"),
    [
        (_adds_the_last, "model.last"),
        (_adds_by_name, "model.by_name"),
        (_begins, "model.has_begun"),
        (_averages, "model.last"),
        (_draws_once, "model.last"),
        (_averages_the_latest, "model.latest"),
    ],
)
def test_what_forward_leaves_for_its_next_run_is_there_as_the_model_runs_eagerly(
    keep: Any, name: str, entry: str
) -> None:
    said = f"changes '{name}', and the next time it computes something else[^$]*So the model runs eagerly"
    with pytest.warns(autopar.AutoparWarning, match=said):
        net = _trained(keep, entry)
    torch.manual_seed(0)
    other, x, y = _Keeps(keep), X.float(), Y.float()
    if entry == "module":
        other(x).sum().backward()
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(net.parameters(), other.parameters(), strict=True))  # type: ignore[arg-type]
        return
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    for _ in range(6):
        optimizer.zero_grad()
        F.mse_loss(other(x), y).backward()
        optimizer.step()
    assert all(torch.allclose(a, b) for a, b in zip(net.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("entry", ["step", "module"])
def test_what_forward_leaves_is_refused_where_a_graph_must_be_had(entry: str) -> None:
    with (
        pytest.warns(autopar.AutoparWarning, match="sets or changes"),
        pytest.raises(CaptureError, match=r"changes 'model\.last', and the next time it computes something else"),
    ):
        _trained(_adds_the_last, entry, capture="always")


@pytest.mark.parametrize("entry", ["step", "module"])
def test_what_forward_keeps_to_compute_the_same_faster_is_not(entry: str) -> None:
    with pytest.warns(autopar.AutoparWarning, match="sets or changes 'model.last'"):
        net = _trained(_caches, entry)
    assert net.last is None and not net.by_name, "nothing is left behind, fake tensors least of all"


@pytest.mark.parametrize("entry", ["step", "module"])
def test_weights_of_8_bits_do_not_stop_the_look_at_what_is_left_behind(entry: str) -> None:
    weight = nn.Parameter(torch.eye(2).to(torch.float8_e4m3fn), requires_grad=False)

    def keeps(net: _Keeps, h: torch.Tensor) -> torch.Tensor:
        net.last = h.detach()
        return h @ net.get_parameter("weight").float()

    with pytest.warns(autopar.AutoparWarning, match="sets or changes 'model.last'"):
        net = _trained(keeps, entry, register={"weight": weight})
    assert net.last is None


@pytest.mark.parametrize("capture", ["auto", "always"])
def test_a_tensor_that_is_replaced_at_every_step_is_named_and_the_model_runs_eagerly(capture: Any) -> None:
    net = _Held().double()
    other = copy.deepcopy(net)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (net, other)]
    program = autopar.optimize(net, optimizer=optimizers[0], loss_fn=F.mse_loss, example_inputs=(X, Y), capture=capture)

    def train() -> None:
        for step in range(6):
            net.scale = net.scale * (1 + 0.1 * step)
            other.scale = other.scale * (1 + 0.1 * step)
            loss = program.step((X, Y))
            optimizers[1].zero_grad()
            expected = F.mse_loss(other(X), Y)
            expected.backward()
            optimizers[1].step()
            torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=0)

    named = r"'model\.scale is the same object' held at capture"
    if capture == "always":
        with pytest.raises(AutoparError, match=named):
            train()
    else:
        with pytest.warns(autopar.AutoparWarning, match=f"{named}[^$]*So the model runs eagerly on such batches"):
            train()


@pytest.mark.parametrize("entry", ["step", "module"])
def test_a_model_that_is_pruned_further_in_training_is_pruned_by_its_newest_weights(entry: str) -> None:
    """PyTorch's pruning reads what the last forward pass has set: captured, it pruned by the weights at the start."""
    x, y = torch.randn(8, 4), torch.randn(8, 3)
    pruned: list[nn.Module] = []
    for trained_by in (entry, "plain"):
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        prune.l1_unstructured(model, "weight", 0.25)
        optimizer, run = torch.optim.SGD(model.parameters(), lr=1.0), model
        if trained_by != "plain":
            with pytest.warns(autopar.AutoparWarning, match="the model is pruned by torch.nn.utils.prune"):
                of_step = {"optimizer": optimizer, "loss_fn": F.mse_loss} if entry == "step" else {}
                inputs = (x, y) if entry == "step" else x
                run = autopar.optimize(model, example_inputs=inputs, strategy="ddp", **of_step)  # type: ignore[call-overload]
        for step in range(6):
            if step == 3:
                prune.l1_unstructured(model, "weight", 0.5)
            if trained_by == "step":
                run.step((x, y))  # type: ignore[operator]
                continue
            optimizer.zero_grad()
            F.mse_loss(run(x), y).backward()
            optimizer.step()
        pruned.append(model)
    found, expected = (m.state_dict() for m in pruned)
    assert torch.equal(found["weight_mask"], expected["weight_mask"])
    torch.testing.assert_close(found, expected)
