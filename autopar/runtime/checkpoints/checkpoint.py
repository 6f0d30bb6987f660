"""A program's checkpoint: the model and the optimizer as one process would have them, and every rank's random stream.

    model, optimizer    in PyTorch's own form
    loss_fn             the loss function's, where it is a module with parameters or buffers
    loss_scale          of `torch.amp.GradScaler`, where the loss is scaled
    random              the random streams, by rank
    steps               how many steps were taken
    guard               JSON: what a quality budget's guard has seen, where there is one
    state               what strategies keep from step to step, where they do
    held                JSON: by the optimizer's number of each parameter, its name, and which of its state's values are
                        there. What is not named is a placeholder, for `torch.distributed.checkpoint` to load into. By
                        "state", the names in `state`, which has no placeholders

A checkpoint is checked as a whole, and by all ranks, before anything is loaded.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autopar.errors import SpecError
from autopar.runtime.checkpoints.checks import check_module, check_scale, check_settings, checked_state, digest
from autopar.runtime.checkpoints.lost import say_dropped, say_lacking
from autopar.runtime.job.process_group import Group, average, average_buffers
from autopar.runtime.job.together import agreed, meet
from autopar.runtime.lasting import Lasting
from autopar.runtime.optimizers.initial_state import initial_state, placeholder
from autopar.runtime.optimizers.joint_optimizer import apart, group_counts, of_group, of_parameter, together
from autopar.runtime.optimizers.state import State, Take, cut_out, gather_state, scatter_state
from autopar.runtime.states import STATE

SAVE, LOAD = "program.state_dict()", "program.load_state_dict()"
REFUSAL = "cannot load the checkpoint, so no rank has changed anything"
UNREADABLE = "the checkpoint cannot be read"


@dataclass(frozen=True)
class Read:
    """A checkpoint that was checked and fits; `groups`: copies of the settings of each of the optimizer's groups, in
    order."""

    model: Mapping[str, Any]
    loss_fn: Mapping[str, Any] | None
    groups: list[dict[str, Any]]
    state: State
    streams: list[torch.Tensor] | None
    states: Mapping[str, Mapping[str, torch.Tensor]]
    steps: int
    loss_scale: Mapping[str, Any] | None
    guard: str
    digest: str
    lacking: Sequence[str] = ()
    """What strategies had kept when the checkpoint was saved, and what it does not have."""


def save(lasting: Lasting) -> dict[str, Any]:
    """The checkpoint; to be called by all ranks together. Raises `CollectiveError` where one does not come."""
    streams = meet(lasting.group, SAVE, json.dumps(lasting.random.state()))
    average_buffers(lasting.buffers.values(), lasting.group)
    state = gather_state(lasting.parts.every(), lasting.parameters, lasting.group, lasting.local)
    with lasting.rows.gathered():
        written = _write(lasting, _averaged(lasting, lasting.model), state, streams)
    if states := lasting.states.save(lasting.unsaved, lasting.stopped):
        written["state"] = states
        names = {key: sorted(by_name) for key, by_name in states.items()}
        written["held"] = json.dumps({**json.loads(written["held"]), "state": names})
    return written


def load(lasting: Lasting, state: Any) -> None:
    """Continues from a checkpoint; to be called by all ranks together.

    Raises `SpecError`, on every rank, where it does not fit on one of them, or where ranks are given different ones;
    nothing is changed then."""
    with lasting.rows.traceable():
        read = _read_by_all(lasting, lambda: read_checked(lasting, state))
    with lasting.rows.gathered():
        lasting.model.load_state_dict(read.model)
        if lasting.loss_module is not None and read.loss_fn is not None:
            lasting.loss_module.load_state_dict(read.loss_fn)
    hand_out(lasting, read, read.state)
    if lasting.group.rank == 0:
        names = lasting.states.found - lasting.states.names()
        say_dropped({f"{STATE}.{key}.{name}" for key, name in names}, lasting.is_timed)
        say_lacking(read.lacking)
    lasting.resume(read.steps, read.guard)


def hand_out(lasting: Lasting, read: Read, state: State, take: Take = cut_out) -> None:
    """Gives the optimizer and the random stream what was read, in place of what they have. `state`: the optimizer's;
    `take` fills a part's tensors from it."""
    for group, settings in zip(lasting.optimizer.param_groups, read.groups, strict=True):
        group.update(settings)
    scatter_state(lasting.parts.every(), state, lasting.parameters, take)
    for p, name in lasting.names.items():
        if name not in lasting.parts.updated:  # the state of a parameter that is frozen now stays the optimizer's own
            lasting.optimizer.state.pop(p, None)
            if name in state:
                lasting.optimizer.state[p] = copy.deepcopy(state[name])
    if read.streams is not None:
        lasting.random.load(read.streams)
    lasting.states.load(read.states)
    if lasting.scaler is not None and read.loss_scale is not None:
        lasting.scaler.load_state_dict(dict(read.loss_scale))


