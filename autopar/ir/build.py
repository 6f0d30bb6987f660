"""Builds the training graph: captures, simplifies, and reads the table of parameters off the graph."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.fx
from torch import nn

from autopar.errors import CaptureError, UnusedParameterError
from autopar.ir.aliases import readers
from autopar.ir.batch import Batch
from autopar.ir.capture import JointGraph, Mode, capture_joint
from autopar.ir.costs import compute_nodes
from autopar.ir.dtypes import EXACT_BYTES
from autopar.ir.garbage import without_collector
from autopar.ir.heads import find_heads
from autopar.ir.layers import find_layer
from autopar.ir.lookups import find_table
from autopar.ir.passes import EVERY, Capture, Passes, run_passes
from autopar.ir.served import Varying
from autopar.ir.sizes import forget_symbols, size_inputs
from autopar.ir.structure import find_parts
from autopar.ir.training_graph import Layer, Parameter, Table, TrainingGraph
from autopar.ir.weightless import outside_of_modes
from autopar.spec.plan import ModelFingerprint, ParameterSpec, Recompute

Unused = Literal["error", "freeze"]


@outside_of_modes()
@without_collector()
def traced_step(
    model: nn.Module, batch: Batch, loss_fn: Any = None, mode: Mode = "step", outputs: bool = False
) -> JointGraph:
    """What `training_graph` rewrites, for who makes several of one model: tracing takes most of its time."""
    return capture_joint(model, batch, loss_fn, mode, outputs)


@outside_of_modes()
@without_collector()
def training_graph(
    model: nn.Module,
    batch: Batch,
    loss_fn: Any = None,
    mode: Mode = "step",
    unused: Unused = "error",
    recompute: Recompute = "none",
    passes: Passes = EVERY,
    outputs: bool = False,
    updated: Collection[nn.Parameter] | None = None,
    varying: Varying = frozenset(),
    traced: JointGraph | None = None,
) -> TrainingGraph:
    """Captures `model`'s training step on `batch`, and rewrites it by `passes`.

    `recompute`: what of the forward pass is computed again in the backward pass; only of a whole step. `unused`: what
    to do about trainable parameters that get no gradient: `error`, or `freeze` them, which is what eager PyTorch does
    silently (the optimizer passes over them). `outputs`: whether the step returns the model's output besides its loss.
    `updated`: the parameters that are trained, where others are trained elsewhere; all, where it is not said.
    `varying`: the dimensions of the batch in which others differ that the graph is to serve, too; raises
    `StaticOnlyError` where it cannot. `traced`: what `traced_step` returned for the same model and batch, which is left
    as it is; by default the step is traced.
    """
    joint = capture_joint(model, batch, loss_fn, mode, outputs, varying) if traced is None else traced.copied()
    joint = without_gradients(joint, trained_elsewhere(named_parameters(model, loss_fn), updated))
    capture = Capture(mode, batch.size, recompute, batch.listed is not None, batch.names)
    joint, done = run_passes(passes.before(), joint, capture)
    inputs = dict(zip(joint.inputs, joint.module.graph.find_nodes(op="placeholder"), strict=True))
    fingerprint = model_fingerprint(model, loss_fn)
    order = [n for n in joint.module.graph.nodes if n.op not in ("placeholder", "output")]
    position = {n: i for i, n in enumerate(order)}
    fingerprint, trainable = _trainable(fingerprint, joint, unused)
    example: dict[torch.fx.Node, Any] = {
        n: batch.tensors[int(key)] for (kind, key), n in inputs.items() if kind == "batch"
    }
    if joint.sizes is not None:
        numbers = joint.sizes.of(batch.shapes)
        example |= {n: numbers[i] for n, i in size_inputs(joint).items()}
    start = _backward_start(inputs, position)
    parameters = tuple(_parameter(p, joint, inputs, position, example, start) for p in trainable)
    parameters = _with_readers(parameters, joint, inputs, position, example)
    buffers = [n for (kind, _), n in inputs.items() if kind == "buffer"]
    joint, done_behind = run_passes(passes.behind(), joint, capture)
    joint.module.recompile()
    forget_symbols(joint.module.graph)
    return TrainingGraph(
        model=fingerprint,
        parameters=parameters,
        compute=compute_nodes(joint.module.graph, joint.gradients.values()),
        backward_start=start,
        batch_size=batch.size,
        buffer_bytes=sum(_bytes(n.meta["val"]) for n in buffers),
        input_bytes=sum(_bytes(t) for t in batch.tensors),
        autocast=autocast_format(model, batch),
        recompute=recompute if mode == "step" else "none",
        passes=(*done, *done_behind),
        joint=joint,
    )


def without_gradients(joint: JointGraph, names: Collection[str]) -> JointGraph:
    """The graph without the gradients of these parameters."""
    kept = {n: node for n, node in joint.gradients.items() if n not in names}
    if len(kept) == len(joint.gradients):
        return joint
    if not kept:
        raise CaptureError("no parameter that the optimizer holds gets a gradient from the loss")
    output = joint.module.graph.output_node()
    results = list(output.args[0])  # type: ignore[arg-type]
    wanted = {*kept.values(), *joint.input_gradients.values()}
    first = len(joint.mutations) + len(joint.outputs)
    results[first:] = [r if r in wanted else None for r in results[first:]]
    output.args = (tuple(results),)
    return replace(joint, gradients=kept)


def named_parameters(model: nn.Module, loss_fn: Any = None) -> dict[str, nn.Parameter]:
    """Every parameter of the model under every name it has; those of a loss module under `loss_fn.`."""
    table = dict(model.named_parameters(remove_duplicate=False))
    if isinstance(loss_fn, nn.Module):
        table |= {f"loss_fn.{n}": p for n, p in loss_fn.named_parameters(remove_duplicate=False)}
    return table


def trained_elsewhere(parameters: Mapping[str, nn.Parameter], updated: Collection[nn.Parameter] | None) -> list[str]:
    """Names of the parameters that another program trains: those that are not among the `updated`. None where these are
    not known, or are of another copy of the model, for which a plan is made."""
    if updated is None or set(parameters.values()).isdisjoint(updated):
        return []
    return [n for n, p in parameters.items() if p not in updated]


def model_fingerprint(model: nn.Module, loss_fn: Any = None) -> ModelFingerprint:
    """Names, shapes, dtypes and ties of the model's parameters; a tied parameter is listed once, by its first name."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in named_parameters(model, loss_fn).items():
        names.setdefault(parameter, []).append(name)
    return ModelFingerprint(
        name=type(model).__name__,
        parameters=tuple(
            ParameterSpec(
                name=first,
                shape=tuple(p.shape),
                dtype=str(p.dtype).removeprefix("torch."),
                trainable=p.requires_grad,
                ties=tuple(rest),
            )
            for p, (first, *rest) in names.items()
        ),
    )


