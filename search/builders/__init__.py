"""Plan builders: AutoDist's eight, and what a person would write by hand. The search starts from them.

`BUILDERS` names those that are exact. A name with `+bf16` behind it is the same plan with bfloat16 on the wire,
which `fidelity="rounded"` allows; with `+late`, one whose parameters come back in the next step, which
`late_parameters=True` allows. `+every=4`, `+offset=1`, `+delay=1` and `+from_step=100` say when all groups synchronize,
as the fields of `SyncGroup` do, which `fidelity="local"` allows, and of delays `"stale"`. `+fragments=2` behind
`+every=4` spreads the groups over two steps of the period. A strategy's name builds buckets that go through
it, `power_sgd(rank=4)` with those options.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from pydantic import ValidationError

from autopar.errors import PlanError, among
from autopar.ir.training_graph import Parameter
from autopar.search.builders import by_hand
from autopar.search.builders.all_reduce import all_reduce, partitioned_ar, random_axis_partition_ar
from autopar.search.builders.common import MIB, Builder, fuse
from autopar.search.builders.parallax import parallax
from autopar.search.builders.parameter_server import partitioned_ps, ps, ps_load_balancing, uneven_partitioned_ps
from autopar.search.builders.structured import structured
from autopar.search.strategy_text import strategy_and_options
from autopar.spec.cluster import ClusterSpec
from autopar.spec.plan import OptionValue, SyncGroup
from autopar.spec.validation import explain
from autopar.strategies import STRATEGIES, Context, strategy_named

__all__ = ["AUTODIST", "BUILDERS", "MANY_GROUPS", "ROUNDED_SUFFIX", "Builder", "builder_named", "fuse", "names"]

ROUNDED_SUFFIX = "+bf16"
LATE_SUFFIX = "+late"

AUTODIST: dict[str, Builder] = {
    "PS": ps,
    "PSLoadBalancing": ps_load_balancing,
    "PartitionedPS": partitioned_ps,
    "UnevenPartitionedPS": uneven_partitioned_ps,
    "AllReduce": all_reduce,
    "PartitionedAR": partitioned_ar,
    "RandomAxisPartitionAR": random_axis_partition_ar,
    "Parallax": parallax,
}
"""The builders of AutoDist, under AutoDist's names."""


def _fused(builder: Builder) -> Builder:
    def build(parameters: Sequence[Parameter], context: Context, cluster: ClusterSpec) -> tuple[SyncGroup, ...]:
        return fuse(builder(parameters, context, cluster), parameters, by_hand.DDP_BUCKET_BYTES)

    return build


BUILDERS: dict[str, Builder] = {
    "ddp": by_hand.ddp,
    **{f"all_reduce_{size}MiB": by_hand.bucketed("all_reduce", size * MIB) for size in by_hand.SWEEP_MIB},
    "all_reduce_one_bucket": by_hand.bucketed("all_reduce", None),
    "hierarchical": by_hand.bucketed("hierarchical_all_reduce", by_hand.DDP_BUCKET_BYTES),
    "servers": by_hand.bucketed("summation_servers", by_hand.DDP_BUCKET_BYTES),
    "zero1": by_hand.zero1,
    "zero1_by_rate": by_hand.zero1_by_rate,
    "sharded": by_hand.bucketed("sharded_parameters", 4 * MIB),
    "sharded_kept": by_hand.bucketed("sharded_parameters", 4 * MIB, option="keep"),
    "branches": by_hand.bucketed("all_reduce", by_hand.DDP_BUCKET_BYTES, apart=True),
    "branches_zero1": by_hand.bucketed("partitioned_parameter_server", by_hand.DDP_BUCKET_BYTES, apart=True),
    "structured": structured("all_reduce"),
    "structured_zero1": structured("partitioned_parameter_server"),
    "structured_servers": structured("summation_servers"),
    "sharded_head": structured("all_reduce", heads=True),
    "sharded_head_zero1": structured("partitioned_parameter_server", heads=True),
    "sharded_tables": structured("all_reduce", heads=True, tables=True),
    "sharded_tables_zero1": structured("partitioned_parameter_server", heads=True, tables=True),
    "column_parallel": structured("all_reduce", heads=True, tables=True, layers=True),
    "column_parallel_zero1": structured("partitioned_parameter_server", heads=True, tables=True, layers=True),
    "sharded_tables_servers": structured("summation_servers", heads=True, tables=True),
    **AUTODIST,
    "PSLoadBalancing_fused": _fused(ps_load_balancing),
    "PartitionedPS_fused": _fused(partitioned_ps),
}
"""All builders that are exact. `branches`: parts that steps leave out, as experts, in buckets of their own;
`structured`: rows of tables and factors of products where that is less to send;
`sharded_head`: classes are shared out as well, where there are many; `sharded_tables`: rows of tables, too;
`column_parallel`: and outputs of linear layers, where there are few samples. `sharded`: parameters live in rows on one
rank each, as with FSDP (ZeRO stage 3). `servers`: hosts that only serve add up, where there are any. `zero1_by_rate`:
ranks own as much as their links can bear. `_fused`: pieces of one owner in buckets of 25 MiB, not each for itself."""


MANY_GROUPS = frozenset(
    ("PS", "PSLoadBalancing", "PartitionedPS", "UnevenPartitionedPS", "PSLoadBalancing_fused", "PartitionedPS_fused")
)
"""Builders of plans with a group for each parameter, or several."""


BASELINES = frozenset(
    ("ddp", "all_reduce_one_bucket", "zero1", "sharded", "sharded_kept", *(n for n in BUILDERS if n.endswith("MiB")))
)
"""What users have today: DDP with any size of buckets, ZeRO's first stage, FSDP."""


