"""Hugging Face accelerate: models that `Accelerator.prepare` is given are synchronized by autopar's plans.

    accelerator = autopar.integrations.accelerate.use(Accelerator(), cluster)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

The loop stays as it is: `accumulate`, `backward`, `clip_grad_norm_`, `unwrap_model`, `save_state` and the others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DDPCommunicationHookType, DistributedType, DynamoBackend
from torch import nn

from autopar.errors import SpecError
from autopar.integrations.drop_in import DropIn
from autopar.integrations.options import check_options
from autopar.integrations.ranks import Weight, samples
from autopar.integrations.ranks import equal as equal
from autopar.runtime.model.wrapped import check_unwrapped
from autopar.spec.cluster import ClusterSpec

OTHERS = ("DEEPSPEED", "FSDP", "MEGATRON_LM", "XLA")
"""Kinds of accelerate's distributed training that synchronize gradients, or spread parameters, by themselves."""


def use(
    accelerator: Accelerator, cluster: ClusterSpec | None = None, *, weight: Weight = samples, **options: Any
) -> Any:
    """Has an accelerator synchronize what it prepares from now on by autopar's plans; returns the accelerator.

    Args:
        accelerator: one that has prepared no model yet. On one process nothing changes.
        cluster: what to plan for; by default what `ClusterSpec.detect()` sees.
        weight: from a batch, the model's inputs by keyword, to how much its loss counts: of what the loss is a mean
            over, how much the batch has; by default its samples. `equal` is for a loss that your script divides by a
            count of all processes' batches and multiplies with `num_processes`, as accelerate recommends it for tokens.
        options: further arguments of `autopar.optimize`, such as `plan`, `fidelity` or `compile`.

    Raises:
        SpecError: it is no accelerator, has prepared a model, or is set to what autopar does not go with; an option is
            none of `autopar.optimize`'s, or has no such value.
    """
    if not isinstance(accelerator, Accelerator):
        raise SpecError(f"use() takes accelerate's Accelerator, not {type(accelerator).__name__}")
    if accelerator._models:
        raise SpecError("the accelerator has prepared a model: call use(accelerator) before accelerator.prepare(...)")
    _check(accelerator)
    check_options(options)
    if not isinstance(accelerator, AutoparAccelerator):
        accelerator.__class__ = type("AutoparAccelerator", (AutoparAccelerator, type(accelerator)), {})
    handler = accelerator.ddp_handler
    if handler is not None and handler.find_unused_parameters:
        options.setdefault("unused_parameters", "freeze")
    accelerator.autopar = _Settings(cluster, weight, options)
    return accelerator


class _Settings:
    """What `use` was given."""

    def __init__(self, cluster: ClusterSpec | None, weight: Weight, options: dict[str, Any]) -> None:
        self.cluster, self.weight, self.options = cluster, weight, options
        self.share: Callable[[], float] | None = None
        """What `backward` multiplies a loss with, where a caller knows it."""


class AutoparAccelerator(Accelerator):
    """An accelerator that puts `DropIn` where accelerate puts `DistributedDataParallel`; made by `use`."""

    autopar: _Settings

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        trains = not evaluation_mode and any(p.requires_grad for p in model.parameters())
        if self.num_processes == 1 or not trains or isinstance(model, DropIn):
            return super().prepare_model(model, device_placement, evaluation_mode)  # type: ignore[no-any-return]
        check_unwrapped(model)
        if getattr(model, "_is_accelerate_prepared", False):  # for evaluation, so that nothing synchronizes it yet
            self._models.append(model)
        else:
            model = super().prepare_model(model, device_placement, evaluation_mode=True)
        del model._is_accelerate_prepared  # the wrapper is, as with DistributedDataParallel
        wrapped = DropIn(model, self.autopar.cluster, self.autopar.options, self.autopar.weight)
        vars(wrapped)["_is_accelerate_prepared"] = True
        self._models[-1] = wrapped
        return wrapped

    def unwrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        inner = model.module if isinstance(model, DropIn) else model
        return super().unwrap_model(inner, *args, **kwargs)  # type: ignore[no-any-return]

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        share = self.autopar.share
        super().backward(loss if share is None else loss * share(), **kwargs)

    @contextlib.contextmanager
    def trigger_sync_in_backward(self, model: nn.Module) -> Iterator[None]:
        if isinstance(model, DropIn):
            with model.no_sync(synchronizes=True):
                yield
        else:
            with super().trigger_sync_in_backward(model):
                yield

    def join_uneven_inputs(self, joinables: list[Any], even_batches: bool | None = None) -> Any:
        if any(isinstance(j, DropIn) for j in joinables):
            raise SpecError(
                "join_uneven_inputs() has ranks train on while others have run out of batches, which autopar's plans "
                "have no place for: leave it out; with even_batches=True, accelerate's default, all ranks get equally "
                "many batches. Batches of unequal size are weighted as in one process"
            )
        return super().join_uneven_inputs(joinables, even_batches)


def _check(accelerator: Accelerator) -> None:
    """Raises `SpecError` where the accelerator is set to what autopar does not go with."""
    kind = accelerator.distributed_type
    if kind in {getattr(DistributedType, name) for name in OTHERS}:
        raise SpecError(
            f"accelerate is configured for {kind.value}, which has its own way to synchronize: configure it for plain "
            "multi-CPU or multi-GPU training ('accelerate config'), or start the script with torchrun"
        )
    if accelerator.state.dynamo_plugin.backend != DynamoBackend.NO:
        raise SpecError(
            f"accelerate is set to compile models with {accelerator.state.dynamo_plugin.backend.value}: leave that "
            "out, and pass compile=True to use(), which compiles what autopar captures"
        )
    handler = accelerator.ddp_handler
    hook = DDPCommunicationHookType.NO if handler is None else DDPCommunicationHookType(handler.comm_hook)
    if hook != DDPCommunicationHookType.NO:
        raise SpecError(
            f"DistributedDataParallelKwargs has the communication hook {hook.value}: leave it out; "
            'fidelity="rounded", passed to use(), allows 16 bits on the wire'
        )
    if handler is not None and not handler.broadcast_buffers:
        raise SpecError(
            "DistributedDataParallelKwargs has broadcast_buffers=False (Trainer's ddp_broadcast_buffers=False), with "
            "which each rank keeps its own buffers; under autopar all ranks have rank 0's: leave it out"
        )