def _averaged(lasting: Lasting, module: nn.Module) -> dict[str, Any]:
    """A module's state, with the average of replicas that differ."""
    state = module.state_dict()
    if lasting.are_apart and lasting.group.pg is not None:
        own = dict(module.named_parameters(remove_duplicate=False))
        named = {lasting.names[p]: p for p in own.values() if lasting.names.get(p) in lasting.local}
        # By all ranks, whatever a module of the user's own gives as its state.
        means = {id(p): average(p.detach(), lasting.group) for _, p in sorted(named.items())}
        found = {key: means[id(p)] for key, p in own.items() if id(p) in means and key in state}
        if len(found) < sum(id(p) in means for p in own.values()):  # hooks have given others another name
            live = module.state_dict(keep_vars=True)
            found |= {k: means[id(v)] for k, v in live.items() if id(v) in means and k in state}
        for key, mean in found.items():
            there = state[key]
            state[key] = mean.to(there.device, there.dtype) if isinstance(there, torch.Tensor) else mean
    return state


def _write(lasting: Lasting, model: Mapping[str, Any], state: State, streams: list[str]) -> dict[str, Any]:
    optimizer = lasting.optimizer
    groups, by_number, held = [], dict[int, dict[str, Any]](), dict[str, Any]()
    for group in optimizer.param_groups:
        settings = {k: copy.deepcopy(v) for k, v in group.items() if k != "params"}
        numbers = range(len(held), len(held) + len(group["params"]))
        groups.append({**settings, "params": list(numbers)})
        for number, p in zip(numbers, group["params"], strict=True):
            name = lasting.names.get(p, "")
            values = state.get(name, {}) if name in lasting.parts.updated else optimizer.state.get(p, {})
            held[str(number)] = [name, sorted(map(str, values))]
            if not values and name in lasting.parts.updated:
                values = placeholder(of_parameter(optimizer, p), settings, p)
            if values:
                by_number[number] = dict(values)
    written = {
        "model": model,
        "optimizer": apart(group_counts(optimizer), {"state": by_number, "param_groups": groups}),
        "random": [json.loads(text) for text in streams],
        "held": json.dumps(held),
        "steps": lasting.steps,
        **lasting.watched(),
    }
    if lasting.scaler is not None:
        written["loss_scale"] = lasting.scaler.state_dict()
    if lasting.loss_module is not None and (loss := _averaged(lasting, lasting.loss_module)):
        written["loss_fn"] = loss
    return written


def _read_by_all(lasting: Lasting, read: Callable[[], Read]) -> Read:
    """The checkpoint, checked by all ranks together."""
    found: list[Read] = []

    def check() -> str:
        found.append(read())
        return found[0].digest

    digests = agreed(lasting.group, LOAD, check, REFUSAL, UNREADABLE)
    same_on_all_ranks(lasting.group, digests, "load the same file on every rank")
    return found[0]


def same_on_all_ranks(group: Group, digests: Sequence[str], advice: str) -> None:
    """Raises `SpecError` where ranks are given different checkpoints."""
    other = next((r for r, digest in enumerate(digests) if digest != digests[group.rank]), None)
    if other is not None:
        raise SpecError(
            f"rank {group.rank} and rank {other} are given different checkpoints, so no rank has changed "
            f"anything: {advice}"
        )


