"""When groups synchronize, and what is emitted where that is not in each step with that step's gradients.

Whatever its strategy, a group may average its parameters every k steps, update with gradients of d steps before, or
begin with all this at step s. So a program has a few different steps, and `moments_of` says which comes next. The
strategy is asked as ever: where it packs gradients, it is given others, or parameters.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, combinations, pairwise

import numpy as np
from pydantic import ValidationError

from autopar.errors import PlanError
from autopar.ir.dtypes import WireDtype
from autopar.ops.averages import PackParameters, StoreAverage
from autopar.ops.base import Call, Operation
from autopar.ops.context import Context
from autopar.ops.group import Group
from autopar.ops.layouts import Replicate
from autopar.ops.moments import SYNCHRONIZE, Moment
from autopar.ops.state import HoldGradients, Recall
from autopar.spec.plan import FIDELITIES, Fidelity, SyncGroup
from autopar.strategies import strategy_named
from autopar.strategies.all_reduce import AllReduce
from autopar.strategies.base import HELD, Options, Strategy
from autopar.strategies.emitter import Emitter

Moments = tuple[Moment, ...]
"""Of each group of a plan, in order."""
Period = tuple[int, int]
"""Its length in steps, and in which of them groups synchronize, counted from 1; 0 for the last."""

LONGEST_CYCLE = 100_000
"""Steps of a cycle that are told apart; a longer one is as good as its beginning."""
KINDS = 48
"""Kinds of steps that are priced: each is lowered for itself, which takes about 0.1 ms for each group."""


def is_timed(group: SyncGroup) -> bool:
    """Whether a group does not synchronize in each step with that step's gradients."""
    return bool(group.timing) or strategy_named(group.strategy).trains_apart or bool(_stages(group))


def is_local(group: SyncGroup) -> bool:
    """Whether each rank updates a replica of its own."""
    return group.every > 1 or strategy_named(group.strategy).trains_apart


def moment_of(group: SyncGroup, step: int, since: int = 0) -> Moment:
    """What a group does in a step, counted from 0. `since`: from which step on its gradients were held back, or its
    ranks trained apart, where that is later than its plan says."""
    if not is_timed(group):
        return SYNCHRONIZE
    if step < group.from_step:
        return Moment("plain")
    waited = step - max(group.from_step, since)
    if is_local(group):
        begins = waited == 0 and strategy_named(group.strategy).trains_apart
        if (step + 1 - group.offset) % group.every:
            return Moment("alone", begins=begins)
        ended = [(step + 1 - offset) % every == 0 for every, offset in _longer(group)]
        return Moment("average", _bits(ended), begins=begins)
    stage = _stage(group, step)
    if group.delay:
        return Moment("delayed", group.delay, stage) if waited >= group.delay else Moment("hold", waited)
    return Moment(stage=stage)


def moments_of(groups: Sequence[SyncGroup], step: int, since: Sequence[int] = ()) -> Moments:
    """What each group does in a step, counted from 0; `since`: as `moment_of` says, of each group."""
    return tuple(moment_of(g, step, s) for g, s in zip(groups, since or [0] * len(groups), strict=True))


def exactly(moments: Moments, lossy: Sequence[bool]) -> Moments:
    """The same step, in which groups that are lossy synchronize exactly, by a plain all-reduce. Where ranks have
    trained apart, their replicas must be alike by then."""
    return tuple(Moment("plain") if is_lossy else m for m, is_lossy in zip(moments, lossy, strict=True))


def lacks_held(group: SyncGroup, step: int, since: int) -> bool:
    """Whether what a group holds of earlier steps is not there before this one, or is less than it needs to go on."""
    return step <= max(group.from_step, since) or (since > 0 and step < since + group.delay)


def fullest(groups: Sequence[SyncGroup]) -> Moments:
    """Of a step in which all groups synchronize, and none begins. Where offsets differ, no such step may ever come."""
    return tuple(moment_of(g, _first_full(g))._replace(begins=False) for g in groups)


