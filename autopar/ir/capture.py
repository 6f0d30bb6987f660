"""Capture: from a PyTorch module and a batch to the joint forward and backward graph.

Two steps of PyTorch's own: TorchDynamo's whole-graph capture (a graph break is an error, and is reported with the
user's line), then AOTAutograd's joint graph with descriptors, functionalized and made of aten operators.
"""

from __future__ import annotations

import ast
import contextlib
import logging
import re
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.fx
from torch import nn

from autopar.errors import AutoparError, CaptureError, SignatureError
from autopar.ir.batch import Batch, call_model
from autopar.ir.effects import remove_tokens
from autopar.ir.recording import traceable_recording
from autopar.ir.simplify import simplify

Mode = Literal["step", "module"]

_RAISED = re.compile(r"raised exception (\w+)\((.*)\)\s*$", re.MULTILINE)
"""How Dynamo's message names an exception that the traced code itself raised."""


@dataclass(frozen=True)
class JointGraph:
    """The joint graph, with a name for each of its inputs and outputs.

    Placeholders, in order: `parameters` and `buffers` by name, batch tensors by index, tangents of the outputs.
    Outputs, in order: mutated inputs, the module's outputs, gradients.
    """

    module: torch.fx.GraphModule
    inputs: tuple[tuple[str, str | int], ...]
    """(kind, key) of each placeholder: a `parameter` or `buffer` by name, a `batch` tensor or an output's `tangent` by
    index."""
    mutations: tuple[tuple[str, torch.fx.Node], ...]
    """Names of buffers, and the nodes whose values they take."""
    outputs: tuple[torch.fx.Node, ...]
    """The loss alone in mode `step`; every tensor of the model's output in mode `module`."""
    gradients: dict[str, torch.fx.Node] = field(default_factory=dict)
    """By parameter name; parameters that get no gradient are absent."""


class _Step(nn.Module):
    """The module that is captured: takes the batch's tensors, returns the loss, or all output tensors."""

    def __init__(self, model: nn.Module, loss_fn: Any, batch: Batch, mode: Mode) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn
        self._batch = batch
        self._mode = mode

    def forward(self, *tensors: torch.Tensor) -> Any:
        output, target = call_model(self.model, self._batch.rebuild(tensors), self.loss_fn is not None)
        if self._mode == "module":
            return tuple(output_tensors(output))
        return find_loss(output if self.loss_fn is None else self.loss_fn(output, target))


def find_loss(output: Any) -> Any:
    """The loss in a model's output: the output itself where it is a tensor, else its `loss`."""
    if isinstance(output, torch.Tensor):
        return output
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if loss is None:
        raise CaptureError(
            f"the model's output ({type(output).__name__}) holds no loss: pass labels in the batch so that the "
            "model computes one, return the loss from the model, or pass loss_fn="
        )
    return loss


def output_tensors(output: Any) -> Iterator[torch.Tensor]:
    """Every tensor in a model's output, in order; caches and other objects are passed over."""
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, dict):
        for value in output.values():
            yield from output_tensors(value)
    elif isinstance(output, (tuple, list)):
        for value in output:
            yield from output_tensors(value)


def capture_joint(model: nn.Module, batch: Batch, loss_fn: Any = None, mode: Mode = "step") -> JointGraph:
    """Captures one training step on `batch`; raises `CaptureError` with the line that stands in the way."""
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors

    step = _Step(model, loss_fn, batch, mode)
    # Each tensor in memory of its own: of a tensor that stands in two places, labels that are the inputs, Dynamo would
    # make one input, and later batches, in which they are two, would be read in the wrong place.
    tensors = tuple(t.detach().clone(memory_format=torch.preserve_format) for t in batch.tensors)
    with traceable_recording(model):
        graph = _dynamo(step, tensors)
    with _restored(step), contextlib.ExitStack() as stack, _quiet():
        stack.enter_context(torch._functorch.config.patch(backward_pass_autocast="off"))
        try:
            joint = aot_export_joint_with_descriptors(stack, graph, tensors)
        except CaptureError:
            raise
        except Exception as e:
            raise _explained(e, "the backward pass cannot be traced") from e
        module = joint.graph_module
    remove_tokens(module)
    module.graph.set_codegen(torch.fx.graph.CodeGen())
    simplify(module.graph)
    return _describe(module, mode)


def _dynamo(step: _Step, tensors: tuple[torch.Tensor, ...]) -> torch.fx.GraphModule:
    from torch._dynamo.functional_export import dynamo_graph_capture_for_export

    loggers = {f for f in vars(logging.Logger).values() if callable(f)} | {logging.info, logging.warning, logging.debug}
    settings: dict[str, Any] = {
        "ignore_logging_functions": loggers,
        "automatic_dynamic_shapes": False,
        "assume_static_by_default": True,
        "allow_rnn": True,  # recurrent layers are traced step by step
    }
    settings = {k: v for k, v in settings.items() if hasattr(torch._dynamo.config, k)}
    with torch._dynamo.config.patch(settings), _quiet():
        try:
            return dynamo_graph_capture_for_export(step)(*tensors)  # type: ignore[no-any-return]
        except AutoparError:
            raise
        except Exception as e:
            cause = _own_error(e)
            if cause is not None:
                raise cause from None
            raise _explained(e, "the model cannot be captured as one graph") from e


