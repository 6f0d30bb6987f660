"""Sparse rows: ranks exchange the rows of an embedding table that their batches have looked up, and no others.

Equal indices are merged before anything is sent, and the number of rows travels beside the forward pass. Every rank
keeps the whole table. Each rank sends (n-1) r (d + 1) elements for r distinct rows of width d, whatever the size of the
table: Kim et al., "Parallax", EuroSys 2019. The sum is the dense gradient's; an optimizer that decays what it does not
see gets it whole, one that leaves rows without gradient alone gets only those that were looked up.
"""

from __future__ import annotations

from autopar.ops.context import Context
from autopar.ops.group import Member
from autopar.strategies.gathered_parts import GatheredParts


class SparseRows(GatheredParts):
    name = "sparse_rows"
    summary = "exchange the rows of the table that were looked up; every rank updates its replica"
    kind = "rows"
    otherwise = "its gradient is not made of rows that were looked up"
    of_a_slice = "a slice of a table is not looked up by itself"

    def applies(self, member: Member, context: Context) -> str | None:
        parts = member.parameter.parts
        if parts is not None and len({t.padding for t in parts.terms}) > 1:  # their rows are merged, padding or not
            return "its lookups differ in padding_idx: give them all the same, or use row_sharded_table"
        return super().applies(member, context)