def _trainable(
    fingerprint: ModelFingerprint, joint: JointGraph, unused: Unused
) -> tuple[ModelFingerprint, list[ParameterSpec]]:
    reached = {p.name: any(n in joint.gradients for n in (p.name, *p.ties)) for p in fingerprint.parameters}
    lost = [p.name for p in fingerprint.parameters if p.trainable and not reached[p.name]]
    if lost and unused == "error":
        shown = ", ".join(f"'{n}'" for n in lost[:5]) + (f" and {len(lost) - 5} more" if len(lost) > 5 else "")
        raise UnusedParameterError(
            f"{len(lost)} trainable parameter(s) get no gradient from the loss: {shown}. Use them in the loss, "
            'freeze them with requires_grad_(False), or pass unused_parameters="freeze". Where other steps use them, '
            'capture="never" leaves them out in those that do not'
        )
    table = tuple(p.model_copy(update={"trainable": p.trainable and reached[p.name]}) for p in fingerprint.parameters)
    return fingerprint.model_copy(update={"parameters": table}), [p for p in table if p.trainable]


def _parameter(
    spec: ParameterSpec,
    joint: JointGraph,
    inputs: dict[tuple[str, str | int], torch.fx.Node],
    position: dict[torch.fx.Node, int],
    example: dict[torch.fx.Node, Any],
    backward_start: int,
) -> Parameter:
    names = [n for n in (spec.name, *spec.ties) if n in joint.gradients]
    assert len(names) == 1, f"the gradient of the tied parameter '{spec.name}' comes in parts: {names}"
    gradient = joint.gradients[names[0]]
    uses = sorted(
        position[n]
        for name in (spec.name, *spec.ties)
        if ("parameter", name) in inputs
        for n in readers(inputs["parameter", name])
        if n in position
    )
    ready = position.get(gradient, 0)
    parts = None if _is_complex(spec) else find_parts(gradient, spec.shape, position, example)
    return Parameter(
        spec=spec,
        gradient=gradient.name,
        ready=ready,
        first_use=uses[0] if uses else 0,
        last_use=uses[-1] if uses else ready,
        last_forward=max((u for u in uses if u < backward_start), default=-1),
        first_backward=min((u for u in uses if u >= backward_start), default=-1),
        structure=parts.kind if parts else "dense",
        parts=parts,
    )


