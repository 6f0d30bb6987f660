"""Losses of several terms, each weighted by a count of its own."""

from __future__ import annotations

from typing import Any

import torch

from autopar.errors import CaptureError


def sum_of_terms(output: Any, shares: dict[str, torch.Tensor] | tuple[torch.Tensor, ...]) -> torch.Tensor:
    """The sum of a batch's shares in the terms of its loss; a term without a share is nothing, whatever its value.

    `output`: the terms, or a model's output whose `loss` they are, as a dict or a tuple like `shares`. Raises
    `CaptureError` where they are others.
    """
    if isinstance(output, dict) and "loss" in output and "loss" not in shares:
        output = output["loss"]
    elif not isinstance(output, (dict, tuple, list)):
        output = getattr(output, "loss", output)
    if isinstance(shares, dict):
        if not isinstance(output, dict) or set(output) != set(shares):
            raise CaptureError(f"weight= counts the terms {sorted(shares)}, but the loss is {_said(output)}")
        pairs = [(output[k], shares[k]) for k in shares]
    else:
        if not isinstance(output, (tuple, list)) or len(output) != len(shares):
            raise CaptureError(f"weight= counts {len(shares)} terms, but the loss is {_said(output)}")
        pairs = list(zip(output, shares, strict=True))
    total = None
    for term, share in pairs:
        if term.dim() and term.numel() != 1:
            raise CaptureError("each term of the loss must be one scalar: reduce it with .mean()")
        part = torch.where(share == 0, 0.0, term.reshape(()) * share.to(term.dtype))
        total = part if total is None else total + part
    assert total is not None
    return total


def _said(output: Any) -> str:
    if isinstance(output, dict):
        return f"a dict of {sorted(map(str, output))}"
    return f"{len(output)} values" if isinstance(output, (tuple, list)) else f"a {type(output).__name__}"
