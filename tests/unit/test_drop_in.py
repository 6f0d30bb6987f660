"""The drop-in module within a larger computation: what comes before it, and what cannot be differentiated again."""

from __future__ import annotations

import copy
import enum
import functools
import gc
import io
import warnings
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar.errors import AutoparWarning, CaptureError, SignatureError

X, Y = torch.randn(5, 4, dtype=torch.float64), torch.randn(5, 2, dtype=torch.float64)


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2)).double()


def test_what_comes_before_gets_its_gradient() -> None:
    """An encoder, a generator, a soft prompt."""
    net, before = _net(), nn.Linear(4, 3).double()
    eager, eager_before = copy.deepcopy(net), copy.deepcopy(before)
    module = autopar.optimize(net, example_inputs=torch.zeros(5, 3, dtype=torch.float64))
    F.mse_loss(module(before(X)), Y).backward()
    F.mse_loss(eager(eager_before(X)), Y).backward()
    for mine, theirs in ((net, eager), (before, eager_before)):
        for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
            assert a.grad is not None and b.grad is not None and torch.allclose(a.grad, b.grad, rtol=1e-12)
    with torch.no_grad():  # and one whose input needs none
        module(before(X))
    F.mse_loss(module(before(X).detach()), Y).backward()


def test_the_capture_of_optimize_serves_the_first_batch() -> None:
    module = autopar.optimize(_net(), example_inputs=torch.zeros(5, 3, dtype=torch.float64))
    module(X[:, :3])
    assert len(list(module.program._compiled)) == 1
    module(X[:, :3].clone().requires_grad_())  # its gradient is another output
    assert len(list(module.program._compiled)) == 2


