"""What the source of every case begins with; printed as it stands into scripts of findings."""

from __future__ import annotations

import copy  # noqa: F401 - for events
import io
import os
import tempfile
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

DTYPE = torch.float64
SCALE = 0.75
RANK = int(os.environ.get("RANK", "0"))


def values(shape: Any, seed: int, scale: float = 1.0, dtype: Any = None) -> torch.Tensor:
    """Normal random values, the same in every dtype up to rounding."""
    draw = torch.Generator().manual_seed(seed)
    drawn = torch.randn(shape, generator=draw, dtype=torch.float64) * scale
    return drawn.to(dtype if dtype is not None and torch.float64 != DTYPE else DTYPE)


def integers(shape: Any, high: int, seed: int) -> torch.Tensor:
    """Random integers below `high`."""
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


def labels(shape: Any, classes: int, seed: int, ignored: float = 0.0) -> torch.Tensor:
    """Random classes, a fraction of which is -100, which losses ignore; not the first of a batch."""
    draw = torch.Generator().manual_seed(seed)
    found = torch.randint(0, classes, shape, generator=draw)
    chosen = torch.rand(shape, generator=draw) < ignored
    chosen[:1] = False
    return found.masked_fill(chosen, -100)


def parameter(
    shape: Any, seed: int, scale: float = 1.0, layout: str = "contiguous", dtype: Any = None, trainable: bool = True
) -> nn.Parameter:
    """A parameter with one of several layouts in memory."""
    value = values(shape, seed, scale, dtype)
    if layout == "transposed":
        value = value.transpose(0, -1).contiguous().transpose(0, -1)
    elif layout == "channels_last":
        value = value.contiguous(memory_format=torch.channels_last)
    elif layout == "strided":
        value = torch.stack([value, value], -1)[..., 0]
    return nn.Parameter(value, requires_grad=trainable)


def grouped(parameters: Any, count: int, lr: float) -> list[dict[str, Any]]:
    """Parameter groups, each with half the learning rate of the one before."""
    groups = [{"params": parameters[i::count], "lr": lr * 0.5**i} for i in range(count)]
    return [g for g in groups if g["params"]]


def scale() -> float:
    """A function that a script may replace."""
    return 0.75


def halved(optimizer: Any) -> None:
    """Halves the gradients that an optimizer is about to use."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None:
                p.grad.mul_(0.5)


def resume(program: Any) -> None:
    """Saves a program's state, or a model's, and goes on from what was saved."""
    file = io.BytesIO()
    torch.save(program.state_dict(), file)
    file.seek(0)
    program.load_state_dict(torch.load(file, weights_only=True))


def load(program: Any, into: Any) -> None:
    """Saves a program's state, or a model's, with `torch.distributed.checkpoint`, and goes on from what it loads into
    another state dict; each rank by itself, as it has the whole."""
    from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

    with tempfile.TemporaryDirectory() as folder:
        state_dict_saver.save(program.state_dict(), checkpoint_id=folder, no_dist=True)
        state_dict_loader.load(into, checkpoint_id=folder, no_dist=True)
    program.load_state_dict(into)


@dataclass
class Output:
    """A model's output with its loss, as Hugging Face's models return it."""

    loss: torch.Tensor
    logits: torch.Tensor
