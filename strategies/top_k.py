"""Top-k: all ranks send the chunks of their gradients that are largest, by their squared norms, summed over ranks.

Which these are, an all-reduce of one float32 a chunk finds out; another one sums their values, which all ranks have in
the same places. So no indices are sent, and the union does not grow with the number of ranks, as it does where each
rank chooses for itself. What is not sent stays in each rank's own residual (Stich et al., "Sparsified SGD with Memory",
NeurIPS 2018; chunks that all ranks choose alike: "Beyond Throughput and Compression Ratios", arXiv:2407.01378).

Each rank sends 2 (n-1)/n (4 E/chunk + w density E) bytes, of E elements of w bytes: at the defaults, for float32, 1/39
of an all-reduce. It costs two passes over the gradients, and a residual of their size; two collectives follow one
another. It wins where the network is slow and gradients are large and concentrated: large layers, 1 Gbit/s or less.
"""

from __future__ import annotations

from autopar.ops.base import Call
from autopar.ops.sparsification import ChunkNorms, LargestChunks
from autopar.strategies.chosen_chunks import ChosenChunks
from autopar.strategies.emitter import Emitter


class TopK(ChosenChunks):
    name = "top_k"
    summary = "sum the chunks with the largest gradients over all ranks; the rest goes into the next step"

    def choose(self, state: Call, chunk: int, count: int, emit: Emitter) -> Call:
        group = state.owner_group
        norms = emit.wait(emit.all_reduce(emit.emit(ChunkNorms(chunk), group, [state])))
        return emit.emit(LargestChunks(count), group, [norms])
