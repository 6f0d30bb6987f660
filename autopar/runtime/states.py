"""The tensors that strategies keep from step to step, on this rank; in checkpoints, as one process would have them.

A state with a number for each of its group's elements is cut up by parameter, so that any plan can go on with it.
Others are known by all of their group's members, and only the same group goes on with them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autopar.backends.collectives import may_fail
from autopar.errors import SpecError
from autopar.ops.base import Call
from autopar.ops.layouts import Owned, Partial, Shard, Varying, held_before
from autopar.runtime.checkpoints.boxes import boxes_of_range, elements_of, size_of
from autopar.runtime.checkpoints.pieces import Over, Piece
from autopar.runtime.job.process_group import Group
from autopar.runtime.model.copies import copies
from autopar.spec.plan import ParameterSlice
from autopar.strategies.base import HELD

STATE = "state"
"""What names in checkpoints on disk begin with."""
ANY = ParameterSlice(name="")
Saved = dict[str, dict[str, torch.Tensor]]
"""By what a state is called, then by parameter, or by all members of its group."""


class States:
    """All states of a program, whichever of its graphs uses them."""

    def __init__(self, group: Group, parameters: Mapping[str, nn.Parameter], device: torch.device) -> None:
        self._group = group
        self._parameters = parameters
        self._device = device
        self._held: dict[tuple[int, str], tuple[Call, torch.Tensor]] = {}
        self._loaded: Mapping[str, Mapping[str, torch.Tensor]] = {}
        """Of a checkpoint, for states that are not there yet."""
        self.found: frozenset[tuple[str, str]] = frozenset()
        """What the last checkpoint had, by the names of states and of places."""

    def of(self, call: Call, key: str) -> torch.Tensor:
        """A call's state, by its name in the group: the same for every graph."""
        of = call.owner_group.index, key
        if of not in self._held:
            held = call.held_elements(self._group.rank)
            tensor = torch.zeros(held, dtype=call.torch_dtype, device=self._device)
            self._held[of] = call, tensor
            self._fill(key, call, tensor)
        return self._held[of][1]

    def residual_norm(self) -> float:
        """Of what all ranks have not sent yet; to be called by all of them together."""
        squares = torch.zeros((), dtype=torch.float64, device=self._device)
        for (_, key), (call, tensor) in self._held.items():
            if isinstance(call.layout, Partial) and call.op.momentum is None and not key.startswith(HELD):
                squares += tensor.double().square().sum()
        if self._group.pg is not None:
            with self._group.guard("the norm of residuals"), may_fail():
                dist.all_reduce(squares, group=self._group.pg)
        return float(squares.sqrt())

    def kept(self) -> Callable[[], None]:
        """Copies all states; what is returned puts them back."""
        before = dict(self._held)
        put_back = copies([tensor for _, tensor in before.values()])

        def back() -> None:
            put_back()
            for key, (call, tensor) in self._held.items():
                if key not in before:
                    self._fill(key[1], call, tensor)

        return back

    def save(self, unsaved: Collection[int] = (), stopped: Collection[int] = ()) -> Saved:
        """As one process would have them; to be called by all ranks together. `unsaved`: groups of which what they hold
        of earlier steps is left out; `stopped`: those of which nothing is saved."""
        found: Saved = {}
        for (_, key), (call, tensor) in sorted(self._held.items(), key=lambda item: item[0]):
            of = call.owner_group.index
            if isinstance(call.layout, Varying) or of in stopped or (of in unsaved and key.startswith(HELD)):
                continue
            whole, into = self._whole(call, tensor), found.setdefault(key, {})
            for place in _places(call, self._parameters):
                there = place.there(into.setdefault(place.name, whole.new_zeros(place.shape)))
                there.copy_(place.of(whole).view(there.shape))
        return found

    def load(self, saved: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Continues from what `save` returned, on this or another number of ranks; what is not there becomes zeros."""
        self._loaded = saved
        self.found = frozenset((key, name) for key, of in saved.items() for name, v in of.items() if v.numel())
        for (_, key), (call, tensor) in self._held.items():
            self._fill(key, call, tensor)

    def load_later(self, saved: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Takes what a checkpoint has of states that no step has asked for yet."""
        self._loaded = saved

    def names(self, group: int | None = None) -> set[tuple[str, str]]:
        """The names of states, and of their places; of one group, or of all."""
        held = [(key, call) for (of, key), (call, _) in self._held.items() if group in (None, of)]
        places = ((key, place) for key, call in held for place in _places(call, self._parameters))
        return {(key, place.name) for key, place in places if place.begin < place.end}

    def has_held(self, group: int, found: Collection[tuple[str, str]]) -> bool:
        """Whether a checkpoint that has `found`, as in `found`, has all that a group holds of earlier steps."""
        return all(name in found for name in self.names(group) if name[0].startswith(HELD))

    def left_out(self, unsaved: Collection[int]) -> set[str]:
        """The names of the pieces that `save` leaves out."""
        return {f"{STATE}.{k}.{n}" for i in unsaved for k, n in self.names(i) if k.startswith(HELD)}

    def pieces(self, stopped: Collection[int] = ()) -> list[Piece]:
        """What this rank has of them, for checkpoints on disk. `stopped`: as of `save`."""
        found: list[Piece] = []
        for (of, key), (call, tensor) in sorted(self._held.items(), key=lambda item: item[0]):
            if of in stopped:
                continue
            layout = call.layout
            over: Over = "summed" if isinstance(layout, Partial) else "reset" if isinstance(layout, Varying) else "kept"
            begin = held_before(call.layout, call.elements, self._group.rank)
            for place in _places(call, self._parameters):
                first, last = max(begin, place.begin), min(begin + len(tensor), place.end)
                if first >= last:
                    continue
                for box in boxes_of_range(place.slice or ANY, first - place.begin, last - first, place.shape):
                    part = tensor[first - begin : first - begin + elements_of(box)].view(size_of(box))
                    name = f"{STATE}.{key}.{place.name}"
                    found.append(Piece(name, place.shape, box, part, over, by_all=True))
                    first += elements_of(box)
        return found

    def check(self, saved: Any) -> None:
        """Raises `SpecError` where a checkpoint's states are not such, or do not fit the parameters."""
        if not isinstance(saved, Mapping) or not all(isinstance(s, Mapping) for s in saved.values()):
            raise SpecError("the checkpoint's 'state' is no dict of dicts, by state and by parameter")
        for key, by_name in saved.items():
            for name, value in by_name.items():
                if not isinstance(value, torch.Tensor):
                    raise SpecError(f"the checkpoint's state '{key}' of '{name}' is no tensor")
                known = self._parameters.get(name)
                if known is not None and known.shape != value.shape:
                    raise SpecError(
                        f"the checkpoint's state '{key}' of '{name}' has shape {tuple(value.shape)}, the parameter "
                        f"{tuple(known.shape)}"
                    )

    def _fill(self, key: str, call: Call, tensor: torch.Tensor) -> None:
        """Gives a state this rank's part of what was loaded."""
        saved = self._loaded.get(key, {})
        whole = torch.zeros(call.elements, dtype=tensor.dtype, device=self._device)
        for place in _places(call, self._parameters):
            there = saved.get(place.name)
            if there is not None and there.shape == place.shape:
                place.of(whole).copy_(place.there(there).reshape(-1))
        if isinstance(call.layout, Partial):
            whole = whole / self._group.world_size
        begin = held_before(call.layout, call.elements, self._group.rank)
        tensor.copy_(whole[begin : begin + len(tensor)])

    def _whole(self, call: Call, tensor: torch.Tensor) -> torch.Tensor:
        """All of a state, on every rank."""
        if self._group.pg is None or not isinstance(call.layout, (Partial, Shard, Owned)):
            return tensor
        whole = torch.zeros(call.elements, dtype=tensor.dtype, device=self._device)
        begin = held_before(call.layout, call.elements, self._group.rank)
        whole[begin : begin + len(tensor)] = tensor
        with self._group.guard("gathering the state of strategies"), may_fail():
            dist.all_reduce(torch.view_as_real(whole) if whole.is_complex() else whole, group=self._group.pg)
        return whole


@dataclass(frozen=True)
class _Place:
    """Where elements [begin, end) of a state stand in a checkpoint."""

    name: str
    begin: int
    end: int
    shape: tuple[int, ...]
    """Of what stands there."""
    slice: ParameterSlice | None = None
    """Of a parameter, which part."""

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """The elements in the whole state."""
        return whole[self.begin : self.end]

    def there(self, saved: torch.Tensor) -> torch.Tensor:
        """The elements in what stands in the checkpoint."""
        s = self.slice
        if s is None or s.start is None or s.stop is None:
            return saved
        return saved.narrow(s.dim, s.start, s.stop - s.start)


def _places(call: Call, parameters: Mapping[str, nn.Parameter]) -> list[_Place]:
    group, found = call.owner_group, list[_Place]()
    if call.elements != group.elements:
        # No parameter's name, though there be one member alone.
        name = f"[{', '.join(str(m.slice) for m in group.members)}]"
        return [_Place(name, 0, call.elements, (call.elements,))]
    for member in group.members:
        begin, shape = found[-1].end if found else 0, tuple(parameters[member.slice.name].shape)
        found.append(_Place(member.slice.name, begin, begin + member.elements, shape, member.slice))
    return found
