"""The single process of a verification: it trains eagerly, on what all ranks train on."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from autopar.ir.batch import flatten
from autopar.runtime.model.eager import loss_of, without_trace
from autopar.verification.differences import coarsest, distance
from autopar.verification.job import Built, Job, batches, build
from autopar.verification.processes import wait_for
from autopar.verification.rank_buffers import RankBuffers


class SeenDtypes(TorchFunctionMode):
    """The dtypes of all values that a gradient flows through."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[torch.dtype] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(found):
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.requires_grad:
                self.seen.add(leaf.dtype)
        return found


class Reference:
    """Trains as the ranks are to train."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.of: Built = build(job)
        self.buffers = RankBuffers(self.of, job.world_size)
        self.dtypes = {p.dtype for p in self.of.parameters.values() if p.requires_grad}

    @property
    def by_rank(self) -> bool:
        """Whether the loss depends on which rank has which samples."""
        return bool(self.buffers.shared) or bool(batch_norms(self.of.model))

    def step(self, step: int) -> dict[str, Any]:
        """Loss, gradients and the values after one step; every rank's buffers."""
        of, job = self.of, self.job
        of.optimizer.zero_grad()
        with SeenDtypes() as dtypes:
            loss = self._backward([batches(job, of.example, step, r) for r in range(job.world_size)], step)
        self.dtypes |= dtypes.seen
        if job.clip_grad_norm is not None:
            once = {
                id(p): p for p in of.parameters.values() if p.grad is not None
            }  # a tied parameter has several names
            torch.nn.utils.clip_grad_norm_(list(once.values()), job.clip_grad_norm)
        gradients = {n: p.grad for n, p in of.parameters.items() if p.grad is not None}
        of.optimizer.step()
        return {
            "loss": loss,
            "gradients": gradients,
            "parameters": {n: p.detach() for n, p in of.parameters.items()},
            "buffers": self.buffers.of_rank,
            "computed in": str(coarsest(self.dtypes)).removeprefix("torch."),
            "notes": self._notes(),
        }

    def _backward(self, parts: list[list[Any]], step: int) -> torch.Tensor:
        """Leaves gradients in the parameters, and every rank's buffers in `buffers`; returns the loss."""
        of, buffers, begun = self.of, self.buffers, self.buffers.of_rank
        before = begun[0]
        if self.by_rank:
            loss = self._rank_by_rank(parts)
            self._learn(before, parts, step)
        else:
            buffers.put(0)
            loss = loss_of(of.model, of.loss_fn, _concatenated([b for rank in parts for b in rank]))
            loss.backward()  # type: ignore[no-untyped-call]
            if buffers.changed(before):
                for rank, own in enumerate(parts):
                    with without_trace(of.owners):
                        buffers.put(rank)
                        for batch in own:
                            loss_of(of.model, of.loss_fn, batch)
                        buffers.taken(rank)
                if self._learn(before, parts, step):
                    of.optimizer.zero_grad()
                    buffers.of_rank = begun
                    loss = self._rank_by_rank(parts)
        buffers.share()
        buffers.put(0)
        return loss.detach()

    def _rank_by_rank(self, parts: list[list[Any]]) -> torch.Tensor:
        """Each batch counts by its samples, and is run with its own rank's buffers."""
        of, total = self.of, torch.zeros((), dtype=torch.float64)
        samples = sum(flatten(b).size or 1 for own in parts for b in own)
        for rank, own in enumerate(parts):
            self.buffers.put(rank)
            for batch in own:
                share = (flatten(batch).size or 1) / samples
                loss = loss_of(of.model, of.loss_fn, batch)
                (loss * share).backward()  # type: ignore[no-untyped-call]
                total += loss.detach().double() * share
            self.buffers.taken(rank)
        return total

    def _learn(self, before: dict[str, torch.Tensor], parts: list[list[Any]], step: int) -> bool:
        shared = list(told_of(self.job, step).shared)
        return self.buffers.learn(before, self.buffers.of_rank[0], parts[0][0], shared)

    def _notes(self) -> list[str]:
        of, buffers, notes = self.of, self.buffers, ["dropout is off"]
        if batch_norms(of.model):
            notes.append("batch norm: the single process normalizes over each rank's batch, as the ranks do")
        if buffers.shared:
            notes.append(
                f"buffers that the forward pass reads and writes ({_listed(buffers.shared)}) are rank 0's on all ranks "
                "after each step, in the single process too; one process that saw all batches would have others"
            )
        if own := buffers.written - buffers.shared:
            notes.append(
                f"buffers that the forward pass only writes ({_listed(own)}) are each rank's own: each is compared "
                "with what that rank's batches make of it"
            )
        return notes


