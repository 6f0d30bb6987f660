"""Looks at a model that is to run eagerly: why it cannot be captured, and what a step of it shows."""

from __future__ import annotations

import contextlib
import hashlib
import json
import warnings
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn
from torch.nn.utils.prune import BasePruningMethod
from torch.optim import Optimizer

from autopar.errors import AutoparWarning, CaptureError, SignatureError, UnusedParameterError
from autopar.ir.batch import Batch, call_model
from autopar.ir.build import model_fingerprint, named_parameters, trained_elsewhere
from autopar.ir.capture import Mode
from autopar.ir.first_uses import watchable
from autopar.ir.held_tensors import held_tensors
from autopar.ir.outline import outline
from autopar.ir.read_targets import UNIT, TargetReader
from autopar.ir.seen import Seen, look, unseen
from autopar.ir.training_graph import TrainingGraph
from autopar.ir.weightless import first_without_values, lacks_values
from autopar.runtime.compiled import Settings
from autopar.runtime.job.process_group import Group, Rendezvous
from autopar.runtime.model.eager import kept_attributes, owners_of, without_trace
from autopar.runtime.model.left_behind import check_nothing_flows
from autopar.runtime.model.own_state import check_own_state
from autopar.runtime.optimizers.optimizer import updated_by
from autopar.runtime.proofs.differences import tolerance_of
from autopar.runtime.uncaptured.model import loss_and_output

_UNORDERED = (
    "ranks go through the model's parameters in different orders, as where a forward pass iterates over a set of "
    "names, which has another order in each process: sort it, and the model is captured"
)


def settled(
    model: nn.Module,
    batch: Batch,
    settings: Settings,
    mode: Mode,
    optimizer: Optimizer | None,
    capture: Callable[[], TrainingGraph],
    group: Group,
) -> TrainingGraph | None:
    """The outline of a model that is to run eagerly, as `settings.capture` has it; `None` where it is captured. Decided
    by all ranks together, for they must do the same. Warns, on rank 0, where the graph cannot be had, and why. Raises
    `CaptureError` where it must be had, or where the model cannot be trained eagerly either, as one without values."""
    rendezvous, reason = Rendezvous(group), _why_eager(model, batch, settings, mode, optimizer, capture)
    if settings.capture != "always":  # all ranks have the same setting
        reason = next(filter(None, rendezvous.exchange("capture", reason)), "")
        if not reason and len(set(rendezvous.exchange("order of parameters", _order(capture())))) > 1:
            reason = _UNORDERED
    if not reason:
        return None
    name = first_without_values(model, settings.loss_fn)
    if name or any(map(lacks_values, batch.tensors)):
        what = f"'{name}'" if name else "the batch"
        raise CaptureError(
            f"{reason.rstrip('.')}. So the model would run eagerly, and is planned for by running it, but {what} has "
            "no values (it is on the meta device, or fake), and nothing can run. Make the model with its weights, and "
            "the batch with its values"
        )

    def looked() -> str:
        try:
            return look_at(model, batch, settings, mode).dumps()
        except Exception as e:
            if settings.capture == "never":
                raise
            raise CaptureError(reason) from e  # it says more of what is wrong

    own = ""
    if group.rank:  # in company, for the model may have ranks communicate in its forward pass; rank 0's look counts
        with contextlib.suppress(Exception):
            own = looked()
    seen = Seen.loads(rendezvous.from_rank_0("order of gradients", looked))
    mine = seen if not group.rank else Seen.loads(own) if own else None
    absent = rendezvous.exchange_as(
        "parameters without a gradient", json.dumps(None if mine is None else mine.absent), json.loads
    )
    fingerprint = model_fingerprint(model, settings.loss_fn)
    elsewhere = set(trained_elsewhere(named_parameters(model, settings.loss_fn), updated_by(optimizer)))
    table = [
        p.model_copy(update={"trainable": p.trainable and p.name not in elsewhere}) for p in fingerprint.parameters
    ]
    fingerprint = fingerprint.model_copy(update={"parameters": tuple(table)})
    buffers = [b for owner in owners_of(model, settings.loss_fn).values() for b in owner.buffers()]
    size = sum(b.numel() * b.element_size() for b in buffers)
    if settings.capture == "auto" and group.rank == 0:
        warnings.warn(_said(reason, settings, seen), AutoparWarning, stacklevel=4)
    return outline(fingerprint, batch, seen, size, [names for names in absent if names is not None])


