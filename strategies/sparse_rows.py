"""Sparse rows: ranks exchange the rows of an embedding table that their batches have looked up, and no others.

Equal indices are merged before anything is sent, and the number of rows travels beside the forward pass. Every rank
keeps the whole table. Each rank sends (n-1) r (d + 1) elements for r distinct rows of width d, whatever the size of the
table: Kim et al., "Parallax", EuroSys 2019. The sum is the dense gradient's; an optimizer that decays what it does not
see gets it whole, one that leaves rows without gradient alone gets only those that were looked up.
"""

from __future__ import annotations

from autopar.strategies.gathered_parts import GatheredParts


class SparseRows(GatheredParts):
    name = "sparse_rows"
    summary = "exchange the rows of the table that were looked up; every rank updates its replica"
    kind = "rows"
    otherwise = "its gradient is not made of rows that were looked up"
    of_a_slice = "a slice of a table is not looked up by itself"