def _own_error(e: BaseException) -> AutoparError | None:
    """An error of autopar's own that was raised inside the traced code, which Dynamo reports as one of its own."""
    found = _RAISED.search(str(e))
    kinds = {k.__name__: k for k in (CaptureError, SignatureError)}
    if found is None or found[1] not in kinds:
        return None
    try:
        message = str(ast.literal_eval(found[2]))
    except (ValueError, SyntaxError):
        message = found[2]
    return kinds[found[1]](message)


def _explained(e: BaseException, what: str) -> CaptureError:
    """Says where in the user's code the capture broke, and what to do."""
    frames = getattr(e, "real_stack", None) or traceback.extract_tb(e.__traceback__)
    user = [f for f in frames if not _internal(f.filename)]
    where = ""
    if user:
        last = user[-1]
        where = f"\n  at {last.filename}:{last.lineno}, in {last.name}: {last.line or ''}".rstrip()
    raised = _RAISED.search(str(e))
    lines = [x for x in str(e).strip().splitlines() if x.strip()] or [type(e).__name__]
    reason = f"it raised {raised[1]}({raised[2]})" if raised else "; ".join(x.strip() for x in lines[:3])
    hint = (
        "\n  Control flow that depends on a tensor's value, and calls out of PyTorch, cannot be captured: use "
        "torch.where or torch.cond, move the code out of forward, or freeze the flag that selects it."
    )
    return CaptureError(f"{what}: {reason}{where}{hint}")


def _internal(filename: str) -> bool:
    return "/torch/" in filename or filename.startswith("<") or "/autopar/" in filename


@contextlib.contextmanager
def _restored(module: nn.Module) -> Iterator[None]:
    """Puts parameters and buffers back in their places: tracing swaps them for stand-ins, and PyTorch leaves the
    stand-ins in a submodule that is held under two names."""
    held = [(m, dict(m._parameters), dict(m._buffers)) for m in module.modules()]
    try:
        yield
    finally:
        for m, parameters, buffers in held:
            m._parameters.update(parameters)
            m._buffers.update(buffers)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """PyTorch's own tracing logs are no news to users of autopar; errors are raised, with their cause."""
    names = ("torch._dynamo", "torch._functorch", "torch.fx")
    before = [(logging.getLogger(n), logging.getLogger(n).level) for n in names]
    for logger, _ in before:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="torch")
            yield
    finally:
        for logger, level in before:
            logger.setLevel(level)


def _describe(module: torch.fx.GraphModule, mode: Mode) -> JointGraph:
    """Reads AOTAutograd's descriptors, the only place where they are read."""
    from torch._functorch._aot_autograd import descriptors as d

    inputs: list[tuple[str, str | int]] = []
    for node in module.graph.find_nodes(op="placeholder"):
        desc = node.meta["desc"]
        if isinstance(desc, d.ParamAOTInput):
            inputs.append(("parameter", _public(desc.target)))
        elif isinstance(desc, d.BufferAOTInput):
            inputs.append(("buffer", _public(desc.target)))
        elif isinstance(desc, d.TangentAOTInput):
            if not isinstance(desc.output, d.PlainAOTOutput):
                raise CaptureError(
                    f"the model returns a view of one of its inputs or parameters ({desc.output}): return a copy"
                )
            inputs.append(("tangent", desc.output.idx))
        elif isinstance(desc, d.PlainAOTInput):
            inputs.append(("batch", desc.idx))
        else:
            raise CaptureError(f"the graph takes an input of an unknown kind: {desc}")
    output = module.graph.output_node()
    mutations, outputs, gradients = [], [], {}
    for node, desc in zip(output.args[0], output.meta["desc"], strict=True):  # type: ignore[arg-type]
        if isinstance(desc, d.InputMutationAOTOutput):
            if not isinstance(desc.mutated_input, d.BufferAOTInput):
                raise CaptureError(
                    f"the model writes to {desc.mutated_input} in its forward pass: only buffers may be written to; "
                    "write to a copy of the input"
                )
            mutations.append((_public(desc.mutated_input.target), node))
        elif isinstance(desc, d.GradAOTOutput):
            if node is not None and isinstance(desc.grad_of, d.ParamAOTInput):
                gradients[_public(desc.grad_of.target)] = node
        elif isinstance(desc, d.PlainAOTOutput):
            outputs.append(node)
        elif node is not None:
            raise CaptureError(f"the graph has an output of an unknown kind: {desc}")
    if mode == "step":
        _check_loss(outputs, bool(gradients))
    return JointGraph(module, tuple(inputs), tuple(mutations), tuple(outputs), gradients)


def _check_loss(outputs: list[Any], any_gradient: bool) -> None:
    shape = tuple(outputs[0].meta["val"].shape) if outputs and isinstance(outputs[0], torch.fx.Node) else None
    if len(outputs) != 1 or shape is None or shape not in ((), (1,)):
        raise CaptureError(
            f"the loss must be one scalar, got {len(outputs)} output(s), the first of shape {shape}: reduce it "
            "with .mean() or .sum() in the model or in loss_fn"
        )
    if not any_gradient:
        raise CaptureError("no parameter gets a gradient from the loss: is every one frozen, or the loss detached?")


def _public(target: str) -> str:
    """The name a user knows: `model.` is the wrapper's; a loss function's own parameters keep `loss_fn.`."""
    return target.removeprefix("model.")