def cycle(groups: Sequence[SyncGroup], step: int | None = None) -> list[tuple[Moments, float]]:
    """The steps that come again and again, once all groups have begun: what groups do in them, and their share of all
    steps; one in which all groups synchronize is among them, if it ever comes. Where they are of more than `KINDS`
    kinds, as many that stand for them. With `step`, those that come as long as no more groups have begun than then."""
    counted = Counter(period for g in groups for period in ((g.every, g.offset), *_longer(g)))
    # In step p no longer period than p ends: there are as many kinds as periods, or more.
    ended = _ended(sorted(counted)) if len(counted) <= KINDS else {}
    if not 0 < len(ended) <= KINDS:
        ended = _spread_out(counted)
    if all((a - b) % math.gcd(p, q) == 0 for (p, a), (q, b) in combinations(counted, 2)):
        ended.setdefault(frozenset(counted), 0.0)
    full = fullest(groups)
    found = []
    for which, share in ended.items():
        found.append((tuple(_in_step(g, m, which) for g, m in zip(groups, full, strict=True)), share))
    return found if step is None else _as_begun(groups, found, step)


def _as_begun(
    groups: Sequence[SyncGroup], steps: Sequence[tuple[Moments, float]], step: int
) -> list[tuple[Moments, float]]:
    """The same steps as they are in step number `step`: groups that have not begun by then synchronize exactly, and
    the others are in the stage that they have reached."""
    found: dict[Moments, float] = {}
    for moments, share in steps:
        each = zip(groups, moments, strict=True)
        begun = tuple(Moment("plain") if step < g.from_step else m._replace(stage=_stage(g, step)) for g, m in each)
        found[begun] = found.get(begun, 0.0) + share
    return list(found.items())


def _in_step(group: SyncGroup, full: Moment, ended: frozenset[Period]) -> Moment:
    """What a group does where these periods end, that does `full` where all of its own end."""
    if (group.every, group.offset) not in ended:
        return Moment("alone")
    longer = _longer(group)
    return full._replace(slot=_bits([p in ended for p in longer])) if longer else full


def changes(group: SyncGroup) -> list[int]:
    """The steps from which on a group does something else than in all before: as it begins, and as its stages end."""
    return list(accumulate(_stages(group), initial=group.from_step)) if is_timed(group) else []


def earlier(groups: Sequence[SyncGroup]) -> list[Moments]:
    """What groups do in steps that come before all have begun and have no stage left, where that is something else."""
    steps = sorted({0, *(step for g in groups for step in changes(g))})[:-1]
    return list(dict.fromkeys(moments for step in steps for moments, _ in cycle(groups, step)))


def _stages(group: SyncGroup) -> tuple[int, ...]:
    """Of the strategy, how many steps each of the stages takes that a group begins with."""
    strategy = strategy_named(group.strategy)
    if not group.options or type(strategy).stages is Strategy.stages:
        return ()
    try:
        return strategy.stages(strategy.options_type.model_validate(group.options))
    except ValidationError:  # as lowering says
        return ()


def _stage(group: SyncGroup, step: int) -> int:
    """How many stages are left of a group that has begun; 0 for none."""
    ends = accumulate(_stages(group), initial=group.from_step)
    return sum(end > step for end in ends)


def _longer(group: SyncGroup) -> list[Period]:
    """Multiples of a group's period in the last step of which its strategy does more."""
    strategy = strategy_named(group.strategy)
    if not strategy.trains_apart:
        return []
    try:
        options = strategy.options_type.model_validate(group.options)
    except ValidationError:  # as lowering says
        return []
    return [(group.every * times, group.offset) for times in strategy.also_every(options)]


def _bits(flags: Sequence[bool]) -> int:
    return sum(flag << i for i, flag in enumerate(flags))


def _ended(periods: Sequence[Period]) -> dict[frozenset[Period], float]:
    """Which periods end in a step, and in which part of all steps these do. Steps are alike where the same end."""
    length = min(math.lcm(*(every for every, _ in periods)), LONGEST_CYCLE)
    by_step: dict[int, list[Period]] = {}
    for every, offset in periods:
        for step in range(offset or every, length + 1, every):
            by_step.setdefault(step, []).append((every, offset))
    alike = Counter(map(tuple, by_step.values()))
    if len(by_step) < length:
        alike[()] = length - len(by_step)
    return {frozenset(which): count / length for which, count in alike.items()}


