"""Whether a loss outside of the model may send gradients through what running the model leaves behind in Python.

    loss = criterion(model(x), y) + 0.01 * model.router.balance_loss

A captured drop-in module sets no attributes: what the loss reads is an old tensor, or none, and no gradient flows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from autopar.errors import CaptureError
from autopar.ir.guards import Guards
from autopar.runtime.model.eager import held_by, without_trace

_COMPUTED_BEFORE = (SpectralNorm, WeightNorm)
"""Hooks that compute a weight before a module runs, and set it there: outside of it, hardly anybody reads that."""


def check_nothing_flows(guards: Guards | None, owners: Mapping[str, nn.Module], run: Callable[[], object]) -> None:
    """Runs the model once where the captured code has effects that the graph has not. Raises `CaptureError`, with the
    effects' names, where a tensor that requires a gradient is among what the run has left behind."""
    if guards is None or not guards.lost:
        return
    with without_trace(owners), torch.enable_grad():
        before = held_by(owners.values())
        output = run()  # noqa: F841 (kept, so that nothing gets the id of what was there before)
        known = {id(t) for t in (*before, *_weights(owners))}
        left = any(t.grad_fn is not None and id(t) not in known for t in held_by(owners.values()))
    if left:
        shown = ", ".join(f"'{w}'" for w in guards.lost[:5])
        raise CaptureError(
            f"running the model sets or changes {shown}, and a loss outside of it may send gradients through what is "
            "there, as through an auxiliary loss, where a captured module sets nothing: return it from forward, or "
            "detach it, and the module can be captured"
        )


def _weights(owners: Mapping[str, nn.Module]) -> list[torch.Tensor]:
    modules = [m for owner in owners.values() for m in owner.modules()]
    hooks = [(m, h) for m in modules for h in m._forward_pre_hooks.values() if isinstance(h, _COMPUTED_BEFORE)]
    return [getattr(m, h.name) for m, h in hooks]
