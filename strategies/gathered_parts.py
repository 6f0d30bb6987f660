"""What `sparse_rows` and `sufficient_factors` share: every rank gathers what all ranks' gradients are made of, forms
their sum, and updates its replica."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from autopar.ir.dtypes import WireDtype
from autopar.ops.context import Context
from autopar.ops.group import Group, Member
from autopar.strategies.base import Options, Strategy
from autopar.strategies.emitter import Emitter


class GatheredPartsOptions(Options):
    wire: WireDtype = "same"
    """Number format of the parts on the wire; anything but `same` rounds them, which the plan must allow."""


class GatheredParts(Strategy):
    options_type = GatheredPartsOptions
    kind: ClassVar[str]
    """What the gradient must be made of: a `Parts.kind`."""
    otherwise: ClassVar[str]
    """Why not, where it is made of something else."""
    of_a_slice: ClassVar[str]
    """Why not, of a slice."""

    def applies(self, member: Member, context: Context) -> str | None:
        if not context.has_optimizer:
            return "the program needs the optimizer"  # gradients that add up over several backward passes are dense
        if member.parameter.parts is None or member.parameter.parts.kind != self.kind:
            return self.otherwise
        if not member.elements:
            return "it has no elements"
        return None if member.slice.whole else self.of_a_slice

    def options(self, context: Context) -> Sequence[GatheredPartsOptions]:
        return [GatheredPartsOptions(wire=w) for w in ("same", "bfloat16")]

    def lower(self, group: Group, options: Options, emit: Emitter) -> None:
        assert isinstance(options, GatheredPartsOptions)
        emit.update(emit.gathered(group, options.wire), group)
