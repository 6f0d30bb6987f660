"""Several optimizers of one model, each of its own parameters, as one: embeddings by SGD, say, and the rest by AdamW.

Programs see one optimizer whose parameter groups are those of all, in order. Each group is updated by its own
optimizer, which the user keeps: schedulers work on it, and its state is where it would be without a program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from autopar.errors import OptimizerError


class _States(MutableMapping[torch.Tensor, Any]):
    """The states of all parameters, each in its own optimizer."""

    def __init__(self, each: Sequence[Optimizer]) -> None:
        self._each = each

    def __getitem__(self, parameter: torch.Tensor) -> Any:
        for optimizer in self._each:
            if parameter in optimizer.state:
                return optimizer.state[parameter]
        raise KeyError(parameter)

    def __setitem__(self, parameter: torch.Tensor, value: Any) -> None:
        _holder(self._each, parameter).state[parameter] = value

    def __delitem__(self, parameter: torch.Tensor) -> None:
        for optimizer in self._each:
            if parameter in optimizer.state:
                del optimizer.state[parameter]
                return
        raise KeyError(parameter)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (parameter for optimizer in self._each for parameter in optimizer.state)

    def __len__(self) -> int:
        return sum(len(optimizer.state) for optimizer in self._each)


class JointOptimizer(Optimizer):
    """Several optimizers as one; `each` are the user's own."""

    def __init__(self, each: Sequence[Optimizer]) -> None:
        """Raises `OptimizerError` where two of them hold the same parameter."""
        self.each = tuple(each)
        self.defaults: dict[str, Any] = {}
        self.state = _States(self.each)  # type: ignore[assignment]
        seen: set[int] = set()
        for place, optimizer in enumerate(self.each):
            own = {id(p) for g in optimizer.param_groups for p in g["params"]}
            if own & seen:
                raise OptimizerError(
                    f"{len(own & seen)} parameter(s) are in optimizer {place} and in one before it: give each "
                    "parameter to one optimizer"
                )
            seen |= own

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of all, which are theirs: what is changed in one is changed there."""
        return [group for optimizer in self.each for group in optimizer.param_groups]

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Has each of them make its step."""
        assert closure is None, "a program evaluates its loss itself"
        for optimizer in self.each:
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops all gradients."""
        for optimizer in self.each:
            optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Not of all together: each has its own."""
        raise OptimizerError("several optimizers have a state_dict() each: take program.state_dict(), or theirs")


def joined(given: Optimizer | Sequence[Optimizer] | None) -> Optimizer | None:
    """What programs take, from what a user gives. Raises `OptimizerError` where that is nothing of the kind."""
    if given is None or isinstance(given, Optimizer):
        return given
    if not isinstance(given, (list, tuple)) or not given or not all(isinstance(o, Optimizer) for o in given):
        raise OptimizerError(
            f"optimizer is a {type(given).__name__}, expected an optimizer of torch.optim, or a list of some"
        )
    return given[0] if len(given) == 1 else JointOptimizer(given)


def each_of(optimizer: Optimizer) -> tuple[Optimizer, ...]:
    """The optimizers that one is made of; itself, where it is no joint one."""
    return optimizer.each if isinstance(optimizer, JointOptimizer) else (optimizer,)


def of_parameter(optimizer: Optimizer, parameter: torch.Tensor) -> Optimizer:
    """The optimizer that holds a parameter."""
    return _holder(each_of(optimizer), parameter)


def of_group(optimizer: Optimizer, index: int) -> Optimizer:
    """The optimizer whose group this is, by its index among the groups of all."""
    return [o for o in each_of(optimizer) for _ in o.param_groups][index]


def group_counts(optimizer: Optimizer) -> tuple[int, ...]:
    """Of a joint optimizer, how many groups each has; empty of another one."""
    return tuple(len(o.param_groups) for o in optimizer.each) if isinstance(optimizer, JointOptimizer) else ()


def apart(counts: Sequence[int], state: dict[str, Any]) -> dict[str, Any] | list[dict[str, Any]]:
    """The state of a joint optimizer in PyTorch's own form, as a list with that of each; of another one, as it is.
    `counts`: as of `group_counts`."""
    if not counts:
        return state
    found, first, number = [], 0, 0
    for count in counts:
        groups = state["param_groups"][first : first + count]
        numbers = [n for g in groups for n in g["params"]]
        own = {n - number: state["state"][n] for n in numbers if n in state["state"]}
        found.append(
            {"state": own, "param_groups": [{**g, "params": [n - number for n in g["params"]]} for g in groups]}
        )
        first, number = first + count, number + len(numbers)
    return found


def together(saved: Any) -> Any:
    """The reverse of `apart`, where a list was saved; else what was saved."""
    if not isinstance(saved, (list, tuple)) or not all(isinstance(one, dict) for one in saved):
        return saved
    if not all({"state", "param_groups"} <= one.keys() for one in saved):
        return saved
    states, groups, number = dict[int, Any](), list[dict[str, Any]](), 0
    for one in saved:
        states |= {int(n) + number: v for n, v in one["state"].items()}
        groups += [{**g, "params": [n + number for n in g["params"]]} for g in one["param_groups"]]
        number += sum(len(g["params"]) for g in one["param_groups"])
    return {"state": states, "param_groups": groups}


def _holder(each: Sequence[Optimizer], parameter: torch.Tensor) -> Optimizer:
    for optimizer in each:
        if any(p is parameter for g in optimizer.param_groups for p in g["params"]):
            return optimizer
    raise KeyError("a parameter that no optimizer holds")
