"""The parts of a program's optimizer, and what the user's own optimizer has of their state between steps.

Before each step, the state that the user's optimizer has is compared with what it was left with, by identity alone: a
parameter's state that was loaded, cleared or replaced is taken over, whole or cut. Where this rank has a parameter's
state in parts, or not at all, an `Elsewhere` stands for it, which refuses by name whoever uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import is_
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from autopar.errors import OptimizerError
from autopar.ops.fragments import Fragment
from autopar.runtime.model.copies import all_of
from autopar.runtime.optimizers.elsewhere import Elsewhere
from autopar.runtime.optimizers.initial_state import initial_state
from autopar.runtime.optimizers.joint_optimizer import each_of
from autopar.runtime.optimizers.joint_part import Part, part_of
from autopar.runtime.optimizers.optimizer import OptimizerPart
from autopar.runtime.optimizers.own_settings import OwnSettings, kept_settings
from autopar.runtime.optimizers.state import cut_state
from autopar.spec.plan import SyncGroup


class Parts:
    """All parts of a program's optimizer; each is made when a graph is written that has it."""

    def __init__(
        self, optimizer: Optimizer, parameters: dict[str, nn.Parameter], groups: Sequence[SyncGroup], is_timed: bool
    ) -> None:
        """`parameters`: by name. `groups`: the plan's. `is_timed`: whether not all of them update in each step."""
        self.updated = frozenset(m.name for g in groups for m in g.members)
        self._optimizer = optimizer
        self._parameters = parameters
        self._names = {parameters[n]: n for n in sorted(self.updated)}
        self._is_timed = is_timed
        self._own = {one: OwnSettings(one) for one in each_of(optimizer)}
        self._users = [_UsersState(one) for one in self._own]
        self._parts: dict[int, Part] = {}
        self._single: list[OptimizerPart] = []
        """The same, of each of several optimizers."""
        self._places: dict[nn.Parameter, list[tuple[OptimizerPart, int, Fragment]]] = {}
        """Of each parameter of which this rank updates something: by what, and where it stands there."""
        self._token = object()
        self.given: dict[str, Any] = {}
        """What the user has put into the optimizer since ranks have compared that."""

    def of(self, index: int, fragments: tuple[Fragment, ...], unused: Callable[[], frozenset[str]]) -> Part:
        """The part of a sync group, by its index."""
        if index not in self._parts:
            part = self._parts[index] = part_of(self._optimizer, fragments, self._parameters, unused, self._own)
            for fragment, (one, place) in zip(fragments, part.each, strict=True):
                parameter = self._parameters[fragment.name]
                self._places.setdefault(parameter, []).append((one, place, fragment))
                state = self._optimizer.state.get(parameter)
                if not isinstance(state, Elsewhere):
                    _give(one, place, fragment, state, parameter.shape)
            self._single = list(dict.fromkeys(p for places in self._places.values() for p, _, _ in places))
            for users in self._users:
                users.forget()
        return self._parts[index]

    def every(self) -> tuple[Part, ...]:
        """All parts that there are by now."""
        return tuple(self._parts.values())

    def take_over(self, is_first: bool = False) -> None:
        """Has the parts go on with the state that the user's optimizer has now, where that is another one; `given` is
        then what the user has put there, by parameter, before the first step all that is there. Raises
        `OptimizerError`, with the parameter, where it lies with another program."""
        for users in self._users:
            now = users.now()
            is_known = users.is_known
            for parameter, state in users.others(now):
                name = self._names.get(parameter)
                if isinstance(state, Elsewhere):
                    if name is not None and not self._is_own(state):
                        raise OptimizerError(
                            f"the optimizer's state of '{name}' is with another program that was made of this "
                            "optimizer, in parts: load program.state_dict() of that one into this one, or drop the "
                            "state by optimizer.state.clear()"
                        )
                elif name is not None:
                    for part, place, fragment in self._places.get(parameter, ()):
                        _give(part, place, fragment, state, parameter.shape)
                    if state and (is_known or is_first):
                        self.given[name] = state
            users.know(now)

    def settle(self, loaded: bool = False) -> None:
        """Behind a step, and behind what has `loaded` state into the parts: has something stand in the user's optimizer
        for each state that is not whole on this rank."""
        parts = self._single
        if not loaded and not any(p.has_written for p in parts) and not any(u.is_open for u in self._users):
            return
        states = {id(part): [bool(state) for _, state in part.state()] for part in parts}
        for users in self._users:
            settings = {p: group for group in users.of.param_groups for p in group["params"]}
            for parameter in filter(self._is_elsewhere, users.parameters):
                if places := self._places.get(parameter):
                    has_state = any(states[id(part)][place] for part, place, _ in places)
                else:  # on other ranks, if the optimizer keeps any
                    has_state = initial_state(users.of, settings[parameter], parameter) != {}
                if has_state and not self._is_own(users.of.state.get(parameter)):
                    users.of.state[parameter] = Elsewhere(self._names[parameter], self._token)
                elif loaded and not has_state:
                    users.of.state.pop(parameter, None)
            users.know(users.now())
            users.is_open = False
        for part in parts:
            part.has_written = False

    def catch_up(self) -> None:
        """Before a checkpoint: takes over, and settles. Raises `OptimizerError` where something would be left out."""
        for own in self._own.values():
            own.check_saved()
        self.take_over(is_first=not self._parts)
        self.settle()

    def kept(self) -> Callable[[], None]:
        """Keeps the optimizer's state and settings as they are; what is returned puts them back."""
        users = [users.kept() for users in self._users]
        return all_of([*(part.kept_state() for part in self.every()), kept_settings(self._optimizer), *users])

    def begin(self) -> None:
        """Before a run of a step."""
        for own in self._own.values():
            own.begin()

    def end(self, was_skipped: bool) -> None:
        """Behind a run of a step. Raises `OptimizerError` as `OwnSettings.step` does."""
        for own in self._own.values():
            own.end(not was_skipped and not self._is_timed)

    def _is_own(self, state: Any) -> bool:
        return isinstance(state, Elsewhere) and state.owner is self._token

    def _is_elsewhere(self, parameter: nn.Parameter) -> bool:
        """Whether this rank has the state of a parameter in parts, or not at all. In a plan whose groups do not all
        update in each step, a rank that has nothing of a parameter may come to. One without elements is updated by
        none."""
        places = self._places.get(parameter)
        if places is None:
            return parameter in self._names and parameter.numel() > 0 and not self._is_timed
        return not any(fragment.whole for _, _, fragment in places)