def read_checked(lasting: Lasting, state: Any) -> Read:
    """The checkpoint, where it fits this rank's program; raises `SpecError` where it does not. Changes nothing."""
    if not isinstance(state, Mapping):
        raise SpecError(f"the checkpoint is a {type(state).__name__}; expected the dict of {SAVE}")
    missing = [k for k in ("model", "optimizer") if k not in state]
    if missing:
        raise SpecError(
            f"the checkpoint has no '{missing[0]}' but {_listed(state)}; expected the dict of {SAVE}, with 'model' and "
            "'optimizer'"
        )
    state = {**state, "optimizer": together(state["optimizer"])}
    check_module("model", lasting.model, state["model"])
    loss = state.get("loss_fn")
    if lasting.loss_module is not None and (loss is not None or any(True for _ in lasting.loss_module.parameters())):
        if loss is None:
            raise SpecError(
                "the checkpoint has no 'loss_fn', but the loss function has parameters: add "
                "state['loss_fn'] = loss_fn.state_dict()"
            )
        check_module("loss_fn", lasting.loss_module, loss)
    names, saved_groups = _saved_names(lasting, state)
    groups = _groups(lasting, names, saved_groups)
    found = _states(lasting, state, names, groups)
    streams = lasting.random.read(state["random"]) if "random" in state else None
    steps, states = state.get("steps", 0), state.get("state", {})
    if type(steps) is not int or steps < 0:
        raise SpecError(f"the checkpoint's 'steps' is {steps!r}; expected a whole number, not negative")
    lasting.states.check(states)
    scale, guard = state.get("loss_scale"), lasting.check_guard(state.get("guard", ""))
    if lasting.scaler is not None and scale is not None:
        check_scale(lasting.scaler, scale)
    what = {
        "model": state["model"],
        "loss_fn": loss,
        "groups": groups,
        "state": found,
        "states": states,
        "steps": steps,
        "loss_scale": scale,
        "guard": guard,
    }
    lacking = _lacking(state, states)
    return Read(state["model"], loss, groups, found, streams, states, steps, scale, guard, digest(what), lacking)


def _saved_names(lasting: Lasting, state: Mapping[str, Any]) -> tuple[dict[int, str], list[dict[str, Any]]]:
    """The names of the saved optimizer's parameters by their numbers, and its groups, of which the shape is checked.

    They are the checkpoint's own, else PyTorch's `param_names`, else those of the optimizer's parameters in order.
    """
    optimizer = state["optimizer"]
    if not isinstance(optimizer, Mapping) or not {"state", "param_groups"} <= optimizer.keys():
        raise SpecError("the checkpoint's 'optimizer' is no dict with 'state' and 'param_groups', as PyTorch makes it")
    groups = optimizer["param_groups"]
    if not isinstance(groups, (list, tuple)) or not all(isinstance(g, Mapping) for g in groups):
        raise SpecError("the checkpoint's optimizer.param_groups is no list of dicts")
    for i, group in enumerate(groups):
        numbers = group.get("params")
        if not isinstance(numbers, (list, tuple)) or not all(type(n) is int for n in numbers):
            raise SpecError(f"the checkpoint's optimizer.param_groups[{i}] has no list of numbers as 'params'")
    numbers = [n for g in groups for n in g["params"]]
    if len(set(numbers)) < len(numbers):
        raise SpecError("the checkpoint's optimizer has a parameter's number in its groups twice")
    own = [[lasting.names.get(p, "") for p in g["params"]] for g in lasting.optimizer.param_groups]
    held = _held(state)
    if held is not None:
        names = {number: name for number, (name, _) in held.items()}
    elif all(len(g.get("param_names", ())) == len(g["params"]) for g in groups):
        names = {n: str(name) for g in groups for n, name in zip(g["params"], g["param_names"], strict=True)}
        if set(names.values()) != {name for group in own for name in group}:  # names of another wrapping
            names = {}
    else:
        names = {}
    if not names:
        if [len(g["params"]) for g in groups] != [len(g) for g in own]:
            raise SpecError(
                f"the checkpoint's optimizer has groups of {_sizes(g['params'] for g in groups)} parameters, this one "
                f"of {_sizes(own)}: build the optimizer with the same groups"
            )
        names = dict(zip(numbers, (name for group in own for name in group), strict=True))
    lacking = [n for n in numbers if n not in names]
    if lacking:
        raise SpecError(f"the checkpoint's 'held' does not name parameter {lacking[0]} of its optimizer")
    return names, [dict(g) for g in groups]


def _held(state: Mapping[str, Any]) -> dict[int, tuple[str, list[str]]] | None:
    """By the number of a parameter, its name and the keys of its state; None where the checkpoint does not say."""
    if "held" not in state:
        return None
    try:
        by_number = {n: of for n, of in json.loads(state["held"]).items() if n != "state"}
        found = {int(n): (str(name), [str(k) for k in keys]) for n, (name, keys) in by_number.items()}
    except (AttributeError, TypeError, ValueError, RecursionError) as e:
        raise SpecError(f"the checkpoint's 'held' is not as {SAVE} writes it: {e}") from e
    return found


