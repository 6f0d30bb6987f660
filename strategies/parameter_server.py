"""Parameter server: the owner of a group sums its gradients, updates it, and sends the parameters back.

The owner is one of the ranks (a colocated server). Li et al., "Scaling Distributed Machine Learning with the
Parameter Server", OSDI 2014. All traffic of the group passes through the owner's link.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from autopar.ir.dtypes import WireDtype
from autopar.ops.context import Context
from autopar.ops.group import Group, Member
from autopar.strategies.base import Options, Strategy
from autopar.strategies.emitter import Emitter

MOST_OWNERS = 16
"""So many ranks are tried as owners, evenly apart: where all are alike, which one it is matters only to the others."""


class ParameterServerOptions(Options):
    owner: int = Field(default=0, ge=0)
    """The rank that holds the optimizer state of the group and updates it."""
    wire: WireDtype = "same"
    """Number format of the gradients on the wire; parameters come back in their own."""
    late: bool = False
    """Whether parameters may come back in the next step, beside its forward pass."""


class ParameterServer(Strategy):
    name = "parameter_server"
    summary = "reduce to an owner; the owner updates and broadcasts the parameters"
    options_type = ParameterServerOptions

    def applies(self, member: Member, context: Context) -> str | None:
        if not context.has_optimizer:
            return "the owner applies the update, so the program needs the optimizer"
        return None

    def options(self, context: Context) -> Sequence[ParameterServerOptions]:
        """None where links differ and shares can be unequal: a reduce passes through all ranks, a slow one too."""
        if context.rates and context.elementwise_update:
            return []
        late = (False, True) if context.late_parameters else (False,)
        apart = -(-context.world_size // MOST_OWNERS)
        return [ParameterServerOptions(owner=r, late=x) for x in late for r in range(0, context.world_size, apart)]

    def lower(self, group: Group, options: Options, emit: Emitter) -> None:
        assert isinstance(options, ParameterServerOptions)
        gradients = emit.pack(group, options.wire)
        summed = emit.wait(emit.reduce(gradients, options.owner))
        parameters = emit.update(summed, group)
        emit.store(emit.broadcast(parameters), group, deferred=options.late)
