"""Sign compression with a fault, in four ways; and what the tests of the first step's proof run on each rank."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

import autopar
from autopar.errors import AutoparWarning, VerificationError
from autopar.ops.base import Call, Operation, Site
from autopar.ops.group import Group
from autopar.ops.layouts import VARYING
from autopar.runtime.program import Program
from autopar.spec.plan import SyncGroup
from autopar.strategies import register
from autopar.strategies.base import Options
from autopar.strategies.emitter import Emitter
from tests.extension.sign_compression import EncodeSigns, SignCompression, SumSigns, encode
from tests.gloo.training import adamw, batch, net


@dataclass(frozen=True, slots=True)
class SumTimes(SumSigns):
    """The sum, times a number."""

    name = "sum_times"
    factor: float = 1.0

    def write(self, site: Site, call: Call) -> Any:
        return site.call(torch.mul, (SumSigns.write(self, site, call), self.factor))


@dataclass(frozen=True, slots=True)
class EncodeAndForget(EncodeSigns):
    """Leaves the residual as it is."""

    name = "encode_and_forget"

    def write(self, site: Site, call: Call) -> Any:
        gradient, residual = map(site.value_of, call.inputs)
        return site.call(encode, (gradient, site.call(torch.clone, (residual,))))


class Signs(SignCompression):
    """With an encoder, a factor, and a layout of the residual that may be wrong; on one rank, too."""

    encoder: ClassVar[Operation] = EncodeSigns()
    per_rank: ClassVar[bool] = False
    factor: ClassVar[float] = 1.0
    layout: ClassVar[Any] = None

    def lower(self, group: Group, options: Options, emit: Emitter) -> None:
        if emit.world_size == 1:
            super().lower(group, options, emit)
            return
        residual = emit.state(group, "residual", dtype="float32", layout=self.layout)
        signs = emit.emit(self.encoder, group, [emit.pack(group), residual])
        factor = self.factor / emit.world_size if self.per_rank else self.factor
        emit.update(emit.emit(SumTimes(factor=factor), group, [emit.wait(emit.all_gather(signs))]), group)


class RightSigns(Signs):
    name = "right_signs"


class DoubledSigns(Signs):
    name, factor = "doubled_signs", 2.0


class DividedSigns(Signs):
    name, per_rank = "divided_signs", True


class ForgetfulSigns(Signs):
    name, encoder = "forgetful_signs", EncodeAndForget()


class UnkeptSigns(Signs):
    """What it keeps is no part of a sum, and so no residual."""

    name, layout = "unkept_signs", VARYING


Timing = Mapping[str, Any]
RIGHT: Sequence[Sequence[Timing]] = (
    (
        {"strategy": "right_signs"},
        {"strategy": "right_signs", "delay": 1},
        {"strategy": "all_reduce", "options": {"wire": "bfloat16"}, "delay": 1},
    ),
    (
        {"strategy": "right_signs", "delay": 1, "from_step": 1},
        {"strategy": "partitioned_parameter_server", "delay": 2},
        {"strategy": "all_reduce", "every": 2},
    ),
)
"""Of each parameter's group."""
WRONG = ("divided_signs", "doubled_signs", "forgetful_signs")


def program(rank: int, n: int, groups: Sequence[Timing], **settings: Any) -> Program:
    """Under one group for each parameter, with these fields."""
    model = net()
    example, cluster = batch(0, rank), autopar.ClusterSpec.local(n)
    plan = autopar.plan(
        model, cluster, strategy="all_reduce_one_bucket", example_inputs=example, loss_fn=F.cross_entropy
    )
    members = [m for g in plan.groups for m in g.members]
    made = [SyncGroup(members=(m,), **fields) for m, fields in zip(members, groups, strict=True)]
    plan = plan.model_copy(update={"groups": tuple(made), "fidelity": "local"})
    found: Program = autopar.optimize(
        model, plan=plan, optimizer=adamw(model), example_inputs=example, loss_fn=F.cross_entropy, **settings
    )
    return found


def refusals(rank: int, n: int) -> list[str]:
    """What the proof says of each fault; of those that first show in the second step, too."""
    said = []
    for timings in (({}, {}, {}), ({"delay": 1}, {"from_step": 1}, {"delay": 1})):
        groups = [{"strategy": name, **timing} for name, timing in zip(WRONG, timings, strict=True)]
        made = program(rank, n, groups)
        for step in range(2):
            try:
                made.step(batch(step, rank))
            except VerificationError as e:
                said.append(f"step {step}: {e}")
                break
    return said


def passes(rank: int, n: int) -> None:
    """Right programs, of which every step is compared."""
    every = ((RIGHT[0], None), (RIGHT[0], 0.05), (RIGHT[1], None))
    for groups, clip in {1: every[2:], 2: every, 3: every[:1]}[n]:
        made = program(rank, n, groups, check="always", clip_grad_norm=clip)
        made.step(batch(0, rank))
        made.step(micro_batches=[batch(10 + k, rank) for k in range(1 + rank)])
        made.step(batch(2, rank))
        if groups is RIGHT[0] and clip is None:
            again = program(rank, n, groups, check="always")
            again.load_state_dict(made.state_dict())
            again.step(batch(3, rank))


def unseen(rank: int, n: int) -> None:
    """A compressor without a residual."""
    groups: Sequence[Timing] = [
        {"strategy": "unkept_signs"},
        {"strategy": "unkept_signs", "delay": 1},
        {"strategy": "right_signs"},
    ]
    made = program(rank, n, groups, check="always")
    for step in range(3):
        made.step(batch(step, rank))


def warned(run: Callable[[int, int], None], rank: int, n: int) -> list[str]:
    """What autopar warns of meanwhile."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(rank, n)
    return [str(w.message) for w in caught if issubclass(w.category, AutoparWarning)]


def everything(rank: int, n: int) -> dict[str, list[str]]:
    """All of the above, on this rank."""
    for kind in (RightSigns, DoubledSigns, DividedSigns, ForgetfulSigns, UnkeptSigns):
        register(kind())
    found = {"passes": warned(passes, rank, n)}
    if n == 2:
        found |= {"refusals": refusals(rank, n), "unseen": warned(unseen, rank, n)}
    return found
