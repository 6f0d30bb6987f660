"""What strategies share whose tables live in rows on one rank each: the rows that a batch names are fetched from their
owners before the forward pass looks them up, and their gradients are sent back.

Every rank merges equal indices first, then asks each owner for the rows that it keeps; all by all-to-all. For u
different rows of width d a rank sends about (n-1)/n u d elements to its askers and as many back to the owners,
where gathering all ranks' gradients (`sparse_rows`) sends (n-1) u d, and an all-reduce the whole table.
"""

from __future__ import annotations

from autopar.ir.dtypes import WireDtype
from autopar.ops.base import Call
from autopar.ops.group import Group
from autopar.ops.tables import AskRows, FindRows, ReceiveRows, ReturnRows, RowsGradient, WantRows, touched_rows
from autopar.strategies.emitter import Emitter


class RowExchange:
    """Emits the exchange of the rows of a group's tables."""

    def __init__(self, group: Group, wire: WireDtype, emit: Emitter) -> None:
        self.group, self.emit = group, emit
        self.waves = group.waves
        self.sent_as = group.dtype if wire == "same" else wire
        self._asked: list[tuple[Call, Call]] = []
        """By wave: how many rows each rank wants of each, and which of this rank's."""

    def look_up(self) -> None:
        """The forward pass: rows come from their owners in time for their lookups, and what is computed before these
        hides the ways there and back."""
        emit, group = self.emit, self.group
        for i, wave in enumerate(self.waves):
            asked, found = (wave.known + k * (wave.needed - wave.known) // 3 for k in (1, 2))
            counts = emit.wait(emit.all_gather(emit.emit(AskRows(i), group)), by=asked)
            wanted = emit.wait(emit.all_to_all(emit.emit(WantRows(i), group, [counts])), by=found)
            rows = emit.wait(emit.all_to_all(emit.emit(FindRows(i, self.sent_as), group, [wanted, counts])))
            emit.emit(ReceiveRows(i), group, [rows])
            self._asked.append((counts, wanted))

    def gradient(self, also: Call | None = None) -> Call:
        """The backward pass: the gradients of this rank's rows, added to what a head has for them."""
        emit, group = self.emit, self.group
        inputs = [] if also is None else [also]
        for i, (wave, asked) in enumerate(zip(self.waves, self._asked, strict=True)):
            if wave.turn is None:
                continue
            back = emit.emit(ReturnRows(i, self.sent_as), group)
            inputs += [*asked, emit.wait(emit.all_to_all(back))]
        passes_over = also is None and all(map(emit.passes_over, group.members))
        touched = touched_rows(group, emit.world_size) if passes_over else None
        # What comes back has until the end of the backward pass.
        return emit.emit(RowsGradient(also is not None, touched), group, inputs, by=emit.end)
