"""Checkpoints on disk: checked by all ranks together, then loaded, each rank what it needs; or read in one process."""

from __future__ import annotations

import copy
import json
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from autopar.ops.fragments import Fragment
from autopar.runtime.checkpoints.boxes import Box, boxes_of, elements_of, whole
from autopar.runtime.checkpoints.checkpoint import (
    REFUSAL,
    UNREADABLE,
    Read,
    hand_out,
    read_checked,
    same_on_all_ranks,
)
from autopar.runtime.checkpoints.content import live_piece, live_tensors, opened, over_of
from autopar.runtime.checkpoints.files import Stored
from autopar.runtime.checkpoints.lost import say_dropped
from autopar.runtime.checkpoints.pieces import Over, Piece, fragment_pieces, whole_piece
from autopar.runtime.checkpoints.plain_values import from_json
from autopar.runtime.checkpoints.sharing import box_json
from autopar.runtime.job.together import DISK_S, agreed, meet
from autopar.runtime.lasting import Lasting
from autopar.runtime.optimizers.joint_optimizer import apart
from autopar.runtime.optimizers.state import per_element
from autopar.runtime.states import STATE

LOAD = "program.load(folder)"


def load(lasting: Lasting, folder: str | Path) -> None:
    """Continues from a checkpoint; to be called by all ranks together. Raises `SpecError` on all ranks where the
    checkpoint does not fit on one of them; nothing is changed then."""
    group = lasting.group
    meet(group, LOAD, "")
    with opened(lasting) as spread:
        loading: list[_Loading] = []

        def check() -> str:
            loading.append(_Loading(lasting, Stored(folder), spread))
            return loading[0].checked()

        said = [json.loads(text) for text in agreed(group, LOAD, check, REFUSAL, UNREADABLE, DISK_S)]
        advice = f"all ranks must see one and the same {folder}, on a disk that their hosts share"
        same_on_all_ranks(group, [one["digest"] for one in said], advice)
        loading[0].load([one["own"] for one in said])
        index = loading[0].stored.index
        lasting.resume(index.steps, index.guard)


