"""Compressed groups on real ranks, against the same algorithms written down for one process, number by number."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from scipy.linalg import hadamard
from torch import nn

import autopar
from autopar.ops.step_count import generator_of
from autopar.runtime.program import Program
from autopar.spec.plan import ParameterSlice, SyncGroup
from tests.gloo.captures import traced_once
from tests.gloo.plans import ddp_plan
from tests.gloo.training import Batch, Net, adamw, batch, distance

STEPS = 6
GROUPS = (("embed.weight", "hidden.bias", "still"), ("hidden.weight",))
"""`embed.weight` is tied to the output layer; `still` has a gradient of zeros."""

Numbers = npt.NDArray[np.float64]


class StillNet(Net):
    """With a frozen parameter, a tied one, and one whose gradient is always zero."""

    def __init__(self) -> None:
        super().__init__()
        self.still = nn.Parameter(torch.ones(5))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) + 0.0 * self.still.sum()


def net() -> StillNet:
    torch.manual_seed(5)
    return StillNet().double()


class Compressor(Protocol):
    """One group's algorithm, of all ranks."""

    met_tie: bool
    """Whether something was rounded that lay halfway, so that the last bit of a float64 decides."""

    def sum(self, inputs: Sequence[Numbers]) -> Numbers:
        """What all ranks update with, from each rank's scaled gradients; keeps what is lost."""


@dataclass(frozen=True)
class Case:
    """A strategy, and its algorithm for one process."""

    strategy: str
    options: dict[str, Any]
    compressor: Callable[[int, int], Compressor]
    """Of a number of ranks, for a group by its index."""


@dataclass(frozen=True)
class How:
    """A way to train."""

    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw
    clip: float | None = None
    micro_batches: int = 1
    schedules: bool = False


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.2, momentum=0.9)


HOWS = {
    "adamw": How(),
    "momentum": How(momentum),
    "clipped": How(momentum, clip=0.05),
    "accumulated": How(micro_batches=2),
    "scheduled": How(momentum, schedules=True),
}


class Reference:
    """All ranks in one process."""

    def __init__(self, case: Case, how: How, n: int) -> None:
        self.model, self.how, self.n = net(), how, n
        self.optimizer = how.optimizer(self.model)
        self.compressors = [case.compressor(n, i) for i in range(len(GROUPS))]
        self.named = dict(self.model.named_parameters())

    def step(self, step: int) -> None:
        each = [self._gradients(step, r) for r in range(self.n)]
        for names, compressor in zip(GROUPS, self.compressors, strict=True):
            flat = [np.concatenate([g[name].numpy().reshape(-1) for name in names]) for g in each]
            total = flat[0] if self.n == 1 else compressor.sum(flat)
            sizes = [0, *np.cumsum([self.named[name].numel() for name in names])]
            for name, (a, b) in zip(names, pairwise(sizes), strict=True):
                self.named[name].grad = torch.from_numpy(total[a:b].copy()).view(self.named[name].shape)
        if self.how.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.how.clip)
        self.optimizer.step()

    def _gradients(self, step: int, rank: int) -> dict[str, torch.Tensor]:
        """A rank's part of the gradient of the global mean."""
        k = self.how.micro_batches
        count = sum(len(ids) for r in range(self.n) for ids, _ in batches(step, r, k))
        trained = {n: p for n, p in self.named.items() if p.requires_grad}
        loss = torch.zeros((), dtype=torch.float64)
        for ids, target in batches(step, rank, k):
            loss = loss + F.cross_entropy(self.model(ids), target, reduction="sum") / count
        return dict(zip(trained, torch.autograd.grad(loss, list(trained.values())), strict=True))


def batches(step: int, rank: int, count: int) -> list[Batch]:
    return [batch(10 * step + k, rank) for k in range(count)]


def program_of(rank: int, n: int, case: Case, how: How, model: nn.Module, **settings: Any) -> Program:
    example = batch(0, rank)
    plan = ddp_plan(model, n, example)
    groups = tuple(
        SyncGroup(
            strategy=case.strategy, options=case.options, members=tuple(ParameterSlice(name=name) for name in names)
        )
        for names in GROUPS
    )
    plan = plan.model_copy(update={"groups": groups, "fidelity": "compressed"})
    return autopar.optimize(
        model,
        plan=plan,
        optimizer=how.optimizer(model),
        example_inputs=example,
        loss_fn=F.cross_entropy,
        clip_grad_norm=how.clip,
        **settings,
    )


def take_step(program: Program, step: int, rank: int, how: How) -> float:
    mine = batches(step, rank, how.micro_batches)
    loss = program.step(micro_batches=mine) if len(mine) > 1 else program.step(mine[0])
    return float(loss)


