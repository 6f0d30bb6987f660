"""Hugging Face's Trainer, and trainers made from it: the model is synchronized by autopar's plans.

    trainer = Trainer(model=model, args=args, train_dataset=data)
    autopar.integrations.transformers.use(trainer, cluster)
    trainer.train()

Trainer scales losses itself, in ways that suit `DistributedDataParallel`'s plain mean over the ranks: by the number of
ranks where the loss is a sum divided by `num_items_in_batch` of all ranks. That goes wrong by the same number for the
many models that ignore `num_items_in_batch`. Here each rank divides by its own count, so that its loss is a mean either
way, and is multiplied with what the rank has of all ranks' labels.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_map_only
from transformers import Trainer
from transformers.trainer_pt_utils import find_batch_size

from autopar.errors import AutoparWarning, SpecError
from autopar.integrations import accelerate
from autopar.integrations.drop_in import DropIn, by_keyword
from autopar.integrations.options import check_options
from autopar.integrations.ranks import equal, samples, share, sums
from autopar.spec.cluster import ClusterSpec


def use(trainer: Trainer, cluster: ClusterSpec | None = None, **options: Any) -> Any:
    """Has a Trainer synchronize its model by autopar's plans; returns the Trainer.

    Args:
        trainer: a `Trainer`, or one of a class made from it, that has not trained yet. On one process nothing changes.
        cluster: what to plan for; by default what `ClusterSpec.detect()` sees.
        options: further arguments of `autopar.optimize`, such as `plan`, `fidelity` or `compile`.

    Raises:
        SpecError: it is no Trainer, has trained or evaluated, or is set to what autopar does not go with; an option is
            none of `autopar.optimize`'s, or has no such value.
    """
    if not isinstance(trainer, Trainer):
        raise SpecError(f"use() takes a transformers.Trainer, not {type(trainer).__name__}")
    if "weight" in options:
        raise SpecError("a Trainer's batches count by their labels: weight= has no place there")
    check_options(options)
    if not isinstance(trainer, AutoparTrainer):
        trainer.__class__ = type(f"Autopar{type(trainer).__name__}", (AutoparTrainer, type(trainer)), {})
    adopted: Any = trainer
    adopted.autopar_options = (cluster, options)
    adopted.adopt_accelerator()
    return adopted


class AutoparTrainer(Trainer):
    """A Trainer whose accelerator puts `DropIn` where accelerate puts `DistributedDataParallel`; made by `use`."""

    autopar_options: tuple[ClusterSpec | None, dict[str, Any]]

    def adopt_accelerator(self) -> None:
        cluster, options = self.autopar_options
        accelerate.use(self.accelerator, cluster, weight=equal, **options)
        self._weights: _StepWeights | None = None
        self._said = False
        self.accelerator.autopar.share = lambda: 1.0 if self._weights is None else self._weights.now

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()  # again, where Trainer looks for a batch size that fits
        self.adopt_accelerator()

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device) -> Any:
        if self.accelerator.num_processes == 1:
            return super().get_batch_samples(epoch_iterator, num_batches, device)
        with self._own_items():
            batches, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        counts = [self._count(batch) for batch in batches]
        mine = [sum(counts) if items is None else float(items), *counts]
        shares = [share(own, total) for own, total in zip(mine, sums(mine, self.args.device), strict=True)]
        self._weights = _StepWeights(shares[0], shares[1:])
        # A rank that has no labels has a loss of 0 / 1 then, rather than 0 / 0, and no part in the mean.
        return batches, items.clamp(min=1) if isinstance(items, torch.Tensor) else items

    def training_step(self, model: torch.nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        if not isinstance(model, DropIn) or self._weights is None:
            return super().training_step(model, inputs, num_items_in_batch)
        items = _Watched.of(num_items_in_batch) if isinstance(num_items_in_batch, torch.Tensor) else None
        self._weights.next(model, items)
        with self._own_items(), self._weights.watching():
            loss = super().training_step(model, inputs, num_items_in_batch if items is None else items)
        if not self._said:
            self._said = True
            self._say_what_ddp_would_do()
        return loss * self._weights.now

    def prediction_step(
        self, model: torch.nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Any, Any, Any]:
        """The loss is the mean over what all ranks' batches have, the same on each: Trainer takes the mean over ranks,
        and of the first ones alone where the last batch is short."""
        if self.accelerator.num_processes == 1:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        own = self._count(self._evaluated(inputs))
        with self._own_items():
            loss, logits, labels = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        if isinstance(loss, torch.Tensor) and not loss.dim():
            weighted = loss.double() * own if own else torch.zeros_like(loss, dtype=torch.float64)
            total, count = sums([float(weighted), own], self.args.device)
            loss = loss if not count else torch.full_like(loss, total / count)
        return loss, logits, labels

    def _evaluated(self, inputs: Any) -> Any:
        """A batch without the samples from the beginning that accelerate has filled it up with, and leaves out of what
        it gathers."""
        state, size = self.accelerator.gradient_state, find_batch_size(inputs)  # type: ignore[no-untyped-call]
        is_filled = state.end_of_dataloader and state.remainder > 0 and self.accelerator.even_batches
        if not (is_filled and size and isinstance(inputs, Mapping)):
            return inputs
        kept = min(max(state.remainder - self.accelerator.process_index * size, 0), size)
        return {k: v[:kept] if isinstance(v, torch.Tensor) and v.dim() else v for k, v in inputs.items()}

    @contextlib.contextmanager
    def _own_items(self) -> Iterator[None]:
        """Within it, `num_items_in_batch` is this rank's, and no loss is multiplied with the number of ranks."""
        before, self.args.average_tokens_across_devices = self.args.average_tokens_across_devices, False
        try:
            yield
        finally:
            self.args.average_tokens_across_devices = before

    def _say_what_ddp_would_do(self) -> None:
        """Warns, once, where a run under `DistributedDataParallel` has other gradients than one process."""
        assert self._weights is not None
        if self.args.average_tokens_across_devices and self._weights.ignores_items and self.is_world_process_zero():
            n = self.accelerator.num_processes
            warnings.warn(
                f"{type(self.model).__name__}'s loss is a mean that ignores num_items_in_batch, which Trainer takes it "
                f"to be divided by. Under DistributedDataParallel, Trainer multiplies such losses and their gradients "
                f"with the number of ranks, {n}; here they are those of one process",
                AutoparWarning,
                stacklevel=2,
            )

    def _count(self, batch: Any) -> float:
        """The labels of a micro-batch that are not ignored, as Trainer counts them; its samples, where it has none."""
        given = batch if isinstance(batch, Mapping) else {}
        labels, shifted = given.get("shift_labels", given.get("labels")), "shift_labels" in given
        if not isinstance(labels, torch.Tensor) or not labels.dim():
            return samples(batch)
        return float((labels[..., 1:] if self._loss_shifts_labels and not shifted else labels).ne(-100).sum())


