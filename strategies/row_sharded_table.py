"""Row-sharded table: ranks share the rows of an embedding table out, and fetch those that their batch names.

Rank r has rows r, r+n, r+2n, ..., so that frequent ones, which often come first, are spread evenly. Table, gradient and
optimizer state take 1/n of the memory. Exact for every optimizer whose update is elementwise: the owner of a row
updates it at every step, looked up or not. The model-parallel tables of DLRM (Naumov et al., 2019), by rows.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.ir.dtypes import WireDtype
from autopar.ops.context import Context
from autopar.ops.group import Group, Member
from autopar.strategies.base import Options, Strategy
from autopar.strategies.emitter import Emitter
from autopar.strategies.row_exchange import RowExchange


class RowShardedTableOptions(Options):
    wire: WireDtype = "same"
    """Number format of rows and of their gradients on the wire; anything but `same` rounds them, which the plan must
    allow."""


class RowShardedTable(Strategy):
    name = "row_sharded_table"
    summary = "each rank keeps some rows of the table; batches fetch theirs, and send the gradients back"
    options_type = RowShardedTableOptions
    spreads = True
    rounds_forward = True

    def applies(self, member: Member, context: Context) -> str | None:
        if context.keeps_rows_together is not None:
            return context.keeps_rows_together
        if member.parameter.head is not None:
            return "it belongs to a head as well: class_sharded_head keeps both"
        if member.parameter.table is None:
            return "it is no embedding table, or it is read otherwise, too"
        return None if member.slice.whole else "the rows are shared out, not slices of the table"

    def options(self, context: Context) -> Sequence[RowShardedTableOptions]:
        return [RowShardedTableOptions(wire=w) for w in ("same", "bfloat16")]

    def lower(self, group: Group, options: Options, emit: Emitter) -> None:
        assert isinstance(options, RowShardedTableOptions)
        if emit.world_size == 1:
            emit.update(emit.pack(group), group)
            return
        exchange = RowExchange(group, options.wire, emit)
        exchange.look_up()
        emit.update(exchange.gradient(), group, keeps_shards=True)
