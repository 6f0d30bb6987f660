"""What a user does to the optimizer between steps, and what its own step() counts, is as without a program."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

import autopar
from autopar.errors import OptimizerError
from autopar.runtime.optimizers.elsewhere import Elsewhere
from autopar.runtime.optimizers.initial_state import initial_state

Act = Callable[[Any, int], None]


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def _batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(step)
    return torch.randn(5, 4, generator=draw).double(), torch.randn(5, 3, generator=draw).double()


def _adam(net: nn.Module) -> AdamW:
    return AdamW(net.parameters(), lr=0.05)


def _program(net: nn.Module, optimizer: Any, parts: str = "one", **settings: Any) -> autopar.Program:
    """`parts`: in which the optimizer updates; each parameter is a "whole" one, or one is "cut"."""
    plan = autopar.plan(net, autopar.ClusterSpec.local(1), example_inputs=_batch(0), loss_fn=F.mse_loss, strategy="ddp")
    group = plan.groups[0]
    first, *others = group.members
    slices = [first.model_copy(update={"start": a, "stop": b}) for a, b in ((0, 2), (2, 6))]
    each: dict[str, list[Any]] = {
        "one": [group.members],
        "whole": [(m,) for m in group.members],
        "cut": [*((s,) for s in slices), tuple(others)],
    }
    plan = plan.model_copy(update={"groups": tuple(group.model_copy(update={"members": m}) for m in each[parts])})
    program: autopar.Program = autopar.optimize(
        net, example_inputs=_batch(0), loss_fn=F.mse_loss, optimizer=optimizer, plan=plan, **settings
    )
    return program


def _both(make: Callable[[nn.Module], Any], act: Act = lambda o, step: None, **settings: Any) -> tuple[Any, Any, float]:
    """Trains with a program and without, with `act` called on the optimizer before each step. Returns both optimizers,
    and by how much parameters differ at most."""
    net, plain = _net(), _net()
    optimizer, reference = make(net), make(plain)
    program, off = _program(net, optimizer, **settings), 0.0
    for step in range(6):
        act(optimizer, step)
        act(reference, step)
        program.step(_batch(step))
        reference.zero_grad()
        F.mse_loss(plain(_batch(step)[0]), _batch(step)[1]).backward()
        reference.step()
        pairs = zip(net.parameters(), plain.parameters(), strict=True)
        off = max(off, *(float((a.detach() - b.detach()).abs().max()) for a, b in pairs))
    return optimizer, reference, off


def _rolls_back(o: Any, step: int) -> None:
    if step == 2:
        o.kept = copy.deepcopy(o.state_dict())
    if step == 4:
        o.load_state_dict(o.kept)


def _resumes(o: Any, step: int) -> None:
    if step == 0:
        other = _net()
        optimizer = _adam(other)
        for i in range(3):
            optimizer.zero_grad()
            other(_batch(i)[0]).square().mean().backward()
            optimizer.step()
        o.load_state_dict(optimizer.state_dict())


def _clears(o: Any, step: int) -> None:
    if step == 2:
        o.state.clear()


def _replaces(o: Any, step: int) -> None:
    if step == 2:
        o.state = defaultdict(dict)


def _begins_anew(o: Any, step: int) -> None:
    if step == 2:
        o.load_state_dict(AdamW(o.param_groups[0]["params"]).state_dict())


def _drops_one(o: Any, step: int) -> None:
    if step == 2:
        o.state[o.param_groups[0]["params"][0]] = {}


CUT: dict[str, Any] = {"parts": "cut"}


@pytest.mark.parametrize("settings", [{}, CUT, {"capture": "never"}], ids=["whole", "cut", "eager"])
@pytest.mark.parametrize("act", [_resumes, _clears, _replaces, _begins_anew, _drops_one])
def test_state_is_taken_over(act: Act, settings: dict[str, Any]) -> None:
    assert _both(_adam, act, **settings)[2] < 1e-12


def test_state_that_was_saved_is_loaded() -> None:
    assert _both(_adam, _rolls_back)[2] < 1e-12


def test_whole_state_is_loaded_into_parts() -> None:
    net, again = _net(), _net()
    optimizer = _adam(net)
    program, other = _program(net, optimizer, **CUT), _program(again, _adam(again), check="never")
    for step in range(2):
        program.step(_batch(step))
    state = copy.deepcopy(program.state_dict())
    other.load_state_dict(state)
    program.step(_batch(5))
    net.load_state_dict(other.model.state_dict())
    optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
    for step in range(2, 4):
        program.step(_batch(step))
        other.step(_batch(step))
    assert all(torch.allclose(a, b, atol=1e-14) for a, b in zip(net.parameters(), again.parameters(), strict=True))


class Empty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.none = nn.Parameter(torch.zeros(0, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.none.sum()


def test_the_state_beside_a_parameter_without_elements_is_whole() -> None:
    net = nn.Sequential(_net(), Empty())
    optimizer = _adam(net)
    program = _program(net, optimizer)
    program.step(_batch(0))
    saved = copy.deepcopy(optimizer.state_dict())
    program.step(_batch(1))
    optimizer.load_state_dict(saved)
    assert all(
        torch.equal(state["exp_avg"], optimizer.state_dict()["state"][i]["exp_avg"])
        for i, state in saved["state"].items()
    )


def test_state_in_parts_is_refused_by_name() -> None:
    net = _net()
    optimizer = _adam(net)
    program = _program(net, optimizer, **CUT)
    program.step(_batch(0))
    uses: list[Callable[[], Any]] = [
        lambda: copy.deepcopy(optimizer.state_dict()),
        lambda: optimizer.load_state_dict(optimizer.state_dict()),
        lambda: optimizer.state[net[0].weight]["exp_avg"].zero_(),  # type: ignore[index]
        lambda: [v for state in optimizer.state.values() for v in state.values()],
    ]
    for use in uses:
        with pytest.raises(OptimizerError, match=r"state of '0\.weight' is spread over the ranks, or cut into parts"):
            use()
    net(_batch(0)[0]).square().mean().backward()
    with pytest.raises(OptimizerError, match=r"optimizer\.step\(\) cannot use it"):
        optimizer.step()
    other = _program(net, optimizer)
    with pytest.raises(OptimizerError, match=r"state of '0\.weight' is with another program"):
        other.step(_batch(0))
    other.load_state_dict(program.state_dict())
    other.step(_batch(0))


def test_a_trial_leaves_the_tensors_that_a_user_holds() -> None:
    net = _net()
    optimizer = _adam(net)
    _resumes(optimizer, 0)
    held = optimizer.state[net[0].weight]["exp_avg"]  # type: ignore[index]
    _program(net, optimizer).step(_batch(0))
    assert optimizer.state[net[0].weight]["exp_avg"] is held  # type: ignore[index]


class _Decays(SGD):
    """Counts in an attribute, and scales by one that users change."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.scale, self.n = 1.0, 0
        self.past: list[int] = []

    def step(self, closure: Any = None) -> Any:
        self.n += 1
        self.past = [*self.past, self.n]
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.mul_(self.scale * 0.5**self.n)
        return super().step(closure)


