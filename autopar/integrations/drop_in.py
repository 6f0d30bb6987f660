"""A model that takes `DistributedDataParallel`'s place in a framework, which has no batch to show when it wraps one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from autopar.api import optimize
from autopar.errors import CaptureError, PlanError, PlanMismatchError, SignatureError
from autopar.integrations.buffers import SharedBuffers
from autopar.integrations.ranks import Weight, as_patient, equal, make_equal, samples, share, sums
from autopar.ir.batch import bind, flatten
from autopar.runtime.drop_in.module import SyncedModule, as_it_was_saved, as_of_the_model, copied
from autopar.runtime.model.evaluated import as_it_is
from autopar.runtime.uncaptured.gradient_program import EagerGradientProgram
from autopar.spec.cluster import ClusterSpec
from autopar.spec.plan import Plan


def by_keyword(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A call's arguments, by keyword where the model takes them so, and as they are where it does not. PEFT's
    models, which take `*args`, hand them to the model that they are made of. Raises `SignatureError` where they do not
    fit."""
    base = getattr(model, "get_base_model", None)
    try:
        return (), bind(base() if args and callable(base) else model, args, kwargs)
    except CaptureError as e:
        if isinstance(e, SignatureError):
            raise
        return args, kwargs  # of a model that is run eagerly then


