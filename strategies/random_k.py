"""Random-k: all ranks send the same chunks of their gradients, drawn at random; an all-reduce.

Ranks draw from the count of their steps, so that they agree without a word, and a run that is resumed goes on as it
would have. What is drawn is sent as it is, and what is not stays in each rank's own residual (Stich et al., "Sparsified
SGD with Memory", NeurIPS 2018). Multiplied with 1/density it would be unbiased, and of a variance with which error
feedback diverges.

Each rank sends 2 (n-1)/n w density E bytes, of E elements of w bytes: at 1 %, 1/100 of an all-reduce. It is the
cheapest to compute of what sends so little, and each element waits 1/density steps in the mean: it wins where the
network is slow and no few chunks hold most of the gradient, in long trainings.
"""

from __future__ import annotations

from autopar.ops.base import Call
from autopar.ops.layouts import REPLICATE
from autopar.ops.sparsification import INDEX, RandomChunks, chunks_of
from autopar.strategies.chosen_chunks import ChosenChunks
from autopar.strategies.emitter import Emitter


class RandomK(ChosenChunks):
    name = "random_k"
    summary = "sum the same random chunks of all ranks' gradients; the rest goes into the next step"

    def choose(self, state: Call, chunk: int, count: int, emit: Emitter) -> Call:
        group = state.owner_group
        steps = emit.state(group, "step_count", layout=REPLICATE, elements=1, dtype=INDEX)
        return emit.emit(RandomChunks(count, chunks_of(group.elements, chunk)), group, [steps])
