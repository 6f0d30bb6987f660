"""Models and batches that PyTorch trains and few write: each trains as in eager PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar.errors import AutoparWarning
from autopar.ir.batch import flatten
from tests.unit.as_eager import train


class Calls(nn.Module):
    """A linear layer from 6 to `width`, and a function of what it returns."""

    def __init__(self, function: Callable[..., torch.Tensor], width: int = 6) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, width)
        self.function = function

    def forward(self, x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        return self.function(self.layer(x), *others)


def inputs(count: int = 3, *shape: int) -> list[torch.Tensor]:
    return [torch.randn(*(shape or (4, 6)), generator=torch.Generator().manual_seed(i)) for i in range(count)]


def test_a_tensor_that_stands_twice_in_the_first_batch_need_not_in_the_next() -> None:
    """As `labels=input_ids` in the example."""
    a, b, c = inputs()
    train(Calls(lambda y, target: (y - target).pow(2).mean()), [(a, a), (b, c), (c, c)])


def test_tensors_that_share_memory_in_the_first_batch_need_not_in_the_next() -> None:
    a, b, c = inputs(3, 5, 6)
    train(Calls(lambda y, target: (y - target).pow(2).mean()), [(a[:4], a[1:]), (b[:4], c[:4])])


def in_many_layouts(x: torch.Tensor) -> list[torch.Tensor]:
    """The same values: contiguous, transposed, sliced out of a larger tensor, every other one of it."""
    wide = torch.cat([x, x], -1)
    return [x, x.transpose(0, 1).contiguous().transpose(0, 1), wide[..., : x.shape[-1]], torch.stack([x, x], 1)[:, 0]]


class Scaled(nn.Module):
    """By a number in the batch, whose type it looks at."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, by: Any) -> torch.Tensor:
        factor = {bool: 2.0, int: 3.0, float: 4.0}[type(by)]
        scaled: torch.Tensor = self.layer(x) * factor + math.copysign(0.5, by)
        return scaled.pow(2).mean()


@pytest.mark.parametrize("numbers", [(True, 1, 1.0), (0.0, -0.0)])
def test_numbers_that_python_calls_equal_are_others(numbers: tuple[Any, ...]) -> None:
    train(Scaled(), list(zip(inputs(), numbers, strict=False)))


@pytest.mark.parametrize("first", range(4))
def test_batches_of_other_strides(first: int) -> None:
    layouts = [y for x in inputs(2, 2, 4, 6) for y in in_many_layouts(x)]
    expanded = inputs(1, 1, 4, 6)[0].expand(2, 4, 6)
    train(Calls(lambda y: y.view(-1, 3).pow(2).mean()), [layouts[first], *layouts, expanded])


def test_an_expanded_tensor_comes_first() -> None:
    train(Calls(lambda y: y.pow(2).mean()), [inputs(1, 1, 6)[0].expand(4, 6), *inputs()])


def test_few_layouts_are_captured_and_a_dimension_of_one_makes_no_further() -> None:
    x = torch.zeros(2, 1, 3, 3)
    keys = {flatten(y).signature for y in (x, x.to(memory_format=torch.channels_last), x.expand(2, 1, 3, 3))}
    assert len(keys) == 1
    assert len({flatten(torch.zeros(4, n)[:, :3]).signature for n in (3, 5, 7)}) == 1


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("model_is_last", [True, False])
def test_channels_last(channels: int, model_is_last: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(channels, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 1), nn.Flatten())
    if model_is_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    images = [
        x if i % 2 else x.to(memory_format=torch.channels_last) for i, x in enumerate(inputs(4, 2, channels, 4, 4))
    ]
    train(model, [(x, torch.tensor([1, 40])) for x in images], F.cross_entropy)


@pytest.mark.parametrize("affine", [True, False])
def test_batch_normalization_that_averages_over_all_batches(affine: bool) -> None:
    def made() -> nn.Module:
        torch.manual_seed(0)
        kinds = (nn.BatchNorm1d(6, momentum=None, affine=affine), nn.BatchNorm1d(6, momentum=0.3))
        model = nn.Sequential(nn.Linear(6, 6), kinds[0], nn.Linear(6, 6), kinds[1], nn.BatchNorm1d(6, momentum=None))
        model[4].eval()  # as a frozen layer is
        return model

    batches = [(x, x.roll(1, 0)) for x in inputs(4)]
    model = made()
    train(model, batches, F.mse_loss)
    module = autopar.optimize(made(), example_inputs=batches[0][0])
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for x, y in batches:
        optimizer.zero_grad()
        F.mse_loss(module(x), y).backward()
        optimizer.step()
    for (name, a), b in zip(module.state_dict().items(), model.state_dict().values(), strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-6), name
    assert len(list(module.program._compiled)) == 1, "what it rests on is found unchanged"


