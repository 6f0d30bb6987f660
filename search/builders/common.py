"""What plan builders share: slicing, placing, grouping, and the order of issue.

A builder is a function `(parameters, context, cluster) -> sync groups`. It decides; it prices nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

from autopar.ir.dtypes import DTYPE_BYTES
from autopar.ir.training_graph import Parameter
from autopar.spec.cluster import ClusterSpec
from autopar.spec.plan import OptionValue, ParameterSlice, SyncGroup
from autopar.strategies import Context, Member, strategy_named

Builder = Callable[[Sequence[Parameter], Context, ClusterSpec], tuple[SyncGroup, ...]]

MIB = 1 << 20

Piece = tuple[ParameterSlice, Parameter]


def whole(parameter: Parameter) -> Piece:
    """A parameter that is not sliced."""
    return ParameterSlice(name=parameter.name), parameter


def others(parameters: Sequence[Parameter], *chosen: Sequence[Parameter]) -> list[Parameter]:
    """Those that are among none of the chosen, told apart by their names: comparing all of them takes long."""
    names = {p.name for some in chosen for p in some}
    return [p for p in parameters if p.name not in names]


def applies(strategy: str, parameter: Parameter, context: Context) -> bool:
    """Whether a strategy can synchronize the whole of a parameter."""
    return strategy_named(strategy).applies(Member(*whole(parameter)), context) is None


def slices(parameter: Parameter, count: int, dim: int = 0) -> list[Piece]:
    """`count` slices along `dim`, which differ by at most one row, the longer ones first."""
    if count <= 1:
        return [whole(parameter)]
    short, longer = divmod(parameter.spec.shape[dim], count)
    pieces, start = [], 0
    for i in range(count):
        stop = start + short + (i < longer)
        pieces.append((ParameterSlice(name=parameter.name, dim=dim, start=start, stop=stop), parameter))
        start = stop
    return pieces


def piece_bytes(piece: Piece) -> int:
    """Bytes of a parameter, or of a slice of one, in its own dtype."""
    part, parameter = piece
    elements = 1
    for extent in part.shape(parameter.spec):
        elements *= extent
    return elements * DTYPE_BYTES[parameter.spec.dtype]


def smallest_divisor(extent: int) -> int:
    """The smallest divisor >= 2; a prime's is the prime itself. 1 where there is nothing to divide."""
    return next((i for i in range(2, extent) if extent % i == 0), extent)


def smallest_non_divisor(extent: int) -> int:
    """The smallest number >= 2 that does not divide `extent`; `extent` itself for 2 and below."""
    return next((i for i in range(2, extent) if extent % i), extent)


def slice_count(parameter: Parameter, dim: int, rule: Callable[[int], int], context: Context) -> int:
    """How many slices `rule` makes of a parameter along `dim`.

    AutoDist cuts a prime dimension into single rows; here there are never more slices than ranks. Scalars,
    dimensions of size 1, and parameters whose optimizer cannot update slices stay whole.
    """
    if not context.elementwise_update or dim >= len(parameter.spec.shape):
        return 1
    return max(1, min(rule(parameter.spec.shape[dim]), context.world_size))


def group(strategy: str, pieces: Iterable[Piece], options: Mapping[str, OptionValue] | None = None) -> SyncGroup:
    """A sync group of these pieces."""
    return SyncGroup(strategy=strategy, members=tuple(p for p, _ in pieces), options=dict(options or {}))


def one_dtype_each(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """Splits pieces by dtype: one group holds one flat buffer, which has one dtype. Order is kept."""
    by_dtype: dict[str, list[Piece]] = {}
    for piece in pieces:
        by_dtype.setdefault(piece[1].spec.dtype, []).append(piece)
    return list(by_dtype.values())


def by_readiness(parameters: Sequence[Parameter]) -> list[Parameter]:
    """In the order in which the backward pass completes the gradients."""
    return sorted(parameters, key=lambda p: p.ready)


def issue_order(groups: Iterable[SyncGroup], parameters: Sequence[Parameter]) -> tuple[SyncGroup, ...]:
    """Sorts groups by when the last of their gradients is complete, so that none waits behind a later one."""
    ready = {p.name: p.ready for p in parameters}
    return tuple(sorted(groups, key=lambda g: max(ready[m.name] for m in g.members)))


def alone(parameters: Sequence[Parameter]) -> tuple[SyncGroup, ...]:
    """What every builder returns for one rank: one group for each dtype, with nothing to synchronize."""
    return issue_order((group("all_reduce", p) for p in one_dtype_each([whole(p) for p in parameters])), parameters)


class Loads:
    """Bytes that each rank owns so far: AutoDist's greedy load balancer."""

    def __init__(self, world_size: int) -> None:
        self.bytes = [0.0] * world_size

    def place(self, size_bytes: int, pieces: int = 1) -> list[int]:
        """Owners for the `pieces` equal parts of something: the least loaded ranks, round again where there are
        more parts than ranks. The first of equals wins."""
        ranks = sorted(range(len(self.bytes)), key=self.bytes.__getitem__)
        owners = [ranks[i % len(ranks)] for i in range(pieces)]
        for owner in owners:
            self.bytes[owner] += size_bytes / pieces
        return owners


def fuse(groups: Sequence[SyncGroup], parameters: Sequence[Parameter], bucket_bytes: int) -> tuple[SyncGroup, ...]:
    """Merges groups that agree in strategy, options, timing, dtype and the branch that they begin with into buckets,
    closed at `bucket_bytes` or above."""
    table = {p.name: p for p in parameters}
    merged: list[SyncGroup] = []
    opened: dict[Hashable, tuple[SyncGroup, list[Piece]]] = {}
    filled: dict[Hashable, int] = {}
    for one in issue_order(groups, parameters):
        pieces = [(m, table[m.name]) for m in one.members]
        first = pieces[0][1]
        key = (one.strategy, tuple(sorted(one.settings.items())), first.spec.dtype, first.branch)
        opened.setdefault(key, (one, []))[1].extend(pieces)
        filled[key] = filled.get(key, 0) + sum(map(piece_bytes, pieces))
        if filled[key] >= bucket_bytes:
            del filled[key]
            like, held = opened.pop(key)
            merged.append(_like(like, held))
    merged += [_like(like, held) for like, held in opened.values()]
    return issue_order(merged, parameters)


def _like(other: SyncGroup, pieces: Iterable[Piece]) -> SyncGroup:
    """A group of these pieces that is synchronized as another one is."""
    made = group(other.strategy, pieces, other.options)
    return made.model_copy(update=other.timing) if other.timing else made
