"""What a checkpoint on disk holds of a program: tensors, as the pieces that this rank has, and the values around them.

The model's tensors are described as they are in the model, not copied. So they are written from where they lie, and
read into it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from autopar.errors import SpecError
from autopar.ops.fragments import rows_of_rank
from autopar.runtime.checkpoints.boxes import whole
from autopar.runtime.checkpoints.pieces import Over, Piece, fragment_pieces, whole_piece
from autopar.runtime.checkpoints.plain_values import to_json
from autopar.runtime.lasting import Lasting
from autopar.runtime.optimizers.state import differs_by_rank, per_element


@dataclass
class Content:
    """A checkpoint's values, as JSON has them, and its tensors."""

    versions: dict[str, dict[str, int | None]] = field(default_factory=dict)
    """Of the modules in the model and in the loss function, as their `state_dict()` has them beside the tensors."""
    model: dict[str, Any] = field(default_factory=dict)
    loss_fn: dict[str, Any] | None = None
    groups: list[dict[str, Any]] = field(default_factory=list)
    """Of the optimizer: `parameters`, their names, and `settings`."""
    state: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The optimizer's, by parameter: what this rank has of it."""
    pieces: list[Piece] = field(default_factory=list)


@contextlib.contextmanager
def opened(lasting: Lasting) -> Iterator[bool]:
    """While it is open, the model's `state_dict()` can be looked at; by all ranks together. Returns whether rows that
    are spread over the ranks stay so: they do, unless the model's hooks make other tensors of the parameters."""
    modules = [m for m in (lasting.model, lasting.loss_module) if m is not None]
    with lasting.rows.listed():
        spread = all(_tensors(module) == live_tensors(module).keys() for module in modules)
    with lasting.rows.listed() if spread else lasting.rows.gathered():
        yield spread


def live_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """What is a parameter or a buffer of the module in its `state_dict()`, and not what a hook made of one."""
    own = {id(t) for t in (*module.parameters(), *module.buffers())}
    return {k: v for k, v in module.state_dict(keep_vars=True).items() if id(v) in own}


def _tensors(module: nn.Module) -> set[str]:
    return {key for key, value in module.state_dict(keep_vars=True).items() if isinstance(value, torch.Tensor)}


def content_of(lasting: Lasting, spread: bool) -> Content:
    """What this rank has. `spread`: as `opened` says. Raises `SpecError` where a checkpoint on disk cannot hold it."""
    found = Content()
    found.model = _module(lasting, lasting.model, "model", spread, found)
    if lasting.loss_module is not None and (loss := _module(lasting, lasting.loss_module, "loss_fn", spread, found)):
        found.loss_fn = loss
    _optimizer(lasting, found)
    left_out = lasting.states.left_out(lasting.unsaved)
    found.pieces.extend(p for p in lasting.states.pieces(lasting.stopped) if p.name not in left_out)
    for piece in found.pieces:
        tensor = piece.tensor
        if type(tensor) not in (torch.Tensor, nn.Parameter, nn.Buffer) or tensor.layout != torch.strided:
            raise SpecError(
                f"'{piece.name}' is a {type(tensor).__name__} of layout {tensor.layout}, which safetensors files "
                "cannot hold: use program.state_dict(), and write that yourself"
            )
    return found


def live_piece(lasting: Lasting, name: str, value: torch.Tensor, spread: bool, apart: bool) -> Piece:
    """What this rank has of a parameter or a buffer of the model. `apart`: whether parameters of which each rank
    updates a replica may differ."""
    for own, shard in lasting.rows.shards.items() if spread else ():
        if lasting.parameters[own] is value:
            rows = range(*rows_of_rank(lasting.group.rank, lasting.group.world_size).indices(value.shape[0]))
            return Piece(name, tuple(value.shape), (rows, *whole(value.shape[1:])), shard, by_all=True)
    over: Over = "averaged" if apart and lasting.names.get(value) in lasting.local else "kept"  # type: ignore[call-overload]
    return whole_piece(name, value.detach(), over, by_all=isinstance(value, nn.Parameter))


def over_of(lasting: Lasting, parameter: str, value: torch.Tensor) -> Over:
    """How a tensor of the optimizer's state of a parameter goes over to other ranks."""
    return "averaged" if parameter in lasting.local and differs_by_rank(value) else "kept"


def state_name(parameter: str, key: str) -> str:
    """The name of a tensor of the optimizer's state."""
    return f"optimizer.{parameter}.{key}"


def _module(lasting: Lasting, module: nn.Module, prefix: str, spread: bool, found: Content) -> dict[str, Any]:
    """A module's `state_dict()`; a tensor that has several names there is kept once."""
    names: dict[int, str] = {}
    state, live = module.state_dict(keep_vars=True), live_tensors(module)
    own = {id(value) for value in live.values()}
    metadata = getattr(state, "_metadata", {})
    found.versions[prefix] = {name: of_module.get("version") for name, of_module in metadata.items()}

    def keep(name: str, value: torch.Tensor) -> str:
        if id(value) not in names:
            names[id(value)] = name
            is_live = id(value) in own
            piece = (
                live_piece(lasting, name, value, spread, lasting.are_apart)
                if is_live
                else whole_piece(name, value.detach())
            )
            found.pieces.append(piece)
        return names[id(value)]

    return {key: to_json(value, f"{prefix}.{key}", keep) for key, value in state.items()}


def _optimizer(lasting: Lasting, found: Content) -> None:
    kept = dict[str, torch.Tensor]()

    def keep(name: str, value: torch.Tensor, over: Over = "kept") -> str:
        if name not in kept:  # one a parameter, as a step counter, stands with each of the rank's parts of it
            kept[name] = value
            found.pieces.append(whole_piece(name, value.detach(), over))
        return name

    for part in lasting.parts.every():
        for fragment, state in part.state():
            own, shape = found.state.setdefault(fragment.name, {}), lasting.parameters[fragment.name].shape
            for key, value in state.items():
                name = state_name(fragment.name, key)
                if per_element(value, fragment.tensor.shape):
                    over = over_of(lasting, fragment.name, value)
                    found.pieces.extend(fragment_pieces(name, fragment, shape, value, over))
                    own[key] = {"tensor": name}
                elif isinstance(value, torch.Tensor):
                    own[key] = {"tensor": keep(name, value, over_of(lasting, fragment.name, value))}
                else:
                    own[key] = to_json(value, name, keep)
    for index, group in enumerate(lasting.optimizer.param_groups):
        settings = {k: to_json(v, f"optimizer.groups.{index}.{k}", keep) for k, v in group.items() if k != "params"}
        found.groups.append({"parameters": [lasting.names[p] for p in group["params"]], "settings": settings})
        for p in group["params"]:
            name = lasting.names[p]
            if name not in lasting.parts.updated and (frozen := lasting.optimizer.state.get(p)):
                found.state[name] = {k: to_json(v, state_name(name, k), keep) for k, v in frozen.items()}
