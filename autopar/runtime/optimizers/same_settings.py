"""Whether all ranks have the same settings of the optimizer in each step: replicas drift apart if not.

They are compared without a collective of their own. A number that is derived from the settings goes along with the sum
of the batches' weights; where the sum is not that of equal numbers, every rank sees it, before anything is updated.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from operator import is_not
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer

from autopar.errors import PlanMismatchError
from autopar.runtime.job.process_group import Group, Rendezvous
from autopar.runtime.optimizers.optimizer import shown

BITS = 40
"""Of the number: sums over up to 8,192 ranks are exact in float64, and unequal ones look equal once in 10^12 times."""

_CONSTANTS = (bool, int, float, complex, str, type(None))
_UNKNOWN = object()


@dataclass(frozen=True)
class _Topic:
    """Something else that ranks compare."""

    known: str
    here: str
    number: int
    told: Callable[[Sequence[str]], None]


class SameSettings(nn.Module):
    """Compares the settings of an optimizer on all ranks; part of the graph of each step."""

    def __init__(self, optimizer: Optimizer, group: Group, device: torch.device) -> None:
        super().__init__()
        self._optimizer = optimizer
        self._group = group
        self._device = device
        self._keys: list[list[str]] = []
        self._values: list[list[Any]] = []
        """Of each parameter group, as they were looked at last."""
        self._digests: list[list[int]] = []
        self._sum = 0
        """Of all digests."""
        self._watched: dict[tuple[int, int], tuple[Any, object]] = {}
        """By group and place, settings that may change in place, and how to know that they have not."""
        self._number = torch.zeros(1, dtype=torch.float64, device=device)
        self._own = 0.0
        self._asked, self._asked_number = "", 0
        self._topics: dict[str, _Topic] = {}
        self._on_its_way: tuple[torch.Tensor, torch.cuda.Event, float] | None = None

    def ask(self, what: str) -> None:
        """Has ranks compare, too, what is asked of the next step, as far as it decides which collectives they issue."""
        if what != self._asked:
            self._asked, self._asked_number = what, digest(what) if what else 0
            self._number_anew()

    def compare(self, topic: str, known: str, here: str, told: Callable[[Sequence[str]], None]) -> None:
        """Has ranks compare something else, too: what each knows of a topic. `here`: what this rank tells the others of
        the next step. Where what is known differs, `told` is given `here` of all ranks, on each of them at the same
        step."""
        before = self._topics.get(topic)
        number = before.number if before and before.known == known else digest(f"{topic} {known}") if known else 0
        self._topics[topic] = _Topic(known, here, number, told)
        if number != (before.number if before else 0):
            self._number_anew()

    def with_number(self, weight: torch.Tensor) -> torch.Tensor:
        """What is to be summed over ranks: a float64 scalar, and the number of this rank's settings as they are now."""
        groups = self._optimizer.param_groups
        values = [[*group.values()] for group in groups]
        in_place = [at for at, (value, before) in self._watched.items() if _state(value) != before]
        # By identity: arrays and tensors of several elements are neither equal nor not.
        if in_place or any(
            len(a) != len(b) or any(map(is_not, a, b)) for a, b in zip_longest(values, self._values, fillvalue=())
        ):
            self._renew(values, in_place)
        return torch.cat((weight.reshape(1), self._number))

    def forward(self, sums: torch.Tensor) -> torch.Tensor:
        """The sum of the scalars, of what `with_number` has made on all ranks. Raises `PlanMismatchError` on all ranks
        where their settings differ; on a GPU, for which the host does not wait, in the step after."""
        if sums.device.type == "cpu":
            self._hold(sums[1].item(), self._own)
        elif sums.device.type == "cuda":
            self.arrive()
            total = torch.empty(1, dtype=torch.float64, pin_memory=True).copy_(sums[1:], non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            self._on_its_way = total, event, self._own
        return sums[0]

    def arrive(self) -> None:
        """Compares what is still on its way from the last step. Raises `PlanMismatchError`; by all ranks together."""
        if self._on_its_way is not None:
            (total, event, own), self._on_its_way = self._on_its_way, None
            event.synchronize()
            self._hold(total.item(), own)

    def _renew(self, values: list[list[Any]], in_place: Sequence[tuple[int, int]]) -> None:
        """Makes the number of the settings as they are now, anew for those that are others."""
        keys = [[*group] for group in self._optimizer.param_groups]
        if keys != self._keys:
            self._keys, self._values = keys, [[_UNKNOWN] * len(k) for k in keys]
            self._digests, self._sum, self._watched = [[0] * len(k) for k in keys], 0, {}
        pairs = enumerate(zip(self._values, values, strict=True))
        others = [(i, j) for i, (old, new) in pairs for j, other in enumerate(map(is_not, old, new)) if other]
        for i, j in {*others, *in_place}:
            key, value = keys[i][j], values[i][j]
            if key == "params":
                continue
            number = digest(f"{i} {key} {shown(value)}")
            self._sum, self._digests[i][j] = self._sum + number - self._digests[i][j], number
            self._watched.pop((i, j), None)
            if not _is_constant(value):
                self._watched[i, j] = value, _state(value)
        self._values = values
        self._number_anew()

    def _number_anew(self) -> None:
        others = sum(topic.number for topic in self._topics.values())
        self._own = float((self._sum + self._asked_number + others) % 2**BITS)
        self._number = torch.tensor([self._own], dtype=torch.float64, device=self._device)

    def _hold(self, total: float, own: float) -> None:
        if total == own * self._group.world_size:
            return
        mine = self._described() | {_ASKED: self._asked}
        topics = {name: [topic.known, topic.here] for name, topic in self._topics.items()}
        texts = Rendezvous(self._group).exchange("settings of the optimizer", json.dumps(mine | {_TOPICS: topics}))
        everyone = [json.loads(text) for text in texts]
        of_ranks = [theirs.pop(_TOPICS) for theirs in everyone]
        for rank, theirs in enumerate(everyone):
            for what in [*mine, *(w for w in theirs if w not in mine)]:
                if what == _ASKED and mine[what] != theirs[what]:
                    raise PlanMismatchError(
                        f"rank {self._group.rank} calls {what}({mine[what]}), rank {rank} {what}({theirs[what]}). "
                        "Under this plan ranks compute these together, so all must ask for them in the same steps"
                    )
                if mine.get(what) != theirs.get(what):
                    raise PlanMismatchError(
                        f"rank {self._group.rank} and rank {rank} have different settings of the optimizer: {what} is "
                        f"{mine.get(what, 'not there')} here and {theirs.get(what, 'not there')} there, so their "
                        "parameters would drift apart. Change it on all ranks alike: have each rank step its "
                        "learning-rate scheduler, and average over ranks what a schedule looks at, as a validation loss"
                    )
        for name, topic in self._topics.items():
            known, here = zip(*(theirs[name] for theirs in of_ranks), strict=True)
            if len({*known}) > 1:
                topic.told(here)

    def _described(self) -> dict[str, str]:
        return {
            f"'{key}' of parameter group {i}": shown(value)
            for i, group in enumerate(self._optimizer.param_groups)
            for key, value in group.items()
            if key != "params"
        }


def refuse_states(digests: Sequence[str]) -> NoReturn:
    """Raises `PlanMismatchError` where ranks were given different states. `digests`: by rank."""
    other = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
    raise PlanMismatchError(
        f"the optimizer's state that was put in on rank 0 and on rank {other} is not the same, so replicas would drift "
        "apart: load the same state on all ranks, as with optimizer.load_state_dict(torch.load(path)) on each of them"
    )


def _is_constant(setting: Any) -> bool:
    """Whether a setting cannot change in place."""
    return type(setting) in _CONSTANTS or (type(setting) is tuple and all(map(_is_constant, setting)))


def _state(setting: Any) -> object:
    """What changes where a setting is changed in place."""
    return setting._version if isinstance(setting, torch.Tensor) else repr(setting)


def digest(text: str) -> int:
    """A number of a text, of so many bits that sums over ranks are exact."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=BITS // 8).digest(), "big")


_ASKED = "program.step"
_TOPICS = "topics"
