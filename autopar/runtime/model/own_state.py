"""Whether what running a model leaves behind in Python makes it compute something else the next time.

A captured step leaves nothing behind: an attribute that `forward` sets is not set. Where `forward` reads it the next
time, as a hidden state that goes from batch to batch, eager training computes something else from the second step on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from autopar.errors import CaptureError
from autopar.ir.guards import Guards
from autopar.runtime.model.eager import without_trace
from autopar.runtime.model.generators import generators, set_generators
from autopar.runtime.model.shared_memory import once
from autopar.runtime.proofs.differences import difference

_ROUNDINGS = 16
"""Of a dtype, which two runs on one CPU may differ by; elsewhere they add in any order, and `tolerance` holds."""


def check_own_state(
    guards: Guards | None,
    owners: Mapping[str, nn.Module],
    run: Callable[[], Sequence[torch.Tensor]],
    tolerance: float,
) -> None:
    """Runs the model twice on one batch, with the same buffers and random numbers, where the captured code has effects
    that the graph has not. Raises `CaptureError`, with their names, where the second run gives other values."""
    if guards is None or not guards.lost:
        return
    with without_trace(owners), torch.enable_grad():
        modules = [m for owner in owners.values() for m in owner.modules()]
        tables = [(m, dict(m._buffers)) for m in modules]
        values = [(b, once(b).clone()) for _, table in tables for b in table.values() if b is not None]
        random = generators()
        first = [t.detach().clone() for t in run()]
        for module, table in tables:
            module._buffers.update(table)
        with torch.no_grad():
            for buffer, value in values:
                once(buffer).copy_(value)
        set_generators(random)
        second = [t.detach() for t in run()]
    if len(first) == len(second) and all(_alike(b, a, tolerance) for a, b in zip(first, second, strict=True)):
        return
    shown = ", ".join(f"'{w}'" for w in guards.lost[:5])
    raise CaptureError(
        f"running the model changes {shown}, and the next time it computes something else for it, on the same batch "
        "too, which one captured step would not: keep it in a buffer that is there from the start and that forward "
        "writes in place, pass it in the batch, or set it outside of forward, between steps"
    )


def _alike(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> bool:
    if expected.is_floating_point() and expected.device.type == "cpu":
        tolerance = _ROUNDINGS * torch.finfo(expected.dtype).eps
    return difference(found, expected, tolerance) <= 1 or not bool(torch.isfinite(expected).all())