class _ScheduleFree(Optimizer):
    """Counts in its groups."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "k": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                z = self.state[p].setdefault("z", p.detach().clone())
                p.lerp_(z, 1 / (group["k"] + 1)).add_(p.grad, alpha=-0.1 * group["lr"])
                z.sub_(p.grad, alpha=group["lr"])
            group["k"] += 1


class _Lookahead(Optimizer):
    """Counts in its state, under a name."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.state["k"] = self.state.get("k", 0) + 1  # type: ignore[index, call-overload]
        for group in self.param_groups:
            for p in group["params"]:
                slow = self.state[p].setdefault("slow", p.detach().clone())
                p.add_(p.grad, alpha=-group["lr"])
                if self.state["k"] % 2 == 0:  # type: ignore[index]
                    p.copy_(slow.lerp_(p, 0.5))


class _CountsInPlace(_Decays):
    """Counts in a container, which all that share it would count up."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.counts = [0]

    def step(self, closure: Any = None) -> Any:
        self.counts[0] += 1
        return super().step(closure)


class _Measures(_Decays):
    """Sets what depends on which gradients there are."""

    def step(self, closure: Any = None) -> Any:
        self.largest = max(float(p.grad.abs().max()) for g in self.param_groups for p in g["params"])
        return super().step(closure)


OWN: dict[str, Any] = {"optimizer_acts_on": "element"}
SEVERAL: dict[str, Any] = {"parts": "whole", **OWN}


def _changes_scale(o: Any, step: int) -> None:
    if step == 2:
        o.scale = 0.1


def _steps_by_hand(o: Any, step: int) -> None:
    if step in (0, 3):
        for p in o.param_groups[0]["params"]:
            p.grad = torch.ones_like(p)
        o.step()
        o.zero_grad()


@pytest.mark.parametrize("check", ["first", "always", "never"])
@pytest.mark.parametrize("settings", [OWN, SEVERAL, OWN | CUT], ids=["one", "several", "cut"])
@pytest.mark.parametrize("kind", [_Decays, _ScheduleFree, _Lookahead])
def test_what_step_counts_is_counted_once(kind: Any, settings: dict[str, Any], check: str) -> None:
    mine, reference, off = _both(lambda net: kind(net.parameters(), lr=0.1), _changes_scale, check=check, **settings)
    assert off < 1e-12
    if kind is _Decays:
        assert (mine.n, mine.past) == (reference.n, reference.past) == (6, [1, 2, 3, 4, 5, 6])
    elif kind is _Lookahead:
        assert mine.state["k"] == reference.state["k"] == 6
    else:
        assert [g["k"] for g in mine.param_groups] == [g["k"] for g in reference.param_groups] == [6]


@pytest.mark.parametrize("kind", [_Decays, _ScheduleFree, _Lookahead])
def test_steps_by_hand_count(kind: Any) -> None:
    assert _both(lambda net: kind(net.parameters(), lr=0.1), _steps_by_hand, **SEVERAL)[2] < 1e-12


def test_what_is_counted_in_place_is_refused_where_it_would_count_for_each_part() -> None:
    mine, reference, off = _both(lambda net: _CountsInPlace(net.parameters(), lr=0.1), **OWN)
    assert (mine.counts, off) == (reference.counts, 0.0)
    net = _net()
    program = _program(net, optimizer := _CountsInPlace(net.parameters(), lr=0.1), **SEVERAL)
    with pytest.raises(OptimizerError, match=r"_CountsInPlace changes 'counts' of its attributes in place"):
        program.step(_batch(0))
    assert optimizer.counts == [0]


def test_what_parts_set_otherwise_is_refused() -> None:
    net = _net()
    program = _program(net, _Measures(net.parameters(), lr=0.1), **SEVERAL)
    with pytest.raises(OptimizerError, match=r"sets 'largest' of its attributes in its step\(\), to 0\.\d+ for some"):
        program.step(_batch(0))


def test_what_no_checkpoint_holds_is_refused() -> None:
    net = _net()
    program = _program(net, _Lookahead(net.parameters(), lr=0.1), **OWN)
    program.step(_batch(0))
    with pytest.raises(OptimizerError, match="keeps 'k' in its state"):
        program.state_dict()


class _Holds(torch.optim.Optimizer):
    """Holds another optimizer, over parameters that a program would divide."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        super().__init__(base.param_groups, {})
        self.base_optimizer = base


@pytest.mark.parametrize("acts_on", [None, "parameter"])
def test_an_optimizer_that_holds_another_is_refused_by_name(acts_on: Any) -> None:
    model = nn.Linear(3, 2)
    optimizer = _Holds(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    batch = (torch.randn(4, 3), torch.randn(4, 2))
    with pytest.raises(OptimizerError, match="_Holds holds another optimizer, SGD, as 'base_optimizer'"):
        autopar.optimize(
            model,
            example_inputs=batch,
            loss_fn=nn.functional.mse_loss,
            optimizer=optimizer,
            optimizer_acts_on=acts_on,
        )


def test_an_initial_state_is_told_where_that_of_another_parameter_is_elsewhere() -> None:
    """`copy.copy` of an Adagrad reads the first state that it has."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.Adagrad(model.parameters(), initial_accumulator_value=0.1)
    optimizer.state[model.weight] = Elsewhere("weight", object())
    found = initial_state(optimizer, optimizer.param_groups[0], model.bias)
    assert found is not None
    assert found["sum"].tolist() == pytest.approx([0.1] * 4)