def _spread_out(counted: Mapping[Period, int]) -> dict[frozenset[Period], float]:
    """The same in at most `KINDS` kinds, where there would be more. `counted`: how many groups have a period.

    Periods of nearly equal frequency end together, as often as they do in the mean. What ends is laid end to end around
    a circle of all steps, each as long as it is frequent: so each comes as often as it does, and as evenly as can be.
    """
    each = frozenset(p for p in counted if p[0] == 1)
    classes = [([period], count, count / period[0]) for period, count in sorted(counted.items()) if period[0] > 1]
    while len(classes) >= KINDS:
        size, total = np.array([c[1] for c in classes], float), np.array([c[2] for c in classes], float)
        # Ward's criterion: what merging two neighbours adds to the sum of squared distances from the mean.
        gaps = np.diff(total / size) ** 2 * size[1:] * size[:-1] / (size[1:] + size[:-1])
        i = int(gaps.argmin())
        (a, n, f), (b, m, g) = classes[i : i + 2]
        classes[i : i + 2] = [(a + b, n + m, f + g)]
    arcs, end = [], 0.0
    for periods, groups_with, frequencies in classes:
        arcs.append((end % 1.0, frequencies / groups_with, periods))
        end += frequencies / groups_with
    cuts = sorted({0.0, 1.0, *(begin for begin, _, _ in arcs), end % 1.0})
    found: dict[frozenset[Period], float] = {}
    for first, last in pairwise(cuts):
        middle = (first + last) / 2
        which = each.union(*(periods for begin, part, periods in arcs if (middle - begin) % 1.0 < part))
        found[which] = found.get(which, 0.0) + (last - first)
    return found


def _first_full(group: SyncGroup) -> int:
    """The first step in which a group synchronizes, and does all that it does then, once it has begun."""
    begun = group.from_step + group.delay + sum(_stages(group))
    return begun + (group.offset - begun - 1) % math.lcm(group.every, *(every for every, _ in _longer(group)))


def group_fidelity(group: SyncGroup, strategy: Strategy, options: Options) -> Fidelity:
    """What a group promises, by its strategy and by when it synchronizes."""
    of_time: Fidelity = "local" if is_local(group) else "stale" if group.delay else "exact"
    return max(strategy.fidelity(options), of_time, key=FIDELITIES.index)


def check_timing(groups: Sequence[SyncGroup], context: Context) -> None:
    """Raises `PlanError` where groups cannot synchronize as they say."""
    timed = [i for i, g in enumerate(groups) if is_timed(g)]
    if not timed:
        return
    shown = f"group {timed[0]}: {text_of(groups[timed[0]]) or groups[timed[0]].strategy}"
    if not context.has_optimizer:
        raise PlanError(f"{shown} needs a program that runs the optimizer; a drop-in module synchronizes each gradient")
    times: dict[str, SyncGroup] = {}
    for g in groups:
        for name in {m.name for m in g.members if not m.whole}:
            first = times.setdefault(name, g)
            if first.timing != g.timing or is_local(first) != is_local(g):
                raise PlanError(
                    f"{shown}, and slices of '{name}' differ: the optimizer's state of a parameter has one number of "
                    "steps, and is one rank's own or all ranks'. Give all slices of a parameter the same timing"
                )
    if context.clips and len({(is_local(g), g.every, g.from_step if is_local(g) else 0) for g in groups}) > 1:
        raise PlanError(
            f"{shown}, and other groups differ: with clip_grad_norm each rank would clip by a norm of its own what all "
            "ranks must update alike. Give all groups the same 'every' and 'from_step', or do not clip"
        )


def text_of(group: SyncGroup) -> str:
    """A group's timing in words: `every=4`."""
    return ", ".join(f"{k}={v}" for k, v in group.timing.items())


