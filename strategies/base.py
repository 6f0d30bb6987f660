"""What a strategy is, and what it is told.

A strategy is one file. It is asked, in this order:

1. `applies(parameter, context)`: can this parameter use it here? `None` for yes, else the reason why not.
2. `options(context)`: which of its settings are worth pricing?
3. `lower(group, emit)`: once per sync group of a plan that names it. It emits operations; nothing else. The
   cost model prices these, and the runtime writes the same ones into the FX graph.

A strategy never sees a tensor, and neither the cost models nor the runtime know any strategy by name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict

from autopar.ops.context import Context
from autopar.ops.group import Group, Member
from autopar.spec.plan import Fidelity
from autopar.strategies.emitter import Emitter


def _not_negative(shares: tuple[float, ...]) -> tuple[float, ...]:
    if shares and (min(shares) < 0 or sum(shares) <= 0):
        raise ValueError(f"shares must not be negative and must not all be 0, got {shares}")
    return shares


Shares = Annotated[tuple[float, ...], AfterValidator(_not_negative)]
"""Each rank's part of a whole, in any unit; empty where the division is left open."""


Remainder = Literal["kept", "none in the mean", "lost"]
"""Kept for the next step, as error feedback does it; none in the mean over random draws, as an unbiased compressor has
it; or lost."""


WARM_UP = 0.1
"""Part of a training's steps that is exact before what loses something begins, as torch's manual advises for
PowerSGD."""

HELD = "held_"
"""What the names of states begin with that hold gradients, or parameters, of an earlier step: where a checkpoint lacks
them, a group begins anew."""


class Options(BaseModel):
    """The settings of a strategy: subclass it with fields and their docstrings. Unknown settings are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Strategy(ABC):
    """One way to synchronize a group of parameters. Subclass it in a file of its own and list it in `__init__`."""

    name: ClassVar[str]
    """The strategy's name in plans: `all_reduce`."""
    summary: ClassVar[str]
    """What the strategy does, in one line for people."""
    options_type: ClassVar[type[Options]] = Options
    """The class of the strategy's settings."""
    spreads: ClassVar[bool] = False
    """Whether parameters live on one rank each between steps, so that the model cannot run by itself then."""
    rounds_forward: ClassVar[bool] = False
    """Whether `wire` rounds what the forward pass reads as well: rows of a table, or what a layer is given; else
    gradients alone."""
    warms_up: ClassVar[bool] = False
    """Whether it also lowers a group whose `from_step` has not come, as `group.moment.doing == "plain"` says; else a
    plain all-reduce stands in for it."""
    first_step: ClassVar[int] = 0
    """The first step, counted from 0, that it can begin with: 1 where it goes on from what exact steps have left, which
    `from_step` of its groups says how many there are of."""
    trains_apart: ClassVar[bool] = False
    """Whether each rank updates a replica of its own between synchronizations. Then it lowers all steps of a group
    itself, as `group.moment` says: `alone`, or `average` where ranks synchronize behind their own update."""
    only_own_period: ClassVar[bool] = False
    """Whether `every=K` in the name of a plan is for its own groups alone: parameters that it does not apply to are
    then synchronized in each step."""

    def fidelity(self, options: Options) -> Fidelity:
        """The label of what the strategy promises with these options: `exact`, `rounded`, `compressed`, `stale` or
        `local`."""
        return "exact" if getattr(options, "wire", "same") == "same" else "rounded"

    def remainder(self, options: Options) -> Remainder:
        """What becomes of what is not sent, where the strategy compresses with these options."""
        return "kept"

    def keeps_gradients(self, options: Options) -> bool:
        """Whether a step's update may hold what was not sent of the gradients of steps before."""
        return self.fidelity(options) == "compressed" and self.remainder(options) == "kept"

    def moves_frozen(self, options: Options) -> bool:
        """Whether a parameter that is frozen for a while moves all the same, by what is kept of steps before."""
        return self.keeps_gradients(options)

    def exact_steps(self, options: Options, steps: int, context: Context) -> int | None:
        """How many of a training's steps are to be exact before it begins, where it loses something with these options;
        `None` where the training is too short for it."""
        return int(WARM_UP * steps)

    def stages(self, options: Options) -> tuple[int, ...]:
        """How many steps each stage takes, of those that it begins with behind `from_step`, before it does what it does
        from then on; `group.moment.stage` says how many of them are left."""
        return ()

    def also_every(self, options: Options) -> tuple[int, ...]:
        """Of a strategy that trains replicas apart: periods, counted in synchronizations, in the last of which it does
        more than in others."""
        return ()

    def applies(self, member: Member, context: Context) -> str | None:
        """`None` where the parameter can use this strategy, else the reason why not."""
        return None

    def layer(self, member: Member) -> frozenset[str] | None:
        """The names of the parameters that a group holds, and no others, where it holds this one; `None` where it may
        hold any."""
        return None

    @abstractmethod
    def options(self, context: Context) -> Sequence[Options]:
        """The settings worth pricing, the plainest first. Of the 16-bit formats on the wire bfloat16 alone: float16
        takes as long to send, and rounds gradients below 3e-8 to zero."""

    @abstractmethod
    def lower(self, group: Group, options: Options, emit: Emitter) -> None:
        """Emits what the strategy does for one group: from `emit.pack` to `emit.update` or `emit.store`."""
