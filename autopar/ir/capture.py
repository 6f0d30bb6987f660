"""Capture: from a PyTorch module and a batch to the joint forward and backward graph.

Two steps of PyTorch's own: TorchDynamo's whole-graph capture (a graph break is an error, and is reported with the
user's line), then AOTAutograd's joint graph with descriptors, functionalized and made of aten operators.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.fx
from torch import nn
from torch._guards import tracing

from autopar.errors import AutoparError, CaptureError
from autopar.ir.alignments import sized_alignments
from autopar.ir.apart import Apart, copy_tangents, outputs_apart
from autopar.ir.attributes import harmless_attributes
from autopar.ir.batch import Batch, call_model, misfit
from autopar.ir.batch_memory import refuse_shared
from autopar.ir.compat import kept_checks, with_captured_tensors
from autopar.ir.effects import remove_tokens
from autopar.ir.form import Held, check_as_given
from autopar.ir.guards import Effect, Guards, guards_of, seen_effects
from autopar.ir.joint import JointGraph as JointGraph
from autopar.ir.kept_results import refuse_kept_draws, seen_kept_results
from autopar.ir.model_output import check_output, find_loss, output_tensors
from autopar.ir.observers import Observers
from autopar.ir.own_outputs import own_outputs
from autopar.ir.python_draws import refused_draws
from autopar.ir.recording import traceable_recording
from autopar.ir.recurrent import recurrent_dropout
from autopar.ir.refusals import let_go_of_frames, own_error, places, refusal, was_raised
from autopar.ir.served import Varying
from autopar.ir.sizes import with_sizes
from autopar.ir.sparse_gradients import with_dense_gradients
from autopar.ir.unfit import has_global_hooks, refuse_unfit
from autopar.ir.untraceable import Distributions, cumulative_averages, masks_as_they_are, traceable_means
from autopar.ir.weightless import traced_as_real

Mode = Literal["step", "module"]

_WHAT = "the model cannot be captured as one graph"
_TERMS = "Where it has several terms, pass weight= with a count for each, or add them up"
_MOST_OBSERVERS = 50
"""Statements that only observe which a capture leaves out before it gives up: each costs a further attempt."""


class _Step(nn.Module):
    """The module that is captured: takes the batch's tensors, returns the loss, or all output tensors, or both."""

    def __init__(self, model: nn.Module, loss_fn: Any, batch: Batch, mode: Mode, outputs: bool = False) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn
        # Only their places are looked at, and the module outlives the batch.
        self._batch = replace(batch, tensors=(), given=())
        self._mode = mode
        self._outputs = outputs
        self.assigned: tuple[tuple[tuple[str, ...], str], ...] = ()
        """Buffers that the model assigns a new tensor to, by the path to the module and the name: the tensor is copied
        into the buffer that was there, which is what a graph can do."""
        self.copied: frozenset[int] = frozenset()
        """Tensors of the batch that the model writes to: it gets copies."""
        self.apart = Apart()
        """Outputs of a drop-in module that are copied: a sequence of states, and its first as summary."""

    def forward(self, *tensors: torch.Tensor) -> Any:
        tensors = tuple([t.clone() if i in self.copied else t for i, t in enumerate(tensors)])
        held = [(_module_at(self, path), key) for path, key in self.assigned]
        before = [getattr(module, key) for module, key in held]
        result = self._result(*tensors)
        found = [getattr(module, key) for module, key in held]
        made = [None if new is None else new.clone() for new in found]  # they may take each other's places
        for (_, key), buffer, now, new in zip(held, before, found, made, strict=True):
            if now is buffer:  # the module's others are as they were, perhaps in expanded memory
                continue
            if buffer is None or new is None or new.shape != buffer.shape or new.dtype != buffer.dtype:
                raise CaptureError(
                    f"the model makes another tensor of its buffer '{key}' in its forward pass, of another shape or "
                    "dtype, or none, which no graph can put in its place. Where it is a cache that the first run "
                    "fills, run the model once before"
                )
            buffer.copy_(new.detach())
        return result

    def _result(self, *tensors: torch.Tensor) -> Any:
        made: list[Held] = []
        batch = self._batch.rebuild(tensors, made)
        output, target = call_model(self.model, batch, self.loss_fn is not None)
        check_as_given(made)
        if self._mode == "module":
            check_output(output)
            return tuple([t.clone() if i in self.apart.copied else t for i, t in enumerate(output_tensors(output))])
        loss = find_loss(output if self.loss_fn is None else self.loss_fn(output, target), batch)
        if not self._outputs:
            return loss
        if not isinstance(loss, torch.Tensor):
            raise CaptureError(f"the loss must be one scalar, got a {type(loss).__name__}: {_TERMS}")
        return (loss, *(t.detach() for t in output_tensors(output)))


