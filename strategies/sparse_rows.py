"""Sparse rows: ranks exchange the rows of an embedding table that their batches have looked up, and no others.

Equal indices are merged before anything is sent, and the number of rows travels beside the forward pass. Every rank
keeps the whole table. Each rank sends (n-1) r (d + 1) elements for r distinct rows of width d, whatever the size of the
table: Kim et al., "Parallax", EuroSys 2019. The sum is the dense gradient's; an optimizer that decays what it does not
see gets it whole, one that leaves rows without gradient alone gets only those that were looked up.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.strategies.base import Context, Group, Member, Options, Strategy, WireDtype
from autopar.strategies.emitter import Emitter


class SparseRowsOptions(Options):
    wire: WireDtype = "same"
    """Number format of the rows on the wire; anything but `same` rounds them, which the plan must allow."""


class SparseRows(Strategy):
    name = "sparse_rows"
    summary = "exchange the rows of the table that were looked up; every rank updates its replica"
    options_type = SparseRowsOptions

    def applies(self, member: Member, context: Context) -> str | None:
        if not context.has_optimizer:
            return "the program needs the optimizer"  # gradients that add up over several backward passes are dense
        if member.parameter.parts is None or member.parameter.parts.kind != "rows":
            return "its gradient is not made of rows that were looked up"
        return None if member.slice.whole else "a slice of a table is not looked up by itself"

    def options(self, context: Context) -> Sequence[SparseRowsOptions]:
        return [SparseRowsOptions(wire=w) for w in ("same", "bfloat16", "float16")]

    def lower(self, group: Group, options: Options, emit: Emitter) -> None:
        assert isinstance(options, SparseRowsOptions)
        emit.update(emit.gathered(group, options.wire), group)
