"""What PyTorch's own modules and operators do that its tracing cannot: done otherwise for the time of a capture."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Distribution, kl
from torch.nn.modules import transformer
from torch.nn.modules.batchnorm import _BatchNorm

from autopar.errors import AutoparWarning
from autopar.ir.refusals import is_rank_0, stack_files

aten = torch.ops.aten

_LOSS_GRADIENTS = (
    aten.mse_loss_backward.default,
    aten.smooth_l1_loss_backward.default,
    aten.huber_loss_backward.default,
    aten.soft_margin_loss_backward.default,
    aten.binary_cross_entropy_backward.default,
)


@contextlib.contextmanager
def masks_as_they_are() -> Iterator[None]:
    """While it is open, `nn.Transformer` takes its masks as they are, and does not look whether their values happen to
    be those of a causal mask, for which another kernel computes the same."""
    detects = getattr(transformer, "_detect_is_causal_mask", None)
    if detects is None:
        yield
        return

    def said(mask: torch.Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
        return is_causal is True

    transformer._detect_is_causal_mask = said
    try:
        yield
    finally:
        transformer._detect_is_causal_mask = detects


@contextlib.contextmanager
def cumulative_averages(model: nn.Module) -> Iterator[bool]:
    """While it is open, batch normalization with `momentum=None` can be traced; whether the model has any.

    It averages over all batches so far, and reads their number as a Python number, of which tracing knows nothing. So
    it is done with the number as a tensor, in float64, as PyTorch's kernels compute the average."""
    found = any(isinstance(m, _BatchNorm) and m.momentum is None and m.track_running_stats for m in model.modules())
    before = _BatchNorm.forward.__code__
    if found:
        _BatchNorm.forward.__code__ = _batch_norm.__code__
    try:
        yield found
    finally:
        _BatchNorm.forward.__code__ = before


def _batch_norm(self: Any, input: torch.Tensor) -> torch.Tensor:
    """`_BatchNorm.forward`, in whose module this code runs."""
    self._check_input_dim(input)
    counts = self.training and self.track_running_stats and self.num_batches_tracked is not None
    if counts:
        self.num_batches_tracked.add_(1)
    if not counts or self.momentum is not None:
        own = not self.training or self.track_running_stats
        mean, variance = (self.running_mean, self.running_var) if own else (None, None)
        trains = self.training or (self.running_mean is None and self.running_var is None)
        return F.batch_norm(input, mean, variance, self.weight, self.bias, trains, self.momentum or 0.0, self.eps)
    mean, variance = torch.zeros_like(self.running_mean), torch.zeros_like(self.running_var)
    result = F.batch_norm(input, mean, variance, self.weight, self.bias, True, 1.0, self.eps)  # the batch's own
    share = 1.0 / self.num_batches_tracked.double()
    for held, value in ((self.running_mean, mean), (self.running_var, variance)):
        held.copy_(share * value.double() + (1 - share) * held.double())
    return result


class Distributions:
    """Has `torch.distributions` leave the values of parameters unchecked while it is open, once it is told to."""

    def __init__(self) -> None:
        self._before: bool | None = None

    def __enter__(self) -> Distributions:
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            Distribution.set_default_validate_args(self._before)

    def switch_off(self, e: BaseException) -> bool:
        """Leaves them unchecked if that is where a capture broke; `False` where it did not, or they already are."""
        folder = str(Path(torch.distributions.__file__).parent)
        if self._before is not None or not any(file.startswith(folder) for file in stack_files(e)):
            return False
        self._before = bool(Distribution._validate_args)
        for (
            pair,
            divergence,
        ) in kl._KL_REGISTRY.items():  # looked up without being searched for, as from a second call on
            kl._KL_MEMOIZE.setdefault(pair, divergence)
        Distribution.set_default_validate_args(False)
        if self._before and is_rank_0():
            warnings.warn(
                "the captured training step does not check the parameters of torch.distributions, as eager PyTorch "
                "does: to have the same everywhere, pass validate_args=False",
                AutoparWarning,
                stacklevel=2,
            )
        return True


@contextlib.contextmanager
def traceable_means(is_empty: bool) -> Iterator[None]:
    """While it is open, for an empty batch, the gradient of a mean over no elements is traced as an empty tensor:
    PyTorch's shape rules for these losses divide by the number of elements in Python, and fail, where its operators
    do not."""
    from torch._subclasses.fake_impls import op_implementations_dict as rules

    if not is_empty:
        yield
        return
    decompositions: dict[Any, Any] = torch._decomp.decomposition_table  # they would be asked first
    before = {op: decompositions[op] for op in _LOSS_GRADIENTS if op in decompositions}
    try:
        for op in before:
            decompositions[op] = _guarded(before[op])
        rules.update(dict.fromkeys(_LOSS_GRADIENTS, _empty_gradient))
        yield
    finally:
        decompositions.update(before)
        for op in _LOSS_GRADIENTS:
            rules.pop(op, None)


def _empty_gradient(mode: Any, op: Any, gradient: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any) -> Any:
    if values.numel():
        return NotImplemented
    with mode:
        return values * gradient


def _guarded(rule: Any) -> Any:
    def guarded(gradient: torch.Tensor, values: torch.Tensor, *rest: Any, **settings: Any) -> Any:
        return rule(gradient, values, *rest, **settings) if values.numel() else values * gradient

    return guarded
