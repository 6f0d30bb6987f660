"""What a plan loses by, in one word that other plans share: trainings of other models are lessons for it, too."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.optim import Optimizer

from autopar.quality.candidates import loses
from autopar.runtime.optimizers.joint_optimizer import each_of
from autopar.runtime.optimizers.kinds import keeps_moments
from autopar.spec.plan import SyncGroup
from autopar.strategies import Context, strategy_named
from autopar.strategies.lowering import fidelity_of, rounded_forward

UNLIKE = ("exchange",)
"""Options of strategies that decide who adds up, and little of what is lost."""


def method_of(groups: Iterable[SyncGroup], context: Context) -> str:
    """The strategy of groups that lose something, with what was chosen for it, as `quantized(bits=4)` or
    `all_reduce+every=4`; where bits alone are lost, the format that is sent, as `wire=bfloat16`, with `+forward` where
    the forward pass reads what was rounded. Empty where groups lose by several methods."""
    groups = tuple(groups)
    found = {_method(g) for g in groups if loses(g, context)}
    if not found:
        rounded = [g for g in groups if fidelity_of((g,), context) == "rounded"]
        forward = "+forward" if rounded_forward(rounded) else ""
        found = {f"wire={g.options.get('wire', '')}{forward}" for g in rounded}
    return found.pop() if len(found) == 1 else ""


def optimizer_of(optimizer: Optimizer) -> str:
    """`SGD`, `Adam` for any of its like, or empty: trainings with one kind say little of what the other loses."""
    if all(type(o) is torch.optim.SGD for o in each_of(optimizer)):
        return "SGD"
    return "Adam" if keeps_moments(optimizer) else ""


def _method(group: SyncGroup) -> str:
    options = strategy_named(group.strategy).options_type.model_validate(group.options)
    chosen = options.model_dump(exclude_defaults=True, exclude=set(UNLIKE))
    said = ",".join(f"{k}={v}" for k, v in sorted(chosen.items()))
    times = "".join(f"+{k}={v}" for k, v in group.timing.items() if k in ("every", "delay"))
    return group.strategy + (f"({said})" if said else "") + times