def _module_at(module: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        if not hasattr(module, name):
            raise CaptureError(
                f"the model or the loss sets buffers of a module that is no part of either (in {'.'.join(path)}): make "
                "it an attribute of the model, or pass it as loss_fn itself"
            )
        module = getattr(module, name)
    return module


def capture_joint(
    model: nn.Module,
    batch: Batch,
    loss_fn: Any = None,
    mode: Mode = "step",
    outputs: bool = False,
    varying: Varying = frozenset(),
) -> JointGraph:
    """Captures one training step on `batch`, as autograd's tracing leaves it. `outputs`: whether the step returns the
    model's output besides its loss. `varying`: the dimensions of the batch in which others differ that the graph is to
    serve; raises `StaticOnlyError` where it cannot. Raises `CaptureError` with the line that stands in the way, and
    `SignatureError` where the model's `forward` does not take such a batch."""
    if has_global_hooks():
        raise CaptureError(
            f"{_WHAT}: a hook is registered for all modules there are (register_module_forward_hook or a relative of "
            "torch.nn.modules.module). Register it on the modules that it is for: module.register_forward_hook(...)"
        )
    step = _Step(model, loss_fn, batch, mode, outputs)
    # Each tensor in memory of its own: of a tensor that stands in two places, labels that are the inputs, Dynamo would
    # make one input, and later batches, in which they are two, would be read in the wrong place.
    tensors = tuple(t.detach().clone().requires_grad_(t.requires_grad) for t in batch.tensors)
    for i, dimension in varying:
        torch._dynamo.maybe_mark_dynamic(tensors[i], dimension)
    with _modes_put_back(), Observers() as observers, Distributions() as distributions, traced_as_real(step, tensors):
        for _ in range(_MOST_OBSERVERS):
            try:
                module, guards, shape_env = _traced(step, tensors, observers, bool(varying))
                apart = step.apart | outputs_apart(module, step, tensors) if mode == "module" else step.apart
                if (written := _written(module)) <= step.copied and apart.copied == step.apart.copied:
                    break
                refuse_shared(written, batch.as_given)
                step.copied, step.apart = step.copied | written, apart
            except AutoparError:
                raise
            except Exception as e:
                let_go_of_frames(e)  # with them go guards of modes, which set what was before them
                own = own_error(e) or misfit(model, batch.rebuild(tensors), loss_fn is not None)
                if own is not None:
                    raise own from None
                if was_raised(e) or not (distributions.switch_off(e) or observers.switch_off(places(e))):
                    raise refusal(e, _WHAT) from e
        else:
            raise CaptureError(f"{_WHAT}: more than {_MOST_OBSERVERS} of its lines print, warn or check: remove some")
    remove_tokens(module)
    copy_tangents(module)
    module.graph.set_codegen(torch.fx.graph.CodeGen())
    guards.effects += tuple(Effect(f"tensor {i} of the batch", None, None) for i in sorted(step.copied))
    joint = _describe(module, mode, outputs)
    joint = replace(joint, guards=guards, copied_inputs=step.copied, shared_outputs=apart.shared)
    joint = with_sizes(joint, shape_env, varying) if varying else joint
    if not outputs:
        return joint
    loss, *others = joint.outputs
    return replace(joint, outputs=(loss, *own_outputs(module.graph, others, len(joint.mutations) + 1)))


def _settled(step: _Step, tensors: tuple[torch.Tensor, ...], rewritten: bool) -> tuple[torch.fx.GraphModule, Guards]:
    """Captures; where running the code once changes what it reads, captures what it is from then on. Raises
    `CaptureError` where each run changes it again."""
    graph, guards = _dynamo(step, tensors, rewritten)
    paths = [tuple(e.what.split(".")[:-1]) for e in guards.effects if e.what.endswith("._buffers")]
    if paths:
        step.assigned = tuple((path, key) for path in paths for key in _module_at(step, path)._buffers)
        graph, guards = _dynamo(step, tensors, rewritten)
    first = guards.counters
    if not first:
        return graph, guards
    for effect in first:
        effect.set(effect.after)
    graph, guards = _dynamo(step, tensors, rewritten)
    if guards.counters:
        for effect in first:
            effect.set(effect.before)
        shown = ", ".join(f"'{e.what}' from {e.before} to {e.after}" for e in first)
        raise CaptureError(
            f"running the model changes {shown}, which it also reads, so it computes something else at every step, and "
            "one captured step would not: keep it in a buffer (a tensor that forward adds to), or count outside of the "
            "model"
        )
    return graph, guards


def _traced(
    step: _Step, tensors: tuple[torch.Tensor, ...], observers: Observers, symbolic: bool
) -> tuple[torch.fx.GraphModule, Guards, Any]:
    """The joint graph as PyTorch makes it, what it rests on, and, where it is `symbolic`, PyTorch's `ShapeEnv`."""
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors

    with (
        traceable_recording(step.model),
        masks_as_they_are(),
        cumulative_averages(step) as rewritten,
        sized_alignments(),
        seen_kept_results() as kept,
        _quiet(),
    ):
        graph, guards = _settled(step, tensors, rewritten or observers.have_switched)
    refuse_unfit(graph)
    with_dense_gradients(graph)
    empty = any(t.dim() and not len(t) for t in tensors)
    with _restored(step), contextlib.ExitStack() as stack, recurrent_dropout(), traceable_means(empty), _quiet():
        stack.enter_context(kept_checks())
        stack.enter_context(sized_alignments())
        stack.enter_context(torch._functorch.config.patch(backward_pass_autocast="off"))
        if symbolic:  # with the symbols that TorchDynamo has made
            stack.enter_context(tracing(graph.meta["tracing_context"]))
        shape_env = graph.meta["fake_mode"].shape_env if symbolic else None
        module: torch.fx.GraphModule = aot_export_joint_with_descriptors(stack, graph, tensors).graph_module
    _let_go(graph)
    refuse_kept_draws(module.graph, kept)
    return module, guards, shape_env


def _let_go(graph: torch.fx.GraphModule) -> None:
    """Takes TorchDynamo's graph apart, which is of no further use and would never be freed: its fake tensors have
    histories, which autograd holds where Python's collector does not see it, and TorchDynamo leaves a function that
    runs it among the globals of the module that it has traced."""
    for node in graph.graph.nodes:
        node.meta.clear()
    graph.meta.clear()
    for name in [n for n in globals() if n.startswith("__compiled_fn_")]:
        del globals()[name]


def _dynamo(step: _Step, tensors: tuple[torch.Tensor, ...], rewritten: bool) -> tuple[torch.fx.GraphModule, Guards]:
    """What `torch._dynamo.functional_export.dynamo_graph_capture_for_export` does, less dropping the guards."""
    from torch._dynamo.convert_frame import fullgraph_capture
    from torch._dynamo.functional_export import (  # type: ignore[attr-defined]
        _compiling_state_context,
        create_fx_graph_from_captured_output,
    )
    from torch._dynamo.utils import dynamo_timed, get_metrics_context

    loggers = {f for f in vars(logging.Logger).values() if callable(f)} | {logging.info, logging.warning, logging.debug}
    settings: dict[str, Any] = {
        "ignore_logging_functions": loggers,
        "automatic_dynamic_shapes": False,
        "assume_static_by_default": True,
        "trace_autograd_ops": True,  # torch.autograd.grad in forward
        "allow_rnn": True,  # recurrent layers are traced step by step
        "replay_side_effects": False,
        "side_effect_replay_policy": "warn",
    }
    settings = {k: v for k, v in settings.items() if hasattr(torch._dynamo.config, k)}
    with torch._dynamo.config.patch(settings), seen_effects() as effects:
        with (
            harmless_attributes(),
            refused_draws(),
            _compiling_state_context(),
            get_metrics_context(),
            dynamo_timed("fullgraph_capture"),
        ):
            captured = fullgraph_capture(step, tensors, None)
            guards = guards_of(captured.graph_capture_output, step, effects, rewritten)
        return with_captured_tensors(create_fx_graph_from_captured_output(captured, step, tensors, {})), guards


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
def _modes_put_back() -> Iterator[None]:
    """Puts back what PyTorch holds for the whole process: tracing that fails within `no_grad()` leaves that on."""
    dtype, mode = torch.get_default_dtype(), torch.set_grad_enabled(torch.is_grad_enabled())
    try:
        with torch.inference_mode(torch.is_inference_mode_enabled()), mode:
            yield
    finally:
        torch.set_default_dtype(dtype)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """PyTorch's own tracing logs are no news to users of autopar; errors are raised, with their cause."""
    names = ("torch._dynamo", "torch._functorch", "torch._subclasses", "torch.fx")
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


def _written(module: torch.fx.GraphModule) -> frozenset[int]:
    """The tensors of the batch that the model writes to."""
    from torch._functorch._aot_autograd import descriptors as d

    outputs = module.graph.output_node().meta["desc"]
    mutated = (x.mutated_input for x in outputs if isinstance(x, d.InputMutationAOTOutput))
    return frozenset(x.idx for x in mutated if isinstance(x, d.PlainAOTInput))


def _describe(module: torch.fx.GraphModule, mode: Mode, has_outputs: bool) -> JointGraph:
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
            if isinstance(desc.output, d.InputMutationAOTOutput):
                raise _writes_to(desc.output.mutated_input)
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
    mutations, outputs, gradients, of_inputs = [], [], {}, {}
    for node, desc in zip(output.args[0], output.meta["desc"], strict=True):  # type: ignore[arg-type]
        if isinstance(desc, d.InputMutationAOTOutput):
            if not isinstance(desc.mutated_input, d.BufferAOTInput):
                raise _writes_to(desc.mutated_input)
            mutations.append((_public(desc.mutated_input.target), node))
        elif isinstance(desc, d.GradAOTOutput):
            if node is not None and isinstance(desc.grad_of, d.ParamAOTInput):
                gradients[_public(desc.grad_of.target)] = node
            elif node is not None and isinstance(desc.grad_of, d.PlainAOTInput):
                of_inputs[desc.grad_of.idx] = node
        elif isinstance(desc, d.PlainAOTOutput):
            outputs.append(node)
        elif node is not None:
            raise CaptureError(f"the graph has an output of an unknown kind: {desc}")
    if mode == "step":
        _check_loss(outputs[:1] if has_outputs else outputs, bool(gradients))
    return JointGraph(module, tuple(inputs), tuple(mutations), tuple(outputs), gradients, input_gradients=of_inputs)


def _writes_to(mutated: Any) -> CaptureError:
    from torch._functorch._aot_autograd import descriptors as d

    if isinstance(mutated, d.ParamAOTInput):
        return CaptureError(
            f"the model writes to its parameter '{_public(mutated.target)}' in its forward pass, as "
            "Embedding(max_norm=...) does, and the optimizer, which may run on other ranks, would not see it: only "
            "buffers may be written to. Change the parameter between steps, under torch.no_grad()"
        )
    which = f"tensor {mutated.idx} of the batch" if isinstance(mutated, d.PlainAOTInput) else str(mutated)
    return CaptureError(
        f"the model writes to {which} in its forward pass: only buffers may be written to; write to a copy of the input"
    )


def _check_loss(outputs: list[Any], any_gradient: bool) -> None:
    shape = tuple(outputs[0].meta["val"].shape) if outputs and isinstance(outputs[0], torch.fx.Node) else None
    if len(outputs) != 1 or shape is None or shape not in ((), (1,)):
        raise CaptureError(
            f"the loss must be one scalar, got {len(outputs)} output(s), the first of shape {shape}: reduce it "
            f"with .mean() or .sum() in the model or in loss_fn. {_TERMS}"
        )
    if not any_gradient:
        raise CaptureError("no parameter gets a gradient from the loss: is every one frozen, or the loss detached?")


def _public(target: str) -> str:
    """The name a user knows: `model.` is the wrapper's; a loss function's own parameters keep `loss_fn.`."""
    return target.removeprefix("model.")
