"""The optimizer's state as one process would have it, whatever plan made it: gathered, and handed out again."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from autopar.runtime.collectives import may_fail
from autopar.runtime.optimizer import OptimizerPart
from autopar.runtime.process_group import Group, Rendezvous

State = dict[str, dict[str, Any]]
"""By parameter name: PyTorch's state of one parameter."""


def gather_state(parts: Iterable[OptimizerPart], parameters: dict[str, torch.nn.Parameter], group: Group) -> State:
    """The whole state, on every rank; to be called by all ranks together.

    Each rank fills in what it holds; the sum over ranks, divided by how many hold each element, is the whole.
    """
    mine: State = {}
    counts: dict[str, torch.Tensor] = {}
    for part in parts:
        for fragment, state in part.state():
            parameter = parameters[fragment.name]
            held = counts.setdefault(fragment.name, torch.zeros(parameter.shape, dtype=torch.float32))
            fragment.cut(held).fill_(1.0)
            whole = mine.setdefault(fragment.name, {})
            for key, value in state.items():
                if _per_element(value, fragment.tensor.shape):
                    full = whole.setdefault(key, torch.zeros(parameter.shape, dtype=value.dtype, device=value.device))
                    fragment.cut(full).copy_(value)
                else:
                    whole[key] = value
    return mine if group.pg is None else _merge(mine, counts, parameters, group)


def _merge(mine: State, counts: dict[str, torch.Tensor], parameters: dict[str, Any], group: Group) -> State:
    described = {
        n: {k: [str(v.dtype), list(v.shape)] if isinstance(v, torch.Tensor) else v for k, v in s.items()}
        for n, s in mine.items()
    }
    everyone = Rendezvous(group).exchange_as("optimizer state", json.dumps(described), _described)
    known: dict[str, dict[str, Any]] = {}
    for one in everyone:
        for name, state in one.items():
            known.setdefault(name, {}).update(state)
    with group.guard("gathering the optimizer's state"), may_fail():
        return _sum_over_ranks(mine, counts, known, everyone, parameters, group)


def _described(text: str) -> dict[str, dict[str, Any]]:
    found = json.loads(text)
    if not all(isinstance(state, dict) for state in found.values()):
        raise ValueError("each parameter's state is an object")
    return dict(found)


def _sum_over_ranks(
    mine: State,
    counts: dict[str, torch.Tensor],
    known: dict[str, dict[str, Any]],
    everyone: list[dict[str, dict[str, Any]]],
    parameters: dict[str, Any],
    group: Group,
) -> State:
    merged: State = {}
    for name in sorted(known):
        parameter = parameters[name]
        held = counts.get(name, torch.zeros(parameter.shape, dtype=torch.float32)).to(parameter.device)
        dist.all_reduce(held, group=group.pg)
        merged[name] = {}
        for key in sorted(known[name]):
            what, own = known[name][key], mine.get(name, {}).get(key)
            if not isinstance(what, list):
                merged[name][key] = what
                continue
            dtype, shape = getattr(torch, what[0].removeprefix("torch.")), torch.Size(what[1])
            value = torch.zeros(shape, dtype=dtype, device=parameter.device) if own is None else own.clone()
            if shape == parameter.shape and shape:
                dist.all_reduce(value, group=group.pg)
                merged[name][key] = value / held.to(dtype)
            else:  # one a parameter, as a step counter: any holder's will do
                holder = next(r for r, one in enumerate(everyone) if key in one.get(name, {}))
                dist.broadcast(value, group_src=holder, group=group.pg)
                merged[name][key] = value
    return merged


def scatter_state(parts: Iterable[OptimizerPart], state: State, parameters: dict[str, torch.nn.Parameter]) -> None:
    """Gives each part the state of its fragments."""
    for part in parts:
        for index, fragment in enumerate(part.fragments):
            if fragment.name in state:
                shape = parameters[fragment.name].shape
                cut = {
                    k: fragment.cut(v).clone() if _per_element(v, shape) else copy.deepcopy(v)
                    for k, v in state[fragment.name].items()
                }
                part.load_state(index, cut)


def as_torch(state: State, optimizer: Optimizer, names: dict[torch.nn.Parameter, str]) -> dict[str, Any]:
    """The state in the form of `torch.optim.Optimizer.state_dict()`, so that plain PyTorch can load it."""
    groups, index = [], 0
    by_index: dict[int, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        numbers = []
        for p in group["params"]:
            if names.get(p) in state:
                by_index[index] = state[names[p]]
            numbers.append(index)
            index += 1
        groups.append({**{k: v for k, v in group.items() if k != "params"}, "params": numbers})
    return {"state": by_index, "param_groups": groups}


def from_torch(saved: dict[str, Any], optimizer: Optimizer, names: dict[torch.nn.Parameter, str]) -> State:
    """Reads `torch.optim.Optimizer.state_dict()`'s form, and sets the optimizer's settings from it."""
    order = [p for g in optimizer.param_groups for p in g["params"]]
    for group, settings in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        group.update({k: v for k, v in settings.items() if k != "params"})
    return {names[order[int(i)]]: s for i, s in saved["state"].items() if order[int(i)] in names}


def _per_element(value: Any, shape: torch.Size) -> bool:
    """Whether a state value has one entry an element, as moments have, and step counters have not."""
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == shape
