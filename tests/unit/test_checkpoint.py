"""Checkpoints in one process: checked as a whole before anything changes, and complete through dcp."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import autopar
from autopar.errors import SpecError
from autopar.runtime.optimizers.initial_state import initial_state
from autopar.runtime.program import Program
from tests.gloo.checkpoints import same

Make = Callable[[nn.Module], torch.optim.Optimizer]


class Net(nn.Module):
    """A linear layer, used twice, one of its kind that is frozen, a 0-dimensional factor, dropout."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.frozen, self.last = (nn.Linear(4, 4) for _ in range(3))
        self.last.weight = self.first.weight
        self.frozen.requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(1))
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.dropout(torch.tanh(self.frozen(self.first(x))))) * self.scale  # type: ignore[no-any-return]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def program_for(make: Make = adamw, model: nn.Module | None = None, **settings: Any) -> Program:
    model = model or Net()
    optimizer = make(model)
    settings = {"loss_fn": F.mse_loss, "example_inputs": batch(0), "optimizer": optimizer, **settings}
    program: Program = autopar.optimize(model, **settings)
    return program


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(5, 4, generator=generator), torch.randn(5, 4, generator=generator)


def trained(program: Program, steps: range) -> list[float]:
    return [float(program.step(batch(step))) for step in steps]


def eagerly(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        x, y = batch(step)
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


optim = torch.optim
KINDS: dict[str, Make] = {
    "SGD with momentum": lambda m: optim.SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True),
    "SGD": lambda m: optim.SGD(m.parameters(), lr=0.1),
    "Adam": lambda m: optim.Adam(m.parameters(), amsgrad=True),
    "Adagrad": lambda m: optim.Adagrad(m.parameters(), initial_accumulator_value=0.1),
    "NAdam": lambda m: optim.NAdam(m.parameters()),
    "RAdam": lambda m: optim.RAdam(m.parameters()),
    "RMSprop": lambda m: optim.RMSprop(m.parameters(), momentum=0.5, centered=True),
    "Adafactor": lambda m: optim.Adafactor(m.parameters()),
    "Rprop": lambda m: optim.Rprop(m.parameters()),
    "ASGD": lambda m: optim.ASGD(m.parameters()),
    "Adamax": lambda m: optim.Adamax(m.parameters()),
    "Adadelta": lambda m: optim.Adadelta(m.parameters()),
}


@pytest.mark.parametrize("name", KINDS)
def test_an_optimizers_initial_state_is_what_its_first_step_would_make(name: str) -> None:
    """Training from it is training from none; it has the keys, shapes and dtypes of the state after a step."""
    (without, plain), (given, with_state) = ((m, KINDS[name](m)) for m in (nn.Linear(4, 4), nn.Linear(4, 4)))
    given.load_state_dict(without.state_dict())
    for p in given.parameters():
        found = initial_state(with_state, with_state.param_groups[0], p)
        assert found is not None
        with_state.state[p] = found
    assert eagerly(without, plain, range(3)) == eagerly(given, with_state, range(3))
    for p in given.parameters():
        expected = initial_state(plain, plain.param_groups[0], p)
        assert expected is not None
        now = {k: (v.shape, v.dtype) for k, v in with_state.state[p].items()}
        assert now == {k: (v.shape, v.dtype) for k, v in expected.items()}


@pytest.fixture(scope="module")
def program() -> Program:
    return program_for()


@pytest.fixture(scope="module")
def state(program: Program) -> dict[str, Any]:
    trained(program, range(2))
    return copy.deepcopy(program.state_dict())


@pytest.mark.parametrize("name", ["SGD with momentum", "Adam", "Adagrad", "Adafactor"])
def test_dcp_brings_the_moments_into_a_fresh_program(name: str, tmp_path: Path) -> None:
    first = program_for(KINDS[name])
    trained(first, range(2))
    save(first.state_dict(), checkpoint_id=tmp_path, no_dist=True)
    losses = trained(first, range(2, 4))
    again = program_for(KINDS[name])
    loaded = again.state_dict()
    load(loaded, checkpoint_id=tmp_path, no_dist=True)
    again.load_state_dict(loaded)
    assert trained(again, range(2, 4)) == losses