def off(rank: int, n: int, case: Case, how: How) -> float:
    """How far a program is from the reference, over some steps, in what is allowed: 1e-10, and once the two may have
    rounded a scale to two neighbours in float32, 1e-7."""
    reference, model, worst = Reference(case, how, n), net(), 0.0
    program = program_of(rank, n, case, how, model)
    optimizers = (program.optimizer, reference.optimizer) if how.schedules else ()
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 2, 0.5) for o in optimizers]
    for step in range(STEPS):
        take_step(program, step, rank, how)
        reference.step(step)
        for scheduler in schedulers:
            scheduler.step()
        allowed = 1e-7 if any(c.met_tie for c in reference.compressors) else 1e-10
        worst = max(worst, distance(model, reference.model) / allowed)
    return worst


def resumed(rank: int, n: int, case: Case, folder: Path) -> dict[str, float]:
    """How far a run that was saved and loaded is from the one that was not interrupted; and how far the sums of
    residuals are, through a dict, which has one process's form."""
    how, model, other = HOWS["momentum"], net(), net()
    program = program_of(rank, n, case, how, model)
    for step in range(3):
        take_step(program, step, rank, how)
    program.save(folder)
    state = program.state_dict()
    again = program_of(rank, n, case, how, other)
    again.load_state_dict(state)
    sums = _sums(state), _sums(again.state_dict())
    again.load(folder)
    for step in range(3, 5):
        for one in (program, again):
            take_step(one, step, rank, how)
    return {
        "parameters": distance(model, other),
        "sums": max((abs(sums[0][k] - sums[1][k]) for k in sums[0]), default=0),
    }


def moved(rank: int, n: int, folder: str) -> dict[str, float]:
    """The sums of residuals, loaded on another number of ranks than have saved them; and a step there."""
    program = program_of(rank, n, CASES["int8"], HOWS["momentum"], net())
    program.load(Path(folder) / "int8")
    found = _sums(program.state_dict())
    take_step(program, 3, rank, HOWS["momentum"])
    return found


def _sums(state: dict[str, Any]) -> dict[str, float]:
    """Of what is kept of each parameter, over all states."""
    found: dict[str, float] = {}
    for key, by_name in state["state"].items():
        for name, value in by_name.items():
            if key.startswith("residual"):
                found[name] = found.get(name, 0.0) + float(value.double().sum())
    return found


def learned(rank: int, n: int, case: Case) -> list[float]:
    """The losses of a tiny training, on the same batch again and again."""
    how, model = HOWS["momentum"], net()
    program = program_of(rank, n, case, how, model)
    return [take_step(program, 0, rank, how) for _ in range(40)]


