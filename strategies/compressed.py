"""What strategies have in common that lose something of what they send, and keep it, or draw at random.

What they keep is each rank's own: its own input less what others make of its own message. In 32 bits or more, whatever
the parameters' format, as it is added up over many steps (`autopar.ir.dtypes.wide_dtype`).
"""

from __future__ import annotations

from autopar.ops.context import Context
from autopar.ops.group import Member
from autopar.spec.plan import Fidelity
from autopar.strategies.base import Options, Strategy


class Compressed(Strategy):
    """A strategy of the label `compressed`."""

    def fidelity(self, options: Options) -> Fidelity:
        return "compressed"

    def applies(self, member: Member, context: Context) -> str | None:
        if not context.has_optimizer:
            return "what it loses, or has drawn, is kept from step to step, so the program needs the optimizer"
        return "its numbers are complex" if member.parameter.spec.dtype.startswith("complex") else None
