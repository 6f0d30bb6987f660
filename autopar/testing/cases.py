"""Plans that put a strategy to use, wherever it applies."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autopar.errors import PlanError
from autopar.ir.training_graph import Parameter, TrainingGraph
from autopar.spec.cluster import ClusterSpec, HostSpec, NetworkSpec
from autopar.spec.plan import Fidelity, ParameterSlice, Plan, SyncGroup
from autopar.strategies import Context, Member, Options, Strategy
from autopar.strategies.base import Remainder
from autopar.strategies.lowering import lower_plan


@dataclass(frozen=True)
class Use:
    """One plan."""

    options: str
    """In words."""
    plan: Plan
    fidelity: Fidelity
    wire: str
    remainder: Remainder
    training: str = "sgd"
    """The name of the plainest training that the strategy takes: with SGD, if it takes it."""


SERVERS = ("server-0", "server-1")


def cluster_of(ranks: int) -> ClusterSpec:
    """So many ranks on this machine, and two hosts that serve."""
    local = ClusterSpec.local(ranks)
    server = HostSpec(name="server", count=len(SERVERS), serves=True)
    return ClusterSpec(hosts=(*local.hosts, server), network=NetworkSpec(kind="1GbE"))


def uses(strategy: Strategy, graph: TrainingGraph, context: Context) -> Iterator[Use]:
    """The strategy with the plainest and the last of the settings that it offers, and with each number format on the
    wire; none where it applies to no parameter. The other parameters are summed by all-reduce.

    Raises `PlanError` where it says that it applies, and cannot be lowered.
    """
    context = context.on(cluster_of(context.world_size))
    able = [p for p in graph.parameters if strategy.applies(Member(_whole(p), p), context) is None]
    if not able:
        return
    cluster = cluster_of(context.world_size)
    for options in _settings(strategy, context):
        chosen = options.model_dump(exclude_defaults=True)
        yield Use(
            ", ".join(f"{k}={v}" for k, v in chosen.items()) or "plain",
            Plan(
                name=strategy.name,
                model=graph.model,
                cluster=cluster.fingerprint,
                fidelity=strategy.fidelity(options),
                groups=_groups(strategy, chosen, able, graph, context),
            ),
            strategy.fidelity(options),
            str(chosen.get("wire", "same")),
            strategy.remainder(options),
        )


def _settings(strategy: Strategy, context: Context) -> list[Options]:
    offered = list(strategy.options(context))
    if not offered:
        return []
    plain = offered[0]
    found = [plain, *offered[1:][-1:]]
    if "wire" in strategy.options_type.model_fields:
        found += [plain.model_copy(update={"wire": wire}) for wire in ("bfloat16", "float16")]
    return found


def _groups(
    strategy: Strategy, options: dict[str, object], able: list[Parameter], graph: TrainingGraph, context: Context
) -> tuple[SyncGroup, ...]:
    """In two groups, or in as few as the strategy takes."""
    of_heads = [[p for p in able if p.head == h] for h in dict.fromkeys(p.head for p in able)]
    ways = ([able[::2], able[1::2]], [able], of_heads, [[p] for p in able])
    rest = [p for p in graph.parameters if p not in able]
    for i, way in enumerate(ways):
        groups = tuple(
            SyncGroup.model_validate(
                {
                    "strategy": name,
                    "options": chosen,
                    "members": tuple(_whole(p) for p in members),
                    "from_step": strategy.first_step if name == strategy.name else 0,
                }
            )
            for name, chosen, some in ((strategy.name, options, way), ("all_reduce", {}, [rest]))
            for members in some
            if members
        )
        try:
            lower_plan(groups, graph, context)
        except PlanError:
            if i == len(ways) - 1:
                raise
        else:
            return groups
    raise AssertionError("the last way returns or raises")


def _whole(p: Parameter) -> ParameterSlice:
    return ParameterSlice(name=p.name)
