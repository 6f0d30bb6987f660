"""The number of an optimizer's settings that ranks compare in each step."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch
from torch import nn

from autopar.runtime.optimizers.optimizer import described
from autopar.runtime.optimizers.same_settings import SameSettings


class Schedule:
    """A setting of a user's own optimizer."""


def _rank(**settings: Any) -> tuple[torch.optim.Optimizer, SameSettings]:
    optimizer = torch.optim.SGD([{"params": [nn.Parameter(torch.ones(2))], **settings}], lr=0.1)
    return optimizer, SameSettings(optimizer, cast("Any", None), torch.device("cpu"))


def _number(settings: SameSettings) -> float:
    return settings.with_number(torch.ones((), dtype=torch.float64))[1].item()


def test_objects_are_alike_wherever_they_lie_in_memory() -> None:
    (first, one), (second, other) = (_rank(schedule=Schedule(), rule=lambda x: x) for _ in range(2))
    assert _number(one) == _number(other)
    names = [{"w": o.param_groups[0]["params"][0]} for o in (first, second)]
    assert described(first, names[0]) == described(second, names[1])


def test_settings_of_several_numbers_are_compared_by_their_numbers() -> None:
    optimizer, settings = _rank(scales=np.arange(3), bounds=torch.arange(2000.0))
    before = _number(settings)
    for key, other in (
        ("scales", np.arange(3) + 1),
        ("bounds", torch.arange(2000.0).index_fill(0, torch.tensor(999), 5)),
    ):
        group = optimizer.param_groups[0]
        kept = group[key]
        group[key] = other
        assert _number(settings) != before
        group[key] = kept
        assert _number(settings) == before