def lower_group(strategy: Strategy, group: Group, options: Options, emit: Emitter) -> None:
    """Emits what a group does at its moment. Raises `PlanError` where its strategy cannot."""
    doing, spec = group.moment.doing, group.spec
    if spec.from_step < strategy.first_step:
        raise PlanError(
            f"group {group.index}: {spec.strategy} goes on from what exact steps have left, and begins with step "
            f"{spec.from_step}: say how many steps are exact with from_step, as in '{spec.strategy}+from_step=100'"
        )
    if is_timed(spec):
        _check(strategy, group, options, emit)
    if doing == "plain" and not strategy.warms_up:
        plain = AllReduce()
        plain.lower(group, plain.options_type(), emit)
    elif (
        doing in ("synchronize", "plain")
        or (emit.world_size == 1 and doing not in ("hold", "delayed"))
        or (strategy.trains_apart and doing in ("alone", "average"))
    ):
        strategy.lower(group, options, emit)
    elif doing == "alone":
        emit.update_alone(group)
    elif doing == "average":
        strategy.lower(group, options, _Averaging(emit, emit.update_alone(group)))
    elif doing == "hold":
        emit.keep(_held(group, group.moment.slot, emit), emit.emit(HoldGradients(), group))
    else:
        held = [_held(group, slot, emit) for slot in range(spec.delay)]
        strategy.lower(group, options, _Delayed(emit, held[0]))
        for earlier, later in pairwise(held):
            emit.keep(earlier, later)
        emit.keep(held[-1], emit.emit(HoldGradients(), group))


def _held(group: Group, slot: int, emit: Emitter) -> Call:
    """Where a group's gradients are kept that are `slot` steps younger than those that are due."""
    return emit.state(group, f"{HELD}{slot}_of_{group.spec.delay}")


def _check(strategy: Strategy, group: Group, options: Options, emit: Emitter) -> None:
    """Raises `PlanError` where a strategy cannot synchronize when its group says."""
    spec = group.spec
    where = f"group {group.index}: {spec.strategy} cannot be used with {text_of(spec)}"
    if strategy.trains_apart:
        if spec.delay:
            raise PlanError(f"{where}: its ranks train apart, and send no gradients that could be late")
        return
    if spec.every > 1 and strategy.fidelity(options) != "exact":
        raise PlanError(f"{where}: it rounds or compresses what it sends, and parameters are averaged as they are")
    if spec.every == 1 and (not spec.from_step or strategy.warms_up):
        return
    trial = Emitter(emit.context, emit.start, emit.end)
    strategy.lower(replace(group, moment=SYNCHRONIZE), options, trial)
    updates = [c for c in trial.calls if c.op.updates]
    if not all(isinstance(c.layout, Replicate) and not c.op.keeps_shards for c in updates):
        raise PlanError(f"{where}: its updates are sharded or owned, so that ranks have no replicas of their own")


class _Instead(Emitter):
    """An emitter that gives a strategy something else than this step's gradients."""

    def __init__(self, emit: Emitter, source: Call) -> None:
        super().__init__(emit.context, emit.start, emit.end)
        self.calls = emit.calls
        self.source = source
        self._coefficient = emit._coefficient  # type: ignore[method-assign]  # of which a step has one

    def emit(self, op: Operation, group: Group, inputs: Sequence[Call] = (), *, by: int | None = None) -> Call:
        if op.takes_gradients or op.forms_gradients or op.replaces(group):
            raise PlanError(
                f"group {group.index}: {group.spec.strategy} cannot be used with {text_of(group.spec)}: it sends "
                f"something else than packed gradients ('{op.name}')"
            )
        return super().emit(op, group, inputs, by=by)


class _Delayed(_Instead):
    """Of an earlier step."""

    def pack(self, group: Group, wire: WireDtype = "same") -> Call:
        return self.emit(Recall(self.sent_as(group, wire)), group, [self.source])


class _Averaging(_Instead):
    """Parameters, to be averaged; each rank has updated its own."""

    def pack(self, group: Group, wire: WireDtype = "same") -> Call:
        return self.emit(PackParameters(), group, [self.source])

    def update(self, value: Call, group: Group, **_: object) -> Call:
        return self.emit(StoreAverage(), group, [value])
