"""What is said of models that cannot be captured; and what, of a model, only looks at values, and is left out."""

from __future__ import annotations

import inspect
import logging
import math
import random
import sys
import time
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import autopar
from autopar.errors import AutoparWarning, CaptureError, SignatureError

log = logging.getLogger(__name__)
X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


class Model(nn.Linear):
    """A linear layer; `looked_at` is what is tried."""

    def __init__(self) -> None:
        super().__init__(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return self.looked_at(y, x).mean()

    def looked_at(self, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return y


def program(model: nn.Module, batch: Any = X) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return autopar.optimize(model, optimizer=optimizer, example_inputs=batch, capture="always")


class Branch(Model):
    def looked_at(self, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        if y.sum() > 0:  # HERE
            y = y * 2
        return y


class Item(Model):
    def looked_at(self, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return y * math.cos(y.mean().item())  # HERE


class Mask(Model):
    def looked_at(self, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return y[x > 0]  # HERE


class Caught(Model):
    """A check whose failure decides what is computed: no mere observation."""

    def looked_at(self, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        try:
            if y.sum() > 0:  # HERE
                raise ValueError
        except ValueError:
            y = y * 2
        return y


class Elsewhere(Model):
    def looked_at(self, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return y * time.perf_counter()  # HERE


class Draws(Model):
    def looked_at(self, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return y * random.random()  # HERE


class DrawsAnInteger(Model):
    def looked_at(self, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return y * random.randint(1, 9)  # HERE


class DrawsFromItsOwn(Model):
    generator = random.Random(3)

    def looked_at(self, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return y * self.generator.uniform(1, 9)  # HERE


class Shuffles(Model):
    def looked_at(self, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        order = list(range(len(y)))
        random.shuffle(order)  # HERE
        return y * torch.tensor(order)[:, None]


class DrawsWithNumPy(Model):
    def looked_at(self, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return y * torch.from_numpy(np.random.normal(size=(len(y), 1))).float()  # HERE


class Raises(Model):
    def looked_at(self, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("of my own")  # HERE


class Mismatch(Model):
    def looked_at(self, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return y.view(-1, 5)  # HERE


class FreezesLate(Model):
    def looked_at(self, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return y * x.requires_grad_()  # HERE


@pytest.mark.parametrize(
    ("kind", "cause", "remedy"),
    [
        (Branch, "a branch depends on a tensor's value", "torch.where"),
        (Item, "a number of Python's", "pass it in the batch"),
        (Mask, "the shape of a result depends on a tensor's values", "x[mask]"),
        (Caught, "a branch depends on a tensor's value", "torch.where"),
        (Elsewhere, "it calls time.perf_counter", "Call it before the step"),
        (Draws, "it calls Random.random", "Draw with torch.rand"),
        (DrawsAnInteger, "it calls Random.randint", "Draw with torch.rand"),
        (DrawsFromItsOwn, "it calls Random.uniform", "Draw with torch.rand"),
        (Shuffles, "it calls Random.shuffle", "Draw with torch.rand"),
        (DrawsWithNumPy, "normal, whose numbers differ in every step", "Draw with torch.rand"),
        (Raises, "it raised RuntimeError('of my own')", "The model itself"),
        (Mismatch, "is invalid for input of size 24", "run model(batch)"),
        (FreezesLate, "sets requires_grad", "detach()"),
    ],
)
def test_a_refusal_has_the_cause_the_line_and_what_to_do(kind: type[Model], cause: str, remedy: str) -> None:
    with pytest.raises(CaptureError) as e:
        program(kind())
    lines, first = inspect.getsourcelines(kind)
    number = next(i for i, line in enumerate(lines) if "# HERE" in line)
    why, where, what_to_do = str(e.value).splitlines()
    assert cause in why
    assert where.startswith(f"  at {__file__}:{first + number}, in looked_at: {lines[number].strip()}")
    assert remedy in what_to_do


def test_keys_that_forward_does_not_take_are_named() -> None:
    model = program(Model(), {"x": X})
    with pytest.raises(SignatureError, match=r"Model.forward\(x: .* takes no 'index', 'name', which the batch holds"):
        model.step({"x": X, "index": torch.arange(4), "name": "a"})
    with pytest.raises(SignatureError, match=r"this batch: too many positional arguments.*a tuple of one, \(batch,\)"):
        model.step((X, X))
    with pytest.raises(SignatureError, match="takes no 'y'"):
        program(Model(), {"y": X})


def test_a_parameter_that_is_written_to_is_named() -> None:
    class Bounded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(4, 3, max_norm=0.5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.table(x)
            return y.mean()

    with pytest.raises(CaptureError, match=r"writes to its parameter 'table.weight'.*max_norm.*between steps"):
        program(Bounded(), torch.tensor([0, 1]))


class Prints(Model):
    def looked_at(self, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        print("mean", y.mean(), f"{y.std():.3f}", x.shape)
        return y


class Writes(Model):
    def looked_at(self, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        sys.stderr.write(f"{y.mean().item()}")
        return y


class Warns(Model):
    def looked_at(self, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        warnings.warn("never mind", stacklevel=1)
        return y


class Logs(Model):
    def looked_at(self, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        logging.error("mean %s", y.mean().item())
        return y


class Asserts(Model):
    def looked_at(self, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        assert not torch.isnan(y).any(), f"nan in {y}"
        assert y.abs().max().item() < 1e6
        return y


class Checks(Model):
    def looked_at(self, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        if not torch.isfinite(y).all():
            print("bad", x)
            raise ValueError(f"no number in {y}")
        elif x.dim() == 2:
            y = y * 2
        return y


class InALoop(Model):
    """In a function within a function, whose variables are of the one around it."""

    def looked_at(self, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        def checked(factor: float) -> torch.Tensor:
            if torch.isnan(y).any().item():
                raise ValueError(f"{x}")
            return y * factor

        return sum((checked(f) for f in (1.0, 2.0)), torch.zeros(()))


@pytest.mark.filterwarnings("default:never mind")
@pytest.mark.parametrize(
    ("kind", "statement"),
    [
        (Prints, 'print("mean"'),
        (Writes, "sys.stderr.write"),
        (Warns, 'warnings.warn("never mind"'),
        (Logs, 'logging.error("mean'),
        (Asserts, "assert not torch.isnan"),
        (Checks, "if not torch.isfinite"),
        (InALoop, "if torch.isnan"),
    ],
)
def test_what_only_looks_is_left_out_of_the_step_and_told_of(kind: type[Model], statement: str) -> None:
    eager, model = kind(), kind()
    model.load_state_dict(eager.state_dict())
    code = kind.looked_at.__code__
    with pytest.warns(AutoparWarning) as told:
        made = program(model)
    assert f"in {'checked' if kind is InALoop else 'looked_at'}: {statement}" in str(told[0].message)
    assert __file__ in str(told[0].message)
    assert kind.looked_at.__code__ is code, "the model is as it was"
    expected = eager(X)
    expected.backward()
    assert float(made.step(X)) == pytest.approx(float(expected.detach()))
    for a, b in zip(model.parameters(), eager.parameters(), strict=True):
        assert b.grad is not None
        assert torch.allclose(a, b - 0.1 * b.grad)


def test_log_calls_that_can_be_traced_are_not_worth_a_word() -> None:
    class Quiet(Model):
        def looked_at(self, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            log.info("mean %s", y.mean())
            return y

    program(Quiet()).step(X)