def test_moments_that_dcp_could_not_bring_are_missed(tmp_path: Path) -> None:
    """With dampening, no state that loads as none does can be made before the first step."""
    first, again = (
        program_for(lambda m: optim.SGD(m.parameters(), lr=0.1, momentum=0.9, dampening=0.5)) for _ in range(2)
    )
    trained(first, range(2))
    save(first.state_dict(), checkpoint_id=tmp_path, no_dist=True)
    loaded = again.state_dict()
    load(loaded, checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(SpecError, match=r"'scale' was saved with 'momentum_buffer', which is missing here"):
        again.load_state_dict(loaded)


def test_a_fresh_checkpoint_trains_as_none_does_in_plain_pytorch_too() -> None:
    fresh = program_for().state_dict()
    (a, plain), (b, loaded) = ((m, adamw(m)) for m in (Net(), Net()))
    loaded.load_state_dict(fresh["optimizer"])
    for losses in zip(*(_seeded(m, o) for m, o in ((a, plain), (b, loaded))), strict=True):
        assert losses[0] == losses[1]


def _seeded(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    torch.manual_seed(1)
    return eagerly(model, optimizer, range(2))


def test_a_run_of_one_rank_goes_on_with_the_same_masks(program: Program, state: dict[str, Any]) -> None:
    program.load_state_dict(state)
    losses = trained(program, range(2, 4))
    program.load_state_dict(state)
    assert trained(program, range(2, 4)) == losses


def test_loading_a_fresh_checkpoint_forgets_the_moments(program: Program) -> None:
    program.load_state_dict(program_for().state_dict())
    assert all(float(s["step"]) == 0 for s in program.state_dict()["optimizer"]["state"].values())


def _moment(value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda s: s["optimizer"]["state"][2].update(exp_avg=value)


def _group(**settings: Any) -> Callable[[dict[str, Any]], None]:
    return lambda s: s["optimizer"]["param_groups"][0].update(settings)


NESTED: list[Any] = []
for _ in range(900):
    NESTED = [NESTED]

REFUSED: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "no model": (lambda s: s.pop("model"), "has no 'model' but 'optimizer'"),
    "no optimizer": (lambda s: s.pop("optimizer"), "has no 'optimizer'"),
    "no tensor's name": (lambda s: s["model"].pop("scale"), 'Missing key.* "scale"'),
    "another name": (lambda s: s["model"].update({"scales": s["model"].pop("scale")}), "did you mean 'scale'"),
    "ddp's names": (
        lambda s: s.update(model={f"module.{k}": v for k, v in s["model"].items()}),
        "as those of DistributedDataParallel do",
    ),
    "another shape": (
        lambda s: s["model"].update({"first.bias": torch.zeros(5)}),
        r"has shape \(5,\) for 'first.bias'; expected \(4,\)",
    ),
    "another dtype": (
        lambda s: s["model"].update({"first.bias": torch.zeros(4).double()}),
        "has dtype torch.float64 for 'first.bias'; expected torch.float32",
    ),
    "no tensor": (lambda s: s["model"].update({"first.bias": [0.0] * 4}), "has a list for 'first.bias'"),
    "a model that is a list": (lambda s: s.update(model=[]), "'model' is a list"),
    "a moment's shape": (_moment(torch.zeros(3)), r"'first.bias' has, as 'exp_avg', .* \(3,\); expected \(4,\)"),
    "a moment that is a list": (_moment([0.0] * 4), "'first.bias' has, as 'exp_avg', a list; expected a tensor"),
    "a moment that is a number": (_moment(0.0), "'exp_avg', a float; expected a tensor"),
    "a moment of whole numbers": (_moment(torch.zeros(4, dtype=torch.int64)), "'exp_avg', a tensor of torch.int64"),
    "no moment": (lambda s: s["optimizer"]["state"][2].pop("exp_avg_sq"), "'first.bias' was saved with 'exp_avg_sq'"),
    "no moment, as PyTorch writes it": (
        lambda s: (s.pop("held"), s["optimizer"]["state"][2].pop("exp_avg_sq")),
        "state of 'first.bias' has no 'exp_avg_sq'",
    ),
    "a state that is a list": (lambda s: s["optimizer"]["state"].update({2: []}), "of 'first.bias' is a list"),
    "states that are a list": (lambda s: s["optimizer"].update(state=[]), r"optimizer.state is a list"),
    "a state of no parameter": (lambda s: s["optimizer"]["state"].update({99: {}}), "state for parameter 99"),
    "a state by name": (lambda s: s["optimizer"]["state"].update(x={}), "has the key 'x'; expected numbers"),
    "two groups": (
        lambda s: s["optimizer"]["param_groups"].append({"params": [], "lr": 1.0}),
        "has 2 parameter groups, this one has 1",
    ),
    "fewer parameters": (
        lambda s: (s.pop("held"), s["optimizer"]["param_groups"][0]["params"].pop()),
        "has groups of 5 parameters, this one of 6",
    ),
    "no parameters": (lambda s: s["optimizer"]["param_groups"][0].pop("params"), "no list of numbers as 'params'"),
    "a learning rate that is text": (_group(lr="0.1"), "has '0.1' for 'lr'; expected a number"),
    "betas that are one": (_group(betas=0.9), "'betas'; expected 2 values"),
    "a switch that is text": (_group(fused="yes"), "has 'yes' for 'fused'; expected True or False"),
    "a switch that is a number": (_group(foreach=1), "has '1' for 'foreach'; expected True or False"),
    "a setting that is nested too deep": (_group(notes=NESTED), "cannot be read: RecursionError"),
    "another optimizer": (
        lambda s: s["optimizer"].update(
            state={}, param_groups=optim.SGD([torch.zeros(1) for _ in range(6)]).state_dict()["param_groups"]
        ),
        "it is not of AdamW",
    ),
    "a random stream": (lambda s: s.update(random=[["abc"]]), "'random' holds text that is no state"),
    "another random stream": (lambda s: s.update(random=[["AAAA"]]), "'random' holds no state"),
    "random numbers": (lambda s: s.update(random=3), "'random' is a int"),
    "names of no use": (lambda s: s.update(held="[]"), "'held' is not as"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_fit_is_refused_before_anything_changes(
    program: Program, state: dict[str, Any], what: str
) -> None:
    change, said = REFUSED[what]
    wrong = copy.deepcopy(state)
    for value in wrong["model"].values():
        value += 1  # so that a part that was loaded would show
    change(wrong)
    before = copy.deepcopy(program.state_dict())
    with pytest.raises(SpecError, match=said):
        program.load_state_dict(wrong)
    assert same(program.state_dict(), before)


@pytest.mark.parametrize("what", [None, [], "checkpoint", 3])
def test_what_is_no_checkpoint(program: Program, what: Any) -> None:
    with pytest.raises(SpecError, match="expected the dict of program"):
        program.load_state_dict(what)


def test_plain_pytorchs_state_loads_and_the_other_way_round(program: Program, state: dict[str, Any]) -> None:
    model = Net()
    optimizer = adamw(model)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    program.load_state_dict({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    torch.manual_seed(1)
    losses = trained(program, range(2))
    torch.manual_seed(1)
    assert losses == pytest.approx(eagerly(model, optimizer, range(2)), rel=1e-6)


def test_a_step_that_is_a_number_becomes_a_tensor(program: Program, state: dict[str, Any]) -> None:
    """As PyTorch wrote it before 1.12."""
    older = copy.deepcopy(state)
    for values in older["optimizer"]["state"].values():
        values["step"] = int(values["step"])
    program.load_state_dict(older)
    torch.testing.assert_close(program.state_dict()["optimizer"], state["optimizer"], rtol=0, atol=0)


def test_groups_in_another_order_keep_their_settings_and_moments() -> None:
    """Both groups have tensors of the same shapes, so that only names tell them apart."""

    def made(order: int) -> tuple[nn.Module, Program]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        groups: list[dict[str, Any]] = [
            {"params": model[0].parameters()},
            {"params": model[1].parameters(), "lr": 0.5},
        ]
        return model, program_for(lambda m: torch.optim.AdamW(groups[::order], lr=0.01), model)

    (_, first), (_, other) = made(1), made(-1)
    trained(first, range(2))
    other.load_state_dict(copy.deepcopy(first.state_dict()))
    assert [g["lr"] for g in other.optimizer.param_groups] == [0.5, 0.01]
    assert trained(other, range(2, 4)) == trained(first, range(2, 4))


def test_parameters_in_other_groups_are_refused() -> None:
    def made(split: int) -> Program:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        own = list(model.parameters())
        return program_for(lambda m: torch.optim.SGD([{"params": own[:split]}, {"params": own[split:]}], lr=0.1), model)

    with pytest.raises(SpecError, match=r"parameter '1.weight' .* group 0 .* build the optimizer with the same groups"):
        made(2).load_state_dict(made(3).state_dict())


class Counting(torch.optim.SGD):
    """Keeps what is no tensor beside its momentum."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                seen = self.state[p].get("seen", (0, "none"))[0]
                self.state[p]["seen"] = (seen + 1, "some")
                self.state[p]["history"] = [1, 2]


def test_states_that_are_no_tensors_come_back_as_they_were() -> None:
    first, again = (
        program_for(lambda m: Counting(m.parameters(), lr=0.1, momentum=0.9), optimizer_acts_on="element")
        for _ in range(2)
    )
    trained(first, range(2))
    again.load_state_dict(copy.deepcopy(first.state_dict()))
    torch.manual_seed(0)
    losses = trained(again, range(1))
    torch.manual_seed(0)
    assert losses == trained(first, range(1))
    seen = [s["seen"] for s in again.optimizer.state.values() if "seen" in s]
    assert seen and set(seen) == {(3, "some")}


def test_the_state_of_a_parameter_that_is_frozen_now_is_kept() -> None:
    model = Net()
    optimizer = adamw(model)
    eagerly(model, optimizer, range(1))
    model.first.bias.requires_grad_(False)
    program = program_for(lambda m: optimizer, model)
    trained(program, range(1))
    saved = copy.deepcopy(program.state_dict())
    steps = [float(saved["optimizer"]["state"][i]["step"]) for i in (1, 2)]
    assert steps == [2.0, 1.0]
    program.load_state_dict(saved)
    torch.testing.assert_close(program.state_dict()["optimizer"], saved["optimizer"], rtol=0, atol=0)


class Centers(nn.Module):
    """A loss with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.center = nn.Parameter(torch.ones(4))

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return ((output - target - self.center) ** 2).mean()


def test_a_loss_with_parameters_is_saved_too() -> None:
    def made() -> Program:
        model, loss = nn.Linear(4, 4), Centers()
        own = [*model.parameters(), *loss.parameters()]
        return program_for(lambda m: torch.optim.Adam(own, lr=0.1), model, loss_fn=loss)

    first, again = made(), made()
    trained(first, range(2))
    saved = copy.deepcopy(first.state_dict())
    again.load_state_dict(saved)
    assert trained(again, range(2, 4)) == trained(first, range(2, 4))
    del saved["loss_fn"]
    with pytest.raises(SpecError, match="the loss function has parameters"):
        again.load_state_dict(saved)


def test_the_drop_in_module_is_unchanged_by_what_does_not_fit() -> None:
    model = Net()
    module = autopar.optimize(model, example_inputs=batch(0)[0])
    before = copy.deepcopy(module.state_dict())
    wrong = {k: torch.zeros_like(v) for k, v in before.items()}
    wrong["scale"] = torch.zeros(2)
    with pytest.raises(SpecError, match=r"has shape \(2,\) for 'scale'; expected \(1,\)"):
        module.load_state_dict(wrong)
    with pytest.raises(SpecError, match="scale"):
        module.load_state_dict({k: v for k, v in wrong.items() if k != "scale"})
    torch.testing.assert_close(module.state_dict(), before, rtol=0, atol=0)
    module.load_state_dict({k: v.double() for k, v in before.items()})  # as PyTorch converts
    module.load_state_dict({"first.bias": before["first.bias"]}, strict=False)
