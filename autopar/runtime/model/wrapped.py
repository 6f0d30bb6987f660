"""What `optimize` is given that is no model, has no values, or that something else synchronizes: what to do instead."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from autopar.errors import CaptureError
from autopar.ir.weightless import first_without_values, lacks_values
from autopar.runtime.model.eager import owners_of

_WRAPPERS = ("FullyShardedDataParallel", "SyncedModule", "DropIn", "DeepSpeedEngine")
"""By their names, as they may not be installed, or import this."""
_FRAMEWORKS = {
    ("transformers", "Trainer"): "call autopar.integrations.transformers.use(trainer) before trainer.train()",
    ("accelerate", "Accelerator"): "call autopar.integrations.accelerate.use(accelerator) before accelerator.prepare()",
    ("lightning", "Trainer"): 'import autopar.integrations.lightning, and make it with strategy="autopar"',
    ("pytorch_lightning", "Trainer"): "import Trainer from lightning.pytorch instead of pytorch_lightning, import "
    'autopar.integrations.lightning, and make it with strategy="autopar"',
}


def check_unwrapped(model: Any) -> None:
    """Raises `CaptureError`, which says what to do, where `model` is a framework's trainer, or is wrapped by something
    that synchronizes gradients itself."""
    classes = [(c.__module__.split(".")[0], c.__name__) for c in type(model).__mro__]
    todo = next((_FRAMEWORKS[c] for c in classes if c in _FRAMEWORKS), None)
    if todo is not None:
        raise CaptureError(f"optimize() takes a model, and this is a {type(model).__name__}: {todo}")
    if not isinstance(model, nn.Module):
        raise CaptureError(f"optimize() takes a model, a torch.nn.Module, and this is a {type(model).__name__}")
    wrapper = next((n for _, n in classes if n in _WRAPPERS), None)
    if wrapper is not None or isinstance(model, DistributedDataParallel | DataParallel):
        raise CaptureError(
            f"the model is wrapped in {wrapper or type(model).__name__} already, which synchronizes gradients itself: "
            "pass the model that is wrapped, model.module"
        )
    if any(name == "FSDPModule" for _, name in classes):
        raise CaptureError(
            "fully_shard() was called on the model, which synchronizes gradients itself: pass the model without it; "
            "plans shard parameters where memory is short"
        )
    if any(c in (("lightning", "LightningModule"), ("pytorch_lightning", "LightningModule")) for c in classes):
        _check_lightning_module(model)


def check_has_values(model: nn.Module, loss_fn: Any, example_inputs: Any) -> None:
    """Raises `CaptureError`, which says what to do, where the model or the batch has no values to train with, or the
    model is made of tensors that autograd does not take."""
    for prefix, owner in owners_of(model, loss_fn).items():
        name = next((n for n, t in (*owner.named_parameters(), *owner.named_buffers()) if is_lazy(t)), "")
        if name:
            raise CaptureError(
                f"'{prefix}{name}' has no shape yet, as it is that of a lazy module: run the model once on a batch, "
                "under torch.no_grad(), make the optimizer behind that, and then call optimize()"
            )
    name = first_without_values(model, loss_fn)
    if name:
        raise CaptureError(
            f"'{name}' has no values (it is on the meta device, or fake): autopar.plan needs none, but what optimize() "
            "returns trains. Make the model with its weights, or have it make room for them "
            "(model.to_empty(device=...)) and load them; then pass it, with the plan that was made without them: "
            "optimize(model, plan=plan, ...)"
        )
    if any(isinstance(x, torch.Tensor) and lacks_values(x) for x in pytree.tree_leaves(example_inputs)):
        raise CaptureError(
            "example_inputs hold a tensor without values (on the meta device, or fake), with which a model can be "
            "planned for, but not trained: pass a batch as the training loop has it"
        )
    for prefix, owner in owners_of(model, loss_fn).items():
        name = next((n for n, t in (*owner.named_parameters(), *owner.named_buffers()) if t.is_inference()), "")
        if name:
            raise CaptureError(
                f"'{prefix}{name}' was made within torch.inference_mode(), so autograd takes no part in it, here or in "
                "plain PyTorch: make the model outside of it, or within torch.no_grad()"
            )


def _check_lightning_module(model: nn.Module) -> None:
    """Raises `CaptureError` where a LightningModule has nothing to capture but its `training_step`."""
    if type(model).forward.__module__.split(".")[0] in ("lightning", "pytorch_lightning", "torch"):
        raise CaptureError(
            f"{type(model).__name__} is a LightningModule without a forward of its own, and its training_step is the "
            'Trainer\'s to call: import autopar.integrations.lightning, and make a Trainer with strategy="autopar"'
        )
