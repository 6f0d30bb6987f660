"""All-reduce: every rank gets the summed gradient of a bucket and updates its own replica.

The bytes are those of the ring, 2 (n-1)/n of the bucket per rank (Patarasuk and Yuan, 2009); the bucket is the
sync group (tensor fusion, Horovod 2018).
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.ir.dtypes import WireDtype
from autopar.ops.context import Context
from autopar.ops.group import Group
from autopar.strategies.base import Options, Strategy
from autopar.strategies.emitter import Emitter


class AllReduceOptions(Options):
    wire: WireDtype = "same"
    """Number format on the wire; anything but `same` rounds the gradients, which the plan must allow."""


class AllReduce(Strategy):
    name = "all_reduce"
    summary = "sum the bucket over all ranks; every rank updates its replica"
    options_type = AllReduceOptions

    def options(self, context: Context) -> Sequence[AllReduceOptions]:
        return [AllReduceOptions(wire=w) for w in ("same", "bfloat16")]

    def lower(self, group: Group, options: Options, emit: Emitter) -> None:
        assert isinstance(options, AllReduceOptions)
        bucket = emit.pack(group, options.wire)
        emit.update(emit.wait(emit.all_reduce(bucket)), group)
