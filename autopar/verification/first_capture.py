"""Imported by the process that ranks are forked from: captures a small model, for what PyTorch sets up at the first
capture to be there in each of them, which saves it some 0.3 s.

Autograd's engine starts a thread for each device at its first backward pass, and refuses to work in processes that are
forked behind that. So nothing is captured where there is a GPU. Under fake tensors, with which a capture works, PyTorch
as it is built for CUDA counts eight devices where there is none; the engine counts once, before.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from autopar.ir.batch import flatten
from autopar.ir.build import training_graph


def _backward() -> None:
    torch.autograd.backward(torch.ones((), requires_grad=True))


def _ends_well(function: Callable[[], None]) -> bool:
    """Whether a function ends without an exception in a process that is forked from this one."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            function()
            status = 0
        finally:
            os._exit(status)
    return os.waitpid(pid, 0)[1] == 0


def _outlives_forks() -> None:
    """Raises where autograd does not work in processes that are forked from one that has used it."""
    _backward()
    if not _ends_well(_backward):
        raise RuntimeError("autograd has threads of its own")


if _ends_well(_outlives_forks):
    _backward()
    with torch.random.fork_rng(devices=[]):
        _model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    training_graph(_model, flatten((torch.ones(2, 2), torch.ones(2, 2))), F.mse_loss)
