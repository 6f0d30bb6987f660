"""What is measured on a test set, of each sample; smaller is better. With it, what is gained over a prediction that
looks at no input."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class Metric:
    """A metric, and the best constant prediction under it."""

    name: str
    of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    """From outputs and targets to one value for each sample."""
    constant: Callable[[torch.Tensor], torch.Tensor]
    """From all targets to outputs that are the same for each."""


def _wrong(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output.argmax(-1) != target).double()


def _nats(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Of a sequence, the mean over its places."""
    lost = F.cross_entropy(output.flatten(0, -2), target.flatten(), reduction="none")
    return lost.view(len(target), -1).mean(1)


def _log_frequencies(target: torch.Tensor) -> torch.Tensor:
    counts = torch.bincount(target.flatten()).double()
    return (counts.clamp(min=0.5) / counts.sum()).log().expand(*target.shape, -1)


def _log_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.binary_cross_entropy_with_logits(output.flatten(), target.flatten().to(output.dtype), reduction="none")


def _squared(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).flatten(1).pow(2).mean(1)


ERROR = Metric("error", _wrong, _log_frequencies)
"""The part of samples whose likeliest class is not theirs."""
NATS = Metric("nats", _nats, _log_frequencies)
"""Cross entropy, in nats a prediction."""
LOG_LOSS = Metric("log loss", _log_loss, lambda target: torch.logit(target.double().mean()).expand(target.shape))
"""Cross entropy of a yes or no, in nats."""
SQUARED = Metric("squared error", _squared, lambda target: target.double().mean(0).expand(target.shape))