class _Loading:
    """A checkpoint on its way into a program: first checked, then loaded."""

    def __init__(self, lasting: Lasting, stored: Stored, spread: bool) -> None:
        self.stored = stored
        self._lasting, self._spread = lasting, spread
        self._read: Read | None = None
        tensors = stored.index.tensors
        self._states = {n for n, t in tensors.items() if n.startswith(f"{STATE}.") and t.layout != "Varying"}
        """The names of what strategies have kept, which another number of ranks may go on with."""
        self._apart = lasting.apart_behind(stored.index.steps, _names(self._states))

    def checked(self) -> str:
        """What this rank has found, for all ranks. Raises `SpecError` where the checkpoint cannot be loaded here."""
        lasting, stored = self._lasting, self.stored
        stored.check_files(lasting.group.rank, lasting.group.world_size)
        stored.reader = lasting.group.rank, lasting.group.world_size
        self._read = read_checked(lasting, self._stand_ins())
        for _, _, values, live in self._modules():
            for piece in self._pieces_in(values, live):
                stored.check_holds(piece.name, piece.box)
        boxes: dict[str, list[Box]] = {}
        for fragment in (f for part in lasting.parts.every() for f in part.fragments):
            shape = lasting.parameters[fragment.name].shape
            boxes.setdefault(fragment.name, []).extend(boxes_of(fragment, shape))
        for name, values in self._read.state.items():
            for key, value in values.items():
                if (stored_as := self._stored_state(name, key)) is not None:
                    is_whole = self._is_read_whole(name, key, value)
                    for box in [whole(value.shape)] if is_whole else boxes.get(name, ()):
                        stored.check_holds(stored_as, box)
        return json.dumps({"digest": stored.digest, "own": self._own_pieces()})

    def load(self, own: list[dict[str, Any]]) -> None:
        """Changes the program. `own`: by rank, what it has found of tensors of which each rank has its own value."""
        assert self._read is not None
        lasting, stored, read = self._lasting, self.stored, self._read
        for kind, module, values, live in self._modules():
            stored.read_into(self._pieces_in(values, live))
            # What is in place already is not copied. What the module's hooks do is done, and they may need the rest.
            rest = {k: from_json(v, stored.whole) for k, v in values.items() if k not in live}
            module.load_state_dict(with_versions({**live, **rest}, stored.index.versions[kind]))
        pieces: list[Piece] = []
        state = copy.copy(read.state)
        for name, values in state.items():
            read_whole = {k: v for k, v in values.items() if self._is_read_whole(name, k, v)}
            made = {k: torch.empty(v.shape, dtype=v.dtype, device=v.device) for k, v in read_whole.items()}
            pieces += [whole_piece(str(self._stored_state(name, k)), v, self._over(name, v)) for k, v in made.items()]
            state[name] = {**values, **made}
        stored.read_into(pieces)
        pieces.clear()

        def take(fragment: Fragment, key: str, value: torch.Tensor, into: torch.Tensor) -> None:
            if (name := self._stored_state(fragment.name, key)) is None:
                into.copy_(fragment.cut(value))
            else:
                pieces.extend(fragment_pieces(name, fragment, value.shape, into, self._over(fragment.name, into)))

        hand_out(lasting, read, state, take)
        stored.read_into(pieces)
        self._load_pieces(own)

    def _modules(self) -> Iterator[tuple[str, torch.nn.Module, Mapping[str, Any], dict[str, torch.Tensor]]]:
        """The model and the loss function, each with its name and its values in the checkpoint, and with the tensors of
        its `state_dict()` that are its own."""
        lasting, index = self._lasting, self.stored.index
        for kind, module, values in (
            ("model", lasting.model, index.model),
            ("loss_fn", lasting.loss_module, index.loss_fn),
        ):
            if module is not None and values is not None:
                yield kind, module, values, live_tensors(module)

    def _pieces_in(self, values: Mapping[str, Any], live: Mapping[str, torch.Tensor]) -> list[Piece]:
        """What this rank has of a module's own tensors, by their names in the checkpoint."""
        named = {(id(t), n): t for key, t in live.items() if (n := tensor_name(values.get(key))) is not None}
        names = self._lasting.names
        return [
            live_piece(self._lasting, name, tensor, self._spread, names.get(tensor) in self._apart)  # type: ignore[call-overload]
            for (_, name), tensor in named.items()
        ]

    def _over(self, parameter: str, value: torch.Tensor) -> Over:
        """How a tensor of a parameter's optimizer state is read: what begins anew, all alike, from the mean."""
        return over_of(self._lasting, parameter, value) if parameter in self._apart else "kept"

    def _stand_ins(self) -> dict[str, Any]:
        """The checkpoint in the form of `program.state_dict()`, with stand-ins for what is large."""
        stored, devices = self.stored, {name: p.device for p, name in self._lasting.names.items()}
        live = {key for *_, tensors in self._modules() for key in tensors}

        def of_module(key: str, value: Any) -> Any:
            return from_json(value, stored.stand_in if key in live else stored.whole)

        def of_state(parameter: str, value: Any) -> Any:
            name = tensor_name(value)
            return from_json(value, stored.whole) if name is None else stored.stand_in(name, devices.get(parameter))

        return in_pytorchs_form(stored, of_module, of_state)

    def _stored_state(self, parameter: str, key: str) -> str | None:
        """The name of the tensor that a value of the optimizer's state is; None where it is no tensor."""
        return tensor_name(self.stored.index.optimizer.state.get(parameter, {}).get(key))

    def _is_read_whole(self, name: str, key: str, value: Any) -> bool:
        if self._stored_state(name, key) is None:
            return False
        return name not in self._lasting.parts.updated or not per_element(value, self._lasting.parameters[name].shape)

    def _own_pieces(self) -> dict[str, Any]:
        """By name of each tensor that strategies keep: whether the checkpoint has it, whether this rank wrote the same
        parts of it, and which parts this rank has."""
        found: dict[str, Any] = {}
        for name, pieces in self._by_name().items():
            there = self._found(pieces[0])
            same = there and self.stored.holds_own(pieces, self._lasting.group.rank, self._lasting.group.world_size)
            found[name] = {"there": there, "same": same, "boxes": [box_json(p.box) for p in pieces]}
        return found

    def _load_pieces(self, own: list[dict[str, Any]]) -> None:
        """Reads what strategies keep. What the checkpoint lacks starts with zeros; what the program does not keep is
        dropped, which rank 0 says, unless a later step asks for it."""
        stored, rank = self.stored, self._lasting.group.rank
        kept = {name for one in own for name in one if one[name]["there"]}
        if rank == 0:
            say_dropped(self._states - kept, self._lasting.is_timed, stacklevel=5)
        self._lasting.states.found = _names(kept)
        for name, pieces in self._by_name().items():
            there, over, parts = self._found(pieces[0]), pieces[0].over, stored.index.tensors.get(name)
            alike = [one[name]["same"] for one in own if name in one]
            for piece in pieces:
                if there and over == "kept":
                    piece.tensor.detach().zero_()  # of slices whose groups kept nothing, there is none
                    stored.read_into([piece])
                elif there and parts and all(alike) and len(alike) == len({p.rank for p in parts.parts}):
                    stored.read_into([piece], rank)
                elif there and over == "summed":
                    holders = sum(box_json(piece.box) in one[name]["boxes"] for one in own if name in one)
                    stored.read_sum(piece, 1 / holders)
                else:
                    piece.tensor.detach().zero_()
        if self._lasting.is_timed:
            self._lasting.states.load_later(_states(stored, {name for one in own for name in one}))

    def _found(self, piece: Piece) -> bool:
        """Whether the checkpoint has a tensor of this name, shape and kind."""
        there = self.stored.index.tensors.get(piece.name)
        layouts = {"summed": ("Partial",), "reset": ("Varying",)}.get(piece.over, ("Replicate", "Shard", "Owned"))
        return there is not None and there.shape == piece.shape and there.layout in layouts

    def _by_name(self) -> dict[str, list[Piece]]:
        found: dict[str, list[Piece]] = {}
        for piece in self._lasting.states.pieces():
            if elements_of(piece.box):
                found.setdefault(piece.name, []).append(piece)
        return found


