"""What sparsification has in common: all ranks send the same few chunks of their gradients, and keep the rest.

Each rank adds its gradients to its residual. All ranks choose the same `density` of its chunks, so that an all-reduce
sums their values as they are; what is not sent stays in the residual, in float32 or wider, and may be sent in a later
step (error feedback: Stich et al., "Sparsified SGD with Memory", NeurIPS 2018). The chunks that are left behind have at
most (1 - density) of the squared norm, summed over ranks, where they are chosen by norm, and have it in the mean where
they are drawn: choosing is contractive, which error feedback needs.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence

from pydantic import Field

from autopar.ir.dtypes import wide_dtype
from autopar.ops.base import Call
from autopar.ops.context import Context
from autopar.ops.group import Group
from autopar.ops.sparsification import Accumulate, SpreadChunks, TakeChunks, chunks_of
from autopar.strategies.base import Options
from autopar.strategies.compressed import Compressed
from autopar.strategies.emitter import Emitter


class ChunkOptions(Options):
    density: float = Field(default=0.01, gt=0, le=1)
    """Which part of the group's chunks is sent in a step, from above 0 to 1; rounded up to whole chunks."""
    chunk: int = Field(default=64, ge=1)
    """Elements that are sent together, or not. More are quicker to choose from, fewer choose more finely."""


class ChosenChunks(Compressed):
    """Sends chosen chunks of what each rank has accumulated."""

    options_type = ChunkOptions

    def options(self, context: Context) -> Sequence[ChunkOptions]:
        return [self.options_type(density=0.01), self.options_type(density=0.1)]

    def lower(self, group: Group, options: Options, emit: Emitter) -> None:
        assert isinstance(options, ChunkOptions)
        gradients = emit.pack(group)
        if emit.world_size == 1:
            emit.update(gradients, group)
            return
        chunk = max(1, min(options.chunk, group.elements))
        density = self.density(options, group.moment.stage)
        count = math.ceil(round(density * chunks_of(group.elements, chunk), 6))
        kept = self.states(group, options, emit)
        state = self.accumulated(gradients, kept, options, emit)
        chosen = self.choose(state, chunk, count, emit)
        taken = emit.emit(TakeChunks(chunk), group, [state, chosen, *kept[1:]])
        summed = emit.wait(emit.all_reduce(taken))
        emit.update(emit.emit(SpreadChunks(chunk), group, [gradients, summed, chosen]), group)

    def density(self, options: ChunkOptions, stage: int) -> float:
        """Which part of the chunks is sent. `stage`: how many stages are left (`Strategy.stages`)."""
        return options.density

    def states(self, group: Group, options: ChunkOptions, emit: Emitter) -> list[Call]:
        """What each rank keeps: what is chosen from, and what else becomes zero where that is sent."""
        return [emit.state(group, "residual", dtype=wide_dtype(group.dtype))]

    def accumulated(self, gradients: Call, kept: Sequence[Call], options: ChunkOptions, emit: Emitter) -> Call:
        """The first of the states, with this step's gradients."""
        return emit.emit(Accumulate(), gradients.owner_group, [kept[0], gradients])

    @abstractmethod
    def choose(self, state: Call, chunk: int, count: int, emit: Emitter) -> Call:
        """The numbers of the `count` chunks that all ranks send."""
