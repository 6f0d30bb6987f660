"""Recursive doubling that declares something else than it does, or that never ends; and what tests run on each rank."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import autopar
from autopar.ops.base import Call, Site
from autopar.ops.group import Group
from autopar.ops.links import Links, Phase
from autopar.ops.values import Setting
from autopar.spec.plan import SyncGroup
from autopar.strategies import register
from autopar.strategies.base import Options
from autopar.strategies.emitter import Emitter
from autopar.testing.declared import memory_differences, traffic_differences
from tests.extension.recursive_doubling import Doubling, RecursiveDoubling, begin

WIDTH = 400
"""So that a gradient is far larger than what may be taken beyond what is declared."""


@dataclass(frozen=True, slots=True)
class Understated(Doubling):
    """Says nothing of what it receives into, and half of what it sends."""

    name = "understated"

    def passing_bytes(self, call: Call, setting: Setting) -> int:
        return 0

    def phases(self, call: Call, links: Links) -> list[Phase]:
        return [(name, traffic / 2) for name, traffic in Doubling.phases(self, call, links)]


@dataclass(frozen=True, slots=True)
class Endless(Doubling):
    """Rank 1 sends nothing."""

    name = "endless"

    def write(self, site: Site, call: Call) -> Any:
        return site.call(begin_or_not, (site.value_of(call.inputs[0]), self.channel(site, call), site.rank))


def begin_or_not(x: torch.Tensor, group: str, rank: int) -> torch.Tensor:
    if rank == 1:
        threading.Event().wait()
    return begin(x, group)


class UnderstatedDoubling(RecursiveDoubling):
    name = "understated_doubling"

    def lower(self, group: Group, options: Options, emit: Emitter) -> None:
        emit.update(emit.wait(emit.collective(Understated(), emit.pack(group))), group)


class EndlessDoubling(RecursiveDoubling):
    name = "endless_doubling"

    def lower(self, group: Group, options: Options, emit: Emitter) -> None:
        emit.update(emit.wait(emit.collective(Endless(), emit.pack(group))), group)


MANY = 1000
"""Its square in bits, cut for four ranks, goes in messages that gloo takes whole, and that are much together."""


def of_autopars_own(rank: int, n: int) -> dict[str, list[str]]:
    """The same of memory, where a library receives into memory of its own, and where a narrow sum is made wide."""
    found = {}
    for name in ("scaled_sign(exchange=parts)", "partitioned_parameter_server(wire=bfloat16)"):
        model = nn.Linear(MANY, MANY)
        example = torch.ones(3, MANY), torch.zeros(3, MANY)
        program = autopar.optimize(
            model,
            autopar.ClusterSpec.local(n),
            example_inputs=example,
            loss_fn=nn.functional.mse_loss,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            strategy=name,
            fidelity="compressed",
            check="never",
        )
        found[name] = memory_differences(program, example, Setting(n, rounds=True))
    return found


def differences(rank: int, n: int) -> dict[str, list[str]]:
    """What is declared otherwise than it is, of what is right and of what is wrong."""
    found = {}
    for strategy in (RecursiveDoubling(), UnderstatedDoubling()):
        register(strategy)
        model = nn.Linear(WIDTH, WIDTH)
        example = torch.ones(3, WIDTH), torch.zeros(3, WIDTH)
        plan = autopar.plan(
            model,
            autopar.ClusterSpec.local(n),
            example_inputs=example,
            loss_fn=nn.functional.mse_loss,
            strategy="all_reduce_one_bucket",
        )
        groups = (SyncGroup(strategy=strategy.name, members=plan.groups[0].members),)
        program = autopar.optimize(
            model,
            example_inputs=example,
            loss_fn=nn.functional.mse_loss,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            plan=plan.model_copy(update={"groups": groups}),
            check="never",
        )
        calls = program.compile_for(example).program.calls
        found[f"traffic of {strategy.name}"] = traffic_differences(calls, n, 0)
        found[f"memory of {strategy.name}"] = memory_differences(program, example, Setting(n, rounds=True))
    return found