def look_at(model: nn.Module, batch: Batch, settings: Settings, mode: Mode) -> Seen:
    """What a step of the model shows, run eagerly on a batch; leaves the model as it was."""
    loss_fn = settings.loss_fn
    named = named_parameters(model, loss_fn)
    parameters = {p.name: named[p.name] for p in model_fingerprint(model, loss_fn).parameters if p.trainable}

    def run() -> Sequence[torch.Tensor]:
        tensors = batch.copied()
        given = batch.rebuild(tensors)
        if mode == "step":
            reader.begin(tensors)
            loss, _ = loss_and_output(model, loss_fn, given)
            reader.end(loss)
            return [loss]
        held[:] = held_tensors(call_model(model, given, False)[0])
        return held

    held: list[torch.Tensor] = []
    reader = TargetReader(batch)
    with without_trace(owners_of(model, loss_fn)):
        try:
            watch = watchable(owners_of(model, loss_fn).values(), parameters) if mode == "step" else ()
            return look(run, parameters, batch, watch, mode == "step", reader if mode == "step" else None)
        except CaptureError:
            if mode == "step" or held or not parameters:
                raise
            return unseen(parameters)


def _why_eager(
    model: nn.Module,
    batch: Batch,
    settings: Settings,
    mode: Mode,
    optimizer: Optimizer | None,
    capture: Callable[[], TrainingGraph],
) -> str:
    """Why the model is not captured, in words; empty where it is."""
    if settings.capture == "never":
        return "capture='never'"
    if settings.capture == "auto" and optimizer is not None:
        for name, p in named_parameters(model, settings.loss_fn).items():
            if p._backward_hooks:
                return (
                    f"parameter '{name}' has a hook on its gradient, which a captured step would not call, and which "
                    "is given each rank's own gradient, as with DistributedDataParallel"
                )
    owners = owners_of(model, settings.loss_fn)
    if settings.capture == "auto" and (pruned := _pruned(owners)):
        return (
            f"{pruned} is pruned by torch.nn.utils.prune, which prunes further by the weights that the last forward "
            "pass has set in it, and a captured step sets none (prune.remove makes the pruning permanent)"
        )
    put_back = kept_attributes(owners.values())
    try:
        graph = capture()
        if settings.check != "never" and settings.capture != "always":
            _check_own_state(graph, model, batch, settings, mode)
    except (SignatureError, UnusedParameterError):
        raise
    except CaptureError as e:
        if settings.capture == "always":
            raise
        put_back()  # tracing writes to tensors that are plain attributes
        return str(e)
    return ""


def _order(graph: TrainingGraph) -> str:
    """A digest of the order in which parameters are read and gradients are made, which that of collectives follows."""
    events = [(at, p.name) for p in graph.parameters for at in (p.first_use, p.first_backward, p.ready) if at >= 0]
    return hashlib.sha256("\n".join(name for _, name in sorted(events)).encode()).hexdigest()[:16]


def _pruned(owners: Mapping[str, nn.Module]) -> str:
    """The name of the first module that is pruned as it runs; empty for none."""
    named = [(prefix + name, m) for prefix, owner in owners.items() for name, m in owner.named_modules()]
    hooked = (n for n, m in named if any(isinstance(h, BasePruningMethod) for h in m._forward_pre_hooks.values()))
    return next((f"'{name}'" if name else "the model" for name in hooked), "")


def _check_own_state(graph: TrainingGraph, model: nn.Module, batch: Batch, settings: Settings, mode: Mode) -> None:
    """Raises `CaptureError` where what running the model leaves behind makes it compute something else the next time,
    as a counter that it reads: a captured step would not count; or where a loss outside of the model may send gradients
    through it. Not looked at where nothing can run on one rank."""
    joint, owners = graph.joint, owners_of(model, settings.loss_fn)
    unreal = first_without_values(model, settings.loss_fn) or any(map(lacks_values, batch.tensors))
    if joint is None or joint.sums_over_ranks or unreal:
        return

    def run(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        given = batch.rebuild(tuple(tensors))
        if mode == "step":
            return [loss_and_output(model, settings.loss_fn, given)[0]]
        return held_tensors(call_model(model, given, False)[0])

    check_own_state(joint.guards, owners, run, batch.tensors, tolerance_of(graph))
    if mode == "module":
        check_nothing_flows(joint.guards, owners, lambda: run(batch.copied()))


def _said(reason: str, settings: Settings, seen: Seen) -> str:
    compiled = " Nothing is compiled." if settings.compiler is not None else ""
    if seen.targets:
        by = f"by its {UNIT}"
    else:
        by = (
            "by its samples (the dicts of a list of dicts, else dimension 0 of the first tensor of loss_fn's target, "
            "or of the batch where there is none): where the loss is a mean over something else, as tokens, pass "
            "weight="
        )
    counted = "" if settings.weight else f" Each rank's batch counts {by}."
    return (
        f"{reason.rstrip('.')}. So the model runs eagerly, and its gradients are synchronized beside its backward "
        "pass, as with DistributedDataParallel. What needs the graph is left out of the "
        f"plan.{counted}{compiled} capture='always' raises instead"
    )
