"""The passes of a captured drop-in module, as autograd sees them: one function of its inputs and its parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from autopar.errors import CaptureError
from autopar.ir.arrivals import Reached
from autopar.runtime.compiled import Compiled
from autopar.runtime.replay import as_captured

Gradients = tuple[torch.Tensor | None, ...]
"""Of the trainable parameters, then of the inputs that require one."""
Backward = Callable[[list[Any], list[torch.Tensor], Reached], Gradients]
"""From what the forward pass has saved, the gradients of outputs, and what is reached from those that have arrived, to
the gradients of parameters and inputs."""


class RunsForward(Protocol):
    """What has the captured forward pass."""

    def run_forward(self, c: Compiled, tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """The output's tensors, followed by the values that the backward pass reads."""


class Passes(torch.autograd.Function):
    """The model's forward and backward pass as one differentiable function of its inputs and its parameters."""

    @staticmethod
    def forward(ctx: Any, program: RunsForward, c: Compiled, backward: Backward, *values: Any) -> Any:
        tensors = values[: len(values) - len(c.graph.parameters)]
        found = program.run_forward(c, tensors)
        count = len(c.joint.outputs)
        # What is written to a view of nobody's is no matter to autograd; one tensor that is returned twice stays one.
        apart = {id(v): v.detach() for v in found[:count] if v.requires_grad or v._is_view()}
        outputs = tuple(apart.get(id(v), v) for v in found[:count])
        shared = [outputs[i] for i in sorted(c.joint.shared_outputs)]  # of which autograd sees whether they are changed
        ctx.save_for_backward(*(v for v in found[count:] if isinstance(v, torch.Tensor)), *shared)
        numbers = [None if isinstance(v, torch.Tensor) else v for v in found[count:]]
        ctx.context = (c, backward, len(tensors), numbers)
        wanted = _differentiable(c)
        ctx.mark_non_differentiable(*(o for i, o in enumerate(outputs) if i not in wanted))
        ctx.set_materialize_grads(False)
        ctx.likes = {i: (outputs[i].shape, outputs[i].dtype, outputs[i].device) for i in wanted}
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise CaptureError(
                "backward(create_graph=True) through a captured module: its backward pass is a graph of its own, which "
                "cannot be differentiated again. Pass capture='never' to autopar.optimize, which synchronizes all "
                "gradients of a backward pass; or, with one rank, use the model itself, module.module"
            )
        c, backward, inputs, numbers = ctx.context
        tensors = iter(ctx.saved_tensors)
        saved = [next(tensors) if n is None else n for n in numbers]
        arrived = {i: g.contiguous() for i, g in enumerate(grads) if g is not None}
        reached = c.arrivals.reached(frozenset(arrived))
        tangents = [
            arrived[i] if i in arrived else torch.zeros(shape, dtype=dtype, device=device)
            for i, (shape, dtype, device) in ctx.likes.items()
        ]
        with as_captured():
            found = backward(saved, tangents, reached)
        own = len(c.graph.parameters)
        of_inputs = dict(zip(c.joint.input_gradients, only(found[own:], reached.inputs), strict=True))
        return None, None, None, *(of_inputs.get(i) for i in range(inputs)), *found[:own]


def only(gradients: Sequence[torch.Tensor | None], reached: Sequence[bool]) -> Gradients:
    """The gradients, of which the first ones are `None` where they are not reached."""
    mine = (g if is_reached else None for g, is_reached in zip(gradients, reached, strict=False))
    return (*mine, *gradients[len(reached) :])


def _differentiable(c: Compiled) -> list[int]:
    """Which of the outputs the backward pass starts from, in the order of the graph's tangents."""
    return [int(key) for kind, key in c.joint.inputs if kind == "tangent"]


def is_added_to(p: nn.Parameter) -> bool:
    """Whether the backward pass under way adds what the module delivers of a parameter to its `grad`."""
    if not p.requires_grad:
        return False
    try:
        return torch._C._will_engine_execute_node(get_gradient_edge(p).node)
    except RuntimeError:  # it is `torch.autograd.grad` of the parameter
        return False


@contextlib.contextmanager
def without_hooks_on_saved_tensors() -> Iterator[None]:
    """While it is open, what autograd saves is saved as it is: a checkpoint around the module counts what is saved,
    and runs the module again without a proof. Where nobody has such hooks, none are set: torch.func refuses them."""
    if torch._C._autograd._top_saved_tensors_default_hooks(False) is None:
        yield
        return
    with torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is):
        yield


def _as_it_is(value: Any) -> Any:
    return value


def unforeseen(reached: str, missed: str) -> str:
    """Why a backward pass cannot come to one parameter and not to another one."""
    return (
        f"this backward pass comes to parameter '{reached}' and not to '{missed}'. In the first batch, every output "
        "depended on all parameters, so ranks do not tell each other what they come to: let the first batch be one "
        'that has such outputs, use all outputs in the loss, or pass capture="never"'
    )