class Odd(nn.Module):
    """Parameters that are a single number, that have no rows, that are not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(6, 6), nn.Parameter(torch.tensor(0.3))
        self.no_rows, self.no_columns = nn.Parameter(torch.zeros(0, 6)), nn.Parameter(torch.zeros(4, 0))
        self.turned, self.every_other = nn.Parameter(torch.eye(6, 7).t()), nn.Parameter(torch.zeros(14)[::2])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x) * self.scale.exp() + self.no_rows.sum(0) + self.no_columns.sum()
        return (F.linear(y, self.turned) + self.every_other).pow(2).mean()


@pytest.mark.parametrize("settings", [{}, {"optimizer": torch.optim.AdamW}], ids=["sgd", "adamw"])
def test_odd_parameters(settings: dict[str, Any]) -> None:
    train(Odd(), inputs(), **settings)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (nn.LSTM, {}),
        (nn.LSTM, {"bidirectional": True, "num_layers": 2}),
        (nn.LSTM, {"batch_first": True, "bias": False}),
        (nn.LSTM, {"proj_size": 3}),
        (nn.GRU, {"bidirectional": True}),
        (nn.RNN, {"num_layers": 2}),
    ],
)
def test_recurrent_layers(kind: Any, settings: dict[str, Any]) -> None:
    torch.manual_seed(0)

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = kind(6, 5, **settings)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.layer(x)[0]
            return y.pow(2).mean()

    train(Recurrent(), inputs(3, 3, 2, 6))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_lstm_layers_train_in_16_bits_on_any_cpu(dtype: torch.dtype) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.LSTM(6, 5, num_layers=2, bidirectional=True).to(dtype)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = self.layers(x)[0].pow(2).mean()
            return loss

    eager, model, (x,) = Recurrent(), Recurrent(), inputs(1, 3, 2, 6)
    x = x.to(dtype)
    program = autopar.optimize(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), example_inputs=x)
    assert float(program.step(x)) == pytest.approx(float(eager(x).detach()), rel=0.02)


def test_recurrent_layers_take_batches_of_no_samples() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.LSTM(6, 5, num_layers=2, bidirectional=True, batch_first=True)
            self.head = nn.Parameter(torch.ones(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = self.layers(x)[0].sum() + self.head.square().sum()
            return loss

    eager, model, x = Recurrent(), Recurrent(), torch.zeros(0, 3, 6)
    program = autopar.optimize(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), example_inputs=x)
    assert float(program.step(x)) == pytest.approx(float(eager(x).detach()))
    eager(x).backward()
    for p, trained in zip(eager.parameters(), model.parameters(), strict=True):
        assert p.grad is not None
        torch.testing.assert_close(trained, p - 0.1 * p.grad)


@pytest.mark.parametrize(("kind", "bidirectional"), [(nn.LSTM, True), (nn.GRU, False), (nn.RNN, False)])
def test_dropout_between_recurrent_layers_draws_as_in_eager_training(kind: Any, bidirectional: bool) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = kind(6, 5, num_layers=3, dropout=0.5, bidirectional=bidirectional, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y, last = self.layers(x)
            loss: torch.Tensor = y.pow(2).mean() + (last if isinstance(last, torch.Tensor) else last[0]).sum()
            return loss

    eager, model, (x,) = Recurrent(), Recurrent(), inputs(1, 3, 2, 6)
    program = autopar.optimize(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), example_inputs=x)
    torch.manual_seed(3)
    loss = program.step(x)
    torch.manual_seed(3)
    assert float(loss) == pytest.approx(float(eager(x).detach()))


def test_a_random_operator_whose_result_nobody_reads_draws_all_the_same() -> None:
    def loss(y: torch.Tensor) -> torch.Tensor:
        F.dropout(y, 0.5)
        return F.dropout(y, 0.5).pow(2).mean()

    eager, model, (x,) = Calls(loss), Calls(loss), inputs(1)
    program = autopar.optimize(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), example_inputs=x)
    torch.manual_seed(3)
    found = program.step(x)
    torch.manual_seed(3)
    assert float(found) == pytest.approx(float(eager(x).detach()))


@dataclass(frozen=True)
class Output:
    loss: torch.Tensor
    scores: list[torch.Tensor]
    name: str = "mine"


def test_outputs_that_are_dataclasses() -> None:
    class Model(Calls):
        def forward(self, x: torch.Tensor, *others: torch.Tensor) -> Any:
            y = self.layer(x)
            return Output(y.pow(2).mean(), [y, y + 1])

    (x,) = inputs(1)
    model = Model(torch.abs)
    expected = model(x)
    found = autopar.optimize(model, example_inputs=x)(x)
    assert (type(found), found.name) == (Output, "mine")
    assert torch.allclose(found.loss, expected.loss)
    assert torch.allclose(found.scores[1], expected.scores[1])
    found.loss.backward()
    gradient = model.layer.weight.grad
    assert gradient is not None
    program = autopar.optimize(model, example_inputs=x, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    before = model.layer.weight.detach().clone()
    assert float(program.step(x)) == pytest.approx(float(expected.loss.detach()))
    assert torch.allclose(model.layer.weight, before - 0.1 * gradient)


def test_a_transformer_with_a_causal_mask() -> None:
    class Decodes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.Transformer(6, 2, 1, 1, 12, 0.0, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
            y: torch.Tensor = self.layers(x, x, tgt_mask=mask, src_mask=mask)
            return y.pow(3).mean()

    train(Decodes(), inputs(2, 2, 4, 6))


def test_distributions_are_captured_without_their_checks_and_that_is_said() -> None:
    def loss(y: torch.Tensor) -> torch.Tensor:
        mine, other = torch.distributions.Normal(y, 1.0), torch.distributions.Normal(torch.zeros(()), 2.0)
        return torch.distributions.kl_divergence(mine, other).mean()

    model, (x,) = Calls(loss), inputs(1)
    with pytest.warns(autopar.AutoparWarning, match="does not check the parameters of torch.distributions"):
        train(model, [x])
    with pytest.raises(ValueError, match="Expected parameter scale"):
        torch.distributions.Normal(0.0, -1.0)


def positive(y: torch.Tensor) -> torch.Tensor:
    a = y.view(-1, 3, 3)
    return a @ a.mT + torch.eye(3)


@pytest.mark.parametrize(
    "function",
    [
        torch.linalg.inv,
        torch.linalg.cholesky,
        lambda a: torch.linalg.solve(a, torch.ones(4, 3, 1)),
        torch.linalg.slogdet,
        lambda a: torch.linalg.eigh(a)[0],
    ],
    ids=["inv", "cholesky", "solve", "slogdet", "eigh"],
)
def test_linear_algebra(function: Callable[[torch.Tensor], Any]) -> None:
    def loss(y: torch.Tensor) -> torch.Tensor:
        found = function(positive(y))
        return (found if isinstance(found, torch.Tensor) else found[1]).pow(2).mean()

    train(Calls(loss, 9), inputs())


def test_a_singular_matrix_is_told_of_in_the_step() -> None:
    model = Calls(lambda y: torch.linalg.inv(y.view(-1, 3, 3)).mean(), 9)
    good, _ = inputs(2)
    program = autopar.optimize(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0), example_inputs=good)
    program.step(good)
    with torch.no_grad():
        model.layer.weight.zero_()
        model.layer.bias.zero_()
    with pytest.raises(RuntimeError, match="singular"):
        program.step(good)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_parameters(dtype: torch.dtype) -> None:
    class Complex(Calls):
        def __init__(self) -> None:
            super().__init__(lambda y: (y.to(dtype) @ self.weight).abs().pow(2).mean())
            self.weight = nn.Parameter(torch.randn(6, 6, dtype=dtype))

        def __deepcopy__(self, memo: Any) -> Complex:  # the function is bound to its model
            other = Complex()
            other.load_state_dict(self.state_dict())
            return other

    train(Complex(), inputs(), None, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))


@pytest.mark.parametrize("mode", ["weight_norm", "spectral_norm", "householder", "cayley", "matrix_exp"])
def test_parametrizations(mode: str) -> None:
    torch.manual_seed(0)
    known = nn.utils.parametrizations
    made = getattr(known, mode, partial(known.orthogonal, orthogonal_map=mode))
    layer = made(nn.Linear(6, 6))
    train(nn.Sequential(layer, nn.Linear(6, 1), nn.Flatten(0)), [(x, x[:, 0]) for x in inputs()], F.mse_loss)


def test_measured_compute_of_a_model_with_constants(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path))
    constant = torch.arange(6.0)
    for _ in range(2):  # the second time, all operators are known
        train(Calls(lambda y: (y * constant * torch.tensor([2.0])).pow(2).mean()), inputs(), measure_compute=True)


def test_an_operator_that_tracing_computes_otherwise_runs_eagerly() -> None:
    """`multilabel_margin_loss` is taken apart into operators that give 5.99 for 1.01."""
    x = torch.randn(5, 4, dtype=torch.float64)
    labels = torch.tensor([[0, 2, -1, 1], [1, -1, 0, 0], [3, 1, 0, -1], [2, -1, -1, -1], [0, 1, 2, 3]])
    net, plain = (nn.Linear(4, 4, dtype=torch.float64) for _ in range(2))
    plain.load_state_dict(net.state_dict())
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (net, plain)]
    with pytest.warns(AutoparWarning, match="other numbers for 'multilabel_margin_loss'"):
        program = autopar.optimize(
            net, example_inputs=(x, labels), loss_fn=F.multilabel_margin_loss, optimizer=optimizers[0]
        )
    for _ in range(3):
        loss = F.multilabel_margin_loss(plain(x), labels)
        optimizers[1].zero_grad()
        loss.backward()
        optimizers[1].step()
        assert program.step((x, labels)).item() == pytest.approx(loss.item(), rel=1e-12)
    torch.testing.assert_close(net.weight, plain.weight)