def _with_readers(
    parameters: tuple[Parameter, ...],
    joint: JointGraph,
    inputs: dict[tuple[str, str | int], torch.fx.Node],
    position: dict[torch.fx.Node, int],
    example: dict[torch.fx.Node, Any],
) -> tuple[Parameter, ...]:
    """The parameters, each with the head or layer that it belongs to and the table that it is, where it is nothing
    else."""
    names = {n: p.name for p in parameters for n in (p.name, *p.spec.ties)}
    # A tied parameter is an input under each of its names, one of which is read.
    read = {n: str(key) for (kind, key), n in inputs.items() if kind == "parameter" and n.users}
    parameter = {p.name: p for p in parameters}
    nodes = {n: names[key] for n, key in read.items() if key in names and not _is_complex(parameter[names[key]].spec)}
    by_name = {n.name: n for n in joint.module.graph.nodes}
    # What is handed back to a parameter itself comes too late to be sent as its gradient.
    gradients = {p.gradient for p in parameters}
    found = find_heads(joint.module.graph, nodes, position)
    heads = {h.weight: h for h in found if h.hidden_gradient not in gradients}
    table_of: dict[str, Table] = {}
    layer_of: dict[str, Layer | None] = {}
    # A loss in 16 bits is scaled behind the backward pass, each rank's by its own share; layers would add up before.
    narrow = any(n.meta["val"].dtype.itemsize < EXACT_BYTES for (kind, _), n in inputs.items() if kind == "tangent")
    for node, name in nodes.items():
        p, head, own = parameter[name], heads.get(name), ()
        layer = None if narrow else find_layer(node, p.parts, position, by_name)
        layer_of[name] = None if layer is None or layer.given_gradient in gradients else layer
        parts = p.parts
        if head is not None:
            own = tuple(by_name[n] for n in head.replaced)
            of_head = by_name[head.weight_gradient]
            parts = find_parts(by_name[p.gradient], p.spec.shape, position, example, of_head)
        table = find_table(node, parts, p.spec.shape[0], position, example, own) if p.spec.shape else None
        if table is not None:
            table_of[name] = table
        elif head is not None and head.weight_gradient != p.gradient:
            del heads[name]
    head_of = {name: h for h in heads.values() for name in (h.weight, h.bias)}
    return tuple(
        replace(p, head=head_of.get(p.name), table=table_of.get(p.name), layer=layer_of.get(p.name)) for p in parameters
    )


def _is_complex(spec: ParameterSpec) -> bool:
    """Of complex parameters gradients are taken as a whole: the works on their structure are for real numbers."""
    return spec.dtype.startswith("complex")


def _backward_start(inputs: dict[tuple[str, str | int], torch.fx.Node], position: dict[torch.fx.Node, int]) -> int:
    """Position of the first node that reads a tangent, directly or not."""
    first = [position[u] for (kind, _), n in inputs.items() if kind == "tangent" for u in n.users if u in position]
    return min(first, default=len(position))


def _bytes(t: torch.Tensor) -> int:
    return t.numel() * t.element_size()


def autocast_format(model: nn.Module, batch: Batch) -> str | None:
    """The format of the autocast that is on, for the model's device; those without values are traced as on the CPU."""
    tensors = [*model.parameters(), *batch.tensors]
    device = next((t.device.type for t in tensors if t.device.type != "meta"), "cpu")
    return str(torch.get_autocast_dtype(device)).removeprefix("torch.") if torch.is_autocast_enabled(device) else None
