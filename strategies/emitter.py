"""The emitter that a strategy describes itself to: it records primitives, and checks that they fit together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopar.ir.primitives import CLIP_STAGE, DTYPE_BYTES, FORWARD_STAGE, Kind, Primitive, Teams, all_teams
from autopar.ir.training_graph import Parts
from autopar.strategies.base import Context, Group, Member, WireDtype
from autopar.strategies.value import Sums, Value, joined

SORT_BYTES = 8 * 24
"""Bytes that merging equal indices moves for each of them: a sort of 64-bit keys, in a dozen passes. [Empirical, of the
right order]"""


class Emitter:
    """Records the primitives of a step. With one rank, collectives and waits vanish."""

    def __init__(self, context: Context, end: int = 0) -> None:
        self.context = context
        self.end = end
        """Position of the last node in the graph's compute."""
        self.world_size = context.world_size
        self.primitives: list[Primitive] = []
        self.own: Sums = tuple(frozenset({r}) for r in range(self.world_size))
        """Of values that are each rank's own."""
        self.everyone: Sums = (frozenset(range(self.world_size)),) * self.world_size
        """Of values that are summed over all ranks."""

    def pack(self, group: Group, wire: WireDtype = "same") -> Value:
        """The group's gradients as one flat value in the `wire` dtype: of this rank's batch, scaled so that the
        sum over ranks is the mean over the global batch. Complex numbers are sent as they are."""
        as_it_is = wire == "same" or self.world_size == 1 or group.dtype.startswith("complex")  # of no narrower kind
        dtype = group.dtype if as_it_is else wire
        return self._emit(Kind.PACK, None, group.index, group.elements, dtype, stage=0, sums=self.own)

    def all_reduce(self, value: Value, teams: Teams = ()) -> Value:
        """The sum over ranks, on every rank; of a sharded value, of the part that all ranks of a team hold."""
        for team in teams if value.splits else ():
            assert len({value.splits[r] for r in team}) == 1, "an all-reduce needs values of one size"
        return self._collective(
            Kind.ALL_REDUCE, value, splits=value.splits, sums=joined(value.sums, teams), teams=teams
        )

    def reduce(self, value: Value, owner: int) -> Value:
        """The sum over ranks, on `owner`."""
        return self._collective(Kind.REDUCE, value, owner=owner, sums=joined(value.sums, ()))

    def reduce_scatter(self, value: Value, splits: Sequence[int], teams: Teams = ()) -> Value:
        """The sum over ranks; rank r holds the part `splits[r]` elements long (0 is allowed), in the order of ranks."""
        assert len(splits) == self.world_size, "one part a rank"
        for team in all_teams(teams, self.world_size):
            assert sum(splits[r] for r in team) == value.elements, "the splits of a team must cover the value"
        sums = joined(value.sums, teams)
        return self._collective(Kind.REDUCE_SCATTER, value, splits=tuple(splits), sums=sums, teams=teams)

    def all_gather(self, value: Value, teams: Teams = (), lane: int | None = None) -> Value:
        """All parts of a sharded value, on every rank. `lane`: by default that of its stage."""
        return self._collective(Kind.ALL_GATHER, value, splits=(), source_splits=value.splits, teams=teams, lane=lane)

    def all_to_all(self, value: Value) -> Value:
        """What each rank has for every other one, of a value that is each rank's own; as much again is expected."""
        assert value.splits, "an all-to-all sends what each rank has of its own"
        return self._collective(Kind.ALL_TO_ALL, value, splits=value.splits)

    def broadcast(self, value: Value) -> Value:
        """The owner's value, on every rank."""
        return self._collective(Kind.BROADCAST, value, owner=None, source_owner=value.owner)

    def served_sum(self, value: Value, summed_by: Sequence[int]) -> Value:
        """The sum over ranks, on every rank. Rank r adds up `summed_by[r]` elements and sends them to the others;
        behind the ranks' entries are those of the serving hosts."""
        assert len(summed_by) == self.world_size + len(self.context.servers), "one part for each that may add up"
        assert sum(summed_by) == value.elements, "the parts must cover the value"
        return self._collective(Kind.SERVED_SUM, value, sums=joined(value.sums, ()), summed_by=tuple(summed_by))

    def wait(self, value: Value, position: int | None = None, *, late: bool = False) -> Value:
        """Completes a collective. Its wait lies after the backward pass, so that compute hides it; that of counts,
        before it; or behind a position in the graph, which `late` is one of the next step."""
        if not value.pending:
            return value
        return self._emit(
            Kind.WAIT,
            value,
            value.group,
            value.elements,
            value.dtype,
            stage=value.stage + (position is None),
            pending=False,
            position=position,
            late=late,
        )

    def local(
        self,
        work: str,
        group: Group,
        inputs: Sequence[Value] = (),
        *,
        elements: int,
        dtype: str,
        position: int | None = None,
        splits: tuple[int, ...] = (),
        sums: Sums = (),
        ragged: bool = True,
        flops: int = 0,
        moved_bytes: int = 0,
        touched: int | None = None,
        in_place: bool = False,
        in_pieces: bool = False,
    ) -> Value:
        """Work that the runtime knows by its name, on the values of earlier primitives. `elements`, `flops` and
        `moved_bytes` are those expected from the batch that was captured; the last two, of one rank. `in_place`: its
        value takes the place of its first input."""
        assert not any(v.pending for v in inputs), f"'{work}' needs values that were waited for"
        return self._emit(
            Kind.LOCAL,
            None,
            group.index,
            elements,
            dtype,
            stage=0,
            splits=splits,
            sums=sums,
            ragged=ragged,
            flops=flops,
            moved_bytes=moved_bytes,
            touched=touched,
            also=inputs,
            work=work,
            position=position,
            in_place=in_place,
            in_pieces=in_pieces,
        )

    def let_go(self, value: Value, elements: int, position: int) -> None:
        """Nobody reads so many of a value's elements behind a position."""
        assert not value.pending and value.replicated and not value.updated, "only a rank's own copy can be let go of"
        if self.world_size > 1:
            self._emit(Kind.LET_GO, value, value.group, elements, value.dtype, stage=0, position=position)

    def count(self, group: Group) -> Value:
        """How many rows each gradient's parts have, as soon as the batch tells; every rank's own, to be gathered."""
        n, looked_up = self.world_size, sum(m.parts.rows for m in group.members if m.parts.kind == "rows")
        return self._emit(
            Kind.COUNT,
            None,
            group.index,
            n * len(group.members),
            "int64",
            stage=FORWARD_STAGE,
            splits=(len(group.members),) * n,
            moved_bytes=looked_up * SORT_BYTES,
        )

    def parts(self, group: Group, counts: Value, wire: WireDtype = "same") -> Value:
        """What this rank's gradients are made of, in the `wire` dtype, as many rows as `counts` says; every rank's
        own, to be gathered. Its elements are those expected from the batch that was captured."""
        assert not counts.pending and counts.replicated, "parts need the counts of all ranks"
        dtype = group.dtype if wire == "same" else wire
        elements = sum(m.parts.distinct * (m.parts.row_width + index_elements(m.parts, dtype)) for m in group.members)
        read = sum(m.parts.rows * m.parts.row_width for m in group.members) * DTYPE_BYTES[group.dtype]
        return self._emit(
            Kind.PARTS,
            counts,
            group.index,
            self.world_size * elements,
            dtype,
            stage=0,
            splits=(elements,) * self.world_size,
            moved_bytes=2 * read + elements * DTYPE_BYTES[dtype],
            ragged=True,
        )

    def form(self, parts: Value, counts: Value, group: Group) -> Value:
        """The gradients that all ranks' parts add up to; where the optimizer can pass over the rows of a table that
        were not looked up, only the others."""
        assert parts.replicated and not parts.pending, "form needs the parts of all ranks"
        n, width = self.world_size, DTYPE_BYTES[group.dtype]
        over = [self.passes_over(m) for m in group.members]
        touched = sum(_touched(m, n) if passes else m.elements for m, passes in zip(group.members, over, strict=True))
        return self._emit(
            Kind.FORM,
            parts,
            group.index,
            group.elements,
            group.dtype,
            stage=parts.stage,
            sums=self.everyone,
            flops=sum(2 * n * m.parts.rows * m.elements for m in group.members if m.parts.kind == "factors"),
            moved_bytes=parts.elements * (DTYPE_BYTES[parts.dtype] + 2 * width) + touched * width,
            # Whether rows are passed over, all ranks must see alike, however many each of them expects.
            touched=touched if any(over) else None,
            also=(counts,),
        )

    def gathered(self, group: Group, wire: WireDtype = "same") -> Value:
        """The gradients, formed from the parts of all ranks. With one rank, they are there already."""
        if self.world_size == 1:
            return self.pack(group)
        counts = self.wait(self.all_gather(self.count(group)))
        parts = self.wait(self.all_gather(self.parts(group, counts, wire)))
        return self.form(parts, counts, group)

    def passes_over(self, member: Member) -> bool:
        """Whether the optimizer can be given the rows of a table that were looked up, and no others."""
        return self.context.sparse_update and not self.context.clips and member.parts.kind == "rows"

    def update(self, value: Value, group: Group, *, resident: bool = False, position: int | None = None) -> Value:
        """Runs the optimizer on what this rank holds of the gradients, each in the parameter's own dtype; without
        an optimizer, hands the gradients over. Returns the updated parameters, in the same layout.

        `resident`: the parameters' rows live with the rank that updates them, and nowhere else. `position`: where in
        the graph it may happen, unless gradients are clipped first.
        """
        assert value.reduced and not value.pending, "update needs reduced gradients that were waited for"
        kind = Kind.UPDATE if self.context.has_optimizer else Kind.DELIVER
        assert kind is Kind.UPDATE or value.replicated, "without an optimizer, every rank needs the whole gradient"
        stage = max(value.stage, CLIP_STAGE) if self.context.clips else value.stage
        touched = self.primitives[value.index].touched
        return self._emit(
            kind,
            value,
            group.index,
            group.elements,
            group.dtype,
            stage=stage,
            updated=True,
            touched=touched,
            resident=resident,
            position=None if self.context.clips else position,
        )

    def store(self, value: Value, group: Group, *, late: bool = False) -> None:
        """Writes updated parameters that are being received into the parameters of every rank. `late`: in the next
        step's forward pass, before it reads the first of them."""
        assert value.updated and value.replicated, "store needs replicated parameters"
        if self.world_size == 1:
            return
        assert value.pending, "store waits for the parameters itself"
        position = None
        if late:
            assert self.context.late_parameters, "parameters may be late only where that is allowed"
            self.primitives[value.index] = replace(self.primitives[value.index], late=True)
            position = group.first_use - 1
        value = self.wait(value, position, late=late)
        self._emit(
            Kind.STORE,
            value,
            value.group,
            value.elements,
            value.dtype,
            stage=value.stage,
            position=position,
            late=late,
        )

    def _collective(
        self,
        kind: Kind,
        value: Value,
        *,
        splits: tuple[int, ...] | None = None,
        owner: int | None = None,
        sums: Sums | None = None,
        source_splits: tuple[int, ...] = (),
        source_owner: int | None = None,
        teams: Teams = (),
        summed_by: tuple[int, ...] = (),
        lane: int | None = None,
    ) -> Value:
        assert not value.pending, f"{kind} of a value that was not waited for"
        if self.world_size == 1:
            return value
        return self._emit(
            kind,
            value,
            value.group,
            value.elements,
            value.dtype,
            stage=value.stage,
            pending=True,
            splits=splits or (),
            owner=owner,
            sums=sums,
            recorded_splits=source_splits or splits or (),
            recorded_owner=source_owner if source_owner is not None else owner,
            ragged=value.ragged,
            teams=teams,
            summed_by=summed_by,
            lane=int(value.stage > 0) if lane is None else lane,
            position=value.position,
        )

    def _emit(
        self,
        kind: Kind,
        source: Value | None,
        group: int,
        elements: int,
        dtype: str,
        *,
        stage: int,
        pending: bool = False,
        sums: Sums | None = None,
        splits: tuple[int, ...] | None = None,
        owner: int | None = None,
        updated: bool | None = None,
        recorded_splits: tuple[int, ...] | None = None,
        recorded_owner: int | None = None,
        flops: int = 0,
        moved_bytes: int = 0,
        touched: int | None = None,
        ragged: bool = False,
        teams: Teams = (),
        summed_by: tuple[int, ...] = (),
        lane: int = 0,
        also: Sequence[Value] = (),
        work: str = "",
        position: int | None = None,
        resident: bool = False,
        late: bool = False,
        in_place: bool = False,
        in_pieces: bool = False,
    ) -> Value:
        is_collective = recorded_splits is not None
        if source is not None and not is_collective and splits is None:
            splits, owner = source.splits, source.owner
        value = Value(
            index=len(self.primitives),
            group=group,
            elements=elements,
            dtype=dtype,
            stage=stage,
            pending=pending,
            sums=source.sums if sums is None and source else sums or (),
            splits=splits or (),
            owner=owner,
            updated=source.updated if updated is None and source else bool(updated),
            ragged=ragged,
            position=position,
        )
        self.primitives.append(
            Primitive(
                index=value.index,
                kind=kind,
                group=group,
                inputs=tuple(v.index for v in (source, *also) if v is not None),
                elements=elements,
                dtype=dtype,
                stage=stage,
                splits=(recorded_splits if is_collective else splits) or (),
                owner=recorded_owner if is_collective else owner,
                teams=teams,
                summed_by=summed_by,
                lane=lane,
                flops=flops,
                moved_bytes=moved_bytes,
                touched=touched,
                ragged=ragged,
                work=work,
                position=position,
                resident=resident,
                late=late,
                in_place=in_place,
                in_pieces=in_pieces,
            )
        )
        return value


def index_elements(parts: Parts, dtype: str) -> int:
    """How many elements of a flat value of this dtype hold the index of one row; factors have none."""
    return 0 if parts.kind == "factors" else index_width(dtype)


def index_width(dtype: str) -> int:
    """How many elements of this dtype hold an index, of 32 bits or more."""
    return max(1, 4 // DTYPE_BYTES[dtype])


def _touched(member: Member, world_size: int) -> int:
    return min(member.elements, world_size * member.parts.distinct * member.parts.row_width)
