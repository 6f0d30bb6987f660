"""Steps under the caller's autocast: what was captured is not cast again, and weights that were updated are."""

from __future__ import annotations

import copy
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopar


class Island(nn.Module):
    """Computes a part in float32 whatever autocast says, as rotary angles and losses are."""

    def __init__(self, through_parameters: bool) -> None:
        super().__init__()
        self.through_parameters = through_parameters
        self.a, self.b, self.c = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)
        self.register_buffer("turns", torch.arange(16.0).outer(torch.arange(1.0, 17.0)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        with torch.autocast("cpu", enabled=False):
            if self.through_parameters:
                h = torch.tanh(self.b(h.float()))
            else:  # what no gradient comes to
                turns: Any = self.turns
                angle = turns[:4] @ torch.eye(16).mul(1.001)
                h = h.float() * torch.cos(angle[: len(h)])
        scores: torch.Tensor = self.c(h if self.through_parameters else self.b(h))
        return scores


def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output.float(), target)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    return torch.randn(4, 8, generator=draw), torch.randn(4, 4, generator=draw)


def autocast(dtype: torch.dtype) -> Any:
    return torch.autocast("cpu", dtype)


def eager_losses(model: nn.Module, dtype: torch.dtype, steps: int, lr: float) -> list[float]:
    """Each step in an autocast of its own, behind which the backward pass comes."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    x, y = batch()
    losses = []
    for _ in range(steps):
        with autocast(dtype):
            loss = loss_fn(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("through_parameters", [True, False])
@pytest.mark.parametrize("capture", ["always", "never"])
def test_a_part_in_float32_stays_so(capture: Literal["always", "never"], through_parameters: bool) -> None:
    torch.manual_seed(0)
    model = Island(through_parameters)
    expected = eager_losses(model, torch.bfloat16, 3, 0.1)
    with autocast(torch.bfloat16):
        program = autopar.optimize(
            model,
            example_inputs=batch(),
            loss_fn=loss_fn,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            capture=capture,
        )
        found = [float(program.step(batch())) for _ in range(3)]
    assert found == pytest.approx(expected, rel=1e-6)


def test_a_part_in_float32_stays_so_in_a_drop_in() -> None:
    torch.manual_seed(0)
    model = Island(through_parameters=True)
    alone = copy.deepcopy(model)
    x, y = batch()
    with autocast(torch.bfloat16):
        synced = autopar.optimize(model, example_inputs=(x,))
        ours, theirs = loss_fn(synced(x), y), loss_fn(alone(x), y)
    ours.backward()
    theirs.backward()
    assert float(ours.detach()) == pytest.approx(float(theirs.detach()), rel=1e-6)
    for mine, other in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("capture", ["always", "never"])
def test_each_step_casts_the_weights_as_they_are(capture: Literal["always", "never"], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 4))
    expected = eager_losses(model, dtype, 6, 0.2)
    with autocast(dtype):  # one around the whole loop: its cache of cast weights outlives a step
        program = autopar.optimize(
            model,
            example_inputs=batch(),
            loss_fn=loss_fn,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.2),
            loss_scale=torch.amp.GradScaler("cpu", init_scale=256.0) if dtype is torch.float16 else None,
            capture=capture,
        )
        found = [float(program.step(batch())) for _ in range(6)]
    assert found == pytest.approx(expected, rel=2e-2)
    assert found[-1] < 0.8 * found[0]


class EndsInFloat32(nn.Module):
    """All of its products are in float32, whatever autocast says."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.c = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            scores: torch.Tensor = self.c(torch.tanh(self.a(x.float())))
        return scores


@pytest.mark.parametrize("capture", ["always", "never"])
@pytest.mark.parametrize("is_step", [True, False])
def test_a_float32_region_has_float32_gradients(is_step: bool, capture: Literal["always", "never"]) -> None:
    torch.manual_seed(0)
    model = EndsInFloat32()
    expected = eager_losses(model, torch.bfloat16, 3, 0.5)
    x, y = batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    if is_step:
        with autocast(torch.bfloat16):
            program = autopar.optimize(
                model, example_inputs=(x, y), loss_fn=loss_fn, optimizer=optimizer, capture=capture, strategy="ddp"
            )
            losses = [float(program.step((x, y))) for _ in range(3)]
    else:
        with autocast(torch.bfloat16):
            module = autopar.optimize(model, example_inputs=x, capture=capture, strategy="ddp")
        losses = []
        for _ in range(3):
            with autocast(torch.bfloat16):
                loss = loss_fn(module(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    assert losses == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("capture", ["always", "never"])
def test_a_scale_that_float16_does_not_hold_skips_the_step(
    capture: Literal["always", "never"], monkeypatch: pytest.MonkeyPatch
) -> None:
    full = torch.full

    def as_on_gpus(shape: Any, value: float, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if abs(value) > torch.finfo(dtype).max:
            raise RuntimeError(f"value cannot be converted to type {dtype} without overflow")
        return full(shape, value, dtype=dtype, device=device)

    x, y = batch()
    model = nn.Linear(8, 4)
    optimizer, before = torch.optim.SGD(model.parameters(), lr=0.1), model.weight.detach().clone()
    settings: dict[str, Any] = {"example_inputs": (x, y), "loss_fn": lambda o, t: (o - t.to(o)).mean()}
    with autocast(torch.float16):
        program: Any = autopar.optimize(
            model, optimizer=optimizer, capture=capture, loss_scale="dynamic", check="never", **settings
        )
        monkeypatch.setattr(torch, "full", as_on_gpus)
        assert program.step((x, y)).dtype is torch.float16
        assert torch.equal(model.weight, before) and program.loss_scaler.get_scale() == 2**15
        program.step((x, y))
    assert not torch.equal(model.weight, before)