@contextlib.contextmanager
def shown(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    """A call's arguments as one example for `optimize`, by keyword or by position. Where there are both, which only a
    model is given that runs eagerly, it takes them as a pair while this is open."""
    if not (args and kwargs):
        yield kwargs or args
        return
    own, forward = "forward" in vars(model), model.forward
    vars(model)["forward"] = lambda *args: forward(*args[0], **args[1])
    try:
        yield args, kwargs
    finally:
        del vars(model)["forward"]
        if own:
            vars(model)["forward"] = forward


class DropIn(nn.Module):
    """A model whose `backward()` leaves synchronized gradients. It is captured and planned with its first batch.

    Each rank's loss counts by `weight`. Within a step that accumulates gradients, the ranks' micro-batches are
    weighted one by one, as one process that runs the same loop on all ranks' samples would have it. Its random numbers
    are those of PyTorch's own generator, whose state the frameworks keep in their checkpoints.
    """

    def __init__(
        self, model: nn.Module, cluster: ClusterSpec | None, options: Mapping[str, Any], weight: Weight = samples
    ) -> None:
        """By all ranks together: the model takes rank 0's values. `options`: more arguments of `autopar.optimize`."""
        super().__init__()
        self.module = model
        self.register_load_state_dict_pre_hook(as_it_was_saved)  # type: ignore[no-untyped-call]
        self._cluster, self._options, self._weight = cluster, dict(options), weight
        self._synced: list[SyncedModule] = []  # in a list, as it is no part of the model
        self._synchronizes = True
        make_equal([*model.parameters(), *model.buffers()])
        self._buffers_of_ranks = [SharedBuffers(model, are_alike=True)]  # likewise
        self._follows_synchronized = True
        """Whether gradients of the last forward pass that trained are synchronized; before the first one, too."""

    def __deepcopy__(self, memo: dict[int, Any]) -> DropIn:
        """A copy of the model; where it is trained, by all ranks, it is captured and planned by itself."""
        own = {"_synced": [], "_options": self._options, "_synchronizes": True, "_buffers_of_ranks": []}
        made: DropIn = copied(self, memo, own)
        made._buffers_of_ranks.append(SharedBuffers(made.module, are_alike=False))
        return made

    @property
    def plan(self) -> Plan:
        """What was chosen. Raises `PlanMismatchError` before the first batch."""
        if not self._synced:
            raise PlanMismatchError("there is no plan before the first training batch, on which the model is captured")
        return self._synced[0].plan

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        (buffers,) = self._buffers_of_ranks
        if not (torch.is_grad_enabled() and self.module.training):
            buffers.share_changing()
            for synced in self._synced:  # frameworks evaluate on all ranks, as DDP asks for
                synced.program.statistics.share()
            return as_it_is(self.module, args, kwargs)
        if self._follows_synchronized:
            buffers.share()
        args, kwargs = by_keyword(self.module, args, kwargs)
        if not self._synced and self._is_frozen and not self._options.get("sync_batch_norm"):
            return as_it_is(self.module, args, kwargs)  # as a critic is for the first update of its generator
        self.capture(args, kwargs)
        output = self._synced[0](*args, **kwargs)
        self._follows_synchronized = self._synchronizes
        joint = self._synced[0].program.graph.joint
        buffers.note_trained([name for name, _ in joint.mutations] if joint is not None else ())
        return output

    @property
    def _is_frozen(self) -> bool:
        return not any(p.requires_grad for p in self.module.parameters())

    def capture(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Captures and plans the model for a call of it, unless that was done. By all ranks together."""
        if not self._synced:
            if self._is_frozen:
                raise PlanError(
                    f"all parameters of the {type(self.module).__name__} are frozen in its first training batch, and a "
                    "plan is made for those that train then. Thaw them before, and leave out Lightning's "
                    "toggle_optimizer(), which freezes what other optimizers update"
                )
            args, kwargs = by_keyword(self.module, args, kwargs)
            with shown(self.module, args, kwargs) as inputs:
                self._synced.append(self._captured(inputs))
            self._synced[0].program.synchronizes = self._synchronizes

    def runs_eagerly(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the model, which was captured or could not be, runs as it is on a batch. By all ranks together."""
        program = self._synced[0].program
        if isinstance(program, EagerGradientProgram):
            return True
        if program._gathers:  # samples of all ranks, which no batch is run without
            return False
        return program.compile_for(bind(self.module, *by_keyword(self.module, args, kwargs))).eager is not None

    @contextlib.contextmanager
    def no_sync(self, synchronizes: bool = False) -> Iterator[None]:
        """Within it, `backward()` keeps gradients on this rank, to be synchronized with those of the next `backward()`
        outside; with `synchronizes`, it sends them, though this stands within another `no_sync()`."""
        before = self._synchronizes
        self._set_synchronizes(synchronizes)
        try:
            yield
        finally:
            self._set_synchronizes(before)

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether gradients are synchronized, as loops set it that accumulate gradients without `no_sync()`."""
        return self._synchronizes

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        self._set_synchronizes(value)

    def reads(self, inputs: dict[str, Any], name: str) -> bool:
        """Whether what a captured model computes depends on one of its inputs, a tensor, in a batch that it saw.
        `inputs`: by keyword, in any order."""
        inputs = bind(self.module, (), inputs)  # in the order in which they were captured
        tensors = flatten(inputs).tensors
        joint = self._synced[0].program.compile_for(inputs).joint
        nodes = joint.module.graph.find_nodes(op="placeholder")
        read = {key for (kind, key), n in zip(joint.inputs, nodes, strict=True) if kind == "batch" and n.users}
        return any(t is inputs[name] and i in read for i, t in enumerate(tensors))

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The model's own, as one process would have it."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Loads the model's own, or what was saved of it within `DistributedDataParallel`."""
        if assign:
            raise ValueError("load_state_dict(assign=True) would replace the tensors that the program was made for")
        return self.module.load_state_dict(as_of_the_model(self.module, state_dict), strict)

    def _captured(self, inputs: Any) -> SyncedModule:
        made: SyncedModule = optimize(
            self.module, self._cluster, example_inputs=inputs, weight=self._share, **as_patient(self._options)
        )
        made.program.use_pytorch_generator()
        return made

    def _share(self, inputs: Any) -> float:
        """How much this batch counts. Where gradients accumulate, its part of what all ranks' micro-batches have."""
        own, program = self._weight(inputs), self._synced[0].program
        if self._weight is equal or (program.synchronizes and not program.accumulates):
            return own
        return share(own, *sums([own], next(self.module.parameters()).device))

    def _set_synchronizes(self, value: bool) -> None:
        self._synchronizes = value
        for synced in self._synced:
            synced.program.synchronizes = value
