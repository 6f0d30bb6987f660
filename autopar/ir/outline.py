"""The outline of a step that runs eagerly: what a graph shows of a model that cannot be captured as one.

It has one node for each part of the forward pass, which begins where a parameter is first used, one for where the
backward pass begins, and one for each gradient, in the order in which they were seen to become complete, with the times
that were measured. Strategies are lowered into it, priced on it and written into it as into any joint graph;
`autopar.runtime.eager_steps` runs what was written, the model's own part of it by calling the model.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Never

import torch
import torch.fx
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from autopar.errors import CaptureError
from autopar.ir.batch import Batch
from autopar.ir.batch_weight import UnreadWeight
from autopar.ir.capture import JointGraph
from autopar.ir.first_uses import watched
from autopar.ir.reachable import reachable
from autopar.ir.training_graph import ComputeNode, Parameter, TrainingGraph
from autopar.spec.plan import ModelFingerprint, ParameterSpec


@dataclass(frozen=True)
class Seen:
    """What one eager step has shown, on the batch that was looked at."""

    gradients: tuple[tuple[str, float], ...]
    """Parameters in the order in which their gradients became complete, each with the seconds since the one before it,
    or since the backward pass began. Those that got no gradient stand where it would be expected, with none: behind
    that of the parameter that the model lists next; where nobody can say before the backward pass that they get none,
    last."""
    forward_s: float
    flops: int
    """Of the forward pass."""
    in_pieces: tuple[str, ...]
    """Parameters whose gradients come in several pieces, as those of layers that a reentrant checkpoint runs twice."""
    saved_bytes: int
    """What the forward pass has kept for the backward pass, parameters and the batch not counted."""
    foreseen: bool
    """Whether the autograd graph says before the backward pass which gradients come. Not where a function or a hook
    that is written in Python begins a backward pass of its own, or may do so."""
    loss_dtype: str
    """Of the loss; of a module's outputs, the widest that gradients begin from."""
    uses: tuple[tuple[str, float], ...] = ()
    """Parameters in the order in which the forward pass first used them, each with the seconds since the one before it,
    or since the forward pass began. Those that were not seen to be used may be read at any time."""

    def dumps(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def loads(text: str) -> Seen:
        found = json.loads(text)
        pairs = {k: tuple((str(n), float(s)) for n, s in found[k]) for k in ("gradients", "uses")}
        return Seen(**(found | pairs | {"in_pieces": tuple(found["in_pieces"])}))


@dataclass(frozen=True)
class Outline(JointGraph):
    """An outline, as a joint graph: placeholders are the parameters that are trained, the batch as a whole, and the
    tangent of the loss."""

    seconds: dict[str, float] = field(default_factory=dict, compare=False)
    """Of each node, by name, as it was measured."""
    in_pieces: frozenset[str] = frozenset()
    """Parameters whose gradients are complete only when the backward pass has ended."""
    foreseen: bool = False
    """As in `Seen`."""


def go_forward(batch: Any, *parameters: Any, names: tuple[str, ...]) -> Never:
    """Stands for a part of the forward pass, which begins with the first use of these parameters."""
    raise AssertionError("the forward pass of an outline is run by who runs the outline")


def run_forward(batch: Any, *parameters: Any, names: tuple[str, ...]) -> Never:
    """Stands for the last part of the forward pass; its value is the loss."""
    raise AssertionError("the forward pass of an outline is run by who runs the outline")


def run_backward(loss: Any, tangent: Any) -> Never:
    """Stands for the beginning of the backward pass."""
    raise AssertionError("the backward pass of an outline is run by who runs the outline")


def take_gradient(backward: Any, name: str) -> Never:
    """Stands for the moment at which a gradient is complete; its value is the gradient."""
    raise AssertionError("a gradient of an outline is taken by who runs the outline")


def opaque(node: torch.fx.Node) -> bool:
    """Whether a node stands for a part of the model's own run."""
    return node.op == "call_function" and node.target in (go_forward, run_forward, run_backward, take_gradient)


def outline(fingerprint: ModelFingerprint, batch: Batch, seen: Seen, buffer_bytes: int) -> TrainingGraph:
    """The training graph of a model that runs eagerly, as one step has shown it. All ranks must use what one has
    `seen`: the order of collectives follows from it. Raises `CaptureError` where no parameter is trained."""
    table = {p.name: p for p in fingerprint.parameters if p.trainable}
    order = [(n, s) for n, s in seen.gradients if n in table]
    there = {n for n, _ in order}
    order += [(n, 0.0) for n in table if n not in there]
    if not order:
        raise CaptureError("no parameter gets a gradient from the loss: is every one frozen, or the loss detached?")
    graph = torch.fx.Graph()
    inputs: list[tuple[str, str | int]] = []
    trained = {}
    for name in table:
        trained[name] = graph.placeholder(f"parameter_{len(inputs)}")
        trained[name].meta["val"] = _like(table[name])
        inputs.append(("parameter", name))
    whole, tangent = graph.placeholder("batch"), graph.placeholder("tangent")
    inputs += [("whole batch", 0), ("tangent", 0)]
    loss = torch.empty((), dtype=getattr(torch, seen.loss_dtype), device="meta")
    parts = _parts(seen, list(table))
    steps = []
    for i, (names, _) in enumerate(parts):
        target = go_forward if i + 1 < len(parts) else run_forward
        steps.append(graph.call_function(target, (whole, *(trained[n] for n in names)), {"names": tuple(names)}))
        steps[-1].meta["val"] = None
    forward = steps[-1]
    backward = graph.call_function(run_backward, (forward, tangent))
    tangent.meta["val"] = forward.meta["val"] = loss
    gradients = {}
    for name, _ in order:
        gradients[name] = graph.call_function(take_gradient, (backward, name))
        gradients[name].meta["val"] = _like(table[name])
    graph.output([forward, *gradients.values()])
    seconds = {step.name: s for step, (_, s) in zip(steps, parts, strict=True)} | {backward.name: 0.0}
    seconds |= {gradients[n].name: s for n, s in order}
    joint = Outline(
        module=torch.fx.GraphModule(nn.Module(), graph, class_name="Outline"),
        inputs=tuple(inputs),
        mutations=(),
        outputs=(forward,),
        gradients=gradients,
        weight=UnreadWeight("samples", is_sum=True),
        seconds=seconds,
        in_pieces=frozenset(seen.in_pieces),
        foreseen=seen.foreseen,
    )
    end = len(seconds) - 1
    positions = {node.name: i for i, node in enumerate((*steps, backward, *gradients.values()))}
    uses = {n: i for i, (names, _) in enumerate(parts) for n in names}
    return TrainingGraph(
        model=fingerprint,
        parameters=tuple(
            # A parameter may be read until the backward pass has ended: nobody knows by what.
            Parameter(spec, gradients[n].name, positions[gradients[n].name], first_use=uses[n], last_use=end)
            for n, spec in table.items()
        ),
        compute=_nodes(seconds, seen, len(steps)),
        backward_start=len(steps),
        batch_size=batch.size,
        buffer_bytes=buffer_bytes,
        input_bytes=sum(t.numel() * t.element_size() for t in batch.tensors),
        joint=joint,
        eager=True,
    )


def _like(spec: ParameterSpec) -> torch.Tensor:
    return torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="meta")


