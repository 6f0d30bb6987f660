"""What a step changes, kept and put back; and a model as it is while it is evaluated."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import nn
from torch.optim import Optimizer

from autopar.runtime.optimizers.joint_part import Part
from autopar.runtime.optimizers.own_settings import kept_settings
from autopar.runtime.proofs.local_proof import copies
from autopar.runtime.random import RandomStream
from autopar.runtime.states import States


def snapshot(
    tensors: Iterable[torch.Tensor],
    optimizer: Optimizer,
    parts: Iterable[Part],
    random: RandomStream,
    states: States,
    synchronize: Callable[[], None],
) -> Callable[[], None]:
    """Copies what a step changes: parameters and buffers, the optimizer's state and settings, random numbers, what
    strategies keep; what is returned puts that back. `synchronize`: receives parameters that are on their way."""
    synchronize()
    put_back = [
        copies(tensors),
        *(part.kept_state() for part in parts),
        kept_settings(optimizer),
        random.kept(),
        states.kept(),
    ]

    def back() -> None:
        synchronize()
        for one in put_back:
            one()

    return back


@contextmanager
def evaluated(model: nn.Module, gathered: AbstractContextManager[None]) -> Iterator[None]:
    """While it is open, a model is whole and in evaluation mode, and no gradients are recorded; then, each of its
    modules is in the mode that it was in."""
    modes = [(m, m.training) for m in model.modules()]
    with gathered, torch.no_grad():
        model.eval()
        try:
            yield
        finally:
            for module, training in modes:
                module.training = training