class _StepWeights:
    """What this rank's losses are multiplied with in one optimizer step, whose gradients accumulate."""

    def __init__(self, of_step: float, of_batches: list[float]) -> None:
        """`of_step`: for losses that are divided by the labels of all this rank's micro-batches. `of_batches`: for
        losses that are means over their own micro-batch."""
        self._of_step, self._of_batches = of_step, of_batches
        self._at = -1
        self._model: DropIn | None = None
        self._items: _Watched | None = None
        self._inputs: dict[str, Any] | None = None

    def next(self, model: DropIn, items: _Watched | None) -> None:
        """Goes on to the next micro-batch."""
        self._at, self._model, self._items, self._inputs = self._at + 1, model, items, None

    @property
    def now(self) -> float:
        """Once the loss of this micro-batch is computed, what it is multiplied with."""
        of_batch = self._of_batches[min(self._at, len(self._of_batches) - 1)]
        if len(self._of_batches) == 1 or of_batch == self._of_step:
            return of_batch  # the same for both
        return self._of_step if self._divides_by_items() else of_batch

    @property
    def ignores_items(self) -> bool:
        """Whether this micro-batch's loss was computed without the `num_items_in_batch` that it was given."""
        return self._items is not None and not self._divides_by_items()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Within it, what the model is given is looked at, and is given plain tensors."""
        assert self._model is not None
        handle = self._model.register_forward_pre_hook(self._given, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()

    def _given(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        plain = {k: v.plain() if isinstance(v, _Watched) else v for k, v in kwargs.items()}
        model.capture(args, plain)
        if self._items is not None and model.runs_eagerly(args, plain):  # and shows whether it computes with the items
            return args, kwargs
        self._inputs = by_keyword(model.module, args, plain)[1]
        return args, plain

    def _divides_by_items(self) -> bool:
        """Whether this micro-batch's loss was computed with `num_items_in_batch`."""
        if self._items is None or self._items.used:
            return self._items is not None
        name = "num_items_in_batch"
        return self._model is not None and name in (self._inputs or {}) and self._model.reads(self._inputs or {}, name)


_LOOKS = ("__get__", "dim", "size", "stride", "numel", "is_contiguous", "is_inference", "is_conj", "is_neg")
"""Functions of tensors that read none of their values, where they return no tensor; attributes are "__get__"."""


class _Watched(torch.Tensor):
    """A tensor that knows whether anything was computed with it, rather than its shape or dtype looked at."""

    used: bool
    _plain: torch.Tensor

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Watched:
        made = tensor.as_subclass(cls)
        made.__dict__.update(used=False, _plain=tensor)
        return made

    def plain(self) -> torch.Tensor:
        return self.__dict__["_plain"]  # type: ignore[no-any-return]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        watched: list[_Watched] = []

        def plain(value: _Watched) -> torch.Tensor:
            watched.append(value)
            return value.plain()

        args, kwargs = tree_map_only(_Watched, plain, (args, kwargs or {}))
        found = func(*args, **kwargs)
        if func.__name__ not in _LOOKS or isinstance(found, torch.Tensor):
            for value in watched:
                value.__dict__["used"] = True
        return found