_MOST_PARTS = 24
"""Parts into which the forward pass is cut, each behind about as much time."""


def _parts(seen: Seen, trained: Sequence[str]) -> list[tuple[list[str], float]]:
    """The parts of the forward pass: the parameters that are first used where each begins, or a moment later, and its
    seconds. What was not seen to be used is used in the first."""
    known = set(trained)
    timed = {n for n, _ in seen.uses}
    parts: list[tuple[list[str], float]] = [([n for n in trained if n not in timed], 0.0)]
    left = seen.forward_s
    for name, since in seen.uses:
        names, lasted = parts[-1]
        parts[-1] = names, lasted + since
        left -= since
        if parts[-1][1] >= seen.forward_s / _MOST_PARTS or (len(parts) == 1 and not names):
            parts.append(([], 0.0))
        if name in known:
            parts[-1][0].append(name)
    names, lasted = parts[-1]
    parts[-1] = names, lasted + max(left, 0.0)
    return parts if parts[0][0] or parts[0][1] or len(parts) == 1 else parts[1:]


def _nodes(seconds: dict[str, float], seen: Seen, parts: int) -> tuple[ComputeNode, ...]:
    """The nodes, each pass's operations shared out as its time is: the backward pass has twice the forward pass's.
    `parts`: of the forward pass."""
    names, end = list(seconds), len(seconds) - 1
    of_pass = [sum(seconds[n] for n in names[:parts]), sum(seconds[n] for n in names[parts:])]
    counts = [parts, max(1, len(names) - parts - 1)]

    def share(i: int) -> float:
        k = int(i >= parts)
        return (k + 1) * (seconds[names[i]] / of_pass[k] if of_pass[k] else float(i != parts) / counts[k])

    return tuple(
        ComputeNode(
            name=n,
            op="forward pass" if i < parts else "gradient" if i > parts else "backward pass",
            flops=round(seen.flops * share(i)),
            bytes_moved=round(seen.saved_bytes * share(i)),
            live_bytes=seen.saved_bytes,
            own_bytes=seen.saved_bytes if i == parts - 1 else 0,
            needed_until=end if i < parts else i,
        )
        for i, n in enumerate(names)
    )


