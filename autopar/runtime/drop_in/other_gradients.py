"""Gradients that reach a captured drop-in module's parameters from elsewhere, in one backward pass with the module's.

`DistributedDataParallel` averages whatever a backward pass adds up on a parameter. A captured module synchronizes what
its own graph computes, while that is computed; what comes from `module.module`, or from a term of the loss that reads
parameters, is averaged when the backward pass has ended, and nothing is sent where there is none. As the module's own
gradients are the same on all ranks by then, the mean of all that lies in `grad` is right.

Whether any rank has some, ranks tell each other after the 1st, 2nd, 4th, 8th, ... backward pass, and after each one
since some were seen; on CPUs, also after one of a batch that was not captured, of which all that comes is synchronized
unseen. Where the first ones come in another pass, ranks that find some say so in a message as long as the one that
every backward pass begins with: a rank that has none begins its next pass instead, and the sum shows it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.autograd.graph import get_gradient_edge

from autopar.backends.collectives import may_fail
from autopar.errors import AutoparWarning, CaptureError
from autopar.runtime.job.process_group import Group
from autopar.runtime.model.gradient_layout import laid_out

_ASKS = 2
"""Where ranks ask each other, in the message that begins a backward pass: behind weights and numbers of batches."""
_TELLS = 2.0**20
"""What says, in the place where ranks ask for it with a 1, that a message tells of gradients instead."""
_NEVER = "pass capture='never' to autopar.optimize"


@dataclass
class _Pass:
    """The backward pass under way."""

    task: int = -1
    """Autograd's number of it; where the module was called within a backward pass, that one's."""
    inner: int = -1
    """The number of the backward pass that has come through the module last, which a checkpoint may have begun."""
    weights: list[tuple[float, torch.Tensor]] = field(default_factory=list)
    """Of each call of the module: how much this rank's batches count on average, and the sums over the ranks of how
    much they count, and of how many they are."""
    own: dict[str, torch.Tensor] = field(default_factory=dict)
    """The module's gradients that autograd has not brought to the parameters yet."""
    added_up: set[str] = field(default_factory=set)
    """Parameters that several calls of the module have a gradient of, which come as one sum."""
    early: dict[str, Any] = field(default_factory=dict)
    """Hooks on parameters that the user has hooks on, too."""
    has_arrived: bool = False
    """Whether a gradient was added to `grad`."""
    found: set[str] = field(default_factory=set)
    """Parameters that others have a gradient of."""
    doubts: dict[str, torch.Tensor] = field(default_factory=dict)
    """Whether others have one, as a tensor."""