def _names(names: Iterable[str]) -> frozenset[tuple[str, str]]:
    """Names of states on disk, taken apart: what the state is called, and the place that it is of."""
    parts = (name.removeprefix(f"{STATE}.").partition(".") for name in names)
    return frozenset((key, of) for key, _, of in parts)


def load_checkpoint(folder: str | Path) -> dict[str, Any]:
    """Reads a checkpoint that `program.save(folder)` wrote, in one process and without a program: the dict that
    `program.state_dict()` returns, on the CPU. Its `model` and `optimizer` load into a plain model and optimizer.

    Raises `SpecError`, with the file, where there is no checkpoint, or one that is damaged.
    """
    stored, known = Stored(folder), dict[str, torch.Tensor]()
    stored.check_files()

    def read_once(name: str) -> torch.Tensor:
        if name not in known:  # a tensor with two names in the model is one
            known[name] = stored.whole(name)
        return known[name]

    def read(_: str, value: Any) -> Any:
        return from_json(value, read_once)

    found = in_pytorchs_form(stored, read, read)
    if states := _states(stored):
        found["state"] = states
    return found


def _states(stored: Stored, but: Collection[str] = ()) -> dict[str, dict[str, torch.Tensor]]:
    """What strategies have kept; where each rank had its own part of a sum, the sum. `but`: names that are left out."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in stored.index.tensors.items():
        if name in but:
            continue
        said, _, rest = name.partition(".")
        key, _, of = rest.partition(".")
        if said == STATE and tensor.layout == "Partial":
            found.setdefault(key, {})[of] = stored.sum_of(name)
        elif said == STATE and tensor.layout != "Varying":
            found.setdefault(key, {})[of] = stored.whole(name)
    return found


def in_pytorchs_form(
    stored: Stored, of_module: Callable[[str, Any], Any], of_state: Callable[[str, Any], Any]
) -> dict[str, Any]:
    """A checkpoint as `program.state_dict()` returns it. The functions make values of what the index has, given a key
    of the module's state, or a parameter."""
    index, held, state = stored.index, dict[str, Any](), dict[int, Any]()
    groups: list[dict[str, Any]] = []
    for group in index.optimizer.groups:
        first = len(held)
        for number, name in enumerate(group.parameters, first):
            values = index.optimizer.state.get(name, {})
            held[str(number)] = [name, sorted(values)]
            if values:
                state[number] = {key: of_state(name, value) for key, value in values.items()}
        settings = {k: from_json(v, stored.whole) for k, v in group.settings.items()}
        groups.append({**settings, "params": list(range(first, len(held)))})
    found = {
        "model": with_versions({k: of_module(k, v) for k, v in index.model.items()}, index.versions["model"]),
        "optimizer": apart(index.optimizer.each, {"state": state, "param_groups": groups}),
        "random": [list(stream) for stream in index.random],
        "held": json.dumps(held),
        "steps": index.steps,
    }
    if index.loss_scale is not None:
        found["loss_scale"] = dict(index.loss_scale)
    if index.guard:
        found["guard"] = index.guard
    if index.loss_fn is not None:
        loss = {key: of_module(key, value) for key, value in index.loss_fn.items()}
        found["loss_fn"] = with_versions(loss, index.versions["loss_fn"])
    return found


def with_versions(state: Mapping[str, Any], versions: Mapping[str, int | None]) -> dict[str, Any]:
    """A module's state as `state_dict()` returns it, with the versions of the modules that wrote it."""
    found = OrderedDict(state)
    found._metadata = OrderedDict((name, {"version": v}) for name, v in versions.items())  # type: ignore[attr-defined]
    return found


def tensor_name(value: Any) -> str | None:
    """The name of the tensor that a value of the index is; None of other values."""
    name = value.get("tensor") if isinstance(value, dict) and len(value) == 1 else None
    return name if isinstance(name, str) else None
