"""The optimizer's state as one process would have it, whatever plan made it: gathered, and handed out again."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from autopar.backends.collectives import may_fail
from autopar.errors import OptimizerError
from autopar.ops.fragments import Fragment
from autopar.runtime.job.process_group import Group, Rendezvous, average
from autopar.runtime.optimizers.joint_part import Part

State = dict[str, dict[str, Any]]
"""By parameter name: PyTorch's state of one parameter."""

Take = Callable[[Fragment, str, torch.Tensor, torch.Tensor], None]
"""Fills the last tensor with a fragment's elements of a value of the state, which is the third, with its key."""


def cut_out(fragment: Fragment, key: str, value: torch.Tensor, into: torch.Tensor) -> None:
    """Copies a fragment's elements of a value of the state."""
    into.copy_(fragment.cut(value))


def gather_state(
    parts: Iterable[Part],
    parameters: dict[str, torch.nn.Parameter],
    group: Group,
    local: Collection[str] = (),
) -> State:
    """The whole state, on every rank; to be called by all ranks together.

    Each rank fills in what it holds. Of an element that several ranks hold, the first one's value is taken; of `local`
    parameters, which each rank updates by itself, the average. Raises
    `OptimizerError` where the state holds objects that cannot be told to a rank that has none.
    """
    mine: State = {}
    owners: dict[str, torch.Tensor] = {}
    for part in parts:
        for fragment, state in part.state():
            parameter = parameters[fragment.name]
            nobody = torch.full(parameter.shape, group.world_size, dtype=torch.int32)
            fragment.cut(owners.setdefault(fragment.name, nobody)).fill_(group.rank)
            whole = mine.setdefault(fragment.name, {})
            for key, value in state.items():
                if per_element(value, fragment.tensor.shape):
                    full = whole.setdefault(key, torch.zeros(parameter.shape, dtype=value.dtype, device=value.device))
                    fragment.cut(full).copy_(value)
                else:
                    whole[key] = value
    if group.pg is None:
        return mine
    merged = _merge(mine, owners, parameters, group)
    for name in sorted(local):
        for key, value in sorted(mine.get(name, {}).items()):
            if differs_by_rank(value):
                first = merged[name][key]  # what is alike on all ranks, as a step counter, stays so to the last bit
                merged[name][key] = first + average(value - first, group)
    return merged


def _merge(mine: State, owners: dict[str, torch.Tensor], parameters: dict[str, Any], group: Group) -> State:
    described = {n: {k: _described(v) for k, v in s.items()} for n, s in mine.items()}
    everyone = Rendezvous(group).exchange_as("optimizer state", json.dumps(described), _read)
    known: dict[str, dict[str, Any]] = {}
    for one in everyone:
        for name, state in one.items():
            known.setdefault(name, {}).update(state)
    _check_told(known, everyone)
    with group.guard("gathering the optimizer's state"), may_fail():
        return _from_all_ranks(mine, owners, known, everyone, parameters, group)


def _read(text: str) -> dict[str, dict[str, Any]]:
    found = json.loads(text)
    if not all(isinstance(state, dict) for state in found.values()):
        raise ValueError("each parameter's state is an object")
    return dict(found)


def _described(value: Any) -> dict[str, Any]:
    """A value for another rank: a tensor's dtype and shape, a plain value as it is, an object's type."""
    if isinstance(value, torch.Tensor):
        return {"tensor": [str(value.dtype).removeprefix("torch."), list(value.shape)]}
    if value is None or type(value) in (bool, int, float, str):
        return {"plain": value}
    if type(value) in (list, tuple) and all("plain" in _described(v) for v in value):
        return {"plain": list(value), "tuple": type(value) is tuple}
    return {"object": type(value).__name__}


def _told(what: dict[str, Any]) -> Any:
    """The plain value that `_described` made this from."""
    return tuple(what["plain"]) if what.get("tuple") else what["plain"]


def _check_told(known: State, everyone: list[dict[str, dict[str, Any]]]) -> None:
    """Raises `OptimizerError`, on all ranks alike, where one would need an object of another one's."""
    for name, state in known.items():
        for key, what in state.items():
            lacking = [r for r, one in enumerate(everyone) if key not in one.get(name, {})]
            if "object" in what and lacking:
                raise OptimizerError(
                    f"the optimizer's state of '{name}' holds '{key}', a {what['object']}, which rank "
                    f"{lacking[0]} does not have under this plan: only tensors, numbers, texts and lists of these can "
                    'be gathered. Use a plan in which every rank updates every parameter (strategy="ddp")'
                )


def _from_all_ranks(
    mine: State,
    owners: dict[str, torch.Tensor],
    known: dict[str, dict[str, Any]],
    everyone: list[dict[str, dict[str, Any]]],
    parameters: dict[str, Any],
    group: Group,
) -> State:
    merged: State = {}
    for name in sorted(known):
        parameter = parameters[name]
        nobody = torch.full(parameter.shape, group.world_size, dtype=torch.int32)
        owner = owners.get(name, nobody).to(parameter.device)
        dist.all_reduce(owner, op=dist.ReduceOp.MIN, group=group.pg)
        own_part = owner == group.rank
        merged[name] = {}
        for key in sorted(known[name]):
            what, own = known[name][key], mine.get(name, {}).get(key)
            if "tensor" not in what:
                merged[name][key] = own if key in mine.get(name, {}) else _told(what)
                continue
            dtype, shape = getattr(torch, what["tensor"][0]), torch.Size(what["tensor"][1])
            if shape == parameter.shape and shape:
                value = torch.zeros(shape, dtype=dtype, device=parameter.device)
                if own is not None:
                    value = torch.where(own_part, own.to(parameter.device), value)
                dist.all_reduce(torch.view_as_real(value) if value.is_complex() else value, group=group.pg)
            else:  # one a parameter, as a step counter: any holder's will do
                value = torch.zeros(shape, dtype=dtype, device=parameter.device) if own is None else own.clone()
                holder = next(r for r, one in enumerate(everyone) if key in one.get(name, {}))
                dist.broadcast(value, group_src=holder, group=group.pg)
            merged[name][key] = value
    return merged


def scatter_state(
    parts: Iterable[Part],
    state: State,
    parameters: dict[str, torch.nn.Parameter],
    take: Take = cut_out,
) -> None:
    """Gives each part the state of its fragments, in place of what it has."""
    for part in parts:
        for index, fragment in enumerate(part.fragments):
            shape = parameters[fragment.name].shape
            part.load_state(index, cut_state(fragment, state.get(fragment.name, {}), shape, take))


def cut_state(fragment: Fragment, state: Mapping[str, Any], shape: torch.Size, take: Take = cut_out) -> dict[str, Any]:
    """A fragment's part of the state of its whole parameter, which has this shape."""
    cut = {}
    for key, value in state.items():
        if per_element(value, shape):  # as the fragment lies, which is how its first step would make it
            cut[key] = torch.empty_like(fragment.tensor, dtype=value.dtype)
            take(fragment, key, value, cut[key])
        else:
            cut[key] = copy.deepcopy(value)
    return cut


def differs_by_rank(value: Any) -> bool:
    """Whether ranks that update by themselves may come to have different values of this: moments, whatever their shape
    (those of a parameter without dimensions have none, those of Adafactor are of rows and columns)."""
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def per_element(value: Any, shape: torch.Size) -> bool:
    """Whether a state value has one entry an element, as moments have, and step counters have not."""
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == shape
