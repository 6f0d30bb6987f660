"""Whether the parts of a checkpoint fit a model and an optimizer; nothing is changed by looking."""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.errors import SpecError, did_you_mean
from autopar.runtime.optimizers.state import per_element

_SAMPLES = 64
"""Elements of each tensor by which ranks compare what they are given."""
_SWITCHES = ("foreach", "fused")
"""Settings that PyTorch's optimizers take as True, False or None."""


class _WithoutCopies(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered, `load_state_dict` checks names and shapes as ever, but copies nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            return args[0]
        return func(*args, **(kwargs or {}))


def check_module(what: str, module: nn.Module, saved: Any, strict: bool = True, converts: bool = False) -> None:
    """Raises `SpecError`, with a tensor's name, what was found and what was expected, unless the module can load
    `saved`. `what`: the checkpoint's key, for messages; `converts`: whether values may be rounded to the module's
    dtypes, as PyTorch does without a word."""
    if not isinstance(saved, Mapping):
        raise SpecError(f"the checkpoint's '{what}' is a {type(saved).__name__}; expected a dict of tensors")
    own = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    for name, mine in own.items():
        if name not in saved:
            continue
        found = saved[name]
        if not isinstance(found, torch.Tensor):
            raise SpecError(f"the checkpoint's {what} has a {type(found).__name__} for '{name}'; expected a tensor")
        if found.shape != mine.shape:
            raise SpecError(
                f"the checkpoint's {what} has shape {tuple(found.shape)} for '{name}'; expected {tuple(mine.shape)}"
            )
        if not converts and not _holds(mine.dtype, found.dtype):
            raise SpecError(
                f"the checkpoint's {what} has dtype {found.dtype} for '{name}'; expected {mine.dtype}, or one whose "
                "values it holds: convert the model or the checkpoint"
            )
    try:
        with _WithoutCopies():  # type: ignore[no-untyped-call]
            module.load_state_dict(saved, strict=strict)
    except (RuntimeError, KeyError, TypeError, AttributeError) as e:
        hint = _first_unknown(saved, module)
        raise SpecError(f"the checkpoint's '{what}' does not fit: {' '.join(str(e).split())[:2000]}{hint}") from e


def check_settings(index: int, optimizer: Optimizer, own: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Raises `SpecError` unless a saved group's settings can be those of the optimizer's group `index`."""
    place = f"the checkpoint's optimizer.param_groups[{index}]"
    missing = sorted(k for k in optimizer.defaults if k not in saved)
    unknown = sorted(str(k) for k in saved if k not in own and k not in ("initial_lr", "max_lr", "min_lr"))
    if missing and unknown:
        raise SpecError(
            f"{place} has {', '.join(unknown)} and no {', '.join(missing)}: it is not of {type(optimizer).__name__}"
        )
    for key, mine in own.items():
        if key == "params" or key not in saved:
            continue
        theirs = saved[key]
        if _is_number(mine) and not _is_number(theirs):
            raise SpecError(f"{place} has {str(theirs)[:60]!r} for '{key}'; expected a number, as {mine!r}")
        if isinstance(mine, (list, tuple)):
            if not isinstance(theirs, (list, tuple)) or len(theirs) != len(mine):
                raise SpecError(
                    f"{place} has {str(theirs)[:60]!r} for '{key}'; expected {len(mine)} values, as {mine!r}"
                )
            wrong = [t for m, t in zip(mine, theirs, strict=True) if _is_number(m) and not _is_number(t)]
            if wrong:
                raise SpecError(f"{place} has {str(wrong[0])[:60]!r} in '{key}'; expected numbers, as {mine!r}")
        if mine is None and key not in _SWITCHES and not _is_plain(theirs):
            raise SpecError(f"{place} has a {type(theirs).__name__} for '{key}'; expected a number or None")
        is_switch = isinstance(mine, bool) or (mine is None and key in _SWITCHES)
        if is_switch and not isinstance(theirs, (bool, type(None))):
            raise SpecError(f"{place} has {str(theirs)[:60]!r} for '{key}'; expected True or False")


def checked_state(
    name: str,
    saved: Mapping[Any, Any],
    expected: Mapping[str, torch.Tensor] | None,
    parameter: torch.Tensor,
    elementwise: bool,
) -> dict[str, Any]:
    """A parameter's optimizer state as the optimizer needs it; raises `SpecError`, with the parameter's name, where it
    cannot be. `expected`: what the optimizer would begin with, None where that is not known."""
    what = f"the checkpoint's optimizer state of '{name}'"
    if expected is not None:
        missing = sorted(expected.keys() - saved.keys())
        if missing:
            raise SpecError(f"{what} has no '{missing[0]}'; it has {', '.join(map(repr, saved)) or 'nothing'}")
    found: dict[str, Any] = {}
    for key, value in saved.items():
        like = None if expected is None else expected.get(key)
        if like is not None:
            found[key] = _as(like, value, f"{what} has, as '{key}',")
        elif isinstance(value, torch.Tensor):
            fits = value.dim() == 0 or value.numel() == 1 or value.shape == parameter.shape
            if elementwise and not fits:
                raise SpecError(
                    f"{what} has, as '{key}', a tensor of shape {tuple(value.shape)}; expected "
                    f"{tuple(parameter.shape)}, or one element"
                )
            found[key] = value.to(parameter.device) if per_element(value, parameter.shape) else value
        else:
            found[key] = copy.deepcopy(value)
    return found


def check_scale(own: GradScaler, saved: Any) -> None:
    """Raises `SpecError` unless what a checkpoint has of a loss's scale is a state of a `GradScaler`."""
    expected = own.state_dict()
    if not isinstance(saved, Mapping) or saved.keys() != expected.keys():
        raise SpecError(f"the checkpoint's 'loss_scale' is no dict with {', '.join(expected)}, as GradScaler makes it")
    for key, value in saved.items():
        if (
            type(value) not in (int, float)
            or not (math.isfinite(value) and value >= 0)
            or (key == "scale" and not value)
        ):
            raise SpecError(f"the checkpoint's 'loss_scale' has {value!r} as '{key}'; expected a number, not negative")


def digest(checkpoint: Mapping[str, Any]) -> str:
    """A hash over names, shapes, plain values, and some elements of each tensor, to compare ranks by."""
    hashed = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, Mapping):
            for key in sorted(value, key=str):
                hashed.update(f"{key}:".encode(errors="replace"))
                add(value[key])
        elif isinstance(value, (list, tuple)):
            for item in value:
                add(item)
        elif isinstance(value, torch.Tensor):
            hashed.update(f"{value.dtype}{tuple(value.shape)}".encode())
            hashed.update(_sampled(value))
        elif value is None or isinstance(value, (bool, int, float, str)):
            hashed.update(repr(value).encode(errors="replace"))

    add(checkpoint)
    return hashed.hexdigest()[:16]


def _sampled(value: torch.Tensor) -> bytes:
    if type(value) not in (torch.Tensor, nn.Parameter) or value.layout != torch.strided or value.is_quantized:
        return b""
    flat = value.detach().reshape(-1)
    some = flat[:: max(1, flat.numel() // _SAMPLES)]
    return bytes(torch.empty(some.shape, dtype=some.dtype).copy_(some).view(torch.uint8).numpy().tobytes())


def _as(like: torch.Tensor, value: Any, said: str) -> torch.Tensor:
    """The value as a tensor like the one that the optimizer would make."""
    if like.dim() == 0 and not isinstance(value, torch.Tensor) and _is_number(value):  # a step, of an older PyTorch
        return torch.full_like(like, float(value))
    if not isinstance(value, torch.Tensor):
        raise SpecError(f"{said} a {type(value).__name__}; expected a tensor of shape {tuple(like.shape)}")
    if value.shape != like.shape:
        raise SpecError(f"{said} a tensor of shape {tuple(value.shape)}; expected {tuple(like.shape)}")
    if value.dtype != like.dtype and (not value.is_floating_point() or not like.is_floating_point()):
        raise SpecError(f"{said} a tensor of {value.dtype}; expected {like.dtype}")
    # Between floating-point formats, PyTorch's own `load_state_dict` converts as well.
    return value.detach().to(like.device, like.dtype)


def _holds(dtype: torch.dtype, other: torch.dtype) -> bool:
    """Whether `dtype` holds every value of `other`, of the same kind."""
    if dtype == other:
        return True
    same_kind = (dtype.is_floating_point, dtype.is_complex) == (other.is_floating_point, other.is_complex)
    try:
        return same_kind and dtype != torch.bool and torch.promote_types(dtype, other) == dtype
    except RuntimeError:  # of formats of 8 bits
        return False


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_plain(value: Any) -> bool:
    """Whether a setting that is None here may have this value: an optimizer of the user's may take text, or several
    numbers, in its place."""
    if isinstance(value, (list, tuple)):
        return all(_is_number(v) for v in value)
    return value is None or isinstance(value, (bool, str)) or _is_number(value)


def _first_unknown(saved: Mapping[Any, Any], module: nn.Module) -> str:
    known = module.state_dict().keys()
    unknown = next((str(k) for k in saved if k not in known), None)
    if unknown is None:
        return ""
    if unknown.startswith("module."):
        return "; the names begin with 'module.', as those of DistributedDataParallel do: save its .module"
    return did_you_mean(unknown, known)