class OtherGradients:
    """Averages them over the ranks, weighted as the ranks' batches are."""

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], group: Group, clips: bool, ended: Callable[[], None]
    ) -> None:
        """`parameters`: by name. `clips`: whether the module clips its gradients. `ended`: called when what lies in
        `grad` after a backward pass is synchronized."""
        self._parameters = parameters
        self._ended = ended
        self.around = -1
        """Of the module's call whose gradients are computed: what `begin` returned before it."""
        self._group = group
        self._clips = clips
        self._accumulators: dict[str, Any] = {}
        """Autograd's nodes that add to `grad`, with hooks on them; they last for as long as they are held."""
        self._passes = 0
        self._were_seen = False
        """Whether a rank had some in a pass before; alike on all ranks."""
        self._are_taken = False
        """Whether a backward pass was `torch.autograd.grad` of parameters."""
        self._said = False
        self._left_out = -1
        """The backward pass that is left out."""
        self._pass = _Pass()

    def begin(self) -> int:
        """Before a call of the module. Returns autograd's number of the backward pass within which it is called, as by
        a checkpoint that begins one of its own, or -1: gradients are looked at until that one has ended."""
        task = torch._C._current_graph_task_id()
        if task != -1:
            Variable._execution_engine.queue_callback(self._end_last)
        return task

    def place(self) -> str:
        """Within a backward pass, before `expect`: which call of the module it is, of which backward pass."""
        task = torch._C._current_graph_task_id() if self.around == -1 else self.around
        if task != self._pass.task:
            return f"call 1 of backward pass {self._passes + 1}"
        return f"call {len(self._pass.weights) + 1} of backward pass {self._passes}"

    def expect(self, gradients: Mapping[str, torch.Tensor | None], weight: float, sums: torch.Tensor) -> None:
        """Within a backward pass, whose gradients autograd is about to add to `grad`: what the module delivers.
        `weight`: how much this rank's batches count on average, of this pass and those that were kept back. `sums`:
        what the message that has begun this backward pass adds up to over the ranks: weights, numbers of batches."""
        inner = torch._C._current_graph_task_id()
        task = inner if self.around == -1 else self.around
        if task != self._pass.task:
            self._abandon()
            self._pass.task = task
            self._passes += 1
            if task == inner:
                Variable._execution_engine.queue_callback(self._end_last)
        self._pass.inner = inner
        self._pass.weights.append((weight, sums))
        for name, gradient in gradients.items():
            if name not in self._accumulators:
                node = self._accumulators[name] = get_gradient_edge(self._parameters[name]).node
                node.register_prehook(partial(self._arrive, name))
            if gradient is None:
                continue
            if name in self._pass.own:
                self._pass.own[name] = self._pass.own[name] + gradient  # in the order in which autograd adds them up
                self._pass.added_up.add(name)
                continue
            self._pass.own[name] = gradient
            if self._parameters[name]._backward_hooks or (self._are_taken and self._is_looked_at):
                self._listen_early(name)

    def arrived(self) -> None:
        """Notes that the gradients of the backward pass under way are added to `grad` as it ends, not by autograd."""
        self._pass.has_arrived = True

    def forget(self, names: Collection[str]) -> None:
        """In the backward pass under way, these parameters' gradients are synchronized, wherever they come from."""
        self._pass.found.difference_update(names)
        for name in names:
            self._pass.doubts.pop(name, None)

    def leave_out(self) -> None:
        """Within a backward pass that keeps gradients back, others' too, which a later one synchronizes."""
        self._left_out = torch._C._current_graph_task_id()

    def _listen_early(self, name: str) -> None:
        """Has a hook see the parameter's gradient before the user's hooks change it."""
        p = self._parameters[name]
        self._pass.early[name] = hook = p.register_hook(partial(self._look, name))  # type: ignore[no-untyped-call]
        assert p._backward_hooks is not None
        p._backward_hooks.move_to_end(hook.id, last=False)  # type: ignore[attr-defined]

    def _arrive(self, name: str, gradients: Sequence[torch.Tensor | None]) -> None:
        """A gradient is about to be added to `grad`."""
        if torch._C._current_graph_task_id() not in (self._pass.task, self._pass.inner):
            return
        self._pass.has_arrived = True
        if name not in self._pass.early:
            self._look(name, gradients[0])

    def _look(self, name: str, gradient: torch.Tensor | None) -> None:
        own = self._pass.own.pop(name, None)
        if own is gradient:
            return
        if own is None or gradient is None or name not in self._pass.added_up:
            self._pass.found.add(name)
        else:
            self._pass.doubts[name] = ((gradient != own) & (own == own)).any()

    @property
    def _is_looked_at(self) -> bool:
        """Whether all ranks look at this backward pass."""
        return self._passes & (self._passes - 1) == 0

    def _end_last(self) -> None:
        """After a backward pass: what else waits for its end comes first, as it may synchronize gradients."""
        Variable._execution_engine.queue_callback(self._end)

    def _end(self) -> None:
        """After a backward pass, and all else that has waited for its end."""
        ended = self._pass
        self._abandon()
        if ended.task in (-1, self._left_out):
            return
        self._average_found(ended)
        if ended.has_arrived:
            self._ended()

    def _average_found(self, ended: _Pass) -> None:
        """Averages what others have a gradient of on any rank, if ranks tell each other after this backward pass."""
        found = ended.found
        if ended.doubts:
            differ = torch.stack([*ended.doubts.values()]).tolist()
            found.update(name for name, differs in zip(ended.doubts, differ, strict=True) if differs)
        if ended.own and not ended.has_arrived:
            self._are_taken = True
        if not ended.has_arrived:
            self._say(found, "torch.autograd.grad takes this rank's own: call backward(), and read grad")
            found = set()
        hooked = {n for n in found if self._parameters[n]._post_accumulate_grad_hooks}
        self._say(hooked, f"a post-accumulate hook was given this rank's own by then: {_NEVER}")
        found -= hooked
        if self._clips:
            self._say(found, f"clip_grad_norm clips the module's gradients without it: {_NEVER}")
        agreed = self._were_seen or self._is_looked_at or any(_is_asked_for(sums) for _, sums in ended.weights)
        if not agreed and not found:
            return
        with torch.no_grad(), self._group.guard("gradients of parameters that do not come from the module alone"):
            if not agreed:
                self._tell(ended.weights[0][1], min(found))
            if anywhere := self._gather(found):
                self._were_seen = True
                self._average(anywhere, ended.weights)

    def _tell(self, sums: torch.Tensor, name: str) -> None:
        """Tells the other ranks that this one has found some. Raises `CaptureError` where another rank has not."""
        message = torch.zeros_like(sums)
        message[_ASKS] = _TELLS
        self._sum(message)
        if float(message[_ASKS]) != _TELLS * self._group.world_size:
            raise CaptureError(
                f"parameter '{name}' gets a gradient in the module's backward pass that the module has not computed: "
                "from module.module, or from a term of the loss that reads the parameter. On another rank, there is "
                "none, nor was there any on any rank before, so ranks do not ask each other: have such a term in the "
                f"first backward pass, times zero if need be, or {_NEVER}"
            )

    def _gather(self, found: Collection[str]) -> list[str]:
        """The parameters of which any rank has found some."""
        names = sorted(self._accumulators)
        device = self._parameters[names[0]].device
        flags = torch.tensor([float(n in found) for n in names], device=device)
        self._sum(flags)
        return [n for n, ranks in zip(names, flags.tolist(), strict=True) if ranks]

    def _average(self, names: Sequence[str], weights: Sequence[tuple[float, torch.Tensor]]) -> None:
        n = self._group.world_size
        shares = [torch.where(of[0] == 0, 1 / n, weight * of[1] / n / of[0]) for weight, of in weights]
        share = torch.stack(shares).mean()
        parameters = [self._parameters[n] for n in names]
        for dtype in dict.fromkeys(p.dtype for p in parameters):
            alike = [p for p in parameters if p.dtype == dtype]
            flat = torch.cat([_dense(p).reshape(-1) for p in alike])
            flat = torch.where(share == 0, 0.0, flat * share).to(dtype)  # what counts as nothing may be no number
            self._sum(torch.view_as_real(flat) if flat.is_complex() else flat)
            for p, mean in zip(alike, torch.split(flat, [p.numel() for p in alike]), strict=True):
                if p.grad is None or p.grad.is_sparse:
                    p.grad = laid_out(mean.view(p.shape).clone(), p)
                else:
                    p.grad.copy_(mean.view(p.shape))

    def _sum(self, values: torch.Tensor) -> None:
        with may_fail():
            dist.all_reduce(values, group=self._group.pg)

    def _say(self, names: Collection[str], what: str) -> None:
        if not names or self._said:
            return
        self._said = True
        warnings.warn(
            f"parameter '{min(names)}' gets a gradient in the module's backward pass that the module has not computed: "
            "from module.module, or from a term of the loss that reads the parameter. It is averaged over the ranks "
            f"when the pass has ended, but {what}",
            AutoparWarning,
            stacklevel=2,
        )

    def _abandon(self) -> None:
        """Forgets the backward pass under way; one that has failed came to no end."""
        for hook in self._pass.early.values():
            hook.remove()
        self._pass = _Pass()


def _is_asked_for(sums: torch.Tensor) -> bool:
    """Whether a rank has asked, in the message that has begun a backward pass, that ranks tell each other after it. On
    GPUs nobody looks, as the host would wait for the backward pass."""
    return sums.device.type == "cpu" and bool(sums[_ASKS])


def _dense(p: nn.Parameter) -> torch.Tensor:
    """What lies in a parameter's `grad`."""
    if p.grad is None:
        return torch.zeros_like(p)
    return p.grad.to_dense() if p.grad.is_sparse else p.grad