def look(
    run: Callable[[], Sequence[torch.Tensor]],
    parameters: dict[str, nn.Parameter],
    batch: Batch,
    watch: Collection[str] = (),
    sees_loss: bool = True,
) -> Seen:
    """Runs a step eagerly twice: counts in the first, and times the second. `run`: the forward pass; returns what
    gradients begin from, the loss or a module's outputs. `parameters`: those that are trained, by name; `watch`: whose
    first use can be seen. What running the model changes is for the caller to put back. `sees_loss`: whether who runs
    the step later has the loss, and can see by it which gradients come. Raises `CaptureError` where nothing gets a
    gradient."""
    kept = _Kept([*parameters.values(), *batch.tensors])
    counter = _Flops()
    try:
        with torch.autograd.graph.saved_tensors_hooks(kept.pack, kept.unpack), counter, torch.enable_grad():
            begun = [t for t in run() if t.requires_grad]
    except Exception:  # what stands in the way of counting need not stand in that of training, as with torch.func
        with torch.enable_grad():
            begun = [t for t in run() if t.requires_grad]
    if not begun:
        raise CaptureError("no parameter gets a gradient from the loss: is every one frozen, or the loss detached?")
    dtype = max((t.dtype for t in begun), key=lambda d: d.itemsize)
    accumulators = {n: get_gradient_edge(p).node for n, p in parameters.items()}
    reached = reachable(begun, accumulators.values())
    fired = [name for name, _ in _backward(begun, parameters)]
    foreseen = sees_loss and reached is not None and all(accumulators[n] in reached for n in fired)
    del begun
    uses: list[tuple[str, float]] = []
    start = time.perf_counter()
    with torch.enable_grad(), watched((parameters[n], partial(_note, uses, n)) for n in watch):
        begun = [t for t in run() if t.requires_grad]
    before = forwarded = time.perf_counter()
    in_pieces = {n for n in fired if fired.count(n) > 1}
    gradients = []
    for name, at in _backward(begun, parameters):
        if name not in in_pieces:
            gradients.append((name, at - before))
            before = at
    return Seen(
        gradients=tuple(_with_absent(gradients, list(parameters), foreseen)),
        forward_s=forwarded - start,
        flops=counter.total,
        in_pieces=tuple(n for n in parameters if n in in_pieces),
        saved_bytes=kept.bytes,
        foreseen=foreseen,
        loss_dtype=str(dtype).removeprefix("torch."),
        uses=tuple(_with_unused(uses, start, [n for n in parameters if n in watch])),
    )


