"""The signatures of `plan` and `optimize`, as type checkers, editors and Python see them. mypy reads this file, too."""

from __future__ import annotations

import inspect
from typing import Any, assert_type, get_overloads

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import SpecError

X = torch.randn(5, 3)
ONLY_OF_STEPS = {"budget", "loss_fn", "late_parameters", "optimizer_acts_on", "loss_scale", "pad"}


def test_what_optimize_returns() -> None:
    net = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    program = autopar.optimize(net, example_inputs=(X, X[:, :2]), loss_fn=nn.MSELoss(), optimizer=optimizer)
    assert isinstance(assert_type(program, autopar.Program), autopar.Program)
    assert_type(program.step((X, X[:, :2])), torch.Tensor)
    module = autopar.optimize(net, example_inputs=X)
    assert isinstance(assert_type(module, autopar.SyncedModule), nn.Module)


def the_types(model: nn.Module, optimizer: torch.optim.Optimizer, either: torch.optim.Optimizer | None) -> None:
    """Is not run: what mypy says of it is the test. An `ignore` that nothing needs is an error of mypy's."""
    assert_type(autopar.plan(model, autopar.ClusterSpec.local(2), mode="module"), autopar.Plan)
    assert_type(autopar.optimize(model, optimizer=either), autopar.Program | autopar.SyncedModule)
    autopar.optimize(model, optimizer=optimizer, check="always", fidelity="rounded", unused_parameters="freeze")
    autopar.optimize(model, optimizer=optimizer, stratgy="ddp")  # type: ignore[call-overload]
    autopar.optimize(model, optimizer=optimizer, check="sometimes")  # type: ignore[call-overload]
    autopar.optimize(model, optimizer=optimizer, clip_grad_norm="1")  # type: ignore[call-overload]
    autopar.optimize(model, loss_fn=nn.MSELoss())  # type: ignore[call-overload]
    autopar.plan(model, autopar.ClusterSpec.local(2), mode="steps")  # type: ignore[arg-type]


def test_the_overloads_say_what_the_implementation_takes() -> None:
    of_step, of_module = (dict(inspect.signature(o).parameters) for o in get_overloads(autopar.optimize))
    taken = dict(inspect.signature(autopar.optimize).parameters)
    for found in (of_step, of_module, taken):
        del found["optimizer"]  # which tells them apart
    assert of_step == taken
    assert of_module == {n: p for n, p in taken.items() if n not in ONLY_OF_STEPS}
    both = inspect.signature(autopar.plan).parameters.keys() & taken.keys()
    assert all(inspect.signature(autopar.plan).parameters[n] == taken[n] for n in both)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"check": "alway"}, r"check is 'alway', expected one of 'first', 'always', 'never'; did you mean 'always'\?"),
        ({"unused_parameters": "frezee"}, r"unused_parameters is 'frezee'.*did you mean 'freeze'"),
        ({"optimizer_acts_on": "elements"}, r"optimizer_acts_on is 'elements'.*did you mean 'element'"),
        ({"fidelity": "lossy"}, r"fidelity is 'lossy', expected one of 'exact'"),
    ],
)
def test_a_value_that_is_no_choice_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        autopar.optimize(nn.Linear(3, 2), example_inputs=X, **wrong)


def test_a_mode_that_is_none_is_refused() -> None:
    mode: Any = "steps"
    with pytest.raises(SpecError, match="mode is 'steps'"):
        autopar.plan(nn.Linear(3, 2), autopar.ClusterSpec.local(2), example_inputs=X, mode=mode)


@pytest.mark.parametrize("wrong", ({"plan": "plan.json"}, {"cluster_spec": "local:2"}, {"calibration": "here.json"}))
def test_a_file_s_path_in_place_of_what_it_holds_is_refused(wrong: dict[str, Any]) -> None:
    """Before any rank waits for another, and with what to call; it was an AttributeError."""
    net = nn.Linear(3, 2)
    with pytest.raises(SpecError, match=r"'(plan.json|local:2|here.json)', expected an object of autopar.*\.load\("):
        autopar.optimize(net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), example_inputs=X, **wrong)
    wrong = {{"cluster_spec": "cluster"}.get(name, name): value for name, value in wrong.items()}
    with pytest.raises(SpecError, match=r"expected an object of autopar.*\.load\("):
        autopar.plan(net, **{"cluster": autopar.ClusterSpec.local(2), "example_inputs": X, **wrong})