def run(job: Job) -> None:
    """Trains, and puts down each step's values for the ranks to read."""
    reference = Reference(job)
    rounding: Rounding | None = None
    for step in range(job.steps):
        found = reference.step(step)
        to = told_of(job, step).rounded_to if step == 0 else ""
        if rounding is None and (to or found["computed in"] != "float64"):
            rounding = Rounding(Reference(job), job.seed, to)
        found["moves"] = {} if rounding is None else rounding.moves(step, found)
        path = step_path(job, step)
        torch.save(found, path.with_suffix(".tmp"))
        path.with_suffix(".tmp").rename(path)
        done = [done_path(job, step, r) for r in range(job.world_size)]
        wait_for(lambda done=done: all(d.exists() for d in done))  # type: ignore[misc]
        path.unlink()


FORWARD_TIMES = 8
"""How many times as far as in one such training, where a narrower format rounds what the forward pass reads: few of its
samples go to the other side of a ReLU, and each moves a gradient by a lot. [Empirical: perceptrons on 32 samples]"""


class Rounding:
    """How far rounding alone moves the single process: it is trained once more, and before each step every parameter
    is moved by about the rounding of its dtype, or `to` a narrower one, in which the forward pass gets what it reads.
    Small batches under batch normalization, say, make much of that."""

    def __init__(self, twin: Reference, seed: int, to: str = "") -> None:
        self._twin = twin
        self._unit = torch.finfo(getattr(torch, to)).eps if to else 0.0
        self._times = FORWARD_TIMES if to else 1
        self._draw = torch.Generator().manual_seed(seed)

    def moves(self, step: int, usual: dict[str, Any]) -> dict[str, float]:
        """The largest distance in each gradient, parameter and buffer after a step, by `gradients NAME` and so on."""
        self._nudge()
        found = self._twin.step(step)
        moved = {
            f"{kind} {n}": self._times * distance(found[kind][n], value)
            for kind in ("gradients", "parameters")
            for n, value in usual[kind].items()
        }
        for mine, held in zip(found["buffers"], usual["buffers"], strict=True):
            for n, value in held.items():
                if value.is_floating_point() or value.is_complex():
                    key = f"buffers {n}"
                    moved[key] = max(moved.get(key, 0.0), self._times * distance(mine[n], value))
        return {n: far for n, far in moved.items() if math.isfinite(far)}

    def _nudge(self) -> None:
        with torch.no_grad():
            for p in self._twin.of.trainable():
                if p.is_floating_point():
                    by = 2 * torch.rand(p.shape, generator=self._draw, dtype=torch.float64) - 1
                    p.copy_(p.double() * (1 + max(self._unit, torch.finfo(p.dtype).eps) * by))


def step_path(job: Job, step: int) -> Path:
    """Where the single process puts down a step's values."""
    return Path(job.folder) / f"step{step}.pt"


def done_path(job: Job, step: int, rank: int) -> Path:
    """What a rank leaves when it has read them."""
    return Path(job.folder) / f"done{step}.{rank}"


@dataclass(frozen=True)
class Told:
    """What rank 0 tells the single process of its program for a step."""

    shared: tuple[str, ...] = ()
    """Buffers that ranks share."""
    rounded_to: str = ""
    """The format in which the forward pass gets some of what it reads; empty where it gets all as it is."""


def tell(job: Job, step: int, told: Told) -> None:
    """Puts it down for the single process to read."""
    path = _told_path(job, step)
    path.with_suffix(".tmp").write_text(json.dumps(asdict(told)))
    path.with_suffix(".tmp").rename(path)


def told_of(job: Job, step: int) -> Told:
    """What rank 0 has told, where there are several ranks; waits for it."""
    if job.world_size == 1:
        return Told()
    path = _told_path(job, step)
    wait_for(path.exists)
    return Told(**json.loads(path.read_text()))


def _told_path(job: Job, step: int) -> Path:
    return Path(job.folder) / f"told{step}.json"


def batch_norms(model: nn.Module) -> list[nn.Module]:
    """The modules that normalize over the batch."""
    return [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.training]


def _concatenated(parts: list[Any]) -> Any:
    flat = [flatten(b) for b in parts]
    size = flat[0].size
    columns = zip(*(f.tensors for f in flat), strict=True)
    joined = tuple(torch.cat(c) if c[0].dim() and c[0].shape[0] == size else c[0] for c in columns)
    return flat[0].rebuild(joined)


def _listed(names: set[str]) -> str:
    some = sorted(names)
    return ", ".join(some[:3]) + (f" and {len(some) - 3} more" if len(some) > 3 else "")