class _UsersState:
    """The state of one of the user's optimizers, and what was seen of it last."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.of = optimizer
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.is_open = True
        """Whether something was taken over since parts last settled."""
        self._known: list[Any] = []

    @property
    def is_known(self) -> bool:
        """Whether it was looked at since parts were made last."""
        return bool(self._known)

    def now(self) -> list[Any]:
        """Of each parameter, its state; `None` where it has none."""
        return list(map(self.of.state.get, self.parameters))

    def others(self, now: list[Any]) -> list[tuple[nn.Parameter, Any]]:
        """What is another object than it was."""
        if not self._known:
            return list(zip(self.parameters, now, strict=True))
        if all(map(is_, now, self._known)):
            return []
        known = zip(self.parameters, now, self._known, strict=True)
        return [(parameter, state) for parameter, state, before in known if state is not before]

    def know(self, now: list[Any]) -> None:
        """Takes note of what is there."""
        self.is_open = self.is_open or not self._known or not all(map(is_, now, self._known))
        self._known = now

    def kept(self) -> Callable[[], None]:
        """Keeps what was seen last; what is returned puts that back."""
        known = self._known

        def back() -> None:
            self._known = known

        return back

    def forget(self) -> None:
        """Has all be seen anew."""
        self._known = []


def _give(part: OptimizerPart, place: int, fragment: Fragment, state: Any, shape: torch.Size) -> None:
    """Gives a part what the user's optimizer has as state of a parameter of this shape: whole, or cut."""
    part.take_state(place, state if state is None or fragment.whole else cut_state(fragment, state, shape))
