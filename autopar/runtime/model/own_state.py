"""Whether what running a model leaves behind in Python makes it compute something else the next time.

A captured step leaves nothing behind: an attribute that `forward` sets is not set. Where `forward` reads it the next
time, as a hidden state that goes from batch to batch, eager training computes something else from the second step on.
A running mean that begins with the first value shows this on another batch alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch import nn

from autopar.errors import CaptureError
from autopar.ir.guards import Guards
from autopar.runtime.model.copies import copies
from autopar.runtime.model.eager import kept_attributes, without_trace
from autopar.runtime.model.shared_memory import once
from autopar.runtime.proofs.differences import difference

Run = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]
"""Runs the model on a batch of these tensors, which it may write to, and returns what it computes."""
Draws = Callable[[], AbstractContextManager[object]]
"""Within it, random operators draw from the rank's stream, which then is where it was."""

_ROUNDINGS = 16
"""Of a dtype, which two runs on one CPU may differ by; elsewhere they add in any order, and `tolerance` holds."""
_SCALE, _SHIFT = 0.75, 1 / 64
"""Parameters and floating-point inputs are multiplied by the first, as ranges that models ask of probabilities, images
and angles hold what is nearer to zero, too. The second is added to parameters, since zeros hide errors."""
_ELEMENTS = 65_536
"""How many elements of a parameter are changed, in whole rows and at least one row."""


def check_own_state(
    guards: Guards | None,
    owners: Mapping[str, nn.Module],
    run: Run,
    given: Sequence[torch.Tensor],
    tolerance: float,
    draws: Draws = nullcontext,
) -> None:
    """Where the captured code has effects that the graph has not, runs the model twice on one batch; then on another
    one with other parameters and random numbers, from what that has left behind and from what was there before. Buffers
    are the same each time.

    `given`: the tensors of the batch. Raises `CaptureError`, with the effects' names, where what a run has left behind
    gives other values.
    """
    if guards is None or not guards.lost:
        return
    parameters = {p: None for owner in owners.values() for p in owner.parameters() if _is_computed_in(p)}
    with without_trace(owners), torch.enable_grad():
        as_begun, again = kept_attributes(owners.values()), _same_start(owners)
        first = _as_given(run, given, draws)
        again()
        same = _are_alike(_as_given(run, given, draws), first, tolerance)
        with torch.autograd.grad_mode._unsafe_preserve_version_counter(tuple(parameters)):
            changed = [_first_rows(p) for p in parameters]
            put_back = copies(changed)
            try:
                if same:
                    _change(changed)
                    again()
                    behind = _on_others(run, given, draws)
                    as_begun()
                    again()
                    same = _are_alike(behind, _on_others(run, given, draws), tolerance)
            finally:
                put_back()
    if same:
        return
    shown = ", ".join(f"'{w}'" for w in guards.lost[:5])
    raise CaptureError(
        f"running the model changes {shown}, and the next time it computes something else for it, "
        "which one captured step would not: keep it in a buffer that is there from the start and that forward "
        "writes in place, pass it in the batch, or set it outside of forward, between steps"
    )


def _same_start(owners: Mapping[str, nn.Module]) -> Callable[[], None]:
    """Has buffers and random numbers be as they are now."""
    modules = dict.fromkeys(m for owner in owners.values() for m in owner.modules())
    tables = [(m, dict(m._buffers)) for m in modules]
    values = copies(b for _, table in tables for b in table.values() if b is not None)

    def put_back() -> None:
        for module, table in tables:
            module._buffers.update(table)
        values()

    return put_back


def _is_computed_in(t: torch.Tensor) -> bool:
    """Whether PyTorch multiplies and adds in its dtype, as it does not in those of 8 bits."""
    return t.is_floating_point() and t.element_size() > 1


def _first_rows(p: nn.Parameter) -> torch.Tensor:
    """Enough of a parameter to compute something else: a copy of all would take the memory of a second model."""
    held = once(p)
    return held if held.dim() == 0 else held[: max(1, _ELEMENTS // max(1, held[:1].numel()))]


def _change(tensors: Iterable[torch.Tensor]) -> None:
    with torch.no_grad():
        for tensor in tensors:
            tensor.mul_(_SCALE).add_(_SHIFT)


def _as_given(run: Run, given: Sequence[torch.Tensor], draws: Draws) -> list[torch.Tensor]:
    with draws():
        return [t.detach().clone() for t in run([t.clone() for t in given])]


def _on_others(run: Run, given: Sequence[torch.Tensor], draws: Draws) -> list[torch.Tensor] | None:
    """What the model computes of smaller inputs with other random numbers; `None` where it takes none such."""
    others = [t.detach() * _SCALE if _is_computed_in(t) or t.is_complex() else t.clone() for t in given]
    for t, g in zip(others, given, strict=True):
        t.requires_grad_(g.requires_grad)
    with draws():
        _draw_once()
        try:
            return [t.detach().clone() for t in run(others)]
        except Exception:  # of the user's code, which may ask anything of its batches
            return None


def _draw_once() -> None:
    torch.rand(1)
    random.random()
    np.random.rand()
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.rand(1, device="cuda")


def _are_alike(found: Sequence[torch.Tensor] | None, expected: Sequence[torch.Tensor] | None, tolerance: float) -> bool:
    if found is None or expected is None:
        return found is expected
    return len(found) == len(expected) and all(_alike(a, b, tolerance) for a, b in zip(found, expected, strict=True))


def _alike(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> bool:
    if expected.is_floating_point() and expected.device.type == "cpu":
        tolerance = _ROUNDINGS * torch.finfo(expected.dtype).eps
    return difference(found, expected, tolerance) <= 1 or not bool(torch.isfinite(expected).all())
