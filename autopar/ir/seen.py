"""What one step of a model that runs eagerly shows, looked at on an example: the order and times of first uses and of
gradients, what the forward pass keeps, and which gradients are rows."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from autopar.errors import CaptureError
from autopar.ir.batch import Batch
from autopar.ir.first_uses import watched
from autopar.ir.reachable import reachable
from autopar.ir.read_targets import TargetReader, Targets

TIMED = 3
"""How often a step is timed; the one that took neither longest nor shortest counts. The same on all ranks, for the
model may have them communicate."""
FEWEST_ROWS = 64
"""Of a matrix whose gradient is looked at row by row: in a smaller one, rows of zeros save nothing."""


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
    rows: tuple[tuple[str, int], ...] = ()
    """Matrices whose gradient was zero but for so many rows, few of all, as that of an embedding is."""
    targets: tuple[Targets, ...] = ()
    """Which targets in the batch the loss is a mean over; empty where that was not seen."""
    absent: tuple[str, ...] = ()
    """Parameters that got no gradient."""
    unread: str = ""
    """Why the loss may be a mean over something else, in words."""

    def dumps(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def loads(text: str) -> Seen:
        found = json.loads(text)
        pairs = {k: tuple((str(n), float(s)) for n, s in found[k]) for k in ("gradients", "uses")}
        rows = tuple((str(n), int(count)) for n, count in found["rows"])
        targets = tuple(Targets.of(t) for t in found["targets"])
        names = {k: tuple(found[k]) for k in ("in_pieces", "absent")}
        return Seen(**(found | pairs | names | {"rows": rows, "targets": targets}))


def nonzero_rows(gradient: torch.Tensor) -> torch.Tensor:
    """The indices of a gradient's rows that are not zero, ascending."""
    return gradient.ne(0).any(1).nonzero()[:, 0]