def _note(uses: list[tuple[str, float]], name: str) -> None:
    uses.append((name, time.perf_counter()))


def _with_unused(uses: Sequence[tuple[str, float]], start: float, names: Sequence[str]) -> list[tuple[str, float]]:
    """First uses with the time since the one before; each name that has none behind the one that the model lists before
    it, which is where it is used in another step."""
    moments, there = [start, *(at for _, at in uses)], {n for n, _ in uses}
    behind: dict[str | None, list[tuple[str, float]]] = {}
    last: str | None = None
    for name in names:
        if name in there:
            last = name
        else:
            behind.setdefault(last, []).append((name, 0.0))
    found = behind.get(None, [])
    for (name, at), before in zip(uses, moments, strict=False):
        found += [(name, at - before), *behind.get(name, ())]
    return found


def _with_absent(
    gradients: Sequence[tuple[str, float]], parameters: Sequence[str], foreseen: bool
) -> list[tuple[str, float]]:
    """Those that got none, too: where it is foreseen, which gradients come, each behind that of the next one that the
    model lists, which is where it comes in another step; else last."""
    there = {n for n, _ in gradients}
    if not foreseen:
        return [*gradients, *((n, 0.0) for n in parameters if n not in there)]
    behind: dict[str | None, list[tuple[str, float]]] = {}
    last: str | None = None
    for name in reversed(parameters):
        if name in there:
            last = name
        else:
            behind.setdefault(last, []).append((name, 0.0))
    found = behind.get(None, [])
    for name, seconds in gradients:
        found += [(name, seconds), *behind.get(name, ())]
    return found


def unseen(parameters: Iterable[str]) -> Seen:
    """What is assumed of a step that cannot be looked at, as of a module that hands back no tensor: gradients become
    complete in the reverse order of the model's parameters, as `DistributedDataParallel` assumes."""
    order = tuple((n, 0.0) for n in reversed([*parameters]))
    return Seen(order, 0.0, 0, (), foreseen=False, saved_bytes=0, loss_dtype="float32")


def _backward(begun: Sequence[torch.Tensor], parameters: dict[str, nn.Parameter]) -> list[tuple[str, float]]:
    """Runs the backward pass; returns which gradients came, and when, in their order."""
    found: list[tuple[str, float]] = []

    def hook(name: str) -> Callable[[torch.Tensor], None]:
        def done(p: torch.Tensor) -> None:
            found.append((name, time.perf_counter()))
            p.grad = None

        return done

    handles = [p.register_post_accumulate_grad_hook(hook(n)) for n, p in parameters.items()]  # type: ignore[no-untyped-call]
    try:
        torch.autograd.backward(begun, [torch.ones_like(t) for t in begun])
    finally:
        for handle in handles:
            handle.remove()
    return found


class _Flops(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts floating-point operations. PyTorch's own `FlopCounterMode` hangs hooks on what modules are given, with
    which `torch.autograd.grad` fails within a forward pass."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        count = flop_registry.get(getattr(func, "_overloadpacket", func))
        if count is not None:
            self.total += count(*args, **(kwargs or {}), out_val=found)
        return found


class _Kept:
    """Counts the memory that the forward pass keeps for the backward pass."""

    def __init__(self, there: Iterable[torch.Tensor]) -> None:
        self.bytes = 0
        self._known = {t.untyped_storage().data_ptr() for t in there if t.layout is torch.strided}

    def pack(self, t: torch.Tensor) -> torch.Tensor:
        if t.layout is torch.strided:
            memory = t.untyped_storage()
            if memory.data_ptr() not in self._known:
                self._known.add(memory.data_ptr())
                self.bytes += memory.nbytes()
        return t

    def unpack(self, t: torch.Tensor) -> torch.Tensor:
        return t