def builder_named(name: str) -> Builder:
    """Looks a builder up, with any of the suffixes; of a strategy by its name, with or without options, one that puts
    buckets of DDP's size through it. Raises `PlanError` with the nearest name where there is none."""
    plain, *suffixes = name.split("+")
    builder = BUILDERS.get(plain) or _of_strategy(plain)
    if builder is None:
        word = plain.partition("(")[0].strip()
        raise PlanError(
            f"neither a plan builder nor a strategy is called '{name}'{among(word, [*BUILDERS, *STRATEGIES])}, each "
            f"also with suffixes: {', '.join((*SUFFIXES, *NUMBERED))}"
        )
    own = "" if plain in BUILDERS else strategy_and_options(plain)[0]
    only = own if own in STRATEGIES and STRATEGIES[own].only_own_period else None
    for suffix in suffixes:
        builder = _changed(builder, _change(name, suffix), only)
    return builder


def _change(name: str, suffix: str) -> Change:
    """What a suffix of the name makes of a group. Raises `PlanError` with the nearest one where there is none."""
    found = SUFFIXES.get(f"+{suffix}") or _timed(suffix) or _fragments(suffix)
    if found is not None:
        return found
    known = among(re.sub("=.*", "=N", f"+{suffix}"), [*SUFFIXES, *NUMBERED], "suffixes")
    raise PlanError(f"plan '{name}': there is no suffix '+{suffix}'{known}, where N is a whole number")


def _of_strategy(text: str) -> Builder | None:
    """Buckets through a strategy, `power_sgd` or `power_sgd(rank=4)`; `None` where there is none of that name."""
    name, options = strategy_and_options(text)
    if name not in STRATEGIES:
        return None
    builder = by_hand.bucketed(name, by_hand.DDP_BUCKET_BYTES)
    return _changed(builder, lambda group, *_: _with_options(name, options, group)) if options else builder


def _with_options(strategy: str, options: Mapping[str, OptionValue], group: SyncGroup) -> SyncGroup:
    """A group of that strategy with the options, whether there are such or not, which is looked at when plans are
    lowered."""
    if group.strategy != strategy:
        return group
    return group.model_copy(update={"options": {**group.options, **options}})


def names(rounded: bool, late: bool) -> list[str]:
    """All builders, with each suffix that is allowed."""
    found = list(BUILDERS)
    for suffix, allowed in ((ROUNDED_SUFFIX, rounded), (LATE_SUFFIX, late)):
        found += [name + suffix for name in found if allowed]
    return found


Change = Callable[[SyncGroup, Parameter, int], SyncGroup]
"""What a suffix makes of a group, with its first parameter and its place among the groups."""


def _changed(builder: Builder, change: Change, only: str | None = None) -> Builder:
    """The same groups, each changed, where there are several ranks. `only`: those of this strategy."""

    def build(parameters: Sequence[Parameter], context: Context, cluster: ClusterSpec) -> tuple[SyncGroup, ...]:
        groups = builder(parameters, context, cluster)
        if context.world_size == 1:
            return groups
        table = {p.name: p for p in parameters}
        each = ((g, table[g.members[0].name], i) for i, g in enumerate(groups))
        return tuple(change(*of) if only in (None, of[0].strategy) else of[0] for of in each)

    return build


def _rounded(group: SyncGroup, first: Parameter, index: int) -> SyncGroup:
    """With bfloat16 on the wire, where the dtype has something to narrow."""
    return _with(group, "wire", "bfloat16") if first.spec.dtype in ("float32", "float64") else group


def _late(group: SyncGroup, first: Parameter, index: int) -> SyncGroup:
    """With parameters that come back in the next step."""
    return _with(group, "late", True)


def _timed(suffix: str) -> Change | None:
    """What `every=4` makes of a group; `None` where a suffix says no such thing."""
    said = re.fullmatch(r"(every|offset|delay|from_step)=(\d{1,12})", suffix)
    if said is None:
        return None
    changed = {said[1]: int(said[2])}
    return lambda group, first, index: _with_timing(group, changed, suffix)


def _fragments(suffix: str) -> Change | None:
    """What `fragments=2` makes of a group of a period: groups take turns at as many steps of it, evenly spaced."""
    said = re.fullmatch(r"fragments=([1-9]\d{0,11})", suffix)
    if said is None:
        return None
    count = int(said[1])

    def change(group: SyncGroup, first: Parameter, index: int) -> SyncGroup:
        if count > group.every:
            steps = "1 step" if group.every == 1 else f"{group.every} steps"
            raise PlanError(f"+{suffix}: a period of {steps} has no {count} of them; say +every=K before it")
        return _with_timing(group, {"offset": index % count * group.every // count}, suffix)

    return change


def _with_timing(group: SyncGroup, changed: dict[str, int], suffix: str) -> SyncGroup:
    try:
        return SyncGroup.model_validate({**group.model_dump(), **changed})
    except ValidationError as e:
        raise PlanError(explain(e, SyncGroup, f"+{suffix}")) from e


def _with(group: SyncGroup, option: str, value: OptionValue) -> SyncGroup:
    """With an option, where the strategy has it."""
    if option not in strategy_named(group.strategy).options_type.model_fields:
        return group
    return group.model_copy(update={"options": {**group.options, option: value}})


SUFFIXES = {ROUNDED_SUFFIX: _rounded, LATE_SUFFIX: _late}
NUMBERED = ("+every=N", "+offset=N", "+fragments=N", "+delay=N", "+from_step=N")