def look(
    run: Callable[[], Sequence[torch.Tensor]],
    parameters: dict[str, nn.Parameter],
    batch: Batch,
    watch: Collection[str] = (),
    sees_loss: bool = True,
    reader: TargetReader | None = None,
) -> Seen:
    """Runs a step eagerly: counts once, and then times it as often as `TIMED` says. `run`: the forward pass; returns
    what gradients begin from, the loss or a module's outputs. `parameters`: those that are trained, by name; `watch`:
    whose first use can be seen. What running the model changes is for the caller to put back. `sees_loss`: whether who
    runs the step later has the loss, and can see by it which gradients come. `reader`: is open in the first run. Raises
    `CaptureError` where nothing gets a gradient."""
    kept, counter = _Kept([*parameters.values(), *batch.tensors]), _Flops()
    saved = torch.autograd.graph.saved_tensors_hooks(kept.pack, kept.unpack)
    try:
        with _uncompiled(), saved, counter, reader or nullcontext(), torch.enable_grad():
            begun = [t for t in run() if t.requires_grad]
    except Exception:  # what stands in the way of counting need not stand in that of training, as with torch.func
        with torch.enable_grad():
            begun = [t for t in run() if t.requires_grad]
    if not begun:
        raise CaptureError("no parameter gets a gradient from the loss: is every one frozen, or the loss detached?")
    dtype = max((t.dtype for t in begun), key=lambda d: d.itemsize)
    accumulators = {n: get_gradient_edge(p).node for n, p in parameters.items()}
    reached = reachable(begun, accumulators.values())
    rows: dict[str, int] = {}
    fired = [name for name, _ in _backward(begun, parameters, partial(_count_rows, rows))]
    foreseen = sees_loss and reached is not None and all(accumulators[n] in reached for n in fired)
    del begun
    timed = [_timed(run, parameters, watch) for _ in range(TIMED)]
    one = sorted(timed, key=lambda t: t.took_s)[TIMED // 2]
    uses = one.uses
    if any(t.compiler_began for t in timed):  # compiled code tells nobody what it uses
        watch, uses = (), []
    in_pieces = {n for n in fired if fired.count(n) > 1}
    gradients = _since([(n, at) for n, at in one.gradients if n not in in_pieces], one.forwarded)
    return Seen(
        gradients=tuple(_with_absent(gradients, list(parameters), foreseen)),
        forward_s=one.forwarded - one.began,
        flops=counter.total,
        in_pieces=tuple(n for n in parameters if n in in_pieces),
        absent=tuple(n for n in parameters if n not in fired),
        saved_bytes=kept.bytes,
        foreseen=foreseen,
        loss_dtype=str(dtype).removeprefix("torch."),
        rows=tuple((n, c) for n, c in rows.items() if fired.count(n) == 1 and sees_loss),
        uses=tuple(_with_missing(_since(uses, one.began), [n for n in parameters if n in watch])),
        targets=() if reader is None else reader.found,
        unread="" if reader is None else reader.unread,
    )


@dataclass(frozen=True)
class _Timed:
    """Moments of one step, by `time.perf_counter`."""

    began: float
    uses: list[tuple[str, float]]
    """Of parameters, the first."""
    compiler_began: bool
    forwarded: float
    gradients: list[tuple[str, float]]

    @property
    def took_s(self) -> float:
        return max((at for _, at in self.gradients), default=self.forwarded) - self.began


def _timed(
    run: Callable[[], Sequence[torch.Tensor]], parameters: dict[str, nn.Parameter], watch: Collection[str]
) -> _Timed:
    uses: list[tuple[str, float]] = []
    began = time.perf_counter()
    with torch.enable_grad(), watched((parameters[n], partial(_note, uses, n)) for n in watch) as met:
        begun = [t for t in run() if t.requires_grad]
    forwarded = time.perf_counter()
    return _Timed(began, uses, met.compiler_began, forwarded, _backward(begun, parameters))


def _count_rows(rows: dict[str, int], name: str, gradient: torch.Tensor) -> None:
    if gradient.dim() != 2 or len(gradient) < FEWEST_ROWS:
        return
    dense = gradient.to_dense() if gradient.is_sparse else gradient
    count = len(nonzero_rows(dense)) if dense.layout is torch.strided else len(dense)
    if count <= len(gradient) // 2:
        rows[name] = count


def _since(moments: Sequence[tuple[str, float]], start: float) -> list[tuple[str, float]]:
    """Each with the seconds since the one before it."""
    return [(n, at - before) for (n, at), before in zip(moments, [start, *(at for _, at in moments)], strict=False)]


def _note(uses: list[tuple[str, float]], name: str) -> None:
    uses.append((name, time.perf_counter()))


def _with_absent(
    gradients: Sequence[tuple[str, float]], parameters: Sequence[str], foreseen: bool
) -> list[tuple[str, float]]:
    """Those that got none, too: where it is foreseen, which gradients come, each behind that of the next one that the
    model lists, which is where it comes in another step; else last."""
    if foreseen:
        return _with_missing(gradients, list(reversed(parameters)))
    there = {n for n, _ in gradients}
    return [*gradients, *((n, 0.0) for n in parameters if n not in there)]


def _with_missing(timed: Sequence[tuple[str, float]], names: Sequence[str]) -> list[tuple[str, float]]:
    """Parameters in the order of their times, and behind each those of `names` that follow and have no time; these have
    0 seconds. Those before the first with a time come first."""
    there = {n for n, _ in timed}
    behind: dict[str | None, list[tuple[str, float]]] = {}
    last: str | None = None
    for name in names:
        if name in there:
            last = name
        else:
            behind.setdefault(last, []).append((name, 0.0))
    found = behind.get(None, [])
    for name, seconds in timed:
        found += [(name, seconds), *behind.get(name, ())]
    return found


def unseen(parameters: Iterable[str]) -> Seen:
    """What is assumed of a step that cannot be looked at, as of a module that hands back no tensor: gradients become
    complete in the reverse order of the model's parameters, as `DistributedDataParallel` assumes."""
    order = tuple((n, 0.0) for n in reversed([*parameters]))
    return Seen(order, 0.0, 0, (), foreseen=False, saved_bytes=0, loss_dtype="float32")


def _backward(
    begun: Sequence[torch.Tensor],
    parameters: dict[str, nn.Parameter],
    show: Callable[[str, torch.Tensor], None] = lambda name, gradient: None,
) -> list[tuple[str, float]]:
    """Runs the backward pass, and shows each gradient; returns which came, and when, in their order."""
    found: list[tuple[str, float]] = []

    def hook(name: str) -> Callable[[torch.Tensor], None]:
        def done(p: torch.Tensor) -> None:
            found.append((name, time.perf_counter()))
            gradient, p.grad = p.grad, None
            if gradient is not None:
                show(name, gradient)

        return done

    handles = [p.register_post_accumulate_grad_hook(hook(n)) for n, p in parameters.items()]  # type: ignore[no-untyped-call]
    try:
        torch.autograd.backward(begun, [torch.ones_like(t) for t in begun])
    finally:
        for handle in handles:
            handle.remove()
    return found


def _uncompiled() -> AbstractContextManager[Any]:
    """While it is open, functions that PyTorch compiles run as they are: called under a mode of dispatch, they would
    never be compiled again, and fail where they were to be compiled whole."""
    has_compiler = "torch._dynamo" in sys.modules  # who has compiled anything has imported it
    return torch.compiler.set_stance("force_eager") if has_compiler else nullcontext()


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
