"""PowerSGD: ranks sum one thin factor of their gradients each step, and keep what the product of factors loses.

Vogels, Karimireddy and Jaggi, "PowerSGD", NeurIPS 2019, with half an iteration a step, and so one all-reduce instead of
two that wait for one another: the same authors' "Practical Low-Rank Communication Compression in Decentralized Deep
Learning", 2020, arXiv 2008.01425, Algorithm 2, with warm start. Each member is a matrix of a x b: dimension 0 against
all others; a slice is a matrix of its own. M_r is rank r's gradient, scaled so that the sum over ranks is the mean over
the global batch, plus its residual.

1. The right factor Q (b x rank), the same on all ranks, is orthonormalised.
2. P_r = M_r Q; residual_r = M_r - P_r Q^T, which is each rank's own; P is the sum of all P_r, by an all-reduce.
3. Every rank updates its replica with P Q^T, the sum of what each has taken off its M_r.
4. In the next step left and right change places: P is orthonormalised, Q_r = M_r^T P is summed, and so on.

Factors begin as a matrix that is drawn with a fixed seed. Whenever one is orthonormalised, 1e-4 of that matrix is added
to it, relative to its largest element, so that no column stays empty for ever (`autopar.ops.power_iteration`). Factors
and residuals are float32, or float64 as the parameters. Members whose larger factor is not at least `min_compression`
times smaller than they are, as all that have less than two dimensions, are sent whole, beside the factors. Replicas are
equal to the last bit where ranks' devices are of one kind, so that QR rounds alike.

Each rank sends 2 (n-1)/n w (rank L + s) bytes: w bytes a number, s elements that are sent whole, and L the sum of the
factors' lengths in even or in odd steps, whichever is more. Some matrices begin with their left factor, so that both
are nearly (a + b) / 2 a matrix; of one matrix alone, the longer of a and b. It wins where matrices are large and a
network of a few hundred Mbit/s or less is waited for: its products read and write a gradient about as often as
optimizers do. A rank of 1 is harmless to many models and ruins some (in published logs, a VGG-19 on CIFAR-10 loses 26
points by it, and none at rank 4), so measure. `from_step` of a plan's groups leaves the first steps to a plain
all-reduce, as PowerSGD's authors advise.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from autopar.ir.dtypes import wide_dtype
from autopar.ops.context import Context
from autopar.ops.group import Group
from autopar.ops.layouts import REPLICATE
from autopar.ops.low_rank import DecodeFactors, EncodeFactors
from autopar.strategies.base import Options
from autopar.strategies.compressed import Compressed
from autopar.strategies.emitter import Emitter


class PowerSGDOptions(Options):
    rank: int = Field(default=1, ge=1)
    """Columns of a factor: the rank of the matrix that a gradient is approximated by. Bytes and FLOPs are proportional
    to it."""
    min_compression: float = Field(default=2.0, gt=1.0)
    """Times that the larger factor of a matrix must be smaller than the matrix; other members are sent whole."""


class PowerSGD(Compressed):
    name = "power_sgd"
    summary = "sum one thin factor of each gradient; what the product of factors loses goes into the next step"
    options_type = PowerSGDOptions

    def options(self, context: Context) -> Sequence[PowerSGDOptions]:
        return [PowerSGDOptions(rank=rank) for rank in (1, 2, 4)]

    def lower(self, group: Group, options: Options, emit: Emitter) -> None:
        assert isinstance(options, PowerSGDOptions)
        chosen = options.rank, options.min_compression
        of = EncodeFactors(*chosen).of(group)
        if emit.world_size == 1 or not of.approximated:
            emit.update(emit.wait(emit.all_reduce(emit.pack(group))), group)
            return
        dtype = wide_dtype(group.dtype)
        residual = emit.state(group, "residual", dtype=dtype)
        factors = emit.state(group, "factors", layout=REPLICATE, elements=of.factor_elements, dtype=dtype)
        turns = emit.state(group, "step_count", layout=REPLICATE, elements=1, dtype="int64")
        own = emit.emit(EncodeFactors(*chosen), group, [emit.pack(group), residual, factors, turns])
        summed = emit.wait(emit.all_reduce(own))
        emit.update(emit.emit(DecodeFactors(*chosen), group, [summed, factors, turns]), group)