class Quantizing:
    """Blocks of numbers in few bits, as the papers have it; written with plain loops."""

    def __init__(
        self,
        n: int,
        index: int,
        bits: int,
        block: int,
        *,
        scale: str = "largest",
        stochastic: bool = False,
        rotated: bool = False,
        clip: float = 0.0,
        in_parts: bool = False,
    ) -> None:
        self.n, self.index, self.bits, self.block, self.scale = n, index, bits, block, scale
        self.stochastic, self.rotated, self.clip, self.in_parts = stochastic, rotated, clip, in_parts
        self.keeps = not stochastic
        self.residuals: list[Numbers] = []
        self.of_sums: list[Numbers] = []
        self.rounds = 0
        self.met_tie = False

    def sum(self, inputs: Sequence[Numbers]) -> Numbers:
        self.rounds += 1
        size = len(inputs[0])
        if not self.residuals:
            self.residuals = [np.zeros(size) for _ in inputs]
        each = self.block * math.ceil(size / (self.n * self.block)) if self.in_parts else size
        padded = each * self.n if self.in_parts else size
        sent = []
        for rank, given in enumerate(inputs):
            full = given + self.residuals[rank] if self.keeps else given
            found = self._received(np.pad(full, (0, padded - size)), size, rank, 0)[:size]
            self.residuals[rank] = full - found
            sent.append(found)
        total: Numbers = np.sum(sent, 0)
        if not self.in_parts:
            return total
        parts = [total[r * each : (r + 1) * each] for r in range(self.n)]
        if not self.of_sums:
            self.of_sums = [np.zeros(len(part)) for part in parts]
        result = []
        for rank, part in enumerate(parts):
            full = part + self.of_sums[rank] if self.keeps else part
            found = self._received(np.pad(full, (0, each - len(full))), len(full), rank, 1)[: len(full)]
            self.of_sums[rank] = full - found
            result.append(found)
        return np.concatenate(result)

    def _received(self, numbers: Numbers, size: int, rank: int, phase: int) -> Numbers:
        """What others make of a message; of `numbers`, the first `size` count."""
        blocks = math.ceil(len(numbers) / self.block)
        numbers = np.pad(numbers, (0, blocks * self.block - len(numbers)))
        draws = np.zeros((blocks, self.block))
        if self.stochastic:
            stream = self.index * 2**32 + rank * 2 + phase
            generator = generator_of(torch.tensor(self.rounds), stream, torch.device("cpu"))
            draws = torch.rand(blocks, self.block, generator=generator).double().numpy()
        found = []
        for i in range(blocks):
            some = numbers[i * self.block : (i + 1) * self.block]
            found.append(self._of_block(some, min(self.block, max(1, size - i * self.block)), draws[i]))
        return np.concatenate(found) if found else np.zeros(0)

    def _of_block(self, x: Numbers, count: int, draws: Numbers) -> Numbers:
        turn = np.eye(self.block)
        if self.rotated:
            drawn = torch.randint(0, 2, (self.block,), generator=torch.Generator().manual_seed(0x5E1F))
            turn = hadamard(self.block) / math.sqrt(self.block) * (drawn.numpy() * 2.0 - 1)
        x = turn @ x
        if self.clip:
            most = self.clip * np.sqrt((x * x).sum() / count)
            x = np.clip(x, -most, most)
        magnitudes = np.abs(x)
        of = {"largest": magnitudes.max(), "norm": np.sqrt((x * x).sum()), "mean": magnitudes.sum() / count}[self.scale]
        scale = float(np.float32(of))
        beside = [float(np.nextafter(np.float32(scale), np.float32(to))) for to in (-np.inf, np.inf)]
        # Scales of sums are sums of scales where ranks' largest numbers meet: halfway between two float32, not rarely.
        # Only a rotation computes them in an order of its own.
        self.met_tie |= self.rotated and any(abs(of - (scale + b) / 2) <= 1e-14 * of for b in beside) and of > 0
        if self.bits == 1:
            return np.where(x >= 0, scale, -scale)
        levels = 2 ** (self.bits - 1) - 1
        code = np.zeros(self.block)
        for j, number in enumerate(x):
            if scale > 0:
                # The factor is a float32, as the scale is.
                of_number = number * float(np.float32(levels) / np.float32(scale))
                code[j] = math.floor(of_number + draws[j]) if self.stochastic else round(of_number)
                code[j] = min(levels, max(-levels, code[j]))
        found: Numbers = turn.T @ (code * (scale / levels))
        return found


def _of(bits: int, block: int, **settings: Any) -> Callable[[int, int], Compressor]:
    return lambda n, index: Quantizing(n, index, bits, block, **settings)


CASES = {
    "int8": Case("quantized", {"block": 64}, _of(8, 64, in_parts=True)),
    "int8, gathered": Case("quantized", {"block": 16, "exchange": "gather"}, _of(8, 16)),
    "int4": Case("quantized", {"bits": 4, "block": 16}, _of(4, 16, in_parts=True)),
    "int4, rotated": Case(
        "quantized", {"bits": 4, "block": 16, "rotated": True}, _of(4, 16, rotated=True, in_parts=True)
    ),
    "int8, stochastic": Case(
        "quantized", {"block": 16, "rounding": "stochastic"}, _of(8, 16, stochastic=True, in_parts=True)
    ),
    "signs": Case("scaled_sign", {"block": 24}, _of(1, 24, scale="mean", in_parts=True)),
    "signs, gathered": Case("scaled_sign", {"block": 16, "exchange": "gather"}, _of(1, 16, scale="mean")),
    "qsgd": Case("qsgd", {"bits": 4, "block": 16}, _of(4, 16, scale="norm", stochastic=True)),
    "terngrad": Case("terngrad", {"block": 16}, _of(2, 16, stochastic=True, clip=2.5)),
}


RESUMED = ("int8", "int8, stochastic", "signs, gathered")
LEARNED = ("int4, rotated", "int8, stochastic", "signs", "qsgd", "terngrad")


@traced_once()
def compared(rank: int, n: int, folder: str) -> dict[str, Any]:
    """Of each case, trained one way: how far it is from its reference; and what else there is to see on two ranks."""
    found: dict[str, Any] = {}
    for turn, (name, case) in enumerate(CASES.items()):
        how = list(HOWS)[(turn + n) % len(HOWS)]
        found[f"{name}, {how}"] = off(rank, n, case, HOWS[how])
    if n == 2:
        found["resumed"] = {name: resumed(rank, n, CASES[name], Path(folder) / name) for name in RESUMED}
        found["losses"] = {name: learned(rank, n, CASES[name]) for name in LEARNED}
    if n == 3:
        found["moved"] = moved(rank, n, folder)
    return found