def _lacking(state: Mapping[str, Any], states: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What `states` has not of what strategies had kept when the checkpoint was saved."""
    try:
        saved = json.loads(state.get("held", "{}")).get("state", {})
        return [f"{key}.{name}" for key, names in saved.items() for name in names if name not in states.get(key, {})]
    except (AttributeError, TypeError) as e:
        raise SpecError(f"the checkpoint's 'held' is not as {SAVE} writes it: {e}") from e


def _groups(lasting: Lasting, names: dict[int, str], saved: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The settings of each of the optimizer's groups: those of the saved group with the same parameters."""
    by_members = {frozenset(names[n] for n in g["params"]): g for g in saved}
    found = []
    own = [frozenset(lasting.names.get(p, "") for p in g["params"]) for g in lasting.optimizer.param_groups]
    if len(saved) != len(own):
        raise SpecError(
            f"the checkpoint's optimizer has {len(saved)} parameter groups, this one has {len(own)}: build the "
            "optimizer with the same groups"
        )
    for i, members in enumerate(own):
        if members not in by_members:
            other = max(by_members, key=lambda m: len(m & members), default=frozenset[str]())
            name = min(other ^ members)
            where = "is not" if name in members else "is"
            raise SpecError(
                f"parameter '{name}' {where} in the group of the checkpoint's optimizer that is like group {i} of this "
                "one: build the optimizer with the same groups"
            )
        settings = {k: v for k, v in by_members[members].items() if k not in ("params", "param_names")}
        check_settings(i, of_group(lasting.optimizer, i), lasting.optimizer.param_groups[i], settings)
        found.append(copy.deepcopy(settings))  # here, where what cannot be copied is refused
    return found


def _states(lasting: Lasting, state: Mapping[str, Any], names: dict[int, str], groups: list[dict[str, Any]]) -> State:
    """The state of each parameter by its name, checked against what the optimizer would make itself."""
    parameters = {name: p for p, name in lasting.names.items()}
    settings = {
        lasting.names.get(p, ""): {**{k: v for k, v in own.items() if k != "params"}, **new}
        for own, new in zip(lasting.optimizer.param_groups, groups, strict=True)
        for p in own["params"]
    }
    held, saved = _held(state), _numbered(state["optimizer"]["state"])
    strange = [n for n in saved if n not in names]
    if strange:
        raise SpecError(
            f"the checkpoint's optimizer has state for parameter {strange[0]}, which is in none of its groups"
        )
    found: State = {}
    for number, name in names.items():
        values = saved.get(number, {})
        if not isinstance(values, Mapping):
            raise SpecError(
                f"the checkpoint's optimizer state of '{name}' is a {type(values).__name__}; expected a dict"
            )
        if held is not None:
            keys = held[number][1] if number in held else []
            lacking = [k for k in keys if k not in values]
            if lacking:
                raise SpecError(
                    f"the optimizer's state of '{name}' was saved with '{lacking[0]}', which is missing here. "
                    "torch.distributed.checkpoint.load loads only into what a state dict has, and does not know what "
                    f"{type(lasting.optimizer).__name__} will have: save and load with torch.save and torch.load"
                )
            values = {k: v for k, v in values.items() if k in keys}
        if not values or name not in parameters or name not in settings:
            continue
        expected = initial_state(of_parameter(lasting.optimizer, parameters[name]), settings[name], parameters[name])
        found[name] = checked_state(name, values, expected, parameters[name], lasting.elementwise)
        del expected  # as large as the state, and not to be there beside the next one
    of_adagrad = {
        n for n in lasting.parts.updated if type(of_parameter(lasting.optimizer, parameters[n])) is torch.optim.Adagrad
    }
    if without := of_adagrad - found.keys():
        raise SpecError(f"the checkpoint's optimizer has no state of '{min(without)}'; Adagrad has some from the start")
    return found


def _numbered(saved: Any) -> dict[int, Any]:
    """The states by number, which `torch.distributed.checkpoint` writes as text where a value is no tensor."""
    if not isinstance(saved, Mapping):
        raise SpecError(f"the checkpoint's optimizer.state is a {type(saved).__name__}; expected a dict")
    found: dict[int, Any] = {}
    for key, values in saved.items():
        try:
            number = int(key)
        except (TypeError, ValueError) as e:
            raise SpecError(f"the checkpoint's optimizer.state has the key {key!r}; expected numbers") from e
        both = number in found and isinstance(values, Mapping) and isinstance(found[number], Mapping)
        found[number] = {**found[number], **values} if both else values
    return found


def _sizes(groups: Iterable[Any]) -> str:
    return ", ".join(str(len(g)) for g in groups) or "no"


def _listed(state: Mapping[Any, Any]) -> str:
    keys = [repr(k) for k in state]
    return ", ".join(keys[:5]) + (f" and {len(keys) - 5} more" if len(keys) > 5 else "") if keys else "none"