def test_two_calls_in_a_step_may_differ_in_size() -> None:
    """The second one is captured, and proved on perturbed parameters, while the first one waits for its backward."""
    net = _net()
    eager = copy.deepcopy(net)
    module = autopar.optimize(net, example_inputs=torch.zeros(5, 3, dtype=torch.float64))
    for model in (module, eager):
        (model(X[:, :3]).sum() * model(X[:2, :3]).square().sum()).backward()
    for a, b in zip(net.parameters(), eager.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None and torch.allclose(a.grad, b.grad, rtol=1e-12)


class Slopes(nn.Module):
    """Takes derivatives within its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.net = _net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = torch.func.vmap(torch.func.grad(lambda v: self.net(v).sum()))(x)
        scores: torch.Tensor = self.net(x)
        return found + scores[:, :1]


def test_a_model_with_derivatives_of_its_own_is_compared() -> None:
    net = Slopes()
    eager = copy.deepcopy(net)
    module = autopar.optimize(net, example_inputs=X[:, :3], capture="always")
    for model in (module, eager):
        model(X[:, :3]).square().sum().backward()
    for a, b in zip(net.parameters(), eager.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None and torch.allclose(a.grad, b.grad, rtol=1e-12)


class ScaledLoss(nn.Module):
    """A loss with a parameter of its own, which a drop-in module does not see."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.scale * F.mse_loss(output, target)


def test_a_plan_for_a_drop_in_module_leaves_the_loss_out() -> None:
    """Planned with the target and the loss, as a factory of the command line gives them."""
    one, x = autopar.ClusterSpec.local(1), X[:, :3]
    plan = autopar.plan(_net(), one, example_inputs=(x, Y), loss_fn=ScaledLoss(), mode="module")
    assert plan.model == autopar.plan(_net(), one, example_inputs=x, mode="module").model
    autopar.optimize(_net(), one, example_inputs=x, plan=plan)(x)
    with pytest.raises(SignatureError, match="this one has 3 elements"):
        autopar.plan(_net(), one, example_inputs=(x, Y, Y), loss_fn=F.mse_loss, mode="module")


def test_a_second_derivative_is_refused() -> None:
    module = autopar.optimize(_net(), example_inputs=torch.zeros(5, 3, dtype=torch.float64))
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    with pytest.raises(CaptureError, match=r"create_graph=True.*module\.module"):
        torch.autograd.grad(module(x).sum(), x, create_graph=True)


def test_a_wrapped_model_is_refused() -> None:
    module = autopar.optimize(_net(), example_inputs=torch.zeros(5, 3, dtype=torch.float64))
    with pytest.raises(CaptureError, match=r"wrapped in SyncedModule.*model\.module"):
        autopar.optimize(module, example_inputs=torch.zeros(5, 3, dtype=torch.float64))


class Looking(nn.Module):
    """Checks and prints values on its way, and counts its calls, all of which is no part of the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.net = _net()
        self.calls = nn.Buffer(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        self.calls.add_(1)
        found = self.net(x)
        assert (found < 1e9).all()
        print(f"mean {found.mean().item()}")
        return {"mean": found.mean(), "found": found}


@pytest.mark.filterwarnings("ignore:this statement looks at a tensor's value")
def test_a_model_that_looks_at_values_on_its_way_returns_its_output() -> None:
    """There are no fake values to look at, where the output's form is found out."""
    model = Looking()
    eager = copy.deepcopy(model)
    module = autopar.optimize(model, example_inputs=X[:, :3], capture="always")
    assert model.calls == 0
    found, expected = module(X[:, :3]), eager(X[:, :3])
    assert found.keys() == expected.keys() and all(torch.equal(found[k], expected[k]) for k in found)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    program = autopar.optimize(
        model,
        example_inputs=(X[:, :3], Y),
        loss_fn=lambda out, y: F.mse_loss(out["found"], y),
        optimizer=optimizer,
        outputs=True,
        capture="always",
    )
    result = program.step((X[:, :3], Y), outputs=True)
    assert isinstance(result, autopar.StepResult)
    assert torch.equal(result.output["found"], eager(X[:, :3])["found"])


@functools.lru_cache
def _table(length: int) -> torch.Tensor:
    return torch.arange(length, dtype=torch.float64)


class Tabled(nn.Module):
    """Keeps a table outside of itself, as diffusers' Qwen-Image does with its rotary positions."""

    def __init__(self) -> None:
        super().__init__()
        self.net = _net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.net(x + _table(x.shape[-1]))
        return found


def test_cached_results_of_functions_have_values() -> None:
    model = Tabled()
    module = autopar.optimize(model, example_inputs=X[:, :3], check="never")
    assert _table(3).tolist() == [0, 1, 2]
    assert torch.equal(module(X[:, :3]), model(X[:, :3]))


@pytest.mark.parametrize("capture", ["auto", "never"])
def test_copies_are_models_of_their_own(capture: Literal["auto", "never"]) -> None:
    module = autopar.optimize(_net(), example_inputs=X[:, :3], capture=capture)
    deep, shallow = copy.deepcopy(module), copy.copy(module)
    assert deep.plan == module.plan and shallow.module is module.module
    for made, shared in ((deep, False), (shallow, True), (copy.deepcopy(deep), False)):
        module.zero_grad()
        F.mse_loss(made(X[:, :3]), Y).backward()
        expected = [p.grad for p in made.parameters()]
        assert all((p.grad is not None) is shared for p in module.parameters())
        module.zero_grad()
        F.mse_loss(module(X[:, :3]), Y).backward()
        for a, p in zip(expected, module.parameters(), strict=True):
            assert a is not None and p.grad is not None and torch.equal(a, p.grad)


@pytest.mark.parametrize("capture", ["auto", "never"])
def test_a_copy_that_is_frozen_at_first_trains_later(capture: Literal["auto", "never"]) -> None:
    made = copy.deepcopy(autopar.optimize(_net(), example_inputs=X[:, :3], capture=capture))
    made.requires_grad_(False)
    assert not made(X[:, :3]).requires_grad
    if capture == "auto":
        with pytest.raises(CaptureError, match="a copy has no graph yet: it captures the first batch"):
            _ = made.program.graph
    made.requires_grad_(True)
    made(X[:, :3]).sum().backward()
    assert all(p.grad is not None for p in made.parameters())
    assert len(made.program.graph.parameters) == len(list(made.parameters()))


def test_a_shallow_copy_loads_state_once_the_first_is_gone() -> None:
    whole = nn.ModuleList([copy.copy(autopar.optimize(_net(), example_inputs=X[:, :3]))])
    gc.collect()
    whole.load_state_dict(whole.state_dict())


def test_a_module_is_not_pickled() -> None:
    module = autopar.optimize(_net(), example_inputs=X[:, :3])
    with pytest.raises(CaptureError, match=r"module\.module"):
        torch.save(module, io.BytesIO())


class Holds(nn.Module):
    """Has parameters `weight` and `module.weight`, of one shape."""

    def __init__(self) -> None:
        super().__init__()
        self.module, self.weight = nn.Linear(3, 3), nn.Parameter(torch.ones(3, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.module(x) @ self.weight
        return scores


class Kind(enum.Enum):
    ONE = 1


class Beside(nn.Module):
    """Returns an object beside its scores."""

    def __init__(self, made: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.net, self.made = _net(), made

    def forward(self, x: torch.Tensor) -> Any:
        scores = self.net(x)
        return scores, self.made(scores)


def _distribution(scores: torch.Tensor) -> torch.distributions.Normal:
    return torch.distributions.Normal(scores, 1.0, validate_args=False)


def test_an_object_in_the_output_is_the_models_own() -> None:
    """A graph sees no tensors in it: the model runs eagerly."""
    plain = Beside(lambda scores: (Kind.ONE, scores.dtype, range(2)))
    module = autopar.optimize(plain, example_inputs=X[:, :3], capture="always")
    assert module(X[:, :3])[1] == (Kind.ONE, torch.float64, range(2))
    for made in (_distribution, lambda scores: {scores, 1}):
        with pytest.warns(AutoparWarning, match=r"(?s)(returns an object of type|it calls 'set').* runs eagerly"):
            module = autopar.optimize(Beside(made), example_inputs=X[:, :3])
        scores, other = module(X[:, :3])
        assert isinstance(other, type(made(scores)))


@pytest.mark.parametrize("make", [_net, Holds])
def test_what_was_saved_within_ddp_is_loaded(make: Any) -> None:
    net = make().double()
    module = autopar.optimize(net, example_inputs=X[:, :3])
    saved = {f"module.{name}": value + 1 for name, value in net.state_dict().items()}
    for strict in (True, False):
        for p in net.parameters():
            p.data.zero_()
        found = module.load_state_dict(saved, strict)
        assert not found.missing_keys and not found.unexpected_keys
        assert all(torch.equal(value, saved[f"module.{name}"]) for name, value in net.state_dict().items())


@pytest.mark.parametrize("make", [_net, Holds])
@pytest.mark.parametrize("within_ddp", [False, True])
def test_a_module_that_holds_a_drop_in_loads_what_it_has_saved(make: Any, within_ddp: bool) -> None:
    net = make().double()
    whole = nn.ModuleDict({"a": autopar.optimize(net, example_inputs=X[:, :3]), "b": nn.Linear(2, 2).double()})
    saved = {name: value + 1 for name, value in whole.state_dict().items()}
    names = {name: f"a.module.{name[2:]}" if within_ddp and name[0] == "a" else name for name in saved}
    whole.load_state_dict({names[name]: value for name, value in saved.items()})
    assert all(torch.equal(value, saved[name]) for name, value in whole.state_dict().items())
    with pytest.raises(RuntimeError, match="Unexpected"):
        whole.load_state_dict({**saved, "a.other": X})


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("capture", ["auto", "never"])
def test_what_is_made_where_nothing_is_recorded_is_trained_outside_of_it(mode: Any, capture: Any) -> None:
    net = _net()
    eager = copy.deepcopy(net)
    with mode(), warnings.catch_warnings():
        warnings.simplefilter("error", autopar.AutoparWarning)
        module = autopar.optimize(net, example_inputs=X[:, :3].clone(), capture=capture)
        assert not torch.is_grad_enabled()
    for model in (module, eager):
        model(X[:, :3]).square().sum().backward()
    for a, b in zip(net.parameters(), eager.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None and torch.allclose(a.grad, b.grad, rtol=1e-12)


def test_a_model_of_tensors_that_autograd_does_not_take_is_refused_by_name() -> None:
    with torch.inference_mode():
        net = nn.Linear(3, 2)
    with pytest.raises(CaptureError, match=r"'weight' was made within torch\.inference_mode\(\).*outside of it"):
        autopar.optimize(net, example_inputs=torch.zeros(5, 3))


def test_a_lazy_module_without_shapes_is_refused_by_name() -> None:
    with pytest.raises(CaptureError, match=r"'weight' has no shape yet.*run the model once"):
        autopar.optimize(nn.LazyLinear(2), example_inputs=torch.zeros(5, 3))


class Adapts(nn.Linear):
    """Takes gradients in its forward pass, as one that adapts its weights to the batch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (slope,) = torch.autograd.grad(super().forward(x).square().mean(), self.weight, create_graph=True)
        return x @ (self.weight - 0.1 * slope).T


def test_a_model_that_takes_gradients_in_its_forward_pass_is_captured() -> None:
    net = Adapts(3, 2, bias=False)
    eager, x = copy.deepcopy(net), torch.randn(5, 3)
    module = autopar.optimize(net, example_inputs=x, capture="always")
    for model in (module, eager):
        model(x).square().sum().backward()
    torch.testing.assert_close(net.weight.grad, eager.weight.grad)


class Tells(nn.Linear):
    """Gives more where gradients are recorded."""

    def forward(self, x: torch.Tensor) -> Any:
        found = super().forward(x)
        return {"scores": found, "penalty": found.square()} if found.requires_grad else found


def test_an_output_has_the_form_that_it_has_where_gradients_are_recorded() -> None:
    net, x = Tells(3, 2), torch.randn(5, 3)
    assert {*autopar.optimize(net, example_inputs=x, capture="always")(x)} == {"scores", "penalty"}


@pytest.mark.parametrize("around", ["module", "function", "step"])
@pytest.mark.parametrize("capture", ["always", "never"])
def test_what_is_compiled_around_it_breaks_there(around: str, capture: Any) -> None:
    """The first call captures and proves, of which TorchDynamo traces nothing."""
    net, x = _net(), X[:, :3]
    eager = copy.deepcopy(net)
    torch._dynamo.reset()
    if around == "step":
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        settings: dict[str, Any] = {"loss_fn": F.mse_loss, "optimizer": optimizer, "capture": capture}
        program = autopar.optimize(net, example_inputs=(x, Y), **settings)
        train = torch.compile(lambda: program.step((x, Y)), backend="eager")
    else:
        module = autopar.optimize(net, example_inputs=x, capture=capture)
        called = torch.compile(module, backend="eager") if around == "module" else module

        def plain() -> torch.Tensor:
            return F.mse_loss(called(x), Y)

        train = plain if around == "module" else torch.compile(plain, backend="eager")
    for _ in range(2):
        loss, expected = train(), F.mse_loss(eager(x), Y)
        assert torch.allclose(loss, expected, rtol=1e-12)
        torch.autograd.backward(expected)
        if around == "step":
            with torch.no_grad():
                for p in eager.parameters():
                    assert p.grad is not None
                    p.sub_(p.grad)
                    p.grad = None
        else:
            loss.backward()
    if around != "step":
        for a, b in zip(net.parameters(), eager.parameters(), strict=True):
            assert a.grad is not None and b.grad is not None and torch.allclose(a.grad, b.grad, rtol=1e-12)
